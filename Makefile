# Every target sets up what it needs: from a plain clone, one command is enough.
#
#   make demo        show what the library does
#   make test        the tests, in a few minutes
#   make check       format, lint, types and code that nothing calls
#   make docs        the documentation as a site, in build/site
#   make test-slow   the slow tests, and a longer search for counterexamples
#   make dist        a wheel and an sdist, in dist
#   make format      rewrite the sources as `make check` wants them
#   make clean       remove what the other targets made, .venv included

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
CONSTRAINTS ?= constraints.txt

# Two workers with one thread each: more threads than cores make small tensors slower, not faster. A third worker on two
# cores gains 3 %.
# A worker is given neighbouring tests, which share fixtures and caches, and takes from the other when it has done its own.
# Bytecode is written even where the environment forbids it: every process that a test starts would compile anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test check docs dist test-slow format clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(PYTEST)

check: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/vulture

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/hatchling build

test-slow: $(INSTALLED)
	HYPOTHESIS_PROFILE=long $(PYTEST) -m "not cuda and not nccl"

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so that an install that was broken off is done again.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

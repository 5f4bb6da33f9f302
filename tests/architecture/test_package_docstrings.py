"""The docstrings of large packages name every file, so that a reader finds each by what it is for."""

import ast
from pathlib import Path

import pytest

import attnspan

ROOT = Path(attnspan.__file__).parent


def unnamed(docstring, package):
    """The modules of a package that a docstring does not name."""
    files = sorted(file.name for file in package.glob("*.py") if file.name != "__init__.py")
    return [name for name in files if f" {name}" not in docstring and f"({name}" not in docstring]


@pytest.mark.parametrize(
    "package", ["attention", "engine", "integrations/huggingface", "kernels", "paged", "parallel", "server"]
)
def test_a_package_names_its_files(package):
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()), clean=False)
    assert unnamed(docstring, ROOT / package) == []


def test_twin_a_file_that_no_docstring_names_is_found():
    assert "session_spec.py" in unnamed("    sdpa.py    a block (handler.py: its calls)", ROOT / "parallel")
    assert "sdpa.py" not in unnamed("    sdpa.py    a block (handler.py: its calls)", ROOT / "parallel")

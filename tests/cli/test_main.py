"""How the command starts: as a module, and where its extra is not installed.

One test starts a Python of its own. The others are forks of one that has imported torch, which takes most of the time.
"""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from attnspan import __version__
from tests.architecture.test_cold_import import interpreter


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "attnspan", "--version"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.fixture(scope="module")
def python():
    with interpreter() as run:
        yield run


def as_a_module(*arguments):
    """What `python -m attnspan` does."""
    argv = ["attnspan", *arguments]
    return f"import runpy\nsys.argv = {argv!r}\nrunpy.run_module('attnspan', run_name='__main__', alter_sys=True)"


def test_a_refusal_shows_no_traceback(python):
    assert python(as_a_module("show", "~")) == (
        2,
        "",
        "attnspan: expected a mask, got the end\n    ~\n     ^\n",
    )


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(python, absent):
    body = f"sys.argv = ['attnspan', {absent!r}]\nimport attnspan.cli.expression\nfrom attnspan.cli import main\nmain()"
    assert python(body) == (
        2,
        "",
        f'attnspan: {absent} is not installed; run pip install "attnspan[cli]"\n',
    )


def test_twin_with_the_extra_the_same_code_runs(python):
    status, said, complaint = python("from attnspan.cli import main\nsys.argv = ['attnspan', '--help']\nmain()")
    assert (status, complaint) == (0, "")
    assert said.startswith("Usage: attnspan ")


@pytest.mark.parametrize("asked", [["-h"], ["plan", "-h"]])
def test_help_has_a_short_name(asked):
    from attnspan.cli.app import app

    said = CliRunner().invoke(app, asked).output
    assert said.startswith("Usage: ")
    assert "-h, --help" in said


def test_any_other_missing_module_is_not_blamed_on_the_extra(python):
    absent = "sys.modules['attnspan.cli.show'] = None\n"
    status, said, complaint = python(absent + "from attnspan.cli import main\nmain()")
    assert (status, said) == (1, "")
    assert "ModuleNotFoundError: import of attnspan.cli.show halted" in complaint

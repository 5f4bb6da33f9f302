"""How the command starts: as a module, and where its extra is not installed."""

import subprocess
import sys

import pytest

from attnspan import __version__
from tests.architecture.test_cold_import import COLD


def python(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, encoding="utf-8", check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_package_runs_as_a_module():
    assert python("-m", "attnspan", "--version") == (0, f"{__version__}\n", "")


def test_a_refusal_shows_no_traceback():
    assert python("-m", "attnspan", "show", "~") == (
        2,
        "",
        "attnspan: expected a mask, got the end\n    ~\n     ^\n",
    )


@pytest.mark.parametrize("absent", ["typer", pytest.param("rich", marks=pytest.mark.slow)])
def test_without_the_extra_one_line_names_it(absent):
    body = "import attnspan.cli.expression\nfrom attnspan.cli import main\nmain()"
    assert python("-c", COLD + body, absent) == (
        2,
        "",
        f'attnspan: {absent} is not installed; run pip install "attnspan[cli]"\n',
    )


def test_twin_with_the_extra_the_same_code_runs():
    status, said, complaint = python(
        "-c", COLD + "from attnspan.cli import main\nsys.argv = ['attnspan', '--help']\nmain()"
    )
    assert (status, complaint) == (0, "")
    assert said.startswith("Usage: attnspan ")


def test_any_other_missing_module_is_not_blamed_on_the_extra():
    absent = "sys.modules['attnspan.cli.show'] = None\n"
    status, said, complaint = python("-c", COLD + absent + "from attnspan.cli import main\nmain()")
    assert (status, said) == (1, "")
    assert "ModuleNotFoundError: import of attnspan.cli.show halted" in complaint

"""`make check` looks for code that nothing calls; the names that it passes over are names that are there."""

import re
import tomllib
from pathlib import Path

import attnspan

ROOT = Path(attnspan.__file__).parent
REPOSITORY = Path(__file__).parents[2]


def absent(names, source):
    return [name for name in names if not re.search(rf"\b{name}\b", source)]


def test_names_that_are_passed_over_are_there():
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["vulture"]
    source = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    assert not absent(settings["ignore_names"], source), "nothing has these names any more: remove them"


def test_twin_a_name_that_is_gone_is_noticed():
    assert absent(["kept", "gone"], "def kept(): ...") == ["gone"]

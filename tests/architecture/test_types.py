"""How many places are left where types are given up: `Any`, and lines that mypy is told to pass over.

Bars, which counts may not pass: a part that needs one more has room for it, and a part that drifts is noticed. What a
comment or a docstring says, and imports, are not counted.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

import attnspan

ROOT = Path(attnspan.__file__).parent
ANY = {"parallel": 40, "integrations": 30}
IGNORES = 25


def anys(source):
    """The lines on which a source says `Any`, once for each time."""
    names = [each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.string == "Any"]
    return [each.start[0] for each in names if not re.match(r"\s*(from|import)\b", each.line)]


def ignores(source):
    return [number for number, line in enumerate(source.splitlines(), 1) if "# type: ignore" in line]


def found(count, part=""):
    files = sorted((ROOT / part).rglob("*.py"))
    return [f"{path.relative_to(ROOT)}:{line}" for path in files for line in count(path.read_text())]


@pytest.mark.parametrize("part", ANY)
def test_few_places_of_a_part_say_any(part):
    places = found(anys, part)
    assert len(places) < ANY[part], f"{len(places)} places, and there may be fewer than {ANY[part]}:\n" + "\n".join(
        places
    )


def test_few_lines_are_passed_over_by_mypy():
    places = found(ignores)
    assert len(places) < IGNORES, f"{len(places)} lines, and there may be fewer than {IGNORES}:\n" + "\n".join(places)


def test_twin_any_is_counted_where_it_is_a_type():
    source = '"""Any text."""\nfrom typing import Any\nx: dict[Any, Any] = {}  # Any\n\ndef f(x: Any): ...\n'
    assert anys(source) == [3, 3, 5]
    assert ignores("x = 1\ny = f()  # type: ignore[misc]\n") == [2]

"""docs/troubleshooting.md has every class of error, each with a cause and a cure."""

import inspect
from pathlib import Path

import pytest

from attnspan import errors

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
RAISED = {
    name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, errors.AttnspanError)
}


def explained(text):
    """Causes and cures by class; a row without a class belongs to that of the row above."""
    found, current = {}, None
    for line in text.splitlines():
        if not line.startswith("| ") or "|---" in line:
            continue
        first, cause, cure = (cell.strip() for cell in line.replace(r"\|", "or").strip("|").split("|"))
        current = first.strip("`") if first.startswith("`") else None if first else current
        if current is not None:
            found.setdefault(current, []).append((cause, cure))
    return found


def test_every_error_has_a_cause_and_a_cure():
    found = explained(PAGE.read_text(encoding="utf-8"))
    assert set(found) == RAISED - {"AttnspanError"}  # the root, of which the page itself speaks
    assert all(cause and cure for rows in found.values() for cause, cure in rows)


@pytest.mark.parametrize(
    ("before", "after"),
    [("| `PlanError` |", "| `Plan` |"), ("| more ranks; `keep_keys=False` |", "| |"), ("| `MaskError` |", "| |")],
)
def test_twin_a_class_or_a_cure_that_is_missing_is_found(monkeypatch, tmp_path, before, after):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8").replace(before, after))
    monkeypatch.setattr(f"{__name__}.PAGE", page)
    with pytest.raises((AssertionError, ValueError)):
        test_every_error_has_a_cause_and_a_cure()

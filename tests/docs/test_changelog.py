"""CHANGELOG.md has the form of Keep a Changelog, and its latest version is the one that the package states."""

import re
from pathlib import Path

import pytest

from attnspan._version import __version__

TEXT = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASE = re.compile(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2})")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def releases(text):
    """(version, date) of each release, as they are listed; the first heading is Unreleased."""
    unreleased, *headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    found = [RELEASE.fullmatch(heading) for heading in headings]
    assert all(found), headings
    return [(tuple(map(int, match.groups()[:3])), match[4]) for match in found]


def test_the_latest_release_is_the_version_of_the_package():
    (latest, _), *_ = releases(TEXT)
    assert ".".join(map(str, latest)) == __version__


def test_releases_are_listed_newest_first_and_by_kinds_of_change():
    listed = releases(TEXT)
    assert listed == sorted(listed, reverse=True)
    assert len({version for version, _ in listed}) == len(listed)
    assert set(re.findall(r"^### (.*)$", TEXT, re.MULTILINE)) <= KINDS


@pytest.mark.parametrize("heading", ["0.4.0 - 2026-11-18", "[0.4] - 2026-11-18", "[0.4.0]"])
def test_twin_a_heading_of_another_form_is_found(heading):
    with pytest.raises(AssertionError):
        releases(f"## [Unreleased]\n## {heading}\n")

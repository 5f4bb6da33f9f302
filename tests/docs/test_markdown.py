"""Markdown can be read in a terminal, and its links lead somewhere.

No line is longer than 120 columns. Rows of tables under benchmarks/results/ are exempt: the benchmarks write them, with
as many columns as they measure.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["", ".github", "docs", "benchmarks", "benchmarks/results", "examples"]
PAGES = sorted(
    path.relative_to(ROOT) for folder in FOLDERS for path in ROOT.joinpath(folder).glob("*.md") if path.is_file()
) + sorted(path.relative_to(ROOT) for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.md"))
COLUMNS = 120
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)


def too_long(page, text):
    """``page:line`` of each line that is too long."""
    measured = page.parts[:2] == ("benchmarks", "results")
    return [
        f"{page}:{number}"
        for number, line in enumerate(text.splitlines(), start=1)
        if len(line) > COLUMNS and not (measured and line.startswith("|"))
    ]


def anchors(text):
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken(page, text):
    """Links of a page that lead to no file, or to no heading of it."""
    found = []
    for link in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = ROOT / page.parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(f"{page}: {link}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_line_is_longer_than_120_columns(page):
    assert too_long(page, (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_headings(page):
    assert broken(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_the_pages_are_found():
    names = {str(page) for page in PAGES}
    assert {"README.md", "docs/models.md", "benchmarks/log.md", "benchmarks/results/balance.md"} <= names


def test_twin_a_long_line_is_found():
    text = f"fine\n{'x' * 121}\n| {'y' * 121} |\n"
    assert too_long(Path("docs/page.md"), text) == ["docs/page.md:2", "docs/page.md:3"]
    assert too_long(Path("benchmarks/results/page.md"), text) == ["benchmarks/results/page.md:2"]


@pytest.mark.parametrize("link", ["docs/nowhere.md", "README.md#nowhere", "#nowhere"])
def test_twin_a_broken_link_is_found(link):
    assert broken(Path("README.md"), f"[here]({link})") == [f"README.md: {link}"]

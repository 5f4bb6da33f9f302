"""The API reference: its code is run, and every public name has an example."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import attnspan as span
from tests.docs.pages import DOCS, blocks, sources

PAGES = sorted(page.name for page in (DOCS / "api").glob("*.md"))
WITH_CODE = ["generation.md", "huggingface.md", "layouts.md", "recurrence.md", "sessions.md", "testing.md"]


def names_on(page):
    """The public names of a page, as objects by their full name."""
    found = re.findall(r"^::: (\S+)$", (DOCS / "api" / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {name: getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in found}


def examples_in(documented):
    """The examples in the docstrings of an object and its methods."""
    parts = [documented, *(vars(documented).values() if inspect.isclass(documented) else ())]
    texts = [inspect.getdoc(part) or "" for part in parts if callable(part) or isinstance(part, property)]
    doctests = [line for text in texts for line in text.splitlines() if line.startswith((">>> ", "... "))]
    return "\n".join(doctests + [text.partition("::\n")[2] for text in texts])


def linked(page):
    """The example programs that a page links, and the paragraphs that say what they show."""
    paragraphs = (DOCS / "api" / page).read_text(encoding="utf-8").split("\n\n")
    found = [(text, re.findall(r"\((\S+\.py)\)", text)) for text in paragraphs]
    programs = [(DOCS / "api" / link).read_text(encoding="utf-8") for _, links in found for link in links]
    return "\n".join([text for text, links in found if links] + programs)


def without_example(page, names, code):
    """The names that no code of the page speaks of."""
    code += linked(page) + "\n".join(map(examples_in, names.values()))
    # What a class is for, the class of a result among it, is shown where it is used or named in a comment.
    return [name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", code)]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, capsys):
    blocks(f"api/{page}")
    capsys.readouterr()


@pytest.mark.parametrize("page", [page for page in PAGES if page != "errors.md"])
def test_every_public_name_has_an_example(page):
    names = {name: each for name, each in names_on(page).items() if not name.endswith("Error")}
    assert without_example(page, names, "\n".join(sources(f"api/{page}"))) == []


def test_every_error_has_its_cause_and_cure():
    text = Path(DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert [name for name in names_on("errors.md") if f"`{name.rpartition('.')[2]}`" not in text] == []


def test_twin_a_name_without_an_example_is_found():
    assert without_example("masks.md", {"attnspan.Plan": span.Plan, "attnspan.PageError": span.PageError}, "") == [
        "attnspan.PageError"
    ]

"""The site has every page and every public name. `make docs` builds it, and fails where a link leads nowhere."""

import importlib.util
import re
from importlib import import_module
from pathlib import Path

import griffe
import pytest
import yaml

import attnspan

ROOT = Path(__file__).parents[2]
DOCUMENTED = set(re.findall(r"^::: ([\w.]+)$", "\n".join(p.read_text() for p in ROOT.glob("docs/api/*.md")), re.M))
MODULES = ["attnspan.engine", "attnspan.integrations.huggingface", "attnspan.server", "attnspan.testing"]
INSIDE = {"attnspan.engine.EngineConfig", "attnspan.engine.LLMEngine"}
"""What `attnspan.Engine` is made of."""


def public(module):
    """The names of a module that users call, by where they find them: at the top if they are there."""
    names = {f"{module}.{name}" for name in import_module(module).__all__}
    return {name for name in names if name.rpartition(".")[2] not in attnspan.__all__} - INSIDE


def in_nav(entry):
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return {entry}
    return set().union(*(in_nav(each) for each in (entry.values() if isinstance(entry, dict) else entry)))


def test_the_reference_has_every_public_name():
    top = {f"attnspan.{name}" for name in attnspan.__all__ if name not in ("__version__", "testing")}
    assert top.union(*map(public, MODULES)) == DOCUMENTED


def test_twin_a_name_that_is_missing_is_noticed(monkeypatch):
    monkeypatch.setattr(attnspan, "__all__", [*attnspan.__all__, "Forgotten"])
    with pytest.raises(AssertionError, match="Forgotten"):
        test_the_reference_has_every_public_name()


SILENT = """
class Base:
    'A base.'

    def said(self):
        'By the base.'

    def unsaid(self): ...


class Public(Base):
    'A class.'

    def said(self): ...

    @property
    def unsaid(self): ...

    def _private(self): ...


def function(): ...
"""


def test_the_build_warns_of_public_names_without_documentation(tmp_path, caplog):
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    (tmp_path / "silent.py").write_text(SILENT)
    package = griffe.load("silent", search_paths=[tmp_path])
    assert hooks.undocumented(package["Public"]) == ["silent.Public.unsaid"]
    assert hooks.undocumented(package["Base"]) == ["silent.Base.unsaid"]
    assert hooks.undocumented(package["function"]) == ["silent.function"]
    library = griffe.load("attnspan", search_paths=[ROOT / "src"], allow_inspection=False)
    extension = hooks.Docstrings()
    extension.on_package(pkg=library)
    assert caplog.messages == []
    library["ContextParallel"].final_target.members["report"].docstring = None
    extension.on_package(pkg=library)
    assert caplog.messages == ["attnspan.ContextParallel.report has no documentation"]


def test_every_page_is_in_the_navigation():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = {path.relative_to(ROOT).as_posix() for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern)}
    pages |= {path.relative_to(ROOT).with_suffix(".md").as_posix() for path in ROOT.glob("docs/notebooks/*.ipynb")}
    assert in_nav(nav) - {"examples/index.md"} == pages  # which docs/site.py writes

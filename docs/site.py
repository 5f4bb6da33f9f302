"""How the repository becomes a site: what mkdocs.yml hooks in.

Pages keep their places, README.md at the top and the rest in docs/, examples/ and benchmarks/, so that one link leads
somewhere in a clone and on the site. Programs that pages link to are pages too.
"""

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import griffe
from griffe import AliasResolutionError, CyclicAliasError
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ["*.md", "docs/*.md", "docs/api/*.md", "benchmarks/*.md", "benchmarks/results/*.md"]
PICTURES = ["docs/*.svg", "docs/*.css"]
DOCUMENTED = re.compile(r"^::: ([\w.]+)$", re.M)
LINK = re.compile(r"(?<=\]\()([^)\s:#]+\.py)(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site, at their places in the repository."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [_file(path, config) for pattern in PAGES + PICTURES for path in sorted(ROOT.glob(pattern))]
    programs = {target for file in ours for target in _programs(file)}
    listing = [_program(path, config) for path in sorted(programs | set(ROOT.glob("examples/*.py")))]
    notebooks = [_notebook(path, config) for path in sorted(ROOT.glob("docs/notebooks/*.ipynb"))]
    return Files([*theme, *ours, *listing, *notebooks, _index(config)])


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to programs lead to the pages that show them."""
    markdown = re.sub(r"(?<=\]\()examples/(?=\))", "examples/index.md", markdown)
    markdown = re.sub(r"\bno \[(\d+)\]", r"no \\[\1\\]", markdown)  # the reasons of docs/support.md are no links
    markdown = markdown.replace(".ipynb)", ".md)")
    return LINK.sub(lambda found: f"{found[1]}.md", markdown)


def _file(path: Path, config: MkDocsConfig) -> File:
    return File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))


def _programs(file: File) -> set[Path]:
    """The programs that a page links to."""
    if not file.src_uri.endswith(".md"):
        return set()
    here = (ROOT / file.src_uri).parent
    return {(here / link).resolve() for link in LINK.findall(file.content_string)}


def _program(path: Path, config: MkDocsConfig) -> File:
    name = path.relative_to(ROOT).as_posix()
    return File.generated(config, f"{name}.md", content=f"# {name}\n\n```python\n{path.read_text('utf-8')}```\n")


def _notebook(path: Path, config: MkDocsConfig) -> File:
    """A notebook with its outputs, as they are committed."""
    found = importlib.util.spec_from_file_location("notebook", ROOT / "docs/notebook.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    name = path.relative_to(ROOT).with_suffix(".md").as_posix()
    return File.generated(config, name, content=module.as_page(path))


def _index(config: MkDocsConfig) -> File:
    """The examples, each with the first line of its docstring."""
    lines = ["# Examples", "", "Short programs that run on a laptop.", "", "| program | what it shows |", "|---|---|"]
    for path in sorted(ROOT.glob("examples/[0-9]*.py")):
        first = path.read_text("utf-8").split('"""')[1].strip().splitlines()[0]
        lines.append(f"| [{path.stem}]({path.name}.md) | {first} |")
    return File.generated(config, "examples/index.md", content="\n".join(lines) + "\n")


class Docstrings(griffe.Extension):
    """Docstrings as Markdown: interactive sessions, and what follows `::`, become blocks of code.

    A public name without one is warned of, which a strict build does not pass.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Warn of public names on the pages that say nothing."""
        pages = "\n".join(page.read_text("utf-8") for page in sorted(ROOT.glob("docs/api/*.md")))
        for name in DOCUMENTED.findall(pages):
            if name.startswith(f"{pkg.path}."):
                for silent in undocumented(pkg[name.removeprefix(f"{pkg.path}.")]):
                    logging.getLogger("mkdocs.site").warning("%s has no documentation", silent)

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def undocumented(found: griffe.Object | griffe.Alias) -> list[str]:
    """A function or class, and its public methods, of those that have no docstring here or in a base class."""
    silent = [] if found.has_docstring else [found.path]
    if not found.is_class:
        return silent
    bases = [found, *_bases(found)]
    for name, member in found.members.items():
        method = member.is_function or "property" in member.labels
        if method and not name.startswith("_") and not any(_says(base, name) for base in bases):
            silent.append(f"{found.path}.{name}")
    return silent


def _bases(found: griffe.Object | griffe.Alias) -> list[Any]:
    try:
        return list(found.mro())
    except (AliasResolutionError, CyclicAliasError, ValueError):
        return []


def _says(found: Any, name: str) -> bool:
    return name in found.members and bool(found.members[name].has_docstring)


def as_markdown(text: str) -> str:
    """A docstring of this library as Markdown.

    >>> print(as_markdown("It adds.\\n\\n>>> 1 + 1\\n2\\n\\nLike this::\\n\\n    add(1)\\n\\nEnd."))
    It adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    Like this:
    <BLANKLINE>
    ```python
    add(1)
    ```
    <BLANKLINE>
    End.
    """
    blocks: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith(">>>"):
            blocks.append(f"```pycon\n{block}\n```")
        elif blocks and blocks[-1].endswith("::"):
            blocks[-1] = blocks[-1][:-1]
            blocks.append("```python\n" + "\n".join(line[4:] for line in block.splitlines()) + "\n```")
        else:
            blocks.append(block.replace("``", "`"))
    return "\n\n".join(blocks)

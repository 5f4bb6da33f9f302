"""How the repository becomes a site: what mkdocs.yml hooks in.

Pages keep their places, README.md at the top and the rest in docs/, examples/ and benchmarks/, so that one link leads
somewhere in a clone and on the site. Programs that pages link to are pages too.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ["*.md", "docs/*.md", "docs/api/*.md", "benchmarks/*.md", "benchmarks/results/*.md"]
PICTURES = ["docs/*.svg"]
LINK = re.compile(r"(?<=\]\()([^)\s:#]+\.py)(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site, at their places in the repository."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [_file(path, config) for pattern in PAGES + PICTURES for path in sorted(ROOT.glob(pattern))]
    programs = {target for file in ours for target in _programs(file)}
    listing = [_program(path, config) for path in sorted(programs | set(ROOT.glob("examples/*.py")))]
    return Files([*theme, *ours, *listing, _index(config)])


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to programs lead to the pages that show them."""
    markdown = re.sub(r"(?<=\]\()examples/(?=\))", "examples/index.md", markdown)
    markdown = re.sub(r"\bno \[(\d+)\]", r"no \\[\1\\]", markdown)  # the reasons of docs/support.md are no links
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


def _index(config: MkDocsConfig) -> File:
    """The examples, each with the first line of its docstring."""
    lines = ["# Examples", "", "Short programs that run on a laptop.", "", "| program | what it shows |", "|---|---|"]
    for path in sorted(ROOT.glob("examples/[0-9]*.py")):
        first = path.read_text("utf-8").split('"""')[1].strip().splitlines()[0]
        lines.append(f"| [{path.stem}]({path.name}.md) | {first} |")
    return File.generated(config, "examples/index.md", content="\n".join(lines) + "\n")


class Docstrings(griffe.Extension):
    """Docstrings as Markdown: interactive sessions, and what follows `::`, become blocks of code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


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

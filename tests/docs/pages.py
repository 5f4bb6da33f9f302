"""The code of a page, run: what its Python blocks define, in their order."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, **names):
    """The names that the blocks of a page define; `names` are there before."""
    for block in sources(page):
        exec(compile(block, page, "exec"), names)
    return names


def sources(page):
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)

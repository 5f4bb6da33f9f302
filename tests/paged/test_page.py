"""docs/paged.md tells the truth: its blocks are run as they stand, in order."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "paged.md"


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["allocator"].length(names["a"]) == 101
    names["allocator"].check()

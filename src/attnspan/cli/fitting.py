"""Lines that fit a narrow terminal: what is too long goes on below, indented, and is cut between columns or words.

Nothing is changed where output goes into a file or a pipe.

>>> print(fit("needed(2)  Balanced  43.45 ms  chosen", 26))
needed(2)  Balanced
    43.45 ms  chosen
"""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

import typer

INDENT = "    "


def say(text: str, *, err: bool = False) -> None:
    """Print for people."""
    typer.echo(fit(text, columns_of(sys.stderr if err else sys.stdout)), err=err)


def columns_of(stream: TextIO) -> int:
    """How wide a terminal is; 0 for what is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0


def fit(text: str, columns: int) -> str:
    """The same in lines of at most so many columns; 0 is as many as there are."""
    if columns <= 2 * len(INDENT):
        return text
    return "\n".join(part for line in text.split("\n") for part in _parts(line, columns))


def _parts(line: str, columns: int) -> list[str]:
    parts, indent = [], ""
    while len(indent) + len(line) > columns:
        room = columns - len(indent)
        cut = max(line.rfind("  ", 1, room + 1), 0) or max(line.rfind(" ", 1, room + 1), 0)
        if not cut or not line[:cut].strip():
            break  # one long word, such as a path
        parts.append(indent + line[:cut].rstrip())
        line, indent = line[cut:].lstrip(), INDENT
    return [*parts, indent + line]

"""What every result file begins with, prose no wider than 120 columns, and a progress bar for long runs."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def header(title: str, command: str) -> list[str]:
    """Title, date, hardware, versions and the command that made a result."""
    return [
        f"# {title}",
        "",
        f"{datetime.date.today()}; {hardware()}; torch {torch.__version__}, Python {platform.python_version()}.",
        f"Command: `{command}`",
        "",
    ]


def command(program: str) -> str:
    """How a program was called, except where its result goes."""
    given = [each for n, each in enumerate(sys.argv[1:]) if "--out" not in (each, sys.argv[n])]
    return shlex.join([*program.split(), *given])


def folded(text: str, columns: int = 120) -> str:
    """A page whose lines are no longer than so many columns, except rows of tables, which cannot be folded.

    >>> folded("- one two three\\n| a long row of a table |", columns=10)
    '- one two\\n  three\\n| a long row of a table |'
    """

    def lines(line: str) -> list[str]:
        if len(line) <= columns or line.startswith("|"):
            return [line]
        inside = "  " if line.startswith("- ") else ""
        return textwrap.wrap(line, columns, subsequent_indent=inside, break_long_words=False, break_on_hyphens=False)

    return "\n".join(each for line in text.split("\n") for each in lines(line))


def hardware() -> str:
    """The GPU if there is one, else the processor and the number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a bar on the terminal where rich is installed."""
    try:
        from rich.progress import track
    except ImportError:
        return items
    return track(items, description=what, transient=True)

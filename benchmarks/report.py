"""What every result file begins with, and a progress bar for long runs."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
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
    """How a program was called, but for where its result goes."""
    given = [each for n, each in enumerate(sys.argv[1:]) if "--out" not in (each, sys.argv[n])]
    return shlex.join([*program.split(), *given])


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

"""Where tables are kept, and which one speaks for a device.

In this order::

    ATTNSPAN_TUNING=FILE    that file; refused if it is missing, damaged, or of another device or torch
    ATTNSPAN_TUNING=none    no table at all, and no link is measured: the presets and the registry's order
    the cache               what `attnspan tune` wrote here for this device and torch, under $XDG_CACHE_HOME/attnspan
    the package             tables that ship with it, for exactly the devices that they were measured on

A name of a device holds all that rates depend on: of a CPU also the number of threads. What is read is kept for the
life of the process, so that all layers of a model see the same table.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from importlib import resources
from pathlib import Path

import torch

from attnspan.errors import TuningError
from attnspan.tuning.table import AGAIN, Table

VARIABLE = "ATTNSPAN_TUNING"
NONE = "none"


def table_for(device: torch.device) -> Table | None:
    """The table that speaks for a device, or None."""
    return _table_for(os.environ.get(VARIABLE, ""), os.environ.get("XDG_CACHE_HOME", ""), device_name(device))


def is_disabled() -> bool:
    """Whether nothing that was measured is to be used."""
    return os.environ.get(VARIABLE, "") == NONE


def cache_path(device: str) -> Path:
    """Where the table of a device and this torch is kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnspan" / "tuning"
    return folder / f"{_plain(device)}-torch-{_plain(torch.__version__)}.json"


def read(path: Path | str, device: str) -> Table:
    """The table in a file; refused if it is not one, or not of this device and this torch."""
    table = _parsed(Path(path))
    for what, has, here in (("device", table.device, device), ("torch", table.torch, torch.__version__)):
        if has != here:
            raise TuningError(f"{path} was measured with {what} {has!r}, this is {here!r}; {AGAIN}")
    return table


def write(table: Table, path: Path | str) -> None:
    """Keep a table; whoever reads the file sees the old one or the new one, never half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    data = table.data()
    rates = ",\n".join(json.dumps(rate) for rate in data.pop("rates"))  # a measurement per line
    partial.write_text(f'{json.dumps(data)[:-1]}, "rates": [\n{rates}\n]}}\n', encoding="utf-8")
    partial.replace(path)
    _table_for.cache_clear()


def shipped() -> list[Table]:
    """The tables that came with the package."""
    folder = resources.files("attnspan.tuning")
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".json")), key=lambda each: each.name)
    return [Table.of(json.loads(each.read_text(encoding="utf-8")), each.name) for each in files]


def device_name(device: torch.device) -> str:
    """What rates depend on.

    >>> device_name(torch.device("cpu")).endswith("threads") or torch.get_num_threads() == 1
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} {'thread' if threads == 1 else 'threads'}"


@functools.lru_cache(maxsize=64)
def _table_for(asked: str, cache: str, device: str) -> Table | None:
    if asked == NONE:
        return None
    if asked:
        return read(asked, device)
    path = cache_path(device)
    if path.exists():
        return read(path, device)
    return next((table for table in shipped() if table.device == device), None)


def _parsed(path: Path) -> Table:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as wrong:
        raise TuningError(f"{path} cannot be read: {wrong.strerror or wrong}; {AGAIN}, or unset {VARIABLE}") from wrong
    except ValueError as wrong:
        raise TuningError(f"{path} is damaged: {wrong}; {AGAIN}") from wrong
    return Table.of(data, str(path))


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    named = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _plain(name: str) -> str:
    """A name for files.

    >>> _plain("NVIDIA H200")
    'NVIDIA_H200'
    """
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", name)

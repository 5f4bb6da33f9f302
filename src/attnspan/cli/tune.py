"""`attnspan tune`: measure this device's kernels and the links between ranks, and save the table.

::

    $ attnspan tune                                     one device
    $ torchrun --nproc-per-node 8 -m attnspan tune      and the links between its ranks

The table is saved where `kernel="auto"` and `strategy="auto"` look for it (tuning/store.py), or written to --out, for
ATTNSPAN_TUNING=FILE. --show prints the table in use for this device, and measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from attnspan.cli import options
from attnspan.cli.fitting import say
from attnspan.cli.tokens import optional_size, size
from attnspan.errors import TuningError
from attnspan.measure import Ranks, Tuning
from attnspan.measure import tune as measure
from attnspan.transports import Transport
from attnspan.tuning import Table, cache_path, device_name, table_for, write

T = TypeVar("T")


def tune(
    ranks: options.RanksOption = None,
    device: options.DeviceOption = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="T", help="bf16, fp32, ... Repeatable.")] = None,
    head_dim: Annotated[list[str] | None, typer.Option(metavar="N", help="Head dim. Repeatable.")] = None,
    heads: Annotated[str | None, typer.Option(metavar="N", help="Query heads.")] = None,
    kv_heads: options.KvHeadsOption = None,
    kernel: Annotated[list[str] | None, typer.Option(metavar="K", help="Only this kernel. Repeatable.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--size", metavar="N", help="Tokens of a tile. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file. Default: the cache.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the table in use; measure nothing.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Measure kernels and links of this machine.

    The table is saved where kernel="auto" and strategy="auto" look for it.
    """
    asked = Ranks(optional_size("--ranks", ranks), device)
    here = torch.device(asked.device or "cpu")
    if show:
        table = table_for(here)
        if table is None:
            raise TuningError(f"no tuning table for {device_name(here)}; run attnspan tune")
        if as_json:
            typer.echo(json.dumps(table.data(), indent=1))
        else:
            say(text(table))
        return
    wanted: dict[str, Any] = {
        "dtypes": tuple(dtype or ()),
        "head_dims": tuple(size(each, "--head-dim") for each in head_dim or ()),
        "heads": optional_size("--heads", heads),
        "kv_heads": optional_size("--kv-heads", kv_heads),
        "kernels": tuple(kernel or ()),
        "sizes": tuple(size(each, "--size") for each in sizes or ()),
    }
    Tuning.of(here, **wanted)  # refused here, once, rather than by every rank
    data = asked.run(partial(on_rank, wanted))
    if data is None:
        return
    table = Table.of(data, "what was measured")
    path = out or cache_path(table.device)
    write(table, path)
    typer.echo(json.dumps(data, indent=1) if as_json else f"{text(table)}\nsaved to {path}")


def on_rank(wanted: dict[str, Any], transport: Transport) -> dict[str, Any]:
    """One rank's part: all measure together."""
    asked = Tuning.of(transport.device, **wanted)
    return measure(asked, transport, partial(bar, transport.rank, "tiles")).data()


def text(table: Table) -> str:
    """The table for people."""
    sides = (("inside a host", table.inside), ("between hosts", table.between))
    links = [f"link {name}: {link}" for name, link in sides if link is not None]
    memory = f"memory: {table.memory_bandwidth / 1e9:.3g} GB/s; a call: {table.launch[0] * 1e6:.0f} µs"
    return "\n".join([table.explain(), memory, *links])


def bar(rank: int, what: str, items: Sequence[T]) -> Iterator[T]:
    """The items, with a bar on rank 0's terminal."""
    if rank:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(items, description=what, transient=True, console=console, disable=not console.is_terminal)

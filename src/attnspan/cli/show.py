"""`attnspan show`: a mask drawn in the terminal, each row labelled with the rank that owns its queries.

::

    $ attnspan show "causal & docs(3, 5)" --layout head_tail --ranks 2
    causal & documents(3, 5)
    r0 | █ · · · · · · ·
    r0 | █ █ · · · · · ·
    r1 | █ █ █ · · · · ·
    r1 | · · · █ · · · ·
    r1 | · · · █ █ · · ·
    r1 | · · · █ █ █ · ·
    r0 | · · · █ █ █ █ ·
    r0 | · · · █ █ █ █ █
    21 of 64 pairs allowed (32.8%), in 2 bands
    HeadTail over 2 ranks: imbalance 1.143
    rank 0: 4 tokens, 12 pairs, [0, 2) [6, 8)
    rank 1: 4 tokens, 9 pairs, [2, 6)

What is shown is decided first, as data (`View`); printing it as text or as JSON is a short loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from attnspan.cli import options
from attnspan.cli.expression import parse, write
from attnspan.cli.layout import CHUNKED, LAYOUTS, LayoutRequest, named
from attnspan.cli.tokens import optional_size, shortened
from attnspan.errors import LayoutError
from attnspan.inspector.page import Drawn, write_page
from attnspan.layouts import Layout, Run
from attnspan.layouts.drawing import cells_of, listed
from attnspan.layouts.layout import imbalance
from attnspan.masks import Band, Mask
from attnspan.masks.algebra import area
from attnspan.masks.band import ceil_div
from attnspan.masks.drawing import CELLS

COLOURS = ["cyan", "yellow", "magenta", "green", "blue", "red"]
MAX_RANKS, MAX_RUNS = 32, 4
"""The most ranks, and runs of a rank, that the text lists; JSON has them all."""


def show(
    mask: options.MaskText,
    seq_len: Annotated[
        str | None, typer.Option(metavar="N", help="Queries. Default: the mask's own length, or 32.")
    ] = None,
    kv_len: Annotated[str | None, typer.Option(metavar="N", help="Keys. Default: as many as queries.")] = None,
    row: Annotated[int, typer.Option(metavar="R", help="Batch row to draw, if rows differ.")] = 0,
    layout: Annotated[
        str | None, typer.Option(metavar="L", help=f"Label rows with their owners: {', '.join(LAYOUTS)}.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(metavar="R", help="Number of ranks; needs --layout.")] = None,
    chunk: Annotated[str | None, typer.Option(metavar="N", help=f"Chunk size of {', '.join(CHUNKED)}.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page for a browser: zoom, all layouts, timelines of all ranks."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Draw a mask, and which rank owns each row."""
    queries, keys = optional_size("--seq-len", seq_len), optional_size("--kv-len", kv_len)
    parsed = parse(mask, seq_len=queries if keys is None else None)
    queries = queries or parsed.natural_len or 32
    share = optional_size("--ranks", ranks), optional_size("--chunk", chunk)
    view = View(parsed, queries, keys or queries, row, dealt(parsed, queries, layout, *share))
    if html is not None:
        print(f"saved to {write_page(drawn(view, *share), html)}")
    elif as_json:
        print(json.dumps(view.data(), indent=2))
    else:
        # Lines are as long as they are: a drawing must not be folded where output is no terminal.
        Console().print(*view.lines(), sep="\n", soft_wrap=True, highlight=False)


def dealt(mask: Mask, seq_len: int, name: str | None, ranks: int | None, chunk: int | None) -> Layout | None:
    """The layout that was asked for, if one was."""
    if name is not None and ranks is not None:
        return named(name, LayoutRequest(mask, seq_len, ranks, chunk))
    given = {"--layout": name, "--ranks": ranks, "--chunk": chunk}
    for option in (option for option, value in given.items() if value is not None):
        partner = "--ranks" if option == "--layout" else "--layout"
        raise LayoutError(f"{option} needs {partner}, got none; as in --layout head_tail --ranks 4")
    return None


def drawn(view: View, ranks: int | None, chunk: int | None) -> Drawn:
    """What the page shows: the layout that was asked for first, then all others that the mask can have."""
    if view.q_len != view.kv_len:
        raise LayoutError(f"--html draws a mask of as many keys as queries, got {view.kv_len} and {view.q_len}")
    found: dict[str, Layout] = {} if view.layout is None else {type(view.layout).__name__: view.layout}
    ranks = ranks or 4
    for name in LAYOUTS:
        with suppress(LayoutError):
            layout = named(name, LayoutRequest(view.mask, view.q_len, ranks, chunk if name in CHUNKED else None))
            layout.shards(view.q_len, min(view.row, layout.rows - 1))
            found.setdefault(type(layout).__name__, layout)
    return Drawn(view.mask, view.q_len, found, view.row)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank owns of the drawn batch row."""

    rank: int
    tokens: int
    work: int
    runs: tuple[Run, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.tokens} tokens, {self.work} pairs, {listed(self.runs, MAX_RUNS, what='')}"


@dataclass(frozen=True, slots=True)
class View:
    """One batch row of a mask over its lengths, and the layout of its queries."""

    mask: Mask
    q_len: int
    kv_len: int
    row: int
    layout: Layout | None

    @property
    def bands(self) -> tuple[Band, ...]:
        return self.mask.bands(self.q_len, self.kv_len, self.row)

    @property
    def work(self) -> int:
        return area(self.bands)

    @property
    def density(self) -> float:
        return self.work / (self.q_len * self.kv_len)

    def shares(self, layout: Layout) -> list[Share]:
        """What each rank owns of this row."""
        works = layout.works(self.bands, self.q_len, self.row)
        shards = layout.shards(self.q_len, self.row)
        tokens = layout.tokens(self.q_len, self.row)
        return [Share(rank, *share) for rank, share in enumerate(zip(tokens, works, shards, strict=True))]

    def batch_imbalance(self, layout: Layout) -> float:
        """The imbalance over all batch rows that the mask tells apart."""
        rows = range(max(self.mask.rows, layout.rows))
        works = [layout.works(self.mask.bands(self.q_len, self.kv_len, row), self.q_len, row) for row in rows]
        return imbalance([sum(each) for each in zip(*works, strict=True)])

    # ---- for machines --------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        return {
            "mask": write(self.mask),
            "seq_len": self.q_len,
            "kv_len": self.kv_len,
            "row": self.row,
            "rows": self.mask.rows,
            "work": self.work,
            "density": self.density,
            "bands": [band._asdict() for band in self.bands],
            "layout": None if self.layout is None else self.layout_data(self.layout),
        }

    def layout_data(self, layout: Layout) -> dict[str, Any]:
        shares = self.shares(layout)
        return {
            "name": type(layout).__name__,
            "chunk": chunk_of(layout),
            "ranks": layout.ranks,
            "imbalance": imbalance([share.work for share in shares]),
            "batch_imbalance": self.batch_imbalance(layout),
            "tokens": [share.tokens for share in shares],
            "work": [share.work for share in shares],
            "runs": [[run._asdict() for run in share.runs] for share in shares],
        }

    # ---- for people ----------------------------------------------------------------------------------------

    def lines(self) -> Iterator[Text]:
        """The expression, the drawing, what it amounts to."""
        batch = f", batch row {self.row} of {self.mask.rows}" if self.mask.rows > 1 else ""
        yield Text(shortened(write(self.mask), 200) + batch)
        drawing = self.mask.draw(self.q_len, self.kv_len, self.row).splitlines()
        yield from map(Text, drawing) if self.layout is None else self.owned(drawing, self.layout)
        pairs, bands = self.q_len * self.kv_len, len(self.bands)
        yield Text(f"{self.work} of {pairs} pairs allowed ({self.density:.1%}), in {counted(bands, 'band')}")
        if self.layout is not None:
            yield from self.summary(self.layout)

    def owned(self, drawing: list[str], layout: Layout) -> Iterator[Text]:
        """The drawing, its lines labelled with their owners and coloured where there is one."""
        owners = line_owners(layout.shards(self.q_len, self.row), ceil_div(self.q_len, CELLS), len(drawing))
        labels = [f"r{ranks[0]}" + (f"+{len(ranks) - 1}" if ranks[1:] else "") for ranks in owners]
        width = max(map(len, labels))
        for label, ranks, line in zip(labels, owners, drawing, strict=True):
            yield Text(f"{label:{width}} | {line}", style="" if ranks[1:] else COLOURS[ranks[0] % len(COLOURS)])
        if any(ranks[1:] for ranks in owners):
            yield Text("(r1+2: a line whose queries lie on rank 1 and 2 others)")

    def summary(self, layout: Layout) -> Iterator[Text]:
        shares = self.shares(layout)
        chunk = chunk_of(layout)
        name = type(layout).__name__ + ("" if chunk is None else f" with chunks of {chunk}")
        even = f"imbalance {imbalance([share.work for share in shares]):.3f}"
        batch = f" ({self.batch_imbalance(layout):.3f} over the batch)" if self.mask.rows > 1 else ""
        yield Text(f"{name} over {counted(layout.ranks, 'rank')}: {even}{batch}")
        for share in shares[:MAX_RANKS]:
            yield Text(str(share), style=COLOURS[share.rank % len(COLOURS)])
        if shares[MAX_RANKS:]:
            yield Text(f"... {len(shares) - MAX_RANKS} more ranks; --json lists them all")


def line_owners(shards: tuple[tuple[Run, ...], ...], height: int, lines: int) -> list[list[int]]:
    """For each line of `height` rows, the ranks that own any of them.

    >>> line_owners(((Run(0, 3),), (Run(3, 6),)), height=2, lines=3)
    [[0], [0, 1], [1]]
    """
    owners: list[list[int]] = [[] for _ in range(lines)]
    for rank, runs in enumerate(shards):
        for line in {line for run in runs for line in cells_of(run, height)}:
            owners[line].append(rank)
    return owners


def chunk_of(layout: Layout) -> int | None:
    """The smallest piece that a layout deals, if it has such a thing."""
    return getattr(layout, "chunk", getattr(layout, "block", None))


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "band"), counted(2, "band")
    ('1 band', '2 bands')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")

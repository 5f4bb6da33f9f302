"""A picture of a mask, each row of queries in the colour of the rank that owns it.

The sequence is looked at in at most `MAX_PIXELS` rows and columns, one position each, so that a picture of a million
tokens costs what one of a thousand does. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

import torch

from attnspan.layouts import Layout
from attnspan.masks import Mask
from attnspan.masks.band import Band

MAX_PIXELS = 768
MAX_NAMED = 16
"""Ranks in the legend."""


def picture(mask: Mask, layout: Layout, seq_len: int, path: str | Path, *, row: int = 0) -> Path:
    """Write a picture of one batch row; the kind of file follows from the name."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    positions = torch.arange(0, seq_len, -(-seq_len // MAX_PIXELS), device="cpu")
    owners = _owners(layout, seq_len, row)[positions]
    allowed = _allowed(mask.bands(seq_len, row=row), positions)
    palette = matplotlib.colormaps["tab10" if layout.ranks <= 10 else "tab20"]
    colours = [palette(rank % 20) for rank in range(layout.ranks)]
    image = torch.where(
        allowed[..., None], torch.tensor(colours, device="cpu")[owners][:, None, :], torch.ones(4, device="cpu")
    )

    works = layout.work_per_rank(mask, seq_len)
    figure = Figure(figsize=(8.5, 6.5), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(image.numpy(), extent=(0, seq_len, seq_len, 0), interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title=f"{seq_len} tokens on {layout.ranks} ranks, {type(layout).__name__}")
    parts = [f"rank {rank}: {work / max(1, sum(works)):.1%}" for rank, work in enumerate(works[:MAX_NAMED])]
    handles = [Patch(color=colour, label=part) for part, colour in zip(parts, colours, strict=False)]
    figure.legend(handles=handles, title="work", loc="outside right upper")
    figure.savefig(path, dpi=110)
    return Path(path)


def _owners(layout: Layout, seq_len: int, row: int) -> torch.Tensor:
    shards = layout.shards(seq_len, row)
    owners = torch.empty(seq_len, dtype=torch.int64, device="cpu")
    for rank, runs in enumerate(shards):
        for run in runs:
            owners[run.start : run.stop : run.step] = rank
    return owners


def _allowed(bands: tuple[Band, ...], positions: torch.Tensor) -> torch.Tensor:
    """Which pairs of the positions are allowed.

    >>> _allowed((Band(0, 4, 0, 4, -3, 0),), torch.tensor([0, 2])).tolist()
    [[True, False], [True, True]]
    """
    query, key = positions[:, None], positions[None, :]
    allowed = torch.zeros(len(positions), len(positions), dtype=torch.bool, device="cpu")
    for q0, q1, k0, k1, lo, hi in bands:
        inside = (q0 <= query) & (query < q1) & (k0 <= key) & (key < k1)
        allowed |= inside & (lo <= key - query) & (key - query <= hi)
    return allowed

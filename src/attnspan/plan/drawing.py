"""Plans as text: a table of ranks, and the same in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attnspan.layouts.run import tokens_in
from attnspan.masks.drawing import shortened
from attnspan.plan.plan import Plan

MAX_RANKS = 16
"""The most ranks that are listed; of more, the first and the last."""


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Columns of text, right-aligned except the first.

    >>> print(table(["who", "n"], [["a", 1], ["bb", 22]]))
    who   n
    a     1
    bb   22
    """
    cells = [list(head), *([str(cell) for cell in line] for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    )


def in_seconds(seconds: float) -> str:
    """A time for people.

    >>> in_seconds(4e-6), in_seconds(0.00123), in_seconds(12.0)
    ('4.0 µs', '1.23 ms', '12.00 s')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def in_bytes(size: float) -> str:
    """A size for people.

    >>> in_bytes(4096), in_bytes(3.2e9)
    ('4.1 KB', '3.2 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def draw(plan: Plan) -> str:
    """Who does what."""
    total = sum(plan.group_works()) or 1
    lines = [_line(plan, rank, total) for rank in _listed(plan.ranks)]
    head = ["rank", "tokens", "runs", "steps", "full", "causal", "general", "share", "receives", "peak keys"]
    listed = table(head, lines)
    left = plan.ranks - len(lines)
    more = [f"... {left} more ranks"] if left else []
    return "\n".join([_title(plan), listed, *more, *_summary(plan)])


def explain(plan: Plan) -> str:
    """What the plan does, in sentences."""
    return "\n".join([_title(plan), *_summary(plan), *_reasons(plan)])


def _title(plan: Plan) -> str:
    length = f"{plan.seq_len} tokens" if plan.kv_len == plan.seq_len else f"{plan.seq_len} x {plan.kv_len} tokens"
    keys = "" if plan.kv_layout is None else f" (keys {_named(plan.kv_layout)})"
    return f"{_named(plan.mask)}, {length}, {_named(plan.layout)}{keys}, {plan.strategy_name}"


def _named(thing: object) -> str:
    return shortened(repr(thing), width=60)


def _line(plan: Plan, rank: int, total: float) -> list[object]:
    steps = [plan.steps(rank, row) for row in range(plan.batch_rows)]
    kinds = Counter(tile.kind for row in steps for step in row for tile in step.tiles)
    runs = plan.layout.runs(plan.seq_len, rank)
    return [
        rank,
        tokens_in(runs),
        len(runs),
        len(steps[0]),
        kinds["full"],
        kinds["causal"],
        kinds["general"],
        f"{plan.work(rank) / total:.1%}",
        sum(plan.received(rank).values()),
        plan.peak_keys(rank),
    ]


def _summary(plan: Plan) -> list[str]:
    ranks = range(plan.ranks) if plan.ranks <= 64 else _listed(plan.ranks)
    moved = sum(sum(plan.received(rank).values()) for rank in ranks) * plan.ranks / len(ranks)
    everything = plan.batch_rows * plan.key_len * (plan.groups - 1) * plan.degree
    share = f" ({moved / everything:.0%} of an all-gather's)" if everything else ""
    heads = f"; heads travel inside groups of {plan.degree}" if plan.degree > 1 else ""
    return [f"imbalance {plan.imbalance():.3f}; {moved:.0f} keys move{share}{heads}"]


def _reasons(plan: Plan) -> list[str]:
    steps = plan.steps(0)
    largest = max(plan.peak_keys(rank) for rank in _listed(plan.ranks))
    overlap = "each exchange travels under the step before" if len(steps) > 1 else "one exchange, nothing to merge"
    return [f"{len(steps)} steps: {overlap}", f"a rank holds at most {largest} keys at once, of {plan.kv_len}"]


def _listed(ranks: int) -> list[int]:
    half = MAX_RANKS // 2
    return list(range(ranks)) if ranks <= MAX_RANKS else [*range(half), *range(ranks - half, ranks)]

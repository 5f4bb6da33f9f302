"""The plan: mask x layout x strategy, decided before any tensor arrives.

For every rank a plan holds a list of steps; a step says which keys arrive from whom and which tiles to compute
(step.py, tile.py). Running it is a short loop that needs no further decision. Laws, held by tests:

* every allowed pair is covered by exactly one tile of exactly one rank (times its share of the heads, under Ulysses);
* what one rank receives at a step, another sends at the same step;
* `needed` moves exactly the keys that the mask uses, none of them twice to the same rank.

A plan is its inputs: frozen, hashable, compared by value. Steps are worked out per rank when asked for, and kept, so
one rank of a thousand never pays for the others.

>>> from attnspan.layouts import HeadTail
>>> from attnspan.masks import Causal
>>> plan = Plan(Causal(), HeadTail(ranks=2), seq_len=8, strategy="gather")
>>> for tile in plan.steps(rank=0)[0].tiles:
...     print(tile)
full [2, 4) x [0, 6)
causal [0, 2) x [0, 2)
causal [2, 4) x [6, 8)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from attnspan.errors import PlanError, integer
from attnspan.layouts.grouped import Grouped
from attnspan.layouts.layout import Layout, imbalance
from attnspan.layouts.run import Runs, tokens_in
from attnspan.masks import Mask
from attnspan.masks.algebra import Bands
from attnspan.masks.columns import Columns
from attnspan.masks.cover import Cover
from attnspan.masks.real_tensors import with_real_tensors
from attnspan.plan.cost import Hardware, Shape
from attnspan.plan.geometry import Geometry
from attnspan.plan.step import Step
from attnspan.plan.strategy import Strategy, Ulysses, strategy_name

if TYPE_CHECKING:
    from attnspan.plan.memory import Memory

Parts = tuple[Mask, Layout, int, Layout, int, int]
"""What a geometry is made from: mask, layout and length of the queries, and of the keys, and the degree.

It is the same for all strategies of one degree, which `choose` compares."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who computes what, after receiving what from whom.

    `kv_len` and `kv_layout` are for cross-attention; without them keys lie like queries.
    """

    mask: Mask
    layout: Layout
    seq_len: int
    strategy: Strategy | str = "needed"
    kv_len: int | None = None
    kv_layout: Layout | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", Strategy.of(self.strategy))
        object.__setattr__(self, "seq_len", integer("seq_len", self.seq_len, at_least=1, error=PlanError))
        kv_len = self.seq_len if self.kv_len is None else self.kv_len
        object.__setattr__(self, "kv_len", integer("kv_len", kv_len, at_least=1, error=PlanError))
        _check_layouts(self)

    # ---- what it is made of ------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many ranks the layout deals to."""
        return self.layout.ranks

    @property
    def batch_rows(self) -> int:
        """How many batch rows have steps of their own; 1 means that all rows are alike."""
        return max(self.mask.rows, self.layout.rows, self.key_layout.rows)

    @property
    def key_layout(self) -> Layout:
        """Who owns which keys."""
        return self.layout if self.kv_layout is None else self.kv_layout

    @property
    def key_len(self) -> int:
        """The number of keys."""
        return self.seq_len if self.kv_len is None else self.kv_len

    @property
    def degree(self) -> int:
        """The number of ranks that share one sequence by heads; 1 without Ulysses."""
        if not isinstance(self.strategy, Ulysses):
            return 1
        return self.ranks if self.strategy.degree is None else self.strategy.degree

    @property
    def groups(self) -> int:
        """The number of groups between which keys move; the ranks themselves without Ulysses."""
        return self.ranks // self.degree

    # ---- what to do --------------------------------------------------------------------------------------------

    def steps(self, rank: int, batch_row: int = 0) -> tuple[Step, ...]:
        """What a rank does, step by step, for one batch row.

        Under Ulysses the ranks of a group do the same steps on different heads; ranks in their transfers are groups.
        """
        return _steps(self, *self._place(rank, batch_row))

    def queries(self, rank: int, batch_row: int = 0) -> Runs:
        """The positions in a rank's query buffer: its shard, or under Ulysses what its group holds."""
        group, batch_row = self._place(rank, batch_row)
        return self.geometry(batch_row).q_shards[group]

    def keys(self, rank: int, batch_row: int = 0) -> Runs:
        """The positions in a rank's own key buffer: its shard, or under Ulysses what its group holds."""
        group, batch_row = self._place(rank, batch_row)
        return self.geometry(batch_row).k_shards[group]

    def bands(self, batch_row: int = 0) -> Bands:
        """The allowed pairs of one batch row; of a mask that is a function, those that may be (masks/cover.py)."""
        return self.cover(batch_row).bands

    def cover(self, batch_row: int = 0) -> Cover:
        """Which pairs of one batch row are certain, and for which the mask's function must be evaluated."""
        return self.mask.cover(self.seq_len, self.key_len, batch_row if self.mask.rows > 1 else 0)

    def band_columns(self, batch_row: int = 0) -> tuple[Columns, Bands]:
        """`bands` as columns of numbers, and those of them that are partial."""
        return self.mask.band_columns(self.seq_len, self.key_len, batch_row if self.mask.rows > 1 else 0)

    @property
    def strategy_name(self) -> str:
        """The strategy as users write it, such as "ulysses(2) x ring"."""
        return strategy_name(self.strategy)

    @property
    def needs_mask_mod(self) -> bool:
        """Whether kernels must evaluate the mask's function for some pairs."""
        return any(self.band_columns(row)[1] for row in range(self.mask.rows))

    # ---- what it amounts to ------------------------------------------------------------------------------------

    def work(self, rank: int) -> float:
        """The pairs a rank computes over all batch rows; under Ulysses, its share of its group's pairs by heads.

        The sum over ranks is the mask's work.
        """
        group, _ = self._place(rank, 0)
        pairs = sum(self.geometry(row).work(group) for row in range(self.batch_rows))
        return pairs / self.degree if self.degree > 1 else pairs

    def group_works(self) -> list[int]:
        """The pairs of each group of ranks (each rank, without Ulysses) over all batch rows."""
        rows = [self.geometry(row) for row in range(self.batch_rows)]
        return [sum(geometry.work(group) for geometry in rows) for group in range(self.groups)]

    @with_real_tensors
    def group_traffic(self) -> list[int]:
        """About how many keys each group of ranks receives or sends over all batch rows; an estimate, to compare."""
        rows = [self.geometry(row).traffic() for row in range(self.batch_rows)]
        return [sum(each) for each in zip(*rows, strict=True)]

    def imbalance(self) -> float:
        """The largest rank's work over the mean."""
        return imbalance(self.group_works())

    def received(self, rank: int) -> dict[int, int]:
        """For each rank (or group) that sends keys to this one: how many, over all steps and batch rows."""
        counts: dict[int, int] = {}
        steps = (step for row in range(self.batch_rows) for step in self.steps(rank, row))
        for transfer in (transfer for step in steps for transfer in step.receives):
            counts[transfer.source] = counts.get(transfer.source, 0) + transfer.tokens
        return counts

    def bytes_received(self, rank: int, shape: Shape) -> dict[int, float]:
        """`received` in bytes, for the sizes of an attention: K and V of its key heads, or under Ulysses of its share.

        >>> from attnspan.layouts import HeadTail
        >>> from attnspan.masks import Causal
        >>> Plan(Causal(), HeadTail(ranks=2), seq_len=8).bytes_received(0, Shape(heads=32, kv_heads=8))
        {1: 16384.0}
        """
        each = shape.kv_bytes / self.batch_rows * shape.kv_share(self.degree)
        return {source: keys * each for source, keys in self.received(rank).items()}

    def peak_keys(self, rank: int) -> int:
        """The most keys a rank holds at once: its own, those in use and those arriving, over all batch rows."""
        return sum(_peak(self.steps(rank, row), tokens_in(self.keys(rank, row))) for row in range(self.batch_rows))

    def expanded_keys(self, rank: int) -> int:
        """The most latents that a rank expands at once, over all batch rows: those of a step."""
        steps = (self.steps(rank, row) for row in range(self.batch_rows))
        return max(
            (sum(tokens_in(each.arena) for each in step if each.tiles) for step in zip(*steps, strict=True)), default=0
        )

    def kept_bytes(self, rank: int, shape: Shape) -> float:
        """What a rank keeps from forward to backward with `keep_keys`, besides what autograd saves (`saved_bytes`).

        >>> from attnspan.layouts import HeadTail
        >>> from attnspan.masks import Causal
        >>> plan, shape = Plan(Causal(), HeadTail(ranks=2), seq_len=8), Shape(heads=32, kv_heads=8)
        >>> plan.kept_bytes(0, shape), plan.saved_bytes(0, shape)
        (32768.0, 82432.0)
        """
        return self._between_passes(rank, shape)[1]

    def saved_bytes(self, rank: int, shape: Shape) -> float:
        """What autograd saves of a call on a rank: query, key, value, out and lse of its own tokens."""
        return self._between_passes(rank, shape)[0]

    def may_keep(self, rank: int, shape: Shape) -> bool:
        """Whether `keep_keys="auto"` has a rank keep its keys: they take no more memory than what autograd saves."""
        return self.kept_bytes(rank, shape) <= self.saved_bytes(rank, shape)

    def _between_passes(self, rank: int, shape: Shape) -> tuple[float, float]:
        from attnspan.plan.memory import between_passes

        self._place(rank, 0)
        return between_passes(self, rank, shape)

    def memory(
        self,
        rank: int,
        shape: Shape,
        *,
        backward: bool = False,
        joint: bool = False,
        rounds: bool | None = None,
        keep_keys: bool = False,
    ) -> Memory:
        """The bytes that a rank's attention of such sizes takes at its peak, forward or backward, the caller's tensors
        included, and what they are for. `joint`: where the tiles of a step are one call, as with kernel="band", and
        with "auto" where they are small; `rounds`: whether gradients of keys go home in the tensors' dtype, as with
        "auto" on CUDA, or in float32, as with "band". By default they do but where calls are joint. `keep_keys`: keys
        are kept from forward to backward (`kept_bytes`).

        >>> from attnspan.layouts import HeadTail
        >>> from attnspan.masks import Causal
        >>> print(Plan(Causal(), HeadTail(ranks=8), 65536, "gather").memory(0, Shape(heads=32, kv_heads=8)))
        514.5 MiB: given 96.0, arenas 256.0, parts 97.5, result 65.0
        """
        from attnspan.plan.memory import memory
        from attnspan.plan.memory_walk import Kernels

        self._place(rank, 0)
        kernels = Kernels(joint, not joint if rounds is None else rounds)
        return memory(self, rank, shape, backward, kernels, keep_keys)

    def explain(self) -> str:
        """What the plan does, in words: balance, traffic against an all-gather, tiles, memory.

        Why it was chosen over others is `Choice.explain()`, where the others are known.
        """
        from attnspan.plan.drawing import explain

        return explain(self)

    def trace(self, path: str | Path, shape: Shape, hardware: Hardware) -> Path:
        """Write the predicted timelines of all ranks, forward and backward, as a Chrome trace."""
        from attnspan.plan.trace import write_trace

        return write_trace(self, path, shape, hardware)

    def __str__(self) -> str:
        from attnspan.plan.drawing import draw

        return draw(self)

    # ---- inside ------------------------------------------------------------------------------------------------

    def geometry(self, batch_row: int) -> Geometry:
        """Where one batch row of the mask falls on the ranks, or under Ulysses on the groups."""
        return _geometry(self._parts, batch_row)

    @property
    def _parts(self) -> Parts:
        return self.mask, self.layout, self.seq_len, self.key_layout, self.key_len, self.degree

    def _place(self, rank: int, batch_row: int) -> tuple[int, int]:
        """The group of a rank, and the batch row that stands for this one; both checked."""
        rank, batch_row = integer("rank", rank, error=PlanError), integer("batch_row", batch_row, error=PlanError)
        if rank >= self.ranks:
            raise PlanError(f"rank must be below the plan's {self.ranks} ranks, got {rank}")
        if self.batch_rows > 1 and batch_row >= self.batch_rows:
            raise PlanError(f"batch_row must be below the plan's {self.batch_rows} batch rows, got {batch_row}")
        return rank // self.degree, batch_row if self.batch_rows > 1 else 0


@functools.lru_cache(maxsize=64)
def _geometry(parts: Parts, batch_row: int) -> Geometry:
    mask, queries, seq_len, keys, key_len, degree = parts
    if degree > 1:
        queries, keys = Grouped(queries, degree), Grouped(keys, degree)
    columns, partial = mask.band_columns(seq_len, key_len, batch_row if mask.rows > 1 else 0)
    return Geometry(columns, queries.shards(seq_len, batch_row), keys.shards(key_len, batch_row), partial)


@functools.lru_cache(maxsize=64)
def _shifts(parts: Parts, rows: int) -> tuple[int, ...]:
    """The ring distances that any batch row uses: all ranks must agree on them."""
    return tuple(sorted(frozenset().union(*(_geometry(parts, row).shifts for row in range(rows)))))


@functools.lru_cache(maxsize=4096)
@with_real_tensors
def _steps(plan: Plan, group: int, batch_row: int) -> tuple[Step, ...]:
    assert isinstance(plan.strategy, Strategy), "set in __post_init__"
    return plan.strategy.steps(plan.geometry(batch_row), group, _shifts(plan._parts, plan.batch_rows))


def _peak(steps: tuple[Step, ...], own: int) -> int:
    """Own keys stay; while a step's arena is in use, the next one's fills."""
    arriving = [sum(transfer.tokens for transfer in step.receives) for step in steps] + [0]
    return own + max(now + coming for now, coming in pairwise(arriving))


def _check_layouts(plan: Plan) -> None:
    if not isinstance(plan.mask, Mask):
        raise PlanError(f"mask must be a mask such as Causal(), got {plan.mask!r}")
    for name in ("layout", "kv_layout"):
        layout = getattr(plan, name)
        if not isinstance(layout, Layout) and not (name == "kv_layout" and layout is None):
            raise PlanError(f"{name} must be a layout such as HeadTail(ranks=4), got {layout!r}")
    if plan.kv_layout is None and plan.kv_len != plan.seq_len:
        raise PlanError(f"kv_layout must be given when kv_len ({plan.kv_len}) is not seq_len ({plan.seq_len})")
    if plan.key_layout.ranks != plan.ranks:
        raise PlanError(f"kv_layout must have the layout's {plan.ranks} ranks, got {plan.key_layout.ranks}")
    rows = {rows for rows in (plan.mask.rows, plan.layout.rows, plan.key_layout.rows) if rows > 1}
    if len(rows) > 1:
        raise PlanError(f"mask and layouts must tell apart the same batch rows, got {sorted(rows)}")
    plan.mask.check_lengths(plan.seq_len, plan.key_len)
    if plan.ranks % plan.degree:
        raise PlanError(f"the degree of {plan.strategy_name} must divide the {plan.ranks} ranks, got {plan.degree}")

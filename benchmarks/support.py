"""What is served: the table of kernels x strategies x masks x features, and the page that publishes it.

A cell is one problem: some mask, dealt by some strategy, computed by some kernel, with one thing out of the ordinary.
Whether it is served is asked of the plan and of the kernel's `supports`, for every tile of every rank; nothing is
computed. tests/attention/test_conformance.py runs the cells: each is exact against the oracle, or refused with one of
these reasons. So the page says what the tests show.

Run: python -m benchmarks.support        writes docs/support.md
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspan.errors import PlanError
from attnspan.kernels import KERNELS, Dropout, Mods, Spec, band, flash4, flex, refusal
from attnspan.layouts import Balanced, Contiguous, HeadTail, Layout, Striped
from attnspan.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    Full,
    KeyPadding,
    Mask,
    MaskMod,
    PrefixLM,
    SinkTokens,
    SlidingWindow,
    Tree,
)
from attnspan.masks.tracing import traced
from attnspan.plan import Plan
from tests.attention import programs
from tests.attention.harness import Problem

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"

DEVICES = {
    name: device
    for device in ("cpu", "cuda")
    for name, kernel in KERNELS.items()
    if device == (kernel.traits.devices or ("cpu",))[0]
}
"""Where each kernel is tried: one that runs anywhere on the CPU."""

DTYPES = {"cpu": torch.float64, "cuda": torch.bfloat16}
"""What it is tried in, where the feature is not another dtype."""

STRATEGIES = [
    "ring",
    "gather",
    "needed",
    "needed(3)",
    "ulysses",
    "ulysses(2) x ring",
    "ulysses(2) x gather",
    "ulysses(2) x needed",
]


# ---- masks: of n queries and m keys; None where a mask is for equal lengths only ------------------------------------


def _aligned(n: int, m: int) -> Any:
    return None if n == m else "bottom"


def _thirds(n: int) -> list[int]:
    return [n // 3, n - n // 3] if n >= 3 else [n]


def _documents(n: int, m: int) -> Mask:
    one = len(_thirds(n)) != len(_thirds(m))  # documents of queries and of keys come in pairs
    return Documents([[n]], [[m]]) if one else Documents([_thirds(n)], [_thirds(m)])


def _checkers(n: int, m: int) -> Mask:
    return BlockSparse((torch.arange(-(-n // 4))[:, None] + torch.arange(-(-m // 5))) % 2 == 0, (4, 5))


def _random(n: int, m: int) -> Mask:
    return Mask.from_dense(torch.rand(n, m, generator=torch.Generator().manual_seed(0)) < 0.4)


def near_or_fifth(b, h, q, k):
    """A mask_mod, as FlexAttention takes them."""
    return ((q - k).abs() < 3) | (k % 5 == 0)


MASKS: dict[str, Callable[[int, int], Mask | None]] = {
    "Full": lambda n, m: Full(),
    "Causal": lambda n, m: Causal(align=_aligned(n, m)),
    "SlidingWindow": lambda n, m: SlidingWindow(n // 4, 2, align=_aligned(n, m)),
    "Documents": _documents,
    "Causal & Documents": lambda n, m: Causal(align=_aligned(n, m)) & _documents(n, m),
    "PrefixLM": lambda n, m: PrefixLM(min(5, m), align=_aligned(n, m)),
    "Causal & Chunked": lambda n, m: Causal(align=_aligned(n, m)) & Chunked(7, align=_aligned(n, m)),
    "SinkTokens | SlidingWindow": lambda n, m: SinkTokens(min(2, m)) | SlidingWindow(3, align=_aligned(n, m)),
    "KeyPadding": lambda n, m: KeyPadding(m - m // 4),
    "Tree": lambda n, m: Tree([-1, 0, 0][: len(_thirds(n))], _thirds(n)) if n == m else None,
    "BlockSparse": _checkers,
    "from_dense": _random,
    "MaskMod": lambda n, m: MaskMod(near_or_fifth, block=8),
    "nothing (~Full)": lambda n, m: ~Full(),
}


# ---- features: what is out of the ordinary -------------------------------------------------------------------------


def _some_rows_blind(mask: Mask, n: int, m: int) -> Mask:
    """No keys for the first query and for a quarter of the others."""
    sees = torch.ones(n, m, dtype=torch.bool)
    sees[: 1 + n // 4] = False
    return mask & Mask.from_dense(sees)


@dataclass(frozen=True)
class Feature:
    """How a problem differs from the plain one: 33 tokens dealt HeadTail to 4 ranks, 4 heads, 2 key heads of dim 32."""

    name: str
    ranks: int = 4
    n: int = 33
    m: int | None = None
    layout: Callable[[Mask, int], Layout] = lambda mask, ranks: HeadTail(ranks)
    kv_layout: Callable[[int], Layout] | None = None
    mask: Callable[[Mask, int, int], Mask] = lambda mask, n, m: mask
    also: tuple[tuple[str, Any], ...] = ()


def _feature(name: str, **differs: Any) -> Feature:
    own = {key: differs.pop(key) for key in list(differs) if key in Feature.__dataclass_fields__}
    return Feature(name, **own, also=tuple(differs.items()))


PLAIN = _feature("2 query heads per key head")
FEATURES = [
    PLAIN,
    _feature("1 query head per key head", kv_heads=4),
    _feature("all query heads on one key head", kv_heads=1),
    _feature("heads that ranks do not divide: 6 on 3", heads=6, kv_heads=3),
    _feature("fewer heads than ranks: 2 on 1", heads=2, kv_heads=1),
    _feature("one rank", ranks=1),
    _feature("three ranks", ranks=3),
    _feature("eight ranks", ranks=8),
    _feature("fewer tokens than ranks", n=3),
    _feature("one token", n=1),
    _feature("contiguous layout", layout=lambda mask, ranks: Contiguous(ranks)),
    _feature("striped layout", layout=lambda mask, ranks: Striped(ranks)),
    _feature("layout balanced for the mask", layout=lambda mask, ranks: Balanced(mask, ranks=ranks, chunk=2)),
    _feature("keys in another layout than queries", kv_layout=Striped),
    _feature("cross-attention, fewer keys", m=20, kv_layout=Contiguous),
    _feature("cross-attention, more keys", m=50, kv_layout=HeadTail),
    _feature("batch rows with different masks", mask=lambda mask, n, m: mask & KeyPadding([m, m // 2, 1])),
    _feature(
        "batch rows with different layouts",
        mask=lambda mask, n, m: mask & KeyPadding([m, m // 2]),
        layout=lambda mask, ranks: Balanced(mask, ranks=ranks, chunk=1, per_row=True),
    ),
    _feature("queries that see no key", mask=_some_rows_blind),
    _feature("value head dim 24 beside 32", value_dim=24),
    _feature("head dim 5", dim=5),
    _feature("head dim 256", dim=256, n=9),
    _feature("scale", scale=0.7),
    _feature("sinks", sinks=True),
    _feature("lse in the loss", through_lse=True),
    _feature("sinks, and lse in the loss", sinks=True, through_lse=True),
    _feature("dropout", dropout_p=0.3),
    _feature("dropout, sinks, lse in the loss", dropout_p=0.3, sinks=True, through_lse=True),
    _feature("memory (B, S, H, D)", memory="BSHD"),
    _feature("memory (B, H, D, S)", memory="BHDS"),
    _feature("memory: rows of a larger buffer", memory="rows of more"),
    _feature("gradients of keys alone", wanted="k"),
    _feature("gradients of queries and values", wanted="qv"),
    _feature("no gradients", wanted=""),
    _feature("float64", dtype=torch.float64),
    _feature("float32", dtype=torch.float32),
    _feature("bfloat16", dtype=torch.bfloat16),
    _feature("float16", dtype=torch.float16),
]


# ---- cells ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One square of the table."""

    kernel: str
    strategy: str
    mask: str
    feature: Feature = PLAIN

    def __str__(self) -> str:
        return f"{self.kernel}, {self.strategy}, {self.mask}, {self.feature.name}"

    @cached_property
    def problem(self) -> Problem | None:
        """None where the mask is not defined for these lengths."""
        feature = self.feature
        n, m = feature.n, feature.m or feature.n
        mask = MASKS[self.mask](n, m)
        if mask is None:
            return None
        mask, device = feature.mask(mask, n, m), DEVICES[self.kernel]
        differs = {
            "heads": 4,
            "kv_heads": 2,
            "dim": 32,
            "dtype": DTYPES[device],
            "device": device,
            **dict(feature.also),
        }
        return Problem(
            mask,
            feature.layout(mask, feature.ranks),
            n,
            self.strategy,
            m,
            feature.kv_layout and feature.kv_layout(feature.ranks),
            self.kernel,
            **differs,
        )

    @cached_property
    def reasons(self) -> list[str]:
        """Why it is refused, by the plan or by the kernel for some tile; none if it is served exactly."""
        if self.problem is None:
            return [UNEQUAL]
        try:
            plan = self.problem.plan
        except PlanError as refused:
            return [str(refused)]
        return refusals(self.kernel, self.problem, plan)


UNEQUAL = "this mask is for equal lengths"


def refusals(kernel: str, problem: Problem, plan: Plan, mods: Mods | None = None) -> list[str]:
    """The kernel's reasons for tiles that it cannot do. It reads no values, so none are made."""
    ranks = range(0, plan.ranks, plan.degree)
    tiles = [
        tile
        for rank in ranks
        for row in range(plan.batch_rows)
        for step in plan.steps(rank, row)
        for tile in step.tiles
    ]
    dims = (problem.dim, problem.dim, problem.value_dim or problem.dim)
    spec = Spec(1.0, mods, None, Dropout(problem.dropout_p, problem.dropout_seed) if problem.dropout_p else None)
    found = {}
    with _fake(), _as_on_a_gpu():
        for tile in {(tile.kind, tile.needs_mask_mod, len(tile.rows), len(tile.cols)): tile for tile in tiles}.values():
            q, k, v = (
                _empty(len(span), dim, problem.dtype, problem.device)
                for span, dim in zip((tile.rows, tile.cols, tile.cols), dims, strict=True)
            )
            if reason := refusal(kernel, spec, q, k, v, (tile,)):
                found[reason.partition(" [")[0].partition(" (")[0]] = None  # without the tile's numbers, or a name
    return list(found)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """As on a Hopper GPU, with every optional package."""
    with (
        patch.object(band, "has_triton", lambda: True),
        patch.object(flex, "has_triton", lambda: True),
        patch.object(flash4, "installed", lambda: flash4.VERSION),
        patch.object(flash4, "capability", lambda device: (9, 0)),
        patch.object(flash4.TAKES, "verified", True),
    ):
        yield


@functools.cache
def _fake() -> FakeTensorMode:
    return FakeTensorMode()


@functools.cache
def _empty(length: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A fake tensor, made once: that takes longer than asking a kernel, and few shapes come up again and again."""
    with _fake():
        return torch.empty(1, 1, length, dim, dtype=dtype, device=device)


def program_refusals(kernel: str, name: str, strategy: str) -> list[str]:
    """Why a kernel does not serve a FlexAttention program; none if it does."""
    problem, mods = _program(name)
    there = replace(problem, device=DEVICES[kernel], dtype=DTYPES[DEVICES[kernel]], dim=32)
    return refusals(kernel, there, Plan(problem.mask, problem.layout, problem.seq_len, strategy), mods)


@functools.cache
def _program(name: str) -> tuple[Problem, Mods]:
    """A program's mask, planned for once, and what kernels run."""
    problem = programs.problem(name, HeadTail(4), "gather")
    scoring = problem.scoring
    score_mod = None
    if scoring is not None:
        score_mod = traced(scoring.of(*problem.whole.captured), "score_mod", score=problem.dtype)
    return problem, Mods(score_mod, traced(problem.mask.mask_mod(problem.seq_len, problem.seq_len)))


# ---- the page ------------------------------------------------------------------------------------------------------


class Notes:
    """Reasons by number, in the order in which they come up."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, reasons: Iterable[str | None], most: int = 2) -> str:
        found = list(dict.fromkeys(reason for reason in reasons if reason))
        if not found:
            return "exact"
        return "no " + " ".join(f"[{self.numbers.setdefault(each, len(self.numbers) + 1)}]" for each in found[:most])


def page() -> str:
    """The text of docs/support.md."""
    notes = Notes()
    names = [feature.name for feature in FEATURES]

    def table(rows: list[str], columns: list[str], cells: Callable[[str, str], Iterable[Cell]]) -> list[str]:
        lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for row in rows:
            marks = [notes.mark(why for cell in cells(row, column) for why in cell.reasons) for column in columns]
            lines.append(f"| {row.replace('|', chr(92) + '|')} | " + " | ".join(marks) + " |")
        return [*lines, ""]

    def programs_table() -> list[str]:
        lines = ["| | " + " | ".join(kernels) + " |", "|---" * (len(kernels) + 1) + "|"]
        for name in programs.WRITTEN:
            marks = [
                notes.mark(why for strategy in STRATEGIES for why in program_refusals(kernel, name, strategy))
                for kernel in kernels
            ]
            lines.append(f"| {name} | " + " | ".join(marks) + " |")
        return [*lines, ""]

    def feature(name: str) -> Feature:
        return FEATURES[names.index(name)]

    kernels = list(DEVICES)
    tables = [
        "## Kernels and masks",
        "",
        "Under every strategy; refused where any tile of any of them is.",
        "",
        *table(list(MASKS), kernels, lambda mask, kernel: [Cell(kernel, s, mask) for s in STRATEGIES]),
        "## Kernels and features",
        "",
        "Causal, by gather.",
        "",
        *table(names, kernels, lambda name, kernel: [Cell(kernel, "gather", "Causal", feature(name))]),
        "## Kernels and programs",
        "",
        "FlexAttention's mask_mods and score_mods, under every strategy. A mask_mod whose pairs are few bands is",
        "planned as bands, and every kernel supports it.",
        "",
        *programs_table(),
        "## Strategies and masks",
        "",
        *table(list(MASKS), STRATEGIES, lambda mask, strategy: [Cell("reference", strategy, mask)]),
        "## Strategies and features",
        "",
        "Causal.",
        "",
        *table(names, STRATEGIES, lambda name, strategy: [Cell("reference", strategy, "Causal", feature(name))]),
    ]
    reasons = [f"{number}. {reason}" for reason, number in notes.numbers.items()]
    return "\n".join([*INTRODUCTION, *tables, "## Reasons", "", *reasons, ""])


INTRODUCTION = [
    "# Support: kernels, strategies, masks, features",
    "",
    "Written by `python -m benchmarks.support` and checked by the tests; do not edit.",
    "",
    "tests/attention/test_conformance.py and test_programs.py run the cells, forward and backward, those of",
    f"{', '.join(name for name, device in DEVICES.items() if device == 'cuda')} on a CUDA device.",
    "A cell is exact (against dense attention in float64, to the rounding of its",
    "dtype), or it is refused before anything travels: `no [1]` is refused with reason 1 at the end of the page.",
    '`kernel="auto"` takes for every tile the fastest kernel that supports it; `reference` supports every mask, and',
    "`blocks` every program.",
    "",
    "`band` ran programs on an H200 (tests/attention/test_programs.py); its programs are also shown in Triton's",
    "interpreter, and compiled for Hopper (tests/kernels/test_band_mods.py). `flash4` ran on an H200 with head dims of",
    "64 and 128 (tests/kernels/test_flash4.py); what it calls is also compared with a stand-in for its package.",
    "",
    "The plain cell has 33 tokens, dealt by HeadTail to 4 ranks, and 4 heads on 2 key heads of dim 32, in float64 on",
    "the CPU and in bfloat16 on CUDA. Every row changes one thing.",
    "",
]


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(page())


if __name__ == "__main__":
    main()

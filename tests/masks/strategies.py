"""Random masks and lengths, for laws that hold for every mask.

    lengths            how many queries and keys, and whether they are one axis
    masks(lengths)     an expression over all patterns that is defined for these lengths
    cases()            both at once: a Case

Patterns that compare positions carry an alignment where the lengths differ, because without one they refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st

from attnspan.masks import (
    Band,
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
    TokenGroups,
    Tree,
)
from attnspan.masks.band import tight


@dataclass(frozen=True)
class Case:
    """A mask and lengths that it accepts."""

    mask: Mask
    q_len: int
    kv_len: int

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_len, self.kv_len


@st.composite
def cases(draw, max_len: int = 40, depth: int = 3, square: bool = False) -> Case:
    q_len = draw(st.integers(1, max_len))
    kv_len = q_len if square or draw(st.booleans()) else draw(st.integers(1, max_len))
    return Case(draw(masks(q_len, kv_len, depth=depth)), q_len, kv_len)


@st.composite
def masks(draw, q_len: int, kv_len: int | None = None, depth: int = 3, rows: int | None = None) -> Mask:
    """An expression with at most `depth` operators above any pattern; `rows` batch rows where they differ."""
    kv_len = q_len if kv_len is None else kv_len
    rows = draw(st.sampled_from([1, 1, 2, 3])) if rows is None else rows
    return draw(_expressions(q_len, kv_len, rows, draw(st.integers(0, depth))))


@st.composite
def compositions(draw, total: int, parts: int | None = None) -> list[int]:
    """Lengths of at least 1 that sum to total."""
    parts = draw(st.integers(1, min(total, 6))) if parts is None else parts
    size = min(parts - 1, total - 1)
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), min_size=size, max_size=size))) if size else []
    edges = [0, *cuts, total]
    return [stop - start for start, stop in pairwise(edges)]


@st.composite
def bands(draw, reach: int = 12) -> Band:
    """A tight band near the origin; rows and columns may be negative."""
    edge = st.integers(-2, reach)
    band = None
    while band is None:
        q0, k0 = draw(edge), draw(edge)
        q1, k1 = q0 + draw(st.integers(1, reach)), k0 + draw(st.integers(1, reach))
        middle = draw(st.integers(k0 - q1 + 1, k1 - 1 - q0))  # a diagonal that crosses the rectangle
        lo, hi = middle - draw(st.integers(0, reach)), middle + draw(st.integers(0, reach))
        band = tight(q0, q1, k0, k1, lo=lo, hi=hi)
    return band


@st.composite
def disjoint_bands(draw, max_size: int = 5) -> tuple[Band, ...]:
    """Disjoint bands, made without the algebra under test: each touches no earlier one."""
    chosen: list[Band] = []
    for band in draw(st.lists(bands(), max_size=max_size)):
        if all(band & other is None for other in chosen):
            chosen.append(band)
    return tuple(chosen)


def pairs(bands_: object) -> set[tuple[int, int]]:
    """The set that bands describe, by the definition of a band and nothing else."""
    return {
        (q, k) for q0, q1, k0, k1, lo, hi in bands_ for q in range(q0, q1) for k in range(k0, k1) if lo <= k - q <= hi
    }


def painted(bands_: object, q_len: int, kv_len: int) -> torch.Tensor:
    """How often each pair of a grid is covered, (q_len, kv_len)."""
    grid = torch.zeros(q_len, kv_len, dtype=torch.int32)
    q, k = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    for q0, q1, k0, k1, lo, hi in bands_:
        grid += (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return grid


@st.composite
def _expressions(draw, q_len: int, kv_len: int, rows: int, depth: int) -> Mask:
    if depth == 0:
        return draw(_patterns(q_len, kv_len, rows))
    left = draw(_expressions(q_len, kv_len, rows, depth - 1))
    sign = draw(st.sampled_from("&|~"))
    if sign == "~":
        return ~left
    right = draw(_expressions(q_len, kv_len, rows, draw(st.integers(0, depth - 1))))
    return left & right if sign == "&" else left | right


@st.composite
def _patterns(draw, q_len: int, kv_len: int, rows: int) -> Mask:
    square = q_len == kv_len
    align = draw(st.sampled_from(["top", "bottom"] + [None] * square))
    longest = max(q_len, kv_len)
    rows = draw(st.sampled_from([1, rows]))

    def per_row(each):
        """One value, or one per row."""
        return draw(each) if rows == 1 else [draw(each) for _ in range(rows)]

    # fmt: off
    names = [
        "full", "causal", "window", "prefix", "chunked", "sinks", "padding",
        "blocks", "dense", "mod", "documents", "pairs", *["tree", "groups"] * square,
    ]
    # fmt: on
    match draw(st.sampled_from(names)):
        case "full":
            return Full()
        case "causal":
            return Causal(align=align)
        case "window":
            sides = st.integers(0, longest)
            return SlidingWindow(draw(sides), draw(sides), align=align)
        case "prefix":
            return PrefixLM(per_row(st.integers(0, kv_len)), align=align)
        case "chunked":
            return Chunked(draw(st.integers(1, longest + 1)), align=align)
        case "sinks":
            return SinkTokens(draw(st.integers(1, longest + 1)))
        case "padding":
            return KeyPadding(per_row(st.integers(0, kv_len)))
        case "blocks":
            q_size, k_size = draw(st.integers(1, q_len)), draw(st.integers(1, kv_len))
            shape = rows, -(-q_len // q_size), -(-kv_len // k_size)
            return BlockSparse(draw(_bools(shape)), (q_size, k_size))
        case "dense":
            return Mask.from_dense(draw(_bools((rows, q_len, kv_len))))
        case "mod":
            return MaskMod(draw(st.sampled_from(FUNCTIONS)), block=draw(st.integers(1, q_len)))
        case "groups":
            ids = st.lists(st.integers(-1, 2), min_size=q_len, max_size=q_len)
            return TokenGroups.from_ids(per_row(ids) if rows > 1 else draw(ids))
        case "documents" if square:
            return Documents(per_row(compositions(q_len)))
        case "documents" | "pairs":
            counts = [draw(st.integers(1, min(q_len, kv_len, 5))) for _ in range(rows)]
            return Documents(
                [draw(compositions(q_len, n)) for n in counts],
                [draw(compositions(kv_len, n)) for n in counts],
            )
        case "tree":
            lengths = draw(compositions(q_len))
            return Tree(draw(parents(len(lengths))), lengths)
    raise AssertionError("every name has a case")


@st.composite
def parents(draw, nodes: int) -> list[int]:
    """A forest whose nodes stand in any order, parents after children included."""
    order = draw(st.permutations(range(nodes)))
    above = [draw(st.integers(-1, i - 1)) for i in range(nodes)]
    found = [-1] * nodes
    for i, node in enumerate(order):
        found[node] = -1 if above[i] < 0 else order[above[i]]
    return found


def _bools(shape: tuple[int, ...]) -> st.SearchStrategy[torch.Tensor]:
    def random(drawn: tuple[int, float]) -> torch.Tensor:
        seed, density = drawn
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density

    return st.tuples(st.integers(0, 1 << 30), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])).map(random)


def even_keys(b, h, q, k):
    return k % 2 == 0


def far_or_near(b, h, q, k):
    return ((q - k).abs() < 3) | ((q + k) % 5 == 0)


def nothing(b, h, q, k):
    return q < 0


def from_table(b, h, q, k):
    return TABLE[q % 4] == TABLE[k % 4]


TABLE = torch.tensor([0, 1, 1, 0])
FUNCTIONS = [even_keys, far_or_near, nothing, from_table]

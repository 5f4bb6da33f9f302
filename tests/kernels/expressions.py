"""Score_mods of all sorts: what they compute is a tree of tuples, which hypothesis draws and makes smaller.

    of(("add", "score", ("mul", "slope", "distance")))(slopes) is score + slopes[h].exp() * 0.1 * (q - k)

They broadcast, so that the oracle calls them on whole tensors. Numbers stay small: nothing overflows, and no rounding
decides a comparison between others than whole numbers.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

HEADS, BATCH, LENGTH, FAR = 2, 2, 21, 4

SHAPES = ((HEADS,), (HEADS, 2 * FAR + 1), (BATCH, LENGTH), (LENGTH,), (LENGTH, LENGTH), ())
KINDS = torch.tensor([0, 1, 1, 2, 0, 2, 1] * 3)

LEAVES = {
    "score": lambda s, b, h, q, k, x: s,
    "distance": lambda s, b, h, q, k, x: 0.1 * (q - k),
    "slope": lambda s, b, h, q, k, x: x[0][h].exp(),
    "table": lambda s, b, h, q, k, x: x[1][h, (q - k).clamp(-FAR, FAR) + FAR],
    "rows": lambda s, b, h, q, k, x: x[2][b, q],
    "cols": lambda s, b, h, q, k, x: x[3][k],
    "pairs": lambda s, b, h, q, k, x: x[4][k, q],
    "number": lambda s, b, h, q, k, x: torch.sigmoid(x[5]),
    "kind": lambda s, b, h, q, k, x: 0.5 * KINDS[q] - KINDS[k],
    "batch": lambda s, b, h, q, k, x: b / 3 + h,
    "whole": lambda s, b, h, q, k, x: (((q - k) % 5) - (k - q) // 3).to(torch.float32),
}
CONDITIONS = {
    "near": lambda b, h, q, k: (q - k).abs() <= 3 + h,
    "even": lambda b, h, q, k: (q + 2 * k) % 2 == 0,
    "same": lambda b, h, q, k: KINDS[q] == KINDS[k],
    "late": lambda b, h, q, k: torch.logical_or(q > 9, ~(k < 4)),
    "first": lambda b, h, q, k: (b < 1) & (k >= 2),
}
ONE = {
    "neg": lambda x: -x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "exp": lambda x: torch.exp(-x.abs()),
    "exp2": lambda x: torch.exp2(x.clamp(-3.0, 3.0)),
    "log": lambda x: torch.log(x.abs() + 1.5),
    "sqrt": lambda x: torch.sqrt(x * x + 0.5),
    "square": lambda x: torch.tanh(x) ** 2,
    "relu": lambda x: torch.relu(x + 0.3),
    "half": lambda x: x / 2,
    "inverse": lambda x: 1 / (2 + x * x),
}
TWO = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: torch.tanh(x) * y,
    "div": lambda x, y: x / (1.5 + y * y),
    "max": torch.maximum,
    "min": torch.minimum,
}


def trees():
    """Trees over the score and anything else."""
    leaves = st.sampled_from(sorted(LEAVES))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(sorted(ONE)), inner),
            st.tuples(st.sampled_from(sorted(TWO)), inner, inner),
            st.tuples(st.just("where"), st.sampled_from(sorted(CONDITIONS)), inner, inner),
        ),
        max_leaves=6,
    ).map(lambda tree: ("add", "score", tree))


TENSORS = ("slope", "table", "rows", "cols", "pairs", "number")
"""The leaves that read a captured tensor, of `SHAPES`."""


def shapes_of(tree):
    """Of the tensors that a tree reads."""
    return tuple(shape for name, shape in zip(TENSORS, SHAPES, strict=True) if name in leaves(tree))


def leaves(tree):
    """The names in a tree."""
    return {tree} if isinstance(tree, str) else set().union(*map(leaves, tree))


def of(tree):
    """The score_mods of a tree, for the tensors that it reads, as `Scoring` has them."""

    def capturing(*tensors):
        read = iter(tensors)
        captured = [next(read) if name in leaves(tree) else None for name in TENSORS]

        def score_mod(score, b, h, q, k):
            return value(tree, score, (b, h, q, k), captured)

        return score_mod

    return capturing


def value(tree, score, at, captured):
    """What a tree computes."""
    if isinstance(tree, str):
        return LEAVES[tree](score, *at, captured)
    name, *inner = tree
    if name == "where":
        condition, *inner = inner
        return torch.where(CONDITIONS[condition](*at), *(value(each, score, at, captured) for each in inner))
    return {**ONE, **TWO}[name](*(value(each, score, at, captured) for each in inner))

"""The masks that layouts are measured on: what training packs, long-context models and trees look like.

`corpus(seq_len)` yields named cases; a case is one mask, or several with weights. Random ones are drawn from
a fixed seed, so that a name and a length always mean the same mask.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log

import torch

from attnspan.masks import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    Full,
    Mask,
    PrefixLM,
    SinkTokens,
    SlidingWindow,
    Tree,
)


@dataclass(frozen=True)
class Case:
    """A named workload for one sequence length."""

    name: str
    masks: tuple[Mask, ...]
    weights: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] | None = None  # of its documents, where it has any


def corpus(seq_len: int) -> Iterator[Case]:
    """Every case at one length."""
    for name in CASES:
        yield case(name, seq_len)


def case(name: str, seq_len: int) -> Case:
    """One case by name.

    >>> case("documents-equal", 8192).lengths[:3]
    (1024, 1024, 1024)
    """
    built = CASES[name](seq_len)
    if isinstance(built, Mask):
        return Case(name, (built,))
    if isinstance(built, tuple):
        masks, weights = built
        return Case(name, masks, weights)
    causal = Causal() & Documents(built)
    mask = {
        "documents-window": causal & SlidingWindow(1024),
        "documents-noncausal": Documents(built),
    }.get(name, causal)
    return Case(name, (mask,), lengths=tuple(built))


def lognormal(seq_len: int, mean: int, seed: int = 0, sigma: float = 1.0) -> list[int]:
    """Document lengths that sum to seq_len; most are short, some are long.

    >>> sum(lognormal(100_000, 4096)), len(lognormal(100_000, 4096)) > 5
    (100000, True)
    """
    draw = random.Random(seed)
    lengths: list[int] = []
    while seq_len:
        length = round(draw.lognormvariate(log(mean) - sigma**2 / 2, sigma))
        lengths.append(min(max(length, 1), seq_len))
        seq_len -= lengths[-1]
    return lengths


def one_huge(seq_len: int) -> list[int]:
    """A document of half the sequence between many small ones."""
    small = lognormal(seq_len // 2, mean=512, seed=1)
    middle = len(small) // 2
    return [*small[:middle], seq_len - sum(small), *small[middle:]]


def grown(seq_len: int, seed: int = 0) -> Tree:
    """A random tree of token runs, each longer than a word: prompts, branches, branches of branches."""
    draw = random.Random(seed)
    lengths = lognormal(seq_len, mean=max(seq_len // 128, 1), seed=seed)
    parents = [-1] + [draw.randrange(max(0, node - 12), node) for node in range(1, len(lengths))]
    return Tree(parents, lengths)


def sparse(seq_len: int, block: int = 512, seed: int = 0) -> Mask:
    """Random blocks below the diagonal, a different share of them in each block row."""
    blocks = -(-seq_len // block)
    draw = torch.Generator().manual_seed(seed)
    share = torch.rand(blocks, 1, generator=draw) * 16 / blocks
    chosen = torch.rand(blocks, blocks, generator=draw) < share.clamp(max=0.5)
    return Causal() & BlockSparse((chosen | torch.eye(blocks, dtype=torch.bool)).tril(), block)


CASES: dict[str, Callable[[int], object]] = {
    "causal": lambda n: Causal(),
    "full": lambda n: Full(),
    "documents-lognormal": lambda n: lognormal(n, mean=4096),
    "documents-short": lambda n: lognormal(n, mean=min(512, n // 256), seed=3, sigma=0.5),
    "documents-one-huge": one_huge,
    "documents-equal": lambda n: [1024] * (n // 1024) + ([n % 1024] if n % 1024 else []),
    "documents-window": lambda n: lognormal(n, mean=4096, seed=2),
    "documents-noncausal": lambda n: lognormal(n, mean=2048, seed=4),
    "window": lambda n: Causal() & SlidingWindow(4096),
    "chunked": lambda n: Causal() & Chunked(8192),
    "prefix": lambda n: PrefixLM(n // 5),
    "tree": grown,
    "sinks-window": lambda n: Causal() & (SlidingWindow(2048) | SinkTokens(64)),
    "block-sparse": sparse,
    "full-and-window": lambda n: ((Causal(), Causal() & SlidingWindow(1024)), (1, 5)),
}

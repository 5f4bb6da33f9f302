"""Random layouts and masks of one length."""

from itertools import pairwise

import torch
from hypothesis import strategies as st

from attnspan.layouts import Balanced, Contiguous, HeadTail, PerDocument, RoundRobinByWork, Striped
from attnspan.masks import BlockSparse, Causal, Chunked, Documents, Full, PrefixLM, SlidingWindow


@st.composite
def lengths_of(draw, seq_len, most=8):
    """Document lengths that sum to seq_len."""
    cuts = draw(st.sets(st.integers(1, seq_len - 1), max_size=most)) if seq_len > 1 else set()
    edges = [0, *sorted(cuts), seq_len]
    return [b - a for a, b in pairwise(edges)]


@st.composite
def masks(draw, seq_len):
    """A mask over seq_len, alone or cut by another."""
    documents = Documents(draw(lengths_of(seq_len)))
    size = draw(st.integers(1, seq_len))
    blocks = -(-seq_len // size) if seq_len // size <= 16 else None
    kinds = [
        Full(),
        Causal(),
        documents,
        Causal() & documents,
        SlidingWindow(size),
        Causal() & Chunked(size),
        PrefixLM(size),
        documents & SlidingWindow(size, size // 2),
    ]
    if blocks:
        bits = draw(st.lists(st.booleans(), min_size=blocks * blocks, max_size=blocks * blocks))
        kinds.append(BlockSparse(torch.tensor(bits).view(blocks, blocks), size))
    return draw(st.sampled_from(kinds))


@st.composite
def layouts(draw, seq_len, ranks=None):
    """A layout of seq_len over 1 to 16 ranks."""
    ranks = ranks or draw(st.integers(1, 16))
    chunk = draw(st.sampled_from([1, 2, 7, 16, 128]))
    kind = draw(
        st.sampled_from([Contiguous, HeadTail, Striped, PerDocument, RoundRobinByWork, Balanced]),
    )
    if kind is PerDocument:
        return PerDocument(draw(lengths_of(seq_len)), ranks=ranks)
    if kind is RoundRobinByWork:
        return RoundRobinByWork(draw(masks(seq_len)), ranks=ranks, block=chunk)
    if kind is Balanced:
        return Balanced(draw(masks(seq_len)), ranks=ranks, chunk=chunk)
    return Striped(ranks, chunk=chunk) if kind is Striped else kind(ranks)

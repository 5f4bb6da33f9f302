"""Bands stay few: what a mask of 10,000 documents at 1M tokens is made of. Timings are in benchmarks."""

import random
import re
from itertools import pairwise

import pytest
import torch

from attnspan.masks import BlockSparse, Causal, Chunked, Documents, SinkTokens, SlidingWindow, Tree
from attnspan.masks.profile import RowWork

TOKENS, COUNT = 1 << 20, 10_000


def random_lengths(seed):
    edges = [0, *sorted(random.Random(seed).sample(range(1, TOKENS), COUNT - 1)), TOKENS]
    return [stop - start for start, stop in pairwise(edges)]


def _name(mask):
    """The expression without its ten thousand lengths."""
    return re.sub(r"\[.*?\]", "...", repr(mask))


LENGTHS, OTHERS = random_lengths(0), random_lengths(1)
PACK, OTHER = Documents(LENGTHS), Documents(OTHERS)
SQUARES = sum(n * n for n in LENGTHS)


@pytest.mark.parametrize(
    ("mask", "most", "work"),
    [
        (Causal() & PACK, COUNT, sum(n * (n + 1) // 2 for n in LENGTHS)),
        (~PACK, 2 * COUNT, TOKENS**2 - SQUARES),
        (PACK | SinkTokens(4), COUNT + 1, None),
        (PACK & OTHER, 2 * COUNT, None),
        pytest.param(PACK & ~OTHER, 2 * COUNT, None, marks=pytest.mark.slow),
        pytest.param(PACK | OTHER, 2 * COUNT, None, marks=pytest.mark.slow),
        (
            PACK & SlidingWindow(511),
            COUNT,
            sum(n * (n + 1) // 2 - (m := max(0, n - 512)) * (m + 1) // 2 for n in LENGTHS),
        ),
        pytest.param(PACK | SlidingWindow(64), 2 * COUNT, None, marks=pytest.mark.slow),
        (Causal() & Chunked(128), TOKENS // 128, TOKENS // 128 * (128 * 129 // 2)),
        (Causal() & (SlidingWindow(4095) | SinkTokens(4)), 2, None),
        (Tree([i - 1 for i in range(COUNT)], LENGTHS), 1, TOKENS * (TOKENS + 1) // 2),
        (Tree([-1, *[0] * (COUNT - 1)], LENGTHS), 2 * COUNT, None),
    ],
    ids=lambda value: "" if isinstance(value, int | None) else _name(value),
)
def test_bands_of_a_million_tokens(mask, most, work):
    bands = mask.bands(TOKENS)
    assert len(bands) <= most
    rows = RowWork(bands)
    assert rows.before(TOKENS) == mask.work(TOKENS)
    if work is not None:
        assert mask.work(TOKENS) == work


@pytest.mark.slow  # the law itself is in test_laws.py, and the bands of these masks are counted above
def test_inclusion_and_exclusion_hold_at_a_million_tokens():
    both, either = (PACK & OTHER).work(TOKENS), (PACK | OTHER).work(TOKENS)
    assert both + either == PACK.work(TOKENS) + OTHER.work(TOKENS)
    assert (PACK & ~OTHER).work(TOKENS) == PACK.work(TOKENS) - both
    assert (~PACK).work(TOKENS) + PACK.work(TOKENS) == TOKENS**2


def test_a_block_mask_of_many_documents_lists_each_pair_of_blocks_once():
    block_mask = (Causal() & PACK).block_mask(TOKENS, block_size=1024)
    partial, full = block_mask.kv_num_blocks.sum(), block_mask.full_kv_num_blocks.sum()
    touched = BlockSparse(block_mask.to_dense()[0, 0].bool(), 1024)
    assert partial + full == sum(band.area for band in touched.bands(TOKENS)) // 1024**2
    assert torch.equal(block_mask.q_num_blocks.sum(), partial)
    assert torch.equal(block_mask.full_q_num_blocks.sum(), full)

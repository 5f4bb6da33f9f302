"""Covers hold what a mask allows: certain pairs all count, and no allowed pair lies outside of certain and asked ones.

Functions here are irregular or differ between heads, so that some blocks must be asked. What a BlockMask allows is
written out from its lists.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from attnspan.masks import Causal, Documents, Mask, MaskMod, SlidingWindow
from attnspan.masks.algebra import area
from attnspan.masks.cover import Cover

WINDOWS = torch.tensor([1, 4, 30])
LENGTHS = torch.tensor([20, 33])


def checkers(b, h, q, k):
    return (q + k) % 2 == 0


def by_head(b, h, q, k):
    return (q - k).abs() <= WINDOWS[h]


def by_row_and_head(b, h, q, k):
    return ((q - k).abs() <= WINDOWS[h]) & (k < LENGTHS[b])


def hashed(b, h, q, k):
    return (q * 7 + k * 13) % 5 < 2


def listed(fn, rows, heads, size):
    return Mask.from_block_mask(create_block_mask(fn, rows, heads, 33, 33, "cpu", size))


MASKS = {
    "every second": lambda: MaskMod(checkers, block=8),
    "hashed": lambda: MaskMod(hashed, block=8),
    "by head": lambda: MaskMod(by_head, block=4, heads=3),
    "by row and head": lambda: MaskMod(by_row_and_head, block=4, heads=3, rows=2),
    "and": lambda: Causal() & MaskMod(hashed, block=8),
    "or": lambda: SlidingWindow(3) | MaskMod(by_head, block=4, heads=3),
    "not": lambda: ~MaskMod(by_head, block=4, heads=3),
    "and not": lambda: Documents([10, 23]) & ~MaskMod(hashed, block=8),
    "or not": lambda: Documents([10, 23]) | ~MaskMod(by_row_and_head, block=4, heads=3, rows=2),
    "a BlockMask": lambda: listed(hashed, 1, 1, (8, 4)),
    "a BlockMask by head": lambda: listed(by_row_and_head, 2, 3, (4, 8)),
    "a BlockMask, and": lambda: listed(by_row_and_head, 2, 3, (4, 8)) & Causal(),
}


def dense(bands, n=33):
    q, k = torch.arange(n)[:, None], torch.arange(n)
    allowed = torch.zeros(n, n, dtype=torch.bool)
    for b in bands:
        allowed |= (b.q0 <= q) & (q < b.q1) & (b.k0 <= k) & (k < b.k1) & (b.lo <= k - q) & (k - q <= b.hi)
    return allowed


@pytest.mark.parametrize("name", MASKS)
def test_a_cover_holds_every_pair_and_is_sure_only_of_what_counts(by_blocks, name):
    mask = MASKS[name]()
    for row in range(mask.rows):
        found = mask.cover(33, row=row)
        certain, asked = (dense(bands) for bands in (found.certain, found.partial))
        heads = torch.stack([mask.dense(33, row=row, head=head) for head in range(mask.heads)])
        assert not (certain & asked).any()
        assert (certain <= heads.all(0)).all()
        assert (heads.any(0) <= certain | asked).all()
        assert area(found.bands) == int(certain.sum() + asked.sum())
        assert found.partial


def test_masks_of_our_own_have_nothing_to_ask():
    assert (Causal() & Documents([10, 23])).cover(33) == Cover((Causal() & Documents([10, 23])).bands(33))


def test_a_regular_function_becomes_bands_and_an_irregular_one_does_not():
    assert MaskMod(lambda b, h, q, k: q >= k).cover(4096).certain == Causal().bands(4096)
    assert not MaskMod(checkers).cover(2048).is_exact


def test_a_block_mask_is_its_lists_and_not_its_function():
    """Blocks that are not listed are skipped, full ones are not asked; heads and batch rows have lists of their own."""
    random = torch.Generator().manual_seed(0)
    shape, size, lengths = (2, 3, 5, 9), (8, 4), (33, 33)
    kinds = torch.randint(0, 3, shape, generator=random)  # nothing, partial, full
    lists = []
    for kind in (1, 2):
        order = (kinds != kind).int().argsort(dim=-1, stable=True).int()
        lists += [(kinds == kind).sum(-1).int(), order]
    mask = Mask.from_block_mask(
        BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=by_row_and_head, seq_lengths=lengths)
    )
    for row in range(2):
        for head in range(3):
            at = torch.arange(33)
            kind = kinds[row, head][at[:, None] // 8, at[None] // 4]
            asked = by_row_and_head(torch.tensor(row), torch.tensor(head), at[:, None], at[None])
            assert torch.equal(mask.dense(33, row=row, head=head), (kind == 2) | ((kind == 1) & asked))


def test_partial_blocks_without_a_function_are_allowed_whole():
    block_mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int(), BLOCK_SIZE=2
    )
    assert Mask.from_block_mask(block_mask).work(4) == 12


@pytest.mark.slow
def test_a_function_of_a_long_sequence_is_covered_without_holding_it():
    """32k x 32k pairs are 1 GB as bools; asked strip by strip, some 50 MB."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not MaskMod(hashed).cover(1 << 15).is_exact
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10

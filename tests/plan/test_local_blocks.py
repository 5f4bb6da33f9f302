"""A rank's BlockMask is what torch makes of the same function of local rows and columns."""

import functools
from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attnspan.errors import PlanError
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.layouts.run import Run
from attnspan.masks import Causal, Documents, KeyPadding, Mask, MaskMod, SlidingWindow, cover
from attnspan.plan import Plan
from attnspan.plan.local_blocks import local_block_mask

WINDOWS = torch.tensor([3, 20, 60])
LENGTHS = torch.tensor([50, 91])


def by_head(b, h, q, k):
    return (q >= k) & (q - k < WINDOWS[h])


def by_row_and_head(b, h, q, k):
    return (q - k < WINDOWS[h]) & (k < LENGTHS[b])


MASKS = {
    "causal": lambda: Causal(),
    "documents": lambda: Causal() & Documents([[40, 51], [13, 78]]),
    "window": lambda: SlidingWindow(17, 5) & KeyPadding(80),
    "a function": lambda: MaskMod(lambda b, h, q, k: (q * 3 + k) % 7 < 5, block=16),
    "by head": lambda: MaskMod(by_head, heads=3, block=16),
    "by row and head": lambda: MaskMod(by_row_and_head, heads=3, rows=2, block=16),
    "a BlockMask": lambda: Mask.from_block_mask(create_block_mask(by_row_and_head, 2, 3, 91, 91, "cpu", (16, 8))),
}
LAYOUTS = {
    "contiguous": lambda mask: Contiguous(3),
    "head-tail": lambda mask: HeadTail(3),
    "striped": lambda mask: Striped(3),
    "a row each": lambda mask: Balanced(mask, ranks=3, chunk=4, per_row=mask.rows > 1),
}


def same(found, true):
    """Whether two BlockMasks list the same blocks."""
    return all(
        torch.equal(
            blocks(getattr(found, counts), getattr(found, indices)),
            blocks(getattr(true, counts), getattr(true, indices)),
        )
        for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"))
    )


def blocks(counts, indices):
    listed = torch.zeros(indices.shape, dtype=torch.bool)
    nth = torch.arange(indices.shape[-1]) < counts[..., None]
    return listed.scatter(-1, indices.long(), nth)


@functools.cache
def dense(name):
    """Who sees whom, (rows, heads, S, S); kept: slow to ask for, and the same for every layout, rank and size."""
    mask = MASKS[name]()
    rows = [[mask.dense(91, row=row, head=head) for head in range(mask.heads)] for row in range(mask.rows)]
    return torch.stack([torch.stack(heads) for heads in rows])


def cases():
    """Daily the three sizes take turns over masks and layouts."""
    for (i, name), (j, layout), (k, size) in product(*map(enumerate, (MASKS, LAYOUTS, [8, (16, 4), (5, 12)]))):
        marks = [pytest.mark.slow] if (i + j + k) % 3 else []
        yield pytest.param(name, layout, size, marks=marks, id=f"{name}-{layout}-{size}")


@pytest.mark.parametrize(("name", "layout", "size"), list(cases()))
def test_a_local_block_mask_is_the_one_that_torch_makes(name, layout, size):
    mask, whole = MASKS[name](), dense(name)
    plan = Plan(mask, LAYOUTS[layout](mask), 91)
    for rank in range(3):
        found = local_block_mask(plan, rank, block_size=size)
        rows, n = plan.batch_rows, plan.layout.tokens(91)[rank]
        places = torch.tensor([plan.layout.positions(91, row)[rank] for row in range(rows)])
        allowed = torch.stack([whole[row if mask.rows > 1 else 0][:, places[row]] for row in range(rows)])
        true = create_block_mask(lambda b, h, q, k, a=allowed: a[b, h, q, k], rows, mask.heads, n, 91, "cpu", size)
        assert same(found, true)
        indices = (torch.arange(s).reshape(-1, *[1] * (3 - i)) for i, s in enumerate(allowed.shape))
        assert torch.equal(found.mask_mod(*indices).expand(allowed.shape), allowed)


def test_keys_may_be_those_of_any_arena():
    plan = Plan(Causal(), HeadTail(2), 64)
    arena = (Run(16, 32), Run(0, 8))
    found = local_block_mask(plan, 1, keys=arena, block_size=8)
    assert found.shape == (1, 1, 32, 24)
    listed = (found.kv_num_blocks + found.full_kv_num_blocks)[0, 0].tolist()
    assert listed == [2, 3, 3, 3]  # positions 16-47: keys 16-23, then 16-31, and keys 0-7 always


def test_a_rank_without_queries_has_no_blocks():
    with pytest.raises(PlanError, match="rank 0 has 0 queries and 3 keys: there is no block to list"):
        local_block_mask(Plan(Causal(), Contiguous(4), 3), 0)


@pytest.mark.slow
def test_a_long_block_mask_is_sharded_within_2_GB(monkeypatch):
    """256k tokens, a function that has no bands: 64 G pairs, of which a rank asks those of its own rows."""
    import resource

    size, n = 128, 1 << 18
    band = torch.arange(n // size)
    near = ((band[:, None] - band).abs() <= 4)[None, None]
    order = (~near).int().argsort(dim=-1, stable=True).int()
    from torch.nn.attention.flex_attention import BlockMask

    monkeypatch.setattr(cover, "_is_plain", lambda some, every: False)
    block_mask = BlockMask.from_kv_blocks(
        near.sum(-1).int(), order, BLOCK_SIZE=size, mask_mod=lambda b, h, q, k: (q + k) % 3 != 0, seq_lengths=(n, n)
    )
    plan = Plan(Mask.from_block_mask(block_mask), HeadTail(8), n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = local_block_mask(plan, 3)
    assert int(found.kv_num_blocks.sum()) == int(
        near[0, 0, torch.tensor(plan.layout.positions(n)[3])[::128] // 128].sum()
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20

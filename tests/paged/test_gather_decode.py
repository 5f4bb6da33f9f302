"""Single queries of many rows at once are dense attention, row by row; whatever is nobody's is poisoned."""

import pytest
import torch

from attnspan.paged import PageAllocator, PageLayer, PagePool, ShardedPages
from attnspan.paged.kernels import gather_decode
from attnspan.testing import loopback
from tests.paged.cases import Cache, agree


def soft_cap(score, b, h, q, k):
    return 5.0 * torch.tanh(score / 5.0)


def per_row(score, b, h, q, k):
    return score + 0.2 * b * (k % 3) - 0.1 * (h + 1) * (q - k)


@pytest.fixture
def groups(monkeypatch):
    """The groups that were made, by their rows."""
    seen, original = [], gather_decode.groups

    def noted(*arguments):
        found = original(*arguments)
        seen.extend(group.rows for group in found)
        return found

    monkeypatch.setattr(gather_decode, "groups", noted)
    return seen


def decoding(lengths, **options):
    """A step in which every row has one token but the second, which has four."""
    cache = Cache(**({"max_sequences": 16, "pages": 400} | options))
    rows = [cache.add(length) for length in lengths]
    cache.step([(row, 4 if place == 1 else 1) for place, row in enumerate(rows)])
    return cache


LENGTHS = [17, 3, 40, 1, 90, 16, 88, 15]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize("score_mod", [None, soft_cap, per_row])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_rows_of_one_query_are_dense_attention(groups, page_size, window, score_mod, kv_heads):
    cache = decoding(LENGTHS, page_size=page_size, window=window, kv_heads=kv_heads)
    agree(cache.attend(kernel="gather", score_mod=score_mod), cache.expected(score_mod=score_mod))
    assert sorted(row for group in groups for row in group) == [0, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_served_together(groups, dtype):
    cache = decoding(LENGTHS, dtype=dtype)
    agree(cache.attend(kernel="gather"), cache.expected(), dtype)
    assert groups


def test_rows_of_very_different_lengths_do_not_share_a_call(groups, monkeypatch):
    monkeypatch.setattr(gather_decode, "CHEAP", 0)
    cache = decoding([300, 290, 5, 6, 7, 280], max_tokens=1200)
    agree(cache.attend(kernel="gather"), cache.expected())
    assert sorted(map(sorted, groups)) == [[0, 5], [2, 3, 4]]


def test_pages_that_were_released_behind_a_window_are_not_read(groups):
    cache = decoding([60, 5, 33, 47], window=6)
    rows = [row for row, _ in cache.rows]
    for row in rows:
        cache.allocator.release_window(row, 6)
    cache.step([(row, 1) for row in rows])
    agree(cache.attend(kernel="gather"), cache.expected())
    assert sorted(groups[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("score_mod", [None, per_row])
def test_keys_that_are_spread_over_ranks_are_attended_to_together(score_mod):
    lengths = [17, 3, 40, 1, 90]

    def rank(world):
        allocator = PageAllocator(num_pages=64, page_size=4 * world.ranks)
        pages = ShardedPages(PagePool(allocator, [PageLayer(2, 8, window=30)], page_size=4), world, interleave=2)
        plan = pages.plan(max_sequences=5, max_tokens=200, max_length=100)
        rows, draw = [allocator.add() for _ in lengths], torch.Generator().manual_seed(0)
        for batch in (list(zip(rows, lengths, strict=True)), [(row, 1) for row in rows]):
            plan.step(batch)
            q, k, v = (torch.randn(plan.tokens, heads, 8, generator=draw) for heads in (4, 2, 2))
            pages.write(0, k, v, plan)
        return pages.attend(0, q, plan, score_mod=score_mod)

    [alone], several = (loopback(ranks).run(rank) for ranks in (1, 3))
    for found in several:
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)  # float32, joined from three parts

"""The block lists and functions that FlexAttention over pages is given.

FlexAttention itself runs on CUDA (test_cuda.py). Here a stand-in reads the lists as FlexAttention does: every slot of a
listed page is multiplied, full pages are not asked, and what is not listed is not read. NaN in a slot that is read
shows even where its weight is 0, as it does there.
"""

from types import SimpleNamespace

import pytest
import torch

from attnspan.masks import Full, MaskMod, PrefixLM, SlidingWindow, Tree
from attnspan.paged import AfterPrefix
from attnspan.paged.kernels import flex
from tests.paged.cases import Cache, agree, alike_out_of_order, words


def as_flex_attention_does(q, k, v, score_mod, block_mask, scale):
    size = block_mask.BLOCK_SIZE[1]
    g, heads, n, _ = q.shape
    out, lse = q.new_zeros(g, heads, n, v.shape[3]), q.new_full((g, heads, n), -torch.inf)
    k, v = (x[0].repeat_interleave(heads // x.shape[1], 0) for x in (k, v))
    for b in range(g):
        asked, full = (
            (pages[b, 0, 0, : counts[b, 0, 0]].unsqueeze(1) * size + torch.arange(size)).flatten()
            for counts, pages in (
                (block_mask.kv_num_blocks, block_mask.kv_indices),
                (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
            )
        )
        at = torch.cat([asked, full])
        indices = torch.tensor(b), torch.arange(heads)[:, None, None], torch.arange(n)[:, None], at
        scores = q[b] @ k[:, at].mT * scale
        if score_mod is not None:
            scores = score_mod(scores, *indices)
        allowed = block_mask.mask_mod(*indices).expand(heads, n, -1) | (torch.arange(len(at)) >= len(asked))
        scores = scores.masked_fill(~allowed, -torch.inf)
        lse[b] = scores.logsumexp(-1)
        weights = (scores - lse[b].unsqueeze(-1)).exp().nan_to_num(0.0)
        out[b] = weights @ v[:, at]
    return out, lse


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda programs: as_flex_attention_does)
    monkeypatch.setattr(flex, "supports", lambda *asked: None)


OPTIONS = [
    {},
    {"mask": Full()},
    {"mask": SlidingWindow(6)},
    {"mask": SlidingWindow(40)},
    {"mask": PrefixLM(7)},
    {"mask": MaskMod(lambda b, h, q, k: (k <= q) & ((q + k) % 3 != 0))},
    {"mask": MaskMod(lambda b, h, q, k: (k <= q) & ((k + b) % 2 == 0), rows=4)},
    {"score_mod": lambda s, b, h, q, k: 5 * torch.tanh(s / 5) - 0.1 * (h + 1) * (q - k) + 0.2 * b},
]


@pytest.mark.parametrize("options", OPTIONS, ids=words)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_lists_say_what_each_row_sees(stand_in, options, page_size):
    cache = Cache(page_size=page_size)
    a, b, c, d = (cache.add() for _ in range(4))
    for batch in (
        [(a, 17), (b, 1), (c, 40), (d, 17)],
        [(c, 1), (a, 1), (d, 9), (b, 0)],
        [(a, 1), (b, 1), (c, 1), (d, 1)],
    ):
        cache.step(batch)
        agree(cache.attend(kernel="flex", **options), cache.expected(**options))


def test_forks_share_pages_under_one_index(stand_in):
    cache = Cache(page_size=4)
    a = cache.add(10)
    b, c = cache.fork(a, 2)
    cache.step([(a, 1), (b, 2), (c, 3)])
    agree(cache.attend(kernel="flex"), cache.expected())
    cache.trim(b, 3)  # into a page that others hold more of: without new tokens, its tail is theirs
    cache.step([(c, 1), (b, 0)])
    agree(cache.attend(kernel="flex"), cache.expected())
    cache.step([(a, 1), (b, 1)])
    agree(cache.attend(kernel="flex"), cache.expected())


def test_pages_behind_a_window_are_not_listed(stand_in):
    cache = Cache(page_size=4, window=6)
    a = cache.add(30)
    cache.allocator.release_window(a, 6)
    cache.step([(a, 1)])
    agree(cache.attend(kernel="flex"), cache.expected())


def test_shared_pages_are_listed_for_every_position(stand_in):
    cache = alike_out_of_order()
    agree(cache.attend(kernel="flex"), cache.expected())


def test_a_tree_of_guesses(stand_in):
    cache = Cache(page_size=4)
    a, b = cache.add(9), cache.add(14)
    cache.step([(a, 3), (b, 3)])
    mask = AfterPrefix(Tree([-1, 0, 0]))
    agree(cache.attend(kernel="flex", mask=mask), cache.attend(kernel="reference", mask=mask))


def test_the_kernel_says_what_it_cannot():
    cache = Cache(page_size=16)
    cache.step([(cache.add(), 1)])
    metadata, pages = cache.plan.metadata, (cache.pool.keys[0], cache.pool.values[0])
    assert flex.supports(None, metadata, cache.query, *pages) == "flex runs on cuda, got tensors on cpu"
    on_cuda = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64, shape=cache.query.shape, is_cuda=True)
    assert "flex needs pages of 128 slots or a multiple" in flex.supports(None, metadata, on_cuda, *pages)
    wide = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=(1, 8, 128), is_cuda=True)
    paged = SimpleNamespace(page_size=128, spread=metadata.spread)
    huge = torch.empty(16500, 128, 8, 128, device="meta")
    assert "at most 2^31 numbers" in flex.supports(None, paged, wide, huge, huge)

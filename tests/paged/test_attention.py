"""Attention over pages is dense attention, whatever the pages, the batch, the mask and the way it came about.

Every test poisons with NaN whatever slot holds no token of a living sequence: freed pages, tails of pages, the null
page. A single read of one of them would show.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan.masks import (
    Causal,
    Chunked,
    Documents,
    Full,
    KeyPadding,
    MaskMod,
    PrefixLM,
    SinkTokens,
    SlidingWindow,
    Tree,
)
from attnspan.paged import AfterPrefix, PrefixCache
from tests.paged.cases import Cache, agree, alike_out_of_order

CPU_KERNELS = ["auto", "gather", "reference"]
PAGE_SIZES = [1, 3, 16, 128]


def soft_cap(score, b, h, q, k):
    return 5.0 * torch.tanh(score / 5.0)


def alibi(score, b, h, q, k):
    return score - (h + 1) * 0.1 * (q - k)


def per_row(score, b, h, q, k):
    return score + 0.2 * b * (k % 3)


def ragged(cache):
    """Prompts, chunks and single tokens, twice; a row without tokens among them."""
    a, b, c, d = (cache.add() for _ in range(4))
    cache.step([(a, 17), (b, 1), (c, 40)])
    cache.step([(c, 1), (a, 5), (d, 9), (b, 0)])
    return a, b, c, d


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_a_ragged_batch_is_dense_attention(kernel, page_size, heads, kv_heads):
    cache = Cache(page_size=page_size, heads=heads, kv_heads=kv_heads, value_dim=8)
    ragged(cache)
    agree(cache.attend(kernel=kernel), cache.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_every_dtype_is_served(kernel, dtype):
    cache = Cache(dtype=dtype)
    ragged(cache)
    found = cache.attend(kernel=kernel)
    assert found[0].dtype == dtype
    agree(found, cache.expected(), dtype)


def test_values_may_have_a_dim_of_their_own():
    cache = Cache(dim=8, value_dim=5)
    ragged(cache)
    agree(cache.attend(), cache.expected())


MASKS = {
    "full": Full(),
    "window": SlidingWindow(6),
    "causal and window": Causal() & SlidingWindow(3),
    "window ahead": SlidingWindow(3, right=2),
    "chunked": Causal() & Chunked(5),
    "streaming": Causal() & (SlidingWindow(4) | SinkTokens(2)),
    "prefix": PrefixLM(7),
    "prefix by row": PrefixLM([1, 3, 9, 20]),
    "padding by row": Causal() & KeyPadding([5, 20, 3, 1]),
    "documents": Causal() & Documents([10, 20, 30]),
    "not": Causal() & ~SinkTokens(1),
    "mask_mod": MaskMod(lambda b, h, q, k: (k <= q) & ((q + k) % 3 != 0)),
    "mask_mod by row": MaskMod(lambda b, h, q, k: (k <= q) & ((k + b) % 2 == 0), rows=4),
}


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_speaks_of_positions_in_each_sequence(kernel, name):
    cache = Cache(page_size=3)
    ragged(cache)
    agree(cache.attend(kernel=kernel, mask=MASKS[name]), cache.expected(mask=MASKS[name]))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("score_mod", [soft_cap, alibi, per_row])
def test_a_score_mod_sees_positions_heads_and_rows(kernel, score_mod):
    cache = Cache(page_size=3)
    ragged(cache)
    agree(cache.attend(kernel=kernel, score_mod=score_mod), cache.expected(score_mod=score_mod))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_sinks_scale_and_lse(kernel):
    cache = Cache(page_size=3)
    ragged(cache)
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf], dtype=torch.float64)
    for scale in (0.3, -0.3, 0.0):
        agree(cache.attend(kernel=kernel, sinks=sinks, scale=scale), cache.expected(sinks=sinks, scale=scale))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("window", [1, 5, 16])
def test_a_windowed_layer_needs_only_the_pages_in_its_window(kernel, window):
    cache = Cache(page_size=3, window=window)
    a, b = cache.add(20), cache.add(7)
    for _ in range(9):
        for seq in (a, b):
            cache.allocator.release_window(seq, window)
        cache.step([(a, 1), (b, 3)])
        agree(cache.attend(kernel=kernel), cache.expected())
    assert 0 in cache.allocator.table(a)


def test_a_prompt_in_chunks_is_the_prompt_at_once():
    outs = {}
    for chunks in ([30], [10, 10, 10], [1, 28, 1], [7, 2, 9, 12]):
        cache = Cache(page_size=4, seed=5)
        q, k, v = cache.random(30, 4, 8), cache.random(30, 2, 8), cache.random(30, 2, 8)
        seq, got, first = cache.add(), [], 0
        for chunk in chunks:
            cache.plan.step([(seq, chunk)])
            some = slice(first, first + chunk)
            cache.pool.write(0, k[some], v[some], cache.plan)
            got.append(cache.pool.attend(0, q[some], cache.plan))
            first += chunk
        outs[tuple(chunks)] = torch.cat(got)
    for out in outs.values():
        torch.testing.assert_close(out, outs[30,], atol=1e-12, rtol=1e-12)


def test_what_was_trimmed_was_never_there():
    cache, twin = Cache(page_size=4, seed=1), Cache(page_size=4, seed=1)
    for each in (cache, twin):
        each.seq = each.add(10)
    cache.step([(cache.seq, 7)])  # a guess
    cache.trim(cache.seq, 10)
    state = cache.generator.get_state()
    twin.generator.set_state(state)
    for each in (cache, twin):
        each.step([(each.seq, 3)])
        agree(each.attend(), each.expected())
    assert torch.equal(cache.attend()[0], twin.attend()[0])


def test_forks_share_and_then_go_their_own_ways():
    cache = Cache(page_size=4)
    a = cache.add(10)
    b, c = cache.fork(a, 2)
    for _ in range(6):
        cache.step([(a, 1), (b, 2), (c, 1)])
        agree(cache.attend(), cache.expected())
    assert cache.allocator.table(a)[:2] == cache.allocator.table(c)[:2]
    cache.allocator.free(a)
    del cache.k[a], cache.v[a]
    cache.step([(b, 1), (c, 1)])
    agree(cache.attend(), cache.expected())


@pytest.mark.parametrize("agreed", [1, 3, 4, 7, 9, 11])
def test_a_prefix_hit_is_no_hit(agreed):
    cache = Cache(page_size=4)
    prefixes = PrefixCache(cache.allocator)
    first = list(range(12))
    seq, _ = prefixes.add(first)
    cache.k[seq], cache.v[seq] = cache.random(0, 2, 8), cache.random(0, 2, 8)
    cache.step([(seq, 12)])
    prefixes.insert(seq, first)
    prompt = [*first[:agreed], *range(100, 105)]
    hit, length = prefixes.add(prompt)
    assert length == agreed
    cache.k[hit], cache.v[hit] = cache.k[seq][:length], cache.v[seq][:length]
    cache.step([(hit, len(prompt) - length), (seq, 1)])
    agree(cache.attend(), cache.expected())
    cache.allocator.free(seq)  # the cache reads its pages still
    cache.step([(hit, 1)])
    agree(cache.attend(), cache.expected())


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_rows_that_begin_alike_may_read_their_pages_once(kernel):
    cache = Cache(page_size=2, window=None)
    a, other = cache.add(21), cache.add(5)
    b, c = cache.fork(a, 2)
    cache.step([(other, 3), (a, 1), (b, 3), (c, 2)], share=True)
    assert [(group.first, group.last, group.length) for group in cache.plan.shared] == [(1, 4, 20)]
    agree(cache.attend(kernel=kernel), cache.expected())


@pytest.mark.parametrize("window", [3, 12, 30])
def test_rows_that_begin_alike_keep_their_windows(window):
    cache = Cache(page_size=2, window=window)
    a = cache.add(21)
    b, c = cache.fork(a, 2)
    cache.step([(a, 1), (b, 6), (c, 2)], share=True)
    assert cache.plan.shared
    agree(cache.attend(), cache.expected())


def test_rows_that_begin_alike_may_be_at_any_positions():
    cache = alike_out_of_order()
    agree(cache.attend(), cache.expected())


def test_rows_that_begin_alike_may_stand_beside_one_without_tokens():
    cache = Cache(page_size=1)
    a, empty = cache.add(9), cache.add()
    [b] = cache.fork(a, 1)
    cache.step([(a, 1), (empty, 0), (b, 1)], share=True)
    agree(cache.attend(), cache.expected())


def test_beginnings_may_be_shared_within_shared_beginnings():
    cache = Cache(page_size=2, max_sequences=8)
    a = cache.add(12)
    b = cache.fork(a, 1)[0]
    cache.step([(a, 12), (b, 9)])
    rows = [a, *cache.fork(a, 2), b, *cache.fork(b, 2)]
    for batch in (rows, rows[::-1], [rows[0], rows[3], rows[1], rows[4]]):
        cache.step([(seq, 1 + place % 3) for place, seq in enumerate(batch)], share=True)
        assert cache.plan.shared
        agree(cache.attend(), cache.expected())


@pytest.mark.parametrize("name", MASKS)
def test_a_step_without_sequences_has_an_empty_result(name):
    cache = Cache(page_size=3)
    cache.step([])
    out, lse = cache.attend(mask=MASKS[name])
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


def test_a_sequence_that_begins_where_another_was_reads_its_own_pages():
    """A row of the tables held ten pages of another sequence, then one that had none yet, which now grows."""
    cache = Cache(page_size=1)
    cache.add(10)
    a = cache.add()
    for new in (0, 1, 2):
        cache.step([(a, new)])
        if new:
            agree(cache.attend(), cache.expected())


def test_any_whole_number_counts_tokens():
    cache = Cache(page_size=3)
    a, b = cache.add(5), cache.add(3)
    cache.step([(a, torch.tensor(2)), (b, 4)])
    assert cache.plan.tokens == 6
    agree(cache.attend(), cache.expected())


TREE = Tree([-1, -1, 0, 1, 1, 2])  # two roots: the second does not see the first, and both see the prompt


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_a_tree_of_guesses_is_seen_by_its_branches(kernel):
    cache = Cache(page_size=4)
    a, b, c = cache.add(9), cache.add(14), cache.add(3)
    cache.step([(a, 6), (b, 6), (c, 1)])
    mask = AfterPrefix([TREE, Tree([-1, 0, 1, 2, 3, 4]), Tree([-1])])
    found = cache.attend(kernel=kernel, mask=mask)
    first = 0
    for (seq, new), tree in zip(cache.rows, mask.masks, strict=True):
        length = len(cache.k[seq])
        allowed = torch.ones(length, length, dtype=torch.bool)
        allowed[length - new :, length - new :] = tree.dense(new)
        whole = Tree([-1, *(p + 1 for p in tree.parents)], [length - new, *[1] * new])  # the prompt as a root
        assert torch.equal(allowed[length - new :], whole.dense(length)[length - new :])
        first += new
    wanted = [expected_row(cache, row, mask) for row in range(3)]
    agree(found, [torch.cat(each) for each in zip(*wanted, strict=True)])


def expected_row(cache, row, mask):
    (seq, new), tree = cache.rows[row], mask.masks[row]
    length = len(cache.k[seq])
    first = sum(count for _, count in cache.rows[:row])
    alone = Cache(page_size=4)
    alone.rows, alone.query = [(seq, new)], cache.query[first : first + new]
    alone.k, alone.v = cache.k, cache.v
    return alone.expected(mask=Tree([-1, *(p + 1 for p in tree.parents)], [length - new, *[1] * new]))


def test_physical_pages_do_not_matter():
    outs = []
    for seed in range(3):
        cache = Cache(page_size=3, pages=40, seed=9)
        order = torch.randperm(39, generator=torch.Generator().manual_seed(seed)).add(1).tolist()
        cache.allocator._free = order
        ragged(cache)
        outs.append(cache.attend())
    for out, lse in outs[1:]:
        assert torch.equal(out, outs[0][0])
        assert torch.equal(lse, outs[0][1])


def test_swapping_out_and_in_changes_nothing():
    cache = Cache(page_size=4, host_pages=20)
    a, b = cache.add(13), cache.add(6)
    cache.pool.swap_out(a)
    cache.poison()
    cache.step([(b, 2)])
    agree(cache.attend(), cache.expected())
    c = cache.add(9)
    cache.pool.swap_in(a)
    cache.step([(a, 1), (b, 1), (c, 1)])
    agree(cache.attend(), cache.expected())


def test_padding_rows_see_nothing_and_write_to_nobody():
    cache = Cache(page_size=4)
    a, b = cache.add(5), cache.add(9)
    cache.plan.step([(a, 1), (b, 1)], pad_to=6)
    q, k, v = cache.random(6, 4, 8), cache.random(6, 2, 8), cache.random(6, 2, 8)
    before = [pages.clone() for pages in (*cache.pool.keys, *cache.pool.values)]
    cache.pool.write(0, k, v, cache.plan)
    slots = set(cache.plan.slots.tolist())
    for old, pages in zip(before, (*cache.pool.keys, *cache.pool.values), strict=True):
        changed = (old.flatten(0, 1).nan_to_num(0) != pages.flatten(0, 1).nan_to_num(0)).any(-1).any(-1).nonzero()
        assert set(changed.flatten().tolist()) <= slots
    out, lse = cache.pool.attend(0, q, cache.plan, return_lse=True)
    assert out[2:].abs().max() == 0
    assert (lse[2:] == -torch.inf).all()
    cache.query, cache.rows = q[:2], [(a, 1), (b, 1)]
    for seq, row in ((a, 0), (b, 1)):
        cache.k[seq], cache.v[seq] = (
            torch.cat([cache.k[seq], k[row : row + 1]]),
            torch.cat([cache.v[seq], v[row : row + 1]]),
        )
    agree((out[:2], lse[:2]), cache.expected())


@settings(max_examples=25)
@given(st.data())
def test_any_history_gives_dense_attention(data):
    """Steps, forks, trims, releases and frees in random order; after every step attention is the oracle's."""
    cache = Cache(
        page_size=data.draw(st.sampled_from([1, 2, 3, 5])),
        pages=60,
        window=data.draw(st.sampled_from([None, 4])),
        max_length=200,
    )
    living = [cache.add(3)]
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["fork", "trim", "free", "release", "add"]))
        seq = data.draw(st.sampled_from(living))
        length = cache.allocator.length(seq)
        if kind == "fork":
            living += cache.fork(seq, 2)
        elif kind == "trim":
            cache.trim(seq, data.draw(st.integers(max(cache.allocator._rows[seq].first, length - 4), length)))
        elif kind == "free" and len(living) > 1:
            living.remove(seq)
            cache.allocator.free(seq)
        elif kind == "release" and cache.layer.window and length == cache.allocator.length(seq):
            cache.allocator.release_window(seq, cache.layer.window + 4)  # as far back as a trim here can go
        elif kind == "add":
            living.append(cache.add())
        chosen = data.draw(st.lists(st.sampled_from(living), min_size=1, max_size=5, unique=True))
        batch = [(seq, data.draw(st.integers(0, 6))) for seq in chosen]
        if sum(new for _, new in batch) // cache.allocator.page_size + 12 > cache.allocator.free_pages:
            break
        cache.step(batch, share=data.draw(st.booleans()))
        if cache.plan.tokens:
            agree(cache.attend(), cache.expected())
        cache.allocator.check()


def test_every_pair_of_page_size_and_length_around_a_border():
    for page_size, length in itertools.product([1, 2, 3, 4], range(1, 10)):
        cache = Cache(page_size=page_size)
        seq = cache.add(length)
        cache.step([(seq, 1)])
        agree(cache.attend(), cache.expected())

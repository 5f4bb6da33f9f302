"""A mask, a BlockMask and a score_mod are what their functions compute at the time of asking, nothing in between.

Ranks are virtual, so that what a function reads is changed once, for all of them, between two runs of all ranks.
"""

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import attnspan as span
from attnspan.errors import AttentionError, MaskError
from attnspan.masks import MaskMod
from attnspan.masks.tracing import traced
from attnspan.testing import loopback
from tests.turns import in_turn

LENGTH, HEADS, RANKS = 32, 2, 2
STRATEGIES = ("gather", "ring", "needed", "ulysses", "auto")
QKV = torch.randn(3, 1, HEADS, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()


def ids_of(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def dense(fn, score_mod=None):
    """Attention on one device under what functions compute now, with nothing of ours."""
    query, key, value = QKV
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if score_mod is not None:
        indices = torch.zeros(1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1), torch.arange(LENGTH).view(-1, 1)
        scores = score_mod(scores, *indices, torch.arange(LENGTH))
    allowed = create_mask(lambda b, h, q, k: fn(b, h, q, k), 1, 1, LENGTH, LENGTH, device="cpu")
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value


def on_ranks(attend, strategy="gather", mask=None, ranks=RANKS):
    """attend(cp, q, k, v) on virtual ranks, whole. `mask` makes the session's."""

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=mask() if mask else span.Causal(), strategy=strategy)
        return cp.unshard(attend(cp, *(cp.shard(x, dim=2) for x in QKV)), dim=2)

    return loopback(ranks).run(rank)[0]


def close(found, true):
    torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-10)


def own(cp, q, k, v):
    return cp.attention(q, k, v)


# ---- what may change -------------------------------------------------------------------------------------------------


class Settings:
    window = 4


def packed():
    """Documents by captured ids: bands."""
    ids = ids_of(9, 23)
    return ids, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def windowed():
    """Every second key of a window that is an attribute: blocks that are asked again."""
    Settings.window = 4
    return None, lambda b, h, q, k: (q >= k) & ((q - k) % 2 == 0) & (q - k < Settings.window)


WRITES = {
    "copy_": lambda ids: ids.copy_(ids_of(20, 4, 8)),
    "an entry": lambda ids: ids.__setitem__(slice(5, None), 1),
    "numpy": lambda ids: ids.numpy().__setitem__(slice(None), ids_of(20, 4, 8).numpy()),
    ".data": lambda ids: ids.data.copy_(ids_of(20, 4, 8)),
    "a new .data": lambda ids: setattr(ids, "data", ids_of(20, 4, 8)),
}

CHANGES = {name: (packed, write) for name, write in WRITES.items()} | {
    "an attribute": (windowed, lambda ids: setattr(Settings, "window", 20))
}


@pytest.fixture(autouse=True)
def few_bands(monkeypatch):
    """Short sequences are asked in blocks too, as long ones are."""
    from attnspan.masks import question

    monkeypatch.setattr(question, "FEW", 4)


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "strategy"), in_turn(CHANGES, STRATEGIES))
def test_a_new_mask_of_a_function_is_what_the_function_computes_then(change, strategy):
    made, write = CHANGES[change]
    captured, fn = made()
    first = dense(fn)
    close(on_ranks(own, strategy, lambda: MaskMod(fn, block=8)), first)
    write(captured)
    then = dense(fn)
    assert not torch.allclose(first, then)
    close(on_ranks(own, strategy, lambda: MaskMod(fn, block=8)), then)


@pytest.mark.parametrize("change", CHANGES)
def test_a_session_refuses_a_mask_that_has_changed_and_goes_on_with_a_new_one(change):
    """Doing what the message says works; so does it after a change back."""
    made, write = CHANGES[change]
    captured, fn = made()
    before = dense(fn)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=MaskMod(fn, block=8) & span.Full())
        q, k, v = (cp.shard(x, dim=2) for x in QKV)
        close(cp.unshard(cp.attention(q, k, v), dim=2), before)
        write(captured)
        message = (
            r"mask: <lambda> has changed: .*; make a new mask of it, as MaskMod\(<lambda>\), and a session for that"
        )
        for _ in range(2):
            with pytest.raises(AttentionError, match=message):
                cp.attention(q, k, v)
        new = cp.with_mask(MaskMod(fn, block=8) & span.Full())
        q, k, v = (new.shard(x, dim=2) for x in QKV)
        close(new.unshard(new.attention(q, k, v), dim=2), dense(fn))

    loopback(1).run(rank)


def test_an_equal_mask_of_another_function_is_not_refused_for_it():
    """Plans and sessions are remembered by what masks compute; whether one has changed is asked of the one given."""

    def mask(ids):
        return MaskMod(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), block=8)

    one, two = ids_of(9, 23), ids_of(9, 23)
    true = dense(lambda b, h, q, k: (two[q] == two[k]) & (q >= k))
    assert mask(one) == mask(two)

    def rank(world):
        first = span.ContextParallel(world, seq_len=LENGTH, mask=span.Full())
        cp = first.with_mask(mask(one))
        cp.attention(*(cp.shard(x, dim=2) for x in QKV))
        plan = span.Plan(mask(one), cp.layout, LENGTH)
        span.attention(*(cp.shard(x, dim=2) for x in QKV), plan=plan, group=world)
        one.zero_()
        again = first.with_mask(mask(two))
        shards = [again.shard(x, dim=2) for x in QKV]
        close(again.unshard(again.attention(*shards), dim=2), true)
        plan = span.Plan(mask(two), again.layout, LENGTH)
        close(again.unshard(span.attention(*shards, plan=plan, group=world), dim=2), true)
        close(again.unshard(again.flex_attention(*shards, block_mask=mask(two)), dim=2), true)
        with pytest.raises(AttentionError, match="has changed"):
            span.attention(*shards, plan=span.Plan(cp.mask, cp.layout, LENGTH), group=world)

    loopback(1).run(rank)


def test_a_mask_keeps_to_what_it_was():
    """Everything it is asked for, before and after, is of one mask."""
    ids, fn = packed()
    mask = MaskMod(fn, block=8)
    before = mask.dense(LENGTH)
    ids.zero_()
    assert torch.equal(mask.dense(LENGTH), before)
    assert mask.work(LENGTH) == before.sum()
    assert MaskMod(fn, block=8) != mask
    ids.copy_(ids_of(9, 23))
    assert MaskMod(fn, block=8) == mask


def test_backward_and_a_recomputation_use_the_mask_of_the_forward_pass():
    _, fn = windowed()

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=MaskMod(fn, block=8))
        q, k, v = (cp.shard(x, dim=2).clone().requires_grad_() for x in QKV)
        out = cp.attention(q, k, v)
        Settings.window = 11
        out.square().sum().backward()
        return q.grad

    found = loopback(1).run(rank)[0]
    leaf = QKV[0].clone().requires_grad_()
    Settings.window = 4
    scores = leaf @ QKV[1].mT * 8**-0.5
    allowed = create_mask(fn, 1, 1, LENGTH, LENGTH, device="cpu")
    (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ QKV[2]).square().sum().backward()
    close(found, leaf.grad)


def test_ranks_whose_masks_captured_other_tensors_do_not_agree():
    def rank(world):
        dots = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5
        if world.rank == 1:
            dots[3, 5] ^= True  # inside a block that is asked
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=MaskMod(lambda b, h, q, k: dots[q, k], block=8))
        cp.attention(*(cp.shard(x, dim=2) for x in QKV))

    with pytest.raises(AttentionError, match=r"rank 1 differs from rank 0 in captured tensors\n"):
        loopback(2).run(rank)


def test_ranks_whose_score_mods_captured_other_values_do_not_agree():
    def rank(world):
        bias = torch.full((LENGTH,), float(world.rank))
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        shards = [cp.shard(x, dim=2) for x in QKV]
        cp.flex_attention(*shards, score_mod=lambda s, b, h, q, k: s + bias[k], block_mask=cp.mask)

    with pytest.raises(AttentionError, match=r"rank 1 differs from rank 0 in captured tensors\n"):
        loopback(2).run(rank)


# ---- BlockMasks ------------------------------------------------------------------------------------------------------


def listed(block_mask):
    """What torch's flex_attention allows: blocks as listed, partial ones by what the mask_mod computes now."""
    size, shape = block_mask.BLOCK_SIZE[0], (LENGTH, LENGTH)
    partial, full = torch.zeros(shape).bool(), torch.zeros(shape).bool()
    for counts, indices, into in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, partial),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, full),
    ):
        for i in range(LENGTH // size):
            for j in indices[0, 0, i, : counts[0, 0, i]].tolist():
                into[i * size : (i + 1) * size, j * size : (j + 1) * size] = True
    return lambda b, h, q, k: full[q, k] | (partial[q, k] & block_mask.mask_mod(b, h, q, k))


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_mask_is_what_it_means_at_each_call(change):
    made, write = CHANGES[change]
    captured, fn = made()
    block_mask = create_block_mask(fn, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        shards = [cp.shard(x, dim=2) for x in QKV]
        for _ in range(2):
            close(cp.unshard(cp.flex_attention(*shards, block_mask=block_mask), dim=2), dense(listed(block_mask)))
            write(captured)

    loopback(1).run(rank)


def test_lists_of_a_block_mask_that_were_written_to_are_read_again():
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        shards = [cp.shard(x, dim=2) for x in QKV]
        cp.flex_attention(*shards, block_mask=block_mask)
        block_mask.full_kv_num_blocks.numpy()[...] = 0
        close(cp.unshard(cp.flex_attention(*shards, block_mask=block_mask), dim=2), dense(listed(block_mask)))

    loopback(1).run(rank)


def test_what_was_prepared_refuses_a_block_mask_that_has_changed():
    ids, fn = packed()
    block_mask = create_block_mask(fn, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        shards = [cp.shard(x, dim=2) for x in QKV]
        prepared = cp.attention_for(block_mask)
        prepared(*shards)
        ids.numpy()[5:] = 2
        with pytest.raises(AttentionError, match="mask: <lambda> has changed"):
            prepared(*shards)
        close(cp.unshard(cp.attention_for(block_mask)(*shards), dim=2), dense(listed(block_mask)))

    loopback(1).run(rank)


# ---- score_mods ------------------------------------------------------------------------------------------------------


def flexed(score_mod, cp, q, k, v):
    return cp.flex_attention(q, k, v, score_mod=score_mod, block_mask=cp.mask)


def prepared(score_mod, cp, q, k, v):
    return cp.attention_for(cp.mask, score_mod=score_mod)(q, k, v)


def by_function(score_mod, cp, q, k, v):
    plan = span.Plan(cp.mask, cp.layout, LENGTH)
    return span.attention(q, k, v, plan=plan, group=cp.transport, score_mod=score_mod)


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("way", [flexed, prepared, by_function])
def test_a_score_mod_that_captures_by_dtype_gets_the_dtype_it_runs_in(way):
    tables = {
        torch.float32: torch.zeros(LENGTH),
        torch.float64: torch.linspace(0, 3, LENGTH, dtype=torch.float64),
    }

    def by_dtype(score, b, h, q, k):
        return score + tables[score.dtype][k]

    close(on_ranks(functools.partial(way, by_dtype)), dense(causal, by_dtype))
    del tables[torch.float64]
    with pytest.raises(AttentionError, match=r"by_dtype could not be evaluated as a score_mod: torch\.float64"):
        on_ranks(functools.partial(way, by_dtype))


def test_a_value_that_a_score_mod_reads_out_of_a_tensor_is_read_at_each_call():
    scale = torch.tensor(1.0)

    def score_mod(score, b, h, q, k):
        return score * scale.item()

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        shards = [cp.shard(x, dim=2) for x in QKV]
        for value in (1.0, 2.0, 3.0):
            scale.numpy()[...] = value
            out = cp.flex_attention(*shards, score_mod=score_mod, block_mask=cp.mask)
            close(cp.unshard(out, dim=2), dense(causal, score_mod))

    loopback(1).run(rank)


def test_a_learned_table_is_traced_once_and_read_at_each_call(monkeypatch):
    from attnspan.attention import score

    count = []
    real = score.traced
    monkeypatch.setattr(score, "traced", lambda *args, **kwargs: count.append(args) or real(*args, **kwargs))
    table = torch.zeros(LENGTH, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=100.0)

    def score_mod(score, b, h, q, k):
        return score + table[k]

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        shards = [cp.shard(x, dim=2) for x in QKV]
        for _ in range(3):
            out = cp.flex_attention(*shards, score_mod=score_mod, block_mask=cp.mask)
            close(cp.unshard(out, dim=2), dense(causal, score_mod))
            out.square().sum().backward()
            optimizer.step()
        assert table.abs().max() > 0.1

    loopback(1).run(rank)
    assert len(count) == 1


# ---- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_may_be_made_inside_a_function(inference):
    def made(score, b, h, q, k):
        return score * torch.tensor([1.0, 2.0])[h] + score.new_tensor(0.5) - torch.tensor(3, device=score.device)

    with torch.inference_mode(inference):
        close(on_ranks(functools.partial(flexed, made)), dense(causal, made))
        program = traced(lambda b, h, q, k: q - k < torch.tensor(3))
    assert program.over(*(torch.arange(n) for n in (1, 1, 4, 4))).sum() == 15


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, torch.nn.functional.dropout, lambda score: torch.empty_like(score).normal_()],
    ids=["rand_like", "dropout", "normal_"],
)
def test_functions_that_draw_random_numbers_are_refused_before_anything_travels(draw):
    def noisy(score, b, h, q, k):
        return score + draw(score)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        shards = [cp.shard(x, dim=2) for x in QKV]
        with pytest.raises(
            AttentionError, match=r"^noisy must compute the same whenever it is asked, got aten.* random"
        ):
            cp.flex_attention(*shards, score_mod=noisy, block_mask=cp.mask)
        return cp.unshard(cp.attention(*shards), dim=2)  # the group is as good as before

    close(loopback(2).run(rank)[0], dense(causal))
    with pytest.raises(MaskError, match=r"^<lambda> must compute the same whenever it is asked, got aten.* random"):
        MaskMod(lambda b, h, q, k: draw(q.float()) > 0.5)

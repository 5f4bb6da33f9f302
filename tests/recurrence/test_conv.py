"""Short convolutions and halos over ranks, against loops over tokens: any layout, any documents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnspan as span
from attnspan.layouts import Contiguous
from attnspan.testing import loopback
from attnspan.transports.counting import Counting
from tests.recurrence import oracle
from tests.recurrence.cases import cases, normal

CHANNELS = 3


def filters(width, seed=0):
    return [normal(CHANNELS, width, seed=seed), normal(CHANNELS, seed=seed + 1)]


def whole(batch, seq_len):
    return normal(batch, seq_len, CHANNELS, seed=1)


def expected_conv(lengths):
    weight, bias = filters(4)
    return oracle.conv1d(whole(1, sum(lengths)), weight, bias, [lengths]).numpy()


def convolved(layout, lengths):
    def rank(world):
        cp = span.ContextParallel(world, seq_len=sum(lengths), mask=span.Documents(lengths), layout=layout)
        return cp.unshard(cp.conv1d(cp.shard(whole(1, sum(lengths))), *filters(4)))

    return loopback(layout.ranks).run(rank)[0].numpy()


@settings(max_examples=30)
@given(cases(rules=["Linear"], most=25), st.integers(1, 6), st.booleans(), st.booleans(), st.booleans())
def test_a_convolution_over_ranks_is_that_of_one_device(case, width, biased, last, active):
    x, (weight, bias) = whole(case.batch, case.seq_len), filters(width, case.seed)
    leaves = [x, weight, bias] if biased else [x, weight]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = oracle.conv1d(x, weight, bias if biased else None, case.all_lengths)
    expected = torch.nn.functional.silu(expected) if active else expected
    towards = normal(*expected.shape, seed=2)
    grads = torch.autograd.grad((expected * towards).sum(), leaves)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=case.seq_len, mask=case.mask, layout=case.layout)
        mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        shard = cp.shard(mine[0])
        options = {"dim": 2 if last else 1, "activation": "silu" if active else None}
        given = [mine[1].unsqueeze(1) if last else mine[1], *mine[2:]]  # the shape of an nn.Conv1d's
        out = cp.conv1d(shard.transpose(1, 2) if last else shard, *given, **options)
        out = out.transpose(1, 2) if last else out
        (out * cp.shard(towards)).sum().backward()
        return cp.unshard(out.detach()), *[leaf.grad for leaf in mine]

    found = loopback(case.layout.ranks).run(rank)
    torch.testing.assert_close(found[0][0], expected.detach(), rtol=0, atol=1e-12)
    for parts, grad in zip(list(zip(*found, strict=True))[1:], grads, strict=True):
        torch.testing.assert_close(sum(parts), grad, rtol=0, atol=1e-10)


@settings(max_examples=20)
@given(cases(rules=["Linear"], most=20), st.integers(1, 5))
def test_a_halo_is_the_tokens_before_each_stretch(case, left):
    x = whole(case.batch, case.seq_len)
    firsts = [{p: first for first, stop in edges(lengths) for p in range(first, stop)} for lengths in case.all_lengths]

    def rank(world):
        cp = span.ContextParallel(world, seq_len=case.seq_len, mask=case.mask, layout=case.layout)
        halo = cp.halo(cp.shard(x), left)
        stretches = cp.stretches if len(cp.stretches) == case.batch else cp.stretches * case.batch
        most = max(map(len, stretches))
        assert halo.shape == (case.batch, most * left, CHANNELS)
        for row, each in enumerate(stretches):
            held = [p for run in each for p in run.positions]
            own = cp.positions if cp.positions.dim() == 1 else cp.positions[row]
            assert held == own.tolist()
            for number, run in enumerate(each):
                for i, p in enumerate(range(run.start - left, run.start)):
                    there = p >= firsts[row][run.start]
                    token = x[row, p] if there else torch.zeros(CHANNELS, dtype=torch.float64)
                    assert torch.equal(halo[row, number * left + i], token)
            assert not halo[row, len(each) * left :].any()

    loopback(case.layout.ranks).run(rank)


def edges(lengths):
    return [(first, stop) for _, first, stop in oracle.documents([lengths])]


def test_only_the_tokens_before_a_border_travel():
    def rank(world):
        counted = Counting(world)
        cp = span.ContextParallel(
            counted, seq_len=24, mask=span.Causal() & span.Documents([8, 9, 7]), layout=Contiguous(3)
        )
        cp.conv1d(cp.shard(whole(1, 24)), *filters(4))
        return dict(counted.sent)

    # The second shard begins with a document, the third one token before one that is 1 token old.
    assert loopback(3).run(rank) == [{}, {2: 3 * CHANNELS * 8}, {}]


WRONG = {
    "other channels": ({"weight": torch.ones(2, 4)}, r"weight must be \(3, width\) or \(3, 1, width\), .* \(2, 4\)"),
    "groups": ({"weight": torch.ones(3, 3, 4)}, r"one filter for each channel, got shape \(3, 3, 4\)"),
    "no width": ({"weight": torch.ones(3, 0)}, r"weight must have a width of at least 1"),
    "another bias": ({"bias": torch.ones(4)}, r"bias must be \(3,\), got shape \(4,\)"),
    "an activation": ({"activation": "relu"}, r"activation must be one of 'silu' or 'swish', got 'relu'|activation"),
    "a list": ({"weight": [[1.0]] * 3}, r"weight must be a tensor of floats, got list"),
    "another device": ({"weight": torch.ones(3, 4, device="meta")}, r"weight must be on cpu, where the tensor is, got"),
    "a dim": ({"dim": 0}, r"conv1d needs \(batch, tokens, channels\) with dim=1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_on_every_rank(name):
    wrong, words = WRONG[name]

    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Causal(), layout=Contiguous(2))
        given = {"weight": torch.ones(3, 4), "bias": None} | (wrong if world.rank == 1 else {})
        with pytest.raises(span.ShardError, match=words):
            cp.conv1d(torch.zeros(1, 4, 3), **given)

    loopback(2).run(rank)


UNFIT = {
    "a whole tensor": (torch.zeros(2, 8, 3), r"tensor must be a shard, with this rank's 4 of 8 tokens in dim 1"),
    "other rows": (torch.zeros(3, 4, 3), r"tensor must have 2 batch rows in dim 0, got shape \(3, 4, 3\)"),
    "whole numbers": (torch.zeros(2, 4, 3, dtype=torch.int64), r"tensor must be a tensor of floats, got int64"),
    "an array": (torch.zeros(2, 4, 3).numpy(), r"tensor must be a tensor of floats, got ndarray"),
    "a dtype of its own": (torch.zeros(2, 4, 3, dtype=torch.float64), r"all ranks must ask for the same"),
}


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", UNFIT)
def test_tensors_are_checked_whatever_the_width(name, width):
    unfit, words = UNFIT[name]

    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Documents([[5, 3], [4, 4]]), layout=Contiguous(2))
        with pytest.raises(span.ShardError, match=words):
            cp.conv1d(unfit if world.rank else torch.zeros(2, 4, 3), torch.ones(3, width))

    loopback(2).run(rank)


@pytest.mark.parametrize("width", [1, 2])
def test_transforms_are_refused_whatever_the_width(width):
    def rank(world):
        cp = span.ContextParallel(world, seq_len=4, mask=span.Causal())
        with pytest.raises(span.ShardError, match="conv1d"):
            torch.func.grad(lambda x: cp.conv1d(x, torch.ones(3, width)).sum())(torch.zeros(1, 4, 3))

    loopback(1).run(rank)


@pytest.mark.parametrize("option", [{"bias": torch.ones(3)}, {"activation": "silu"}])
def test_ranks_agree_on_bias_and_activation(option):
    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Causal(), layout=Contiguous(2))
        cp.conv1d(torch.zeros(1, 4, 3), torch.ones(3, 2), **(option if world.rank else {}))

    with pytest.raises(
        span.ShardError, match=r"rank 1 asks for conv1d of width 2, .* others for conv1d of width 2, no bias"
    ):
        loopback(2).run(rank)


@pytest.mark.parametrize("width", [1, 3])
def test_a_rank_without_tokens_has_the_dtype_of_the_others(width):
    def rank(world):
        cp = span.ContextParallel(world, seq_len=2, mask=span.Causal(), layout=Contiguous(3))
        weight, bias = (torch.ones(shape, requires_grad=True) for shape in ((3, width), (3,)))
        with torch.autocast("cpu", torch.bfloat16):
            out = cp.conv1d(cp.shard(torch.ones(1, 2, 3)), weight, bias)
        out.sum().backward()
        assert out.shape == (1, cp.sharding.tokens, 3)
        assert weight.grad.shape == weight.shape  # averaging waits for it
        assert bias.grad.sum() == 3 * cp.sharding.tokens
        return cp.unshard(out.detach()).dtype

    assert loopback(3).run(rank) == [torch.bfloat16] * 3

"""Losses and gradients over ranks are those of one device, whichever tokens count and wherever they lie.

A small model without attention is enough here: what is in question is what each token's loss is divided by, and what
averaging makes of it. Whole models are in test_composition.py.
"""

import functools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attnspan.attention import attention
from attnspan.errors import ShardError
from attnspan.layouts import Contiguous
from attnspan.masks import Causal, Full
from attnspan.parallel import ContextParallel, loss
from attnspan.testing import loopback
from attnspan.transports.counting import Counting
from tests.devices import here, mesh_of
from tests.parallel.cases import Listed, listed
from tests.processes import on_backends, spawn

S, B = 12, 2


def model(dtype=torch.float64):
    """Two layers, the same in every process."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).to(dtype)
    with torch.no_grad():
        for number, weight in enumerate(net.parameters(), start=1):
            weight.copy_(torch.linspace(-1, 1, weight.numel()).mul(number / 2).view_as(weight))
    return net


def inputs(number=0):
    """(B, S, 3), another one for each number."""
    return torch.sin(torch.arange(B * S * 3, dtype=torch.float64) * (number + 1)).view(B, S, 3)


def one_device(valid, x=None):
    """The mean loss over valid tokens and the gradients, in one place."""
    net = model()
    per_token = net(inputs() if x is None else x).squeeze(-1).square()
    mean = per_token[valid].mean() if valid.any() else per_token.sum() * 0
    return mean.detach(), torch.autograd.grad(mean, list(net.parameters()))


def close(found, true, bound=1e-12):
    # float64: sums of some dozens of terms, in another order.
    for x, y in zip(found, true, strict=True):
        assert (x - y).abs().max() <= bound * max(1.0, float(y.abs().max()))


masks_of_tokens = st.lists(st.booleans(), min_size=B * S, max_size=B * S).map(
    lambda bits: torch.tensor(bits).view(B, S)
)


@given(listed(S, 1), masks_of_tokens)
def test_mean_loss_and_averaged_gradients_are_those_of_one_device(layout, valid):
    """Ranks without a token, ranks without a valid one, and no valid one at all are among them."""
    true, true_grads = one_device(valid)

    def rank(world):
        cp, net = ContextParallel(world, seq_len=S, mask=Full(), layout=layout), model()
        per_token = net(cp.shard(inputs())).squeeze(-1).square()
        spoiled = per_token.where(cp.shard(valid), torch.nan)  # what is not valid may be anything
        mean = cp.mean_loss(spoiled, cp.shard(valid))
        mean.backward()
        cp.average_gradients(net)
        close([mean.detach()], [true])
        close([p.grad for p in net.parameters()], true_grads)
        metric = cp.mean(spoiled, cp.shard(valid))
        assert not metric.requires_grad
        assert math.isclose(metric, true, rel_tol=1e-12) if valid.any() else math.isnan(metric)
        assert cp.sum(cp.shard(valid)) == valid.sum()
        return mean.item(), [p.grad for p in net.parameters()]

    told = loopback(layout.ranks).run(rank)
    assert len({mean for mean, _ in told}) == 1, "the same bits on every rank"
    assert all(torch.equal(x, y) for _, grads in told for x, y in zip(grads, told[0][1], strict=True))


@given(st.lists(masks_of_tokens, min_size=1, max_size=4))
def test_micro_batches_with_one_count_add_up_to_the_mean_over_all_their_tokens(valids):
    """Not the mean of means: micro-batches may have any number of valid tokens, none too."""
    whole = torch.cat([inputs(number) for number in range(len(valids))])
    true, true_grads = one_device(torch.cat(valids), whole)

    def rank(world):
        cp, net, mean = ContextParallel(world, seq_len=S, mask=Causal()), model(), 0.0
        shards = [cp.shard(valid) for valid in valids]
        count = cp.sum(torch.stack(shards))
        for number, valid in enumerate(shards):
            part = cp.mean_loss(net(cp.shard(inputs(number))).squeeze(-1).square(), valid, count=count)
            part.backward()
            mean += part.detach()
        cp.average_gradients(net)
        close([mean], [true])
        close([p.grad for p in net.parameters()], true_grads)

    loopback(3).run(rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_losses_are_summed_without_rounding_on_the_way(dtype):
    """Near 2^11 and 2^8 halves and bfloat16 can no longer count by ones; 70000 is more than float16 has at all."""

    def rank(world):
        cp = ContextParallel(world, seq_len=70000, mask=Full(), layout=Contiguous(2))
        per_token = torch.ones(1, cp.sharding.tokens, dtype=dtype, requires_grad=True)
        mean = cp.mean_loss(per_token)
        mean.backward(torch.tensor(35000.0))
        assert (mean.dtype, mean.item()) == (torch.float32, 1.0)
        assert cp.sum(per_token).item() == 70000
        assert (per_token.grad == 1).all()  # 35000 * 2 ranks / 70000

    loopback(2).run(rank)


def test_counts_beyond_float32_are_exact():
    many = 2**24 + 1  # the first whole number that float32 lacks

    def rank(world):
        cp = ContextParallel(world, seq_len=2, mask=Full())
        assert cp.sum(torch.tensor([many - 1, 1][cp.rank])).item() == many
        both = torch.tensor([many - 1, 1])
        assert cp.sum(both, both > 0).item() == 2 * many
        part = cp.mean_loss(torch.ones(1, 1, dtype=torch.float64), count=many)
        assert part.item() == 2 / many

    loopback(2).run(rank)


# ---- averaging -------------------------------------------------------------------------------------------------------


def test_averaging_is_in_place_and_a_gradient_that_a_rank_lacks_is_zero():
    def rank(world):
        cp, net = ContextParallel(world, seq_len=4, mask=Full()), model()
        first, bias, last = net.parameters()
        bias.requires_grad_(False)
        first.grad = torch.full_like(first, 3.0) if cp.rank == 0 else None
        before = first.grad
        cp.average_gradients(net)
        assert (first.grad == 1).all()
        assert before is None or first.grad is before
        assert bias.grad is None
        assert last.grad is None  # nobody has one

    loopback(3).run(rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_averages_round_once_and_do_not_overflow(dtype, monkeypatch):
    monkeypatch.setattr(loss, "BUCKET", 40)  # many buckets, some of them a single gradient
    values = [60000.0, 60000.0, 30000.0] if dtype == torch.float16 else [1.0, 2.0, 6.0]

    def rank(world):
        weights = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (1, 7, 3, 0, 30, 2)]
        for weight in weights:
            weight.grad = torch.full_like(weight, values[world.rank])
        loss.average_gradients(weights, world)
        mean = torch.tensor(sum(values) / 3).to(dtype)
        assert all((weight.grad == mean).all() for weight in weights)

    loopback(3).run(rank)


def test_averaging_moves_twice_what_there_is_whatever_the_number_of_ranks():
    """As a ring all-reduce does: a part to each owner, and the average back."""

    def rank(world):
        world = Counting(world)
        weight = nn.Parameter(torch.zeros(840))
        weight.grad = torch.full_like(weight, float(world.rank))
        loss.average_gradients([weight], world)
        assert sum(world.sent.values()) == 2 * 840 * 4 * (world.ranks - 1) // world.ranks

    for ranks in (2, 4, 7):
        loopback(ranks).run(rank)


def sinks_gradient(world, query, grad, sinks):
    """The gradient of the mean of out * grad, by `span.attention` on one rank."""
    leaf = sinks.clone().requires_grad_()
    out = attention(query, query, query, mask=Causal(), layout=Contiguous(1), seq_len=S, group=world, sinks=leaf)
    (found,) = torch.autograd.grad((out * grad).mean(), leaf)
    return found


def test_sinks_are_averaged_like_any_parameter():
    """cp.attention gives each rank its part of the sum, so that averaging does not divide by ranks twice."""
    query, grad = torch.sin(torch.arange(2 * S * 2 * 4.0).view(2, 1, 2, S, 4)).double().unbind()
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    (true,) = loopback(1).run(lambda world: sinks_gradient(world, query, grad, sinks))

    def rank(world):
        cp = ContextParallel(world, seq_len=S, mask=Causal())
        leaf, q = nn.Parameter(sinks.clone()), cp.shard(query, dim=2)
        out = cp.attention(q, q, q, sinks=leaf)
        cp.mean_loss(out * cp.shard(grad, dim=2)).backward()
        cp.average_gradients([leaf])
        close([leaf.grad], [true])

    loopback(3).run(rank)


# ---- what is refused -------------------------------------------------------------------------------------------------

WRONG = {
    "no tensor": (
        lambda cp: cp.mean_loss(1.0),
        "values must be a tensor of real numbers, one of each token, got float",
    ),
    "complex": (
        lambda cp: cp.mean(torch.ones(2, dtype=torch.complex64)),
        "of real numbers, one of each token, got com",
    ),
    "whole": (lambda cp: cp.mean_loss(torch.ones(2, dtype=torch.int64)), "per_token must be floating point, got int64"),
    "averaged": (lambda cp: cp.mean_loss(torch.ones(4).mean()), "one loss for each token, got a single number; use re"),
    "shape": (
        lambda cp: cp.mean_loss(torch.ones(4), torch.ones(2, 2, dtype=torch.bool)),
        "valid must have the shape of the values, (4,), got (2, 2)",
    ),
    "weights": (lambda cp: cp.mean_loss(torch.ones(4), torch.ones(4)), "must be a bool tensor such as labels != -100,"),
    "counts": (lambda cp: cp.mean_loss(torch.ones(4), count=torch.ones(2)), "count must be one number, the valid tok"),
    "device": (lambda cp: cp.sum(torch.ones(4, device="meta")), "values must be on cpu, where the group is, got meta"),
    "parameters' device": (
        lambda cp: cp.average_gradients(nn.Linear(2, 2, device="meta")),
        "parameters must be on cpu, where the group is, got meta",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_refused_on_every_rank_before_anything_travels(name):
    wrong, message = WRONG[name]

    def rank(world):
        cp = ContextParallel(Counting(world), seq_len=4, mask=Full())
        with pytest.raises(ShardError) as error:
            wrong(cp)
        assert set(cp.transport.calls) <= {"gather", "agree"}
        assert sum(cp.transport.sent.values()) <= 48, "three numbers, and what is asked for"
        return str(error.value)

    for said in loopback(2).run(rank):
        assert message in said


ALONE = {
    "one rank gives a count": (
        lambda cp, odd: cp.mean_loss(torch.ones(4), count=8 if odd else None),
        "count must be given on all ranks or on none; ranks 1 and 0 differ",
    ),
    "one rank gives none": (
        lambda cp, odd: cp.mean_loss(torch.ones(4), count=None if odd else 8),
        "count must be given on all ranks or on none; ranks 1 and 0 differ",
    ),
    "one rank's valid has another shape": (
        lambda cp, odd: cp.mean_loss(torch.ones(4), torch.ones(3 if odd else 4, dtype=torch.bool)),
        "valid must have the shape of the values, (4,), got (3,)",
    ),
    "one rank's valid is no mask": (
        lambda cp, odd: cp.mean(torch.ones(4), torch.ones(4, dtype=torch.int64 if odd else torch.bool)),
        "valid must be a bool tensor such as labels != -100, got int64",
    ),
    "one rank's valid is elsewhere": (
        lambda cp, odd: cp.sum(torch.ones(4), torch.ones(4, dtype=torch.bool, device="meta" if odd else None)),
        "valid must be on cpu like the values, got meta",
    ),
    "one rank's loss is a mean": (
        lambda cp, odd: cp.mean_loss(torch.ones(4).mean() if odd else torch.ones(4)),
        "one loss for each token, got a single number; use reduction='none'",
    ),
    "one rank's count is no number": (
        lambda cp, odd: cp.mean_loss(torch.ones(4), count="8 tokens" if odd else 8),
        "count must be one number, the valid tokens of all ranks, got '8 tokens'",
    ),
    "one rank's count is another": (
        lambda cp, odd: cp.mean_loss(torch.ones(4), count=2**53 - 1 if odd else 2**53),
        "same number on each, got 9007199254740992 on rank 0 and 9007199254740991 on rank 1",
    ),
    "a count of nothing": (lambda cp, odd: cp.mean_loss(torch.ones(4), count=0), "the same number on each, got 0"),
    "a count below nothing": (lambda cp, odd: cp.mean_loss(torch.ones(4), count=-1), "same number on each, got -1"),
    "no count": (lambda cp, odd: cp.mean_loss(torch.ones(4), count=math.nan), "the same number on each, got nan"),
    "a count without end": (lambda cp, odd: cp.mean_loss(torch.ones(4), count=math.inf), "number on each, got inf"),
    "one rank sums and others average": (
        lambda cp, odd: (cp.sum if odd else cp.mean)(torch.ones(4)),
        "all ranks must ask for the same; rank 1 asks for a sum, rank 0 for a mean",
    ),
    "one rank sums whole numbers": (
        lambda cp, odd: cp.sum(torch.ones(4, dtype=torch.int64 if odd else None)),
        "rank 1 asks for a sum of whole numbers, rank 0 for a sum",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_wrong_on_one_rank_alone_is_raised_by_all_and_the_group_goes_on(name):
    """A rank that raised alone would leave the others waiting for the group's timeout."""
    wrong, message = ALONE[name]

    def rank(world):
        cp = ContextParallel(world, seq_len=12, mask=Full())
        with pytest.raises(ShardError) as error:
            wrong(cp, cp.rank == 1)
        assert cp.sum(torch.tensor(1)).item() == 3, "nothing is left under way"
        return str(error.value)

    for said in loopback(3).run(rank):
        assert message in said


def test_an_error_of_another_kind_on_one_rank_is_raised_there_as_it_is_and_told_to_the_others():
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.sum:
                raise MemoryError("no room")
            return super().__torch_function__(func, types, args, kwargs or {})

    def rank(world):
        cp, values = ContextParallel(world, seq_len=2, mask=Full()), torch.ones(1)
        with pytest.raises(MemoryError if cp.rank else ShardError, match="no room") as error:
            cp.mean_loss(values.as_subclass(Broken) if cp.rank else values)
        return str(error.value)

    assert loopback(2).run(rank) == ["on rank 1: MemoryError: no room", "no room"]


@pytest.mark.parametrize(("ranks", "count"), [(48, 16_777_213), (7, 2**53 - 1), (5, 0.1)])
def test_equal_counts_are_equal_on_any_number_of_ranks(ranks, count):
    """Squares of counts, summed in float64, were not."""

    def rank(world):
        cp = ContextParallel(Counting(world), seq_len=ranks, mask=Full())
        part = cp.mean_loss(torch.ones(1, dtype=torch.float64), count=count)
        assert cp.transport.calls == {"gather": 2}, "a row and what is asked for, with a count or without"
        return part.item()

    assert loopback(ranks).run(rank) == [ranks / count] * ranks


def test_ranks_with_other_parameters_or_sparse_gradients_are_refused_on_all():
    def rank(world):
        with pytest.raises(ShardError, match="same parameters, in one order; those of rank 1 and 0 differ"):
            loss.average_gradients([nn.Parameter(torch.ones(2 + world.rank))], world)
        table = nn.Embedding(4, 2, sparse=True)
        if world.rank == 1:
            table(torch.tensor([1])).sum().backward()
        with pytest.raises(ShardError, match="gradients must be dense to be averaged, got a sparse one"):
            loss.average_gradients(table.parameters(), world)

    loopback(2).run(rank)


# ---- who averages ----------------------------------------------------------------------------------------------------

HOLES = torch.tensor([[p > 6 and p != 9 for p in range(S)], [p in (1, 11) for p in range(S)]])
LAYOUTS = {ranks: Listed((tuple(range(S)),), (5, *[0] * (ranks - 2), S - 5)) for ranks in (2, 3, 4)}


def averaged(world, ranks):
    """The loss and gradients under each way of averaging; the first rank has hardly a valid token, others no token."""
    rank = world.rank
    found = {}
    cp = ContextParallel(seq_len=S, mask=Full(), layout=LAYOUTS[ranks])
    fsdp = partial(fully_shard, mesh=mesh_of(ranks))  # by itself it would choose a GPU that is there
    for name, wrapped in {"plain": lambda net: net, "DDP": DistributedDataParallel, "FSDP2": fsdp}.items():
        found[name] = trained(cp, model(), wrapped, cp.shard(inputs()), cp.shard(here(HOLES)))
    if ranks == 4:
        grid = mesh_of(2, 2, names=("dp", "cp"))
        found |= over_both(grid)
        return found, refused_counts(grid, rank)
    return found, None


def trained(cp, net, wrapped, x, valid, counted=False, **options):
    run = wrapped(net)
    count = {"count": cp.sum(valid, **options)} if counted else {}
    mean = cp.mean_loss(run(x).squeeze(-1).square(), valid, **count, **options)
    mean.backward()
    if run is net and not hasattr(net, "unshard"):
        cp.average_gradients(net, **options)
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
    return mean.detach(), grads


def over_both(grid):
    """Data parallel x context parallel: each dp rank has one batch row, and the mean is over both."""
    cp, row = ContextParallel(grid["cp"], seq_len=S, mask=Full()), slice(grid["dp"].get_local_rank(), None, 2)
    x, valid = cp.shard(inputs()[row]), cp.shard(here(HOLES)[row])
    return {
        "plain over both": trained(cp, model(), lambda net: net, x, valid, over=dist.group.WORLD),
        "DDP over both": trained(cp, model(), DistributedDataParallel, x, valid, over=dist.group.WORLD),
        "FSDP2 over both": trained(cp, model(), partial(fully_shard, mesh=grid), x, valid, over=dist.group.WORLD),
        "counted over both": trained(cp, model(), lambda net: net, x, valid, over=dist.group.WORLD, counted=True),
    }


def refused_counts(grid, rank):
    """What is said of counts that were taken over other ranks than the mean is over."""
    cp, everybody = ContextParallel(grid["cp"], seq_len=S, mask=Full()), dist.group.WORLD
    valid = cp.shard(here(HOLES)[:1])
    per_token, own, both = torch.ones(valid.shape), cp.sum(valid), cp.sum(valid, over=everybody)
    changed = cp.sum(valid, over=everybody).sub_(1)
    pairs = {
        "summed here, averaged over both": (own, everybody),
        "a number": (int(own), everybody),
        "computed from a sum": (both / 2, everybody),
        "summed over both, averaged here": (both, None),
        "changed": (changed, everybody),
    }
    said = {}
    for name, (count, over) in pairs.items():
        try:
            said[name] = f"taken: {cp.mean_loss(per_token, valid, count=count, over=over)}"
        except ShardError as error:
            said[name] = str(error)
    also = [
        cp.mean_loss(per_token, valid, count=int(own)),  # of the session's own ranks: a number will do
        cp.mean_loss(per_token, valid, count=own, over=grid["cp"]),
        cp.mean_loss(per_token, valid, count=both, over=dist.new_group([0, 1, 2, 3])),  # the same ranks
    ]
    only_one = cp.mean_loss if rank == 3 else partial(cp.mean_loss, count=both)
    try:
        only_one(per_token, valid, over=everybody)
    except ShardError as error:
        said["on one rank"] = str(error)
    return said, [loss.item() for loss in also]


WRONG_COUNTS = {
    "summed here, averaged over both": "give cp.sum and cp.mean_loss the same over=",
    "a number": "count must be what cp.sum(..., over=) returned for the same ranks where over= is given, got 4",
    "computed from a sum": "got a tensor that cp.sum did not return",
    "summed over both, averaged here": "count must be taken over the ranks of the mean",
    "changed": "got a tensor that cp.sum did not return",
}


@pytest.fixture(scope="module")
def told_by():
    """What each rank of so many tells; processes start once."""
    return functools.cache(lambda ranks, backend: spawn(ranks, averaged, ranks, backend=backend, timeout=120))


@on_backends(4)
def test_a_count_that_was_summed_over_other_ranks_than_the_mean_is_refused_on_all(ranks, backend, told_by):
    """The loss was twice as large, in silence."""
    for _, (said, taken) in told_by(ranks, backend):
        assert said.keys() == {*WRONG_COUNTS, "on one rank"}
        for name, message in WRONG_COUNTS.items():
            assert message in said[name]
        assert "count must be given on all ranks or on none; ranks 3 and 0 differ" in said["on one rank"]
        assert taken == [1.0, 1.0, 1.0]


@on_backends(2, 4, slow=(3,))
def test_averaging_by_hand_by_ddp_and_by_fsdp2_gives_the_gradients_of_one_device(ranks, backend, told_by):
    true, true_grads = one_device(HOLES)
    for told, _ in told_by(ranks, backend):
        assert len(told) == (7 if ranks == 4 else 3)
        for mean, grads in told.values():
            close([mean], [true])
            close(grads, true_grads)

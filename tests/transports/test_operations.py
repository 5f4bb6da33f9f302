"""Ranks that do different things, or the same in another order, hear of it: nothing is taken for something else.

Every case is a program in which rank 1 alone does something else. All messages have the sizes that the other end
expects, so that without identities the results would be wrong and nothing would be raised.
"""

import re
import threading

import pytest
import torch
import torch.distributed as dist

import attnspan as span
from attnspan.attention import attention
from attnspan.errors import TransportError
from attnspan.testing import loopback
from attnspan.transports import Counting, Delayed, transport_of
from attnspan.transports.operations import NAMES, Ledger, Operation, enter_operation
from tests.devices import here
from tests.processes import on_backends, spawn

S = 16
LAYOUT = span.Contiguous(2)


def tensors(seed, rank):
    """Query, key and value of one rank, on the default device."""
    torch.manual_seed(10 * seed + rank)
    return [torch.randn(1, 2, S // 2, 4, requires_grad=True) for _ in range(3)]


def attend(group, mask, seed, strategy="gather"):
    inputs = tensors(seed, transport_of(group).rank)
    return attention(*inputs, mask=mask, layout=LAYOUT, seq_len=S, group=group, strategy=strategy)


def in_order(rank, steps):
    """Run steps, the other way round on rank 1."""
    return [step() for step in (steps if rank == 0 else steps[::-1])]


# ---- programs in which rank 1 does something else -------------------------------------------------------------------


def two_masks(group, strategy="gather"):
    """Both have been agreed on before."""
    masks = [span.Causal(), span.SlidingWindow(3)]
    for mask in masks:
        attend(group, mask, 0, strategy)
    in_order(transport_of(group).rank, [lambda mask=mask: attend(group, mask, 1, strategy) for mask in masks])


def two_masks_by_ring(group):
    two_masks(group, "ring")


def two_masks_by_ulysses(group):
    two_masks(group, "ulysses")


def two_sessions(group):
    one, two = (
        span.ContextParallel(group, seq_len=S, mask=mask, layout=LAYOUT) for mask in (span.Full(), span.Causal())
    )
    rank = transport_of(group).rank
    for session in (one, two):
        session.attention(*tensors(0, rank))
    in_order(rank, [lambda: one.attention(*tensors(1, rank)), lambda: two.attention(*tensors(2, rank))])


def named_masks(group):
    cp = span.ContextParallel(
        group, seq_len=S, mask={"full": span.Causal(), "window": span.SlidingWindow(2)}, layout=LAYOUT
    )
    rank = transport_of(group).rank
    for name in ("full", "window"):
        cp.attention(*tensors(0, rank), mask=name)
    in_order(rank, [lambda name=name: cp.attention(*tensors(1, rank), mask=name) for name in ("full", "window")])


def backward_passes(group):
    """Three independent attentions of one mask: forward in one order, backward in another."""
    outs = [attend(group, span.Causal(), seed) for seed in range(3)]
    in_order(transport_of(group).rank, [out.sum().backward for out in outs])


def forward_for_backward(group):
    """Rank 1 computes the next layer where rank 0 differentiates the last one."""
    out = attend(group, span.Causal(), 0)
    in_order(transport_of(group).rank, [out.sum().backward, lambda: attend(group, span.Causal(), 1)])


def another_shape(group):
    """Rank 1 alone comes with a new shape, and asks where the other computes."""
    attend(group, span.Causal(), 0)
    query, key, value = tensors(1, transport_of(group).rank)
    if transport_of(group).rank == 1:
        query, key, value = (torch.cat([x, x], dim=1) for x in (query, key, value))
    attention(query, key, value, mask=span.Causal(), layout=LAYOUT, seq_len=S, group=group, strategy="gather")


def shifts(group):
    cp = span.ContextParallel(group, seq_len=S, mask=span.Causal(), layout=LAYOUT)
    x = torch.arange(S // 2.0)[None]
    for by in (1, -1):
        cp.shift(x, by=by, fill=0)
    in_order(cp.rank, [lambda by=by: cp.shift(x, by=by, fill=0) for by in (1, -1)])


def unshard_and_sum(group):
    cp = span.ContextParallel(group, seq_len=S, mask=span.Causal(), layout=LAYOUT)
    x = torch.arange(S // 2.0)[None]
    cp.unshard(x)
    in_order(cp.rank, [lambda: cp.unshard(x), lambda: cp.sum(x)])


def gradients_of_moves(group):
    cp = span.ContextParallel(group, seq_len=S, mask=span.Causal(), layout=LAYOUT)
    x, y = (torch.ones(1, S // 2, requires_grad=True) for _ in range(2))
    outs = [cp.unshard(x), cp.unshard(y)]
    in_order(cp.rank, [out.sum().backward for out in outs])


PROGRAMS = [
    two_masks, two_masks_by_ring, two_masks_by_ulysses, two_sessions, named_masks, backward_passes,
    forward_for_backward, another_shape, shifts, unshard_and_sum, gradients_of_moves,
]  # fmt: skip
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


# ---- virtual ranks --------------------------------------------------------------------------------------------------


@programs
@pytest.mark.parametrize("wrapped", [lambda world: world, Counting, lambda world: Delayed(world, 0.0)])
def test_virtual_ranks_hear_that_they_are_out_of_step(program, wrapped):
    apart = r"out of step: rank . is in .*, rank . in .*; every rank must"
    stuck = r"no rank can go on: rank 0 waits for .* in shift by 1 .*; rank 1 waits for .* in shift by -1 "
    with pytest.raises(TransportError, match=stuck if program is shifts else apart):
        span.testing.loopback(2).run(lambda world: program(wrapped(world)))


# ---- real processes -------------------------------------------------------------------------------------------------


def out_of_step(world):
    """What each program raised here, each on a group of its own."""
    heard = {}
    for program in PROGRAMS:
        group = dist.new_group()
        try:
            program(group)
            heard[program.__name__] = "nothing"
        except TransportError as error:
            heard[program.__name__] = str(error)
        dist.barrier()
    return heard


@pytest.fixture(scope="module")
def heard():
    return spawn(2, out_of_step, timeout=240)


@programs
def test_both_ends_name_both_operations(heard, program):
    """At once, not after the group's timeout, which is longer than the test may take."""
    named_on_both_ends(heard, program)


@pytest.mark.nccl
def test_ranks_of_nccl_hear_that_they_are_out_of_step():
    heard = spawn(2, out_of_step, backend="nccl", timeout=120, fresh=True)  # what was never taken is left on its groups
    for program in PROGRAMS:
        named_on_both_ends(heard, program)


def named_on_both_ends(heard, program):
    for rank, told in enumerate(heard):
        said = told[program.__name__]
        assert "ranks are out of step" in said
        if "in none" not in said:
            assert re.search(
                rf"this rank is in .+ \(operation \d+\), rank {1 - rank} in .+ \(operation \d+\); every", said
            )


def test_an_operation_is_named_for_what_it_does(heard):
    assert re.search(
        r"^rank 0 of 2, group .*: ranks are out of step: this rank is in the gradient of attention over Causal\(\) by "
        r"Gather\(\) \[#\w+\].* \(operation 2\), rank 1 in the gradient of attention over Causal\(\) by Gather\(\) "
        r"\[#\w+\].* \(operation 4\); every rank must make the same calls in the same order, backward passes included$",
        heard[0]["backward_passes"],
    )


def compiled_on_one_rank(world):
    """Whether gradients are right where rank 1 alone compiles three attentions into one graph."""
    rank = world.rank
    cp = span.ContextParallel(dist.group.WORLD, seq_len=S, mask=span.Causal(), layout=LAYOUT)
    attend = span.Attention(cp.plan, dist.group.WORLD)

    def three(x):
        return sum(attend(x * (i + 1), x, x.sin()).square().sum() for i in range(3))

    random = torch.Generator().manual_seed(0)
    whole = here(torch.randn(1, 2, S, 4, generator=random, device="cpu")).requires_grad_()
    call = torch.compile(three, backend="aot_eager", fullgraph=True) if rank == 1 else three
    own = cp.shard(whole, dim=2).detach().requires_grad_()
    (grad,) = torch.autograd.grad(call(own), own)
    dense = torch.nn.functional.scaled_dot_product_attention
    alone = sum(dense(whole * (i + 1), whole, whole.sin(), is_causal=True).square().sum() for i in range(3))
    (true,) = torch.autograd.grad(alone, whole)
    torch.testing.assert_close(grad, cp.shard(true, dim=2))
    return True


@on_backends(2)
def test_a_backward_pass_is_matched_by_its_forward_pass_whoever_runs_it(ranks, backend):
    assert spawn(ranks, compiled_on_one_rank, backend=backend, timeout=120) == [True, True]


# ---- headers --------------------------------------------------------------------------------------------------------


def test_headers_differ_in_number_and_in_name():
    assert Operation(1, "a").header != Operation(2, "a").header != Operation(2, "b").header
    assert Operation(3, "a").header == Operation(3, "a").header < 2**63
    assert Operation(2**23 + 5, "a").header == Operation(5, "a").header, "numbers wrap around"


def test_a_ledger_remembers_some_names():
    ledger = Ledger()
    first = ledger.begin("first")
    assert ledger.describe(first.header) == "first (operation 1)"
    assert ledger.differentiate(first.header).name == "the gradient of first"
    for i in range(NAMES):
        ledger.begin(f"{i}")
    assert len(ledger.names) == NAMES
    assert ledger.describe(first.header) == "one that this rank has never been in (operation 1)"


def test_operations_nest_and_end_with_their_block():
    def rank(world):
        with enter_operation(world, "outer") as outer:
            with pytest.raises(KeyError), enter_operation(world, "inner"):
                raise KeyError
            with enter_operation(world, outer.header) as back:
                assert back.number == outer.number
            world.all_reduce(torch.ones(1)).wait()

    span.testing.loopback(2).run(rank)


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_a_group_in_use_by_one_thread_is_refused_to_another():
    """Ranks could not tell which of the two comes first elsewhere."""

    def rank(world):
        inside, leave, refusals = threading.Event(), threading.Event(), []

        def first():
            with enter_operation(world, "attention, causal"):
                inside.set()
                leave.wait()

        thread = threading.Thread(target=first)
        thread.start()
        inside.wait()
        with pytest.raises(TransportError) as caught, enter_operation(world, "another"):
            pass
        refusals.append(str(caught.value))
        leave.set()
        thread.join()
        with enter_operation(world, "another") as operation, enter_operation(world, "one inside it"):
            return refusals[0], operation.number

    refused, number = loopback(1).run(rank)[0]
    assert refused == (
        "rank 0 of 1, group 'loopback': another thread of this process is in attention, causal (operation 1) on the "
        "same group; use a group from one thread at a time, or make a group for each thread"
    )
    assert number == 2

"""Keys that are kept from forward to backward: the same bits, and nothing but gradients travels back."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan.attention import Attention
from attnspan.attention.kept import kept_by
from attnspan.attention.ops import attention as op
from attnspan.errors import AttentionError, TransportError
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, KeyPadding, SlidingWindow
from attnspan.plan import Plan, Shape
from attnspan.testing import loopback
from attnspan.transports import Counting
from tests.attention.harness import Problem, on_rank

ROWS = Causal() & KeyPadding([29, 18])
PROBLEMS = {
    "documents, sinks and lse": Problem(
        Causal() & Documents([11, 7, 11]), HeadTail(4), 29, heads=8, kv_heads=4, sinks=True, through_lse=True
    ),
    "rows of their own": Problem(ROWS, Balanced(ROWS, ranks=4, chunk=2, per_row=True), 29, heads=4, kv_heads=4),
    "striped, float32": Problem(SlidingWindow(6), Striped(4), 29, heads=4, kv_heads=4, dtype=torch.float32),
    "fewer tokens than ranks": Problem(Causal(), Contiguous(4), 3, heads=4, kv_heads=4),
    "cross": Problem(Causal(align="bottom"), HeadTail(4), 19, kv_len=30, kv_layout=Striped(4), heads=4, kv_heads=4),
    "three ranks, one key head": Problem(Causal(), HeadTail(3), 29, heads=3, kv_heads=1),
}
STRATEGIES = ["ring", "gather", "needed", "needed(2)", "ulysses", "ulysses(2) x needed"]


def posted(log, what):
    return [event for event in log if event.what == what and event.kind not in ("wait", "mark")]


def by(keep, problem, log=None):
    """The shards of every rank with keys kept or not; `log` gets what travelled at rank 0."""

    def rank(world):
        counting = Counting(world)
        attend = Attention(problem.plan, counting, keep_keys=keep)
        found = on_rank(problem, world, lambda q, k, v, sinks: attend(q, k, v, sinks=sinks, return_lse=True))
        if world.rank == 0 and log is not None:
            log.extend(counting.log)
        return found

    return loopback(problem.layout.ranks).run(rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_not_a_bit_differs_and_no_key_travels_twice(name, strategy):
    problem = replace(PROBLEMS[name], strategy=strategy)
    if "(2)" in strategy and problem.layout.ranks == 3:
        problem = replace(problem, strategy="needed(2)")
    plain, kept = [], []
    for one, other in zip(by(False, problem, plain), by(True, problem, kept), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True) if x is not None)
    assert 2 * len(posted(kept, "keys")) == len(posted(plain, "keys"))
    assert len(posted(kept, "gradients")) == len(posted(plain, "gradients"))
    if "ulysses" in strategy and problem.seq_len > 4:
        assert sum(sum(event.sent.values()) for event in kept) < sum(sum(event.sent.values()) for event in plain)


def tensors(world, tokens=8, heads=4):
    random = torch.Generator().manual_seed(world.rank)
    return [torch.randn(1, heads, tokens, 4, generator=random).requires_grad_() for _ in range(3)]


def on_two_ranks(run, keep=True):
    """``run(attend, q, k, v)`` on two ranks; its result and the keys that travelled, of rank 0."""

    def rank(world):
        counting = Counting(world)
        plan = Plan(Causal(), HeadTail(2), 16, "gather")
        found = run(Attention(plan, counting, keep_keys=keep), *tensors(world))
        return found, len(posted(counting.log, "keys"))

    return loopback(2).run(rank)[0]


def gradients(attend, q, k, v):
    return torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))


def same(found, true):
    return all(torch.equal(x, y) for x, y in zip(found, true, strict=True))


def test_a_graph_that_is_retained_keeps_its_keys():
    def run(attend, q, k, v):
        loss = attend(q, k, v).square().sum()
        first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
        return same(first, torch.autograd.grad(loss, (q, k, v)))

    assert on_two_ranks(run) == (True, 1)


def test_keys_are_let_go_of_with_the_graph():
    def run(attend, q, k, v):
        out, _, header = op(q, k, v, None, [], attend.handle, False, True, 0.0, None, None)
        assert kept_by(header).loops
        alive = Counter(kept=len(kept_by(header).loops))
        kept_by(header).loops.append(Gone(alive))
        del header
        assert alive["kept"]  # by autograd's node
        torch.autograd.grad(out.sum(), (q, k, v))
        return alive["kept"]

    assert on_two_ranks(run)[0] == 0


class Gone:
    """Says so when nobody holds it any more."""

    def __init__(self, alive):
        self.alive = alive

    def __del__(self):
        self.alive["kept"] = 0


def test_nothing_is_kept_where_no_gradient_is_wanted():
    def run(attend, q, k, v):
        with torch.no_grad():
            *_, header = op(q, k, v, None, [], attend.handle, False, False, 0.0, None, None)
            attend(q, k, v)
        return kept_by(header)

    assert on_two_ranks(run)[0] is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_recomputes_brings_its_own_keys(reentrant):
    def backward(attend, q, k, v):
        attend(q, k, v).square().sum().backward()
        return q.grad, k.grad, v.grad

    def run(attend, *inputs):
        return backward(lambda *x: checkpoint(attend, *x, use_reentrant=reentrant), *inputs)

    (found, keys), (true, _) = on_two_ranks(run), on_two_ranks(backward, keep=False)
    assert same(found, true)
    assert keys == 2  # forward and its replay; without keeping backward would be the third


def test_where_copies_are_saved_keys_travel_again():
    """As torch.autograd.graph.save_on_cpu saves them on CUDA."""

    def run(attend, q, k, v):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            loss = attend(q, k, v).square().sum()
        return torch.autograd.grad(loss, (q, k, v))

    (found, keys), (true, _) = on_two_ranks(run), on_two_ranks(gradients, keep=False)
    assert same(found, true)
    assert keys == 2


def test_compiled_code_hands_them_on():
    def run(attend, q, k, v):
        torch._dynamo.reset()
        return gradients(torch.compile(attend, backend="aot_eager", fullgraph=True), q, k, v)

    # One rank: virtual ranks cannot compile at the same time.
    def rank(world):
        plan = Plan(Causal(), Contiguous(1), 8, "gather")
        attend, counted = Attention(plan, world, keep_keys=True), []
        found = run(attend, *tensors(world))
        counted = attend.bound.uses.from_kept.total()
        return same(found, gradients(Attention(plan, world), *tensors(world))), counted

    assert loopback(1).run(rank) == [(True, 1)]


def test_a_rank_that_lost_its_keys_and_one_that_did_not_both_hear_of_it():
    def rank(world):
        attend = Attention(Plan(Causal(), HeadTail(2), 16, "gather"), world, keep_keys=True)
        q, k, v = tensors(world)
        out, _, header = op(q, k, v, None, [], attend.handle, False, True, 0.0, None, None)
        if world.rank == 1:
            header.kept = None
        with pytest.raises(TransportError) as caught:
            out.sum().backward()
        heard.append(str(caught.value))

    heard = []
    with pytest.raises(TransportError):  # and messages were left behind
        loopback(2).run(rank)
    assert len(heard) == 2
    assert any("ranks are out of step" in said and " from kept keys (operation " in said for said in heard)


def test_ranks_that_ask_for_different_things_are_refused_by_name():
    def rank(world):
        attend = Attention(Plan(Causal(), HeadTail(2), 16), world, keep_keys=world.rank == 1)
        with pytest.raises(
            AttentionError, match=r"differs? from rank \d in keep_keys \((True|False), not (True|False)\)"
        ):
            attend(*tensors(world))

    loopback(2).run(rank)


def test_other_values_are_refused():
    with pytest.raises(AttentionError, match="keep_keys must be True, False or 'auto', got 'yes'"):
        loopback(1).run(lambda world: span.ContextParallel(world, seq_len=8, mask=Causal(), keep_keys="yes"))


@pytest.mark.parametrize(("strategy", "keeps"), [("needed", True), ("gather", False)])
def test_auto_keeps_what_takes_no_more_memory_than_autograd_on_every_rank(strategy, keeps):
    """Of eight documents on four ranks few keys are needed elsewhere; all of them are more than a rank has itself."""
    mask, shape = Causal() & Documents([8] * 8), Shape(2, 2, 4, dtype="float32")
    plan = Plan(mask, Contiguous(4), 64, strategy)
    fits = [plan.kept_bytes(rank, shape) <= plan.saved_bytes(rank, shape) for rank in range(4)]
    assert all(fits) is keeps

    def rank(world):
        attend = Attention(plan, world, keep_keys="auto")
        gradients(attend, *tensors(world, 16, heads=2))
        return attend.bound.uses.from_kept.total()

    assert loopback(4).run(rank) == [int(keeps)] * 4


def test_one_rank_without_room_decides_for_all():
    """The last rank attends to all keys, the others to their own alone."""
    rows = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]]).bool()
    mask = span.BlockSparse(rows, 16)
    plan, shape = Plan(mask, Contiguous(4), 64, "needed"), Shape(2, 2, 4, dtype="float32")
    fits = [plan.kept_bytes(rank, shape) <= plan.saved_bytes(rank, shape) for rank in range(4)]
    assert fits == [True, True, True, False]

    def rank(world):
        attend = Attention(plan, world, keep_keys="auto")
        gradients(attend, *tensors(world, 16, heads=2))
        return attend.bound.uses.from_kept.total()

    assert loopback(4).run(rank) == [0] * 4


@pytest.mark.parametrize("strategy", ["needed", "ring", "ulysses(2) x needed"])
def test_a_report_counts_what_arrived(strategy):
    def rank(world):
        counting = Counting(world)
        cp = span.ContextParallel(
            counting,
            seq_len=32,
            mask=Causal() & Documents([20, 12]),
            layout=HeadTail(4),
            strategy=strategy,
            keep_keys=True,
        )
        gradients(cp.attention, *tensors(world))
        arrived = [
            event for event in counting.log if event.what in ("keys", "gradients", "heads") and event.kind != "wait"
        ]
        return sum(sum(event.received.values()) for event in arrived), sum(cp.report().received)

    for arrived, reported in loopback(4).run(rank):
        assert arrived == reported

"""What travels is what the plan says: counted on every rank, message by message, forward and backward.

A key that travels costs B * Hk * (D + Dv) numbers of its dtype: K and V together, key heads as they are. A gradient
that travels costs as many, in float32, or in its dtype where kernels round to it. All counts below are taken from the
plan's transfers; that these are the fewest that the mask allows is shown in tests/plan.
"""

import itertools
import threading
from collections import Counter

import pytest
import torch

from attnspan.attention import attention
from attnspan.attention.lane import Lane
from attnspan.attention.wire import MAX_RUNS
from attnspan.kernels import rounds_gradients
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, Full, KeyPadding, SlidingWindow
from attnspan.plan import Shape
from attnspan.plan.heads import split_heads
from attnspan.plan.traffic import received_bytes
from attnspan.testing import loopback
from attnspan.transports import Counting
from tests.attention.harness import Problem, on_rank, together
from tests.attention.test_gloo import there
from tests.processes import on_backends, spawn

STRATEGIES = ["ring", "gather", "needed", "needed(3)"]
MASK = Causal() & Documents([11, 9, 14])
ROWS = Causal() & KeyPadding([34, 20])
CASES = {
    "head-tail": (MASK, HeadTail(ranks=4)),
    "striped": (MASK, Striped(ranks=4)),
    "three ranks": (MASK, Contiguous(ranks=3)),
    "batch rows with other masks": (ROWS, HeadTail(ranks=4)),
    "batch rows with other layouts": (ROWS, Balanced(ROWS, ranks=4, chunk=2, per_row=True)),
    "more runs than messages": (Full(), Striped(ranks=2, chunk=2)),
}
cases = pytest.mark.parametrize(("mask", "layout"), CASES.values(), ids=CASES)
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def problem_of(mask, layout, strategy, **features):
    return Problem(
        mask, layout, 34, strategy, heads=4, kv_heads=2, dim=4, value_dim=6, dtype=torch.bfloat16, **features
    )


def watched(problem, calls=1):
    """The log of every rank's transport, one list per call."""

    def rank(world):
        counting, logs = Counting(world), []
        for _ in range(calls):
            counting.log.clear()
            on_rank(problem, counting)
            logs.append(list(counting.log))
        return logs

    return loopback(problem.layout.ranks).run(rank)


def counted(world):
    """On a process: by case and strategy, the log of a call."""
    found = {}
    for name, strategy in itertools.product(of_ranks(world.ranks), STRATEGIES):
        counting = Counting(world)
        on_rank(there(problem_of(*CASES[name], strategy), world), counting)
        found[name, strategy] = counting.log
    return found


def of_ranks(ranks):
    """The names of the cases for so many ranks."""
    return [name for name, (_, layout) in CASES.items() if layout.ranks == ranks]


@on_backends(2, 4, slow=(3,))
def test_between_processes_travels_what_the_plan_says(ranks, backend):
    logs = spawn(ranks, counted, backend=backend)
    for name, strategy in logs[0]:
        problem = problem_of(*CASES[name], strategy, device="cuda" if backend == "nccl" else "cpu")
        for rank, log in enumerate(logs):
            check_log(problem, rank, log[name, strategy])


def posted(log, what):
    return [event for event in log if event.what == what and event.kind not in ("wait", "mark")]


def sent(events):
    """Bytes by peer, over some events."""
    return sum((Counter(event.sent) for event in events), Counter())


def received(events):
    return sum((Counter(event.received) for event in events), Counter())


def weight(problem, dtype, heads=None):
    """Bytes of one position of one batch row: K and V, of all key heads."""
    return (heads or problem.kv_heads) * (problem.dim + (problem.value_dim or problem.dim)) * dtype.itemsize


def said(problem, rank, way):
    """What the plan says travels in each step, as bytes by peer: keys by receives and sends, gradients by grad_sends
    ..."""
    plan = problem.plan
    wide = way in ("grad_sends", "grad_receives") and not rounds_gradients(problem.kernel, torch.device(problem.device))
    each = weight(problem, torch.float32 if wide else problem.dtype)
    each *= 1 if plan.batch_rows > 1 else problem.rows
    steps = []
    for by_row in zip(*(plan.steps(rank, row) for row in range(plan.batch_rows)), strict=True):
        count = Counter()
        for transfer in (transfer for step in by_row for transfer in getattr(step, way)):
            peer = transfer.source if way in ("receives", "grad_receives") else transfer.target
            count[peer] += transfer.tokens * each
        steps.append(count)
    return steps


@cases
@strategies
def test_keys_and_gradients_travel_as_the_plan_says(mask, layout, strategy):
    problem = problem_of(mask, layout, strategy)
    for rank, (log,) in enumerate(watched(problem)):
        check_log(problem, rank, log)


def check_log(problem, rank, log):
    """One agreement, and in every step in which the rank has part what the plan says; no other message."""
    keys, gradients = posted(log, "keys"), posted(log, "gradients")
    arriving, leaving = said(problem, rank, "receives"), said(problem, rank, "sends")
    steps = [(into, out) for into, out in zip(arriving, leaving, strict=True) if into or out]
    assert [(event.received, event.sent) for event in keys] == steps * 2  # forward and backward
    home = zip(said(problem, rank, "grad_receives"), said(problem, rank, "grad_sends"), strict=True)
    assert [(event.received, event.sent) for event in gradients] == [(i, o) for i, o in home if i or o]
    kinds = Counter(event.kind for event in log if event.kind != "wait")
    assert kinds.pop("agree") == 1
    assert kinds.total() == len(keys) + len(gradients)


@cases
@strategies
def test_a_rank_receives_what_its_plan_counts(mask, layout, strategy):
    """`Plan.received`, which layouts are chosen by, is what arrives."""
    problem = problem_of(mask, layout, strategy, wanted="")
    each = weight(problem, problem.dtype) * (1 if problem.plan.batch_rows > 1 else problem.rows)
    for rank, (log,) in enumerate(watched(problem)):
        assert received(log) == {peer: n * each for peer, n in problem.plan.received(rank).items() if n}


@strategies
def test_without_gradients_nothing_travels_twice(strategy):
    problem = problem_of(MASK, HeadTail(ranks=4), strategy, wanted="")
    for rank, (log,) in enumerate(watched(problem)):
        assert sent(log) == sum(said(problem, rank, "sends"), Counter())


def test_a_sliding_window_makes_only_its_hops():
    """The window reaches one shard back: of seven hops, one is made."""
    problem = Problem(SlidingWindow(3), Contiguous(ranks=8), 32, "ring", wanted="")
    for rank, (log,) in enumerate(watched(problem)):
        assert len(posted(log, "keys")) == 1
        assert set(sent(log)) == {(rank + 1) % 8}
    everything = Problem(Full(), Contiguous(ranks=8), 32, "ring", wanted="")
    assert all(len(posted(log, "keys")) == 7 for (log,) in watched(everything))


def test_key_heads_travel_as_they_are():
    """Eight query heads on one key head cost as much as one."""
    one, eight = (
        Problem(Causal(), HeadTail(ranks=2), 16, "gather", heads=heads, kv_heads=1, wanted="") for heads in (1, 8)
    )
    assert [sent(log) for (log,) in watched(one)] == [sent(log) for (log,) in watched(eight)]


@strategies
@pytest.mark.parametrize(("chunk", "runs"), [(20, 1), (5, 4), (2, 10)])
def test_keys_and_values_travel_in_one_message(strategy, chunk, runs):
    """One message per run of a transfer, or one for all its runs if they are many or handed on; K and V in each."""
    problem = Problem(Full(), Striped(ranks=2, chunk=chunk), 40, strategy, wanted="")
    assert [len(t.runs) for step in problem.plan.steps(0) for t in step.sends] == [runs]
    messages = 1 if strategy == "ring" or runs > MAX_RUNS else runs
    for tensors in loopback(2).run(lambda world: tensors_sent(problem, world)):
        assert len(tensors) == messages
        assert sum(tensor.nbytes for tensor in tensors) == 20 * problem.rows * weight(problem, problem.dtype)


def tensors_sent(problem, world):
    """What a rank sends, tensor by tensor."""
    seen, plain = [], world.exchange

    def exchange(sends, receives, what="tensors"):
        if what == "keys":
            seen.extend(tensor for _, tensor in sends)
        return plain(sends, receives, what)

    world.exchange = exchange
    on_rank(problem, world)
    return seen


@pytest.mark.parametrize("strategy", [*STRATEGIES, "ulysses", "ulysses(2) x ring"])
def test_ranks_agree_once(strategy):
    """The first call exchanges a hash; later ones with the same shapes exchange nothing but what the plan says."""
    problem = problem_of(MASK, HeadTail(ranks=4), strategy)
    for first, second, third in watched(problem, calls=3):
        assert [event.kind for event in first].count("agree") == 1
        assert [event for event in first if event.kind != "agree"] == second == third


@pytest.mark.parametrize("strategy", ["ring", "needed(3)"])
def test_exchanges_travel_under_compute(strategy, monkeypatch):
    """Between every post and its wait lies the compute of a step; but the last gradients have nothing to hide under."""
    here = threading.local()

    def marked(work):
        def marking(*args):
            here.transport.mark("compute")
            return work(*args)

        return marking

    def rank(world):
        here.transport = Counting(world)
        on_rank(problem, here.transport)
        return [(event.kind, event.what) for event in here.transport.log if event.kind != "agree"]

    monkeypatch.setattr(Lane, "forward", marked(Lane.forward))
    monkeypatch.setattr(Lane, "backward", marked(Lane.backward))
    problem = Problem(Full(), Contiguous(ranks=4), 16, strategy)
    exchanges = len(problem.plan.steps(0)) - 1
    for log in loopback(4).run(rank):
        bare = [what for at, (kind, what) in enumerate(log) if kind == "exchange" and not hidden(log, at)]
        assert bare == ["gradients"]
        assert Counter(log)["exchange", "keys"] == 2 * exchanges
        assert Counter(log)["exchange", "gradients"] == exchanges


def hidden(log, at):
    """Whether something is computed between a post and its wait."""
    _, what = log[at]
    return ("mark", "compute") in log[at : log.index(("wait", what), at)]


def test_sinks_cost_one_small_sum():
    plain, sinks = (Problem(Full(), Contiguous(ranks=3), 9, "gather", heads=4, sinks=some) for some in (False, True))
    for rank, ((without,), (log,)) in enumerate(zip(watched(plain), watched(sinks), strict=True)):
        (extra,) = (event for event in log if event.kind == "all_reduce")
        assert extra.sent == {peer: 4 * 8 for peer in range(3) if peer != rank}
        assert len(log) == len(without) + 2  # with its wait


# ---- Ulysses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (3, 1), (6, 6)])
def test_heads_travel_to_who_takes_them(heads, kv_heads):
    """Forward: own tokens of a member's heads go to it (q, k, v); its tokens of own heads go back (out, lse)."""
    problem = Problem(MASK, HeadTail(ranks=4), 34, "ulysses", heads=heads, kv_heads=kv_heads, dim=4, wanted="", batch=1)
    shares, tokens = split_heads(heads, kv_heads, 4), problem.layout.tokens(34)
    for rank, (log,) in enumerate(watched(problem)):
        expected = Counter()
        for peer in set(range(4)) - {rank}:
            there = tokens[rank] * (len(shares[peer].query) * 4 + len(shares[peer].key) * 8)
            back = tokens[peer] * len(shares[rank].query) * (4 + 1)  # out, and lse
            expected[peer] = (there + back) * 8
        assert sent(log) == +expected
        assert {event.what for event in log if event.kind == "exchange"} == {"heads"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("strategy", ["ulysses", "ulysses(2) x needed"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (3, 1)])
def test_heads_cost_what_is_planned_forward_and_backward(heads, kv_heads, strategy, dtype):
    """One message there and one back with each member, in either way; a gradient is as wide as its tensor, unless
    several members took its key head."""
    problem = Problem(MASK, HeadTail(4), 34, strategy, heads=heads, kv_heads=kv_heads, dim=4, value_dim=6, dtype=dtype)
    shape = Shape(heads, kv_heads, 4, 6, problem.rows, str(dtype).removeprefix("torch."))
    rounded = rounds_gradients(problem.kernel, torch.device("cpu"))

    def rank(world):
        counting = Counting(world)
        on_rank(problem, counting, lambda *qkv_sinks: without_lse(problem, counting, *qkv_sinks[:3]))
        return counting.log

    for number, log in enumerate(loopback(4).run(rank)):
        planned = received_bytes(problem.plan, shape, number, rounds=rounded)
        travels = [event for what in ("heads", "keys", "gradients") for event in posted(log, what)]
        assert received(travels).total() == planned.forward + planned.backward
        assert len(posted(log, "heads")) == 4


def without_lse(problem, group, query, key, value):
    """An lse that is returned has a gradient, which travels too; here something else stands for it."""
    out = attention(query, key, value, plan=problem.plan, group=group, kernel=problem.kernel, keep_keys=False)
    return out, out[..., 0]


@pytest.mark.parametrize("inner", STRATEGIES)
def test_between_groups_a_share_of_the_heads_travels(inner):
    """ulysses(2) x inner: a rank's keys go to its place in other groups, each carrying half of the heads."""
    problem = Problem(
        MASK, HeadTail(ranks=4), 34, f"ulysses(2) x {inner}", heads=4, kv_heads=2, dim=4, wanted="", batch=1
    )
    each = weight(problem, problem.dtype, heads=1)
    for rank, (log,) in enumerate(watched(problem)):
        expected = {group * 2 + rank % 2: n * each for group, n in problem.plan.received(rank).items() if n}
        assert received(posted(log, "keys")) == expected


# ---- and the result is still right ---------------------------------------------------------------------------------


def test_counting_changes_nothing():
    problem = problem_of(MASK, HeadTail(ranks=4), "needed(3)")
    plain = loopback(4).run(lambda world: on_rank(problem, world))
    counted = loopback(4).run(lambda world: on_rank(problem, Counting(world)))
    for one, other in zip(together(problem, plain)[:5], together(problem, counted)[:5], strict=True):
        assert torch.equal(one, other)

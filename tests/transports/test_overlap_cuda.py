"""On a CUDA device, kernels run while a message is under way, and what travels is left alone: read from a trace.

One rank of four runs alone on a wire of known delay: a stream of its own on which a message is a spinning kernel, and
then the content that a run on virtual ranks had received at the same place. While it spins, the buffer that will be
filled holds NaN and the buffer that was sent what it held; both are looked at, on the wire's stream, when the spinning
ends. Twins plant the two defects that this guards against, and see them found.
"""

import json
from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attnspan.attention import Attention, lane, loop
from attnspan.layouts import HeadTail
from attnspan.masks import Causal
from attnspan.plan import Plan
from attnspan.testing import loopback
from attnspan.transports import Pending, Transport, Wrapped
from tests.transports.slow_wire import POISON, raw

pytestmark = pytest.mark.cuda

RANKS, RANK, TOKENS, HEADS, KEY_HEADS, DIM = 4, 2, 8192, 16, 4, 128
DELAY = 4_000_000  # cycles, two milliseconds or so: several steps of compute
MARK = 20_000
COMPUTE = 20  # microseconds: attention takes longer than that here, and copies do not
TRAVELLING = ("keys", "gradients")


class Recorder(Wrapped):
    """A transport that remembers what arrived, exchange by exchange."""

    def __init__(self, transport):
        super().__init__(transport)
        self.log = []

    def _post(self, sends, receives, what):
        pending = self.transport._post(sends, receives, what)
        if what not in TRAVELLING:
            return pending
        arrived = []
        self.log.append(arrived)
        return pending.then(lambda: arrived.extend(tensor.clone() for _, tensor in receives))


class Wire(Transport):
    """One rank alone: messages spin on a stream of their own, then hold what was recorded."""

    def __init__(self, log):
        self.rank, self.ranks, self.name = RANK, RANKS, "'a wire'"
        self.device = torch.empty(0, device="cuda").device
        self.messages, self.stream = iter(log), torch.cuda.Stream()
        self.untouched = torch.ones((), dtype=torch.bool, device=self.device)
        torch.cuda.synchronize()  # what was recorded and made above is there for the wire's stream too

    def all_gather_bytes(self, payload, what="an agreement"):
        return [payload] * self.ranks

    def _post(self, sends, receives, what):
        assert what in TRAVELLING, what
        held = [tensor.clone() for _, tensor in sends]
        for _, tensor in receives:
            raw(tensor).fill_(POISON)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(DELAY)
            for (_, tensor), message in zip(receives, next(self.messages), strict=True):
                self.untouched &= (raw(tensor) == POISON).all()
                raw(tensor).copy_(raw(message))
            for (_, tensor), copy in zip(sends, held, strict=True):
                self.untouched &= (raw(tensor) == raw(copy)).all()
            done = torch.cuda.Event()
            done.record()
        torch.cuda._sleep(MARK)  # on the stream of compute: in the trace, the moment of the post
        kept = (sends, receives, held)  # as a process group keeps them, until they are waited for; no longer

        def land():
            torch.cuda.current_stream().wait_event(done)
            _ = kept

        return Pending(land)


class Ran(NamedTuple):
    """A rank's out and gradients; of the one on the wire also the trace, and whether buffers were left alone."""

    results: list
    trace: list
    untouched: bool


def step(attend, rank):
    draw = torch.Generator(device="cuda").manual_seed(rank)
    rows = TOKENS // RANKS
    sizes = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    q, k, v, grad = (torch.randn(1, h, rows, DIM, dtype=torch.bfloat16, device="cuda", generator=draw) for h in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def recorded(strategy):
    """On virtual ranks: the rank's results, and what it received."""
    plan = Plan(Causal(), HeadTail(RANKS), TOKENS, strategy)

    def rank(world):
        recorder = Recorder(world)
        return step(Attention(plan, recorder, kernel="band"), world.rank), recorder.log

    return plan, loopback(RANKS, "cuda").run(rank)[RANK]


def on_the_wire(plan, log, folder):
    wire = Wire(log * 2)
    attend = Attention(plan, wire, kernel="band")
    step(attend, RANK)  # kernels are compiled, memory is found
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        results = step(attend, RANK)
        torch.cuda.synchronize()
    path = folder / "trace.json"
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return Ran(results, [event for event in events if event.get("cat") == "kernel"], bool(wire.untouched))


def check_overlap(trace, steps):
    """Between the post and the arrival of every message, but for the last gradients, a kernel of compute runs.

    Messages wait for one another on the wire, so one may be under way before it spins.
    """
    spins = sorted((event for event in trace if "spin" in event["name"]), key=lambda event: event["ts"])
    wire = max(spins, key=lambda event: event["dur"])["args"]["stream"]
    posts, messages = ([s for s in spins if (s["args"]["stream"] == wire) == is_wire] for is_wire in (False, True))
    assert len(posts) == len(messages) == 3 * (steps - 1), "keys twice, gradients once"
    computing = [e for e in trace if e["args"]["stream"] != wire and e["dur"] >= COMPUTE and "spin" not in e["name"]]
    idle = [
        index
        for index, (post, message) in enumerate(zip(posts, messages, strict=True))
        if not any(post["ts"] <= kernel["ts"] and end(kernel) <= end(message) for kernel in computing)
    ]
    assert idle == [len(messages) - 1], f"nothing was computed under messages {idle}"


def end(event):
    return event["ts"] + event["dur"]


def check_results(ran, expected):
    assert ran.untouched, "a buffer was written to while it was under way"
    for mine, theirs in zip(ran.results, expected, strict=True):
        assert torch.equal(mine, theirs), "not the bits of a run on virtual ranks"


@pytest.mark.parametrize("strategy", ["ring", "needed(4)"])
def test_kernels_run_under_messages_and_what_travels_is_left_alone(strategy, tmp_path):
    plan, (expected, log) = recorded(strategy)
    ran = on_the_wire(plan, log, tmp_path)
    check_results(ran, expected)
    check_overlap(ran.trace, len(plan.steps(RANK)))


def test_twin_a_loop_that_waits_at_once_is_found(tmp_path, monkeypatch):
    begin = loop.KeyExchange.__init__

    def waiting(self, *args):
        begin(self, *args)
        self._pending.wait()

    plan, (expected, log) = recorded("ring")
    monkeypatch.setattr(loop.KeyExchange, "__init__", waiting)
    ran = on_the_wire(plan, log, tmp_path)
    check_results(ran, expected)  # right, and slow
    with pytest.raises(AssertionError, match="nothing was computed under messages"):
        check_overlap(ran.trace, len(plan.steps(RANK)))


def test_twin_a_buffer_that_is_used_again_too_early_is_found(tmp_path, monkeypatch):
    made, empty = {}, lane.empty_packed

    def kept(key, value, rows, dtype=None):
        return made.setdefault((rows, dtype), empty(key, value, rows, dtype))

    plan, (expected, log) = recorded("ring")
    monkeypatch.setattr(lane, "empty_packed", kept)
    ran = on_the_wire(plan, log, tmp_path)
    with pytest.raises(AssertionError, match=r"under way|not the bits"):
        check_results(ran, expected)

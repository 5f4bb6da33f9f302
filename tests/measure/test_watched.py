"""A watched transport: what is waited for is told, and its messages can be sent again alone."""

import pytest
import torch

from attnspan.attention import Attention
from attnspan.layouts import HeadTail
from attnspan.masks import Causal
from attnspan.measure import Measured, watched
from attnspan.measure.watched import Watched, again
from attnspan.plan import Plan
from attnspan.testing import loopback
from attnspan.transports import Counting, Pending, Transport

RANKS, TOKENS = 3, 12


class Clock:
    """Time that passes where it is said to, and nowhere else."""

    def __init__(self):
        self.now = 0.0

    def passes(self, seconds):
        self.now += seconds


class Late(Transport):
    """Messages that come 2 seconds after they are asked for; an agreement takes 100."""

    def __init__(self, clock):
        self.clock, self.rank, self.ranks, self.device, self.name = clock, 0, 2, torch.device("cpu"), "late"

    def _post(self, sends, receives, what):
        due = self.clock.now + 2.0
        return Pending(lambda: self.clock.passes(max(0.0, due - self.clock.now)))

    def all_gather_bytes(self, payload, what="an agreement"):
        self.clock.passes(100.0)
        return [payload] * self.ranks


def test_waiting_counts_and_what_passes_under_compute_does_not(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watched, "perf_counter", lambda: clock.now)
    transport, tensor = Watched(Late(clock)), torch.zeros(4)
    pending = transport.exchange([(1, tensor)], [(1, torch.empty(4))])
    clock.passes(1.5)
    pending.wait()
    assert transport.waited == pytest.approx(0.5)
    pending.wait()
    transport.all_gather_bytes(b"", "an agreement, which is not counted")
    assert transport.waited == pytest.approx(0.5)
    transport.gather(tensor, [torch.empty(4), torch.empty(4)]).wait()
    transport.reduce_scatter([tensor, tensor], torch.empty(4)).wait()
    transport.all_reduce(torch.zeros(4)).wait()
    assert transport.waited == pytest.approx(6.5)
    transport.begin()
    assert (transport.waited, transport.calls) == (0.0, [])


def test_messages_sent_again_are_as_many_bytes_to_the_same_ranks():
    def rank(world):
        counting = Counting(world)
        transport = Watched(counting)
        attend = Attention(Plan(Causal(), HeadTail(RANKS), TOKENS, "needed(2)"), transport)
        own = TOKENS // RANKS
        leaves = [torch.randn(1, 2, own, 8, requires_grad=True) for _ in range(3)]
        attend(*leaves).sum().backward()
        transport.all_reduce(torch.zeros(3)).wait()
        transport.gather(torch.zeros(2), list(torch.empty(RANKS, 2))).wait()
        transport.reduce_scatter(list(torch.zeros(RANKS, 2)), torch.empty(2)).wait()
        first = [event for event in counting.log if event.kind not in ("wait", "agree")]
        counting.log.clear()
        again(transport.calls)()
        second = [event for event in counting.log if event.kind != "wait"]
        return first, second, counting.log

    for first, second, log in loopback(RANKS).run(rank):
        assert first == second
        assert {event.kind for event in first} == {"exchange", "gather", "reduce_scatter", "all_reduce"}
        assert [event.kind == "wait" for event in log] == [False, True] * len(second), "each waited for at once"


def test_what_is_on_the_wire_and_not_waited_for_is_hidden():
    assert Measured("ring", "auto", wire=3.0, waits=1.0).hidden == 2.0
    assert Measured("ring", "auto", wire=1.0, waits=3.0).hidden == 0.0, "a peer may come later than its messages take"

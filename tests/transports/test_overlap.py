"""Messages travel under compute, and what travels is left alone: shown on the CPU, where CI runs.

A message travels under compute if a step is computed between its posting and the wait for it. That is counted, not
timed, so that a busy machine changes nothing. Twins plant the two defects that this guards against, and see them found.
"""

import threading
import time

import pytest
import torch

from attnspan.attention import attention, lane, loop
from attnspan.layouts import Contiguous
from attnspan.masks import Full
from attnspan.plan import Plan
from attnspan.testing import loopback
from tests import oracle
from tests.transports.slow_wire import Mail, SlowWire

RANKS, TOKENS = 3, 24
MESSAGE, STEP = 0.02, 0.01
"""Seconds of a message, and of the compute of a step: whoever reads or writes too early does it while one travels."""


@pytest.fixture(autouse=True, scope="module")
def warm():
    """Whatever happens in a process once has happened."""
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    plan = Plan(Full(), Contiguous(1), 8, "ring")
    loopback(1).run(lambda world: attention(x, x, x, plan=plan, group=world).sum().backward())


def slow(work, here):
    def working(*args):
        time.sleep(STEP)
        here.wire.computed += 1
        return work(*args)

    return working


def ran(strategy, monkeypatch):
    """What all ranks were given, and of each rank: (out and gradients, its wire)."""
    here = threading.local()
    monkeypatch.setattr(lane.Lane, "forward", slow(lane.Lane.forward, here))
    monkeypatch.setattr(lane.Lane, "backward", slow(lane.Lane.backward, here))
    plan = Plan(Full(), Contiguous(RANKS), TOKENS, strategy)
    whole = torch.randn(4, 1, 2, TOKENS, 8, generator=torch.Generator().manual_seed(0))

    mail = Mail()

    def rank(world):
        here.wire = wire = SlowWire(world, mail, MESSAGE)
        q, k, v, grad = whole.chunk(RANKS, dim=3)[world.rank].unbind()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, plan=plan, group=wire, keep_keys=False)
        grads = torch.autograd.grad(out, leaves, grad)
        return (out, *grads), wire

    return whole, loopback(RANKS).run(rank)


def check_overlap(strategy, monkeypatch):
    _, ranks = ran(strategy, monkeypatch)
    steps = len(Plan(Full(), Contiguous(RANKS), TOKENS, strategy).steps(0))
    # The keys of every step but the first travel, forward and backward, and the gradients of as many steps. Only those
    # of the last step have no compute left to travel under.
    messages, hidden = 3 * (steps - 1), 3 * (steps - 1) - 1
    for _, wire in ranks:
        assert wire.computed == 2 * steps
        under = sum(wire.under)
        assert (len(wire.under), under) == (messages, hidden), f"{under} of {len(wire.under)} messages under compute"


def check_buffers(strategy, monkeypatch):
    _, ranks = ran(strategy, monkeypatch)
    assert [wire.wrong for _, wire in ranks] == [[]] * RANKS


@pytest.mark.parametrize("strategy", ["ring", "needed(3)"])
def test_messages_travel_under_compute(strategy, monkeypatch):
    check_overlap(strategy, monkeypatch)


@pytest.mark.parametrize("strategy", ["ring", "needed(3)", "gather", "ulysses"])
def test_what_travels_is_left_alone_and_the_result_is_right(strategy, monkeypatch):
    whole, ranks = ran(strategy, monkeypatch)
    q, k, v, grad = whole.unbind()
    how = (Full().dense(TOKENS), 8**-0.5)
    expected = (oracle.attention(q, k, v, *how)[0], *oracle.gradients(q, k, v, *how, grad))
    for rank, (found, wire) in enumerate(ranks):
        assert wire.wrong == []
        for mine, all_ in zip(found, expected, strict=True):
            # Sums of 24 products in float32: a few units of 6e-8, and numbers of about 1. NaN is never close.
            torch.testing.assert_close(mine.double(), all_.chunk(RANKS, dim=2)[rank], atol=5e-6, rtol=0)


def test_twin_a_loop_that_waits_at_once_is_found(monkeypatch):
    begin = loop.KeyExchange.__init__

    def waiting(self, *args):
        begin(self, *args)
        self._pending.wait()

    monkeypatch.setattr(loop.KeyExchange, "__init__", waiting)
    with pytest.raises(AssertionError, match="messages under compute"):
        check_overlap("ring", monkeypatch)


def test_twin_a_buffer_that_is_used_again_too_early_is_found(monkeypatch):
    made, empty = {}, lane.empty_packed

    def kept(key, value, rows, dtype=None):
        here = (threading.get_ident(), rows, dtype)
        return made.setdefault(here, empty(key, value, rows, dtype))

    monkeypatch.setattr(lane, "empty_packed", kept)
    with pytest.raises(AssertionError, match=r"that is under way was posted again|was written to"):
        check_buffers("ring", monkeypatch)

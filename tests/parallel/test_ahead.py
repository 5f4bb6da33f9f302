"""Plans that another thread makes while this one attends are those that are made in line, and ask nobody."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from attnspan.layouts import HeadTail
from attnspan.masks import Causal, Documents, KeyPadding, MaskMod, SlidingWindow
from attnspan.parallel import ContextParallel
from attnspan.plan import kind as kind_module
from attnspan.plan import plan as plan_module
from attnspan.testing import loopback
from attnspan.transports import Wrapped
from tests.pace import stretched
from tests.processes import spawn

LENGTH, RANKS = 48, 2


def packs(count=12, seed=0):
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        cuts = sorted({0, LENGTH, *(draw.randrange(1, LENGTH) for _ in range(draw.randrange(5)))})
        found.append([stop - start for start, stop in pairwise(cuts)])
    return found


def masks():
    """Documents, windows, and functions that are traced."""
    return [
        *(Causal() & Documents(lengths) for lengths in packs()),
        *(SlidingWindow(width) for width in (3, 9)),
        *(Causal() & MaskMod(lambda b, h, q, k, every=every: (q - k) % every == 0) for every in (2, 3, 5)),
    ]


class Telling(Wrapped):
    """A transport that remembers which threads used it."""

    def __init__(self, transport):
        super().__init__(transport)
        self.threads = set()

    def _post(self, sends, receives, what):
        self.threads.add(threading.get_ident())
        return self.transport._post(sends, receives, what)


def tensors(cp, seed):
    draw = torch.Generator().manual_seed(seed)
    return [cp.shard(torch.randn(1, 4, LENGTH, 8, generator=draw), dim=2).requires_grad_() for _ in range(3)]


def attended(cp, seed):
    """Out and gradients, and the plan that ran."""
    leaves = tensors(cp, seed)
    out = cp.attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)], cp.plan


def in_line(world, asked):
    cp = ContextParallel(world, seq_len=LENGTH, mask=Causal())
    attended(cp, 0)
    return [attended(cp.with_mask(mask), seed) for seed, mask in enumerate(asked)]


def ahead(world, asked, workers):
    """The same with all sessions made by other threads, in any order, while this one attends."""
    telling = Telling(world)
    cp = ContextParallel(telling, seq_len=LENGTH, mask=Causal())
    attended(cp, 0)
    order = random.Random(world.rank)
    with ThreadPoolExecutor(workers) as planners:
        coming = {i: planners.submit(cp.with_mask, asked[i]) for i in order.sample(range(len(asked)), len(asked))}
        found = [attended(coming[i].result(), i) for i in range(len(asked))]
        again = [planners.submit(cp.with_mask, mask).result() for mask in asked]
    assert again == [coming[i].result() for i in range(len(asked))], "each is made once"
    assert telling.threads == {threading.get_ident()}, "another thread used the group"
    return found


@pytest.mark.parametrize("workers", [1, 4])
def test_plans_made_ahead_are_those_made_in_line_to_the_bit(workers):
    asked = masks()
    for here, there in zip(
        loopback(RANKS).run(lambda world: in_line(world, asked)),
        loopback(RANKS).run(lambda world: ahead(world, asked, workers)),
        strict=True,
    ):
        for (one, plan), (other, planned) in zip(here, there, strict=True):
            assert plan == planned
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def on_gloo(world):
    asked = [Causal() & Documents(lengths) for lengths in packs(6)]
    return all(
        plan == planned and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        for (one, plan), (other, planned) in zip(in_line(world, asked), ahead(world, asked, 2), strict=True)
    )


def test_so_they_are_between_processes():
    assert spawn(2, on_gloo) == [True, True]


def test_the_first_call_finds_its_plan():
    chosen, steps = kind_module._forecast, plan_module._steps
    asked = [Causal() & Documents(lengths) for lengths in packs(3, seed=1)]

    def rank(world):
        cp = ContextParallel(world, seq_len=LENGTH, mask=Causal())
        attended(cp, 0)
        with ThreadPoolExecutor(1) as planner:
            sessions = [planner.submit(cp.with_mask, mask).result() for mask in asked]
        world.all_gather_bytes(b"")
        before = chosen.cache_info().misses, steps.cache_info().misses
        world.all_gather_bytes(b"")
        for session in sessions:
            attended(session, 1)
        return before == (chosen.cache_info().misses, steps.cache_info().misses)

    assert loopback(RANKS).run(rank) == [True] * RANKS


def test_twin_a_shape_that_never_ran_is_planned_when_it_comes():
    chosen = kind_module._chosen

    def rank(world):
        cp = ContextParallel(world, seq_len=LENGTH, mask=Causal())
        session = cp.with_mask(SlidingWindow(17))
        before = chosen.cache_info().misses
        world.all_gather_bytes(b"")
        x = torch.randn(1, 2, len(session.positions), 4)
        session.attention(x, x, x)
        return chosen.cache_info().misses > before

    assert all(loopback(RANKS).run(rank))


def test_a_mask_that_does_not_fit_the_last_shape_waits_for_its_own():
    """Three batch rows, where attention last ran on one."""

    def rank(world):
        cp = ContextParallel(world, seq_len=LENGTH, mask=Causal(), layout=HeadTail(RANKS))
        attended(cp, 0)
        session = cp.with_mask(KeyPadding([48, 20, 7]))
        x = torch.randn(3, 4, len(session.positions), 8)
        return session.attention(x, x, x).shape[0]

    assert loopback(RANKS).run(rank) == [3] * RANKS


def test_asking_for_a_session_that_is_known_does_not_wait_for_one_that_is_planned(monkeypatch):
    def rank(world):
        cp = ContextParallel(world, seq_len=LENGTH, mask=Causal())
        known, go, begun = cp.with_mask(SlidingWindow(5)), threading.Event(), threading.Event()
        sibling = cp._sibling

        def slowly(*args):
            begun.set()
            assert go.wait(stretched(30))
            return sibling(*args)

        cp._sibling = slowly
        with ThreadPoolExecutor(1) as planner:
            coming = planner.submit(cp.with_mask, SlidingWindow(6))
            assert begun.wait(stretched(30))
            assert cp.with_mask(SlidingWindow(5)) is known
            assert not coming.done()
            go.set()
            assert cp.with_mask(SlidingWindow(6)) is coming.result()

    loopback(1).run(rank)


@pytest.mark.cuda
def test_another_thread_has_the_sessions_device():
    device = torch.device("cuda", torch.cuda.device_count() - 1)

    def rank(world):
        cp = ContextParallel(world, seq_len=LENGTH, mask=Causal())
        with ThreadPoolExecutor(1) as planner:
            return planner.submit(cp.with_mask, SlidingWindow(5)).result().positions.device

    assert loopback(2, device=device).run(rank) == [device] * 2

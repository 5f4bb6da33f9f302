"""A rank that raises or dies in the middle of attention ends the others, in time and without a result; nothing that is
not a number spreads.

Real processes over gloo: in each spawn rank 1 of three comes to grief at its first tiles, forward or backward. A group
that lost a rank is lost; one whose rank only raised could be used again, and must not be: see transports/abort.py.
"""

import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from attnspan.attention import attention
from attnspan.attention.lane import Lane
from attnspan.errors import AttentionError, TransportError
from attnspan.kernels import per_tile
from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal, Documents, Full
from attnspan.testing import loopback
from tests.attention.harness import Problem, Result, expected, on_rank, run
from tests.pace import in_time, stretched
from tests.processes import Died, spawn

TIMEOUT = (
    5  # of groups, in seconds of an idle machine; what is noticed after more than SLACK beyond it is noticed too late
)
SLACK = 4
RANKS, VICTIM = 3, 1


def problem(strategy):
    return Problem(Full(), Contiguous(RANKS), 24, strategy, heads=3, kv_heads=3)


class Outcome(NamedTuple):
    """What became of an attention on one rank: the error, if any, and whether a result was right."""

    seconds: float
    kind: str = ""
    said: str = ""
    right: bool = False


def outcome(problem, group=None):
    """Forward and backward on this rank."""
    began = time.monotonic()
    try:
        found = on_rank(problem, group)
    except Exception as error:
        return Outcome(time.monotonic() - began, type(error).__name__, str(error))
    seconds = time.monotonic() - began
    sides = ["query", "query", "query", "key", "key"]
    pairs = zip(found, expected(problem), sides, strict=False)
    right = all(torch.allclose(x, problem.shard(y, dist.get_rank(group), side)) for x, y, side in pairs)
    return Outcome(seconds, right=right)


def doom(patch, when, act):
    """Make this process `act` before it computes its next tiles, once."""
    real = getattr(Lane, when)  # the method of a lane is called as the pass

    def doomed(self, *args):
        patch.setattr(Lane, when, real)
        act()
        return real(self, *args)

    patch.setattr(Lane, when, doomed)


def awaiting(rank, said):
    """Whom a rank awaited, by an error that names the group and what was awaited; fails if it does not."""
    what = "(?:keys|gradients|heads)"
    match = re.match(
        rf"rank {rank} of {RANKS}, group '\d+': "
        rf"waiting for (?:{what} from rank (\d)|rank (\d) to take {what}): ",
        said,
    )
    assert match, said
    return int(match[1] or match[2])


# ---- a rank dies -----------------------------------------------------------------------------------------------------


def killed(world, strategy, when):
    """An attention in peace, then in a less patient group one in which a rank is killed, and the next."""
    rank = world.rank
    calm, group = outcome(problem(strategy)), dist.new_group(timeout=timedelta(seconds=stretched(TIMEOUT)))
    with pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM:
            doom(patch, when, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return calm, *(outcome(problem(strategy), group) for _ in range(2))


@pytest.mark.parametrize(("strategy", "when"), [("ring", "forward"), ("ulysses", "forward"), ("needed(2)", "backward")])
def test_when_a_rank_is_killed_the_others_say_whom_they_awaited_and_return_nothing(strategy, when):
    saw = spawn(RANKS, killed, strategy, when, timeout=90, may_die=True)
    assert saw.pop(VICTIM) == Died(by="SIGKILL")
    for calm, during, after in saw:
        assert calm.right
        assert during.kind == after.kind == "TransportError"
        assert in_time(during.seconds + after.seconds, TIMEOUT + SLACK)
        assert "an earlier attention broke off here with TransportError: " in after.said
    # A rank that awaits one who awaits the dead hears of that one.
    assert VICTIM in [awaiting(rank, during.said) for rank, (_, during, _) in zip((0, 2), saw, strict=True)]


# ---- a rank raises ---------------------------------------------------------------------------------------------------


def fails():
    raise RuntimeError("out of memory")


def raised(world, faults):
    """For each fault: an attention in which a rank raises, the next one on that group, and one on a new group."""
    rank = world.rank
    saw = []
    for strategy, when in faults:
        assert outcome(problem(strategy)).right  # in peace, with patience: what comes after is about the fault alone
        group = dist.new_group(timeout=timedelta(seconds=stretched(TIMEOUT)))
        with pytest.MonkeyPatch.context() as patch:
            if rank == VICTIM:
                doom(patch, when, fails)
            during = outcome(problem(strategy), group)
        after = outcome(replace(problem(strategy), seed=1), group)
        dist.barrier()
        saw.append((during, after, outcome(problem(strategy), dist.new_group())))
    return saw


FAULTS = [("gather", "forward"), ("ring", "backward")]


@pytest.fixture(scope="module")
def seen_when_raised():
    return spawn(RANKS, raised, FAULTS, timeout=90)


@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=map(" ".join, FAULTS))
def test_when_a_rank_raises_the_others_say_whom_they_awaited_and_return_nothing(seen_when_raised, fault):
    during = {rank: saw[fault][0] for rank, saw in enumerate(seen_when_raised)}
    assert during.pop(VICTIM)[1:] == ("RuntimeError", "out of memory", False)
    assert all(each.kind == "TransportError" and in_time(each.seconds, TIMEOUT + SLACK) for each in during.values())
    assert VICTIM in [awaiting(rank, each.said) for rank, each in during.items()]


@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=map(" ".join, FAULTS))
def test_a_group_on_which_a_rank_raised_is_refused_by_all_and_a_new_one_works(seen_when_raised, fault):
    """Or the next keys of the rank that raised, of the same shape, would be taken for those that it still owes."""
    for rank, saw in enumerate(seen_when_raised):
        _, after, anew = saw[fault]
        why = "RuntimeError: out of memory; " if rank == VICTIM else "TransportError: "
        assert after.kind == "TransportError"
        assert after.said.startswith(f"rank {rank} of {RANKS}, group ")
        assert f": an earlier attention broke off here with {why}" in after.said
        assert after.said.endswith("; make a new group, as by torch.distributed.new_group()")
        assert anew.right


def test_a_virtual_group_on_which_a_call_broke_off_is_refused_too():
    def rank(world):
        with pytest.MonkeyPatch.context() as patch:
            doom(patch, "forward", fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                on_rank(alone, world)
        with pytest.raises(TransportError, match="broke off here with RuntimeError: out of memory; its messages"):
            on_rank(alone, world)

    alone = Problem(Full(), Contiguous(1), 8)
    loopback(ranks=1).run(rank)


def test_what_all_ranks_refuse_breaks_nothing():
    def rank(world):
        with pytest.raises(AttentionError, match="attend by the session that sharded it"):
            attention(*torch.ones(3, 1, 1, 7, 8).unbind(), plan=whole.plan, group=world)
        return on_rank(whole, world)

    whole = Problem(Full(), Contiguous(2), 16)
    assert all(isinstance(found, Result) for found in loopback(ranks=2).run(rank))


def test_twin_what_is_wrong_is_not_called_right():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = Problem(Full(), Contiguous(1), 8)
        assert outcome(alone).right
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(per_tile, "sliced", lambda q, k, v, tile: (q, k.flip(2), v))
            assert outcome(alone)[1:] == ("", "", False)
    finally:
        dist.destroy_process_group()


# ---- what is not a number --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("strategy", ["ring", "gather", "needed(2)", "ulysses"])
def test_what_is_not_finite_stays_in_its_document_head_and_batch_row(strategy, kernel, number):
    """Results and gradients alike; elsewhere not a bit differs. (What it does inside is in test_features.py.)"""
    mask = Causal() & Documents([10, 17, 9])
    clean = Problem(mask, HeadTail(3), 36, strategy, kernel=kernel, heads=4, kv_heads=2)
    before = run(clean)
    for where in ("query", "key", "value", "grad"):
        stained = replace(clean)
        getattr(stained.whole, where)[1, 0, 15] = number
        after = run(stained)
        for name, x, y in zip(Result._fields, before, after, strict=True):
            if x is None:
                continue
            stain = torch.zeros_like(x, dtype=torch.bool)
            stain[1, : x.shape[1] // 2, 10:27] = True
            assert torch.equal(x[~stain], y[~stain]), f"{name} of {where}"
        assert not all(y.isfinite().all() for y in after if y is not None)

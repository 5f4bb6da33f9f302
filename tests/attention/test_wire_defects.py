"""The lane of real processes can fail: defects of the wire turn attention on gloo, and on NCCL, wrong.

Each is planted in the transport of one rank of three, as people write it: a wait left out, a buffer that is written
while it is sent, a message that goes to the wrong rank. Rank 1 posts its data late, so that nothing arrives before it
is read, and nothing has left before it is overwritten; that alone must do no harm.
"""

import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from attnspan.errors import AttnspanError
from attnspan.layouts import Contiguous
from attnspan.masks import Causal
from attnspan.transports import Distributed, Pending
from tests.attention.defects import planted, sentence
from tests.attention.harness import Problem, compare, on_rank, together
from tests.attention.test_gloo import there
from tests.processes import on_backends, spawn

RANKS, LATE = 3, 1.0  # seconds
RING = Problem(Causal(), Contiguous(RANKS), 36, "ring", heads=3, kv_heads=3)
HEADS = replace(RING, strategy="ulysses")

UNAWAITED = []
"""What a rank did not wait for, until the probe is over."""


def rank_1_is_late(plant):
    """With data alone: headers, by which hosts know each other's operation, are on time."""

    def each(real):
        def post(self, sends, receives, what, tag=None):
            if self.rank == 1 and tag is None:
                time.sleep(LATE)
            return real(self, sends, receives, what, tag)

        return post

    def batch(real):
        def post(self, sends, receives, what):
            if self.rank == 1:
                time.sleep(LATE)
            return real(self, sends, receives, what)

        return post

    plant(Distributed, "_post_each", each)
    plant(Distributed, "_post_batch", batch)


def a_wait_is_left_out(plant):
    rank_1_is_late(plant)

    def bend(real):
        def post(self, sends, receives, what):
            if self.rank != 0 or what not in ("keys", "gradients"):
                return real(self, sends, receives, what)
            for _, tensor in receives:
                tensor.fill_(torch.nan)  # whatever was there before
            UNAWAITED.append(real(self, sends, receives, what))
            return Pending()

        return post

    plant(Distributed, "_post", bend)


def a_buffer_is_reused_in_flight(plant):
    rank_1_is_late(plant)

    def bend(real):
        def post(self, sends, receives, what):
            pending = real(self, sends, receives, what)
            if self.rank != 0 or what != "heads":
                return pending
            kept = [tensor.clone() for _, tensor in sends]
            for _, tensor in sends:
                tensor.zero_()

            def restore():
                for (_, tensor), copy in zip(sends, kept, strict=True):
                    tensor.copy_(copy)

            return pending.then(restore)

        return post

    plant(Distributed, "_post", bend)


def a_message_goes_to_the_wrong_rank(plant):
    def bend(real):
        def post(self, sends, receives, what):
            if self.rank == 0 and what == "heads":
                peers = [peer for peer, _ in sends]
                sends = [(peer, tensor) for peer, (_, tensor) in zip(reversed(peers), sends, strict=True)]
            return real(self, sends, receives, what)

        return post

    plant(Distributed, "_post", bend)


DEFECTS = [(a_wait_is_left_out, RING), (a_buffer_is_reused_in_flight, HEADS), (a_message_goes_to_the_wrong_rank, HEADS)]
HARMLESS = [(rank_1_is_late, RING), (rank_1_is_late, HEADS)]


def probe(world):
    """For every row of both lists, this rank's shards, or what was raised; each on a group of its own."""
    found = []
    for defect, problem in (*HARMLESS, *DEFECTS):
        group = dist.new_group()
        on_rank(there(replace(problem, seed=1), world), group)  # in peace; ranks have agreed, and kernels are loaded
        with ExitStack() as stack:
            stack.enter_context(planted(defect))
            try:
                found.append(on_rank(there(problem, world), group))
            except AttnspanError as error:
                found.append(str(error))
            for pending in UNAWAITED:
                pending.wait()
            UNAWAITED.clear()
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def seen():
    by = {}

    def told(ranks, backend):
        if backend not in by:
            by[backend] = list(zip(*spawn(ranks, probe, backend=backend, timeout=120), strict=True))
        return by[backend]

    return told


def is_red(problem, shards):
    if any(isinstance(each, str) for each in shards):
        return True
    try:
        compare(problem, together(problem, shards))
    except AssertionError:
        return True
    return False


@on_backends(RANKS)
@pytest.mark.parametrize("row", range(len(HARMLESS)), ids=["ring", "heads"])
def test_a_late_rank_does_no_harm(row, ranks, backend, seen):
    assert not is_red(HARMLESS[row][1], seen(ranks, backend)[row])


@on_backends(RANKS)
@pytest.mark.parametrize("row", range(len(DEFECTS)), ids=[sentence(defect) for defect, _ in DEFECTS])
def test_attention_turns_red_when(row, ranks, backend, seen):
    assert is_red(DEFECTS[row][1], seen(ranks, backend)[len(HARMLESS) + row])

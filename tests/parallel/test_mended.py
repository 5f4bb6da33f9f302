"""Mistakes that were once made, or accepted, in silence."""

import pytest
import torch

from attnspan.errors import ShardError
from attnspan.masks import Causal, Documents, Full
from attnspan.parallel import ContextParallel
from attnspan.testing import loopback

X = torch.randn(1, 2, 16, 8, dtype=torch.float64)


def on_two(check, **how):
    def rank(world):
        return check(ContextParallel(world, **({"seq_len": 16, "mask": Causal()} | how)))

    return loopback(2).run(rank)


def test_sinks_of_cross_attention_have_the_gradient_of_sinks_of_attention():
    def rank(cp):
        q = cp.shard(X, dim=2)
        found = []
        for attend in (cp.attention, cp.cross(cp, Causal())):
            sinks = torch.ones(2, dtype=torch.float64, requires_grad=True)
            cp.mean_loss(attend(q, q, q, sinks=sinks).sin()).backward()
            found.append(sinks.grad)
        torch.testing.assert_close(*found, rtol=1e-12, atol=0)

    on_two(rank)


def test_a_shard_of_another_layout_is_no_input_of_attention():
    def rank(cp):
        other = cp.with_mask(Causal() & Documents([5, 11]))
        q = cp.shard(X, dim=2)
        with pytest.raises(ShardError, match="use one ContextParallel for a whole batch"):
            other.attention(q, q, q)
        same = cp.with_mask(Causal() & Documents([5, 11]), layout=cp.layout)
        assert same.attention(q, q, q).shape == q.shape

    on_two(rank)


def test_the_sum_of_whole_numbers_is_whole():
    def rank(cp):
        assert cp.sum(torch.tensor([2**53, 1])).item() == 2 * (2**53 + 1)
        assert cp.sum(torch.tensor([True, False])).item() == 2
        assert cp.mean(torch.tensor([1, 2])).item() == 1.5

    on_two(rank)


def test_a_count_that_differs_between_ranks_is_refused_on_all():
    def rank(cp):
        losses = torch.ones(4)
        for count in (float(cp.rank + 1), 0.0, -1.0, float("nan")):
            with pytest.raises(ShardError, match="count must be the valid tokens of all micro-batches and ranks"):
                cp.mean_loss(losses, count=count)
        assert cp.mean_loss(losses, count=16).item() == 0.5

    on_two(rank)


def test_labels_that_cannot_be_ignored_are_refused():
    def rank(cp):
        with pytest.raises(ShardError, match="fill must be a number that uint8 has, got -100"):
            cp.shard_batch({"input_ids": IDS, "labels": IDS.to(torch.uint8)}, shift_labels=True)

    on_two(rank)


IDS = torch.arange(16)[None]


def test_ranks_that_load_different_batches_are_told_so():
    def rank(world):
        cp = ContextParallel(world, seq_len=16, mask=Causal())
        with pytest.raises(ShardError, match="input_ids must be the same on all ranks of the group"):
            cp.shard_batch({"input_ids": IDS + cp.rank, "labels": IDS})
        alike = cp.shard_batch({"input_ids": IDS, "labels": IDS})
        assert alike["labels"].shape == (1, 8)
        assert cp.with_mask(Causal() & Documents([9, 7])).shard_batch({"input_ids": IDS + cp.rank})  # not asked again

    loopback(2).run(rank)


def test_a_batch_that_one_rank_refuses_is_refused_by_all():
    def rank(world):
        cp = ContextParallel(world, seq_len=16, mask=Causal())
        with pytest.raises(ShardError, match="got shape"):
            cp.shard_batch({"input_ids": IDS[:, : 16 - cp.rank]})

    loopback(2).run(rank)


def test_a_gradient_that_a_dtype_cannot_have_is_refused():
    eighth = torch.ones(16, dtype=torch.float8_e4m3fn).requires_grad_()

    def rank(cp):
        with pytest.raises(ShardError, match="float8_e4m3fn has no gradient here; detach it, or widen it"):
            cp.shard(eighth, dim=0)
        assert cp.shard(eighth.detach(), dim=0).dtype == torch.float8_e4m3fn

    on_two(rank)


def test_a_wider_group_must_hold_the_session():
    def rank(world):
        cp = ContextParallel(world, seq_len=16, mask=Full())
        with pytest.raises(ShardError, match="over must hold all ranks of the session's group"):
            cp.mean_loss(torch.ones(4), over=STRANGER[0])

    def stranger(world):
        STRANGER.append(world)

    loopback(1).run(stranger)
    loopback(2).run(rank)


STRANGER = []

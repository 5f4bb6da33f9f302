"""What a session says that it was used for is what ran and what travelled."""

import pytest
import torch

import attnspan as span
from attnspan.errors import AttentionError
from attnspan.testing import loopback
from attnspan.transports import Counting
from tests.parallel.models import model, whole

LENGTH = 22
MASK = span.Causal() & span.Documents([9, 13])
STRATEGIES = ["ring", "gather", "needed", "needed(2)", "ulysses", "ulysses(2) x ring", "ulysses(2) x needed"]


def trained(world, strategy="auto", mask=MASK, layout="auto", passes=1, heads=6, kv_heads=2, dtype=torch.bfloat16):
    """(session, what its transport counted) after some attention, forward and backward."""
    counting = Counting(world)
    cp = span.ContextParallel(counting, seq_len=LENGTH, mask=mask, strategy=strategy, layout=layout)
    for _ in range(passes):
        q, k, v = (
            cp.shard(torch.randn(2, h, LENGTH, d), dim=2).to(dtype).requires_grad_()
            for h, d in ((heads, 4), (kv_heads, 4), (kv_heads, 6))
        )
        cp.attention(q, k, v).float().sum().backward()
    return cp, counting


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("heads", [(6, 2), (8, 4), (3, 1)], ids=str)
def test_bytes_received_are_those_on_the_wire(strategy, heads):
    def rank(world):
        cp, counting = trained(world, strategy, heads=heads[0], kv_heads=heads[1], passes=2)
        moved = sum(
            sum(event.received.values()) for event in counting.log if event.what in ("keys", "heads", "gradients")
        )
        report = cp.report()
        assert sum(report.received) == moved
        assert (report.calls, report.recomputed, report.backwards) == (2, 0, 2)

    loopback(4).run(rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_follow_the_dtype_and_batch_rows_that_differ(dtype):
    rows = span.Causal() & span.KeyPadding([22, 9])

    def rank(world):
        for layout in ("auto", span.Balanced(rows, ranks=3, chunk=2, per_row=True)):
            cp, counting = trained(world, "needed", rows, layout, dtype=dtype)
            moved = sum(sum(e.received.values()) for e in counting.log if e.what in ("keys", "gradients"))
            assert sum(cp.report().received) == moved

    loopback(3).run(rank)


def test_forward_without_backward_receives_keys_once():
    def rank(world):
        counting = Counting(world)
        cp = span.ContextParallel(counting, seq_len=LENGTH, mask=MASK, strategy="ring")
        x = cp.shard(torch.randn(1, 2, LENGTH, 4), dim=2)
        cp.attention(x, x, x)
        moved = sum(sum(event.received.values()) for event in counting.log if event.what == "keys")
        assert cp.report().received == (moved, 0)

    loopback(3).run(rank)


def test_pairs_and_shares_add_up_to_the_mask():
    def rank(world):
        cp, _ = trained(world, passes=3)
        return cp.report().pairs, cp.report().share

    found = loopback(4).run(rank)
    assert sum(pairs for pairs, _ in found) == 3 * 2 * MASK.work(LENGTH)  # passes, batch rows
    assert sum(share for _, share in found) == pytest.approx(1)


def test_recomputations_are_told_from_calls_and_reset_forgets_both():
    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=MASK), model(again="non-reentrant", layers=3)
        with cp.attach(mine):
            mine(cp.shard(whole(LENGTH)).detach().requires_grad_()).sum().backward()
        cp.assert_used(layers=3)
        assert (cp.report().calls, cp.report().recomputed, cp.report().backwards) == (3, 3, 3)
        once = cp.report().received
        cp.reset()
        assert (cp.report().calls, cp.report().recomputed, sum(cp.report().received)) == (0, 0, 0)
        with cp.sdpa(), torch.no_grad():
            mine(cp.shard(whole(LENGTH)))
        assert cp.report().received == (once.forward // 2, 0)  # once, not again

    loopback(2).run(rank)


def test_compiled_code_counts():
    torch._dynamo.reset()

    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=MASK), model(layers=3)
        fast = torch.compile(mine, backend="aot_eager", fullgraph=True)
        for _ in range(4):
            with cp.sdpa():
                fast(whole(LENGTH))
        cp.assert_used(layers=3, passes=4)

    loopback(1).run(rank)
    torch._dynamo.reset()


def test_a_layer_that_went_another_way_is_missed():
    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=MASK), model(layers=3)
        x = cp.shard(whole(LENGTH))
        with cp.sdpa():
            mine.layers[0](x)
            mine.layers[1](x)
        mine.layers[2](x)
        match = (
            r"^attention must have run 3 x 1 = 3 times since the last reset, it ran 2 times: some layers do not call"
        )
        with pytest.raises(AttentionError, match=match):
            cp.assert_used(layers=3)
        with pytest.raises(AttentionError, match=r"1 x 1 = 1 times .* it ran 2 times: for several forward passes give"):
            cp.assert_used(layers=1)
        cp.assert_used(layers=1, passes=2)
        with pytest.raises(AttentionError, match="passes must be a whole number >= 1, got 0"):
            cp.assert_used(layers=2, passes=0)

    loopback(2).run(rank)


def test_it_prints_a_line_for_each_plan():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask={"full": span.Causal(), "window": span.SlidingWindow(3)})
        empty = str(cp.report())
        x = cp.shard(torch.randn(1, 2, LENGTH, 4), dim=2)
        for name in ("full", "window", "window"):
            cp.attention(x, x, x, mask=name)
        with pytest.raises(
            AttentionError, match=r"attention with mask 'full' must have run 2 x 1 = 2 times .* ran 1 times"
        ):
            cp.assert_used(layers={"full": 2, "window": 2})
        return empty, str(cp.report())

    (empty, full), _ = loopback(2).run(rank)
    assert empty == "rank 0 of 2: 0 calls, 0.0% of the work: attention has not run"
    title, head, first, second = full.splitlines()
    assert title.startswith("rank 0 of 2: 3 calls, ")
    assert head.split()[:5] == ["mask", "strategy", "calls", "recomputed", "backwards"]
    assert (first.split()[0], first.split()[2], second.split()[0], second.split()[2]) == ("full", "1", "window", "2")

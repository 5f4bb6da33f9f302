"""Plans that keep keys: fewer bytes, no more time, and memory that is counted against the limit."""

import pytest
import torch

import attnspan as span
from attnspan.attention import Attention, agreement
from attnspan.errors import AttentionError, PlanError
from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal, Documents, SlidingWindow
from attnspan.plan import Hardware, Plan, Shape, choose, predict
from attnspan.plan.choose import predicted
from attnspan.plan.drawing import in_bytes
from attnspan.testing import loopback
from attnspan.transports import Counting

RANKS, TOKENS = 4, 64
SHAPE = Shape(heads=8, kv_heads=4, head_dim=4, dtype="float32")
STRATEGIES = ["ring", "gather", "needed", "needed(2)", "ulysses", "ulysses(2) x ring", "ulysses(2) x needed"]
MASKS = [Causal(), Causal() & Documents([20, 12, 32]), SlidingWindow(6)]
CPU = Hardware.of("cpu-gloo")


def on_the_wire(plan, keep_keys):
    """The most bytes that a rank receives, forward and backward."""

    def rank(world):
        counting = Counting(world)
        attend = Attention(plan, counting, keep_keys=keep_keys)
        heads = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
        q, k, v = (torch.randn(1, h, TOKENS // RANKS, SHAPE.head_dim, requires_grad=True) for h in heads)
        attend(q, k, v).sum().backward()
        return sum(sum(e.received.values()) for e in counting.log if e.what in ("keys", "heads", "gradients"))

    return max(loopback(RANKS).run(rank))


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_bytes_that_are_planned_are_those_on_the_wire(mask, strategy, keep_keys):
    plan = Plan(mask, HeadTail(RANKS), TOKENS, strategy)
    assert predicted(plan, SHAPE, CPU, keep_keys=keep_keys).moved == on_the_wire(plan, keep_keys)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_backward_from_kept_keys_waits_for_no_key_and_takes_no_longer(mask, strategy):
    plan = Plan(mask, HeadTail(RANKS), TOKENS, strategy)
    forward = predict(plan, 1, SHAPE, CPU)
    plain, kept = (predict(plan, 1, SHAPE, CPU, backward=True, keep_keys=keep) for keep in (False, True))
    assert kept.events[: len(forward.events)] == forward.events
    assert not [e for e in kept.events[len(forward.events) :] if e.what.startswith("keys") or e.what == "packing"]
    assert kept.seconds <= plain.seconds
    assert [e for e in kept.events if "gradients" in e.what] != [], "which travel all the same"


def test_kept_keys_count_against_the_memory():
    free = choose(Causal(), seq_len=1 << 16, ranks=4, shape=SHAPE, keep_keys=True)
    assert all(c.kept == int(max(c.plan.kept_bytes(r, SHAPE) for r in range(4))) for c in free.candidates)
    gather = next(c for c in free.candidates if c.plan.strategy == span.plan.Gather())
    tight = choose(Causal(), seq_len=1 << 16, ranks=4, shape=SHAPE, keep_keys=True, memory=gather.needs - 1)
    refused = next(c for c in tight.candidates if c.plan == gather.plan)
    assert refused.refused == f"needs {in_bytes(gather.needs)}, the limit is {in_bytes(gather.needs - 1)}"
    assert "kept KV" in free.explain().splitlines()[0]
    assert "kept KV" not in choose(Causal(), seq_len=64, ranks=4, shape=SHAPE).explain()


def test_more_than_memory_is_refused_and_auto_keeps_nothing_then():
    least = min(c.peak for c in choose(Causal(), seq_len=1 << 16, ranks=4, shape=SHAPE).candidates)
    asked = {"seq_len": 1 << 16, "ranks": 4, "shape": SHAPE, "memory": least + 1000}
    with pytest.raises(PlanError, match=r"^memory: no plan fits into .*; use more ranks or keep_keys='auto'$"):
        choose(Causal(), **asked, keep_keys=True)
    found = choose(Causal(), **asked, keep_keys="auto")
    assert all(c.kept is None for c in found.candidates if not c.refused)
    with pytest.raises(PlanError, match=r"no plan fits into 1.0 KB of keys per rank; .*; use more ranks$"):
        choose(Causal(), **{**asked, "memory": 1000}, keep_keys="auto")


@pytest.mark.parametrize("wrong", ["yes", None, 2])
def test_other_values_are_refused(wrong):
    with pytest.raises(PlanError, match=f"keep_keys must be True, False or 'auto', got {wrong!r}"):
        choose(Causal(), seq_len=64, ranks=2, shape=SHAPE, keep_keys=wrong)


def test_inference_keeps_nothing():
    plain, kept = (
        choose(Causal(), seq_len=4096, ranks=4, shape=SHAPE, backward=False, keep_keys=keep) for keep in (False, True)
    )
    assert plain.candidates == kept.candidates


@pytest.mark.parametrize("mask", [Causal() & Documents([8] * 8), Causal()], ids=repr)
def test_a_session_keeps_what_its_plan_says(mask):
    def rank(world):
        cp = span.ContextParallel(world, seq_len=TOKENS, mask=mask, layout=Contiguous(RANKS), keep_keys="auto")
        heads = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
        q, k, v = (torch.randn(1, h, TOKENS // RANKS, SHAPE.head_dim, requires_grad=True) for h in heads)
        cp.attention(q, k, v).sum().backward()
        return cp.plan, cp.attentions.named[""].bound.uses.from_kept.total()

    plan, kept = loopback(RANKS).run(rank)[0]
    says = choose(
        mask, seq_len=TOKENS, ranks=RANKS, shape=SHAPE, hardware=CPU, layouts=[Contiguous(RANKS)], keep_keys="auto"
    )
    assert plan == says.plan
    assert kept == (says.candidates[0].kept is not None)


def test_keys_beyond_the_devices_memory_are_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(agreement, "device_memory", lambda device: 1000.0)

    def rank(world):
        x = torch.randn(1, 4, TOKENS // RANKS, 8)
        attend = Attention(Plan(Causal(), HeadTail(RANKS), TOKENS, "gather"), world, keep_keys=True)
        with pytest.raises(AttentionError) as refused:
            attend(x, x, x)
        auto = Attention(Plan(Causal(), HeadTail(RANKS), TOKENS, "gather"), world, keep_keys="auto")
        return str(refused.value), auto(x, x, x).shape

    for message, shape in loopback(RANKS).run(rank):
        assert message == (
            "keep_keys: the keys of a call take 16.4 KB until backward, and cpu has 1.0 KB; use keep_keys='auto', or "
            "more ranks"
        )
        assert shape == (1, 4, TOKENS // RANKS, 8)

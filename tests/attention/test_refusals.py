"""Exact or refused: on every rank, before the first key travels, with the same words.

Every case runs on virtual ranks that write down what is posted. A rank may ask the others for agreement; nothing else
may have happened when all have raised.
"""

import math
import time

import pytest
import torch

from attnspan.attention import Attention, attention
from attnspan.attention.agreement import OTHERS_SHARD
from attnspan.errors import AttentionError, AttnspanError, KernelError, PlanError, TransportError
from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal, Documents, Full, KeyPadding, SlidingWindow
from attnspan.plan import Plan
from attnspan.testing import loopback
from attnspan.transports import Counting
from tests.pace import stretched
from tests.processes import on_backends, spawn

DIFFER = "all ranks must run the same plan, kernel, scale, programs and shapes"
PLAN = Plan(Causal(), Contiguous(3), 12, "gather")  # 4 tokens on each of 3 ranks


def shards(tokens=4, heads=2, kv_heads=2, dim=8, value_dim=8, batch=1, dtype=torch.float32):
    return (
        torch.ones(batch, heads, tokens, dim, dtype=dtype),
        torch.ones(batch, kv_heads, tokens, dim, dtype=dtype),
        torch.ones(batch, kv_heads, tokens, value_dim, dtype=dtype),
    )


def refused(call, ranks=3):
    """The error that call(world) raises, the same on every rank, before anything travelled."""

    def rank(world):
        transport = Counting(world)
        try:
            call(transport)
        except AttnspanError as error:
            assert set(transport.calls) <= {"agree"}, f"{transport.calls} before the refusal"
            return type(error), str(error)
        return None, "not refused"

    found = set(loopback(ranks, timeout=stretched(10)).run(rank))
    assert len(found) == 1, f"ranks differ: {found}"
    return found.pop()


def on_one(odd, usual=None, rank=1, **options):
    """A call with shards(**odd) on one rank and shards(**usual) on the others."""

    def call(world):
        attention(*shards(**(odd if world.rank == rank else usual or {})), **{"plan": PLAN, "group": world, **options})

    return call


def on_all(inputs, **options):
    """The same call on every rank."""
    return lambda world: attention(*inputs, **{"plan": PLAN, "group": world, **options})


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(
            ({"dropout_p": p}, AttentionError, f"dropout_p must be a number in [0, 1), got {p!r}")
            for p in (1, 1.0, -0.1, math.nan, math.inf, True, False, "0.1", None)
        ),
        *(
            (
                {"dropout_p": 0.1, "dropout_seed": seed},
                AttentionError,
                f"dropout_seed must be an integer in [0, 2**63), got {seed!r}",
            )
            for seed in (-1, 2**63, 0.5, True, "7")
        ),
        ({"mask": Causal()}, AttentionError, "give a plan, or what one is made of, not both"),
        ({"layout": Contiguous(3)}, AttentionError, "give a plan, or what one is made of, not both"),
        ({"seq_len": 12}, AttentionError, "give a plan, or what one is made of, not both"),
        ({"kv_len": 12}, AttentionError, "give a plan, or what one is made of, not both"),
        ({"strategy": "ring"}, AttentionError, "give a plan, or what one is made of, not both"),
        ({"plan": None}, AttentionError, "give mask, layout and seq_len, or a plan"),
        (
            {"plan": Plan(Causal(), Contiguous(4), 12)},
            AttentionError,
            "group must have the plan's 4 ranks, got 3",
        ),
        (
            {"kernel": "flash"},
            KernelError,
            "kernel must be one of auto, cudnn, band, flash4, cuda_flash, efficient, cpu_flash, reference, flex, "
            "blocks, got 'flash'; did you mean 'flash4'?",
        ),
    ],
)
def test_arguments(options, error, message):
    assert refused(on_all(shards(), **options)) == (error, message)


@pytest.mark.parametrize("missing", ["mask", "layout", "seq_len"])
def test_a_missing_argument(missing):
    parts = {"mask": Causal(), "layout": Contiguous(3), "seq_len": 12} | {missing: None}
    message = "give mask, layout and seq_len, or a plan"
    assert refused(on_all(shards(), plan=None, **parts)) == (AttentionError, message)


@pytest.mark.parametrize("mask", [torch.ones(12, 12, dtype=torch.bool), [5, 7], "causal"], ids=type)
def test_a_mask_that_is_none(mask):
    error, message = refused(on_all(shards(), plan=None, mask=mask, layout=Contiguous(3), seq_len=12))
    assert error is PlanError
    assert message.startswith("mask must be a mask such as Causal(), got ")


@pytest.mark.parametrize("group", [3, "cp", [0, 1], object()])
def test_a_group_that_is_none(group):
    with pytest.raises(TransportError, match=r"^group must be a DeviceMesh, a process group or a virtual world, got "):
        attention(*shards(), plan=PLAN, group=group)
    with pytest.raises(TransportError, match=r"^group must be a DeviceMesh, a process group or a virtual world, got "):
        Attention(PLAN, group)


# ---- tensors ---------------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X[0], X, X), "query must be (batch, heads, tokens, head dim), got shape (2, 4, 8)"),
        ((X, X[0], X), "key must be (batch, heads, tokens, head dim), got shape (2, 4, 8)"),
        ((X, X, X[None]), "value must be (batch, heads, tokens, head dim), got shape (1, 1, 2, 4, 8)"),
        (shards(dtype=torch.int64), "query must be float32, bfloat16, float16 or float64, got int64"),
        (shards(dtype=torch.bool), "query must be float32, bfloat16, float16 or float64, got bool"),
        (shards(dtype=torch.complex64), "query must be float32, bfloat16, float16 or float64, got complex64"),
        (
            tuple(x.to(torch.float8_e4m3fn) for x in shards()),
            "query must be float32, bfloat16, float16 or float64, got float8_e4m3fn",
        ),
        ((X, X.half(), X), "key must be torch.float32 on cpu like query, got torch.float16 on cpu"),
        ((X, X, X.double()), "value must be torch.float32 on cpu like query, got torch.float64 on cpu"),
        ((X, X.to("meta"), X), "query, key, value and sinks must be on one device, got ['cpu', 'meta']"),
        (
            (X, X[..., :4], X),
            "query, key and value must fit one another, got shapes (1, 2, 4, 8), (1, 2, 4, 4) and (1, 2, 4, 8)",
        ),
        (
            (X, X, X[:, :, :3]),
            "query, key and value must fit one another, got shapes (1, 2, 4, 8), (1, 2, 4, 8) and (1, 2, 3, 8)",
        ),
        (
            (X, X, X[:, :1]),
            "query, key and value must fit one another, got shapes (1, 2, 4, 8), (1, 2, 4, 8) and (1, 1, 4, 8)",
        ),
        (
            (X.expand(2, -1, -1, -1), X, X),
            "query, key and value must fit one another, got shapes (2, 2, 4, 8), (1, 2, 4, 8) and (1, 2, 4, 8)",
        ),
        (
            (X[:, :0], X, X),
            "query, key and value must have a batch, heads and a head dim, got shapes (1, 0, 4, 8), (1, 2, 4, 8) and "
            "(1, 2, 4, 8)",
        ),
        (
            (X[:0], X[:0], X[:0]),
            "query, key and value must have a batch, heads and a head dim, got shapes (0, 2, 4, 8), (0, 2, 4, 8) and "
            "(0, 2, 4, 8)",
        ),
        (shards(heads=3), "query heads must be a multiple of key heads, got 3 and 2"),
        (shards(heads=1), "query heads must be a multiple of key heads, got 1 and 2"),
        (
            tuple(x.transpose(1, 2) for x in shards()),
            "query must be (batch, heads, tokens, head dim), this rank's 4 of 12 tokens in dim 2, got shape "
            "(1, 4, 2, 8); transpose(1, 2) it first",
        ),
        (shards(tokens=12), "query must hold this rank's 4 of 12 tokens, got 12; shard it first"),
        ((X, X[:, :, :3], X[:, :, :3]), f"key must hold this rank's 4 of 12 tokens, got 3; {OTHERS_SHARD}"),
    ],
)
@pytest.mark.parametrize("planned", [True, False])
def test_tensors(inputs, message, planned):
    """The words are the same whether a plan is given or "auto" has to choose one."""
    options = {} if planned else {"plan": None, "mask": Causal(), "layout": Contiguous(3), "seq_len": 12}
    assert refused(on_all(inputs, **options)) == (AttentionError, message)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.ones(3), "sinks must be one logit per query head, (2,), got shape (3,)"),
        (torch.ones(()), "sinks must be one logit per query head, (2,), got shape ()"),
        (torch.ones(1, 2), "sinks must be one logit per query head, (2,), got shape (1, 2)"),
        (torch.ones(2, dtype=torch.int32), "sinks must be floating point on cpu, got int32 on cpu"),
        (torch.ones(2, device="meta"), "query, key, value and sinks must be on one device, got ['cpu', 'meta']"),
    ],
)
def test_sinks(sinks, message):
    assert refused(on_all(shards(), sinks=sinks)) == (AttentionError, message)


def test_tensors_that_are_elsewhere():
    """The group's device is another one: its tensors are on CUDA, say."""

    def call(world):
        world.device = torch.device("meta")
        world.all_gather_bytes = lambda payload, what: [payload] * 3  # which could not be sent
        attention(*shards(), plan=PLAN, group=world)

    message = "query must be on meta, where the group's tensors are, got cpu"
    assert refused(call) == (AttentionError, message)


def test_batch_rows_that_are_not_the_plans():
    plan = Plan(Causal() & KeyPadding([12, 5]), Contiguous(3), 12)
    message = "query must have the plan's 2 batch rows, got 3"
    assert refused(on_all(shards(batch=3), plan=plan)) == (AttentionError, message)


def test_the_lengths_of_uneven_shards_are_told_by_rank():
    plan = Plan(Causal(), Contiguous(3), 11)
    tokens = [len(each) for each in plan.layout.positions(11)]
    wrong = [rank for rank in range(3) if tokens[rank] != 4]
    lines = f"on rank {wrong[0]}: query must hold this rank's 3 of 11 tokens, got 4; {OTHERS_SHARD}"
    assert refused(on_all(shards(), plan=plan)) == (AttentionError, lines)


# ---- ranks that differ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"tokens": 5}, f"query must hold this rank's 4 of 12 tokens, got 5; {OTHERS_SHARD}"),
        ({"heads": 3}, "query heads must be a multiple of key heads, got 3 and 2"),
        ({"dtype": torch.int32}, "query must be float32, bfloat16, float16 or float64, got int32"),
    ],
)
def test_one_rank_that_is_wrong_is_named_on_all(odd, message, rank):
    assert refused(on_one(odd, rank=rank)) == (AttentionError, f"on rank {rank}: {message}")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"heads": 4}, "heads (4, not 2)"),
        ({"kv_heads": 1}, "key heads (1, not 2)"),
        ({"dtype": torch.float64}, "dtype (float64, not float32)"),
        ({"dim": 4}, "head dim (4, not 8)"),
        ({"value_dim": 4}, "value dim (4, not 8)"),
        ({"batch": 2}, "batch (2, not 1)"),
    ],
    ids=str,
)
def test_one_rank_with_other_shapes_is_named_on_all(odd, what, rank):
    others = ", ".join(str(other) for other in range(3) if other != rank)
    message = f"{DIFFER}; rank {rank} differs from ranks {others} in {what}"
    assert refused(on_one(odd, rank=rank)) == (AttentionError, message)


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"plan": Plan(Full(), Contiguous(3), 12, "gather")}, "mask"),
        ({"plan": Plan(Causal(), HeadTail(3), 12, "gather")}, "layout, layout of keys"),
        ({"plan": Plan(Causal(), Contiguous(3), 12, "ring")}, "strategy ({ring}, not {gather})"),
        ({"plan": Plan(Causal() & Documents([5, 7]), Contiguous(3), 12, "gather")}, "mask"),
        ({"kernel": "reference"}, "kernel (reference, not auto)"),
        ({"scale": 0.5}, "scale (0.5, not None)"),
        ({"sinks": torch.ones(2)}, "sinks (some, not none)"),
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_one_rank_with_another_plan_is_named_on_all(odd, what):
    def call(world):
        attention(*shards(), **{"plan": PLAN, "group": world, **(odd if world.rank == 2 else {})})

    strategies = {name: repr(Plan(Causal(), Contiguous(3), 12, name).strategy) for name in ("ring", "gather")}
    message = f"{DIFFER}; rank 2 differs from ranks 0, 1 in {what.format(**strategies)}"
    assert refused(call) == (AttentionError, message)


def test_two_ranks_that_differ_are_both_named():
    def call(world):
        attention(*shards(), plan=PLAN, group=world, scale=float(world.rank))

    message = (
        f"{DIFFER}; rank 1 differs from rank 0 in scale (1.0, not 0.0); rank 2 differs from rank 0 in scale "
        "(2.0, not 0.0)"
    )
    assert refused(call) == (AttentionError, message)


def test_a_refused_call_can_be_made_again_rightly():
    def call(world):
        attend = Attention(PLAN, world)
        with pytest.raises(AttentionError, match="on rank 1: query must hold"):
            attend(*shards(tokens=5 if world.rank == 1 else 4))
        return attend(*shards()).shape

    assert loopback(3).run(call) == [(1, 2, 4, 8)] * 3


def test_ranks_agree_once_for_all_later_calls():
    def call(world):
        transport = Counting(world)
        for _ in range(3):
            attention(*shards(), plan=PLAN, group=transport)
        return transport.calls["agree"]

    assert loopback(3).run(call) == [1, 1, 1]


def test_ranks_forget_alike_however_many_plans_there_are():
    """A memo of 256 that three ranks share would forget the first plan on two of them when the 86th comes."""
    plans = [Plan(SlidingWindow(n), Contiguous(3), 12, "gather") for n in range(86)]

    def call(world):
        time.sleep(0.05 * (world.rank == 2))  # the last to come is the last to be forgotten
        for plan in plans:
            attention(*shards(), plan=plan, group=world)
        world.all_gather_bytes(b"")
        time.sleep(0.05 * (world.rank != 2))
        attention(*shards(), plan=plans[0], group=world)

    loopback(3).run(call)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ring", "gather", "needed(2)", "ulysses"])
def test_a_kernel_that_cannot_is_refused_before_keys_travel(strategy):
    plan = Plan(Causal(), Contiguous(3), 12, strategy)
    for kernel, device in (("cudnn", "cuda"), ("cuda_flash", "cuda"), ("efficient", "cuda")):
        error, message = refused(on_all(shards(), plan=plan, kernel=kernel))
        assert error is KernelError
        assert (
            f"{kernel} runs on {device}, got tensors on cpu; for this tile use cpu_flash or reference, or auto"
            in message
        )
    error, message = refused(on_all(shards(value_dim=4), plan=plan, kernel="cpu_flash"))
    assert error is KernelError
    assert "cpu_flash needs one head dim for keys and values, got 8 and 4" in message


def test_a_tile_that_only_the_last_rank_has_is_refused_on_all(monkeypatch):
    """A kernel that cannot do causal tiles, where only rank 2 has one."""
    from attnspan.kernels import reference

    def supports(spec, q, k, v, tile):
        return "needs full tiles" if tile.kind == "causal" else None

    mask = Full() & Documents([8, 4]) & (Causal() | KeyPadding([8]))
    plan = Plan(mask, Contiguous(3), 12, "ring")
    kinds = [{tile.kind for step in plan.steps(rank) for tile in step.tiles} for rank in range(3)]
    assert ["causal" in each for each in kinds] == [False, False, True]
    monkeypatch.setattr(reference, "supports", supports)
    error, message = refused(on_all(shards(), plan=plan, kernel="reference"))
    assert error is KernelError
    assert message == (
        "on rank 2: kernel='reference' cannot compute causal [0, 4) x [0, 4): needs full tiles; "
        "for this tile use cpu_flash, or auto"
    )


def test_auto_refuses_nothing_that_floats():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for value_dim in (8, 4, 1):
            inputs = shards(dtype=dtype, value_dim=value_dim)
            loopback(3).run(lambda world, inputs=inputs: attention(*inputs, plan=PLAN, group=world))


# ---- real processes --------------------------------------------------------------------------------------------------


def _on_processes(world):
    rank = world.rank

    def told(call):
        try:
            call()
        except AttnspanError as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"

    plan = Plan(Causal(), Contiguous(2), 8, "ring")
    other = Plan(Full(), Contiguous(2), 8, "ring")
    return [
        told(lambda: attention(*shards(tokens=4 + rank), plan=plan)),
        told(lambda: attention(*shards(heads=2 + 2 * rank), plan=plan)),
        told(lambda: attention(*shards(), plan=other if rank else plan)),
        told(lambda: attention(*shards(), plan=plan, kernel="cudnn")),
        told(lambda: attention(*shards(), plan=PLAN)),
        told(lambda: attention(*shards(), plan=plan, group=3)),
        told(lambda: attention(*shards(), plan=plan)),
    ]


@on_backends(2)
def test_real_processes_refuse_alike_and_then_go_on(ranks, backend):
    differs = f"AttentionError: {DIFFER}; rank 1 differs from rank 0"
    one, other = spawn(ranks, _on_processes, backend=backend)
    assert one == other
    assert one[:3] == [
        f"AttentionError: on rank 1: query must hold this rank's 4 of 8 tokens, got 5; {OTHERS_SHARD}",
        f"{differs} in heads (4, not 2)",
        f"{differs} in mask",
    ]
    assert one[3].startswith("KernelError: ")
    assert one[4:] == [
        "AttentionError: group must have the plan's 3 ranks, got 2",
        "TransportError: group must be a DeviceMesh, a process group or a virtual world, got 3 (int)",
        "not refused",
    ]

"""A latent travels and is expanded where it arrives: the same attention, and the same gradients, for fewer bytes."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan.attention import Attention, attention
from attnspan.attention.latent import Expander
from attnspan.errors import AttentionError
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, KeyPadding, SlidingWindow
from attnspan.plan import Plan, Shape
from attnspan.plan.traffic import received_bytes
from attnspan.testing import loopback
from attnspan.transports import Counting
from tests.attention.harness import Problem
from tests.attention.harness import on_rank as on_rank_with_keys
from tests.attention.latents import RANK, ROPE, Found, Up, compare, expected, latent_of, on_rank, run, shard, together
from tests.attention.test_refusals import refused
from tests.plan.strategies import plans
from tests.processes import on_backends, spawn

STRATEGIES = ["ring", "gather", "needed", "needed(3)"]
SIZES = {"heads": 4, "kv_heads": 2, "dim": 6, "value_dim": 5}
ROWS = Causal() & KeyPadding([29, 18])
DOCUMENTS = Causal() & Documents([11, 7, 11])
PROBLEMS = {
    "documents": Problem(DOCUMENTS, HeadTail(4), 29, **SIZES),
    "rows of their own": Problem(ROWS, Balanced(ROWS, ranks=4, chunk=2, per_row=True), 29, **SIZES),
    "striped, float32": Problem(SlidingWindow(6), Striped(4), 29, **SIZES, dtype=torch.float32),
    "fewer tokens than ranks": Problem(Causal(), Contiguous(4), 3, **SIZES),
    "cross": Problem(Causal(align="bottom"), HeadTail(4), 19, kv_len=30, kv_layout=Striped(4), **SIZES),
    "three ranks, a key head each": Problem(Causal(), HeadTail(3), 29, **{**SIZES, "kv_heads": 4}),
    "one rank": Problem(DOCUMENTS, HeadTail(1), 29, **SIZES),
    "strided": Problem(DOCUMENTS, HeadTail(2), 29, **SIZES, memory="BHDS"),
    "bfloat16": Problem(DOCUMENTS, HeadTail(2), 29, **SIZES, dtype=torch.bfloat16),
}
DEEPSEEK = Shape(heads=128, head_dim=192, v_head_dim=128, latent=576)


# ---- the same attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_latent_gives_the_attention_and_the_gradients_of_its_keys(name, strategy):
    problem = replace(PROBLEMS[name], strategy=strategy)
    compare(problem, run(problem), looser=2 if problem.dtype == torch.bfloat16 else 1)


@given(plans(max_ranks=4).filter(lambda plan: plan.degree == 1), st.booleans(), st.sampled_from([1, 2, 4]))
def test_that_holds_for_every_plan(plan, keep_keys, kv_heads):
    problem = Problem.of(plan, **{**SIZES, "kv_heads": kv_heads})
    compare(problem, run(problem, keep_keys=keep_keys))


def through_latents(problem):
    """`attend` of the harness: the problem's own keys and values, made of the latent that they are."""

    def of(world):
        def expand(latent):
            both = latent.unflatten(-1, (problem.kv_heads, -1)).transpose(1, 2)
            return both.split([problem.dim, problem.value_dim], dim=-1)

        def attend(query, key, value, sinks):
            latent = torch.cat([key, value], dim=-1).transpose(1, 2).flatten(2)
            dropped = {"dropout_p": problem.dropout_p, "dropout_seed": problem.dropout_seed}
            more = {"plan": problem.plan, "group": world, "return_lse": True, "scale": problem.scale}
            return attention(query, latent, expand=expand, sinks=sinks, **dropped, **more)

        return attend

    return of


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "features",
    [{"sinks": True, "through_lse": True}, {"dropout_p": 0.3}, {"scale": -0.4}, {"wanted": "q"}, {"wanted": ""}],
    ids=str,
)
def test_what_attention_does_with_keys_it_does_with_latents(strategy, features):
    from tests.attention.harness import check

    problem = replace(PROBLEMS["documents"], strategy=strategy, **features)
    check(problem, lambda problem, world: on_rank_with_keys(problem, world, through_latents(problem)(world)))


def test_a_score_mod_and_a_latent_learn_together():
    problem = PROBLEMS["documents"]

    def loss(world, latent):
        bias = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
        up = Up(problem)
        query = problem.shard(problem.whole.query, world.rank)
        x = shard(problem, latent_of(problem), world.rank)
        given = (x,) if latent else up(x)
        how = {"expand": up} if latent else {}
        cut = lambda score, b, h, q, k: score + bias[h] * (q - k)  # noqa: E731
        out = attention(query, *given, **how, plan=problem.plan, group=world, score_mod=cut)
        out.backward(problem.shard(problem.whole.grad, world.rank))
        return bias.grad, up.weight.grad

    plain, latents = (loopback(4).run(lambda world, which=which: loss(world, which)) for which in (False, True))
    torch.testing.assert_close(latents[0][0], plain[0][0])
    torch.testing.assert_close(sum(w for _, w in latents), sum(w for _, w in plain))


def test_queries_may_attend_over_the_latent_itself():
    """Multi-query attention over latents, as after absorbing the matrices: one key head, no weights."""
    mask = Causal()
    query, latent = torch.randn(1, 4, 12, 9, dtype=torch.float64), torch.randn(1, 12, 9, dtype=torch.float64)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=12, mask=mask)
        mine = cp.shard(latent, dim=1).requires_grad_()
        out = cp.attention(cp.shard(query, dim=2), mine, expand=lambda x: (x[:, None], x[:, None, :, :7]))
        out.sum().backward()
        return cp.unshard(out.detach(), dim=2), cp.unshard(mine.grad, dim=1)

    whole = latent.clone().requires_grad_()
    key, value = whole[:, None].expand(-1, 4, -1, -1), whole[:, None, :, :7].expand(-1, 4, -1, -1)
    true = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    true.sum().backward()
    for out, grad in loopback(3).run(rank):
        torch.testing.assert_close(out, true.detach())
        torch.testing.assert_close(grad, whole.grad)


def test_half_precision_is_as_near_as_on_one_device():
    """Against bfloat16 on one device, whose gradients are rounded once where ours are for each step and rank."""
    problem = Problem(DOCUMENTS, HeadTail(4), 29, "needed(3)", **SIZES, dtype=torch.bfloat16)
    alone = replace(problem, layout=HeadTail(1))
    true = expected(problem)
    for name, ours, one, x in zip(Found._fields, run(problem), run(alone), true, strict=True):
        off, usual = (float((each.double() - x).norm() / x.norm()) for each in (ours, one))
        assert off <= 2 * usual, name  # found: at most 1.6, in the weight's gradient, a sum of rounded ones


# ---- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["documents", "rows of their own", "three ranks, a key head each"])
def test_bytes_on_the_wire_are_those_of_latents_as_planned(name, strategy, keeps):
    problem = replace(PROBLEMS[name], strategy=strategy, dtype=torch.float32)

    def rank(world):
        counting = Counting(world)
        on_rank(problem, counting, keep_keys=keeps)
        log = [each for each in counting.log if each.what in ("keys", "gradients")]
        return [sum(sum(each.received.values()) for each in log if each.what == what) for what in ("keys", "gradients")]

    shape = Shape(4, problem.kv_heads, 6, 5, problem.rows, "float32", latent=RANK + ROPE)
    for number, (keys, gradients) in enumerate(loopback(problem.layout.ranks).run(rank)):
        planned = received_bytes(problem.plan, shape, number, kept=keeps)
        assert keys + gradients == planned.forward + planned.backward
        assert keys == planned.forward * (1 if keeps else 2)
        assert sum(problem.plan.bytes_received(number, shape).values()) == planned.forward


def test_deepseek_moves_a_seventy_first():
    expanded = Shape(heads=128, head_dim=192, v_head_dim=128)
    assert expanded.kv_bytes // DEEPSEEK.kv_bytes == 71
    plan = Plan(Causal(), HeadTail(64), 1 << 17, "gather")
    assert received_bytes(plan, expanded, 0).forward / received_bytes(plan, DEEPSEEK, 0).forward == pytest.approx(
        40960 / 576
    )


def test_a_session_counts_latents_and_auto_takes_no_ulysses():
    problem = replace(PROBLEMS["documents"], dtype=torch.float32)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=29, mask=DOCUMENTS, layout=HeadTail(4))
        found = on_rank(problem, world, lambda *inputs, expand: cp.attention(*inputs, expand=expand))
        (line,) = cp.report().lines
        assert line.shape == Shape(4, 2, 6, 5, 2, "float32", latent=RANK + ROPE)
        assert cp.plan.degree == 1
        assert "ulysses" not in cp.explain()
        assert cp.report().received == received_bytes(cp.plan, line.shape, world.rank, kept=True)
        return found

    compare(problem, together(problem, loopback(4).run(rank)))


# ---- autograd, checkpointing, compiled code, autocast ----------------------------------------------------------------


class Layer(nn.Module):
    """A layer of MLA on a session: projections, and attention of latents."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.cp = None
        self.down, self.query = nn.Linear(8, RANK + ROPE, dtype=dtype), nn.Linear(8, 24, dtype=dtype)
        self.up = nn.Linear(RANK, 2 * 9, bias=False, dtype=dtype)
        self.out = nn.Linear(20, 8, dtype=dtype)

    def expand(self, latent):
        low, rope = latent.split([RANK, ROPE], dim=-1)
        key, value = self.up(low).unflatten(-1, (2, 9)).transpose(1, 2).split([4, 5], dim=-1)
        return torch.cat([key, rope.unsqueeze(1).expand(-1, 2, -1, -1)], dim=-1), value

    def attend(self, query, latent):
        if self.cp is None:
            key, value = (x.repeat_interleave(2, dim=1) for x in self.expand(latent))
            mask = DOCUMENTS.dense(29, 29)
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.cp.attention(query, latent, expand=self.expand)

    def forward(self, x):
        query = self.query(x).unflatten(-1, (4, 6)).transpose(1, 2)
        return x + self.out(self.attend(query, self.down(x)).transpose(1, 2).flatten(2))


with torch.random.fork_rng():
    torch.manual_seed(5)
    TWO_LAYERS = nn.Sequential(Layer(), Layer())


def two_layers(cp=None):
    """A model of its own: virtual ranks are threads, and share torch's random numbers."""
    model = copy.deepcopy(TWO_LAYERS)
    for layer in model:
        layer.cp = cp
    return model


def inputs_of():
    return torch.randn(2, 29, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def one_device():
    """Gradients of the mean of squares."""
    model = two_layers()
    model(inputs_of()).pow(2).mean().backward()
    return [x.grad for x in model.parameters()]


def trained(world, wrap, averaged):
    cp = span.ContextParallel(world, seq_len=29, mask=DOCUMENTS)
    model = two_layers(cp)
    wrapped = wrap(model)  # DDP averages for as long as it is there
    per_token = wrapped(cp.shard(inputs_of(), dim=1)).pow(2).mean(-1)
    cp.mean_loss(per_token).backward()
    if not averaged:
        cp.average_gradients(model)
    return [getattr(x.grad, "full_tensor", lambda x=x: x.grad)() for x in model.parameters()]


def checkpointed(use_reentrant):
    def wrap(model):
        return lambda x: [x := checkpoint(layer, x.requires_grad_(), use_reentrant=use_reentrant) for layer in model][
            -1
        ]

    return wrap


def saved_as_copies(model):
    """As pinned memory holds them: what hooks save is no longer the tensor that was given."""

    def call(x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return model(x)

    return call


def compiled(model):
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize(
    "wrap",
    [lambda model: model, checkpointed(False), checkpointed(True), saved_as_copies],
    ids=["plain", "checkpointed", "reentrant", "saved as copies"],
)
def test_a_model_trains_as_on_one_device(wrap):
    true = one_device()
    for grads in loopback(3).run(lambda world: trained(world, wrap, averaged=False)):
        for x, y in zip(grads, true, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, at a break
def test_compiled_code_breaks_off_there_and_goes_on():
    true = one_device()
    (grads,) = loopback(1).run(lambda world: trained(world, compiled, averaged=False))
    for x, y in zip(grads, true, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def sharded_by_fsdp(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def on_processes(world):
    """Real ranks: under DDP and under FSDP2, checkpointed; and every strategy's shards."""
    averaged = [
        trained(world, lambda model: DistributedDataParallel(model), averaged=True),
        trained(world, lambda model: checkpointed(False)(sharded_by_fsdp(model)), averaged=True),
    ]
    problems = [replace(PROBLEMS["documents"], layout=HeadTail(world.ranks), strategy=each) for each in STRATEGIES]
    return averaged, [on_rank(problem, None) for problem in problems], [sharded_alone(world, x) for x in (True, False)]


def sharded_alone(world, reshard):
    """FSDP2 on the matrix itself, which would be gathered and reduced at each expansion."""
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        for layer in model:
            fully_shard(layer.up, reshard_after_forward=reshard)
        return model

    with pytest.raises(AttentionError) as refusal, torch.set_grad_enabled(reshard):
        trained(world, wrap, averaged=True)
    return str(refusal.value)


SHARDED_ALONE = "expand calls a module that FSDP2 shards by itself; shard the layer that calls attention instead"


@on_backends(2, nccl=())
def test_on_real_processes_ddp_and_fsdp2_average_to_one_device(ranks, backend):
    found = spawn(ranks, on_processes, backend=backend)
    true = one_device()
    for averaged, _, refusals in found:
        assert refusals == [SHARDED_ALONE] * 2
        for grads in averaged:
            for x, y in zip(grads, true, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    for index, strategy in enumerate(STRATEGIES):
        problem = replace(PROBLEMS["documents"], layout=HeadTail(ranks), strategy=strategy)
        compare(problem, together(problem, [shards[index] for _, shards, _ in found]))


def test_under_autocast_weights_in_float32_expand_in_half_precision():
    problem = replace(PROBLEMS["documents"], dtype=torch.float32)

    def rank(world):
        with torch.autocast("cpu", torch.bfloat16):
            return on_rank(problem, world)

    out, dq, dlatent, dweight = together(problem, loopback(4).run(rank))
    assert (out.dtype, dq.dtype, dlatent.dtype, dweight.dtype) == (torch.bfloat16, *[torch.float32] * 3)
    for x, y in zip((out, dq, dlatent, dweight), expected(problem), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=6e-2 * float(y.abs().max()))  # bfloat16


def test_weights_that_were_written_in_between_are_refused():
    problem = PROBLEMS["one rank"]

    def rank(world):
        up = Up(problem)
        query, latent = (problem.shard(problem.whole.query, 0), latent_of(problem).requires_grad_())
        out = attention(query, latent, expand=up, plan=problem.plan, group=world)
        with torch.no_grad():
            up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    loopback(1).run(rank)


def test_frozen_weights_get_no_gradient_and_the_latent_its_own():
    problem = PROBLEMS["documents"]

    def rank(world):
        up = Up(problem).requires_grad_(False)
        latent = shard(problem, latent_of(problem), world.rank).requires_grad_()
        query = problem.shard(problem.whole.query, world.rank)
        out = attention(query, latent, expand=up, plan=problem.plan, group=world)
        out.backward(problem.shard(problem.whole.grad, world.rank))
        assert up.weight.grad is None
        return latent.grad.unsqueeze(1)

    found = problem.unshard(loopback(4).run(rank), "key").squeeze(1)
    torch.testing.assert_close(found, expected(problem).dlatent)


# ---- refused ---------------------------------------------------------------------------------------------------------

PLAN = Plan(Causal(), Contiguous(3), 12, "gather")
TWO = PROBLEMS["documents"]


def call(expand=None, plan=PLAN, numbers=RANK + ROPE, tokens=4, dim=6, **options):
    def on(world):
        size = numbers(world.rank) if callable(numbers) else numbers
        query, latent = torch.ones(1, 4, 4, dim), torch.ones(1, tokens, size)
        attention(
            query, latent, expand=expand or Up(replace(TWO, dtype=torch.float32)), plan=plan, group=world, **options
        )

    return on


def plain(x, heads=2):
    """Keys and values that are the latent."""
    both = x.unsqueeze(1).expand(-1, heads, -1, -1)
    return both[..., :6], both[..., :5]


ALONE = (
    "expand must give a token the same key and value whatever tokens are beside it, and it does not: it mixes tokens, "
    "counts them, or draws random numbers; do that before, to the latent"
)
OUTSIDE = torch.ones(6, requires_grad=True) * 2
RETURNS = "expand must return (key, value), two plain tensors, got "
SHAPES = (
    "expand must return key and value of (batch, heads, tokens, head dim), of 1 tokens for a latent of shape (1, 1, "
    "9), got shapes "
)
WRONG = {
    "mixes": (lambda x: plain(x.cumsum(1)), ALONE),
    "looks ahead": (lambda x: plain(x + x.roll(-1, 1)), ALONE),
    "counts": (lambda x: plain(x + torch.arange(x.shape[1])[:, None]), ALONE),
    "drops": (lambda x: plain(torch.nn.functional.dropout(x, 0.5)), ALONE),
    "one tensor": (lambda x: x, f"{RETURNS}Tensor"),
    "three tensors": (lambda x: (*plain(x), x), f"{RETURNS}['Tensor', 'Tensor', 'Tensor']"),
    "no heads": (lambda x: (x, x), f"{SHAPES}(1, 1, 9) and (1, 1, 9)"),
    "other tokens": (lambda x: plain(x.repeat(1, 2, 1)), f"{SHAPES}(1, 2, 2, 6) and (1, 2, 2, 5)"),
    "other dtype": (
        lambda x: tuple(y.double() for y in plain(x)),
        "expand must return float32 on cpu like the latent, got float64 on cpu and float64 on cpu",
    ),
    "raises": (
        lambda x: plain(x.view(3)),
        "expand failed on a latent of shape (1, 1, 9): RuntimeError: shape '[3]' is invalid for input of size 9",
    ),
    "computed outside": (
        lambda x: plain(x[..., :6] * OUTSIDE),
        "expand uses a tensor that is computed outside of it and requires a gradient; compute it inside",
    ),
    "no function": (3, "expand must be a function of a latent, got int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_is_no_expansion_is_refused_by_name(name):
    expand, message = WRONG[name]
    assert refused(call(expand)) == (AttentionError, message)


@pytest.mark.parametrize("strategy", ["ulysses", "ulysses(3) x ring"])
def test_ulysses_is_refused(strategy):
    plan = Plan(Causal(), Contiguous(3), 12, strategy)
    assert refused(call(plan=plan)) == (
        AttentionError,
        f"strategy: {strategy if 'x' in strategy else 'ulysses'} exchanges heads, and a latent has none; use 'ring', "
        "'gather', 'needed' or 'auto', on a mesh of one axis, or expand it before",
    )


def test_latents_of_other_sizes_on_other_ranks_are_refused():
    def expand(x):
        return plain(x[..., :6])

    kind, message = refused(call(expand, numbers=lambda rank: 10 if rank == 1 else 9))
    assert kind is AttentionError
    assert message.endswith("rank 1 differs from ranks 0, 2 in latent (10, not 9)")


def test_what_does_not_fit_is_refused():
    assert refused(call(dim=8))[1] == (
        "query, key and value must fit one another, got shapes (1, 4, 4, 8), (1, 2, 4, 6) and (1, 2, 4, 5) as expanded"
    )
    assert refused(call(lambda x: plain(x, heads=3)))[1] == "query heads must be a multiple of key heads, got 4 and 3"
    assert refused(call(tokens=12))[1] == "latent must hold this rank's 4 of 12 tokens, got 12; shard it first"
    assert "cudnn runs on cuda, got tensors on cpu" in refused(call(kernel="cudnn"))[1]
    both = "give key and value, or a latent and what expands it: (query, latent, expand=function)"
    q, k, v = torch.ones(3, 1, 2, 4, 8).unbind()
    assert refused(lambda world: attention(q, k, plan=PLAN, group=world))[1] == both
    assert refused(lambda world: attention(q, k, v, expand=plain, plan=PLAN, group=world))[1] == both
    assert refused(lambda world: attention(q, k, expand=plain, plan=PLAN, group=world))[1] == (
        "latent must be (batch, tokens, numbers), floating point, got float32 of shape (1, 2, 4, 8)"
    )


def test_one_rank_whose_function_is_wrong_is_named_by_all():
    def on(world):
        expand = WRONG["mixes"][0] if world.rank == 2 else plain
        call(expand)(world)

    assert refused(on)[1] == f"on rank 2: {ALONE}"


def test_an_attention_made_once_is_tried_once():
    """Trials wait for a device; later calls of the same function have none."""
    tokens = []

    def expand(latent):
        tokens.append(latent.shape[:2].numel())
        return plain(latent)

    def rank(world):
        attend = Attention(Plan(Causal(), Contiguous(1), 12, "gather"), world)
        for _ in range(2):
            attend(torch.ones(1, 4, 12, 6), torch.ones(1, 12, 9), expand=expand)

    loopback(1).run(rank)
    assert tokens == [1, 8, 1, 1, 12, 1, 12]


# ---- planted defects -------------------------------------------------------------------------------------------------


def counted_on_every_rank(real):
    return lambda self, *given: ((found := real(self, *given))[0], [4 * x for x in found[1]])


def of_one_step_dropped(real):
    """Of the keys that arrive in the last step."""

    def backward(self, expanded, *grads):
        latent, weights = real(self, expanded, *grads)
        return latent * (expanded.latent.shape[2] != 7), weights

    return backward


def of_the_wrong_run(real):
    return lambda self, latent: real(self, latent.roll(1, 2))


DEFECTS = {
    "a weight's gradient is counted on every rank": ("backward", counted_on_every_rank, "dweight"),
    "the gradient of one step's latents is dropped": ("backward", of_one_step_dropped, "dlatent"),
    "the latents of another run are expanded": ("forward", of_the_wrong_run, "out"),
    "the latents of another run are expanded again": ("recorded", of_the_wrong_run, "dq"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(name, monkeypatch):
    method, bend, where = DEFECTS[name]
    problem = Problem(Causal(), Contiguous(4), 28, "ring", **SIZES)
    compare(problem, run(problem))
    monkeypatch.setattr(Expander, method, bend(getattr(Expander, method)))
    with pytest.raises(AssertionError, match=f"^{where} is off by"):
        compare(problem, run(problem))

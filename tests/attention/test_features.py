"""What torch does with a function, it does with this one: autograd, compile, checkpointing, autocast, inference.

Numbers are judged by the harness against the oracle; here the ways to get at them are the subject. Compiling tests run
on one virtual rank, because dynamo does not mind threads; two real processes show that ranks do not matter to it.
"""

import gc
import itertools
import weakref
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnspan.attention import Attention, attention
from attnspan.errors import AttentionError
from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal, Documents, Full, KeyPadding, SlidingWindow
from attnspan.plan import Plan
from attnspan.testing import loopback
from attnspan.transports import Counting, Delayed
from attnspan.transports.operations import ledger_of
from tests.attention.harness import Problem, check, on_rank, run
from tests.processes import on_backends, spawn
from tests.turns import in_turn

STRATEGIES = ["ring", "gather", "needed(2)", "ulysses", "ulysses(2) x ring"]
DOCUMENTS = Causal() & Documents([5, 9, 7])


def problem(strategy="needed", ranks=4, mask=DOCUMENTS, **features):
    return Problem(mask, HeadTail(ranks), 21, strategy, **{"heads": 4, "kv_heads": 2, **features})


def on_one_rank(fn, *args):
    """What fn(world, *args) returns on the only rank of a virtual group."""
    return loopback(ranks=1).run(lambda world: fn(world, *args))[0]


def same(one, other):
    """Whether two results have the same bits."""
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True) if x is not None)


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_the_graph_has_one_node():
    def rank(world):
        query, key, value = torch.randn(3, 1, 2, 21, 8).requires_grad_().unbind()
        out, lse = attention(query, key, value, plan=problem(ranks=1).plan, group=world, return_lse=True)
        assert out.grad_fn is lse.grad_fn
        before = [node for node, _ in out.grad_fn.next_functions]
        assert before == [query.grad_fn, key.grad_fn, value.grad_fn, None]  # the last is the handle

    on_one_rank(rank)


@pytest.mark.parametrize("wanted", ["".join(some) for n in range(5) for some in combinations("qkvs", n)])
def test_any_subset_of_the_inputs_may_require_gradients(wanted):
    check(problem(ranks=3, sinks=True, wanted=wanted))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lse_is_differentiable_and_sinks_get_one_gradient_on_all_ranks(strategy):
    rows_without_keys = Causal() & KeyPadding([21, 0])
    check(problem(strategy, mask=rows_without_keys, sinks=True, through_lse=True))
    check(problem(strategy, mask=rows_without_keys, through_lse=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("users", [{0}, {1, 2}, {3}, set()], ids=str)
def test_lse_may_be_in_the_loss_of_some_ranks_alone(strategy, users):
    """Under Ulysses the others waited for a gradient that those ranks alone sent, or sent none."""
    layout, torch_type = HeadTail(4), torch.float64
    whole = torch.sin(torch.arange(3 * 4 * 21 * 8, dtype=torch_type)).view(3, 1, 4, 21, 8)
    used = torch.zeros(21, dtype=torch_type)
    for user in users:
        used[[p for run in layout.runs(21, user) for p in range(*run)]] = 1
    leaves = whole.clone().requires_grad_()
    scores = (leaves[0] @ leaves[1].mT * 8**-0.5).masked_fill(~DOCUMENTS.dense(21), -torch.inf)
    ((scores.softmax(-1) @ leaves[2]).square().sum() + (scores.logsumexp(-1).sin() * used).sum()).backward()

    def rank(world):
        own = torch.tensor([p for run in layout.runs(21, world.rank) for p in range(*run)])
        parts = [x[:, :, own].requires_grad_() for x in whole]
        plan = Plan(DOCUMENTS, layout, 21, strategy)
        out, lse = attention(*parts, plan=plan, group=world, return_lse=True)
        loss = out.square().sum() + (lse.sin().sum() if world.rank in users else 0)
        loss.backward()
        for part, true in zip(parts, leaves.grad, strict=True):
            assert (part.grad - true[:, :, own]).abs().max() < 1e-12  # float64, sums in another order

    loopback(4).run(rank)


def test_lse_asked_for_by_one_rank_alone_is_refused_under_ulysses_and_served_elsewhere():
    def rank(world, strategy):
        query = torch.ones(1, 4, 8 // world.ranks, 8, requires_grad=True)
        plan = Plan(Causal(), HeadTail(2), 8, strategy)
        out = attention(query, query, query, plan=plan, group=world, return_lse=world.rank == 1)
        (out[0] if world.rank == 1 else out).sum().backward()

    loopback(2).run(partial(rank, strategy="ring"))
    with pytest.raises(AttentionError, match=r"rank 1 differs from rank 0 in return_lse \(True, not False\)"):
        loopback(2).run(partial(rank, strategy="ulysses"))


def test_a_sink_of_minus_infinity_is_no_sink():
    plain = problem(ranks=2, mask=Causal() & KeyPadding([21, 0]))

    def none(query, key, value, _, world):
        sinks = torch.full((4,), -torch.inf, dtype=query.dtype, requires_grad=True)
        out, lse = attention(query, key, value, plan=plain.plan, group=world, sinks=sinks, return_lse=True)
        (slope,) = torch.autograd.grad(out.sum(), sinks, retain_graph=True)
        assert torch.equal(slope, torch.zeros_like(slope))
        return out, lse

    check(plain, lambda p, world: on_rank(p, world, partial(none, world=world)))


def test_sinks_may_be_wider_than_half_precision_queries():
    def rank(world):
        query, key, value = torch.randn(3, 1, 2, 21, 8).bfloat16().requires_grad_().unbind()
        sinks = torch.zeros(2, requires_grad=True)
        out = attention(query, key, value, plan=problem(ranks=1).plan, group=world, sinks=sinks)
        out.sum().backward()
        return out.dtype, sinks.grad.dtype

    assert on_one_rank(rank) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_graph_can_be_walked_twice_and_gradients_accumulate(strategy):
    whole = problem(strategy, sinks=True)

    def rank(world):
        leaves = [
            whole.shard(x, world.rank, side) for x, side in zip(whole.whole, ["query", "key", "key"], strict=False)
        ]
        leaves += [whole.whole.sinks.clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        out = attention(*leaves[:3], plan=whole.plan, group=world, sinks=leaves[3])
        out.square().sum().backward(retain_graph=True)
        once = [leaf.grad.clone() for leaf in leaves]
        out.square().sum().backward()
        assert all(torch.equal(leaf.grad, 2 * grad) for leaf, grad in zip(leaves, once, strict=True))
        assert all(grad.abs().sum() > 0 for grad in once)

    loopback(ranks=4).run(rank)


def test_second_derivatives_are_refused_when_they_are_asked_for():
    def rank(world):
        query, key, value = torch.randn(3, 1, 2, 21, 8).requires_grad_().unbind()
        out = attention(query, key, value, plan=problem(ranks=1).plan, group=world)
        (slope,) = torch.autograd.grad(out.sum(), query, create_graph=True)
        with pytest.raises(AttentionError, match=r"^attention has no second derivatives; take gradients without"):
            slope.sum().backward()

    on_one_rank(rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_run_gives_the_same_bits_however_threads_interleave(strategy, dtype):
    whole = problem(strategy, dtype=dtype, sinks=True, through_lse=True)
    first = run(whole)
    for delays in ([0, 0, 0, 0], [0.003, 0, 0.001, 0], [0, 0.002, 0, 0.004]):
        again = run(whole, lambda p, world, by=delays: on_rank(p, Delayed(world, by[world.rank])))
        assert same(first, again)


# ---- inference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_gives_the_same_and_keeps_no_graph(mode):
    whole = problem(wanted="")
    with mode():  # virtual ranks inherit it
        quiet = run(whole)
    assert same(quiet[:2], run(problem())[:2])


def test_what_was_first_called_in_inference_mode_can_be_trained():
    def rank(world):
        x = torch.randn(1, 2, 21, 8)
        with torch.inference_mode():
            attention(x, x, x, plan=problem(ranks=1).plan, group=world)
        x.requires_grad_()
        attention(x, x, x, plan=problem(ranks=1).plan, group=world).sum().backward()
        return x.grad

    assert on_one_rank(rank) is not None


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast_computes_in_its_dtype_and_nothing_else_inside_is_cast(strategy, kernel):
    """Float32 inputs under autocast are what bfloat16 inputs are without it, to the bit."""
    wide, half = (problem(strategy, dtype=dtype, kernel=kernel) for dtype in (torch.float32, torch.bfloat16))
    for name in ("query", "key", "value", "grad"):
        getattr(wide.whole, name).copy_(getattr(half.whole, name))
    with torch.autocast("cpu", torch.bfloat16):  # virtual ranks inherit it; backward runs inside, too
        cast = run(wide)
    plain = run(half)
    assert cast.out.dtype == torch.bfloat16
    assert cast.dq.dtype == torch.float32
    assert same([x.to(y.dtype) for x, y in zip(cast[:5], plain[:5], strict=True)], plain[:5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_what_it_casts_for_sdpa(dtype):
    def rank(world):
        query, key, value = torch.randn(3, 1, 2, 21, 8).to(dtype).unbind()
        with torch.autocast("cpu", torch.bfloat16):
            ours = attention(query, key, value, plan=problem(ranks=1).plan, group=world)
            assert ours.dtype == scaled_dot_product_attention(query, key, value).dtype

    on_one_rank(rank)


# ---- compile ---------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Linear, attention, linear: (B, S, width) in and out."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.enter, self.leave = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x, attend, **options):
        entered = self.enter(x)
        # A view: under a default device, dynamo does not follow `unflatten`.
        query, key, value = entered.view(*entered.shape[:-1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.leave(attend(query, key, value, **options).transpose(1, 2).flatten(2))


def results(block, x, attend, **options):
    """The output and all gradients."""
    out = block(x, attend, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def agree(found, true):
    # Compiled matmuls may sum in another order than eager ones.
    for x, y in zip(found, true, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def ready(world, *lengths, **options):
    """An Attention over documents."""
    mask = Causal() & Documents(list(lengths))
    return Attention(Plan(mask, Contiguous(world.ranks), sum(lengths), "needed"), world, **options)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """compiled(module, backend) -> (the same compiled whole, the count of its compilations)."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what inductor kept may be of another version of ours
    torch._dynamo.reset()

    def compile_whole(module, backend="aot_eager", **options):
        counter = CompileCounterWithBackend(backend)
        return torch.compile(module, fullgraph=True, backend=counter, **options), counter

    yield compile_whole
    torch._dynamo.reset()


inductor = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,  # it compiles what is around attention, 20 s of C++; all that is ours shows before it
        pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    ],
)


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_a_block_compiles_whole_and_other_documents_do_not_compile_anew(compiled, backend):
    def rank(world):
        block, x = Block(), torch.randn(2, 12, 16, requires_grad=True)
        fast, counter = compiled(block, backend)
        found = []
        for lengths in ([5, 7], [3, 3, 6], [12]):
            attend = ready(world, *lengths)
            found.append(results(block, x, attend))
            agree(_compiled_results(fast, block, x, attend), found[-1])
        assert counter.frame_count == 1
        assert not torch.equal(found[0][0], found[1][0])  # the plans do differ

    on_one_rank(rank)


def _compiled_results(fast, block, x, attend, **options):
    out = fast(x, attend, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def test_other_shapes_compile_once_more_and_then_serve_all(compiled):
    def rank(world):
        block = Block()
        fast, counter = compiled(block)
        for batch, lengths in [(2, [5, 7]), (3, [9, 2, 5]), (4, [8, 11]), (5, [6, 2])]:
            attend, x = ready(world, *lengths), torch.randn(batch, sum(lengths), 16, requires_grad=True)
            agree(_compiled_results(fast, block, x, attend), results(block, x, attend))
        assert counter.frame_count == 2  # for the first shape, and for any

    on_one_rank(rank)


def test_sinks_lse_and_autocast_compile(compiled):
    class Whole(torch.nn.Module):
        def forward(self, query, key, value, sinks, attend):
            with torch.autocast("cpu", torch.bfloat16):
                out, lse = attend(query, key, value, sinks=sinks, return_lse=True)
            return out.float().square().sum() + lse.sin().sum()

    def rank(world):
        leaves = [*torch.randn(3, 1, 2, 12, 8).unbind(), torch.randn(2)]
        for leaf in leaves:
            leaf.requires_grad_()
        attend = ready(world, 5, 7)
        fast, _ = compiled(Whole())
        agree(torch.autograd.grad(fast(*leaves, attend), leaves), torch.autograd.grad(Whole()(*leaves, attend), leaves))

    on_one_rank(rank)


def test_planning_inside_a_whole_graph_is_refused_and_otherwise_done_outside_of_it(compiled):
    def rank(world):
        def plans(query, key, value):
            return attention(query, key, value, mask=Causal(), layout=Contiguous(1), seq_len=12, group=world)

        x = torch.randn(3, 1, 2, 12, 8).unbind()
        fast, _ = compiled(plans)
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            fast(*x)
        assert "under torch.compile, make an Attention(plan, group) outside and call it inside" in str(caught.value)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(plans, backend="eager")(*x), plans(*x))

    on_one_rank(rank)


def _compile_on_two(world, backend, store):
    """Eager and compiled blocks on real processes: the count of compilations and the largest difference.

    And then a plain call, on this default group and on another.
    """
    rank = world.rank
    block = Block()
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight))
    counter = CompileCounterWithBackend("aot_eager" if backend == "gloo" else "inductor")
    fast, off = torch.compile(block, fullgraph=True, backend=counter), 0.0
    x = torch.linspace(-1, 1, 2 * 6 * 16).view(2, 6, 16).add(rank).requires_grad_()
    for lengths in ([5, 7], [3, 3, 6], [12]):
        mask = Causal() & Documents(lengths)
        attend = Attention(Plan(mask, Contiguous(2), 12, "ring"))  # the default group
        pairs = zip(_compiled_results(fast, block, x, attend), results(block, x, attend), strict=True)
        off = max(off, *(float((one - other).abs().max() / other.abs().max()) for one, other in pairs))
    query, key, value = torch.randn(3, 1, 2, 6, 8).unbind()
    before = attention(query, key, value, plan=attend.plan)
    dist.destroy_process_group()
    device = {} if backend == "gloo" else {"device_id": world.device}
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, **device)
    return counter.frame_count, off, torch.equal(attention(query, key, value, plan=attend.plan), before)


@on_backends(2)
def test_a_block_compiles_on_real_processes_and_the_default_group_may_change(tmp_path, ranks, backend):
    how = {"backend": backend, "fresh": True, "timeout": 120}
    for compilations, off, same_again in spawn(ranks, _compile_on_two, backend, tmp_path / "store", **how):
        assert compilations == 1
        assert off < 1e-5
        assert same_again


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, in 2.15
def test_opcheck_passes():
    """Schema, fake tensors, autograd registration and dispatch under dynamic shapes, as torch checks them."""

    def rank(world):
        attend = ready(world, 5, 7, kernel="auto")
        # torch compares the results of two calls, of which the number is meant to differ: it stands still here.
        ledger_of(world).numbers = itertools.repeat(1)
        for memory in ("BHSD", "BSHD"):
            for dtype in (torch.float32, torch.bfloat16):
                query, key, value = torch.randn(3, 2, 2, 12, 8).to(dtype).unbind()
                if memory == "BSHD":
                    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
                sinks = torch.randn(2)
                dropped = (0.3, torch.tensor(7))
                for some, drops in ((None, (0.0, None)), (sinks, (0.0, None)), (None, dropped)):
                    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
                    sink = None if some is None else some.clone().requires_grad_()
                    given = (*leaves, sink, [], attend.handle, True, True, *drops, None)
                    torch.library.opcheck(torch.ops.attnspan.attention.default, given)
                out, lse = attend(query, key, value, sinks=sinks, return_lse=True)
                header = torch.tensor([1, 7])
                final = (torch.ones_like(out), torch.ones_like(lse), query, key, value, out, lse, header)
                for dropout_p in (0.0, 0.3):
                    given = (*final, sinks, [], [], attend.handle, True, dropout_p, None)
                    torch.library.opcheck(torch.ops.attnspan.attention_backward.default, given)

    on_one_rank(rank)


# ---- checkpointing ---------------------------------------------------------------------------------------------------


def _steps_of(transport):
    """What was posted, in order."""
    return [(event.kind, event.what) for event in transport.log if event.kind not in ("wait", "mark")]


def _checkpointed(world, strategy, how):
    """The gradients of a block, and what travelled in forward and in backward."""
    torch.manual_seed(0)
    transport = Counting(world)
    generator = torch.Generator().manual_seed(world.rank)
    plan = Plan(DOCUMENTS, Contiguous(world.ranks), 21, strategy)
    block, attend = Block(width=32, heads=4), Attention(plan, transport, keep_keys=False)
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight))
    tokens = len(plan.layout.positions(21)[world.rank])
    x = torch.randn(2, tokens, 32, generator=generator, requires_grad=True)
    out = block(x, attend) if how is None else checkpoint(block, x, attend, preserve_rng_state=False, **how)
    there = len(_steps_of(transport))
    out.square().sum().backward()
    everything = _steps_of(transport)
    return [x.grad, *(weight.grad for weight in block.parameters())], everything[:there], everything[there:]


SAVING = partial(create_selective_checkpoint_contexts, [torch.ops.attnspan.attention.default])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("how", "replayed"),
    [
        ({"use_reentrant": True}, True),
        ({"use_reentrant": False}, True),
        ({"use_reentrant": False, "context_fn": SAVING}, False),
    ],
    ids=["reentrant", "not reentrant", "saving attention"],
)
def test_checkpointing_gives_the_same_gradients_and_replays_collectives_once_or_never(strategy, how, replayed):
    plain = loopback(ranks=4).run(lambda world: _checkpointed(world, strategy, None))
    saved = loopback(ranks=4).run(lambda world: _checkpointed(world, strategy, how))
    for (grads, there, back), (grads_again, there_again, back_again) in zip(plain, saved, strict=True):
        assert same(grads, grads_again)
        assert there_again == there
        again = [event for event in there if event[0] != "agree"]
        assert back_again == (again if replayed else []) + back
    assert any(len(there) > 1 for _, there, _ in plain)  # keys do travel


def test_a_saved_attention_goes_back_by_the_seed_that_it_was_saved_with():
    """Its arguments are computed again, and among them a seed is drawn, from a generator that has gone on."""
    how = {"use_reentrant": False, "context_fn": SAVING, "preserve_rng_state": False}

    def rank(world):
        attend = ready(world, 5, 7, kernel="auto")
        x = torch.randn(1, 2, 12, 8, dtype=torch.float64, requires_grad=True)

        def dropped(x):
            return attend(x, x, x, dropout_p=0.3)

        def gradient(run):
            torch.manual_seed(3)
            return torch.autograd.grad(run(x).square().sum(), x)[0]

        return gradient(dropped), gradient(lambda x: checkpoint(dropped, x, **how))

    assert torch.equal(*on_one_rank(rank))


# ---- handles ---------------------------------------------------------------------------------------------------------


def test_an_attention_outlives_any_number_of_later_ones():
    def rank(world):
        query, key, value = torch.randn(3, 1, 2, 12, 8).unbind()
        first = ready(world, 12)
        before = first(query, key, value)
        for _ in range(5000):
            Attention(first.plan, world)
        assert torch.equal(first(query, key, value), before)

    on_one_rank(rank)


def test_a_graph_keeps_its_call_alive_and_lets_it_go():
    def rank(world):
        query, key, value = torch.randn(3, 1, 2, 12, 8).requires_grad_().unbind()
        attend = ready(world, 12)
        alive = weakref.ref(attend.bound)
        out = attend(query, key, value)
        del attend
        gc.collect()
        assert alive() is not None
        out.sum().backward()
        del out
        gc.collect()
        assert alive() is None

    on_one_rank(rank)


def test_a_handle_lives_on_the_cpu_whatever_the_default_device_is():
    def rank(world):
        with torch.device("meta"):
            return ready(world, 12).handle.device.type

    assert on_one_rank(rank) == "cpu"


# ---- what is not a number --------------------------------------------------------------------------------------------


def _not_finite(kernel, strategy, mask, where, number):
    """Which of 96 rows: see position 40; are not finite here; are not finite in SDPA with a dense mask."""
    whole = Problem(mask, HeadTail(3), 96, strategy, kernel=kernel, heads=1, batch=1, dtype=torch.float32)
    getattr(whole.whole, where)[0, 0, 40] = number
    found = run(whole)
    dense = scaled_dot_product_attention(*whole.whole[:3], attn_mask=whole.dense)
    sees = whole.dense[0, 0, :, 40] if where != "query" else torch.arange(96) == 40
    return sees, *(~x[0, 0].isfinite().all(-1) for x in (found.out, dense))


MASKS = [Causal(), Causal() & Documents([30, 40, 26]), SlidingWindow(20, 0), Full()]


@pytest.mark.parametrize(("where", "number"), in_turn(["query", "key", "value"], [torch.nan, torch.inf]))
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
def test_what_is_not_finite_reaches_all_rows_that_see_it_and_no_more_than_on_one_device(strategy, mask, where, number):
    """Kernels weigh values of pairs that a mask hides with 0, and 0 x NaN is NaN; they do so in a tile, SDPA in all."""
    sees, ours, dense = _not_finite("auto", strategy, mask, where, number)
    assert (ours >= sees).all()
    assert (ours <= dense).all()
    if isinstance(mask, type(MASKS[1])):  # other documents are in other tiles
        assert not ours[:30].any()
        assert not ours[70:].any()


@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_reference_kernel_keeps_nan_to_the_rows_that_see_it(mask, where):
    sees, ours, _ = _not_finite("reference", "gather", mask, where, torch.nan)
    assert torch.equal(ours, sees)

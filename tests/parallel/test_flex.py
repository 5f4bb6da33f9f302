"""flex_attention of a session: torch's signature on shards, and the same result and gradients as one device's."""

import copy
import functools
import inspect
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as by_name
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan.attention.score import Score
from attnspan.errors import AttentionError, AttnspanError, MaskError
from attnspan.kernels import blocks
from attnspan.parallel import attentions, flex_dispatch
from attnspan.testing import loopback
from tests.devices import here, mesh_of
from tests.processes import on_backends, spawn
from tests.turns import in_turn

LENGTH, BATCH, HEADS = 37, 2, 4
IDS = torch.tensor([[0] * 9 + [1] * 17 + [2] * 11, [0] * 20 + [1] * 3 + [2] * 14])
WINDOWS = torch.tensor([2, 5, 11, 40])


def document(b, h, q_idx, kv_idx):
    return (IDS[b, q_idx] == IDS[b, kv_idx]) & (q_idx >= kv_idx)


def dilated(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)


def per_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOWS[h])


def past(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def distance(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (h + 1) * (q_idx - kv_idx)


def biased(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, (q_idx - kv_idx).clamp(-6, 6) + 6]


def block_mask(fn=past, rows=None, heads=None, length=LENGTH, kv_len=None, size=16):
    device = torch.get_default_device()
    return create_block_mask(fn, rows, heads, length, kv_len or length, device=device, BLOCK_SIZE=size)


def session(world, mask=None, **options):
    return span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal() if mask is None else mask, **options)


def whole(batch=BATCH, heads=HEADS, kv_heads=2):
    random = torch.Generator().manual_seed(3)
    drawn = [
        torch.randn(batch, n, LENGTH, 8, generator=random, dtype=torch.float64, device="cpu")
        for n in (heads, kv_heads, kv_heads)
    ]
    return [here(x) for x in drawn]


def table():
    random = torch.Generator().manual_seed(5)
    return here(torch.randn(HEADS, 13, generator=random, dtype=torch.float64, device="cpu")).requires_grad_()


INDICES = (
    torch.arange(BATCH).view(-1, 1, 1, 1),
    torch.arange(HEADS).view(-1, 1, 1),
    torch.arange(LENGTH).view(-1, 1),
    torch.arange(LENGTH),
)
"""b, h, q_idx and kv_idx, so that the very same functions, called once, give all pairs."""


def dense(query, key, value, fn=None, score_mod=None, scale=None):
    """(out, lse) on one device, in float64, with nothing of ours."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *INDICES)
    if fn is not None:
        scores = scores.masked_fill(~fn(*INDICES), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def close(found, true):
    """float64: what is left is the order of sums."""
    torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-10)


def compare(attend, true, ranks=3, mask=None, learned=None, inputs=whole, **options):
    """Output, lse and gradients of attend(cp, q, k, v, *learned) -> (out, lse) are those of true(q, k, v, *learned).

    The loss is a mean, and gradients of what is learned are averaged over ranks, as DDP does it.
    """
    leaves = [x.requires_grad_() for x in inputs()]
    bias = [] if learned is None else [learned()]
    out, lse = true(*leaves, *bias)
    ((out**2).mean() + (lse**2).mean()).backward()

    def rank(world):
        cp = session(world, mask, **options)
        shards = [cp.shard(x, dim=2).detach().requires_grad_() for x in inputs()]
        own = [] if learned is None else [learned()]
        found, found_lse = attend(cp, *shards, *own)
        (cp.mean_loss(found**2) + cp.mean_loss(found_lse**2)).backward()
        close(cp.unshard(found.detach(), dim=2), out.detach())
        close(cp.unshard(found_lse.detach(), dim=2), lse.detach())
        for shard, leaf in zip(shards, leaves, strict=True):  # a mean's gradient is that of ranks times one device's
            close(cp.unshard(shard.grad, dim=2) / cp.ranks, leaf.grad)
        for mine, theirs in zip(own, bias, strict=True):
            parameter = nn.Parameter(mine.detach())
            parameter.grad = mine.grad
            cp.average_gradients([parameter])
            close(parameter.grad, theirs.grad)
        return cp.report().calls

    assert loopback(ranks).run(rank) == [1] * ranks


# ---- it is what one device computes ----------------------------------------------------------------------------------

MASKS = {
    "a BlockMask": (lambda: block_mask(past), past),
    "rows": (lambda: block_mask(document, BATCH), document),
    "heads": (lambda: block_mask(per_head, None, HEADS), per_head),
    "unequal blocks": (lambda: block_mask(dilated, size=(8, 24)), dilated),
    "a mask": (span.Causal, past),
    "a function": (lambda: span.MaskMod(dilated, block=8), dilated),
    "a name": (lambda: "", past),
    "everything": (lambda: span.Full(), None),
}


@pytest.mark.parametrize(("name", "score_mod"), in_turn(MASKS, [None, distance]))
def test_any_mask_and_score_mod_is_exact_with_global_positions(name, score_mod):
    made, fn = MASKS[name]

    def attend(cp, q, k, v):
        return cp.flex_attention(q, k, v, score_mod, made(), enable_gqa=True, return_lse=True)

    compare(attend, lambda q, k, v: dense(q, k, v, fn, score_mod))


@pytest.mark.parametrize("strategy", ["ring", "gather", "needed", "ulysses"])
def test_any_strategy_is_exact(strategy):
    def attend(cp, q, k, v):
        return cp.flex_attention(q, k, v, distance, block_mask(document, BATCH), None, True, True)

    compare(attend, lambda q, k, v: dense(q, k, v, document, distance), ranks=2, strategy=strategy)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_learned_bias_gets_the_gradient_of_one_device_by_averaging(ranks):
    def attend(cp, q, k, v, bias):
        return cp.flex_attention(q, k, v, biased(bias), block_mask(document, BATCH), enable_gqa=True, return_lse=True)

    compare(attend, lambda q, k, v, bias: dense(q, k, v, document, biased(bias)), ranks, learned=table)


def test_without_a_mask_a_session_of_full_attends_to_everything():
    def attend(cp, q, k, v):
        return cp.flex_attention(q, k, v, enable_gqa=True, return_lse=True)

    compare(attend, lambda q, k, v: dense(q, k, v), mask=span.Full())
    compare(attend, lambda q, k, v: dense(q, k, v), mask={"window": span.SlidingWindow(3), "full": span.Full()})


@pytest.mark.parametrize("scale", [0.3, 8**-0.5])
def test_a_scale_is_honoured(scale):
    def attend(cp, q, k, v):
        return cp.flex_attention(q, k, v, None, block_mask(), scale, True, True)

    compare(attend, lambda q, k, v: dense(q, k, v, past, None, scale))
    compare(attend, lambda q, k, v: dense(q, k, v, past, None, scale), mask=span.Causal(), scale=0.7)


def test_one_batch_row_may_be_read_by_a_mask_of_one_row():
    def attend(cp, q, k, v):
        return cp.flex_attention(q, k, v, None, block_mask(document, 1), enable_gqa=True, return_lse=True)

    def true(q, k, v):
        return dense(q, k, v, lambda b, h, i, j: document(torch.zeros_like(b), h, i, j)[:1])

    compare(attend, true, inputs=lambda: whole(batch=1))


def test_aux_is_torchs():
    def rank(world):
        cp = session(world)
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        out, lse = cp.flex_attention(q, k, v, block_mask=block_mask(), return_lse=True)
        again, aux = cp.flex_attention(q, k, v, block_mask=block_mask(), return_aux=AuxRequest(lse=True))
        assert torch.equal(out, again)
        assert torch.equal(aux.lse, lse)
        assert aux.max_scores is None
        _, without = cp.flex_attention(q, k, v, block_mask=block_mask(), return_aux=AuxRequest())
        assert without == (None, None)
        assert torch.equal(cp.flex_attention(q, k, v, block_mask=block_mask()), out)

    loopback(2).run(rank)


def test_the_signature_is_torchs():
    ours = inspect.signature(span.ContextParallel.flex_attention).parameters
    theirs = inspect.signature(by_name).parameters
    told = [[(p.name, p.kind, p.default) for p in each.values()] for each in (ours, theirs)]
    assert told[0][1:] == told[1]


def _on_process(world):
    import torch.distributed as dist

    global IDS, WINDOWS
    IDS, WINDOWS = here(IDS), here(WINDOWS)  # what the functions above look into
    cp = session(dist.group.WORLD)
    q, k, v = (cp.shard(x, dim=2).requires_grad_() for x in whole())
    bias = table()
    out = cp.flex_attention(q, k, v, biased(bias), block_mask(document, BATCH), enable_gqa=True)
    with cp.flex():
        again = module.flex_attention(q, k, v, biased(bias), block_mask(document, BATCH), enable_gqa=True)
    assert torch.equal(out, again)
    cp.mean_loss(out**2).backward()
    _check_dtensors(mesh_of(1, world.ranks, names=("tp", "cp")))
    return cp.unshard(out.detach(), dim=2), bias.grad


def _check_dtensors(mesh):
    """As plain tensors; but functions of heads need all of them."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    cp = span.ContextParallel(mesh["cp"], seq_len=36, mask=span.Causal(), layout=span.HeadTail(mesh["cp"].size()))
    local = [cp.shard(x[:, :, :36], dim=2) for x in whole(kv_heads=HEADS)]
    mask = block_mask(per_head, None, HEADS, length=36)
    there = [DTensor.from_local(x, mesh, [Replicate(), Shard(2)]) for x in local]
    assert torch.equal(cp.flex_attention(*there, distance, mask).to_local(), cp.flex_attention(*local, distance, mask))
    split = [DTensor.from_local(x, mesh, [Shard(1), Shard(2)]) for x in local]
    with pytest.raises(AttentionError, match="query must have all batch rows and heads here for a score_mod"):
        cp.flex_attention(*split, block_mask=mask)
    cp.flex_attention(*split, block_mask=block_mask(length=36))


@on_backends(2, nccl=(2, 3))
def test_it_is_exact_on_real_processes(ranks, backend):
    bias = table()
    out, _ = dense(*whole(), document, biased(bias))
    (out**2).mean().backward()
    told = spawn(ranks, _on_process, backend=backend)
    for found, _ in told:
        close(found, out.detach())
    close(sum(grad for _, grad in told) / ranks, bias.grad)


# ---- blocks ----------------------------------------------------------------------------------------------------------

CALLS = {
    "by name": lambda: by_name,
    "by module": lambda: module.flex_attention,
    "a partial": lambda: functools.partial(by_name),
    "compiled": lambda: torch.compile(by_name, backend="eager"),
}


@pytest.mark.parametrize("call", CALLS)
def test_flex_attention_inside_is_the_sessions_however_it_is_called(call):
    attention = CALLS[call]()

    def attend(cp, q, k, v, bias):
        with cp.flex():
            return attention(q, k, v, biased(bias), block_mask(document, BATCH), enable_gqa=True, return_lse=True)

    ranks = 1 if call == "compiled" else 3  # dynamo does not mind threads, but two of them
    compare(attend, lambda q, k, v, bias: dense(q, k, v, document, biased(bias)), ranks, learned=table)


def test_one_block_serves_both():
    def rank(world):
        cp = session(world)
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        with cp.flex():
            one = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            two = by_name(q, k, v, block_mask=block_mask())
        close(one, two)
        cp.assert_used(layers=2)
        cp.assert_used({"": 1, "block_mask": 1})

    loopback(2).run(rank)


def test_a_block_of_several_masks_takes_flex_attention_and_refuses_sdpa_without_a_name():
    def rank(world):
        cp = session(world, {"full": span.Causal(), "window": span.SlidingWindow(3)})
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        with cp.flex():
            out = by_name(q, k, v, block_mask="window")
            with pytest.raises(AttentionError, match=r"give it mask='full' or mask='window'"):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with cp.flex(mask="window"):
            close(F.scaled_dot_product_attention(q, k, v, is_causal=True), out)
        cp.assert_used({"full": 0, "window": 2})

    loopback(2).run(rank)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_outside_of_blocks_the_function_is_torchs_also_after_an_exception_and_in_other_threads():
    before, blocks = by_name.__code__, flex_dispatch._OPEN[0]
    q, k, v = (x.detach() for x in whole(kv_heads=HEADS))
    plain = by_name(q, k, v, block_mask=block_mask())

    def rank(world):
        cp = session(world)
        with pytest.raises(KeyError), cp.flex():
            raise KeyError
        with cp.flex(), cp.flex():
            found = []
            other = threading.Thread(target=lambda: found.append(by_name(q, k, v, block_mask=block_mask())))
            other.start()
            other.join()
        assert torch.equal(found[0], plain)
        assert cp.report().calls == 0

    loopback(1).run(rank)
    assert by_name.__code__ is before
    assert flex_dispatch._OPEN[0] == blocks
    assert torch.equal(by_name(q, k, v, block_mask=block_mask()), plain)


MASKS_OF_A_CALL = {
    "none": lambda tokens: None,
    "whole": lambda tokens: block_mask(),
    "local": lambda tokens: block_mask(length=tokens),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "dispatched elsewhere"])
@pytest.mark.parametrize("entry", ["sdpa", "attach"])
@pytest.mark.parametrize("name", MASKS_OF_A_CALL)
def test_without_flex_it_is_refused_and_never_attends_to_this_ranks_tokens(name, entry, elsewhere):
    """In eager code torch's function refuses the mask, or its operator is refused; both leave as our error."""

    class Calls(torch.nn.Module):
        def forward(self, x):
            return by_name(x, x, x, block_mask=MASKS_OF_A_CALL[name](x.shape[2]))

    def rank(world):
        cp, model = session(world), Calls()
        x = cp.shard(whole()[0], dim=2)
        refused = pytest.raises(AttentionError, match=r"inside `with cp\.flex\(\)`.*attach\(model, flex=True\)")
        with one_at_a_time:
            around = cp.attach(torch.nn.Identity(), flex=True) if elsewhere else nullcontext()
            block = cp.sdpa() if entry == "sdpa" else cp.attach(model)
            with around, refused, block:
                model(x)
        assert cp.report().calls == 0

    one_at_a_time = threading.Lock()  # eager flex_attention compiles its operator, and dynamo is not for threads
    loopback(2).run(rank)


@pytest.mark.parametrize(
    ("name", "fullgraph", "before"),
    [("none", True, False), ("whole", False, False), ("local", False, True)],
    ids=["none", "whole", "compiled before"],
)
def test_without_flex_compiled_code_is_refused_too(name, fullgraph, before):
    def rank(world):
        cp = session(world)
        x = cp.shard(whole()[0], dim=2)
        mask = MASKS_OF_A_CALL[name](x.shape[2])
        torch._dynamo.reset()
        fast = torch.compile(lambda x, mask: by_name(x, x, x, block_mask=mask), backend="eager", fullgraph=fullgraph)
        if before:
            fast(x, mask)
        with pytest.raises((AttentionError, torch._dynamo.exc.Unsupported, ValueError)), cp.sdpa():
            fast(x, mask)
        assert cp.report().calls == 0

    loopback(1).run(rank)


def test_an_error_of_something_else_in_a_block_stays_what_it_was():
    def rank(world):
        cp = session(world)
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error), cp.sdpa():
                raise error

    loopback(1).run(rank)


def test_the_inner_of_two_sessions_wins():
    def rank(world):
        outer, inner = (session(world, mask, layout=span.HeadTail(2)) for mask in (span.Causal(), span.Full()))
        q, k, v = (outer.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        with outer.flex():
            with inner.flex():
                by_name(q, k, v)
            with pytest.raises(AttentionError, match="block_mask must be given"):
                by_name(q, k, v)
        assert (outer.report().calls, inner.report().calls) == (0, 1)

    loopback(2).run(rank)


def test_the_operator_itself_is_refused():
    def rank(world):
        cp = session(world)
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        listed = block_mask(length=q.shape[2])
        with cp.flex(), pytest.raises(AttentionError, match="would see this rank's tokens alone"):
            torch.ops.higher_order.flex_attention(q, k, v, lambda s, *_: s, listed.as_tuple(), 1.0, {})

    loopback(2).run(rank)


class Layer(nn.Module):
    """Linear, flex_attention with a learned bias, linear."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.enter, self.leave = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(2, generator=random))
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=random)

    def forward(self, x, mask):
        q, k, v = self.enter(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        bias = self.bias

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + bias[h] * (q_idx - kv_idx)

        return self.leave(by_name(q, k, v, score_mod, mask).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, again=None):
        super().__init__()
        self.layers, self.again = nn.ModuleList([Layer().double(), Layer().double()]), again

    def forward(self, x, mask):
        for layer in self.layers:
            if self.again is None:
                x = x + layer(x, mask)
            else:
                x = x + checkpoint(layer, x, mask, use_reentrant=self.again == "reentrant")
        return x


def inputs():
    return torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def trained(cp, model, mask):
    """(whole output, averaged gradients) of a step."""
    out = model(cp.shard(inputs()).detach().requires_grad_(), mask)
    cp.mean_loss(out**2).backward()
    cp.average_gradients(model)
    return cp.unshard(out.detach()), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("again", [pytest.param(None, marks=pytest.mark.slow), "reentrant", "non-reentrant"])
def test_an_attached_model_is_that_of_one_rank_checkpointed_or_not(again):
    def one(world):
        cp, model = session(world), Model()
        with cp.flex():
            return trained(cp, model, block_mask(dilated))

    (true,) = loopback(1).run(one)

    def rank(world):
        cp, model = session(world), Model(again)
        with cp.attach(model, flex=True):
            found = trained(cp, model, block_mask(dilated))
        close(found[0], true[0])
        for mine, theirs in zip(found[1], true[1], strict=True):
            close(mine, theirs)
        cp.assert_used(layers=2)
        assert cp.report().recomputed == (0 if again is None else 2)

    loopback(2).run(rank)


def test_one_ranks_model_is_that_of_dense_attention():
    """What the test above compares with."""

    def written_out(q, k, v, score_mod, mask):
        b, h, *rest = INDICES
        scores = score_mod(q @ k.mT * q.shape[-1] ** -0.5, b, h[:2], *rest)
        return scores.masked_fill(~dilated(b, h, *rest)[..., :, :], -torch.inf).softmax(-1) @ v

    model = Model()
    code = Layer.forward.__code__
    layer = type(Layer.forward)(code, {**Layer.forward.__globals__, "by_name": written_out})
    x = inputs()
    for each in model.layers:
        x = x + layer(each, x, None)

    def one(world):
        cp, mine = session(world), Model()
        with cp.flex():
            return trained(cp, mine, block_mask(dilated))

    ((out, _),) = loopback(1).run(one)
    close(out, x.detach())


@pytest.mark.parametrize("again", ["reentrant", "non-reentrant"])
def test_checkpointing_inside_a_with_is_refused_before_anything_is_wrong(again):
    def rank(world):
        cp, model = session(world), Model(again)
        x = cp.shard(inputs()).detach().requires_grad_()
        with cp.flex(), pytest.raises(AttentionError, match=r"would run again in backward .* use cp.attach\(model\)"):
            model(x, block_mask(dilated))
        assert cp.report().calls == 0

    loopback(2).run(rank)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_new_mask_every_step_fills_no_memory_and_is_counted():
    def rank(world):
        cp = session(world)
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        cp.flex_attention(q, k, v, block_mask=block_mask())
        pairs = cp.report().pairs
        for _ in range(24):
            cp.flex_attention(q, k, v, block_mask=block_mask())
        kept = len(cp.attentions._attends), len(cp.attentions._masks), len(cp.attentions.uses.forward)
        assert max(kept) <= 17
        cp.assert_used(layers=25)
        assert cp.report().pairs == 25 * pairs
        assert "block_mask" in str(cp.report())
        cp.reset()
        assert cp.report().calls == 0

    loopback(2).run(rank)


def test_a_score_mod_is_seen_anew_at_every_call():
    """The same function with another value in its closure, and a new closure that computes the same."""

    def rank(world):
        cp, slope = session(world), 0.1
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))

        def score_mod(score, b, h, q_idx, kv_idx):
            return score - slope * (q_idx - kv_idx)

        mask = block_mask()
        one = cp.flex_attention(q, k, v, score_mod, mask)
        slope = 0.5
        two = cp.flex_attention(q, k, v, score_mod, mask)
        assert not torch.allclose(one, two)
        made = len(cp.attentions._attends)
        for value in (1.0, 2.0):
            bias = torch.full((HEADS, 13), value, dtype=torch.float64)
            cp.flex_attention(q, k, v, biased(bias), mask)
        assert len(cp.attentions._attends) == made + 1

    loopback(2).run(rank)


def test_a_score_mod_that_has_not_changed_is_traced_once(monkeypatch):
    traced = []

    class Counted(Score):
        def __post_init__(self):
            traced.append(self)
            super().__post_init__()

    monkeypatch.setattr(attentions, "Score", Counted)

    def rank(world):
        cp, mask, bias = session(world), block_mask(), table()
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        with torch.no_grad():
            for _ in range(3):
                one = cp.flex_attention(q, k, v, biased(bias), mask)
            bias.mul_(2)
            two = cp.flex_attention(q, k, v, biased(bias), mask)
        assert not torch.allclose(one, two)
        assert len(traced) == 1

    loopback(1).run(rank)


# ---- torch's own masks -----------------------------------------------------------------------------------------------


def kv_blocks():
    counts, indices = torch.tensor([[[1, 2, 2]]]), torch.tensor([[[[0, 1, 2], [0, 1, 2], [0, 2, 1]]]])
    return BlockMask.from_kv_blocks(counts.int(), indices.int(), BLOCK_SIZE=16, seq_lengths=(LENGTH, LENGTH))


def in_kv_blocks(b, h, q, k):
    listed = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    return listed[q // 16, k // 16]


def near(b, h, q, k):
    return (q - k).abs() < 4


THEIRS = {
    "noop_mask": (lambda: block_mask(module.noop_mask), lambda b, h, q, k: (q >= 0) & (k >= 0)),
    "and_masks": (lambda: block_mask(module.and_masks(past, near)), lambda *at: past(*at) & near(*at)),
    "or_masks": (lambda: block_mask(module.or_masks(past, near)), lambda *at: past(*at) | near(*at)),
    "lists alone": (kv_blocks, in_kv_blocks),
    "a mask of and_masks": (
        lambda: span.MaskMod(module.and_masks(past, module.or_masks(near, near), module.noop_mask)),
        lambda *at: past(*at) & near(*at),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_torchs_own_masks_do_not_read_the_index_whose_pattern_they_take(name):
    made, fn = THEIRS[name]
    compare(
        lambda cp, q, k, v: cp.flex_attention(q, k, v, block_mask=made(), enable_gqa=True, return_lse=True),
        lambda q, k, v: dense(q, k, v, fn),
    )


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """compiled(function) -> (the same compiled whole, the count of its compilations)."""
    torch._dynamo.reset()

    def compile_whole(function):
        counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(function, fullgraph=True, backend=counter), counter

    yield compile_whole
    torch._dynamo.reset()


PACKS = [[37], [9, 28], [20, 3, 14]]


def packed(lengths):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


WAYS = {
    "flex_attention of the session": lambda cp, mask, q, k, v: cp.flex_attention(q, k, v, block_mask=mask),
    "the attention": lambda cp, mask, q, k, v: mask(q, k, v),
    "torch's inside a block": lambda cp, mask, q, k, v: by_name(q, k, v, block_mask=mask),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_compiles_whole_and_new_documents_do_not_compile_anew(way, compiled):
    attend = WAYS[way]

    def rank(world):
        bias = table()

        def model(cp, mask, q, k, v):
            return attend(cp, mask, q * 2, k, v).square().sum()

        fast, counter = compiled(model)
        first = session(world)
        for n, lengths in enumerate(PACKS):
            cp = first if n == 0 else first.with_mask(span.Causal() & span.Documents(lengths))
            mask = cp.attention_for(block_mask(packed(lengths)), score_mod=biased(bias))
            q, k, v = (cp.shard(x, dim=2).requires_grad_() for x in whole(kv_heads=HEADS))
            bias.grad = None
            with cp.flex():
                fast(cp, mask, q, k, v).backward()
            whole_ones, theirs = [x.requires_grad_() for x in whole(kv_heads=HEADS)], table()
            out, _ = dense(whole_ones[0] * 2, *whole_ones[1:], packed(lengths), biased(theirs))
            out.square().sum().backward()
            close(q.grad, cp.shard(whole_ones[0].grad, dim=2))
            close(bias.grad, theirs.grad)
            assert cp.report().calls == 1
        assert counter.frame_count == 1

    loopback(1).run(rank)


def test_an_attached_model_compiles_whole(compiled):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(16, 48).double()

        def forward(self, x, mask):
            q, k, v = self.enter(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            return by_name(q, k, v, block_mask=mask)

    def rank(world):
        cp, model = session(world), Calls()
        mask = cp.attention_for(block_mask(dilated))
        with cp.flex():
            true = model(inputs(), mask)
        with cp.attach(model, flex=True):
            fast, _ = compiled(model)
            close(fast(inputs(), mask), true)
        cp.assert_used(layers=2)

    loopback(1).run(rank)


def test_what_is_not_prepared_is_refused_in_compiled_code(compiled):
    mask = block_mask()

    def inside(cp, q):
        return cp.flex_attention(q, q, q, block_mask=mask)

    def seen_by_a_block(cp, q):
        return by_name(q, q, q, block_mask=mask)

    def rank(world):
        cp = session(world)
        q = whole()[0]
        for call in (inside, seen_by_a_block):
            with cp.flex(), pytest.raises((torch._dynamo.exc.Unsupported, AttentionError)) as caught:
                compiled(call)[0](cp, q)
            assert "block_mask must be an attention that was made outside" in str(caught.value)
        assert cp.report().calls == 0

    loopback(1).run(rank)


def test_compiled_code_that_is_checkpointed_from_outside_is_refused_when_it_runs(compiled):
    def rank(world):
        cp = session(world)
        mask = cp.attention_for(block_mask())
        fast, _ = compiled(lambda q: by_name(q, q, q, block_mask=mask))
        q = whole()[0].requires_grad_()
        with cp.flex():
            fast(q)
            with pytest.raises(AttentionError, match="would run again in backward"):
                checkpoint(fast, q, use_reentrant=False)

    loopback(1).run(rank)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_code_compiled_in_parts_needs_no_attention_made_before():
    torch._dynamo.reset()

    def rank(world):
        cp, bias = session(world), table()

        def model(q, k, v):
            return cp.flex_attention(q + 1, k, v, biased(bias), block_mask(document, BATCH)) * 2

        q, k, v = whole(kv_heads=HEADS)
        close(torch.compile(model, backend="aot_eager")(q, k, v), model(q, k, v))
        cp.assert_used(layers=2)

    loopback(1).run(rank)
    torch._dynamo.reset()


class Widened(nn.Module):
    """Attention with a score_mod of its own, and a width of its own before it."""

    def __init__(self, width):
        super().__init__()
        self.inside, self.outside = nn.Linear(16, 3 * width), nn.Linear(width, 16)

    def forward(self, x, mask):
        q, k, v = self.inside(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = by_name(q, k, v, block_mask=mask, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j))
        return x + self.outside(out.transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("whole_model", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_compiled_in_parts_does_not_compile_code_of_ours_until_the_limit(whole_model):
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Widened(HEADS * (2 + n % 3)) for n in range(9))

        def forward(self, x, mask):
            for layer in self.layers:
                x = layer(x, mask)
            return x

    def rank(world):
        model, mask = Model(), block_mask(document, BATCH)
        fast = torch.compile(copy.deepcopy(model), backend="aot_eager")
        if not whole_model:
            fast = copy.deepcopy(model)
            fast.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in fast.layers)
        cp = session(world)
        x = cp.shard(torch.randn(BATCH, LENGTH, 16))
        with cp.flex():
            true = model(x, mask)
            torch.testing.assert_close(fast(x, mask), true)
            torch.testing.assert_close(fast(x, mask), true)
        cp.assert_used(layers=27)

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        loopback(1).run(rank)
    torch._dynamo.reset()


@pytest.mark.parametrize("way", ["eager", "compiled", "attached"])
def test_no_block_is_open_inside_of_kernels(way, monkeypatch):
    """A kernel may call flex_attention itself, of one rank's keys: that must be torch's."""
    torch._dynamo.reset()
    open_there = []

    def watched(theirs):
        def run(*args):
            open_there.append(torch._C._len_torch_function_stack())
            return theirs(*args)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(blocks, name, watched(getattr(blocks, name)))

    class Calls(nn.Module):
        def forward(self, q, mask):
            return by_name(q, q, q, block_mask=mask)

    def rank(world):
        outer, cp, model = session(world, span.Full()), session(world), Calls()
        mask = cp.attention_for(block_mask(dilated), score_mod=distance)
        q = whole()[0].requires_grad_()
        fast = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
        block = cp.attach(model, flex=True) if way == "attached" else cp.flex()
        with outer.flex(), block:
            fast(q, mask).sum().backward()
        assert cp.report().backwards == 1

    loopback(1).run(rank)
    assert set(open_there) == {0}
    assert len(open_there) == 2


# ---- a rank's part of a BlockMask ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    "name",
    ["rows", "heads", "unequal blocks", *(pytest.param(x, marks=pytest.mark.slow) for x in ("a BlockMask", "a mask"))],
)
def test_a_shard_of_a_block_mask_is_for_gathered_keys(name):
    made, fn = MASKS[name]
    q, k, v = whole(kv_heads=HEADS)
    true, _ = dense(q, k, v, fn)

    def rank(world):
        cp = session(world)
        return cp.shard(made()), cp.shard(q, dim=2), cp.shard(true, dim=2)

    for part, own, expected in loopback(3).run(rank):  # flex_attention of torch is not for two threads at once
        assert isinstance(part, BlockMask)
        close(by_name(own, k, v, block_mask=part), expected)


# ---- bad input -------------------------------------------------------------------------------------------------------


def branching(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


def two_arguments(score, b):
    return score


def branching_mask(b, h, q_idx, kv_idx):
    return True if q_idx >= kv_idx else False  # noqa: SIM210


REFUSED = {
    "a score_mod that branches": (
        {"score_mod": branching, "block_mask": block_mask()},
        r"^branching could not be evaluated as a score_mod",
    ),
    "a score_mod of two arguments": (
        {"score_mod": two_arguments, "block_mask": block_mask()},
        r"^two_arguments could not be evaluated as a score_mod: .*takes 2 positional arguments but 5 were given",
    ),
    "a mask_mod that branches": (
        {"block_mask": lambda: replaced(branching_mask)},
        r"^branching_mask could not be evaluated as a mask_mod",
    ),
    "another length": (
        {"block_mask": block_mask(length=40)},
        r"^block_mask must be that of the whole sequence, of lengths \(37, 37\), got \(40, 40\); another length is",
    ),
    "keys of another length": (
        {"block_mask": block_mask(kv_len=40)},
        r"^block_mask must be that of the whole sequence, of lengths \(37, 37\), got \(37, 40\)",
    ),
    "a rank's part": (
        {"block_mask": lambda cp: cp.shard(block_mask())},
        r"^block_mask must be that of the whole sequence, .* got \(\d+, 37\): a rank's part of it; pass the one",
    ),
    "a rank's length": (
        {"block_mask": lambda cp: block_mask(length=len(cp.positions))},
        r"^block_mask must be that of the whole sequence, .*: a rank's part of it",
    ),
    "documents of another length": ({"block_mask": span.Documents([3, 5])}, r"^lengths must sum to q_len \(37\)"),
    "no mask": (
        {},
        r"^block_mask must be given: without one, flex_attention attends to everything, and the session's mask is "
        r"Causal\(\)[^█]*; pass block_mask=cp.mask, or Full\(\) if everything is meant",
    ),
    "another name": ({"block_mask": "window"}, r"^mask must be one of"),
    "no mask at all": ({"block_mask": 3}, r"^block_mask must be the BlockMask of the whole sequence, .* got int"),
    "rows that differ": (
        {"block_mask": lambda: block_mask(document, 1)},
        r"^block_mask was made for one batch row, and its mask_mod reads the index of it",
    ),
    "kernel options": (
        {"block_mask": block_mask(), "kernel_options": {"BLOCK_M": 64}},
        r"^kernel_options: BLOCK_M=64 cannot be honoured over ranks",
    ),
    "kernel options for backward": (
        {"block_mask": block_mask(), "kernel_options": {"BACKEND": "AUTO", "bwd_PRESCALE_QK": True}},
        r"^kernel_options: bwd_PRESCALE_QK=True cannot be honoured",
    ),
    "max_scores": (
        {"block_mask": block_mask(), "return_aux": AuxRequest(lse=True, max_scores=True)},
        r"^return_aux: max_scores are not served over ranks",
    ),
    "both ways to ask for lse": (
        {"block_mask": block_mask(), "return_lse": True, "return_aux": AuxRequest(lse=True)},
        r"^return_lse and return_aux must not both be given",
    ),
    "an attention of another session": (
        {"block_mask": lambda cp: cp.with_mask(span.Full()).attention_for()},
        r"^block_mask is an attention of another session",
    ),
    "another score_mod than that of the attention": (
        {"block_mask": lambda cp: cp.attention_for(block_mask()), "score_mod": distance},
        r"^score_mod must be that of the attention",
    ),
    "another scale than that of the attention": (
        {"block_mask": lambda cp: cp.attention_for(block_mask(), scale=0.2), "scale": 0.3},
        r"^scale must be that of the attention, 0.2, got 0.3",
    ),
}


def replaced(fn):
    listed = copy.copy(block_mask())
    listed.mask_mod = fn
    return listed


@pytest.mark.parametrize("inside", [False, True], ids=["called", "in a block"])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_on_every_rank_before_anything_travels(name, inside):
    given, match = REFUSED[name]

    def rank(world):
        cp = session(world)
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        options = dict(given)
        mask = options.get("block_mask")
        if callable(mask) and not isinstance(mask, BlockMask | span.Mask):
            options["block_mask"] = mask(*[cp] * len(inspect.signature(mask).parameters))
        sent = []
        world.exchange = lambda *args: sent.append(args)
        block, call = (cp.flex(), by_name) if inside else (nullcontext(), cp.flex_attention)
        with pytest.raises(AttnspanError, match=match), block:
            call(q, k, v, **options)
        assert not sent

    loopback(2).run(rank)


def test_heads_and_shapes_are_checked():
    def rank(world):
        cp = session(world, scale=0.3)
        q, k, v = (cp.shard(x, dim=2) for x in whole())
        with pytest.raises(AttentionError, match="enable_gqa must be True"):
            cp.flex_attention(q, k, v, block_mask=block_mask(), scale=1.0)
        with pytest.raises(AttentionError, match=r"must be \(batch, heads, tokens, head dim\)"):
            cp.flex_attention(q[0], k[0], v[0], block_mask=block_mask(), scale=1.0)
        with pytest.raises(AttentionError, match=r"scale must be given: the session was made with scale=0\.3"):
            cp.flex_attention(q, k, v, block_mask=block_mask(), enable_gqa=True)
        with pytest.raises(AttentionError, match="scale must be given"):
            cp.attention_for(block_mask())
        with pytest.raises(MaskError, match=r"^_sliced_mask_mod_error could not be evaluated as a mask_mod"):
            cp.flex_attention(q, k, v, block_mask=block_mask(document, BATCH)[0], enable_gqa=True, scale=1.0)

    loopback(2).run(rank)


def test_promises_and_usual_values_are_taken():
    def rank(world):
        cp = session(world)
        q, k, v = (cp.shard(x, dim=2) for x in whole(kv_heads=HEADS))
        options = {"ROWS_GUARANTEED_SAFE": True, "fwd_BLOCKS_ARE_CONTIGUOUS": False, "BACKEND": "AUTO"}
        cp.flex_attention(q, k, v, block_mask=block_mask(), kernel_options=options)

    loopback(2).run(rank)


def test_a_kernel_that_runs_no_programs_is_refused_by_name():
    def rank(world):
        cp = session(world, kernel="cpu_flash")
        q, k, v = (cp.shard(x.float(), dim=2) for x in whole(kv_heads=HEADS))
        with pytest.raises(AttnspanError, match=r"cpu_flash runs no score_mod \(distance\)"):
            cp.flex_attention(q, k, v, distance, block_mask())

    loopback(2).run(rank)


def test_flex_attention_that_a_thread_without_a_block_has_compiled_is_compiled():
    """An attachment elsewhere lasts as long as its model; flex_attention outside of it must not run uncompiled."""
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    torch._dynamo.reset()
    flex_dispatch.install()
    try:
        counter = CompileCounterWithBackend("eager")
        found = torch.compile(by_name, backend=counter)(q, k, v)
        assert counter.frame_count == 1
    finally:
        flex_dispatch.uninstall()
        torch._dynamo.reset()
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))

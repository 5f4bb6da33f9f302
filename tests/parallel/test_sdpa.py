"""``with cp.sdpa()``: every call of SDPA inside is the session's, or refused; none is shard-local in silence."""

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import attnspan as span
from attnspan.errors import AttentionError
from attnspan.testing import loopback
from tests.parallel.models import by_name, dense, model, parallel, same, whole

LENGTH = 13
DOCUMENTS = span.Causal() & span.Documents([4, 9])


def session(world, mask=DOCUMENTS, **options):
    return span.ContextParallel(world, seq_len=LENGTH, mask=mask, **options)


def shards(cp, heads=2, kv_heads=2, dim=8):
    """This rank's query, key and value."""
    random = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, h, LENGTH, dim, generator=random, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)
    )
    return [cp.shard(x, dim=2) for x in (q, k, v)]


def served(call, ranks=2, mask=DOCUMENTS, **options):
    """call(query, key, value) inside cp.sdpa(), on every rank."""

    def rank(world):
        cp = session(world, mask, **options)
        with cp.sdpa():
            return call(*shards(cp))

    return loopback(ranks).run(rank)


def refused(call, match, **options):
    """That call(query, key, value) is refused on every rank."""

    def rank(world):
        cp = session(world, **options)
        with cp.sdpa(), pytest.raises(AttentionError, match=match):
            call(*shards(cp, options.get("heads", 2)))

    loopback(2).run(rank)


# ---- it is what one device computes ----------------------------------------------------------------------------------

CALLS = {
    "F": None,
    "imported by name": by_name,
    "torch._C._nn": torch._C._nn.scaled_dot_product_attention,
    "aten packet": torch.ops.aten.scaled_dot_product_attention,
    "aten overload": torch.ops.aten.scaled_dot_product_attention.default,
}


@pytest.mark.parametrize("sdpa", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_inside_is_the_same_as_on_one_device_however_it_calls_sdpa(sdpa, ranks):
    true = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model(sdpa=sdpa)

        def run(x):
            with cp.sdpa():
                return mine(x)

        same(parallel(cp, mine, run, whole(LENGTH)), true)
        cp.assert_used(layers=2)

    loopback(ranks).run(rank)


@pytest.mark.parametrize("mask", [span.Full(), span.PrefixLM(5), span.Causal() & span.KeyPadding([13, 6])], ids=repr)
def test_any_mask_is_that_of_the_session(mask):
    causal = not isinstance(mask, span.Full | span.PrefixLM)
    true = dense(model(is_causal=causal), whole(LENGTH), mask)

    def rank(world):
        cp, mine = session(world, mask), model(is_causal=causal)

        def run(x):
            with cp.sdpa():
                return mine(x)

        same(parallel(cp, mine, run, whole(LENGTH)), true)

    loopback(2).run(rank)


@pytest.mark.parametrize(("made_with", "scale"), [(None, None), (None, 8**-0.5), (None, 0.3), (0.3, 0.3), (0.3, 0.2)])
def test_a_scale_is_honoured(made_with, scale):
    true = dense(model(scale=scale), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world, scale=made_with), model(scale=scale)

        def run(x):
            with cp.sdpa():
                return mine(x)

        same(parallel(cp, mine, run, whole(LENGTH)), true)
        cp.assert_used(layers=2)  # whatever the scale

    loopback(2).run(rank)


def test_leading_dims_are_as_sdpa_has_them():
    def call(*qkv):
        usual = F.scaled_dot_product_attention(*qkv, is_causal=True)
        first = F.scaled_dot_product_attention(*(x[0] for x in qkv), is_causal=True)
        bare = F.scaled_dot_product_attention(*(x[0, 0] for x in qkv), is_causal=True)
        five = F.scaled_dot_product_attention(*(x.unsqueeze(1) for x in qkv), is_causal=True)
        torch.testing.assert_close(first, usual[0])
        torch.testing.assert_close(bare, usual[0, 0])
        torch.testing.assert_close(five, usual.unsqueeze(1))

    served(call)


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 1), (2, 1, 3)], ids=str)
def test_any_leading_dims_are_served_where_some_ranks_have_no_tokens(lead):
    x = torch.randn(*lead, 2, 5)
    true = F.scaled_dot_product_attention(x, x, x)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=2, mask=span.Full(), layout=span.Contiguous(3))
        own = cp.shard(x[None], dim=-2)[0]
        with cp.sdpa():
            out = F.scaled_dot_product_attention(own, own, own)
        torch.testing.assert_close(cp.unshard(out[None], dim=-2)[0], true)

    loopback(3).run(rank)


def test_grouped_heads_need_enable_gqa():
    def rank(world):
        cp = session(world)
        query, key, value = shards(cp, heads=4)
        with cp.sdpa():
            with pytest.raises(AttentionError, match=r"^enable_gqa must be True .* of heads, got 4 and 2$"):
                F.scaled_dot_product_attention(query, key, value, is_causal=True)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert torch.equal(out, cp.attention(query, key, value))

    loopback(2).run(rank)


def test_multihead_attention_reaches_sdpa_without_weights():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True).double()
    true = dense(layer, whole(LENGTH), span.Full())

    def rank(world):
        cp, mine = session(world, span.Full()), copy.deepcopy(layer)

        def run(x):
            with cp.sdpa():
                return mine(x)

        same(parallel(cp, mine, run, whole(LENGTH)), true)
        with torch.no_grad():  # where torch would take its fused layer
            mine.eval()
            assert torch.allclose(cp.unshard(run(cp.shard(whole(LENGTH)))), true[0])

    loopback(2).run(rank)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_outside_of_the_block_sdpa_is_torchs_again_also_after_an_exception():
    def rank(world):
        cp = session(world)
        query, key, value = shards(cp)
        plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        with pytest.raises(KeyError), cp.sdpa():
            raise KeyError
        with pytest.raises(KeyboardInterrupt), cp.sdpa(), cp.sdpa():
            raise KeyboardInterrupt
        block = cp.sdpa()
        with block, block:
            pass
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, is_causal=True), plain)
        assert cp.report().calls == 0
        assert torch.overrides._len_torch_function_stack() == 0

    loopback(2).run(rank)


def test_the_inner_of_two_sessions_wins():
    def rank(world):
        outer, inner = (session(world, mask, layout=span.HeadTail(2)) for mask in (DOCUMENTS, span.Full()))
        query, key, value = shards(outer)
        with outer.sdpa():
            one = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            with inner.sdpa():
                two = F.scaled_dot_product_attention(query, key, value)
            three = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert torch.equal(one, three)
        assert not torch.allclose(one, two)
        assert (outer.report().calls, inner.report().calls) == (2, 1)

    loopback(2).run(rank)


def test_other_threads_do_not_notice():
    def rank(world):
        cp = session(world)
        query, key, value = shards(cp)
        found = []
        with cp.sdpa():
            other = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(query, key, value)))
            other.start()
            other.join()
        assert torch.equal(found[0], F.scaled_dot_product_attention(query, key, value))

    loopback(2).run(rank)


def test_one_of_several_masks_is_picked_by_name():
    masks = {"full": span.Causal(), "window": span.SlidingWindow(3)}

    def rank(world):
        cp = session(world, masks)
        query, key, value = shards(cp)
        for name in masks:
            with cp.sdpa(mask=name):
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            assert torch.equal(out, cp.attention(query, key, value, mask=name))
        with pytest.raises(AttentionError, match="mask must name one of the session's masks, 'full' or 'window'"):
            cp.sdpa()
        with pytest.raises(
            AttentionError, match="mask must be one of full, window, got 'windw'; did you mean 'window'"
        ):
            cp.sdpa(mask="windw")
        cp.assert_used(layers={"full": 2, "window": 2})

    loopback(2).run(rank)


# ---- refusals --------------------------------------------------------------------------------------------------------


def sdpa(**options):
    return lambda *qkv: F.scaled_dot_product_attention(*qkv, **{"is_causal": True, **options})


def test_arguments_that_disagree_with_the_session_are_refused_with_what_to_do():
    mask = torch.ones(6, 6, dtype=torch.bool)
    refused(
        sdpa(attn_mask=mask), r"^attn_mask must be None .* the session's mask is Causal\(\) & Documents.*from_dense"
    )
    refused(sdpa(dropout_p=1.0), r"^dropout_p must be a number in \[0, 1\), got 1.0")
    refused(sdpa(), r"^scale must be given: the session was made with scale=0.3", scale=0.3)
    refused(
        sdpa(), r"^is_causal must be False: in the session's mask Full\(\) some queries see later", mask=span.Full()
    )
    refused(sdpa(), r"^is_causal must be False", mask=span.PrefixLM(3))
    refused(sdpa(is_causal=False), r"^is_causal must be True: in the session's mask .* no query sees a later key; call")
    refused(sdpa(is_causal=False), r"^is_causal must be True", mask=span.SlidingWindow(2))


def test_keys_of_another_sequence_are_referred_to_cross_attention():
    """A causal session told them to pass is_causal=True, which would not have helped."""

    def cross(query, key, value, **options):
        longer = [torch.cat([x, x], dim=2) for x in (key, value)]
        return F.scaled_dot_product_attention(query, *longer, **options)

    words = r"key must hold this rank's \d+ of 13 tokens, got \d+; .* another sequence, attend by cp.cross\(keys\)"
    refused(cross, words)
    refused(functools.partial(cross, is_causal=True), words)
    refused(cross, words, mask=span.Full())
    refused(functools.partial(cross, attn_mask=torch.ones(1, 1, dtype=torch.bool)), words)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_head_dim_of_0_is_refused(scale):
    def empty(*qkv):
        return F.scaled_dot_product_attention(*(x[..., :0] for x in qkv), is_causal=True, scale=scale)

    refused(empty, r"query, key and value must have a batch, heads and a head dim, got shapes \(2, 2, \d+, 0\)")

    def rank(world):
        query = torch.ones(1, 2, LENGTH // 2, 0)
        with pytest.raises(AttentionError, match="query must have a head dim of at least 1, got shape"):
            span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal()).flex_attention(query, query, query)

    loopback(2).run(rank)


def test_a_mask_of_single_tokens_fits_both():
    served(lambda *qkv: F.scaled_dot_product_attention(*qkv), mask=span.Documents([1] * LENGTH))
    served(sdpa(), mask=span.Documents([1] * LENGTH))


@pytest.mark.parametrize("mask", [span.Causal(), span.Full()], ids=repr)
def test_a_rank_of_one_query_or_none_may_give_either_is_causal(mask):
    x = torch.randn(1, 2, 4, 8)
    true = F.scaled_dot_product_attention(x, x, x, attn_mask=mask.dense(4))

    def rank(world):
        cp = span.ContextParallel(world, seq_len=4, mask=mask, layout=span.Contiguous(3))
        own = cp.shard(x, dim=2)
        assert sorted(cp.layout.tokens(4)) == [1, 1, 2]
        causal = isinstance(mask, span.Causal) if own.shape[2] > 1 else isinstance(mask, span.Full)
        with cp.sdpa():
            out = F.scaled_dot_product_attention(own, own, own, is_causal=causal)
        torch.testing.assert_close(cp.unshard(out, dim=2), true)

    loopback(3).run(rank)


def test_what_one_rank_alone_is_refused_is_refused_on_all():
    def rank(world):
        cp = session(world)
        own = shards(cp)
        with cp.sdpa():
            for odd in ({"dropout_p": 1.5}, {"is_causal": False}, {"attn_mask": torch.ones(1)}):
                options = {"is_causal": True, **(odd if cp.rank == 1 else {})}
                with pytest.raises(AttentionError, match=f"^on rank 1: {next(iter(odd))} must be"):
                    F.scaled_dot_product_attention(*own, **options)
            F.scaled_dot_product_attention(*own, is_causal=True)  # and then they go on
        cp.assert_used(layers=1)

    loopback(3).run(rank)


def test_dims_before_heads_are_not_broadcast():
    def call(q, k, v):
        five = q.expand(3, *q.shape).transpose(0, 1), k.expand(3, *k.shape), v.expand(3, *v.shape)
        return sdpa()(*five)

    refused(
        call, r"query, key and value must have the same dims before heads: .* \(2, 3, 2, \d, 8\), \(3, 2, 2, \d, 8\)"
    )
    refused(lambda q, k, v: sdpa()(q, k[:1], v[:1]), "must have the same dims before heads")


def test_another_length_is_refused_on_every_rank():
    refused(lambda q, k, v: sdpa()(q[:, :, 1:], k, v), r"query must hold this rank's 7 of 13 tokens, got 6")
    refused(lambda q, k, v: sdpa()(q, k[:, :, 1:], v[:, :, 1:]), r"key must hold this rank's 7 of 13 tokens, got 6")


def test_fewer_dims_are_refused_where_batch_rows_differ():
    rows = span.Causal() & span.KeyPadding([13, 6])
    refused(lambda *qkv: sdpa()(*(x[0] for x in qkv)), r"^query must be \(batch, heads, .* mask of 2 batch", mask=rows)
    refused(lambda *qkv: sdpa()(*(x[0, 0, 0] for x in qkv)), r"^query, key and value must be \(\.\.\., heads, tokens")


for op in ("tests_ops::flash_fwd", "tests_attn::fwd", "tests_ops::scatter_flatten_fsdp"):
    torch.library.custom_op(op, lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")


OTHERS = {
    "weights": lambda q, k, v: nn.MultiheadAttention(2, 1)(*torch.randn(3, 4, 1, 2).unbind()),
    "fused": lambda q, k, v: torch._native_multi_head_attention(q, k, v, 8, 1, q, q, q, q),
    "flash": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v),
    "math": lambda q, k, v: torch._scaled_dot_product_attention_math(q, k, v),
    "builtin": lambda q, k, v: torch._scaled_dot_product_flash_attention_for_cpu(q, k, v),
    "called flash": lambda q, k, v: torch.ops.tests_ops.flash_fwd(q),
    "of a library": lambda q, k, v: torch.ops.tests_attn.fwd.default(q),
    "varlen": lambda q, k, v: torch.ops.aten._flash_attention_forward(q, k, v, None, None, 1, 1, 0.0, False, False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_attention_by_other_functions_is_refused(other):
    match = "need_weights must be False" if other == "weights" else "would see this rank's tokens alone"
    refused(OTHERS[other], match)


def test_other_functions_with_such_names_are_let_through():
    x = torch.ones(3)

    def call(*qkv):
        assert not getattr(qkv[0], "is_nested_attention", False)
        assert torch.equal(torch.ops.aten.flatten.using_ints(torch.ops.tests_ops.scatter_flatten_fsdp(x)), x)
        assert torch.equal(torch.ops.aten.scatter(x, 0, torch.tensor([0]), torch.ones(1)), x)
        return torch.nn.Transformer.generate_square_subsequent_mask(3)

    served(call)


@pytest.mark.parametrize("branch", [True, False])
def test_functions_that_an_operator_calls_are_inside_too(branch):
    x = torch.randn(1, 2, LENGTH, 8)
    true = F.scaled_dot_product_attention(x, x, x)

    def rank(world):
        cp = session(world, span.Full())
        own = cp.shard(x, dim=2)
        attend = lambda q: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
        branches = (attend, torch.clone) if branch else (torch.clone, attend)
        with cp.sdpa():
            out = torch.ops.higher_order.cond(torch.tensor(branch), *branches, (own,))
        torch.testing.assert_close(cp.unshard(out, dim=2), true)

    loopback(2).run(rank)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("again", ["reentrant", "non-reentrant"])
def test_checkpointing_inside_a_with_is_refused_before_anything_is_wrong(again):
    def rank(world):
        cp, mine = session(world), model(again=again)
        x = cp.shard(whole(LENGTH)).detach().requires_grad_()
        with cp.sdpa(), pytest.raises(AttentionError, match=r"would run again in backward .* use cp.attach\(model\)"):
            mine(x)
        with torch.no_grad(), cp.sdpa():  # nothing runs again
            mine(x.detach())
        cp.assert_used(layers=2)

    loopback(2).run(rank)


@pytest.mark.parametrize("again", ["reentrant", "non-reentrant"])
def test_a_with_inside_the_checkpointed_function_runs_again_with_it(again):
    true = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model()

        def block(x):
            with cp.sdpa():
                return mine(x)

        def run(x):
            return checkpoint(block, x, use_reentrant=again == "reentrant")

        same(parallel(cp, mine, run, whole(LENGTH)), true)
        assert (cp.report().calls, cp.report().recomputed) == (2, 2)

    loopback(2).run(rank)


@pytest.mark.parametrize("again", ["reentrant", "non-reentrant"])
def test_a_region_that_would_run_again_with_another_session_is_refused(again):
    def rank(world):
        now = [session(world)]
        mine = model(layers=1)

        def block(x):
            with now[0].sdpa():
                return mine(x)

        x = now[0].shard(whole(LENGTH)).detach().requires_grad_()
        out = checkpoint(block, x, use_reentrant=again == "reentrant")
        now[0] = session(world, span.Causal())
        with pytest.raises(AttentionError, match="runs again with another session than the first time"):
            out.sum().backward()

    loopback(2).run(rank)


class Redo(torch.autograd.Function):
    """Somebody else's reentrant checkpointing."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grad)
        return x.grad, None


def test_checkpointing_by_other_peoples_autograd_functions_is_seen():
    def rank(world):
        cp, mine = session(world), model()
        x = cp.shard(whole(LENGTH)).detach().requires_grad_()
        with cp.sdpa(), pytest.raises(AttentionError, match="would run again in backward"):
            Redo.apply(x, mine)
        with cp.attach(mine):
            Redo.apply(x, mine).sum().backward()
        assert (cp.report().calls, cp.report().recomputed) == (2, 2)

    loopback(2).run(rank)


# ---- compile ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """compiled(function) -> (the same compiled whole, the count of its compilations)."""
    torch._dynamo.reset()

    def compile_whole(function, **options):
        counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(function, **{"fullgraph": True, **options}, backend=counter), counter

    yield compile_whole
    torch._dynamo.reset()


def on_one_rank(fn):
    return loopback(1).run(fn)[0]  # dynamo does not mind threads, but two of them


def test_a_compiled_model_is_context_parallel_inside_and_not_outside(compiled):
    """On one rank with documents: what is not the session's attention sees across them."""
    x = whole(LENGTH)
    true, other = dense(model(), x, DOCUMENTS), dense(model(), x, span.Causal())

    def rank(world):
        cp, mine = session(world), model()
        fast, counter = compiled(mine)

        def inside(x, cp=cp):
            with cp.sdpa():
                return fast(x)

        same(parallel(cp, mine, fast, x), other)
        same(parallel(cp, mine, inside, x), true)
        cp.assert_used(layers=2)
        same(parallel(cp, mine, fast, x), other)
        assert counter.frame_count == 2
        for lengths in ([13], [1, 12], [6, 7]):  # the next batches do not compile anew
            mask = span.Causal() & span.Documents(lengths)
            batch = cp.with_mask(mask)
            same(parallel(batch, mine, lambda x, batch=batch: inside(x, batch), x), dense(model(), x, mask))
        assert counter.frame_count == 2

    on_one_rank(rank)


def test_a_block_may_be_compiled_with_what_is_in_it(compiled):
    true = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model()
        cp.sdpa()  # made once outside

        def inside(x):
            with cp.sdpa():
                return mine(x)

        fast, counter = compiled(inside)
        same(parallel(cp, mine, fast, whole(LENGTH)), true)
        cp.assert_used(layers=2)
        assert counter.frame_count == 1

    on_one_rank(rank)


def test_what_is_refused_is_refused_in_compiled_code_too(compiled):
    x = torch.randn(1, 2, LENGTH, 8)

    def outer(call, match, mask=DOCUMENTS):
        def rank(world):
            cp = session(world, mask)
            torch._dynamo.reset()
            with cp.sdpa(), pytest.raises((torch._dynamo.exc.Unsupported, AttentionError)) as caught:
                compiled(call)[0](x.clone().requires_grad_("checkpoint" in match))
            assert match in str(caught.value)
            assert cp.report().calls == 0

        on_one_rank(rank)

    # Dynamo's messages quote the lines that they come from, so what is expected must stand on others.
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    calls = {
        "plain": lambda x: F.scaled_dot_product_attention(x, x, x),
        "scaled": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
        "flex": lambda x: flex_attention(x, x, x),
        "operator": lambda x: torch.ops.higher_order.flex_attention(x, x, x, lambda s, *_: s, lists, 1.0, {}),
        "op": lambda x: torch.ops.tests_ops.flash_fwd(x),
        "aten": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0],
        "heads": lambda x: attend(x[0], x[0], x[0], need_weights=False),
        "weights": lambda x: attend(x[0], x[0], x[0]),
    }
    lists = create_block_mask(span.Causal().mask_mod(), None, None, LENGTH, LENGTH, device="cpu").as_tuple()
    outer(calls["plain"], "is_causal must be True")
    outer(calls["scaled"], "scale must be the session's")
    outer(calls["flex"], "flex_attention would see this rank's tokens alone")
    outer(calls["operator"], "flex_attention would see this rank's tokens alone")
    outer(calls["op"], "op of attention would see this rank's tokens alone")
    outer(calls["aten"], "op of attention would see this rank's tokens alone")
    outer(calls["heads"], "cannot be followed from cp.sdpa()", span.Full())
    outer(calls["weights"], "need_weights must be False", span.Full())


def test_checkpointing_in_compiled_code_is_inside_a_block_around_it_and_refused_where_that_would_be_left(compiled):
    def rank(world):
        cp, mine = session(world), model(again="non-reentrant")
        fast, count = compiled(mine)
        true = dense(model(), whole(LENGTH), DOCUMENTS)
        with cp.sdpa():
            same(parallel(cp, mine, fast, whole(LENGTH)), true)
            assert cp.report().calls == 2
            assert count.frame_count == 1
            x = whole(LENGTH).requires_grad_()
            with pytest.raises(AttentionError, match="would run again in backward"):
                checkpoint(fast, x, use_reentrant=False)

    on_one_rank(rank)


@pytest.mark.parametrize("again", [pytest.param("reentrant", marks=pytest.mark.slow), "non-reentrant"])
def test_a_compiled_model_that_is_checkpointed_from_outside_is_refused_when_it_runs(compiled, again):
    def rank(world):
        cp, mine = session(world), model()
        fast, _ = compiled(mine)
        x = whole(LENGTH).requires_grad_()
        with cp.sdpa():
            fast(x)  # compiled where nothing is wrong
            with pytest.raises(AttentionError, match="would run again in backward"):
                checkpoint(fast, x, use_reentrant=again == "reentrant")

    on_one_rank(rank)


def test_a_graph_break_loses_nothing(compiled):
    def broken(x):
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)

    def rank(world):
        cp = session(world)
        x = torch.randn(1, 2, LENGTH, 8, dtype=torch.float64)
        with cp.sdpa():
            true = broken(x)
            torch.testing.assert_close(compiled(broken, fullgraph=False)[0](x), true)
        cp.assert_used(layers=2, passes=2)

    on_one_rank(rank)


def test_a_twin_without_the_mode_is_shard_local():
    """What all of this is about: outside of the block the model runs, and is wrong."""
    true, _ = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model()
        out = cp.unshard(mine(cp.shard(whole(LENGTH))).detach())
        assert not torch.allclose(out, true)
        with pytest.raises(AttentionError, match=r"it ran 0 times: run the model inside cp\.sdpa"):
            cp.assert_used(layers=2)

    loopback(2).run(rank)


def test_autocast_inside_is_sdpas():
    def rank(world):
        cp = session(world)
        q, k, v = (x.float() for x in shards(cp))
        with cp.sdpa(), torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(q, k, v, is_causal=True).dtype == torch.bfloat16

    loopback(2).run(rank)

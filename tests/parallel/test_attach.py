"""``cp.attach(model)``: what a `with cp.sdpa()` does, also when checkpointing runs a region again."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import attnspan as span
from attnspan.errors import AttentionError
from attnspan.testing import loopback
from tests.parallel.models import WIDTH, Attend, Stack, dense, model, parallel, same, whole

LENGTH = 13
DOCUMENTS = span.Causal() & span.Documents([4, 9])
MASKS = {"full": span.Causal(), "window": span.SlidingWindow(3)}

reruns = pytest.mark.parametrize("again", ["reentrant", "non-reentrant"])


def session(world, mask=DOCUMENTS, **options):
    return span.ContextParallel(world, seq_len=LENGTH, mask=mask, **options)


def wrapped(impl):
    """The model with each layer in torch's checkpoint wrapper."""
    mine = model()
    wrapper = lambda layer: checkpoint_wrapper(layer, checkpoint_impl=impl)  # noqa: E731
    apply_activation_checkpointing(mine, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, Attend))
    return mine


KINDS = {
    "none": (model, 0),
    "reentrant": (lambda: model(again="reentrant"), 2),
    "non-reentrant": (lambda: model(again="non-reentrant"), 2),
    "reentrant wrapper": (lambda: wrapped(CheckpointImpl.REENTRANT), 2),
    "non-reentrant wrapper": (lambda: wrapped(CheckpointImpl.NO_REENTRANT), 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_attached_model_is_the_same_as_on_one_device_however_it_is_checkpointed(kind, ranks):
    make, recomputed = KINDS[kind]
    true = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), make()
        with cp.attach(mine):
            out, gradients = parallel(cp, mine, mine, whole(LENGTH))
        same((out, {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients.items()}), true)
        assert (cp.report().calls, cp.report().recomputed, cp.report().backwards) == (2, recomputed, 2)
        cp.assert_used(layers=2)

    loopback(ranks).run(rank)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # inside a reentrant one
def test_checkpoint_sequential_and_nested_regions_run_again_attached():
    true = dense(nn.Sequential(*model().layers), whole(LENGTH), DOCUMENTS)

    def rank(world):
        for reentrant in (True, False):
            cp, mine = session(world), nn.Sequential(*model().layers)

            def segments(x, mine=mine, reentrant=reentrant):
                return checkpoint_sequential(mine, 2, x, use_reentrant=reentrant)

            def nested(x, mine=mine, reentrant=reentrant):
                inner = lambda x: checkpoint(mine[1], mine[0](x), use_reentrant=reentrant)  # noqa: E731
                return checkpoint(inner, x, use_reentrant=reentrant)

            with cp.attach(mine):
                same(parallel(cp, mine, segments, whole(LENGTH)), true)
                same(parallel(cp, mine, nested, whole(LENGTH)), true)
            assert cp.report().calls == 4

    loopback(2).run(rank)


class Closure(nn.Module):
    """Checkpoints a closure that calls SDPA itself: no module is called again but the linear ones."""

    def __init__(self, again):
        super().__init__()
        self.enter, self.again = nn.Linear(WIDTH, WIDTH).double(), again

    def forward(self, x):
        def attend(x):
            y = self.enter(x).unflatten(-1, (2, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(y, y, y, is_causal=True)

        return checkpoint(attend, x, use_reentrant=self.again == "reentrant")


@reruns
def test_a_region_that_no_module_would_enter_again_is_refused(again):
    def rank(world):
        cp, mine = session(world), Closure(again)
        with cp.attach(mine), pytest.raises(AttentionError, match="would run again in backward"):
            mine(cp.shard(whole(LENGTH)).detach().requires_grad_())

    loopback(2).run(rank)


@reruns
def test_regions_run_again_with_the_session_of_their_first_run(again):
    """As pipelines do: forward of two batches, then backward of the first, with other documents."""
    masks = [DOCUMENTS, span.Causal() & span.Documents([7, 6])]
    true = [dense(model(), whole(LENGTH), mask) for mask in masks]

    def rank(world):
        first, mine = session(world), model(again=again)
        with first.attach(mine) as attached:
            losses = []
            for mask in masks:
                cp = first.with_mask(mask)
                attached.use(cp)
                out = mine(cp.shard(whole(LENGTH)).detach().requires_grad_())
                losses.append((cp, cp.mean_loss(out.square())))
            for (cp, loss), (_, gradients) in zip(losses, true, strict=True):
                mine.zero_grad()
                loss.backward()
                cp.average_gradients(mine)
                for name, parameter in mine.named_parameters():
                    torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-12)

    loopback(2).run(rank)


@reruns
@pytest.mark.parametrize("ended", ["with", "detach"])
def test_regions_run_again_attached_after_the_attachment_has_ended(again, ended):
    true = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model(again=again)
        attached = cp.attach(mine)
        attached.use(cp.with_mask(span.Causal())).use(cp)
        out = mine(cp.shard(whole(LENGTH)).detach().requires_grad_())
        attached.use(cp.with_mask(span.Causal()))
        attached.detach() if ended == "detach" else attached.__exit__()
        cp.mean_loss(out.square()).backward()
        cp.average_gradients(mine)
        gradients = {name: parameter.grad for name, parameter in mine.named_parameters()}
        same((cp.unshard(out.detach()), gradients), true)
        assert all("forward" not in vars(module) for module in mine.modules())
        assert (cp.report().calls, cp.report().recomputed) == (2, 2)

    loopback(2).run(rank)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # inside a reentrant one
@pytest.mark.parametrize("late", ["another session", "the end"])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_regions_in_regions_run_again_as_they_first_ran(outer, inner, late):
    true = dense(nn.Sequential(*model().layers), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), nn.Sequential(*model().layers)
        attached = cp.attach(mine)
        both = lambda x: checkpoint(mine[1], mine[0](x), use_reentrant=inner)  # noqa: E731
        out = checkpoint(both, cp.shard(whole(LENGTH)).detach().requires_grad_(), use_reentrant=outer)
        if late == "the end":
            attached.detach()
        else:
            other = attached.use(cp.with_mask(span.Causal())).session
            mine(other.shard(whole(LENGTH)))
        cp.mean_loss(out.square()).backward()
        cp.average_gradients(mine)
        same((cp.unshard(out.detach()), {name: p.grad for name, p in mine.named_parameters()}), true)

    loopback(2).run(rank)


@reruns
def test_a_region_that_runs_again_when_its_model_is_attached_anew_is_refused(again):
    def rank(world):
        cp, mine = session(world), model(again=again)
        with cp.attach(mine):
            out = mine(cp.shard(whole(LENGTH)).detach().requires_grad_())
        with (
            cp.with_mask(span.Causal()).attach(mine),
            pytest.raises(AttentionError, match="after its attachment has ended, and needs the model attached"),
        ):
            out.sum().backward()

    loopback(2).run(rank)


class Offloaded(torch.autograd.Function):
    """Checkpointing of somebody else's."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return None, x.grad


def test_a_region_of_an_unknown_kind_is_refused_after_the_end_and_runs_again_before():
    true = dense(model(layers=1).layers[0], whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model(layers=1).layers[0]
        with cp.attach(mine):
            same(parallel(cp, mine, lambda x: Offloaded.apply(mine, x), whole(LENGTH)), true)
            out = Offloaded.apply(mine, cp.shard(whole(LENGTH)).detach().requires_grad_())
        with pytest.raises(AttentionError, match="of a kind that is not known runs backward after its attachment"):
            out.sum().backward()

    loopback(2).run(rank)


# ---- which modules ---------------------------------------------------------------------------------------------------


def windowed(x, module=None):
    """Full, then window, on one device."""
    module = module or model()
    for layer, mask in zip(module.layers, MASKS.values(), strict=True):
        x = x + dense_layer(layer, x, mask)
    return x


def dense_layer(layer, x, mask):
    query, key, value = layer.enter(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(LENGTH))
    return layer.leave(out.transpose(1, 2).flatten(2))


def test_layers_may_have_different_masks():
    true = windowed(whole(LENGTH))

    def rank(world):
        cp, mine = session(world, MASKS), model(again="non-reentrant")
        with cp.attach(mine, {"layers.0": "full", "layers.1": "window"}):
            out, _ = parallel(cp, mine, mine, whole(LENGTH))
        torch.testing.assert_close(out, true, rtol=1e-12, atol=1e-12)
        cp.assert_used(layers={"full": 1, "window": 1})
        with cp.attach(mine, {"*.1": "window"}, mask="full"):  # the rest
            torch.testing.assert_close(cp.unshard(mine(cp.shard(whole(LENGTH))).detach()), true)

    loopback(2).run(rank)


def test_two_patterns_may_name_one_mask_and_the_innermost_module_wins():
    true = windowed(whole(LENGTH))

    def rank(world):
        cp, mine = session(world, MASKS), model()
        mine.layers.append(copy.deepcopy(mine.layers[1]))
        mine.layers = nn.ModuleList(nn.Sequential(layer) for layer in mine.layers)  # patterns fit what is inside, too
        for chosen in (
            {"layers.1": "window", "layers.2": "window"},
            {"layers.1": "window", "layers": "full", "layers.2": "window"},
            {"layers": "window", "layers.0": "full"},
            {"layers.0": "full", "layers.*": "window"},  # a name goes before a pattern
        ):
            cp.reset()
            with cp.attach(mine, chosen, mask="full"):
                x = cp.unshard(mine(cp.shard(whole(LENGTH))).detach())
            last = true + dense_layer(mine.layers[2][0], true, MASKS["window"])
            torch.testing.assert_close(x, last, rtol=1e-12, atol=1e-12)
            cp.assert_used(layers={"full": 1, "window": 2})

    loopback(2).run(rank)


def test_a_module_that_two_masks_claim_alike_is_refused():
    def rank(world):
        cp, mine = session(world, MASKS), model()
        with pytest.raises(
            AttentionError, match=r"'\*.0' gives layers.0 the mask 'full', and another pattern 'window'"
        ):
            cp.attach(mine, {"layers.*": "window", "*.0": "full"})
        tied = nn.ModuleDict({"a": nn.Sequential(mine.layers[0]), "b": nn.Sequential(mine.layers[0])})
        with pytest.raises(AttentionError, match=r"a.0 is part of two modules, one with the mask 'full' and one with"):
            cp.attach(tied, {"a": "full", "b": "window"})
        cp.attach(tied, {"a": "full", "b": "window", "a.0": "full"}).detach()

    loopback(1).run(rank)


def test_a_layer_without_a_mask_is_refused():
    def rank(world):
        cp, mine = session(world, MASKS), model()
        with (
            cp.attach(mine, {"layers.1": "window"}),
            pytest.raises(AttentionError, match="for which no mask was named"),
        ):
            mine(cp.shard(whole(LENGTH)))
        with pytest.raises(AttentionError, match="mask must name one of the session's masks"):
            cp.attach(mine)
        with pytest.raises(AttentionError, match="mask must be one of full, window, got 'windows'; did you mean"):
            cp.attach(mine, {"layers.1": "windows"})

    loopback(2).run(rank)


@pytest.mark.parametrize("modules", ["layers.*", ["layers.0", "layers.1"], "modules"])
def test_modules_are_given_by_pattern_or_themselves(modules):
    true = dense(model(), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model()
        with cp.attach(mine, list(mine.layers) if modules == "modules" else modules):
            assert "forward" not in vars(mine)
            same(parallel(cp, mine, mine, whole(LENGTH)), true)

    loopback(2).run(rank)


def test_a_pattern_that_fits_nothing_is_refused():
    def rank(world):
        with pytest.raises(
            AttentionError, match=r"no module's name fits 'layer.\*'; they are layers, layers.0, layers"
        ):
            session(world).attach(model(), "layer.*")
        with pytest.raises(AttentionError, match="model must be a module, got function"):
            session(world).attach(windowed)

    loopback(2).run(rank)


def test_only_modules_that_may_call_sdpa_are_attached():
    def rank(world):
        mine = nn.Sequential(Stack(), nn.TransformerEncoderLayer(16, 2), nn.Linear(16, 16))
        with session(world).attach(mine):
            names = [type(module).__name__ for module in mine.modules() if "forward" in vars(module)]
        assert names == ["Sequential", "Stack", "Attend", "Attend", "TransformerEncoderLayer", "MultiheadAttention"]

    loopback(1).run(rank)


# ---- being attached --------------------------------------------------------------------------------------------------


def test_attaching_twice_is_refused_and_detaching_restores():
    def rank(world):
        cp, mine = session(world), model()
        own = mine.layers[0].forward = lambda x: x  # a forward of the instance's own
        attached = cp.attach(mine)
        with pytest.raises(AttentionError, match="Stack is attached already"):
            cp.attach(mine)
        with pytest.raises(AttentionError, match="Attend is attached already"):
            cp.attach(mine, "layers.1")
        attached.detach()
        assert mine.layers[0].forward is own
        assert all("forward" not in vars(module) for module in mine.modules() if module is not mine.layers[0])
        cp.attach(mine).detach()

    loopback(2).run(rank)


def test_an_exception_in_forward_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, x, error):
            raise error

    def rank(world):
        cp, mine = session(world), Fails()
        with cp.attach(mine):
            for error in (ValueError, KeyboardInterrupt):
                with pytest.raises(error):
                    mine(torch.ones(1), error)
                assert torch.overrides._len_torch_function_stack() == 0

    loopback(2).run(rank)


def test_a_copy_stays_attached_with_its_own_weights_until_the_original_is_detached():
    true = dense(model(seed=1), whole(LENGTH), DOCUMENTS)

    def rank(world):
        cp, mine = session(world), model()
        attached = cp.attach(mine)
        other = copy.deepcopy(mine)
        other.load_state_dict(model(seed=1).state_dict())
        same(parallel(cp, other, other, whole(LENGTH)), true)
        with pytest.raises(AttentionError, match="an attached model cannot be saved whole"):
            torch.save(mine, io.BytesIO())
        attached.detach()
        cp.reset()
        other(cp.shard(whole(LENGTH)))
        assert cp.report().calls == 0

    loopback(2).run(rank)


def test_a_copy_of_a_model_that_holds_a_session_holds_the_same():
    def rank(world):
        mine = model()
        mine.cp = session(world)
        assert copy.deepcopy(mine).cp is mine.cp

    loopback(2).run(rank)


def test_a_shallow_copy_runs_with_what_is_its_own():
    true = dense(model(seed=1).layers[0], whole(LENGTH), DOCUMENTS)[0]

    def rank(world):
        cp, mine, theirs = session(world), model().layers[0], model(seed=1).layers[0]
        attached = cp.attach(mine)
        other = copy.copy(mine)
        other._modules = dict(theirs._modules)  # as replicas have them
        torch.testing.assert_close(cp.unshard(other(cp.shard(whole(LENGTH))).detach()), true, rtol=1e-12, atol=1e-12)
        hooked = other.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(cp.unshard(other(cp.shard(whole(LENGTH))).detach()), true, rtol=1e-12, atol=1e-12)
        hooked.remove()
        assert cp.report().calls == 2
        attached.detach()
        out = other(whole(LENGTH))
        torch.testing.assert_close(out, theirs(whole(LENGTH)), rtol=1e-12, atol=1e-12)

    loopback(2).run(rank)


def test_detaching_below_somebody_elses_wrapping_is_refused():
    def rank(world):
        cp, mine = session(world), model()
        attached, ours = cp.attach(mine), mine.forward
        mine.forward = lambda x: ours(x)
        with pytest.raises(AttentionError, match="the forward of Stack was wrapped again after attach"):
            attached.detach()

    loopback(1).run(rank)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_modules_are_refused():
    scripted = torch.jit.script(nn.Linear(2, 2))

    def rank(world):
        with pytest.raises(AttentionError, match="what TorchScript calls cannot be seen"):
            session(world).attach(nn.Sequential(scripted), "0")

    loopback(1).run(rank)


# ---- compile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [None, "reentrant", "non-reentrant"])
def test_an_attached_model_compiles_whole_with_its_checkpoints(again):
    true = dense(model(), whole(LENGTH), DOCUMENTS)
    torch._dynamo.reset()

    def rank(world):
        cp, mine = session(world), model(again=again)
        with cp.attach(mine):
            fast = torch.compile(mine, fullgraph=True, backend="aot_eager")
            same(parallel(cp, mine, fast, whole(LENGTH)), true)
        assert cp.report().calls == 2

    loopback(1).run(rank)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@reruns
def test_compiled_layers_that_are_checkpointed_run_again_attached_and_never_with_another_session(again):
    true = dense(model(), whole(LENGTH), DOCUMENTS)
    torch._dynamo.reset()

    def rank(world):
        cp, mine = session(world), model(again=again)
        attached = cp.attach(mine)
        mine.layers = nn.ModuleList(torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in mine.layers)
        out, gradients = parallel(cp, mine, mine, whole(LENGTH))
        same((out, {name.replace("_orig_mod.", ""): g for name, g in gradients.items()}), true)
        assert (cp.report().calls, cp.report().recomputed) == (2, 2)
        loss = mine(whole(LENGTH).requires_grad_()).sum()
        attached.use(cp.with_mask(span.Causal()))
        with pytest.raises(AttentionError, match="runs again with another session than the first time"):
            loss.backward()

    loopback(1).run(rank)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@reruns
def test_compiled_layers_run_again_attached_after_the_end(again):
    true = dense(model(), whole(LENGTH), DOCUMENTS)
    torch._dynamo.reset()

    def rank(world):
        cp, mine = session(world), model(again=again)
        with cp.attach(mine):
            mine.layers = nn.ModuleList(
                torch.compile(each, fullgraph=True, backend="aot_eager") for each in mine.layers
            )
            out = mine(whole(LENGTH).requires_grad_())
        cp.mean_loss(out.square()).backward()
        gradients = {name.replace("_orig_mod.", ""): p.grad for name, p in mine.named_parameters()}
        same((out.detach(), gradients), true)
        assert (cp.report().calls, cp.report().recomputed) == (2, 2)

    loopback(1).run(rank)
    torch._dynamo.reset()

"""Hybrid models: loss, logits and all gradients on ranks are those of one device, or the model is refused by name."""

import copy
import functools
import importlib

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, causal_conv1d_fn
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

import attnspan as span
from attnspan.errors import ModelError
from attnspan.integrations.huggingface import attention_layers, enable, inline_mixers, mixers
from attnspan.integrations.huggingface.mixer_functions import OURS, PADDING
from attnspan.parallel import ContextParallel
from attnspan.testing import loopback, processes
from tests.integrations.families import answers, batch, enabled_answers, gradients, off
from tests.integrations.hybrids import BOUND, BOUNDS, REFUSED, SPECS, hybrid, on_ranks

pytestmark = pytest.mark.usefixtures("quietly")

DAILY = ("qwen3.5", "falcon-h1")
"""A delta rule, and Mamba2 beside attention in one layer."""


def families(*daily):
    """All families, of which some are run every day."""
    return [name if name in daily else pytest.param(name, marks=pytest.mark.slow) for name in SPECS]


# ---- as on one device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", families(*DAILY))
def test_a_hybrid_answers_as_on_one_device(name, ranks):
    given = batch()  # 23 tokens: no number of ranks divides them
    true = answers(hybrid(name), given, use_cache=False)
    for found in on_ranks(name, given, ranks):
        assert off(found, true)[0] < BOUNDS.get(name, BOUND)


@pytest.mark.parametrize("side", ["right", pytest.param("left", marks=pytest.mark.slow), "both"])
@pytest.mark.parametrize("name", families("lfm2"))
def test_rows_with_padding_of_their_own(name, side):
    given, padding = padded(side)
    # transformers' Mamba2 in float32 is 3.5e-5 from float64 where padding is on the left; ranks are 1.3e-5 from it
    one = hybrid(name).double() if name == "mamba2" else hybrid(name)
    true = answers(one, given)
    for found in on_ranks(name, given, 3):
        assert off(found, true, valid=padding)[0] < BOUND


def padded(side):
    given = batch(rows=3)
    padding = torch.ones_like(given["input_ids"])
    left, right = side != "right", side != "left"
    padding[1, : 6 * left] = 0
    padding[1, 23 - 5 * right :] = 0
    padding[2, : 3 * left] = 0
    padding[2, 23 - 14 * right :] = 0
    given["labels"][padding == 0] = -100
    given["labels"][torch.arange(3), padding.argmax(1)] = -100  # what padding on the left would have to tell
    return given | {"attention_mask": padding}, padding


def test_twin_padding_that_mixers_see_shows(monkeypatch):
    given, padding = padded("left")
    true = answers(hybrid("lfm2"), given)
    on_ranks("lfm2", given, 1)  # which compares the function with ours, once
    monkeypatch.setitem(OURS, PADDING, lambda here, hidden_states, attention_mask: hidden_states)
    for found in on_ranks("lfm2", given, 2):
        assert off(found, true, valid=padding)[0] > 100 * BOUND


LENGTHS = ([5, 11, 7], [20, 1, 2])


def packed():
    positions = [torch.cat([torch.arange(length) for length in row]) for row in LENGTHS]
    given = batch() | {"position_ids": torch.stack(positions)}
    return given | {"labels": given["labels"].masked_fill(given["position_ids"] == 0, -100)}


def each_alone(name, given, lengths=LENGTHS):
    """One device's answer for documents one by one: the mean over all their labels."""
    model = hybrid(name)
    documents = [
        {key: value[row : row + 1, start : start + length] for key, value in given.items()}
        for row, own in enumerate(lengths)
        for start, length in zip(torch.tensor([0, *own]).cumsum(0).tolist(), own, strict=False)
    ]
    outs = [model(**each, use_cache=False) for each in documents]
    counts = [(each["labels"][:, 1:] != -100).sum() for each in documents]
    loss = sum(out.loss * count for out, count in zip(outs, counts, strict=True) if count) / sum(counts)
    loss.backward()
    return loss.detach(), torch.cat([out.logits.detach()[0] for out in outs]), gradients(model)


@pytest.mark.parametrize("name", families("qwen3.5"))
def test_documents_answer_as_each_alone(name):
    true = each_alone(name, packed())
    for loss, logits, grads in on_ranks(name, packed(), 3):
        assert off((loss, logits.flatten(0, 1), grads), true)[0] < BOUND


def numbered(given):
    """The same documents by their numbers alone."""
    positions = given["position_ids"]
    return {name: value for name, value in given.items() if name != "position_ids"} | {
        "seq_idx": (positions == 0).cumsum(1).int()
    }


def test_documents_by_the_number_of_each():
    true = each_alone("lfm2", packed())
    for loss, logits, grads in on_ranks("lfm2", numbered(packed()), 3):
        assert off((loss, logits.flatten(0, 1), grads), true)[0] < BOUND


@pytest.mark.parametrize(
    ("ids", "refusal"),
    [
        (torch.zeros(2, 23, dtype=torch.int32), r"^seq_idx, position_ids must describe the same documents, got"),
        (
            torch.zeros(1, 23, dtype=torch.int32),
            r"^seq_idx must be \(2, 23\), a document's number for every token, got",
        ),
    ],
)
def test_other_numbers_of_documents_are_refused(ids, refusal):
    with pytest.raises(ModelError, match=refusal):
        on_ranks("lfm2", packed() | {"seq_idx": ids}, 2)


def test_twin_transformers_itself_mixes_documents():
    loss, logits, grads = answers(hybrid("qwen3.5"), packed(), use_cache=False)
    true = each_alone("qwen3.5", packed())
    assert off((loss, logits.flatten(0, 1), grads), true)[0] > 100 * BOUND


def test_documents_of_a_session_are_those_of_mixers():
    given = batch()
    given["labels"][:, 9] = -100
    true = each_alone("mamba2", given, lengths=([9, 14], [9, 14]))

    def rank(world):
        mask = span.Causal() & span.Documents([9, 14])
        cp = ContextParallel(world, seq_len=23, mask=mask, layout=span.Striped(2))
        return enabled_answers(cp, hybrid("mamba2"), given)

    for loss, logits, grads in loopback(2).run(rank):
        assert off((loss, logits.flatten(0, 1), grads), true)[0] < BOUND


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_mixers_run_again_in_the_pass_they_first_ran_in(reentrant, late):
    """Two batches, one of documents, then backward of both; also when the model was disabled before."""
    givens = [packed(), batch(seed=1, length=17)]
    first, second = each_alone("qwen3.5", givens[0]), answers(hybrid("qwen3.5"), givens[1], use_cache=False)

    def rank(world):
        model = hybrid("qwen3.5")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        handle = enable(model, world)
        outs = [model(**given) for given in givens]
        session = handle.session
        if late:
            handle.disable()
        sum(out.loss for out in outs).backward()
        session.average_gradients(model)
        return gradients(model)

    summed = {name: first[2][name] + second[2][name] for name in first[2]}
    for grads in loopback(2).run(rank):
        assert off((first[0], first[1], grads), (first[0], first[1], summed))[0] < BOUND


def on_a_process(world):
    return enabled_answers(world, hybrid("falcon-h1"), packed())


@pytest.mark.slow
def test_processes_answer_as_one_device():
    true = each_alone("falcon-h1", packed())
    for loss, logits, grads in processes(2).run(on_a_process):
        assert off((loss, logits.flatten(0, 1), grads), true)[0] < BOUND


def on_sharded_weights(world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = hybrid("falcon-h1")
    for layer in model.model.layers:
        fully_shard(layer.mamba, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with enable(model, mesh["cp"]) as handle:
        out = model(**packed())
        out.loss.backward()  # FSDP2 averages
        logits = handle.unshard(out.logits.detach())
    return out.loss.detach(), logits, {name: each.grad.full_tensor() for name, each in model.named_parameters()}


@pytest.mark.slow
def test_a_hybrid_under_fsdp2_answers_as_one_device():
    true = each_alone("falcon-h1", packed())
    for loss, logits, grads in processes(2).run(on_sharded_weights):
        assert off((loss, logits.flatten(0, 1), grads), true)[0] < BOUND


@pytest.mark.slow
def test_a_compiled_hybrid_answers_as_on_one_device():
    givens = [batch(seed=seed) for seed in range(2)]
    true = [answers(hybrid("qwen3.5"), given, use_cache=False) for given in givens]

    def rank(world):  # one: dynamo is not for threads
        model, found = hybrid("qwen3.5"), []
        with enable(model, world) as handle:
            run = torch.compile(model, backend="aot_eager")
            for given in givens:
                model.zero_grad()
                out = run(**given)
                out.loss.backward()
                found.append((out.loss.detach(), handle.unshard(out.logits.detach()), gradients(model)))
            handle.assert_used(passes=2)
        return found

    (found,) = loopback(1).run(rank)
    for one, other in zip(found, true, strict=True):
        assert off(one, other)[0] < BOUND


# ---- beginning and ending --------------------------------------------------------------------------------------------


def test_a_disabled_hybrid_is_as_it_was_and_others_are_left_alone():
    given = batch()
    true = answers(hybrid("qwen3.5"), given, use_cache=False)

    def rank(world):
        model, other = hybrid("qwen3.5"), hybrid("qwen3.5")
        before = [set(vars(module)) for module in model.modules()]
        handle = enable(model, world)
        beside = answers(other, given, use_cache=False)
        found = copy.deepcopy(model)(**given).loss.item()
        handle.disable()
        return found, beside, answers(model, given, use_cache=False), before == [set(vars(m)) for m in model.modules()]

    for found, beside, after, same in loopback(2).run(rank):
        assert abs(found - true[0].item()) < 1e-5
        assert off(beside, true) == off(after, true) == (0.0, "loss")
        assert same


def test_a_hybrid_that_was_changed_while_enabled_can_be_disabled():
    given = batch()
    true = answers(hybrid("qwen3.5"), given, use_cache=False)

    def rank(world):
        model = hybrid("qwen3.5")
        handle = enable(model, world)
        first, _, last = model.model.layers
        del first.linear_attn.forward
        weight = last.linear_attn.conv1d.weight
        last.linear_attn.conv1d = nn.Conv1d(len(weight), len(weight), 4, groups=len(weight), padding=3, bias=False)
        last.linear_attn.conv1d.weight = weight
        handle.disable()
        return answers(model, given, use_cache=False)

    for found in loopback(2).run(rank):
        assert off(found, true) == (0.0, "loss")


def test_an_enabled_hybrid_is_saved_by_its_weights_alone(tmp_path):
    model = hybrid("mamba2")
    loopback(1).run(lambda world: enable(model, world))
    with pytest.raises(ModelError, match=r"^an enabled model cannot be saved whole"):
        torch.save(model, tmp_path / "model.pt")


def test_a_model_without_attention_has_one_run_on_each_rank():
    def rank(world):
        model = hybrid("mamba2")
        handle = enable(model, world)
        model(**batch())
        return [len(runs) for runs in handle.session.stretches], [str(mixer) for mixer in handle.mixers]

    for runs, names in loopback(3).run(rank):
        assert runs == [1]
        assert names[0] == "backbone.layers.0.mixer: causal_conv1d_fn, mamba2_chunk_scan"


# ---- refused ---------------------------------------------------------------------------------------------------------


def running_mean(hidden):
    return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)


class UnknownFunction(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32])
        return running_mean(mixed.transpose(1, 2))


class OfItsOwn(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32])
        return mixed.transpose(1, 2).cumsum(1)


class InAMethod(OfItsOwn):
    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32])
        return self.moved(mixed.transpose(1, 2))

    def moved(self, hidden):
        return F.pad(hidden[:, :-1], (0, 0, 1, 0))


class Static(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32])
        return self.mean(mixed.transpose(1, 2))

    @staticmethod
    def mean(hidden):
        return running_mean(hidden)


def kept_elsewhere(function):
    kept = [function]
    return functools.wraps(function)(lambda *args, **more: kept[0](*args, **more))


class Decorated(Qwen3_5GatedDeltaNet):
    @kept_elsewhere
    def forward(self, hidden_states, **more):
        return causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32]).transpose(1, 2)


class OnAverage(Qwen3_5GatedDeltaNet):
    """Mixes tokens in a way that no check of names finds."""

    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32]).transpose(1, 2)
        return mixed + mixed.mean(1, keepdim=True)


class TwoCallsAway(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32])
        return self.near(mixed.transpose(1, 2))

    def near(self, hidden):
        return self.far(hidden)

    def far(self, hidden):
        return hidden.cumsum(1)


class OfItsBase(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32])
        return super().forward(mixed.transpose(1, 2), **more)


class CallsItsConvolution(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, **more):
        mixed = causal_conv1d_fn(hidden_states.transpose(1, 2), self.conv1d.weight.squeeze(1)[:32])
        short = self.conv1d
        return short(mixed).transpose(1, 2)


class Renamed(nn.Module):
    """A linear attention that nothing but the type of its layer tells of."""

    def __init__(self, wrapped):
        super().__init__()
        self.out = wrapped.out_proj

    def forward(self, hidden_states, **more):
        return hidden_states


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        (UnknownFunction, "(UnknownFunction) has running_mean, a function that is not known here, which is not served"),
        (OfItsOwn, "(OfItsOwn) has a way of its own to mix tokens, mixed.transpose(1, 2).cumsum(1), which is not"),
        (InAMethod, "(InAMethod) has a way of its own to mix tokens, "),
        (Decorated, "(Decorated) has forward(), decorated in a way that is not known here, which is not served"),
        (Static, "(Static) has mean, which is no method and calls running_mean, which is not served"),
        (OnAverage, "(OnAverage) has forward(), which is not code of transformers, which is not served"),
        (TwoCallsAway, "(TwoCallsAway) has forward(), which is not code of transformers, which is not served"),
        (OfItsBase, "(OfItsBase) has forward(), which is not code of transformers, which is not served"),
    ],
)
def test_a_mixer_with_something_unknown_is_refused_by_name(kind, refusal):
    model = hybrid("qwen3.5")
    model.model.layers[2].linear_attn.__class__ = kind
    with pytest.raises(ModelError) as raised:
        loopback(2).run(lambda world: enable(model, world))
    assert str(raised.value).startswith(f"model.layers.2.linear_attn {refusal}")


def test_a_layer_of_a_recurrent_type_without_a_known_mixer_is_refused():
    model = hybrid("qwen3.5")
    model.model.layers[2].linear_attn = Renamed(model.model.layers[2].linear_attn)
    with pytest.raises(ModelError, match=r"layer 2 is of the type 'linear_attention', and has no recurrent mixer that"):
        loopback(2).run(lambda world: enable(model, world))


@pytest.mark.parametrize("name", ["qwen3.5", "minimax"])
def test_a_class_of_mixers_that_was_patched_since_is_refused(name, monkeypatch):
    model = hybrid(name)
    enabled = loopback(1).run(lambda world: enable(model, world))[0]
    enabled.disable()
    cls = type(enabled.mixers[0].module)
    original = cls.forward

    @functools.wraps(original)
    def averaged(self, hidden_states, **more):
        return original(self, hidden_states, **more) + hidden_states.mean(1, keepdim=True)

    monkeypatch.setattr(cls, "forward", averaged)
    with pytest.raises(ModelError, match=rf"\({cls.__name__}\) has forward\(\), which is not code of transformers"):
        loopback(2).run(lambda world: enable(model, world))


def test_a_convolution_that_a_mixer_calls_itself_is_refused_in_that_pass(monkeypatch):
    monkeypatch.setattr(mixers, "HOMES", mixers.HOMES | {"tests"})  # as if a version of transformers did

    def rank(world):
        model = hybrid("qwen3.5")
        model.model.layers[2].linear_attn.__class__ = CallsItsConvolution
        enable(model, world)
        model(**batch())

    with pytest.raises(ModelError, match=r"^model\.layers\.2\.linear_attn calls its Conv1d by itself, on the tokens"):
        loopback(2).run(rank)


def test_a_mixer_that_goes_another_way_is_an_error_of_that_pass():
    def rank(world):
        model = hybrid("qwen3.5")
        enable(model, world)
        model.model.layers[0].linear_attn.forward = lambda hidden_states, **more: hidden_states
        model(**batch())

    with pytest.raises(ModelError, match=r"^model\.layers\.0\.linear_attn did not call causal_conv1d_fn in this pass"):
        loopback(2).run(rank)


def faster(hidden_states, weight, bias=None, activation=None, stride=1):
    return causal_conv1d_fn(hidden_states, weight, bias, activation)


def flipped(hidden_states, weight, bias=None, activation=None, **more):
    return causal_conv1d_fn(hidden_states, weight.flip(1), bias, activation)


@pytest.mark.parametrize(
    ("function", "how"), [(faster, "takes 'stride' in this"), (flipped, "computes something else in this")]
)
def test_a_function_that_a_version_changed_is_refused(function, how, monkeypatch):
    model = hybrid("qwen3.5")
    scope = Qwen3_5GatedDeltaNet.forward.__wrapped__.__globals__
    monkeypatch.setitem(scope, "causal_conv1d_fn", function)
    with pytest.raises(ModelError, match=rf"layers\.0\.linear_attn .* has causal_conv1d_fn, which {how} version of"):
        loopback(2).run(lambda world: enable(model, world))


def test_a_lightning_attention_that_a_version_changed_is_refused(monkeypatch):
    model = hybrid("minimax")
    cls = type(model.model.layers[0].self_attn)
    monkeypatch.setattr("attnspan.integrations.huggingface.inline_mixers._agrees", _proof_of(cls))
    with pytest.raises(
        ModelError, match=r"layers\.0\.self_attn .* has a lightning attention that is not the one known"
    ):
        loopback(2).run(lambda world: enable(model, world))


def _proof_of(cls):
    def get_slope_rate(self, device=None):
        return 2 * cls.get_slope_rate(self, device)

    def decay_factors(self, slope_rate):
        return cls.decay_factors(self, slope_rate / 2)

    changed = type(cls.__name__, (cls,), {"get_slope_rate": get_slope_rate, "decay_factors": decay_factors})
    proof = inline_mixers._agrees.__wrapped__
    return lambda _: proof(changed)


@pytest.mark.parametrize(
    ("home", "name", "method"),
    [
        ("recurrent_gemma", "RecurrentGemmaRglru", "_rnn_scan"),
        ("zaya", "ZayaCCAProjection", "forward"),
    ],
)
def test_twin_a_written_mixer_that_computes_something_else_is_told(home, name, method):
    cls = getattr(importlib.import_module(f"transformers.models.{home}.modeling_{home}"), name)
    assert inline_mixers._agrees(cls)

    def reversed_in_time(self, *args, **kwargs):
        first = next(iter(kwargs))
        return getattr(cls, method)(self, *args, **(kwargs | {first: kwargs[first].flip(1)}))

    assert not inline_mixers._agrees(type(name, (cls,), {method: reversed_in_time}))


def test_twin_a_block_whose_convolution_is_another_is_told():
    assert inline_mixers._agrees(RecurrentGemmaRecurrentBlock)

    def dilated(self, *args):
        RecurrentGemmaRecurrentBlock.__init__(self, *args)
        self.conv_1d = nn.Conv1d(6, 6, 3, groups=6, padding=4, dilation=2)

    other = type("RecurrentGemmaRecurrentBlock", (RecurrentGemmaRecurrentBlock,), {"__init__": dilated})
    assert not inline_mixers._agrees(other)


def test_positions_that_begin_behind_padding_forget_what_was_before():
    """As RecurrentGemma does where they are 0."""
    given, padding = padded("left")
    given["position_ids"] = (padding.cumsum(1) - 1).clamp(min=0).where(padding.bool(), torch.tensor(1))
    true = answers(hybrid("recurrent-gemma"), given, use_cache=False)
    for found in on_ranks("recurrent-gemma", given, 2):
        assert off(found, true, valid=padding)[0] < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_with_other_layers_is_refused_by_name(name):
    model = hybrid(name)
    with pytest.raises(ModelError) as raised:
        loopback(2).run(lambda world: enable(model, world))
    assert REFUSED[name][2] in str(raised.value)


def test_a_cache_is_refused_by_the_name_that_mamba_has_for_it():
    def rank(world):
        model = hybrid("mamba2").eval()
        enable(model, world)
        model(**batch(), cache_params=transformers.DynamicCache())

    with pytest.raises(ModelError, match=r"^use_cache, past_key_values and cache_params: a model over ranks keeps no"):
        loopback(2).run(rank)


def test_a_term_of_the_loss_that_is_a_mean_over_logits_is_refused():
    def rank(world):
        model = hybrid("bamba")
        model.config.z_loss_coefficient = 0.1
        enable(model, world)
        model(**batch())

    with pytest.raises(ModelError, match=r"^z_loss_coefficient must be 0: it adds a mean over the logits of all tok"):
        loopback(2).run(rank)


def test_padding_of_a_session_is_refused():
    model = hybrid("qwen3.5")

    def rank(world):
        mask = span.Causal() & span.KeyPadding([20, 23])
        enable(model, ContextParallel(world, seq_len=23, mask=mask))

    with pytest.raises(
        ModelError, match=r"^cp's mask has KeyPadding\(\[20, 23\]\) in it, which recurrent mixers \(mod"
    ):
        loopback(2).run(rank)


def test_a_forward_of_its_own_is_refused():
    model = hybrid("qwen3.5")
    mixer = model.model.layers[0].linear_attn
    mixer.forward = mixer.forward
    with pytest.raises(ModelError, match=r"layers\.0\.linear_attn .* has forward, a function of its own beside its cl"):
        loopback(2).run(lambda world: enable(model, world))


def test_a_hybrid_is_enabled_once():
    model = hybrid("mamba2")
    loopback(1).run(lambda world: enable(model, world))
    with pytest.raises(ModelError, match=r"^Mamba2ForCausalLM is enabled already; disable\(\) it first"):
        loopback(1).run(lambda world: enable(model, world))


def test_without_ranks_a_hybrid_is_refused_as_before():
    with pytest.raises(ModelError, match=r"layer 0 is of the type 'linear_attention', which is not served; those that"):
        attention_layers(hybrid("qwen3.5"))

"""Models with towers: loss, logits and all gradients, those of towers too, are one device's; the rest is refused."""

import copy

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

from attnspan.errors import ModelError, ShardError
from attnspan.integrations.huggingface import enable
from attnspan.integrations.huggingface.masking import requested_mask
from attnspan.testing import loopback
from tests.integrations.families import BOUND, answers, enabled_answers, gradients, off
from tests.integrations.images import IMAGE, SPECS, batch, family
from tests.integrations.more_images import SELDOM
from tests.processes import spawn
from tests.turns import in_turn

ROWS = {"several": ((2, 11), (6,)), "one row without": ((), (3, 8, 14)), "text": ((), ())}

CASES = [(2, "several"), (3, "one row without"), (2, "text")]


def one_device(name, given):
    return answers(family(name), given, use_cache=False)


def on_ranks(name, given, ranks, **options):
    return loopback(ranks).run(lambda world: enabled_answers(world, family(name), given, **options))


@pytest.mark.parametrize(("name", "case"), in_turn(SPECS, CASES, SELDOM))
def test_a_family_answers_as_on_one_device(name, case):
    ranks, rows = case
    given = batch(name, images=ROWS[rows])
    true = one_device(name, given)
    for found in on_ranks(name, given, ranks):
        assert off(found, true)[0] < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECS)
def test_a_family_answers_as_on_one_device_in_every_case(name, ranks, rows):
    given = batch(name, images=ROWS[rows], length=26, seed=ranks)
    true = one_device(name, given)
    for found in on_ranks(name, given, ranks):
        assert off(found, true)[0] < BOUND


def padded(name):
    given = batch(name, images=((4, 11), (6,), (9,)))
    padding = torch.ones_like(given["input_ids"])
    padding[0, :2], padding[1, 17:], padding[2, :4], padding[2, 20:] = 0, 0, 0, 0
    given["labels"][padding == 0] = -100
    given["labels"][torch.arange(3), padding.argmax(1)] = -100  # what padding on the left would have to tell
    return given | {"attention_mask": padding}, padding


@pytest.mark.parametrize("name", ["gemma3", "qwen2-vl", "qwen3-vl", "qwen3.5", "qwen2-audio"])
def test_rows_with_padding_of_their_own(name):
    given, padding = padded(name)
    true = one_device(name, given)
    for found in on_ranks(name, given, 3):  # of padding nobody asks what it computes
        assert off(found, true, valid=padding)[0] < BOUND


LENGTHS = [13, 7, 3]


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_documents_with_images_answer_as_each_alone(name):
    given = batch(name, images=((2, 14),))
    given["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    given["labels"] = given["labels"].masked_fill(given["position_ids"] == 0, -100)
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    model, total, logits = family(name), 0, []
    count = (given["labels"] != -100).sum()
    for start, stop, image in zip(edges[:-1], edges[1:], (0, 1, None), strict=True):
        part = {key: value[:, start:stop] for key, value in given.items() if key != "pixel_values"}
        pixels = {} if image is None else {"pixel_values": given["pixel_values"][image : image + 1]}
        out = model(**part, **pixels, use_cache=False)
        total = total + out.loss * (part["labels"][:, 1:] != -100).sum() / count
        logits.append(out.logits.detach())
    total.backward()
    true = total.detach(), torch.cat(logits, 1), gradients(model)
    for found in on_ranks(name, given, 2):
        assert off(found, true)[0] < BOUND


def test_gradient_checkpointing_of_towers_and_decoder():
    given = batch("qwen3-vl")
    true = one_device("qwen3-vl", given)

    def rank(world):
        model = family("qwen3-vl")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return enabled_answers(world, model, given)

    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


def trained(world, given):
    """What DDP and FSDP2 answer."""
    found = []
    for wrap in (DistributedDataParallel, sharded):
        model = family("gemma3")
        handle = enable(model, world)
        run = wrap(model)
        out = run(**given)
        out.loss.backward()
        grads = {key: getattr(each.grad, "full_tensor", each.grad.clone)() for key, each in model.named_parameters()}
        found.append((out.loss.detach(), handle.unshard(out.logits.detach()), grads))
    return found


def sharded(model):
    for layer in model.model.language_model.layers:
        fully_shard(layer)
    fully_shard(model.model.vision_tower)
    return fully_shard(model)


def test_ddp_and_fsdp2_average_the_gradients_of_towers():
    given = batch("gemma3")
    true = one_device("gemma3", given)
    for found in spawn(2, trained, given):
        for each in found:
            assert off(each, true)[0] < BOUND


@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_what_towers_return_is_whole(name):
    given = batch(name)
    alone = family(name)(**given)

    def rank(world):
        model = family(name)
        with enable(model, world, outputs="whole"):
            return model(**given)

    for out in loopback(2).run(rank):
        for key in ("image_hidden_states", "rope_deltas"):
            if key in alone:
                torch.testing.assert_close(out[key], alone[key])


# ---- masks -----------------------------------------------------------------------------------------------------------


@drawn(
    st.lists(st.integers(-1, 2), min_size=9, max_size=9),
    st.integers(1, 10),
    st.sampled_from(["no window", "within the window", "beside the window"]),
)
def test_groups_are_those_of_transformers(ids, window, form):
    blocks, near = blockwise_overlay(torch.tensor([ids])), sliding_window_overlay(window)
    made = {
        "no window": or_masks(causal_mask_function, blocks),
        "within the window": and_masks(or_masks(causal_mask_function, blocks), near),
        "beside the window": or_masks(and_masks(near, causal_mask_function), blocks),
    }[form]
    q, k = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    layer_mask = requested_mask(1, 9, 9, mask_function=made)
    assert torch.equal(layer_mask.mask.dense(9), torch.as_tensor(made(0, 0, q, k)))
    assert layer_mask.without_groups.causal


@pytest.mark.parametrize(
    "made",
    [
        or_masks(causal_mask_function, lambda b, h, q, k: q >= 0),
        and_masks(causal_mask_function, or_masks(causal_mask_function, blockwise_overlay(torch.zeros(1, 4).long()))),
        or_masks(lambda b, h, q, k: k <= q, blockwise_overlay(torch.zeros(1, 4).long())),
    ],
)
def test_other_unions_are_refused(made):
    with pytest.raises(ModelError, match="which is not served; those that are: causal or both ways, sliding windows"):
        requested_mask(1, 4, 4, mask_function=made)


# ---- bad input -------------------------------------------------------------------------------------------------------


def refusals(name, given, change=lambda model: None, ranks=2):
    """What a call raises on every rank."""

    def rank(world):
        model = family(name)
        change(model)
        mine = given(world.rank) if callable(given) else given
        try:
            with enable(model, world):
                model(**mine)
        except (ModelError, ShardError) as refusal:
            return str(refusal)

    first, *others = loopback(ranks).run(rank)
    assert first is not None
    assert others == [first] * (ranks - 1)
    return first


def test_images_that_differ_between_ranks():
    def given(rank):
        batched = batch("llava")
        batched["pixel_values"][1, 2, 3, 4] += rank * 1e-6
        return batched

    assert refusals("llava", given).startswith(
        "pixel_values must be the same on all ranks of the group, which hold parts of one batch; rank 1 has other data "
        "than rank 0"
    )


def test_a_tower_that_runs_inside_the_decoder():
    def change(model):
        tower, pixels = model.model.vision_tower, batch("llava")["pixel_values"]
        layer = model.model.language_model.layers[1]
        layer.register_forward_pre_hook(lambda *args: tower(pixels) and None)

    assert refusals("llava", batch("llava"), change) == (
        "model.vision_tower (CLIPVisionModel) runs inside or after the decoder, where a rank has some of the tokens, "
        "which is not served; towers must run before"
    )


def test_a_decoder_that_puts_images_among_tokens_by_itself():
    def rank(world):
        message = "Kosmos2_5ForConditionalGeneration gives its decoder no embeddings, among which those of images would"
        with pytest.raises(ModelError, match=message):
            enable(family("kosmos-2.5"), world)

    loopback(1).run(rank)


def test_what_is_given_to_a_decoder_and_is_not_of_its_tokens():
    def change(model):
        def more(module, args, kwargs):
            return args, kwargs | {"features": torch.zeros(3, 32)}

        model.model.language_model.register_forward_pre_hook(more, with_kwargs=True)

    assert refusals("llava", batch("llava"), change) == (
        "features is given to the decoder, of shape (3, 32), which is not of each of 2 x 23 tokens: it is not known "
        "what of it belongs to a rank's tokens, and not served"
    )


def test_features_that_are_not_of_the_images():
    def change(model):
        def fewer(module, args, kwargs):
            return args, kwargs | {"deepstack_visual_embeds": [each[1:] for each in kwargs["deepstack_visual_embeds"]]}

        model.model.language_model.register_forward_pre_hook(fewer, with_kwargs=True)

    assert refusals("qwen3-vl", batch("qwen3-vl"), change) == (
        "deepstack_visual_embeds must have a row for each of 12 tokens of images, got shape (11, 32)"
    )


class OwnAttention(nn.Module):
    def forward(self, hidden_states, **more):
        return hidden_states.cumsum(1), None


def test_a_decoder_whose_attention_is_outside_of_the_interface():
    def change(model):
        model.model.language_model.layers[1].self_attn = OwnAttention()

    assert refusals("llava", batch("llava"), change) == (
        "model.language_model.layers.1.self_attn (OwnAttention) has a way of its own to mix tokens (it does not ask "
        "the AttentionInterface), which is not served"
    )


def test_a_model_whose_own_code_mixes_tokens_after_its_decoder():
    plain = type(family("llava").model)

    class LlavaModel(plain):
        def forward(self, inputs_embeds=None, **given):
            out = self.language_model(inputs_embeds=inputs_embeds)
            out.last_hidden_state = out.last_hidden_state[:, 1:]
            return out

    def change(model):
        model.model.__class__ = LlavaModel

    assert refusals("llava", batch("llava"), change) == (
        "model (LlavaModel) looks at tokens beside a token's own, out.last_hidden_state[:, 1:], which is not served: a "
        "rank has some of them"
    )


def test_a_decoder_that_runs_by_itself():
    def rank(world):
        model = family("llava")
        with enable(model, world), pytest.raises(ModelError, match="LlamaModel must be called once by the model that"):
            model.model.language_model(inputs_embeds=torch.zeros(1, 9, 32))

    loopback(1).run(rank)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_set_after_enable_is_refused_before_a_layer_runs(implementation):
    # Gemma 3 computes masks while the batch is whole, and would add them to the scores of a rank's tokens
    def rank(world):
        model = family("gemma3")
        with enable(model, world):
            model.set_attn_implementation(implementation)
            with pytest.raises(ModelError) as raised:
                model(**batch("gemma3"))
        return str(raised.value)

    assert loopback(2).run(rank) == 2 * [
        f"the attention of an enabled model was set to {implementation!r}, which sees a rank's tokens alone; disable() "
        "it before set_attn_implementation"
    ]


def test_as_many_tokens_as_embeddings_of_a_layer_are_wide():
    width = SPECS["gemma4"][1]["text_config"]["hidden_size_per_layer_input"]
    given = batch("gemma4", images=((2,), ()), length=width)
    for found in on_ranks("gemma4", given, 2):
        assert off(found, one_device("gemma4", given))[0] < BOUND


def test_images_without_their_tokens_raise_what_transformers_does():
    given = batch("llava")
    given["input_ids"][1] = given["input_ids"][1].masked_fill(given["input_ids"][1] == IMAGE, 1)
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        refusals("llava", given, ranks=1)


def test_a_model_is_as_before_when_it_is_disabled():
    given = batch("gemma3")
    true = one_device("gemma3", given)
    model = family("gemma3")
    tower = model.model.vision_tower.config._attn_implementation

    def rank(world):
        with enable(model, world) as handle:
            assert model.model.vision_tower.config._attn_implementation == tower
            copy.deepcopy(model)(**given)
            handle.assert_used()

    loopback(1).run(rank)
    assert off(answers(model, given, use_cache=False), true)[0] < BOUND

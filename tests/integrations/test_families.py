"""Every family: loss, logits and all gradients on ranks are those of one device with transformers' eager attention."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnspan.errors import ModelError
from attnspan.integrations.huggingface import enable
from attnspan.testing import loopback
from tests.integrations.families import (
    BOUND,
    CAUSAL,
    SEQ2SEQ,
    SPECS,
    answers,
    batch,
    enabled_answers,
    family,
    gradients,
    off,
    on_ranks,
    one_device,
)
from tests.turns import in_turn


@pytest.mark.parametrize(("name", "ranks"), in_turn(SPECS, [4, 2, 1]))
def test_a_family_answers_as_on_one_device(name, ranks):
    given = batch(name)  # 23 tokens: no number of ranks divides them
    true = one_device(name, given)
    for found in on_ranks(name, given, ranks):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize(
    ("name", "side"),
    in_turn(["llama", "gemma3", "gpt-oss", "bert", "llama4", "modernbert", "bart"], ["right", "left", "both"]),
)
def test_rows_with_padding_of_their_own(name, side):
    given, padding = padded(name, side)
    true = one_device(name, given)
    for found in on_ranks(name, given, 3):  # of padding nobody asks what it computes
        assert off(found, true, valid=None if name in SEQ2SEQ else padding)[0] < BOUND


def padded(name, side):
    given = batch(name, rows=3)
    padding = torch.ones_like(given["input_ids"])
    left, right = side != "right", side != "left"
    padding[1, : 6 * left] = 0
    padding[1, 23 - 5 * right :] = 0
    padding[2, : 3 * left] = 0
    padding[2, 23 - 14 * right :] = 0
    if name not in SEQ2SEQ:
        given["labels"][padding == 0] = -100
        given["labels"][torch.arange(3), padding.argmax(1)] = -100  # what padding on the left would have to tell
    return given | {"attention_mask": padding}, padding


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_shift_labels_that_one_device_does_not_look_at_are_refused(name):
    given = batch(name)
    with pytest.raises(ModelError, match=r"shift_labels must not be given: .* does not look at them on one device"):
        on_ranks(name, given | {"shift_labels": given["labels"].flip(1)}, 1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_as_many_rows_as_tokens_with_padding(name):
    given = batch(name, rows=5, length=5)
    given["attention_mask"] = torch.ones(5, 5, dtype=torch.int64).tril(3)
    given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
    true = one_device(name, given)
    for found in on_ranks(name, given, 2):
        assert off(found, true, valid=given["attention_mask"])[0] < BOUND


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "gpt-oss"])
def test_documents_by_their_positions(name):
    given = packed(name)
    true = one_device(name, given, use_cache=False)  # with a cache, transformers does not keep documents apart
    for found in on_ranks(name, given, 2):
        assert off(found, true)[0] < BOUND


LENGTHS = ([5, 11, 7], [20, 1, 2])


def packed(name):
    positions = [torch.cat([torch.arange(length) for length in row]) for row in LENGTHS]
    return batch(name) | {"position_ids": torch.stack(positions)}


@pytest.mark.parametrize("name", ["gpt-oss", "llama", "gemma3"])
def test_documents_answer_as_each_alone(name):
    """Another oracle: no packing at all. gpt-oss of transformers lets documents see each other in eager attention."""
    given = packed(name)
    given["labels"] = given["labels"].masked_fill(given["position_ids"] == 0, -100)
    apart = [
        {key: value[row : row + 1, start : start + length] for key, value in given.items()}
        for row, lengths in enumerate(LENGTHS)
        for start, length in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, strict=False)
    ]
    true = summed(name, apart)
    for found in on_ranks(name, given, 2):
        loss, logits, grads = found
        assert off((loss, logits.flatten(0, 1), grads), true)[0] < BOUND


def summed(name, documents):
    """One device's answer for documents one by one: the mean over all their labels."""
    model = family(name)
    outs = [model(**each, use_cache=False) for each in documents]
    counts = [(each["labels"][:, 1:] != -100).sum() for each in documents]
    loss = sum(out.loss * count for out, count in zip(outs, counts, strict=True) if count) / sum(counts)
    loss.backward()
    grads = {key: value.grad for key, value in model.named_parameters()}
    return loss.detach(), torch.cat([out.logits.detach()[0] for out in outs]), grads


def test_documents_by_running_lengths():
    given = batch(rows=1) | {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS[0]])[None]}
    edges = torch.tensor([0, 5, 16, 23], dtype=torch.int32)
    more = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 11, "max_length_k": 11}
    true = one_device("llama", given, use_cache=False)
    for found in on_ranks("llama", given | more, 2):
        assert off(found, true)[0] < BOUND


def test_labels_that_are_moved_already_are_taken_as_they_are():
    given = batch()
    moved = torch.nn.functional.pad(given["labels"][:, 1:], (0, 1), value=-100)
    true = one_device("llama", given)
    for found in on_ranks("llama", given | {"shift_labels": moved}, 2):
        assert off(found, true)[0] < BOUND


def test_embeddings_in_place_of_tokens():
    model = family("llama")
    given = batch()
    given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids")).detach()
    true = answers(family("llama"), given)
    for found in on_ranks("llama", given, 2):
        assert off(found, true)[0] < BOUND


def test_without_any_label_the_loss_and_its_gradients_are_zero():
    given = batch()
    given["labels"][:] = -100
    for loss, _, grads in on_ranks("llama", given, 2):
        assert loss == 0
        assert all(grad is None or not grad.any() for grad in grads.values())


@pytest.mark.parametrize("name", ["llama", "bert", "bart"])
def test_evaluation_has_the_loss_of_one_device(name):
    given = batch(name)
    with torch.no_grad():
        true = family(name).eval()(**given)

    def rank(world):
        model = family(name).eval()
        enable(model, world, outputs="whole")
        with torch.inference_mode():
            return model(**given)

    for found in loopback(3).run(rank):
        torch.testing.assert_close(found.loss, true.loss)
        torch.testing.assert_close(found.logits, true.logits, rtol=1e-4, atol=1e-4)  # float32 through two layers


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bart"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing_of_both_kinds(name, reentrant):
    given = batch(name)
    true = one_device(name, given)

    def rank(world):
        model = family(name)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return enabled_answers(world, model, given)

    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize("inner", [False, True], ids=["whole", "whole and layers"])
@pytest.mark.parametrize(("name", "reentrant"), in_turn(["llama", "gemma2", "bart"], [True, False]))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_around_the_whole_call(name, reentrant, inner):
    """The call is made again in backward, after another batch has come by."""
    given, other = batch(name), batch(name, seed=1, length=31)
    true = one_device(name, given)

    def rank(world):
        model = family(name)
        if inner:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        needed = torch.zeros((), requires_grad=True)  # the other kind asks for an input with a gradient
        with enable(model, world) as handle:
            out = checkpoint(lambda _: tuple(model(**given).values())[:2], needed, use_reentrant=reentrant)
            logits = handle.unshard(out[1].detach())
            with torch.no_grad():
                last = model(**other).logits
            latest = handle.session
            out[0].backward()
            assert handle.session is latest
            assert handle.unshard(last.detach()).shape[1] == other.get("labels").shape[1]
            handle.session.average_gradients(model)
            handle.assert_used(passes=2)
        return out[0].detach(), logits, gradients(model)

    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_a_checkpoint_holds_is_gone_after_backward(reentrant):
    def rank(world):
        model, needed = family("llama"), torch.zeros(3, requires_grad=True)
        inner = needed * 1.0
        gone = weakref.ref(inner)
        with enable(model, world):
            loss = checkpoint(lambda x: model(**batch()).loss + x.sum(), inner, use_reentrant=reentrant)
            loss.backward()
            del loss, inner
            gc.collect()
            return gone() is None

    assert loopback(2).run(rank) == [True, True]


def no_cap(model):
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None


def no_sinks(model):
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, -1e9)


def wider(model):
    model.config.sliding_window += 1


@pytest.mark.parametrize(("name", "change"), [("gemma2", no_cap), ("gpt-oss", no_sinks), ("mistral", wider)])
def test_twin_what_a_family_is_here_for_shows_in_its_answers(name, change):
    model = family(name)
    change(model)
    loss, logits, grads = answers(model, batch(name))
    true = one_device(name, batch(name))
    assert off((loss, logits, grads), true)[0] > 100 * BOUND

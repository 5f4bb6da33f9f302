"""Enabling ends where it should, leaves other models alone, and refuses what it cannot do, on every rank."""

import copy
import re

import pytest
import torch
import transformers
from torch import nn
from transformers.masking_utils import create_causal_mask

import attnspan as span
from attnspan.errors import AttnspanError, ModelError
from attnspan.integrations.huggingface import enable
from attnspan.parallel import ContextParallel
from attnspan.testing import loopback
from tests import oracle
from tests.integrations.families import (
    BERT as SMALL_BERT,
)
from tests.integrations.families import (
    BOUND,
    NO_DROPOUT,
    SIZES,
    answers,
    batch,
    enabled_answers,
    family,
    gradients,
    off,
    one_device,
)
from tests.processes import spawn


def refusals(ranks, rank):
    """What each rank was told; nobody may go on alone."""

    def told(world):
        try:
            rank(world)
        except AttnspanError as refusal:
            return str(refusal)
        return "no refusal"

    return loopback(ranks).run(told)


def refusal(rank, ranks=2):
    """The one message that all ranks raise."""
    (message,) = set(refusals(ranks, rank))
    return message


def calling(name="llama", train=True, **more):
    """A call of an enabled model with more than its batch."""

    def rank(world):
        model = family(name).train(train)
        enable(model, world)
        model(**batch(name) | more)

    return rank


# ---- beginning and ending --------------------------------------------------------------------------------------------


def test_enable_is_a_name_of_the_library():
    assert span.enable is enable


def test_calling_the_handle_says_to_call_the_model():
    assert refusal(lambda world: enable(family("llama"), world)(**batch()), ranks=1) == (
        "enable() returns a handle, which is not called: call the LlamaForCausalLM itself, model(...), as before "
        "enable()"
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_a_disabled_model_is_as_it_was(implementation):
    given = batch()

    def rank(world):
        model = family("llama")
        model.set_attn_implementation(implementation)
        handle = enable(model, world)
        during = model(**given).logits.shape[1]
        handle.disable()
        handle.disable()
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        model.set_attn_implementation("eager") if implementation == "flex_attention" else None
        return during, model.config._attn_implementation, answers(model, given), sum(hooks), model.generate

    for during, name, found, hooks, generate in loopback(2).run(rank):
        assert during < 23
        assert name == ("sdpa" if implementation == "sdpa" else "eager")
        assert off(found, one_device("llama", given))[0] < BOUND
        assert hooks == 0
        assert generate.__func__ is type(family("llama")).generate


def test_a_model_on_another_implementation_is_served():
    def rank(world):
        model = family("llama")
        model.set_attn_implementation("sdpa")
        return enabled_answers(world, model, batch())

    for found in loopback(2).run(rank):
        assert off(found, one_device("llama", batch()))[0] < BOUND


def test_another_model_of_the_same_config_is_left_alone():
    given = batch()

    def rank(world):
        config = family("llama").config
        one, other = transformers.LlamaForCausalLM(config), family("llama")
        other.config = config
        enable(one, world)
        assert config._attn_implementation == "eager"
        return answers(other, given)

    for found in loopback(2).run(rank):
        assert off(found, one_device("llama", given))[0] < BOUND


def test_two_enabled_models_take_turns():
    """As a policy and its reference do, on different meshes or batches."""

    def rank(world):
        first, second = family("llama"), family("gemma3")
        one, two = enable(first, world), enable(second, world)
        outs = [first(**batch()), second(**batch(seed=1, length=11)), first(**batch(seed=2, length=17))]
        sum(out.loss for out in outs).backward()
        one.session.average_gradients(first)
        two.session.average_gradients(second)
        assert [each.assert_used(count) for each, count in ((one, 2), (two, 1))] == [None, None]
        return [out.loss.item() for out in outs], gradients(second)

    true = [one_device("llama", batch()), one_device("gemma3", batch(seed=1, length=11))]
    true.append(one_device("llama", batch(seed=2, length=17)))
    for losses, grads in loopback(2).run(rank):
        torch.testing.assert_close(losses, [each[0].item() for each in true], rtol=BOUND, atol=0)
        assert off((true[1][0], true[1][1], grads), true[1])[0] < BOUND


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_layers_run_again_in_the_pass_they_first_ran_in(reentrant, late):
    """Two batches of other documents, then backward of both; also when the model was disabled before."""
    givens = [batch(), batch(seed=1, length=17)]
    givens[0]["position_ids"] = torch.cat([torch.arange(9), torch.arange(14)])[None]
    true = [one_device("llama", given, use_cache=False) for given in givens]

    def rank(world):
        model = family("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        handle = enable(model, world)
        outs = [model(**given) for given in givens]
        session = handle.session
        if late:
            handle.disable()
        sum(out.loss for out in outs).backward()
        session.average_gradients(model)
        return gradients(model)

    summed = {name: true[0][2][name] + true[1][2][name] for name in true[0][2]}
    for grads in loopback(2).run(rank):
        assert off((true[0][0], true[0][1], grads), (true[0][0], true[0][1], summed))[0] < BOUND


def test_a_copy_of_an_enabled_model_is_enabled_for_as_long():
    given = batch()
    true = one_device("llama", given)

    def rank(world):
        model = family("llama")
        handle = enable(model, world)
        other = copy.deepcopy(model)
        out = other(**given)
        out.loss.backward()
        handle.session.average_gradients(other)
        found = out.loss.detach(), handle.unshard(out.logits.detach()), gradients(other)
        handle.disable()
        with pytest.raises(ModelError, match=r"^this is a copy of an enabled model that was disabled since"):
            other(**given)
        again = family("llama").requires_grad_(False)
        for parameter in again.parameters():
            parameter.zero_()
        again.load_state_dict(other.state_dict())  # what the error says
        assert torch.equal(again(**given).loss, model(**given).loss)
        return found

    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


def test_an_enabled_model_is_saved_by_its_weights_alone(tmp_path):
    model = family("llama")
    loopback(1).run(lambda world: enable(model, world))
    with pytest.raises(ModelError, match=r"^an enabled model cannot be saved whole"):
        torch.save(model, tmp_path / "model.pt")
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_brings_its_layout_and_hides_what_it_hides():
    given = batch()

    def rank(world):
        mask = span.Causal() & span.Documents([9, 14])
        cp = ContextParallel(world, seq_len=23, mask=mask, layout=span.Striped(2), strategy="gather")
        model = family("llama")
        with enable(model, cp) as handle:
            out = model(**given)
            out.loss.backward()
            handle.session.average_gradients(model)
            assert handle.session is cp  # the same mask: nothing new is planned
            cp.assert_used()  # it knows of two layers
            return out.loss.detach(), handle.unshard(out.logits.detach()), gradients(model)

    # documents of the mask, positions of the row: as transformers computes by a mask of four dims
    allowed = (span.Causal() & span.Documents([9, 14])).dense(23)[None, None].expand(2, 1, 23, 23)
    dense = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    true = one_device("llama", given | {"attention_mask": dense})
    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


@pytest.mark.parametrize(
    ("name", "mask", "message"),
    [
        (
            "bert",
            span.Causal(),
            "cp's mask has Causal() in it, which hides keys that layers of the model see (both ways)",
        ),
        (
            "llama",
            span.SlidingWindow(3),
            "cp's mask has SlidingWindow(3) in it, which hides keys that layers of the model",
        ),
        ("bart", span.Causal(), "cp must be a mesh or a group for an encoder-decoder, whose sequences have masks of"),
        ("mistral", span.Causal(), "no refusal"),
        ("bart", span.Full(), "no refusal"),
    ],
)
def test_a_session_may_not_hide_what_layers_show(name, mask, message):
    def rank(world):
        model = family(name)
        enable(model, ContextParallel(world, seq_len=23, mask=mask))
        model(**batch(name))

    assert refusal(rank).startswith(message)


def test_layers_that_differ_share_a_layout_balanced_over_both():
    def rank(world):
        model = family("gemma3")
        handle = enable(model, world)
        model(**batch("gemma3"))
        return repr(handle.session.masks), [line.calls for line in handle.session.report().lines]

    for masks, calls in loopback(2).run(rank):
        assert masks == "{'causal, window 5': SlidingWindow(4), 'causal': Causal()}"
        assert calls == [1, 1]


def test_passes_are_counted_by_layers():
    def rank(world):
        model = family("bart")
        handle = enable(model, world)
        handle.assert_used(passes=0)
        model(**batch("bart"))
        model(**batch("bart"))
        handle.assert_used(passes=2)
        with pytest.raises(ModelError, match=r"in 6 layers x 1 passes = 6 times since the last reset, it ran 12 times"):
            handle.assert_used()
        handle.reset()
        handle.assert_used(passes=0)

    loopback(2).run(rank)


def test_sessions_know_how_many_layers_attend_by_them():
    def rank(world):
        model = family("gemma3")
        handle = enable(model, world)
        model(**batch("gemma3"))
        handle.session.assert_used()
        handle.session.reset()
        with pytest.raises(AttnspanError, match=r"must have run 1 x 1 = 1 times since the last reset, it ran 0 times"):
            handle.session.assert_used()
        with pytest.raises(AttnspanError, match=r"^layers must be given: how many attention layers the model has$"):
            ContextParallel(world, seq_len=8, mask=span.Full()).assert_used()

    loopback(2).run(rank)


def test_a_layer_that_goes_another_way_is_an_error_of_that_pass():
    def rank(world):
        model = family("llama")
        enable(model, world)
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        model(**batch())

    assert refusal(rank).startswith("1 of 2 attention layers of LlamaForCausalLM asked for attention in this pass;")


def test_a_layer_by_itself_is_refused():
    def rank(world):
        model = family("llama")
        enable(model, world)
        hidden = torch.zeros(1, 4, 32)
        model.model.layers[0](hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(4)[None]))

    assert refusal(rank) == "a layer of an enabled model runs by itself; call the model that was enabled, model(...)"


@pytest.mark.parametrize(
    "part", [lambda model: model.forward, lambda model: model.model], ids=["forward", "base model"]
)
def test_a_way_around_the_model_is_refused(part):
    def rank(world):
        model = family("llama")
        enable(model, world)
        model(**batch())
        part(model)(batch()["input_ids"])

    assert refusal(rank) == "a layer of an enabled model runs by itself; call the model that was enabled, model(...)"


class Adapted(nn.Module):
    """Calls a model as PeftModel does: its forward, and no hooks."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def get_base_model(self):
        return self.inner

    def forward(self, input_ids=None, **more):
        return self.inner.forward(input_ids=input_ids, **more)


def test_a_model_of_adapters_is_enabled_by_what_is_inside():
    def rank(world):
        model = Adapted(family("llama"))
        loss, logits, grads = enabled_answers(world, model, batch())
        return loss, logits, {name.removeprefix("inner."): grad for name, grad in grads.items()}

    for found in loopback(2).run(rank):
        assert off(found, one_device("llama", batch()))[0] < BOUND


def test_positions_by_an_attention_mask_must_be_given_with_padding_on_the_left():
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    given = batch() | {"attention_mask": torch.ones(2, 23).index_fill(1, torch.tensor([0, 1]), 0)}

    def rank(world):
        model = transformers.OPTForCausalLM(config).eval()
        enable(model, world)
        model(**given)

    assert refusal(rank) == (
        "position_ids must be given with padding on the left: OPTForCausalLM counts them by attention_mask"
    )


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [100, torch.tensor(37)])
def test_with_a_count_of_items_the_loss_is_that_of_one_device(count):
    """The sum over the tokens of all ranks, divided by the count, as gradient accumulation wants it."""
    given = batch()
    true = one_device("llama", given, num_items_in_batch=count)

    def rank(world):
        return enabled_answers(world, family("llama"), given | {"num_items_in_batch": count})

    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


def test_a_tuple_is_answered_by_a_tuple():
    def rank(world):
        model = family("llama")
        enable(model, world)
        return model(**batch(), return_dict=False)

    true = family("llama")(**batch(), use_cache=False)
    for loss, logits in loopback(2).run(rank):
        torch.testing.assert_close(loss, true.loss)
        assert logits.shape[1] < 23


def test_hidden_states_come_as_shards_and_whole():
    true = family("bart")(**batch("bart"), output_hidden_states=True)

    def rank(world):
        model = family("bart")
        handle = enable(model, world)
        shards = model(**batch("bart"), output_hidden_states=True)
        return shards, handle.unshard(shards)

    for shards, whole in loopback(2).run(rank):
        assert shards.encoder_last_hidden_state.shape[1] < 23
        torch.testing.assert_close(whole.encoder_last_hidden_state, true.encoder_last_hidden_state)
        torch.testing.assert_close(whole.decoder_hidden_states, true.decoder_hidden_states)


def test_an_output_is_put_together_by_the_layout_of_its_own_batch():
    """Other documents lie otherwise on the ranks; what came before is not mistaken for the latest."""
    first, second = batch(), batch() | {"position_ids": torch.cat([torch.arange(n) for n in (3, 2, 18)])[None]}
    true = family("llama")(**first)

    def rank(world):
        model = family("llama")
        handle = enable(model, world)
        out = model(**first)
        before = handle.session.positions
        model(**second)
        assert handle.session.positions.tolist() != before.tolist()
        return handle.unshard(out), handle.unshard(out.logits)

    for whole, logits in loopback(2).run(rank):
        torch.testing.assert_close(whole.logits, true.logits)
        assert torch.equal(logits, whole.logits)


# ---- refusals of a model ---------------------------------------------------------------------------------------------


def test_a_model_is_enabled_once():
    def rank(world):
        model = family("llama")
        enable(model, world)
        enable(model, world)

    assert refusal(rank) == "LlamaForCausalLM is enabled already; disable() it first"


def test_an_attached_model_is_refused():
    def rank(world):
        model = family("llama")
        ContextParallel(world, seq_len=8, mask=span.Causal()).attach(model)
        enable(model, world)

    assert refusal(rank) == "LlamaForCausalLM is attached to a session already; detach() it first"


BERT = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "bos_token_id")}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES)),
            "LlamaForSequenceClassification: its head looks at more than one token at a time, or is not known; enable "
            "its base model (model.model) and compute the rest from all tokens",
        ),
        (
            lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
            "pooler (BertPooler) looks at one token for all, which is not served; use add_pooling_layer=False",
        ),
        (
            lambda: layer_dropping(),
            "decoder_layerdrop must be 0: ranks would leave out different layers, got 0.1",
        ),
    ],
    ids=["class of a text", "pooler", "layerdrop"],
)
def test_a_model_is_refused_for_what_it_is(model, message):
    assert refusal(lambda world: enable(model(), world), ranks=1) == message


def layer_dropping():
    model = family("bart")
    model.config.decoder_layerdrop = 0.1
    return model


def test_a_session_of_several_masks_is_refused():
    def rank(world):
        cp = ContextParallel(world, seq_len=8, mask={"a": span.Causal(), "b": span.Full()})
        enable(family("llama"), cp)

    assert refusal(rank).startswith("cp must have one mask, which is for all layers")


def test_a_refused_model_is_left_as_it_was():
    class Counting(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, **more):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **more)

    model = Counting(transformers.LlamaConfig(**SIZES, attn_implementation="sdpa"))
    config = model.config
    assert refusal(lambda world: enable(model, world), ranks=1) == (
        "Counting takes no position_ids and would count each rank's tokens from 0, which is not served"
    )
    assert model.config is config
    assert config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "attnspan_binding") or module._forward_pre_hooks for module in model.modules())


def test_documents_of_an_encoder_decoder_are_refused():
    more = {"cu_seq_lens_q": torch.tensor([0, 9, 23])}
    given = {name: value[:1] for name, value in batch("bart").items()}
    message = refusal(lambda world: calling("bart", **given, **more)(world))
    assert message == "documents in the sequences of an encoder-decoder are not served: give each a row of its own"


# ---- refusals of a call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"output_attentions": True}, "output_attentions must be False: no rank has the weights of attention"),
        (
            {"use_cache": True},
            "use_cache, past_key_values and cache_params: a model over ranks keeps no cache; leave them out.",
        ),
        (
            {"past_key_values": transformers.DynamicCache()},
            "use_cache, past_key_values and cache_params: a model over ranks keeps",
        ),
        ({"logits_to_keep": 1}, "logits_to_keep must be 0: which logits are the last is not the same on every rank"),
        ({"attention_mask": torch.ones(2, 1, 23, 23)}, "attention_mask must be a tensor of (B, S) that marks padding"),
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask must be (2, 23), the whole batch's, got shape (2, 5)"),
        ({"attention_mask": torch.ones(2, 23) * 2}, "attention_mask must be ones and zeros"),
        (
            {"attention_mask": torch.ones(2, 23).index_fill(1, torch.tensor([4]), 0)},
            "attention_mask has holes in row 0; only padding at the ends of a row is served",
        ),
        (
            {"attention_mask": torch.ones(2, 23).index_fill(1, torch.tensor([0, 1]), 0)},
            "labels: in row 0 padding on the left would predict a label, that of the first token; make it -100",
        ),
        (
            {"attention_mask": torch.ones(2, 23), "position_ids": torch.arange(23)[None] % 10},
            "position_ids start again inside a row, which means documents, and attention_mask is given as well",
        ),
        ({"position_ids": torch.arange(5)[None]}, "position_ids must be (B, 23), the whole batch's, got shape (1, 5)"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 23])},
            "cu_seq_lens_q must be the running sum of lengths in a batch of one",
        ),
        ({"input_ids": None}, "input_ids must be a tensor of (B, S), or inputs_embeds of (B, S, D), got NoneType"),
        ({"labels": torch.ones(2)}, "labels must be a tensor of (B, S), got shape (2,)"),
        ({"encoder_hidden_states": torch.ones(2)}, "encoder_hidden_states must not be given"),
        ({"ignore_index": 7}, "ignore_index must be -100, which labels are to have, got 7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_call_is_refused_on_every_rank(more, message):
    assert refusal(calling(**more)).startswith(message)


def test_the_balance_of_experts_is_refused():
    assert refusal(calling("mixtral", output_router_logits=True)).startswith("output_router_logits must be False")


def test_labels_of_a_loss_that_is_not_known_are_refused():
    def rank(world):
        model = family("llama").model
        enable(model, world)
        model(**batch())

    assert refusal(rank).startswith("labels: the loss of LlamaModel is not one that is served over ranks")


def test_a_loss_of_ones_own_is_refused_with_labels():
    def rank(world):
        model = family("llama")
        model.loss_function = lambda *args, **kwargs: torch.zeros(())
        enable(model, world)
        model(**batch())

    assert refusal(rank).startswith("labels: the loss of LlamaForCausalLM is not one that is served over ranks")


def test_a_sequence_shorter_than_the_ranks_is_refused():
    def rank(world):
        model = family("llama")
        enable(model, world)
        model(**batch(length=3))

    assert "a sequence of 3 tokens leaves none for rank" in refusal(rank, ranks=4)


def test_ranks_with_other_data_are_told():
    def rank(world):
        model = family("llama")
        enable(model, world)
        model(**batch(seed=ContextParallel(world, seq_len=2, mask=span.Full()).rank))

    said = refusal(rank)
    assert "must be the same on all ranks of the group, which hold parts of one batch" in said
    assert "or by SpanTrainer in place of Trainer" in said


def test_a_handle_says_what_it_is():
    def rank(world):
        handle = enable(family("llama"), world)
        before = repr(handle)
        handle.disable()
        return before, repr(handle)

    [(before, after), _] = loopback(2).run(rank)
    assert before == "Enabled(LlamaForCausalLM over 2 ranks; attention layers: 2, recurrent mixers: 0)"
    assert after.endswith("; disabled)")


DROPPING = {"Llama": {"attention_dropout": 0.3}, "Bert": NO_DROPOUT | {"attention_probs_dropout_prob": 0.3}}


def dropping(name):
    """A model that drops attention weights, in training."""
    torch.manual_seed(0)
    kind, sizes = (
        (transformers.LlamaForCausalLM, SIZES) if name == "Llama" else (transformers.BertForMaskedLM, SMALL_BERT)
    )
    return kind(kind.config_class(**sizes | DROPPING[name])).train()


def dropped_on_process(world):
    found = {}
    for name in DROPPING:
        for again in (False, True):
            model = dropping(name)
            if again:
                model.gradient_checkpointing_enable()
            torch.manual_seed(5)
            found[name, again] = enabled_answers(world, model, batch())
    return found


@pytest.mark.parametrize("name", DROPPING)
def test_the_law_of_dropout_can_fail(name, monkeypatch):
    """Another seed is another answer."""
    found, other = (by_oracle(name, seed, monkeypatch) for seed in (5, 6))
    assert off(found, other)[0] > 100 * BOUND


def by_oracle(name, seed, monkeypatch):
    """A model on one device with transformers' own attention, whose layers drop what the oracle does."""
    torch.manual_seed(seed)
    model = dropping(name)
    model.set_attn_implementation("eager")
    torch.manual_seed(seed)

    def dropout(weights, p=0.5, training=True, inplace=False):
        if not p:
            return weights
        return weights * oracle.dropped(p, int(torch.randint(2**63 - 1, ())), tuple(weights.shape)).float()

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "dropout", dropout)
        return answers(model, batch())


def test_dropout_of_attention_in_training_is_that_of_one_device(monkeypatch):
    true = {name: by_oracle(name, 5, monkeypatch) for name in DROPPING}
    for told in spawn(2, dropped_on_process, timeout=120):
        for (name, _), found in told.items():
            assert off(found, true[name])[0] < BOUND


def test_ranks_with_different_weights_are_told_so_at_the_first_batch():
    def rank(world):
        model = family("llama")
        if world.rank == 1:
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
        enable(model, world)
        model(**batch())

    assert refusal(rank).startswith(
        "weights or buffers differ between rank 0 and ranks [1]; every rank must have the same: load one checkpoint, or"
    )


def test_weights_are_compared_once_and_parts_of_them_never(monkeypatch):
    from attnspan.parallel.checksum import Content, Weights, checksum

    told = []
    monkeypatch.setattr(Weights, "content", lambda self: told.append(self) or Content(0, 0))

    def rank(world):
        model = family("llama")
        enable(model, world)
        for _ in range(3):
            model(**batch())

    loopback(2).run(rank)
    assert len(told) == 2

    class Part(torch.Tensor):
        def to_local(self):
            return self

    layer = nn.Linear(2, 2)
    monkeypatch.undo()
    assert Weights(layer).content() == (checksum([layer.weight, layer.bias]), checksum([]))
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Part))
    assert Weights(layer).content() == (checksum([layer.bias]), checksum([layer.weight]))
    layer._is_fsdp_managed_module = True  # as FSDP1 marks what it holds in parts that look like wholes
    assert Weights(layer).content() == (checksum([]), checksum([layer.weight, layer.bias]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_sums_of_bits_tell_weights_of_any_dtype_apart(dtype):
    from attnspan.parallel.checksum import Weights

    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.arange(6.0).view(2, 3).to(dtype).t(), requires_grad=False)
    before = Weights(layer).content()
    assert Weights(copy.deepcopy(layer)).content() == before
    layer.weight.data = (torch.arange(6.0).view(2, 3) + torch.tensor([0.0, 1.0, 0.0])).to(dtype).t()
    assert Weights(layer).content() != before


def test_generation_is_refused():
    def rank(world):
        model = family("llama")
        enable(model, world)
        model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)

    assert refusal(rank).startswith("generate() does not run on an enabled model")


def test_a_module_that_was_never_enabled_is_told():
    loopback(1).run(lambda world: enable(family("llama"), world))  # the name is known from here on
    model = family("llama")
    model.set_attn_implementation("attnspan")
    with pytest.raises(
        ModelError, match=r"^LlamaAttention asks for attnspan's attention, and its model was not enabled"
    ):
        model(**batch())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda attn: setattr(attn, "scaling", 0.5),
            "scaling must be 0.3535533905932738, as when the model was enabled",
        ),
        (lambda attn: setattr(attn, "is_causal", False), None),
    ],
    ids=["scaling", "an attribute that nobody reads"],
)
def test_a_layer_that_changed_since_is_refused(change, message):
    def rank(world):
        model = family("llama")
        enable(model, world)
        change(model.model.layers[1].self_attn)
        model(**batch())

    found = refusal(rank, ranks=1)
    assert found == "no refusal" if message is None else message in found


def test_a_mask_that_is_more_than_a_window_is_refused():
    """As of models that let tokens of an image see each other."""

    class Odd(transformers.LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, position_ids=None, **more):
            embeds = self.model.embed_tokens(input_ids)
            create_causal_mask(self.config, embeds, attention_mask, None, or_mask_function=lambda b, h, q, k: q < 3)
            return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **more)

    whole = Odd(transformers.LlamaConfig(**SIZES))

    def rank(world):
        model = copy.deepcopy(whole)
        enable(model, world)
        model(input_ids=batch()["input_ids"])

    assert re.match(
        r"the model asks for a mask by test_\S*<lambda>, which is not served; those that are", refusal(rank)
    )


# ---- keys that are kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("session", "asked", "keeps"), [(None, None, True), (None, False, False), (True, None, True), (True, False, False)]
)
def test_keys_are_kept_as_asked_for(name, session, asked, keeps):
    given = batch(name)

    def rank(world):
        cp = world if session is None else span.ContextParallel(world, seq_len=23, mask=span.Full(), keep_keys=session)
        model = family(name)
        with enable(model, cp, keep_keys=asked) as handle:
            out = model(**given)
            out.loss.backward()
            handle.session.average_gradients(model)
            lines = handle.session.report().lines
            assert [line.from_kept for line in lines] == [line.backwards if keeps else 0 for line in lines]
            return out.loss.detach(), handle.unshard(out.logits.detach()), gradients(model)

    for found in loopback(2).run(rank):
        assert off(found, one_device(name, given))[0] < BOUND


def test_other_values_of_keep_keys_are_refused():
    def rank(world):
        enable(family("llama"), world, keep_keys="yes")

    assert refusal(rank) == "keep_keys must be True, False or 'auto', got 'yes'"

"""Families that nobody looked at one by one: each says what `model.generate` says, or no engine is made for it."""

import copy

import pytest
import torch
import transformers

from attnspan import Engine, SamplingParams
from attnspan.errors import EngineError, ModelError
from attnspan.testing import loopback
from tests.engine.models import greedy, prompts
from tests.integrations.families import SIZES, SPECS
from tests.integrations.test_more_families import HEAD, MASKED, SERVED, WINDOW, built
from tests.integrations.tiny import tiny

pytestmark = pytest.mark.usefixtures("quietly")

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MORE = {
    "JetMoe": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "kv_channels": 8}
    | {"num_key_value_heads": 2, "max_position_embeddings": 128, **EXPERTS, "eos_token_id": None},
    # windows that are in their masks alone
    "Qwen2Moe": SIZES
    | WINDOW
    | TWO_KINDS
    | {
        "use_sliding_window": True,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Phimoe": SIZES | WINDOW | EXPERTS,
    "Llama4Text": SPECS["llama4"][2] | {"num_hidden_layers": 4},
}
GENERATES = {name: sizes for name, sizes in (SERVED | MORE).items() if name not in (*MASKED, "MBart", "Pegasus")}
REFUSED = {
    "Doge": (SIZES, "the model reads 'dtype' of its mask, to change it by itself; such masks are not served"),
}


def model_of(name, sizes):
    model = built(name, sizes).requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def engine(model, **options):
    return Engine(model, **({"pages": 40, "page_size": 4, "max_tokens": 16, "max_sequences": 4} | options))


FEW = (
    "DiffLlama",
    "StableLm",
    "Nemotron",
    "JetMoe",
    "Qwen2Moe",
    "Phimoe",
    "Llama4Text",
)  # each has something that no other has


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in GENERATES]
)
def test_a_family_says_what_it_says_alone(name):
    model, asked = model_of(name, GENERATES[name]), [prompt_of(length) for length in (33, 5, 20)]
    true = [greedy(model, prompt, 8) for prompt in asked]
    params = SamplingParams(max_new_tokens=8)
    assert [answer.token_ids for answer in engine(model).generate(asked, params)] == true
    over_ranks = loopback(2).run(lambda w: engine(model, mesh=w, context_parallel_from=8).generate(asked, params))
    assert [[answer.token_ids for answer in each] for each in over_ranks] == [true, true]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_asks_for_something_else_than_its_layers_say_is_refused_when_the_engine_is_made(name):
    sizes, why = REFUSED[name]
    model = model_of(name, sizes)
    before = model.config._attn_implementation
    for _ in range(2):
        with pytest.raises(ModelError, match=why):
            engine(model)
    assert model.config._attn_implementation == before


def test_a_mask_that_comes_later_is_refused_too():
    model = model_of("Olmo2", SIZES)
    one = engine(model)
    hook = model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, given, named: (given, named | {"attention_mask": torch.zeros(1)}), with_kwargs=True
    )
    with pytest.raises(ModelError, match="Olmo2Attention is given a mask by its model, and an engine knows of none"):
        one.generate([[5, 6]])
    hook.remove()
    assert one.generate([[5, 6]], SamplingParams(max_new_tokens=3))[0].token_ids == greedy(model, [5, 6], 3)


def test_a_model_whose_layers_were_changed_is_looked_at_again():
    model = model_of("Cohere2", SERVED["Cohere2"])
    engine(model)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None  # and its mask has a window still
    asked = prompt_of(33)  # what a mask says is what counts
    assert engine(model).generate([asked], SamplingParams(max_new_tokens=8))[0].token_ids == greedy(model, asked, 8)
    model.model.layers[0].self_attn.sliding_window = 3
    with pytest.raises(
        ModelError, match=r"is causal, window 3, and the model gives it a mask that is causal, window 5"
    ):
        engine(model)


def test_positions_are_those_of_the_part_that_speaks():
    """Of a model with several configs; frequencies that go by length are served as far as they do not."""
    rope = {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    text = SIZES | HEAD | WINDOW | TWO_KINDS | {"global_head_dim": 8, "num_kv_shared_layers": 0}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "max_position_embeddings": 16}
    config = transformers.Gemma4Config(
        text_config=text | {"rope_parameters": rope}, vision_config=None, audio_config=None
    )
    model = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    one = engine(model.requires_grad_(False))
    assert one.max_length == 16
    with pytest.raises(EngineError, match="the model has positions for 16 tokens; the prompt has 30 and"):
        one.generate([prompt_of(30)])


def test_a_model_that_gives_all_logits_is_served():
    model = copy.deepcopy(model_of("Olmo2", SIZES))
    forward, asked = model.forward, [prompt_of(33), prompt_of(5)]
    true = [greedy(model, prompt, 8) for prompt in asked]
    model.forward = lambda *args, logits_to_keep=0, **named: forward(*args, **named)
    assert [answer.token_ids for answer in engine(model).generate(asked, SamplingParams(max_new_tokens=8))] == true


def test_a_model_that_looks_at_other_tokens_without_attention_is_refused():
    model = copy.deepcopy(model_of("Olmo2", SIZES))
    mlp = model.model.layers[0].mlp

    class Shifted(type(mlp)):
        def forward(self, x):
            return super().forward(x) + torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))

    mlp.__class__ = Shifted
    wanted = r"model.layers.0.mlp \(Shifted\) looks at tokens beside a token's own, .*, which an engine does not serve"
    with pytest.raises(ModelError, match=wanted):
        engine(model)


def test_a_model_that_gives_other_logits_is_refused():
    model = copy.deepcopy(model_of("Olmo2", SIZES))
    forward = model.forward

    def three(*args, **named):
        out = forward(*args, **named)
        out.logits = out.logits.expand(1, 3, -1)
        return out

    model.forward = three
    with pytest.raises(ModelError, match="gives logits of 3 tokens where logits_to_keep asks for one"):
        engine(model)


def test_layers_of_different_scales_with_sinks_over_ranks():
    """Prompts under context parallelism attend as their layer says, each with all that it wants."""
    name, sizes = "GptOss", SIZES | HEAD | EXPERTS | {"sliding_window": 5, "rope_parameters": None}
    model = model_of(name, sizes)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.scaling = 0.3 + 0.4 * number
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    asked = [prompt_of(length) for length in (33, 20)]
    true = [greedy(model, prompt, 8) for prompt in asked]
    params = SamplingParams(max_new_tokens=8)
    for answers in loopback(2).run(lambda w: engine(model, mesh=w, context_parallel_from=8).generate(asked, params)):
        assert [answer.token_ids for answer in answers] == true


def test_a_chunked_layer_gives_back_the_pages_of_earlier_chunks():
    name, sizes = (
        "Llama4Text",
        SPECS["llama4"][2] | {"layer_types": ["chunked_attention"] * 2, "no_rope_layers": [1, 1]},
    )
    model = model_of(name, sizes)
    prompt = prompt_of(9)
    one = engine(model, pages=6, max_sequences=1, max_tokens=4)  # of 4 tokens
    answer = one.generate([prompt], SamplingParams(max_new_tokens=40))[0]
    assert answer.token_ids == greedy(model, prompt, 40)


def test_an_enabled_model_is_refused():
    from attnspan.integrations.huggingface import enable

    model = model_of("Olmo2", SIZES)
    with (
        enable(model, loopback(1).run(lambda world: world)[0]),
        pytest.raises(ModelError, match=r"model is enabled for training over ranks; call disable\(\)"),
    ):
        engine(model)


def test_a_model_that_was_enabled_meanwhile_is_served_as_before():
    """It has another config by then."""
    from attnspan.integrations.huggingface import enable

    model = model_of("Olmo2", SIZES)
    asked, params = [prompt_of(33), prompt_of(5)], SamplingParams(max_new_tokens=8)
    true, before = [greedy(model, prompt, 8) for prompt in asked], engine(model)
    assert [answer.token_ids for answer in before.generate(asked, params)] == true
    with enable(model, loopback(1).run(lambda world: world)[0]):
        pass
    for one in (before, engine(model)):
        assert [answer.token_ids for answer in one.generate(asked, params)] == true


def prompt_of(length):
    return [t % 60 + 2 for t in prompts([length])[0]]


def test_a_model_whose_layers_attend_elsewhere_by_now_is_refused():
    model = model_of("Olmo2", SIZES)
    one = engine(model)
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)  # as if it were not asked
    with pytest.raises(ModelError, match="1 of 2 layers attended over pages in a call of the model; it has changed"):
        one.generate([[5, 6]])
    one.check()


def test_a_model_whose_layers_attend_in_another_order_by_now_is_refused():
    model = model_of("Olmo2", SIZES)
    one = engine(model)
    first, second = (layer.self_attn for layer in model.model.layers)

    def other(module, given, named):  # as code that decides anew in every pass
        vars(module)["forward"] = lambda *args, **more: type(module).forward(second, *args, **more)

    hook = first.register_forward_pre_hook(other, with_kwargs=True)
    with pytest.raises(ModelError, match="Olmo2Attention attends as number 0 of a pass, unlike when its model was pro"):
        one.generate([[5, 6]])
    hook.remove()
    del vars(first)["forward"]
    assert one.generate([[5, 6]], SamplingParams(max_new_tokens=3))[0].token_ids == greedy(model, [5, 6], 3)


def test_another_thread_may_not_call_a_model_that_is_being_served():
    from attnspan.integrations.huggingface.serving_binding import attention_over_pages

    model = model_of("Olmo2", SIZES)
    engine(model)
    with (
        attention_over_pages(model),
        pytest.raises(EngineError, match="Olmo2Attention was called while an engine serves its model"),
    ):
        model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("moshi", "model.layers.0.self_attn sees all keys, and the cache of MoshiForCausalLM keeps a window of"),
        ("musicgen", "MusicgenForCausalLM takes no position_ids and would count the tokens of a step from 0"),
    ],
)
def test_what_generate_would_say_differently_is_refused(name, why):
    with pytest.raises(ModelError, match=why):
        engine(tiny("causal", name))

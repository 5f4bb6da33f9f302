"""Pages that hold latents say what a model says without pages, and a token takes 1/71 of the memory in DeepSeek-V3."""

import pytest
import torch
import transformers
from torch import nn

from attnspan import Engine, SamplingParams
from attnspan.engine import LatentHeads
from attnspan.errors import ModelError, PageError
from attnspan.integrations.huggingface import latents
from attnspan.integrations.huggingface.transformers_model import TransformersModel
from attnspan.paged import PageAllocator, PageLayer, PagePool
from attnspan.testing import loopback
from tests.engine.models import greedy, prompts
from tests.integrations.families import SIZES
from tests.integrations.test_more_families import LOW_RANK, built

pytestmark = pytest.mark.usefixtures("quietly")

MLA = SIZES | LOW_RANK | {"num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
FAMILIES = {
    "DeepseekV3": MLA | {"first_k_dense_replace": 2},
    "DeepseekV2": MLA | {"first_k_dense_replace": 2},
    "Mistral4": MLA | EXPERTS,
    "Glm4MoeLite": MLA | EXPERTS,
    "MiniCPM3": MLA,
    "Youtu": MLA,
    "LongcatFlash": MLA
    | {"head_dim": 8, "num_layers": 1, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "zero_expert_num": 2},
    "AXK1": MLA | EXPERTS | {"first_k_dense_replace": 1},
}


def model_of(name):
    model = mistral4() if name == "Mistral4" else built(name, FAMILIES[name])
    model.requires_grad_(False)
    for name, weight in model.named_parameters():  # so that what layers attend to decides the tokens
        weight.mul_(4 if "o_proj" in name or "q_b_proj" in name or "kv_b_proj" in name else 1)
    model.generation_config.eos_token_id = None
    return model


def mistral4():
    """It has no head for text alone that AutoModelForCausalLM knows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.Mistral4Config(**FAMILIES["Mistral4"])
        return transformers.Mistral4ForCausalLM(config).eval()


def engine(model, **options):
    return Engine(model, **({"pages": 40, "page_size": 4, "max_tokens": 16, "max_sequences": 4} | options))


def said(answers):
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_over_latents_what_it_says_alone(name):
    model, asked = model_of(name), [prompt_of(length) for length in (33, 5, 20)]
    true, params = [greedy(model, prompt, 8) for prompt in asked], SamplingParams(max_new_tokens=8)
    ours = engine(model)
    assert said(ours.generate(asked, params)) == true
    (pool,) = ours._pools.pools
    assert all(layer.values_in_keys and layer.kv_heads == 1 for layer in pool.layers)
    over_ranks = loopback(2).run(lambda w: engine(model, mesh=w, context_parallel_from=8).generate(asked, params))
    assert [said(each) for each in over_ranks] == [true, true]


def prompt_of(length):
    return [token % 60 + 2 for token in prompts([length])[0]]


def test_prefixes_forks_and_preempted_samples_are_as_with_keys():
    model = model_of("DeepseekV3")
    begin = prompt_of(17)
    asked = [begin + prompt_of(length) for length in (3, 6, 2, 9)]
    true, params = [greedy(model, prompt, 12) for prompt in asked], SamplingParams(max_new_tokens=12)
    for options in ({}, {"pages": 16}, {"pages": 16, "host_pages": 24}, {"max_tokens": 5}):
        ours = engine(model, **options)
        assert said(ours.generate(asked, params)) == true
        assert said(ours.generate(asked, params)) == true  # on found pages
    sampled = SamplingParams(max_new_tokens=6, temperature=0.8, n=3, seed=5)
    over_keys = Engine(over_keys_alone(model), pages=40, page_size=4)
    assert samples(engine(model).generate([begin], sampled)) == samples(over_keys.generate([begin], sampled))


def over_keys_alone(model):
    return TransformersModel(model, latents=False)


def samples(answers):
    return [[sample.token_ids for sample in answer.continuations] for answer in answers]


def test_memory_of_a_token_is_that_of_its_latent():
    """Of DeepSeek-V3's attention: 61 layers of 576 numbers, where keys and values are 40,960."""
    model = model_of("DeepseekV3")
    of_latents, of_keys = (TransformersModel(model, latents=which).info().layers[0] for which in (True, False))
    assert (of_latents.kv_heads, of_latents.head_dim, of_latents.value_dim) == (1, 24, 16)
    assert (of_keys.kv_heads, of_keys.head_dim, of_keys.value_dim) == (4, 16, 12)
    pool = PagePool(PageAllocator(num_pages=8, page_size=4), [PageLayer(1, 576, 512, values_in_keys=True)])
    assert "0.1 MiB" in repr(pool)  # 8 x 4 x 576 x 4 bytes, and no more
    key = torch.randn(3, 1, 576)
    plan = pool.plan(max_sequences=1, max_tokens=8, max_length=16).step([(pool.allocator.add(), 3)])
    pool.write(0, key, key[..., :512], plan)
    query = torch.randn(3, 2, 576)
    out = pool.attend(0, query, plan, scale=0.1)
    scores = (query.transpose(0, 1) @ key[:, 0].T * 0.1).masked_fill(~torch.ones(3, 3).tril().bool(), -torch.inf)
    torch.testing.assert_close(out, (scores.softmax(-1) @ key[:, 0, :512]).transpose(0, 1))


@pytest.mark.parametrize("more", [{"value_dim": 9}, {"value_dim": 4, "quantised": torch.int8}], ids=str)
def test_values_that_do_not_fit_into_keys_are_refused(more):
    with pytest.raises(PageError, match="values_in_keys needs a value_dim of at most head_dim, and no quantised, got"):
        PageLayer(1, 8, values_in_keys=True, **more)


def test_a_layer_that_does_more_than_its_matrix_keeps_keys_and_is_right():
    model = model_of("DeepseekV3")
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj = nn.utils.parametrizations.weight_norm(attention.kv_b_proj)  # no plain Linear any more
    ours, asked = engine(model), [prompt_of(9)]
    assert [layer.latent for layer in TransformersModel(model).info().layers] == [False, True]
    assert said(ours.generate(asked, SamplingParams(max_new_tokens=6))) == [greedy(model, asked[0], 6)]


def test_a_method_of_somebody_else_is_not_taken_for_one_that_is_known(monkeypatch):
    model = model_of("DeepseekV3")
    attention = model.model.layers[0].self_attn
    real = type(attention).expand_kv
    attention.expand_kv = lambda kv_nope, k_rot: real(attention, 2 * kv_nope, k_rot)  # a patch of the user's
    ours, asked = engine(model), [prompt_of(9)]
    assert [layer.latent for layer in TransformersModel(model).info().layers] == [False, True]
    assert said(ours.generate(asked, SamplingParams(max_new_tokens=6))) == [greedy(model, asked[0], 6)]
    assert "expand_kv" in vars(attention)
    assert "expand_kv" not in vars(model.model.layers[1].self_attn), "nothing is left of what served"
    monkeypatch.setattr(latents.LatentSource, "agrees", lambda self: False)
    assert not any(layer.latent for layer in TransformersModel(model).info().layers)


def test_a_matrix_that_is_exchanged_while_an_engine_serves_is_refused():
    model = model_of("DeepseekV3")
    ours, attention = engine(model), model.model.layers[0].self_attn
    ours.generate([prompt_of(5)], SamplingParams(max_new_tokens=2))
    attention.kv_b_proj = nn.Sequential(attention.kv_b_proj)
    with pytest.raises(ModelError, match="kv_b_proj has changed since the engine was made: make a new one"):
        ours.generate([prompt_of(5)], SamplingParams(max_new_tokens=2))


def test_two_engines_serve_one_model_over_latents_and_over_keys_in_turn():
    model, params = model_of("DeepseekV3"), SamplingParams(max_new_tokens=6)
    asked = [prompt_of(9), prompt_of(4)]
    true = [greedy(model, prompt, 6) for prompt in asked]
    one, other = engine(model), engine(TransformersModel(model, latents=False))
    for each in (one, other, one, other):
        assert said(each.generate(asked, params)) == true
    assert one._pools.pools[0].layers[0].values_in_keys
    assert not other._pools.pools[0].layers[0].values_in_keys


# ---- planted defects -------------------------------------------------------------------------------------------------


def test_a_matrix_that_is_taken_the_wrong_way_is_seen(monkeypatch):
    model = model_of("DeepseekV3")
    true, params = [greedy(model, prompt_of(33), 8)], SamplingParams(max_new_tokens=8)
    for name in ("absorb", "results"):
        real = getattr(LatentHeads, name)
        assert said(engine(model).generate([prompt_of(33)], params)) == true
        with monkeypatch.context() as patch:
            patch.setattr(LatentHeads, name, lambda self, x, real=real: real(self, x.roll(1, 1)))  # of another head
            assert said(engine(model).generate([prompt_of(33)], params)) != true, name
    monkeypatch.setattr(LatentHeads, "expand", lambda self, latent: tuple(2 * x for x in real_expand(self, latent)))
    assert not any(layer.latent for layer in TransformersModel(model).info().layers), "compared with the method"


real_expand = LatentHeads.expand

"""Tensor parallel models: the tokens of one device, from ranks that hold some of the heads each."""

import copy
import warnings

import pytest
import torch
import transformers
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attnspan import Engine, SamplingParams
from attnspan.errors import AttnspanError
from attnspan.integrations.huggingface import enable, load_tensor_parallel
from tests.devices import mesh_of
from tests.engine.models import greedy, prompts, tiny
from tests.engine.test_cuda import check_said
from tests.integrations import images
from tests.processes import on_backends, spawn

FAMILIES = ["Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3", "Phi3"]
WHOLE_HEADS = {"Phi3"}  # its plan gathers queries, keys and values, which one matrix makes
SIZES = {"pages": 40, "page_size": 16, "max_tokens": 16, "max_sequences": 4, "context_parallel_from": 20}
MESHES = {2: [((2,), ("tp",))], 4: [((2, 2), ("tp", "cp")), ((2, 2), ("cp", "tp"))]}
"""Meshes of so many ranks; two orders of the axes are two ways in which groups lie among ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tiny model of each family."""
    root = tmp_path_factory.mktemp("models")
    transformers.logging.disable_progress_bar()
    for family in FAMILIES:
        tiny(family).save_pretrained(root / family)
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8).save_pretrained(root / "GPT2")
    three = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    tiny("Llama", **three).config.save_pretrained(root / "ThreeHeads")
    transformers.LlavaConfig().save_pretrained(root / "Llava")
    images.family("llama4").save_pretrained(root / "Llama4")
    tiny("Llama", num_key_value_heads=1).save_pretrained(root / "OneKeyHead")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"head_dim": 8, "vocab_size": 32, "num_hidden_layers": 1}
    transformers.HrmTextConfig(**sizes).save_pretrained(root / "HrmText")
    fused = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48, "num_hidden_layers": 1}
    fused |= {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": None}
    transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**fused)).save_pretrained(root / "Fused")
    return root


def loaded(folder, family, mesh):
    """A tiny model, tensor parallel, which ends nowhere."""
    transformers.logging.disable_progress_bar()
    with torch.device("cpu"), warnings.catch_warnings():  # where models are made; weights go to the mesh's device
        warnings.simplefilter("ignore")
        model = load_tensor_parallel(str(folder / family), mesh)
    model.generation_config.eos_token_id = None
    return model


def heads_of(engine):
    """The key heads of each layer's pages."""
    return [layer.kv_heads for pool in engine._pools.pools for layer in pool.layers]


def generated(world, folder, families, meshes):
    """By mesh and family: tokens, and key heads. Every token is the likeliest by the plain model: see test_cuda.py."""
    found = []
    for shape, names in meshes:
        mesh = mesh_of(*shape, names=names)
        for family in families:
            engine = Engine(loaded(folder, family, mesh), mesh=mesh, **SIZES)
            requests = engine.generate(prompts([5, 17, 40]), SamplingParams(logprobs=True, max_new_tokens=9))
            engine.check()
            check_said(family, requests)
            found.append(([request.token_ids for request in requests], heads_of(engine)))
    return found


@on_backends(2, 4)
def test_tensor_parallel_engines_say_what_the_plain_model_says(folder, ranks, backend):
    families = FAMILIES if ranks == 2 else ["Llama", "Gemma3"]
    first, *others = spawn(ranks, generated, folder, families, MESHES[ranks], backend=backend, timeout=240)
    assert others == [first] * (ranks - 1)
    heads = [1 if family not in WHOLE_HEADS else 2 for family in families]
    assert [found for _, found in first] == [[each] * 2 for each in heads * len(MESHES[ranks])]


def by_torch(mesh):
    """A model whose attention torch's own styles make tensor parallel; the rest is whole."""
    model = copy.deepcopy(tiny("Llama"))
    for layer in model.model.layers:
        styles = dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ColwiseParallel())
        parallelize_module(layer, mesh, styles | {"self_attn.o_proj": RowwiseParallel()})
    return model


def refusal(attempt):
    with pytest.raises(AttnspanError) as refused:
        attempt()
    return f"{type(refused.value).__name__}: {refused.value}"


def attempts(world, folder):
    """Tokens of a model that torch made tensor parallel, and what is said of what is not served."""
    mesh, other = mesh_of(2, names=("tp",)), mesh_of(2, names=("cp",))
    model = by_torch(mesh)
    said = Engine(model, mesh=mesh, **SIZES).generate(prompts([9]), SamplingParams(max_new_tokens=5))[0].token_ids
    refused = [
        refusal(lambda: Engine(model, pages=40)),
        refusal(lambda: Engine(model, mesh=other, pages=40)),
        refusal(lambda: Engine(tiny("Llama"), mesh=mesh, pages=40)),
        refusal(lambda: Engine(model, mesh=mesh, pages=40, cuda_graphs=True)),
        refusal(lambda: load_tensor_parallel(str(folder / "Llama"), other)),
        refusal(lambda: load_tensor_parallel(str(folder / "GPT2"), mesh)),
        refusal(lambda: load_tensor_parallel(str(folder / "ThreeHeads"), mesh)),
        refusal(lambda: load_tensor_parallel(str(folder / "HrmText"), mesh)),
        refusal(lambda: load_tensor_parallel(str(folder / "Llava"), mesh)),
    ]
    return said, refused


def over_an_axis_of_one(world, folder):
    """Tokens of a model on a mesh whose axis "tp" has one rank, and what its engine is."""
    mesh = mesh_of(1, 2, names=("tp", "cp"))
    engine = Engine(loaded(folder, "Llama", mesh), mesh=mesh, **SIZES)
    return engine.generate(prompts([40]), SamplingParams(max_new_tokens=5))[0].token_ids, heads_of(engine)


def test_an_axis_of_one_rank_leaves_the_model_whole_and_spreads_pages_over_the_others(folder):
    true = greedy(tiny("Llama"), prompts([40])[0], 5)
    assert spawn(2, over_an_axis_of_one, folder) == [(true, [2, 2])] * 2


def with_adapters(world, folder):
    """What is said of adapters that peft has put into a tensor parallel model, and into a module of it."""
    import peft

    mesh = mesh_of(2, names=("tp",))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
    around, inside = loaded(folder, "Llama", mesh), loaded(folder, "Llama", mesh)
    peft.inject_adapter_in_model(lora, inside.model)
    models = peft.get_peft_model(around, lora).eval(), inside.eval()
    return [refusal(lambda model=model: Engine(model, mesh=mesh, pages=40)) for model in models]


def test_adapters_of_a_tensor_parallel_model_are_refused_wherever_they_are(folder):
    pytest.importorskip("peft")
    why = "LlamaForCausalLM is tensor parallel and has adapters of peft, which an engine does not serve; load it whole"
    assert spawn(2, with_adapters, folder) == [[f"ModelError: {why}"] * 2] * 2


def of_text_and_images(world, folder):
    """Logits of the text model in files of one that sees images too."""
    with torch.no_grad():
        return loaded(folder, "Llama4", mesh_of(2, names=("tp",)))(torch.tensor([[5, 6, 7, 8, 9]])).logits


def test_the_text_model_in_files_of_a_larger_one_is_loaded(folder):
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder / "Llama4").eval().requires_grad_(False)
    true = whole(torch.tensor([[5, 6, 7, 8, 9]])).logits
    for logits in spawn(2, of_text_and_images, folder):
        torch.testing.assert_close(logits, true, rtol=0, atol=1e-4)  # float32, sums in another order


def enabled_with_one_key_head(world, folder):
    """Logits of an enabled model whose key head is on both ranks, and what is said of gradients through it."""
    mesh = mesh_of(1, 2, names=("cp", "tp"))
    model, tokens = loaded(folder, "OneKeyHead", mesh), torch.tensor(prompts([20]))
    with enable(model, mesh["cp"]):
        with torch.no_grad():
            logits = model(tokens).logits
        return logits, refusal(lambda: model.requires_grad_(True)(tokens))


def test_a_key_head_that_is_on_every_rank_is_not_trained(folder):
    model = tiny("Llama", num_key_value_heads=1)
    true = model(torch.tensor(prompts([20]))).logits
    for logits, said in spawn(2, enabled_with_one_key_head, folder):
        torch.testing.assert_close(logits, true, rtol=0, atol=1e-4)  # float32, sums in another order
        assert said.startswith("ModelError: model.layers.0.self_attn has 2 of its 4 query heads on this rank and 1 of")


def in_parts_of_heads(world, folder):
    mesh = mesh_of(2, names=("tp",))
    return refusal(lambda: Engine(loaded(folder, "Fused", mesh), mesh=mesh, pages=40))


def test_a_model_whose_own_code_does_not_run_on_shards_is_refused_by_name(folder):
    for said in spawn(2, in_parts_of_heads, folder):
        assert said.startswith("ModelError: GPTNeoXForCausalLM does not run tensor parallel over 2 ranks: shape ")
        assert said.endswith("; load it whole, or take another number of ranks")


REFUSED = [
    "EngineError: the model is tensor parallel over ranks [0, 1]; give mesh= a DeviceMesh whose axis 'tp' has these "
    "ranks, got None",
    "EngineError: the model is tensor parallel over ranks [0, 1]; give mesh= a DeviceMesh whose axis 'tp' has these "
    "ranks, got DeviceMesh((cp=2), 'cpu', stride=(1,))",
    "EngineError: mesh has an axis 'tp', and the model is whole on this rank; load it with load_tensor_parallel, or "
    "give a mesh without that axis",
    "EngineError: cuda_graphs=True is for one rank: messages between ranks are not part of a graph",
    "ModelError: mesh must have an axis 'tp', got DeviceMesh((cp=2), 'cpu', stride=(1,))",
    "ModelError: GPT2LMHeadModel has no tp_plan in transformers, by which its layers would be dealt to ranks; load it "
    "whole, and spread pages over the ranks",
    "ModelError: model.layers.0.self_attn (LlamaAttention) has 3 key heads, which cannot be dealt to 2 ranks; take a "
    "mesh whose axis 'tp' divides them",
    "ModelError: HrmTextForCausalLM has files in which model.L_module.layers.0.mlp.gate_proj.weight is not a tensor of "
    "its own, and transformers cuts that before it divides it; load it whole, and spread pages over the ranks",
    "ModelError: a LlavaConfig is not of a causal model, by transformers' AutoModelForCausalLM, and others are not "
    "loaded tensor parallel; load it whole, and spread pages over the ranks",
]


def test_what_is_not_served_tensor_parallel_is_refused_by_name(folder):
    assert spawn(2, attempts, folder) == [(greedy(tiny("Llama"), prompts([9])[0], 5), REFUSED)] * 2

"""Modules that run as one kernel while their model is served: which, that they compute the same, and which are not.

Kernels are compared with their formulas on CUDA, and in Triton's interpreter with TRITON_INTERPRET=1, which rounds to
bfloat16 by cutting off, so that it is left to CUDA. Everything else runs on the CPU, with formulas in their place:

    TRITON_INTERPRET=1 python -m pytest tests/integrations/test_fused.py
"""

import copy
import inspect
import types
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnspan import Engine, SamplingParams
from attnspan.integrations.huggingface import fused_kernels, fused_modules, transformers_model
from attnspan.integrations.huggingface.fused_kernels import (
    ACTIVATIONS,
    NORMS,
    ROTARIES,
    agree,
    fused_add_norm,
    fused_gate,
    fused_norm,
    fused_rotary,
    gated,
    normed,
    rotated,
)
from tests.engine.models import FAMILIES, greedy, prompts, tiny
from tests.kernels.compiling import Compiling
from tests.kernels.interpreter import INTERPRETS, compiles, in_interpreter

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
where_kernels_run = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(pytest.param("cuda", dtype, marks=pytest.mark.cuda) for dtype in fused_kernels.DTYPES),
        *(pytest.param("cpu", dtype, marks=in_interpreter) for dtype in (torch.float16, torch.float32)),
    ],
)


def drawn(*shape, device, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@where_kernels_run
@pytest.mark.parametrize("how", NORMS)
@pytest.mark.parametrize("shape", [(1, 1, 4096), (1, 3, 7, 24), (2, 1000), (1, 129, 8), (1, 2, 16384)])
def test_a_norm_is_its_formula(shape, how, device, dtype):
    x, weight = drawn(*shape, device=device, dtype=dtype) * 3, drawn(shape[-1], device=device, dtype=dtype, seed=1)
    assert agree(fused_norm(x, weight, 1e-5, how), normed(x, weight, 1e-5, how))


@where_kernels_run
@pytest.mark.parametrize("how", NORMS)
@pytest.mark.parametrize("shape", [(1, 1, 4096), (1, 7, 24)])
def test_a_sum_and_its_norm_are_their_formulas_and_the_sum_is_to_the_bit(shape, how, device, dtype):
    x, other, weight = (drawn(*shape, device=device, dtype=dtype, seed=seed) for seed in range(3))
    total, found = fused_add_norm(x, other, weight[0, 0], 1e-5, how)
    assert torch.equal(total, x + other)
    assert agree(found, normed(x + other, weight[0, 0], 1e-5, how))


@where_kernels_run
@pytest.mark.parametrize("how", ROTARIES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [(1, 32, 8, 128), (5, 6, 2, 24), (3, 1, 1, 64), (2, 7, 7, 2)]
)
def test_a_rotary_embedding_is_its_formula_to_the_bit(tokens, heads, kv_heads, dim, how, device, dtype):
    """Of tensors as layers have them, of others, and of keys that are part of one product with queries."""
    together = drawn(1, tokens, heads + kv_heads, dim, device=device, dtype=dtype)
    cos, sin = drawn(2, 1, tokens, dim, device=device, dtype=dtype, seed=1)
    q, k = together.transpose(1, 2).split([heads, kv_heads], dim=1)
    for given in ((q, k), (q.contiguous(), k.contiguous())):
        found = fused_rotary(*given, cos, sin, how)
        for one, x in zip(found, given, strict=True):
            assert one.shape == x.shape
            assert torch.equal(one, rotated(x, cos, sin, how))


@where_kernels_run
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 48, 1500, 14336])
def test_a_gated_activation_is_its_formula(n, activation, device, dtype):
    both = drawn(1, 3, 2 * n, device=device, dtype=dtype) * 4
    for gate, up in (both.chunk(2, dim=-1), (both[..., :n].contiguous(), both[..., n:].contiguous())):
        assert agree(fused_gate(gate, up, activation), gated(gate, up, activation))


@where_kernels_run
def test_numbers_that_are_none_stay_none(device, dtype):
    x, one = torch.full((1, 2, 16), torch.nan, device=device, dtype=dtype), torch.ones(16, device=device, dtype=dtype)
    x[0, 0] = 1.0
    for found in (fused_norm(x, one, 1e-5, "rounded"), fused_gate(x, torch.ones_like(x), "silu")):
        assert torch.equal(found.isnan(), x.isnan())


@compiles
@pytest.mark.parametrize("dtype", fused_kernels.DTYPES)
def test_every_kernel_is_compiled_for_hopper(dtype, monkeypatch):
    compiled = []
    monkeypatch.setattr(fused_kernels, "dependent_launch", lambda device: {"pdl": True, "launch_pdl": True})
    kernels = {name: Compiling(fn, compiled) for name, fn in fused_kernels._compiled().items()}
    monkeypatch.setattr(fused_kernels, "_compiled", lambda: kernels)
    x = drawn(1, 3, 4, 128, device="cpu", dtype=dtype)
    for how in NORMS:
        fused_norm(x, x[0, 0, 0], 1e-5, how)
        fused_add_norm(x, x, x[0, 0, 0], 1e-5, how)
    for how in ROTARIES:
        fused_rotary(x.transpose(1, 2), x.transpose(1, 2)[:, :2], x[:, :, 0].clone(), x[:, :, 1].clone(), how)
    for activation in ACTIVATIONS:
        fused_gate(x[0, 0], x[0, 1], activation)
    assert Counter(each.name for each in compiled) == {"norm": 6, "rotary": 2, "gate": 3}


@pytest.mark.parametrize("apart", [0.0, 0.9, 2.5])
@pytest.mark.parametrize("dtype", fused_kernels.DTYPES)
def test_results_agree_up_to_two_roundings_or_eight_of_float32(dtype, apart):
    expected = torch.ones(3, dtype=dtype)
    found = expected.double()
    found[1] += apart * torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 2)
    assert agree(found.to(dtype), expected) == (apart < 1)
    assert not agree(expected.double(), expected)
    assert not agree(expected + 0.1, expected)
    assert not agree(expected * torch.nan, expected)
    assert agree(expected * torch.nan, expected * torch.nan)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("float64", lambda x, w: fused_norm(x.double(), w.double(), 1e-5, "wide")),
        ("a weight of another dtype", lambda x, w: fused_norm(x.half(), w, 1e-5, "wide")),
        ("numbers that lie apart", lambda x, w: fused_norm(x.transpose(1, 2), w[:3], 1e-5, "wide")),
        ("no tokens", lambda x, w: fused_norm(x[:, :0], w, 1e-5, "wide")),
        ("a token that is too long", lambda x, w: fused_norm(x.new_ones(1, 16385), w.new_ones(16385), 1e-5, "wide")),
        ("gates of another dtype", lambda x, w: fused_gate(x.half(), x, "silu")),
        ("several rows", lambda x, w: fused_gate(x.expand(2, 3, 8), x.expand(2, 3, 8), "silu")),
        ("some of the numbers", lambda x, w: fused_rotary(x[None], x[None], *(x[..., :4].clone(),) * 2, "wide")),
        ("angles of another dtype", lambda x, w: fused_rotary(x[None], x[None], x.half(), x.half(), "wide")),
        ("an odd dim", lambda x, w: fused_rotary(*(x[None, ..., :7],) * 2, *(x[..., :7].clone(),) * 2, "wide")),
    ],
)  # fmt: skip
def test_there_is_no_kernel_for(what, call):
    x = torch.ones(1, 3, 8)
    assert call(x, torch.ones(8)) is None, what


# ---- modules that are known ------------------------------------------------------------------------------------------


@pytest.fixture
def formulas(monkeypatch):
    """On the CPU, formulas in the place of kernels; how often each was asked. Models of this test alone."""
    if INTERPRETS:
        pytest.skip("the kernels themselves run on the CPU")
    calls = Counter()

    def norm(x, weight, eps, how):
        calls["norm"] += 1
        return normed(x, weight, eps, how)

    def add_norm(x, other, weight, eps, how):
        calls["add_norm"] += 1
        return x + other, normed(x + other, weight, eps, how)

    def rotary(q, k, cos, sin, how):
        calls["rotary"] += 1
        return None if cos.shape[-1] != q.shape[-1] else tuple(rotated(x, cos, sin, how) for x in (q, k))

    def gate(given, up, activation):
        calls["gate"] += 1
        return gated(given, up, activation)

    for each in (norm, add_norm, rotary, gate):
        monkeypatch.setattr(fused_modules, f"fused_{each.__name__}", each)
    for module in (fused_modules, transformers_model):
        monkeypatch.setattr(module, "is_available", lambda device: True)
    return calls


def attends(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def fused(model):
    return fused_modules.fused_modules(model, attends(model))


def kinds(model):
    return Counter(each.formula[:2] for each in fused(model))


KINDS = {
    "Llama": {("norm", "rounded"): 5, ("mlp", "silu"): 2, ("layer", "rounded"): 2},
    "Qwen3": {("norm", "rounded"): 9, ("mlp", "silu"): 2, ("layer", "rounded"): 2},
    "Phi3": {("norm", "rounded"): 5, ("mlp", "silu"): 2},
    "Gemma3": {("norm", "plus_one"): 13, ("mlp", "gelu_tanh"): 2},
    "GptOss": {("norm", "wide"): 5},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", KINDS)
def test_norms_gated_mlps_and_rotary_embeddings_are_known(family, dtype, formulas):
    found = kinds(copy.deepcopy(tiny(family)).to(dtype))
    rotary = sum(count for (kind, _), count in found.items() if kind == "rotary")
    assert {kind: count for kind, count in found.items() if kind[0] != "rotary"} == KINDS[family]
    assert rotary == (0 if family == "GptOss" else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_served_by_them_and_says_the_same(family, formulas):
    model, asked = copy.deepcopy(tiny(family)), prompts([5, 17, 1])
    engine = Engine(model, pages=64, page_size=16)
    formulas.clear()
    said = [request.token_ids for request in engine.generate(asked, SamplingParams(max_new_tokens=9))]
    used, known = Counter(formulas), Counter(each.formula[0] for each in fused(model))
    assert said == [greedy(tiny(family), prompt, 9) for prompt in asked]
    known["norm"] -= known["layer"]  # a layer's second norm comes with a sum
    names = {"norm": "norm", "layer": "add_norm", "rotary": "rotary", "mlp": "gate"}
    assert used == {name: engine.counts.steps * known[kind] for kind, name in names.items() if known[kind]}
    assert not any("forward" in vars(module) for module in model.modules())
    assert engine._fingerprint.changes == 0


def test_several_engines_serve_them_in_turn_and_a_change_is_looked_at_again(formulas):
    model, [prompt] = copy.deepcopy(tiny("Llama")), prompts([5])
    params = SamplingParams(max_new_tokens=4)
    engines = [Engine(model, pages=16) for _ in range(2)]
    for engine in engines:
        assert engine.generate([prompt], params)[0].token_ids == greedy(tiny("Llama"), prompt, 4)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
        layer.input_layernorm.variance_epsilon = 0.5
    assert kinds(model)["mlp", "gelu"] == 2
    formulas.clear()
    said = [engine.generate([prompt], params)[0].token_ids for engine in engines]
    assert formulas["gate"]
    assert said == [greedy(model, prompt, 4)] * 2


def test_a_call_that_is_differentiated_or_has_other_arguments_is_the_modules_own(formulas):
    for each in fused(copy.deepcopy(tiny("Llama"))):
        if each.formula[0] in ("rotary", "layer"):
            continue
        x = torch.randn(1, 3, 32)
        own = type(each.module).forward(each.module, x)
        formulas.clear()
        assert torch.equal(each.forward(x), own)
        [name] = inspect.signature(type(each.module).forward).parameters.keys() - {"self"}
        with torch.no_grad():
            assert torch.equal(each.forward(**{name: x}), own)
        assert not formulas
        with torch.no_grad():
            assert torch.equal(each.forward(x), own)
        assert formulas


def test_rotary_embeddings_of_some_of_the_numbers_are_the_models_own(formulas):
    """The function is known, and each call of it is looked at."""
    model = tiny("Qwen3Next")
    [rotary] = [each for each in fused(model) if each.formula[0] == "rotary"]
    own, variant = rotary.formula[1:]
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    cos, sin = torch.randn(2, 1, 3, 8)
    with torch.no_grad():
        found = fused_modules._rotate(own, variant, q, k, cos, sin)
    assert formulas["rotary"]
    assert all(map(torch.equal, found, own(q, k, cos, sin)))


# ---- modules that are left alone -------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        self.head = nn.Linear(2, 2)
        for name, each in modules.items():
            setattr(self, name, each)


class Norm(nn.Module):
    """One that is known; others change something."""

    def __init__(self, n=8):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(n)), 1e-6

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class PlusOne(Norm):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class PlusTwo(Norm):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (2.0 + self.weight.float())).to(x.dtype)


class Centred(Norm):
    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Clamped(Norm):
    """Only for numbers that hardly come."""

    def forward(self, x):
        wide = x.to(torch.float32).clamp(max=1e6)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Gated(Norm):
    def forward(self, x, gate=None):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Scaled(Norm):
    """By a setting of its own."""

    def __init__(self):
        super().__init__()
        self.mean = 2.0

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype) * self.mean


def patched(module):
    module.forward = types.MethodType(type(module).forward, module)
    return module


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.RMSNorm(8), PlusTwo(), Centred(), Clamped(), Gated(), Scaled(), patched(Norm())]
)
def test_other_norms_are_left_alone(norm, formulas):
    assert kinds(Model(norm=norm)) == {}
    assert kinds(Model(norm=norm, known=Norm(), other=PlusOne())) == {("norm", "rounded"): 1, ("norm", "plus_one"): 1}


class Mlp(nn.Module):
    def __init__(self, act_fn=F.silu):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Limited(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1e9) * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def hooked(mlp):
    mlp.up_proj.register_forward_hook(lambda *_: None)
    return mlp


def compiled(mlp):
    mlp.compile()
    return mlp


@pytest.mark.parametrize(
    "mlp", [Mlp(torch.tanh), Mlp(F.relu), Limited(), Swapped(), hooked(Mlp()), patched(Mlp()), compiled(Mlp())]
)
def test_other_mlps_are_left_alone(mlp, formulas):
    assert kinds(Model(mlp=mlp)) == {}
    assert kinds(Model(mlp=Mlp())) == {("mlp", "silu"): 1}


class Layer(nn.Module):
    """One that is known; others change something."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = nn.Identity(), nn.Identity()

    def forward(self, x, mask=None, positions=None, **more):
        first = self.input_layernorm(x)
        x = x + self.self_attn(hidden_states=first, mask=mask, positions=positions, **more)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Unpacked(Layer):
    def forward(self, x, mask=None, **more):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), mask=mask, **more)
        return x + attended + self.mlp(self.post_attention_layernorm(x + attended))


class Parallel(Layer):
    def forward(self, x, mask=None, **more):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), mask=mask, **more)
        return x + attended + self.mlp(self.post_attention_layernorm(x))


class Masked(Layer):
    """Keeps an argument to itself."""

    def forward(self, x, mask=None, **more):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), **more)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Halved(Layer):
    def forward(self, x, mask=None, **more):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), mask=mask, **more)
        x = x + attended
        return x + 0.5 * self.mlp(self.post_attention_layernorm(x))


class Unlike(Layer):
    """Its second norm is another."""

    def __init__(self):
        super().__init__()
        self.post_attention_layernorm = Clamped()


@pytest.mark.parametrize("layer", [Parallel(), Masked(), Halved(), Unlike(), patched(Layer())])
def test_other_layers_are_left_alone(layer, formulas):
    assert "layer" not in {kind for kind, _ in kinds(Model(layer=layer))}
    for known in (Layer(), Unpacked()):
        assert kinds(Model(layer=known))["layer", "rounded"] == 1


def test_a_layer_whose_norm_has_a_hook_or_that_is_called_in_another_way_runs_as_it_is(formulas):
    model = copy.deepcopy(tiny("Llama"))
    layer = next(each for each in fused(model) if each.formula[0] == "layer")
    layer.module.self_attn.forward = lambda hidden_states, **_: (hidden_states.cos(), None)
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        own = type(layer.module).forward(layer.module, x)
        formulas.clear()
        assert torch.equal(layer.forward(x), own)
        assert formulas["add_norm"] == 1
        assert torch.equal(layer.forward(hidden_states=x), own)
        seen = []
        layer.module.post_attention_layernorm.register_forward_hook(lambda *_: seen.append(1))
        assert torch.equal(layer.forward(x), own)
    assert formulas["add_norm"] == len(seen) == 1


def interleaved(q, k, cos, sin):
    def turned(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    return tuple(x * cos.unsqueeze(1) + turned(x) * sin.unsqueeze(1) for x in (q, k))


def backwards(q, k, cos, sin):
    return tuple(rotated(x, cos, -sin, "rounded") for x in (q, k))


def by_halves(q, k, cos, sin):
    return tuple(rotated(x, cos, sin, "rounded") for x in (q, k))


def layer_with(function):
    """A layer that rotates by this function, as modeling files have it."""
    scope = {"apply_rotary_pos_emb": function, "nn": nn}
    exec(
        "class Attention(nn.Module):\n"
        "    def forward(self, q, k, cos, sin):\n"
        "        return apply_rotary_pos_emb(q, k, cos, sin)\n",
        scope,
    )
    return scope["Attention"]()


@pytest.mark.parametrize("function", [interleaved, backwards, lambda q, cos, sin: q, lambda q, k, cos, sin: q])
def test_other_rotary_embeddings_are_left_alone(function, formulas):
    model = Model(other=layer_with(function), known=layer_with(by_halves))
    assert [each.module for each in fused_modules.fused_modules(model, [model.other, model.known])] == [model.known]
    assert fused_modules.fused_modules(model, []) == []


@pytest.mark.parametrize("wrong", ["fused_norm", "fused_add_norm", "fused_rotary", "fused_gate"])
def test_a_kernel_that_computes_something_else_is_not_used(wrong, formulas, monkeypatch):
    right = getattr(fused_modules, wrong)

    def off(*args):
        found = right(*args)
        return tuple(each * 1.01 for each in found) if isinstance(found, tuple) else found * 1.01

    monkeypatch.setattr(fused_modules, wrong, off)
    kind = {"fused_norm": "norm", "fused_add_norm": "layer", "fused_rotary": "rotary", "fused_gate": "mlp"}[wrong]
    assert kind not in {each.formula[0] for each in fused(tiny("Llama"))}
    assert len(fused(tiny("Llama"))) >= 4


@pytest.mark.parametrize("dtype", [torch.float64])
def test_dtypes_that_no_kernel_is_for_are_left_alone(dtype, formulas):
    assert fused(copy.deepcopy(tiny("Llama")).to(dtype)) == []


def test_nothing_is_looked_at_where_no_kernel_runs():
    if not INTERPRETS:
        assert fused(tiny("Llama")) == []


# ---- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma3", "Phi3"])
def test_on_cuda_tokens_are_those_of_generate(family, graphs):
    model, asked = copy.deepcopy(tiny(family)).to("cuda"), prompts([5, 17, 1, 40])
    engine = Engine(model, pages=64, page_size=16, cuda_graphs=graphs)
    assert len(fused(model)) > 8
    said = [request.token_ids for request in engine.generate(asked, SamplingParams(max_new_tokens=24))]
    assert said == [greedy(tiny(family), prompt, 24) for prompt in asked]


@in_interpreter
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_in_the_interpreter_tokens_are_those_of_generate(family):
    model, asked = copy.deepcopy(tiny(family)), prompts([5, 1])
    engine = Engine(model, pages=64, page_size=16, kernel="gather")
    assert len(fused(model)) > 8
    said = [request.token_ids for request in engine.generate(asked, SamplingParams(max_new_tokens=3))]
    assert said == [greedy(tiny(family), prompt, 3) for prompt in asked]

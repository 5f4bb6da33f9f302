"""Linear layers by products of few rows: the same results, whoever calls them, in whatever order and with whatever.

Kernels run in Triton's interpreter with TRITON_INTERPRET=1; everything else on the CPU with torch's products in the
place of ours, in every step as if a graph captured it:

    TRITON_INTERPRET=1 python -m pytest tests/integrations/test_linear_products.py
"""

import copy
import random
import threading
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnspan import Engine, SamplingParams
from attnspan.engine.cuda_graphs import CudaGraphs
from attnspan.integrations.huggingface import linear_products, transformers_model
from attnspan.integrations.huggingface.fused_kernels import gated
from attnspan.integrations.huggingface.linear_products import LinearProducts, agree
from tests.engine.models import greedy, prompts, tiny
from tests.integrations.test_fused import formulas  # noqa: F401
from tests.kernels.interpreter import INTERPRETS, in_interpreter, interpreted

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted() if INTERPRETS else nullcontext():
        yield


@pytest.fixture
def counts(monkeypatch):
    """Torch's products in the place of ours, and how often each was asked."""
    found = Counter()

    def product(x, weight, bias=None, residual=None):
        found["product" if residual is None else "residual"] += 1
        with torch._C.DisableTorchFunction():
            y = F.linear(x, weight, bias)
            return y if residual is None else residual + y

    def products(x, weights, biases=None):
        found["products"] += 1
        return [F.linear(x, *each) for each in zip(weights, biases or [None] * len(weights), strict=True)]

    def gated_product(x, gate, up, activation):
        found["gated"] += 1
        with torch._C.DisableTorchFunction():
            return gated(F.linear(x, gate), F.linear(x, up), activation)

    for each in (product, products, gated_product):
        monkeypatch.setattr(linear_products, each.__name__, each)
    monkeypatch.setattr(linear_products, "runs_on", lambda *_: True)
    return found


@pytest.fixture
def captured(monkeypatch):
    """Every step of an engine is as one that a graph captures."""
    monkeypatch.setattr(transformers_model, "_is_captured", lambda batch: True)


# ---- results that are kept -------------------------------------------------------------------------------------------


class Projections(nn.Module):
    """Queries, keys and values of one x."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, n, bias=bias) for n in (24, 8, 8))
        self.requires_grad_(False)


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.first, self.second = Projections(bias), Projections(bias)
        self.second.q_proj.weight.mul_(2)


def x_of(seed=1):
    return torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(seed))


def in_order(m, x):
    for part in (m.first, m.second):
        yield part.q_proj(x)
        yield part.k_proj(x)
        yield part.v_proj(x)


def backwards(m, x):
    for part in (m.first, m.second):
        yield part.v_proj(x)
        yield part.k_proj(x)
        yield part.q_proj(x)


def values_first_then_queries_twice(m, x):
    yield m.first.v_proj(x)
    yield m.first.q_proj(x)
    yield m.first.q_proj(x)
    yield m.first.v_proj(x)
    yield m.first.v_proj(x)


def queries_alone(m, x):
    yield m.first.q_proj(x)
    yield m.second.q_proj(x)
    yield m.first.k_proj(x_of(2))
    yield m.second.v_proj(x)


def another_x(m, x):
    yield m.first.q_proj(x)
    yield m.first.k_proj(x_of(2))
    yield m.first.v_proj(x)


def the_same_numbers_elsewhere(m, x):
    yield m.first.q_proj(x)
    yield m.first.k_proj(x.clone())
    yield m.first.v_proj(x.view_as(x))


def fewer_rows(m, x):
    yield m.first.q_proj(x)
    yield m.first.k_proj(x[:, :1])
    yield m.first.v_proj(x[:, 1:])


def an_x_that_is_gone(m, x):
    for seed in range(30):
        y = x_of(seed)
        yield m.first.q_proj(y)
        del y
        yield m.first.k_proj(x_of(seed + 100))


def an_x_that_is_written(m, x):
    yield m.first.q_proj(x)
    x.add_(1)
    yield m.first.k_proj(x)
    x[0, 0, 0] = 7.0
    yield m.first.v_proj(x)


def an_x_that_is_written_through_a_view(m, x):
    yield m.first.q_proj(x)
    x[0].detach()[1:].zero_()
    yield m.first.k_proj(x)
    torch.neg(x, out=x)
    yield m.first.v_proj(x)


def an_x_that_is_written_unseen(m, x):
    yield m.first.q_proj(x)
    x.data.add_(1)
    yield m.first.k_proj(x)
    yield m.second.q_proj(x)
    x[0, 1].data[3] = 9.0
    yield m.second.k_proj(x)
    x.data = x_of(3)
    yield m.second.v_proj(x)


def an_x_that_numpy_writes(m, x):
    yield m.first.q_proj(x)
    x.view(-1).numpy()[5] = 4.0
    yield m.first.k_proj(x)


def an_x_that_a_foreign_kernel_writes(m, x):
    import ctypes

    yield m.first.q_proj(x)
    ctypes.c_float.from_address(x.data_ptr()).value = 5.0
    yield m.first.k_proj(x)
    yield m.first.v_proj(x)


def an_x_that_is_handed_over(m, x):
    yield m.first.q_proj(x)
    np.asarray(x)[0, 0] = 2.0
    yield m.first.k_proj(x)
    yield m.second.q_proj(x)
    torch.from_dlpack(x).data.fill_(3.0)
    yield m.second.k_proj(x)
    x.untyped_storage().fill_(0)
    yield m.second.v_proj(x)


def an_x_whose_memory_changes(m, x):
    yield m.first.q_proj(x)
    x.set_(x_of(4))
    yield m.first.k_proj(x)


def weights_that_are_written(m, x):
    yield m.first.q_proj(x)
    m.first.k_proj.weight.mul_(3)
    yield m.first.k_proj(x)
    m.first.v_proj.bias.add_(1)
    yield m.first.v_proj(x)


def weights_that_are_written_unseen(m, x):
    yield m.first.q_proj(x)
    m.first.k_proj.weight.data.mul_(3)
    yield m.first.k_proj(x)
    yield m.second.q_proj(x)
    m.second.k_proj.weight.data = m.second.v_proj.weight.data.clone()
    yield m.second.k_proj(x)
    m.second.v_proj.bias.data.add_(1)
    yield m.second.v_proj(x)


def weights_that_are_replaced(m, x):
    yield m.first.q_proj(x)
    m.first.k_proj.weight = nn.Parameter(m.first.k_proj.weight * 2, requires_grad=False)
    yield m.first.k_proj(x)
    m.first.v_proj.bias = None
    yield m.first.v_proj(x)


def modules_that_are_replaced(m, x):
    yield m.first.q_proj(x)
    m.first.k_proj, m.first.v_proj = m.first.v_proj, m.first.k_proj
    yield m.first.k_proj(x)
    yield m.first.v_proj(x)


def results_that_are_written(m, x):
    for part in (m.first, m.second):
        q = part.q_proj(x)
        yield q.clone()
        q.mul_(2)
        k = part.k_proj(x)
        yield k.clone()
        k.zero_()
        yield part.k_proj(x)
        yield part.v_proj(x)


def results_that_are_given_on(m, x):
    k = m.first.k_proj(x)
    q = m.second.q_proj(x)
    yield q @ m.first.q_proj(k.repeat(1, 1, 2)).mT
    yield m.second.k_proj(q[..., :16])
    yield m.second.v_proj(q[..., :16])


def hooks_that_come_in_between(m, x):
    yield m.first.q_proj(x)
    hooks = [
        m.first.k_proj.register_forward_hook(lambda module, args, out: out * 2),
        m.first.v_proj.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    ]
    yield m.first.k_proj(x)
    yield m.first.v_proj(x)
    for each in hooks:
        each.remove()


def functions_with_the_same_weight(m, x):
    yield F.linear(x, m.first.q_proj.weight)
    yield m.first.k_proj(x)
    yield m.first.q_proj(x)
    yield F.linear(x, m.first.k_proj.weight)
    yield F.linear(x, m.first.v_proj.weight, m.second.v_proj.bias)
    yield F.linear(input=x, weight=m.first.v_proj.weight)
    yield F.linear(x, m.first.k_proj.weight, bias=m.first.k_proj.bias)


def other_shapes(m, x):
    yield m.first.q_proj(x[0, 0])
    yield m.first.k_proj(x[0, 0])
    yield m.first.q_proj(x.repeat(2, 1, 1))
    yield m.first.k_proj(x.double().float())


SCENES = [
    in_order, backwards, values_first_then_queries_twice, queries_alone, another_x, the_same_numbers_elsewhere,
    fewer_rows, an_x_that_is_gone, an_x_that_is_written, an_x_that_is_written_through_a_view,
    an_x_that_is_written_unseen, an_x_that_numpy_writes, an_x_that_is_handed_over, an_x_that_a_foreign_kernel_writes,
    an_x_whose_memory_changes, weights_that_are_written, weights_that_are_written_unseen, weights_that_are_replaced,
    modules_that_are_replaced, results_that_are_written, results_that_are_given_on, hooks_that_come_in_between,
    functions_with_the_same_weight, other_shapes,
]  # fmt: skip


def results(scene, model, products=None, calls=3):
    """What a scene computes in several calls."""

    def run():
        return [each.clone() for each in scene(model, x_of())]

    with torch.no_grad():
        return [each for _ in range(calls) for each in (run() if products is None else products.run(run))]


@pytest.fixture
def unchecked(monkeypatch):
    """Nothing is compared with torch's products while a call warms up, as in a capture."""
    monkeypatch.setattr(linear_products.ProductCall, "_checked", lambda self, found, wanted: found)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scene", SCENES)
def test_a_kept_result_is_for_the_call_that_it_was_computed_for(scene, bias, counts, unchecked):
    if not bias and scene in (weights_that_are_written, weights_that_are_written_unseen):
        pytest.skip("writes a bias")
    plain, ours = Model(bias), Model(bias)
    found = results(scene, ours, LinearProducts(ours))
    assert counts["products"]
    assert all(map(torch.equal, found, results(scene, plain)))


PARTS = ["first.q_proj", "first.k_proj", "first.v_proj", "second.q_proj", "second.k_proj"]
CHANGES = [
    "written", "written unseen", "another", "freed", "result written",
    "weight written", "weight written unseen", "weight replaced", "bias gone",
]  # fmt: skip


def drawn_steps(draw):
    """What happens in a call: mostly products of the first module and the first x."""

    def step():
        what = "call" if draw.random() < 0.6 else draw.choice(CHANGES)
        return what, draw.choice(PARTS), int(draw.random() < 0.2)

    return [("call", "first.q_proj", 0), *(step() for _ in range(draw.randrange(1, 8)))]


def played(m, steps):
    """The results of some calls, with changes in between."""
    xs, last = [x_of(1), x_of(2)], torch.zeros(1)
    for number, (what, name, at) in enumerate(steps):
        linear = m.get_submodule(name)
        if what == "call":
            last = linear(xs[at])
            yield last.clone()
        elif what == "written":
            xs[at][0, 1].mul_(-2)
        elif what == "written unseen":
            xs[at].data.neg_()
        elif what == "another":
            xs[at] = xs[at].clone()
        elif what == "freed":
            xs[at] = None
            xs[at] = x_of(number)
        elif what == "result written":
            last.zero_()
        elif what == "weight written":
            linear.weight.mul_(-1)
        elif what == "weight written unseen":
            linear.weight.data.add_(1)
        elif what == "weight replaced":
            linear.weight = nn.Parameter(linear.weight + 2, requires_grad=False)
        elif linear.bias is not None:
            linear.bias = None


@pytest.mark.parametrize("turn", range(5))
def test_any_calls_and_changes_have_the_results_of_torch(turn, counts, unchecked):
    """Two calls of a model, one after another."""
    draw = random.Random(turn)
    for _ in range(100):
        plain, ours = Model(), Model()
        products = LinearProducts(ours)
        for steps in (drawn_steps(draw), drawn_steps(draw)):
            with torch.no_grad():
                found = products.run(lambda steps=steps, ours=ours: list(played(ours, steps)))
                assert all(map(torch.equal, found, list(played(plain, steps)))), steps


def test_a_result_that_is_not_told_apart_would_show(counts, unchecked, monkeypatch):
    """The twin of the test above."""
    monkeypatch.setattr(linear_products, "UNSEEN", ())
    monkeypatch.setattr(linear_products._Kept, "is_of", lambda self, *given: True)
    wrong = []
    for scene in SCENES:
        ours = Model()
        found = results(scene, ours, LinearProducts(ours), calls=1)
        if not all(map(torch.equal, found, results(scene, Model(), calls=1))):
            wrong.append(scene)
    assert {another_x, an_x_that_is_written, an_x_that_is_written_unseen, an_x_that_is_handed_over,
            an_x_that_a_foreign_kernel_writes, weights_that_are_replaced} <= set(wrong)  # fmt: skip


def test_parts_of_one_x_are_one_launch_and_others_are_not(counts, unchecked):
    model = Model()
    products = LinearProducts(model)
    results(in_order, model, products, calls=2)
    assert counts == {"products": 4}
    results(another_x, model, products, calls=1)
    counts.clear()
    results(in_order, model, products, calls=2)
    assert counts == {"products": 2, "product": 6}  # `first` is apart from now on


def test_a_call_that_fails_leaves_nothing(counts, unchecked):
    model, [x, y] = Model(), map(x_of, range(2))
    products = LinearProducts(model)

    def breaks():
        model.first.q_proj(x)
        raise KeyboardInterrupt

    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            products.run(breaks)
        counts.clear()
        assert torch.equal(model.first.k_proj(x), F.linear(x, model.first.k_proj.weight, model.first.k_proj.bias))
        assert not counts
        assert torch.equal(products.run(model.first.k_proj, y), model.first.k_proj(y))


def test_a_mode_that_an_interrupt_left_behind_does_nothing(counts, unchecked):
    model, x = Model(), x_of()
    left = linear_products.ProductCall(LinearProducts(model))
    with torch.no_grad(), left:
        assert torch.equal(model.first.q_proj(x), F.linear(x, model.first.q_proj.weight, model.first.q_proj.bias))
        assert linear_products.current_products() is None
    assert not counts


# ---- calls that are torch's ------------------------------------------------------------------------------------------


def calls_of(run):
    with torch.no_grad():
        return run(lambda: Model().first.q_proj(x_of()))


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_calls_that_torch_would_record_or_cast_are_its_own(counts):
    model, x = Model(), x_of()
    products = LinearProducts(model)

    def asked(function=lambda: model.first.k_proj(x)):
        counts.clear()
        products.run(function)
        return bool(counts)

    with torch.enable_grad():
        assert not asked()
    with torch.no_grad():
        assert asked()
        with torch.autocast("cpu", torch.bfloat16):
            assert not asked()
        with Watching():
            assert not asked()
        with torch.device("cpu"):
            assert asked()
        assert not asked(lambda: F.linear(x.as_subclass(Watched), model.first.k_proj.weight))
        model.second = torch.compile(model.second)
        assert not asked()


class Watched(torch.Tensor):
    pass


def test_tensors_without_versions_keep_nothing(counts, unchecked):
    with torch.inference_mode():
        model = Model()
        assert all(map(torch.equal, results(in_order, model, LinearProducts(model)), results(in_order, model)))
    assert not counts["products"]


def test_a_product_that_differs_while_a_call_warms_up_ends_them_all(counts, monkeypatch):
    right = linear_products.product
    monkeypatch.setattr(linear_products, "product", lambda *given: right(*given) * 1.1)
    model = Model()
    products = LinearProducts(model)
    found = results(backwards, model, products)
    assert counts["product"] == 1
    assert not products.agreed
    assert all(map(torch.equal, found, results(backwards, model)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_agree_row_by_row(dtype):
    expected = torch.randn(1, 4, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    eps = torch.finfo(dtype).eps
    assert agree(expected * (1 + eps), expected)
    wrong = expected.clone()
    wrong[0, 2] *= 1 + 16 * eps
    assert not agree(wrong, expected)
    assert not agree(expected[:, :3], expected)
    wrong = expected.clone()
    wrong[0, 0, 0] = torch.nan
    assert not agree(wrong, expected)
    assert agree(wrong, wrong)
    assert agree(expected * 0, expected * 0)


# ---- models ----------------------------------------------------------------------------------------------------------

FAMILIES = {
    "Llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Qwen3": ("Qwen3", {}),
    "Phi3": ("Phi3", {}),
    "Gemma3": ("Gemma3", {}),
    "GptOss": ("GptOss", {}),
}
ONE = SamplingParams(max_new_tokens=6)
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.fixture
def served(counts, captured, formulas):  # noqa: F811
    return counts


def said_by(engine, asked, params=ONE):
    return [request.token_ids for request in engine.generate(asked, params)]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_says_the_same(name, served):
    family, changes = FAMILIES[name]
    model, asked = copy.deepcopy(tiny(family, **changes)), prompts([5, 17, 1])
    engine = Engine(model, pages=64, page_size=16)
    served.clear()
    said = said_by(engine, asked)
    assert said == [greedy(tiny(family, **changes), prompt, 6) for prompt in asked]
    steps, layers = engine.counts.steps, len(model.model.layers)
    wanted = {
        "Llama": {"products": layers, "gated": layers, "residual": layers, "product": layers + 1},
        "biased": {"products": 2 * layers, "residual": layers, "product": layers + 1},
        "Phi3": {"gated": layers, "product": 3 * layers + 1},
        "Gemma3": {"products": layers, "gated": layers, "product": 2 * layers + 1},
    }
    wanted["tied"] = wanted["Qwen3"] = wanted["Llama"]
    if name in wanted:  # others have experts, whose number of calls depends on tokens
        assert served == {what: steps * count for what, count in wanted[name].items()}
    assert served["product"]
    assert engine._fingerprint.changes == 0


def test_steps_that_no_graph_captures_are_torchs(counts, formulas):  # noqa: F811
    engine, [prompt] = Engine(copy.deepcopy(tiny("Llama")), pages=16), prompts([5])
    assert said_by(engine, [prompt]) == [greedy(tiny("Llama"), prompt, 6)]
    assert not counts


def test_the_batch_that_a_graph_captures_is_told_from_others():
    engine, batches = Engine(copy.deepcopy(tiny("Llama")), pages=16), []
    runner = engine._runner
    runner._call = lambda batch, attention: batches.append(batch)
    engine.add([1, 2, 3])
    [chunk] = engine._scheduler.schedule()
    runner.prepare([chunk])
    runner.run([chunk])
    runner._decode(torch.tensor([5]))
    assert [transformers_model._is_captured(batch) for batch in batches] == [False, True]


def test_models_in_float32_are_torchs():
    assert not LinearProducts(copy.deepcopy(tiny("Llama"))).runs


def test_engines_of_one_model_take_turns(served):
    model, asked = copy.deepcopy(tiny("Llama")), prompts([5, 9])
    engines = [Engine(model, pages=32) for _ in range(2)]
    for _ in range(2):
        for engine in engines:
            assert said_by(engine, asked) == [greedy(tiny("Llama"), prompt, 6) for prompt in asked]
    assert served["products"]


def test_engines_in_two_threads_do_not_meet(served):
    model, asked = copy.deepcopy(tiny("Llama")), prompts([5, 9, 3, 12])
    engines, said = [Engine(model, pages=64) for _ in range(2)], {}

    def speak(i):
        said[i] = [said_by(engines[i], [prompt])[0] for prompt in asked[i::2]]

    threads = [threading.Thread(target=speak, args=(i,)) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert said == {i: [greedy(tiny("Llama"), prompt, 6) for prompt in asked[i::2]] for i in range(2)}


def changed_in_place(model):
    model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    model.model.layers[1].mlp.up_proj.weight.mul_(-1)


def replaced_weight(model):
    part = model.model.layers[1].self_attn.v_proj
    part.weight = nn.Parameter(part.weight * -2, requires_grad=False)


def replaced_module(model):
    layer = model.model.layers[0]
    layer.mlp.gate_proj = copy.deepcopy(layer.mlp.up_proj)
    layer.self_attn.k_proj = copy.deepcopy(layer.self_attn.v_proj)


def doubles(module, args, out):
    return out * 2


def hook_on_keys(model):
    model.model.layers[0].self_attn.k_proj.register_forward_hook(doubles)


def hook_on_up(model):
    model.model.layers[0].mlp.up_proj.register_forward_hook(doubles)


def hook_on_down(model):
    model.model.layers[0].mlp.down_proj.register_forward_hook(doubles)


def hook_on_mlp(model):
    model.model.layers[1].mlp.register_forward_hook(doubles)


def forward_of_its_own(model):
    part = model.model.layers[0].mlp.up_proj
    part.forward = lambda x: -F.linear(x, part.weight)


@pytest.mark.parametrize(
    "change",
    [changed_in_place, replaced_weight, replaced_module, hook_on_keys, hook_on_up, hook_on_down, hook_on_mlp,
     forward_of_its_own],
)  # fmt: skip
def test_a_model_that_changes_between_steps_says_what_it_says_then(change, served):
    model, changed, [prompt] = copy.deepcopy(tiny("Llama")), copy.deepcopy(tiny("Llama")), prompts([5])
    engine = Engine(model, pages=32)
    assert said_by(engine, [prompt]) == [greedy(tiny("Llama"), prompt, 6)]
    with torch.no_grad():
        change(model)
        change(changed)
    expected = greedy(changed, prompt, 6)
    assert expected != greedy(tiny("Llama"), prompt, 6)
    assert said_by(engine, [prompt]) == [expected]


def test_adapters_are_added_to_products(served):
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], lora_alpha=16)
        torch.manual_seed(1)
        found = peft.get_peft_model(copy.deepcopy(tiny("Llama")), config).eval().requires_grad_(False)
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
        return found

    [prompt] = prompts([5])
    expected = greedy(adapted(), prompt, 6)
    assert expected != greedy(tiny("Llama"), prompt, 6)
    served.clear()
    assert said_by(Engine(adapted(), pages=32), [prompt]) == [expected]
    assert served["product"]
    assert not served["gated"]


@in_interpreter
@pytest.mark.parametrize("name", FAMILIES)
def test_in_the_interpreter_a_model_in_float16_has_the_logits_of_torchs_products(name, captured, monkeypatch):
    family, changes = FAMILIES[name]
    model, asked = copy.deepcopy(tiny(family, **changes)).half(), prompts([5, 1])
    found, used, step = list[torch.Tensor](), Counter(), transformers_model.TransformersModel.step

    def noting(self, batch, attention):
        found.append(step(self, batch, attention).float())
        assert self._products.agreed
        return found[-1]

    def counting(name, function):
        def counted(*given):
            result = function(*given)
            used[name] += result is not None
            return result

        return counted

    monkeypatch.setattr(transformers_model.TransformersModel, "step", noting)
    for each in ("product", "products", "gated_product"):
        monkeypatch.setattr(linear_products, each, counting(each, getattr(linear_products, each)))
    params = SamplingParams(max_new_tokens=4)
    tokens = said_by(Engine(model, pages=64, page_size=16, kernel="gather"), asked, params)
    ours = found[:]
    found.clear()
    assert used["product"] >= 4 * len(model.model.layers)
    assert bool(used["products"]) == (name != "Phi3")
    assert bool(used["gated_product"]) == (name not in ("biased", "GptOss"))
    used.clear()
    monkeypatch.setattr(LinearProducts, "run", lambda self, function, *args: function(*args))
    assert said_by(Engine(model, pages=64, page_size=16, kernel="gather"), asked, params) == tokens
    assert not used
    for each, wanted in zip(ours, found, strict=True):
        assert float((each - wanted).norm()) < 0.01 * float(wanted.norm())


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 20, 64])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "GptOss"])
def test_on_cuda_a_captured_step_has_the_logits_of_torchs_products(name, rows, monkeypatch):
    family, changes = FAMILIES[name]
    model = copy.deepcopy(tiny(family, **changes, **WIDE)).to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.1)  # wide layers of large weights make much of a rounding
    asked, run = prompts([5, 17, 1] * 22)[:rows], CudaGraphs.run
    found, served, ours_run = list[torch.Tensor](), [], LinearProducts.run

    def noting(self, *given):
        logits = run(self, *given)
        found.append(logits.float().clone())
        return logits

    def of_products(self, *given):
        served.append(self)
        return ours_run(self, *given)

    monkeypatch.setattr(CudaGraphs, "run", noting)
    monkeypatch.setattr(LinearProducts, "run", of_products)
    sizes = {"pages": 512, "page_size": 16, "max_sequences": 64, "cuda_graphs": True}
    first = SamplingParams(max_new_tokens=2)  # the token of the prompt, and that of one step
    said_by(Engine(model, **sizes), asked, first)
    assert served
    assert all(each.runs and each.agreed for each in served)
    assert not any(each.apart for each in served)
    ours = found[0]
    found.clear()
    monkeypatch.setattr(LinearProducts, "run", lambda self, function, *given: function(*given))
    said_by(Engine(model, **sizes), asked, first)
    assert float((ours - found[0]).norm()) < 0.03 * float(found[0].norm())

"""A model is known by what it computes: whatever becomes another one finds nothing of what it computed before."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from attnspan import Engine, SamplingParams
from attnspan.engine.fingerprint import ModelFingerprint, Parts
from attnspan.errors import ModelError
from attnspan.parallel.checksum import Weights
from tests.engine.models import prompts, tiny

PARAMS = SamplingParams(max_new_tokens=6)


def engine(model, **options):
    return Engine(model, **({"pages": 64, "page_size": 4, "max_sequences": 8, "max_tokens": 64} | options))


def alone(model, prompt, new=6):
    """What the model says as it is now, without pages."""
    tokens = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    return model.generate(input_ids=tokens, max_new_tokens=new, **options)[0, len(prompt) :].tolist()


def drive(one):
    while one.unfinished:
        one.step()


# ---- whatever is changed ---------------------------------------------------------------------------------------------


def a_fused_step(model):
    """As Trainer does by default; it does not raise the version of a tensor."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
    tokens = torch.tensor(prompts([20]))
    model(input_ids=tokens, labels=tokens).loss.backward()
    before = [each._version for each in model.parameters()]
    optimizer.step()
    assert [each._version for each in model.parameters()] == before
    optimizer.zero_grad()
    model.eval().requires_grad_(False)


def written_through_data(model):
    model.model.layers[0].mlp.up_proj.weight.data.neg_()


def rows_that_trade_places(model):
    weight = model.model.embed_tokens.weight.data
    weight[2:] = weight[2:].flip(0)


def written_through_numpy(model):
    model.model.layers[0].self_attn.q_proj.weight.detach().numpy()[:] *= -1


def another_activation(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def a_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: -out)


def a_hook_of_all_modules(model):
    def doubled(module, given, out):
        return 2 * out if isinstance(module, nn.Linear) else out

    model.handle = nn.modules.module.register_module_forward_hook(doubled)


def another_forward(model):
    layer = model.model.layers[0].mlp
    layer.forward = lambda x, forward=layer.forward: -forward(x)


def a_buffer_written(model):
    model.model.rotary_emb.inv_freq.mul_(0.25)


def a_buffer_written_through_data(model):
    model.model.rotary_emb.inv_freq.data.mul_(0.25)


def a_buffer_replaced(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.25


def a_setting(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 5.0


def another_class(model):
    class Other(type(model.model.norm)):
        def forward(self, x):
            return -super().forward(x)

    model.model.norm.__class__ = Other


def a_parametrization(model):
    class Negative(nn.Module):
        def forward(self, weight):
            return -weight

    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Negative())


def modules_that_trade_places(model):
    mlp = model.model.layers[0].mlp
    mlp.up_proj, mlp.gate_proj = mlp.gate_proj, mlp.up_proj


CHANGES = [
    a_fused_step, written_through_data, rows_that_trade_places, written_through_numpy, another_activation, a_hook,
    a_hook_of_all_modules, another_forward, a_buffer_written, a_buffer_written_through_data, a_buffer_replaced,
    a_setting, another_class, a_parametrization, modules_that_trade_places,
]  # fmt: skip


@pytest.fixture
def model():
    one = copy.deepcopy(tiny("Llama"))
    yield one
    if hasattr(one, "handle"):
        one.handle.remove()


@pytest.mark.parametrize("change", CHANGES)
def test_what_another_model_computed_is_not_found(model, change):
    [prompt] = prompts([40])
    one = engine(model)
    running = one.add(prompt, SamplingParams(max_new_tokens=20))
    before = one.generate([prompt], PARAMS)[0].token_ids
    change(model)
    known, expected = one.counts.cached, alone(model, prompt)
    assert expected != before  # or the test would show nothing
    assert one.generate([prompt], PARAMS)[0].token_ids == expected
    assert one.counts.cached == known
    assert one.generate([prompt], PARAMS)[0].token_ids == expected
    assert one.counts.cached > known  # of the model as it is, it is found
    drive(one)
    assert running.finish_reason == "length"
    one.check()


@pytest.mark.parametrize("change", [written_through_data, a_hook, a_buffer_written_through_data])
def test_a_request_that_queues_while_a_model_changes_finds_nothing_of_the_old_one(model, change):
    """It was added long before, so that only what it finds tells that something must be compared."""
    [prompt] = prompts([40])
    one = engine(model, max_sequences=1)
    first = one.add(prompt, PARAMS)
    queued = one.add(prompt, PARAMS)
    while not first.finished:
        one.step()
    change(model)
    drive(one)
    assert queued.token_ids == alone(model, prompt)
    one.check()


def test_averages_that_are_put_in_and_out_again_leave_nothing_behind(model):
    """Both written through .data: after the second, the bits are what they were at first."""
    [prompt, other] = prompts([40, 30])
    one = engine(model)
    one.generate([prompt], PARAMS)

    def swap():
        for weight in model.parameters():
            weight.data.neg_()

    expected = alone(model, other)
    swap()
    assert one.generate([other], PARAMS)[0].token_ids == alone(model, other) != expected
    swap()
    assert one.generate([other], PARAMS)[0].token_ids == expected


def test_a_hook_that_was_there_for_some_steps_leaves_nothing_behind(model):
    [prompt] = prompts([40])
    one, expected = engine(model), alone(model, prompt)
    running = one.add(prompt, SamplingParams(max_new_tokens=20))
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: -out)
    one.step()
    handle.remove()
    assert one.generate([prompt], PARAMS)[0].token_ids == expected
    one.cancel(running)
    assert one.generate([prompt], PARAMS)[0].token_ids == expected


def test_adapters_that_are_switched_disabled_or_scaled_find_nothing_of_each_other(model):
    peft = pytest.importorskip("peft")
    [prompt] = prompts([40])
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options), adapter_name="one")
    adapted.add_adapter("two", peft.LoraConfig(**options))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora" in name:
                weight.normal_(0.0, 0.5)
    adapted.eval()
    served = engine(adapted)

    def said():
        expected = alone(adapted, prompt)
        for _ in range(2):
            assert served.generate([prompt], PARAMS)[0].token_ids == expected
        return tuple(expected)

    def scaled():
        for module in adapted.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["two"] *= 3

    found = [said()]
    adapted.set_adapter("two")
    found.append(said())
    with adapted.disable_adapter():
        found.append(said())
    scaled()
    found.append(said())
    adapted.merge_adapter()
    found.append(said())
    adapted.unmerge_adapter()
    adapted.set_adapter("one")
    assert said() == found[0]
    assert len(set(found[:4])) == 4


# ---- what is not a change --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Notes something of every call, as some models do."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.last = inner, 0, None

    def forward(self, x):
        self.calls, self.last = self.calls + 1, x
        return self.inner(x)


def test_a_model_that_notes_its_own_calls_finds_what_it_computed(model):
    model.model.norm = Counting(model.model.norm)
    one, [prompt] = engine(model), prompts([40])
    for _ in range(4):
        assert one.generate([prompt], PARAMS)[0].token_ids == alone(tiny("Llama"), prompt)
    assert one._fingerprint.version == 0
    assert one.counts.cached == 3 * 39
    model.model.norm.last = None  # from outside
    one.generate([prompt], PARAMS)
    assert one._fingerprint.version == 1


def test_what_is_the_same_before_and_after_is_no_change(model):
    one, [prompt] = engine(model), prompts([40])
    one.generate([prompt], PARAMS)
    model.train()
    model.eval()
    model.requires_grad_(True)
    model.requires_grad_(False)
    model.set_attn_implementation("eager")
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=False)
    known = one.counts.cached
    one.generate([prompt], PARAMS)
    assert one._fingerprint.version <= 1  # weights were written to
    assert one.generate([prompt], PARAMS)[0].token_ids == alone(model, prompt)
    assert one.counts.cached > known


def test_weights_are_read_when_requests_come_or_find_something_and_never_twice_a_step(model, monkeypatch):
    reads = []
    read = Weights.content
    monkeypatch.setattr(Weights, "content", lambda self: reads.append(1) or read(self))
    one = engine(model, max_sequences=2)
    assert len(reads) == 1
    for prompt in prompts([20, 30, 12, 25, 9], seed=3):
        one.add(prompt, SamplingParams(max_new_tokens=12))
    drive(one)
    assert len(reads) == 2  # five requests that begin in four steps, and find nothing
    one.generate([[5, 6, 7, 8, 9, 10]] * 2, PARAMS)
    reads.clear()
    one.generate([[5, 6, 7, 8, 9, 10]] * 2, PARAMS)  # both are found, in one step
    assert len(reads) == 1


def test_weights_that_were_replaced_are_not_held_on_to(model):
    one = engine(model)
    one.generate(prompts([10]), PARAMS)
    weight = model.model.layers[0].mlp.up_proj.weight
    old = weakref.ref(weight.untyped_storage())
    weight.data = weight.data.clone()
    gc.collect()
    assert old() is None or old().nbytes() == 0


def test_captured_graphs_go_with_the_parts_of_a_model_and_not_with_what_weights_are(model):
    one, dropped = engine(model), []
    one._runner.forget_graphs = lambda: dropped.append(1)
    one.generate(prompts([10]), PARAMS)
    written_through_data(model)  # where they lie, which is what a graph reads
    one.generate(prompts([10]), PARAMS)
    assert not dropped
    running = one.add(prompts([10])[0], SamplingParams(max_new_tokens=20))
    one.step()
    another_activation(model)
    one.step()  # a sample that is on its way decodes with the model as it is
    assert len(dropped) == 1
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    one.step()
    assert len(dropped) == 2
    one.cancel(running)


def test_a_model_whose_layers_are_others_is_refused_until_they_are_back(model):
    one, [prompt] = engine(model), prompts([10])
    one.generate([prompt], PARAMS)
    layer = model.model.layers[0].self_attn
    scale, layer.scaling = layer.scaling, 2.0
    for again in (lambda: one.generate([prompt]), one.warm_up):
        with pytest.raises(ModelError, match="the layers of model have changed since the engine was made"):
            again()
    layer.scaling = scale
    assert one.generate([prompt], PARAMS)[0].token_ids == alone(model, prompt)


def test_parts_can_be_compared_whatever_was_put_in_their_place():
    class Odd:
        def __eq__(self, other):
            raise RuntimeError("not to be compared")

        __hash__ = None

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].table = torch.ones(3)
    for value in (torch.zeros(3), Odd(), [1, 2], {"a": [1]}, None):
        parts = Parts(model)
        assert parts.unchanged()
        model[0].table = value
        assert not parts.unchanged()
    parts = Parts(model)
    model[0].nested = {"a": [1]}
    assert not parts.unchanged()
    parts = Parts(model)
    model[0].nested["a"].append(2)
    assert not parts.unchanged()


def test_a_version_counts_every_change_once():
    model = nn.Sequential(nn.Linear(2, 2))
    known = ModelFingerprint(model)
    known.compare_parts()
    assert (known.version, known.changes) == (0, 0)
    model[0].weight.data.add_(1)
    known.compare_content()
    assert known.version == 1
    known.compare_content()
    model[0].weight.data.add_(1)
    known.compare_content()
    assert known.version == 1  # compared since the last look
    known.compare_parts()
    known.compare_content()
    assert (known.version, known.changes) == (2, 0)
    model[0].bias = None
    known.compare_parts()
    assert (known.version, known.changes) == (3, 1)

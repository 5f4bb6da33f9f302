"""MLA models that are enabled: latents travel, and loss, logits and gradients are those of one device."""

import copy

import pytest
import torch
import transformers

import attnspan as span
from attnspan.attention.bound_plan import BoundPlan
from attnspan.integrations.huggingface import enable, latents
from attnspan.plan import Shape
from attnspan.plan.traffic import received_bytes
from attnspan.testing import loopback
from tests.engine.test_latents import FAMILIES
from tests.integrations.families import answers, batch, enabled_answers, off
from tests.integrations.test_more_families import BOUND, built

pytestmark = pytest.mark.usefixtures("quietly")

FEW = ("DeepseekV3", "DeepseekV2")


def model_of(name):
    if name != "Mistral4":
        return built(name, FAMILIES[name]).train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**FAMILIES[name]))
    return model.train()


def session(world, strategy="needed(2)", length=23):
    return span.ContextParallel(world, seq_len=length, mask=span.Full(), strategy=strategy)


def travelled(handle, rank):
    """Whether what arrived in forward passes was latents, as planned; else keys."""
    lines = handle.session.report().lines
    assert all(
        line.received.forward == (line.calls + line.recomputed) * received_bytes(line.plan, line.shape, rank).forward
        for line in lines
    )
    return {line.shape.latent for line in lines}


def enabled(world, model, given, strategy="needed(2)"):
    model = copy.deepcopy(model)
    with enable(model, session(world, strategy)) as handle:
        out = model(**given)
        out.loss.backward()
        handle.session.average_gradients(model)
        found = out.loss.detach(), handle.unshard(out.logits.detach()), {n: x.grad for n, x in model.named_parameters()}
        width = travelled(handle, world.rank)
    assert not any(latents.METHOD in vars(module) for module in model.modules()), "nothing is left of it"
    return found, width


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_trains_over_latents_as_on_one_device(name):
    model, given = model_of(name), batch()
    true = answers(copy.deepcopy(model), given)
    for strategy, ranks in (("needed(2)", 3), ("ring", 2)):
        for found, width in loopback(ranks).run(lambda w, by=strategy: enabled(w, model, given, by)):
            assert width == {24}
            apart = off(found, true)
            assert apart[0] < BOUND, apart


def test_under_ulysses_keys_travel_and_by_default_what_is_faster(monkeypatch):
    model, given = model_of("DeepseekV3"), batch()
    true = answers(copy.deepcopy(model), given)
    for found, width in loopback(2).run(lambda w: enabled(w, model, given, "ulysses")):
        assert width == {None}
        assert off(found, true)[0] < BOUND
    for pays, expected in ((True, 24), (False, None)):
        monkeypatch.setattr(BoundPlan, "latents_pay", lambda self, shape, pays=pays: pays)
        for found, width in loopback(2).run(lambda w: enabled(w, model, given, "auto")):
            assert width == {expected}
            assert off(found, true)[0] < BOUND


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_expand_again(reentrant):
    model, given = model_of("DeepseekV3"), batch()
    true = answers(copy.deepcopy(model), given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for found, width in loopback(2).run(lambda w: enabled(w, model, given)):
        assert width == {24}
        assert off(found, true)[0] < BOUND


def test_packed_documents_are_kept_apart():
    model, given = model_of("DeepseekV3"), batch(rows=1)
    positions = torch.cat([torch.arange(9), torch.arange(14)]).unsqueeze(0)
    parts = [
        answers(copy.deepcopy(model), {"input_ids": given["input_ids"][:, at]} | {"labels": given["labels"][:, at]})
        for at in (slice(0, 9), slice(9, 23))
    ]
    for found, width in loopback(2).run(lambda w: enabled(w, model, given | {"position_ids": positions})):
        assert width == {24}
        torch.testing.assert_close(found[1], torch.cat([logits for _, logits, _ in parts], dim=1), rtol=0, atol=1e-3)


def test_an_adapter_on_the_matrix_learns():
    peft = pytest.importorskip("peft")
    model, given = model_of("DeepseekV3"), batch()
    config = peft.LoraConfig(r=2, target_modules=["kv_b_proj", "kv_a_proj_with_mqa"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config)
    true = answers(copy.deepcopy(adapted), given)

    def rank(world):
        ours = copy.deepcopy(adapted)
        return enabled_answers(world, ours, given)

    assert any("lora" in name and grad.any() for name, grad in true[2].items() if grad is not None)
    for found in loopback(2).run(rank):
        assert off(found, true)[0] < BOUND


def test_shapes_of_latents_are_those_that_are_planned_with():
    """A wrong shape would plan other bytes than those that travel."""
    shape = Shape(4, 4, 16, 12, 2, "float32", latent=24)
    assert (shape.kv_bytes, shape.expanded.kv_bytes) == (2 * 24 * 4, 2 * 4 * 28 * 4)

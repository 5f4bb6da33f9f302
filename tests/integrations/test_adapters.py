"""Adapters of peft: those that change layers are as exact as the model, the others are refused by their names."""

import copy
import warnings

import pytest
import torch

from attnspan import Engine, SamplingParams
from attnspan.errors import ModelError
from attnspan.integrations.huggingface import enable
from attnspan.testing import loopback
from tests.engine.models import prompts, tiny

peft = pytest.importorskip("peft")

INVOCATION = [7, 8]
LAYERS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
ONE = LAYERS | {"target_modules": ["q_proj"]}
EXACT = {
    "LoRA": lambda: peft.LoraConfig(r=4, **LAYERS),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, **LAYERS),
    "IA3": lambda: peft.IA3Config(feedforward_modules=[], **LAYERS),
    "LoHa": lambda: peft.LoHaConfig(r=4, **LAYERS),
    "LoKr": lambda: peft.LoKrConfig(r=4, **LAYERS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, r=0, **LAYERS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, **LAYERS),
    "VeRA": lambda: peft.VeraConfig(r=4, **ONE),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=8, **LAYERS),
    "HRA": lambda: peft.HRAConfig(r=4, **LAYERS),
    "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=8, **ONE),
    "RandLoRA": lambda: peft.RandLoraConfig(r=4, **ONE),
    "LN": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "prompts in layers": lambda: peft.AdaptionPromptConfig(adapter_layers=1, adapter_len=4, task_type="CAUSAL_LM"),
}
PROMPTS = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P_TUNING": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def adapted(config):
    """A model with an adapter whose numbers are not those it begins with."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(tiny("Llama")), config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def tokens():
    [prompt] = prompts([16])
    return [*prompt[:8], *INVOCATION, *prompt[8:]]


def enabled(model, **given):
    def rank(world):
        own = copy.deepcopy(model)
        with enable(own, world):
            return own(**given).loss

    return loopback(2).run(rank)


@pytest.mark.parametrize("kind", EXACT)
def test_adapters_that_change_layers_are_served_and_trained_as_on_one_device(kind):
    model, prompt = adapted(EXACT[kind]()), tokens()
    given = torch.tensor([prompt])
    expected = model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, len(prompt) :].tolist()
    engine = Engine(model, pages=64, page_size=4)
    for answer in engine.generate([prompt, prompts([9])[0], prompt], SamplingParams(max_new_tokens=6))[::2]:
        assert answer.token_ids == expected
    alone = model(input_ids=given, labels=given).loss
    for loss in enabled(model, input_ids=given, labels=given):
        torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PROMPTS)
def test_adapters_that_put_tokens_before_a_prompt_are_refused_by_name(kind):
    model = adapted(PROMPTS[kind]())
    message = rf"adapter 'default' \({kind}\) puts tokens of its own before those of a prompt, which is not served"
    with pytest.raises(ModelError, match=message):
        Engine(model, pages=64)
    with pytest.raises(ModelError, match=message):
        enabled(model, input_ids=torch.tensor([tokens()]))


def test_an_activated_lora_is_refused_by_name_also_inside_and_when_it_comes_later():
    config = peft.LoraConfig(r=4, alora_invocation_tokens=INVOCATION, **LAYERS)
    model = adapted(config)
    message = r"adapter 'default' is an activated LoRA \(aLoRA, in .*q_proj\), which begins where its alora_invocation"
    for each in (model, model.get_base_model()):
        with pytest.raises(ModelError, match=message):
            Engine(each, pages=64)
    with pytest.raises(ModelError, match=message):
        enabled(model, input_ids=torch.tensor([tokens()]))
    plain = adapted(EXACT["LoRA"]())
    engine = Engine(plain, pages=64)
    engine.generate([tokens()])
    plain.add_adapter("later", config)
    for _ in range(2):
        with pytest.raises(ModelError, match="adapter 'later' is an activated LoRA"):
            engine.generate([tokens()])
    plain.delete_adapter("later")
    assert engine.generate([tokens()])[0].finish_reason == "length"


def test_an_adapter_with_a_loss_of_its_own_is_trained_without_labels_alone():
    config = peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, tinit=1, tfinal=2, **LAYERS)
    model, given = adapted(config), torch.tensor([tokens()])
    with pytest.raises(ModelError, match="labels must not be given: AdaLoraModel adds a term of its own to the loss"):
        enabled(model, input_ids=given, labels=given)

    def rank(world):
        own = copy.deepcopy(model)
        with enable(own, world, outputs="whole"):
            return own(input_ids=given).logits

    for logits in loopback(2).run(rank):
        torch.testing.assert_close(logits, model(input_ids=given).logits, rtol=1e-4, atol=1e-4)
    expected = model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, given.shape[1] :].tolist()
    assert Engine(model, pages=64).generate([tokens()], SamplingParams(max_new_tokens=6))[0].token_ids == expected


@pytest.mark.skipif(not hasattr(peft, "LilyConfig"), reason="this version of peft has no Lily")
def test_an_adapter_that_takes_a_mean_over_all_tokens_is_refused_by_name():
    model = adapted(peft.LilyConfig(**LAYERS))
    with pytest.raises(
        ModelError, match="is an adapter of the kind Lily, which takes the mean of its routers over all"
    ):
        Engine(model, pages=64)
    with pytest.raises(ModelError, match="is an adapter of the kind Lily"):
        enabled(model, input_ids=torch.tensor([tokens()]))

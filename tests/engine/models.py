"""Tiny models of transformers with random weights, and what they say when nobody pages anything."""

import contextlib
import functools
import warnings

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = 7
MIXED = ["sliding_attention", "full_attention"]

FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "Gemma3": {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": WINDOW, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {},
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}

HYBRIDS = {
    "Qwen3Next": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
}
"""Families with recurrent layers, whose states lie in pages of their own."""


@functools.cache
def tiny(family, **changes):
    """A model of a family, in eval mode. Weights are large, so that tokens differ and ties do not happen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
            **(SIZES | (FAMILIES | HYBRIDS)[family] | changes)
        )
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model.eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # a state that forgets half within some tokens
                parameter.fill_(-1.0)
            elif parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    model.generation_config.eos_token_id = None
    return model


def prompts(lengths, seed=0):
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@contextlib.contextmanager
def eager(model):
    """transformers' plain formulas, whatever else it would take: its `sdpa` of 5.17 leaves soft-caps out."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@functools.cache
def _greedy(model, prompt, new):
    given = torch.tensor([prompt])
    for module in model.modules():
        if hasattr(module, "conv1d_state"):  # RecurrentGemma's, which a prompt of one token would go on from
            module.conv1d_state = None
    with eager(model):
        out = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def greedy(model, prompt, new):
    """What `model.generate` says after a prompt: the oracle."""
    return _greedy(model, tuple(prompt), new)


def logprobs_of(model, prompt, said):
    """The model's log-probabilities (tokens said, V) at each place where a token was said, in float64.

    One call over everything, without a cache. Unlike `greedy`, it does not go another way after a tie, and so tells of
    every later token what it must be.
    """
    with torch.no_grad(), eager(model):
        logits = model(torch.tensor([[*prompt, *said]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


@functools.cache
def tokenizer():
    """Byte-level, with a few merges, so that a letter may take several tokens and a token several letters."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    inner.train_from_iterator(["the cat and the dog and the hat sat there on that mat"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")

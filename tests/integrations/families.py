"""Tiny models of transformers with random weights, one of each family, and one device's answer for a batch.

``family`` gives a model by name, the same weights every time: two layers, 32 wide, float32. ``one_device`` runs it as
it is, with transformers' own eager attention; ``on_ranks`` runs it enabled, on virtual ranks; ``off`` says how far
loss, logits and every gradient are apart.
"""

import copy
import functools
import warnings
from threading import Lock

import torch
import transformers

from attnspan.integrations.huggingface import enable
from attnspan.testing import loopback

BOUND = 2e-5
"""float32, relative to the largest entry: rounding of another order of sums, through two layers and back."""

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
BERT = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "bos_token_id")}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "forced_eos_token_id": None,
}

SPECS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZES | {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", SIZES | {"sliding_window": 5}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        # a cap that scores of random weights come near, so that leaving it out is noticed
        SIZES | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.5},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        SIZES | MIXED | EXPERTS | {"head_dim": 8, "rope_parameters": None},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        # every other layer has no positions, and a temperature that a few tokens change
        SIZES
        | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 5, "no_rope_layer_interval": 2, "floor_scale": 4, "attn_scale": 0.7},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SIZES | {"num_key_value_heads": 1}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SIZES | EXPERTS),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", BERT | NO_DROPOUT),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        BERT
        | {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 8}
        | {"bos_token_id": None, "cls_token_id": None, "sep_token_id": None},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,  # so that sequences are longer
    "decoder_start_token_id": 0,
    "eos_token_id": None,
}
SIX_HEADS = {"vocab_size": VOCAB, "hidden_size": 48, "eos_token_id": None}  # slopes of a number that is no power of 2
FALCON = SIX_HEADS | {"num_hidden_layers": 2, "num_attention_heads": 6}
BIASED = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5),
    "pop2piano": ("Pop2PianoForConditionalGeneration", "Pop2PianoConfig", T5),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        SIX_HEADS | {"n_layer": 2, "n_head": 6, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64, "eos_token_id": None},
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON | {"alibi": True}),
    "falcon, rotary": (
        "FalconForCausalLM",
        "FalconConfig",
        FALCON | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
}
"""Families that add numbers to scores, or have had a part in that."""

GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
INLINE = {
    "gpt-neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 5, "bos_token_id": None, "eos_token_id": None},
    ),
    "gpt-j": ("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "openai-gpt": (
        "OpenAIGPTLMHeadModel",
        "OpenAIGPTConfig",
        {key: value for key, value in GPT.items() if not key.endswith("token_id")} | {"embd_pdrop": 0.0},
    ),
    "roformer": (
        "RoFormerForCausalLM",
        "RoFormerConfig",
        BERT | NO_DROPOUT | {"embedding_size": 32, "is_decoder": True, "rotary_value": True},
    ),
    "mvp": ("MvpForConditionalGeneration", "MvpConfig", BART),
}
"""Families that write their attention out, of each kind one."""

SEQ2SEQ = ("bart", "t5", "umt5", "mt5", "pop2piano", "mvp")
CAUSAL = ("llama", "qwen3", "mistral", "gemma3", "gemma2", "gpt-oss", "llama4", "phi3", "mixtral", "gpt2")


BUILDING = Lock()


@functools.cache
def _built(name):
    transformers.logging.set_verbosity_error()
    model, config, sizes = (SPECS | BIASED | INLINE)[name]
    kind = "sdpa" if "Falcon" in config else "eager"  # which adds ALiBi twice, in Falcon
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        built = getattr(transformers, model)(getattr(transformers, config)(**sizes, attn_implementation=kind))
        for parameter in built.parameters():  # zeros and ones would hide what is left out
            torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() < 2 else parameter.data.mul_(5)
    return built


def family(name):
    """A model, in training mode, of its own."""
    with BUILDING:  # ranks are threads, and share torch's random numbers
        return copy.deepcopy(_built(name)).train()


def batch(name="llama", *, rows=2, length=23, seed=0):
    """A whole batch of random tokens, some of which have no label."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (rows, length), generator=drawn)
    if name in SEQ2SEQ:
        labels = torch.randint(3, VOCAB, (rows, length - 4), generator=drawn)
        labels[0, 3:5] = -100
        return {"input_ids": tokens, "labels": labels}
    labels = tokens.clone()
    labels[0, 3:9] = -100
    return {"input_ids": tokens, "labels": labels}


def answers(model, given, **more):
    """Loss, logits and every gradient of a call and its backward."""
    model.zero_grad()
    out = model(**given, **more)
    out.loss.backward()
    return out.loss.detach(), out.logits.detach(), gradients(model)


def gradients(model):
    return {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}


def one_device(name, given, **more):
    """What a model answers by itself."""
    return answers(family(name), given, **more)


def enabled_answers(world, model, given, average=True, **options):
    """What an enabled model answers: the loss, all tokens' logits, gradients averaged over ranks."""
    with enable(model, world, **options) as handle:
        model.zero_grad()
        out = model(**given)
        out.loss.backward()
        if average:
            handle.session.average_gradients(model)
        handle.assert_used()
        return out.loss.detach(), handle.unshard(out.logits.detach()), gradients(model)


def on_ranks(name, given, ranks, **options):
    """What every rank answers."""
    return loopback(ranks).run(lambda world: enabled_answers(world, family(name), given, **options))


def off(found, wanted, valid=None):
    """The largest difference of loss, logits (where `valid`) and gradients, each relative to its largest entry."""
    (loss, logits, grads), (true_loss, true_logits, true_grads) = found, wanted
    keep = slice(None) if valid is None else valid.bool()
    apart = {"loss": _apart(loss, true_loss), "logits": _apart(logits[keep], true_logits[keep])}
    assert grads.keys() == true_grads.keys()
    for name, grad in grads.items():
        if true_grads[name] is None:
            assert grad is None or not grad.any(), name
        else:
            apart[name] = _apart(grad, true_grads[name])
    worst = max(apart, key=apart.get)
    return apart[worst], worst


def _apart(one, other):
    assert one.shape == other.shape, (one.shape, other.shape)
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-3)).item()

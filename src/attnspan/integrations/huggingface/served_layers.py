"""The layers of a transformers model that an engine serves; a model that has others is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.adapters import adapted, check_adapters
from attnspan.integrations.huggingface.checking import check_alone, check_positions, counting_modules
from attnspan.integrations.huggingface.fused_modules import FusedModule, fused_modules
from attnspan.integrations.huggingface.inline_attention import dispatch_forward
from attnspan.integrations.huggingface.layer_binding import is_bound
from attnspan.integrations.huggingface.layers import (
    AttentionLayer,
    attention_layers,
    check_decodes,
    check_is_model,
    is_left_out,
    split_idle,
)
from attnspan.integrations.huggingface.lora import lora_layers
from attnspan.integrations.huggingface.mixers import RecurrentMixer, recurrent_mixers
from attnspan.integrations.huggingface.paged_attention import register_paged_attention
from attnspan.integrations.huggingface.positions import give_positions
from attnspan.integrations.huggingface.token_mixing import token_mixing
from attnspan.integrations.huggingface.towers import decoder_of, modules_outside


@dataclass(frozen=True, slots=True)
class ServedLayers:
    """The layers of a model that look at other tokens: those that attend, and recurrent mixers."""

    attention: list[AttentionLayer]
    mixers: list[RecurrentMixer]
    lora: list[nn.Module] = field(default_factory=list)  # with adapters that requests may name
    fused: list[FusedModule] = field(default_factory=list)  # that run as one kernel

    @property
    def described(self) -> list[str]:
        """All that counts of each."""
        return [str(each) for each in (*self.attention, *self.mixers)]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that a packed row is given by: recurrent layers alone need no positions."""
        return ("input_ids", "position_ids") if self.attention else ("input_ids",)


def served_layers(model: PreTrainedModel) -> ServedLayers:
    """The layers of a model; ModelError for what cannot be generated with."""
    if isinstance(model, nn.Module) and is_bound(model):
        raise ModelError("model is enabled for training over ranks; call disable() of its handle before it is served")
    check_is_model(model)
    outside = modules_outside(model, decoder_of(model))
    mixers = recurrent_mixers(model, outside)
    layers, idle = split_idle(model, attention_layers(model, {mixer.module for mixer in mixers}, outside=outside))
    check_adapters(model)
    check_alone(adapted(model))
    check_positions((found for found in model.named_modules() if found[1] not in outside), counted=True)
    _check_compiled(model, {layer.module for layer in layers} | {mixer.module for mixer in mixers})
    if not model.config.is_encoder_decoder and any(layer.bias is None for layer in layers):
        give_positions(counting_modules(adapted(model)))
    if model.config.is_encoder_decoder:
        encoder = set(model.get_encoder().modules())
        layers = [layer for layer in layers if not layer.cross and layer.module not in encoder]
    layers = [replace(layer, causal=True) for layer in layers] if outside else layers  # masks are looked at by a probe
    check_decodes(layers, "an engine")
    if not model.config.is_encoder_decoder:
        _check_token_mixing(decoder_of(model), {mixer.module for mixer in mixers}, {layer.module for layer in idle})
    for layer in layers:
        dispatch_forward(layer.module)
    if not callable(getattr(model, "set_attn_implementation", None)) or head_of(model) is None:
        raise ModelError(f"model must have a head for the next token, got {type(model).__name__}")
    if not isinstance(getattr(model.get_input_embeddings(), "weight", None), Tensor):
        raise ModelError(f"model must have one embedding for each token, got {type(model).__name__}, which has several")
    register_paged_attention()
    fused = fused_modules(model, (layer.module for layer in layers))
    return ServedLayers(layers, mixers, lora_layers(model), fused)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The module that computes logits: of a model, or of its decoder or one around that."""
    inside = adapted(model)  # a PeftModel is none of transformers, and has no head of its own
    decoder = decoder_of(inside)
    around = [each for each in inside.modules() if isinstance(each, PreTrainedModel) and decoder in set(each.modules())]
    heads = (each.get_output_embeddings() for each in around)
    return next((head for head in heads if head is not None), None)


def _check_token_mixing(decoder: nn.Module, mixers: set[nn.Module], idle: set[nn.Module]) -> None:
    """Refuse a decoder that looks at other tokens without attention: a step has those of several samples."""
    for name, module in decoder.named_modules():
        mixing = None if module in mixers or is_left_out(module, idle) else token_mixing(module)
        if mixing is not None:
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) looks at tokens beside a token's own, {mixing}, "
                "which an engine does not serve"
            )


def _check_compiled(model: nn.Module, attends: set[nn.Module]) -> None:
    """Refuse compiled attention: a graph of it knows nothing of pages. Compiled parts without any are served."""
    for name, module in model.named_modules():
        how = None
        if type(module).__name__ == "OptimizedModule":  # importing it takes longer than all of this package
            how = "torch.compile(...); give what was compiled, its _orig_mod"
        elif module._compiled_call_impl is not None:
            how = "compile(); give a model that was not compiled in place"
        elif hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            how = "forward = torch.compile(forward); give it its own forward back"
        if how is not None and not attends.isdisjoint(module.modules()):
            raise ModelError(
                f"{name or 'model'} ({type(module).__name__}) is compiled, by {how}: an engine serves "
                "attention that is not compiled"
            )

"""The attention function of enabled models, registered with transformers by the name ``"attnspan"``.

transformers looks it up in every call of a layer and passes the module, shards of query, key and value, the mask that
the model asked for (masking.py) and the options of the layer. The module has a `LayerBinding`: its layer as data, and
the enabled model that it belongs to, which has the state of the pass. Arguments that differ from the layer's are
refused before any communication.

Registered when the first model is enabled. A module without a binding belongs to a model that was not enabled, which is
an error.

Shapes: query (B, H, S, D), key (B, Hk, S, D), value (B, Hk, S, Dv), out (B, S, H, Dv), S this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnspan.dtypes import dtype_name
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.latents import LatentSource, latents_in
from attnspan.integrations.huggingface.layer_binding import BINDING, LayerBinding
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.masking import LayerMask, requested_mask
from attnspan.integrations.huggingface.plain_attention import OWN_MASK
from attnspan.integrations.huggingface.tensor_parallel import check_heads
from attnspan.plan import Shape

NAME = "attnspan"
"""The implementation of attention, as transformers knows it."""

UNSERVED = ("indices", "block_indices", "cache", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments that would change the result."""


def register_sharded_attention() -> None:
    """Make the name known to transformers; other models do not notice."""
    AttentionInterface.register(NAME, sharded_attention)
    AttentionMaskInterface.register(NAME, requested_mask)


def sharded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    s_aux: Tensor | None = None,
    dropout: float | None = 0.0,
    position_bias: Tensor | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    """Attention of a layer over all ranks, by the signature of `AttentionInterface`; there are no weights to return."""
    binding: LayerBinding | None = getattr(module, BINDING, None)
    if binding is None:
        raise ModelError(
            f"{type(module).__name__} asks for attnspan's attention, and its model was not enabled: call "
            "enable(model, cp), or model.set_attn_implementation('sdpa') to go on without"
        )
    if binding.kind_index is None:
        raise ModelError(
            f"{binding.layer.name} attends to another sequence, and the model is enabled as a decoder without encoder"
        )
    current = binding.enabled.current_pass()
    passed = {"s_aux": s_aux is not None, **arguments}
    check_arguments(binding.layer, attention_mask, passed, current.layer_masks[binding.kind_index])
    check_bias(binding.layer, position_bias)
    if binding.layer.temperature is not None:
        query = tempered(query, binding.layer.temperature.of(current.query_positions))
    source = latents_in(module, key, value)
    if source is None and query.shape[1] != binding.layer.query_heads:  # the model is tensor parallel
        check_heads(binding.layer, query.shape[1], key.shape[1], key.requires_grad or value.requires_grad)
    attention = current.attentions[binding.kind_index]
    tables = binding.enabled.bias_tables(current, binding.layer, position_bias, query.dtype)
    dropout = dropout or 0.0
    if source is None:
        out = attention(query, key, value, sinks=s_aux, dropout_p=dropout, captured=tables)
    else:
        out = attention(query, key.squeeze(1), expand=source.expand, sinks=s_aux, dropout_p=dropout, captured=tables)
    return out.transpose(1, 2).contiguous(), None


def session_wants_latents(source: LatentSource, numbers: Tensor) -> bool:
    """Whether a layer's latents travel instead of keys and values: with a given strategy, unless it exchanges heads;
    with "auto" if that is predicted to be faster. Not in compiled code, nor if the matrix is sharded."""
    binding: LayerBinding | None = getattr(source.module, BINDING, None)
    if torch.compiler.is_compiling() or binding is None or binding.kind_index is None:
        return False
    if any(type(x) is not nn.Parameter for x in source.matrix.parameters()):
        return False
    layer, attention = binding.layer, binding.enabled.current_pass().attentions[binding.kind_index]
    sizes = layer.query_heads, layer.kv_heads, layer.head_dim, layer.value_dim, len(numbers)
    return attention.attend.bound.latents_pay(Shape(*sizes, dtype_name(numbers.dtype), source.width))


def tempered(query: Tensor, scales: Tensor) -> Tensor:
    """Queries times a factor for each position, (S,) or (B, S), rounded as in transformers."""
    return (query * scales.unsqueeze(-2).unsqueeze(-1) if scales.dim() == 2 else query * scales.unsqueeze(-1)).to(query)


def tune_temperature(layer: AttentionLayer, by_itself: bool) -> None:
    """Let a layer with temperature tuning do that itself, or leave it to `sharded_attention`."""
    if layer.temperature is not None:
        vars(layer.module)["attn_temperature_tuning"] = by_itself


def check_arguments(layer: AttentionLayer, mask: object, arguments: Mapping[str, object], wanted: LayerMask) -> None:
    """Refuse a call whose arguments differ from its layer's, or whose mask is not the `wanted` one."""
    by_default: dict[str, object] = {"scaling": layer.scale, "is_causal": layer.causal}
    always: dict[str, object] = {"sliding_window": layer.window, "softcap": layer.softcap, "s_aux": layer.sinks}
    for name, own in (by_default | always).items():
        if name in always or arguments.get(name) is not None:
            _check(layer, name, arguments.get(name), own)
    for name in UNSERVED:
        if arguments.get(name) is not None:
            raise ModelError(f"{layer.name}: {name} was given, which is not served")
    _check_mask(layer, mask, wanted)


def check_bias(layer: AttentionLayer, given: Tensor | None) -> None:
    """Refuse a bias that is not the one its layer was enabled for: a table of ours (biases.py), or ALiBi."""
    wanted = layer.bias
    if wanted is not None and wanted.kind == "distance":
        fits = given is not None and given.shape == (wanted.heads, 2 * wanted.reach + 1)
    else:
        fits = (given is not None and given.numel() > 0) == (wanted is not None)
    if not fits:
        shape = "none" if given is None else f"one of shape {tuple(given.shape)}"
        raise ModelError(f"{layer.name}: position_bias must be that of the layer ({wanted or 'none'}), got {shape}")


def _check(layer: AttentionLayer, what: str, found: object, wanted: object) -> None:
    if isinstance(found, Tensor) or found != wanted:
        raise ModelError(f"{layer.name}: {what} must be {wanted}, as when the model was enabled, got {found}")


def _check_mask(layer: AttentionLayer, mask: object, wanted: LayerMask) -> None:
    """Refuse another mask than the session has for the layer."""
    if mask is OWN_MASK or (mask is None and not wanted.causal and wanted.window is None):
        return
    if isinstance(mask, Tensor) or not isinstance(mask, LayerMask):
        shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else ""
        raise ModelError(
            f"{layer.name}: the model must ask transformers for its mask, got {type(mask).__name__}{shape}; masks that "
            "a model makes by itself are not served"
        )
    if mask != wanted:
        raise ModelError(f"{layer.name} is {wanted}, and the model gives it a mask that is {mask}")

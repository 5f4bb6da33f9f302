"""Models with towers: images and sounds become embeddings among the text's, and a decoder attends to all of them.

Such a model runs as it is, on the whole batch and on every rank, until it calls its decoder. There, where embeddings
are merged and positions and masks are known, the batch is sharded (enabling.py)::

    model(input_ids, pixel_values, ...)     whole: towers, projections, the places of images, 3-D positions, masks
        decoder(inputs_embeds, ...)         this rank's tokens
    logits, loss                            this rank's tokens

So a tower's attention is the model's own, and its parameters get from each rank the gradient of that rank's tokens,
whose mean over ranks is that of one device, as of every other parameter.

[Note: what a decoder is given] Beside embeddings, positions and masks a decoder may get values of each token, which are
sharded, and features of images that are added inside of it, one for each token of an image (`FEATURES`). Tensors of
any other shape are refused by name. So is a tower that the decoder calls, or that runs after it: it would see one
rank's tokens.

Shapes: B batch rows, S tokens of the whole sequence, N tokens of images in all rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.layers import is_mixing
from attnspan.integrations.huggingface.masking import LayerMask
from attnspan.integrations.huggingface.token_mixing import token_mixing
from attnspan.parallel.batch import NAMED, check_one_batch
from attnspan.parallel.checksum import checksum

if TYPE_CHECKING:
    from attnspan.integrations.huggingface.batches import Entries, SequenceInputs
    from attnspan.parallel import ContextParallel
    from attnspan.transports import Transport

FEATURES = {"deepstack_visual_embeds": "visual_pos_masks", "deepstack_features": "vision_mask"}
"""Features of (N, ...) that a decoder adds to hidden states, and the (B, S) or (B, S, D) mask of their tokens."""

OUTPUTS = frozenset(
    {"image_hidden_states", "video_hidden_states", "audio_hidden_states"}
    | {"vision_outputs", "qformer_outputs", "rope_deltas", "deepstack_features", "attention_mask"}
)
"""What a model returns of its towers, whole."""


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module that gets merged embeddings, which has a config of its own; of a model of text the model itself."""
    if model.config.is_encoder_decoder or not hasattr(model, "get_decoder"):
        return model
    found = model.get_decoder()
    if not isinstance(found, PreTrainedModel) or found.config is model.config or found not in set(model.modules()):
        return model
    return found if "inputs_embeds" in inspect.signature(type(found).forward).parameters else model


def check_merges_before(model: nn.Module, decoder: nn.Module) -> None:
    """ModelError for a decoder that puts images among the tokens by itself, where a rank has some of them."""
    if decoder is not model and "image_embeds" in inspect.signature(type(decoder).forward).parameters:
        raise ModelError(
            f"{type(model).__name__} gives its decoder no embeddings, among which those of images would be, which is "
            "not served"
        )


def modules_outside(model: nn.Module, decoder: nn.Module) -> set[nn.Module]:
    """The modules of a model that are neither in its decoder nor around it."""
    if decoder is model:
        return set()
    inside = set(decoder.modules())
    return {module for module in model.modules() if module not in inside and decoder not in set(module.modules())}


def towers_of(model: nn.Module, decoder: nn.Module) -> dict[str, nn.Module]:
    """The modules beside a decoder that do not compute each token by itself, by their paths; those in them left out."""
    outside, found = modules_outside(model, decoder), dict[str, nn.Module]()
    known: set[nn.Module] = set()
    for path, module in model.named_modules():
        inside = set(module.modules()) if module in outside - known else set[nn.Module]()
        if any(is_mixing(each) or token_mixing(each) is not None for each in inside):
            known |= inside
            found[path] = module
    return found


def called_before(module: nn.Module, decoder: nn.Module) -> str:
    """The name of the part of a module that its decoder is in; what its forward computes before calling it is whole."""
    return next(name for name, child in module.named_children() if decoder in set(child.modules()))


def check_runs_before(path: str, module: nn.Module) -> None:
    """Refuse a tower that is called while a rank has its own tokens. See [Note: what a decoder is given]."""
    raise ModelError(
        f"{path} ({type(module).__name__}) runs inside or after the decoder, where a rank has some of the tokens, "
        "which is not served; towers must run before"
    )


def layer_masks_of(mask: object, layers: Iterable[LayerMask]) -> dict[LayerMask, LayerMask]:
    """The masks that a decoder is given for layers, where they are not the layers' own.

    A layer that looks both ways by itself may be given a causal mask, which is then what it sees.
    """
    given = [each for each in (mask.values() if isinstance(mask, Mapping) else [mask]) if isinstance(each, LayerMask)]
    found: dict[LayerMask, LayerMask] = {}
    for own in layers:
        same = {each for each in given if each.without_groups == own}
        fitting = same or {each for each in given if each.window == own.window and not own.causal}
        if len(fitting) > 1:
            raise ModelError(f"the decoder is given several masks for layers that are {own}, which is not served")
        found.update((own, each) for each in fitting if each != own)
    return found


def check_batch(given: Mapping[str, object], transport: Transport) -> None:
    """ShardError on every rank if ranks have different batches, in images and sounds too."""
    leaves = {name: [each for each in tree_leaves(value) if isinstance(each, Tensor)] for name, value in given.items()}
    check_one_batch(transport, {name: checksum(some) for name, some in leaves.items() if some})


def check_given(given: Entries, mask: object, sequence: SequenceInputs) -> None:
    """Refuse what a decoder is given that is not of each token. See [Note: what a decoder is given]."""
    whole, embeds = (sequence.rows, sequence.seq_len), given.get("inputs_embeds")
    if not isinstance(embeds, Tensor) or embeds.shape[:2] != whole:
        shape = f"shape {tuple(embeds.shape)}" if isinstance(embeds, Tensor) else type(embeds).__name__
        raise ModelError(
            f"the decoder must be given inputs_embeds of {whole}, as many tokens as the model, got {shape}"
        )
    if isinstance(mask, Tensor) and not _means(mask, sequence.padding):
        raise ModelError(
            f"the decoder is given an attention_mask of shape {tuple(mask.shape)} that is not that of the batch, which "
            "is not served"
        )
    for name, value in given.items():
        if name in NAMED or name in FEATURES or name in FEATURES.values():
            continue
        for each in tree_leaves(value):
            if isinstance(each, Tensor) and not (each is value and each.shape[:2] == whole):
                raise ModelError(
                    f"{name} is given to the decoder, of shape {tuple(each.shape)}, which is not of each of {whole[0]} "
                    f"x {whole[1]} tokens: it is not known what of it belongs to a rank's tokens, and not served"
                )


def _means(mask: Tensor, padding: Tensor | None) -> bool:
    """Whether an attention_mask says what is known of padding."""
    if padding is None:
        return mask.dim() == 2 and bool(mask.all())
    return mask is padding or torch.equal(mask.bool(), padding.bool().to(mask.device))


def shard_features(given: Entries, session: ContextParallel) -> Entries:
    """The features of a rank's image tokens, with the mask of those, both taken out of what a decoder is given."""
    found: Entries = {}
    for name, where in FEATURES.items():
        features, mask = given.pop(name, None), given.pop(where, None)
        if mask is None:
            continue
        of_tokens = mask if mask.dim() == 2 else mask.any(-1)
        places = of_tokens.flatten().cumsum(0).view_as(of_tokens) - 1
        found[where] = session.shard(mask, dim=1)
        if features is not None:
            own = session.shard(places, dim=1)[session.shard(of_tokens, dim=1)]
            found[name] = tree_map(_rows(own, int(of_tokens.sum()), name), features)
    return found


def _rows(own: Tensor, count: int, name: str) -> Callable[[object], object]:
    """Takes some rows of tensors of so many."""

    def take(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if len(value) != count:
            raise ModelError(
                f"{name} must have a row for each of {count} tokens of images, got shape {tuple(value.shape)}"
            )
        return torch.index_select(value, 0, own.to(value.device))

    return take

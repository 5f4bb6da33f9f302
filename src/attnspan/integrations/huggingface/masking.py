"""The masks that a transformers model asks for, as data: direction, window, and groups of tokens.

A model asks for a mask once per forward pass and kind of layer, by the name of the implementation, and passes it to its
layers. This implementation returns a `LayerMask` instead of a tensor. Documents and padding are in the session already
(batches.py), and so are groups, which differ between batches (towers.py). A layer compares the mask that it is given
with that of its attention in this pass (attention.py), so other masks are detected.

[Note: functions of masks] transformers describes a mask by a function of indices. It is recognised by its code object:
those below are made by public functions of `transformers.masking_utils`, with their sizes in the closure. All others
are refused. Compiled code cannot inspect functions; there the other arguments of the request decide (`local_size`, and
whether a mask may be skipped).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from attnspan.assumptions import Assumption
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.masks import Causal, Chunked, Full, Mask, SlidingWindow, TokenGroups

IndexMask = Callable[..., Tensor | bool]
"""transformers' mask function: whether a pair is allowed, of (batch, head, query, key), numbers or tensors."""


class _NoTensor(ModelError, AttributeError):
    """An AttributeError, so that ``hasattr`` is False, with the reason for code that reads an attribute."""


class LayerMask(NamedTuple):
    """The mask of a layer; `window` and `chunk` as in `AttentionLayer`.

    Tokens of one of the `groups`, as those of an image, see each other too, within the window if it is `over_groups`.

    >>> LayerMask(causal=True, window=3).mask
    SlidingWindow(2)
    """

    causal: bool
    window: int | None
    groups: TokenGroups | None = None
    over_groups: bool = False
    chunk: int | None = None

    @staticmethod
    def of(layer: AttentionLayer) -> LayerMask:
        """What a layer was enabled for."""
        return LayerMask(layer.causal, layer.window, chunk=layer.chunk)

    @property
    def without_groups(self) -> LayerMask:
        """What the layer has in every batch."""
        return LayerMask(self.causal, self.window, chunk=self.chunk)

    @property
    def mask(self) -> Mask:
        """The same as a mask."""
        if self.groups is not None:
            if self.over_groups and self.window is not None:
                return (Causal() | self.groups) & SlidingWindow(self.window - 1, self.groups.length)
            return self.without_groups.mask | self.groups
        if self.chunk is not None:
            return Causal() & Chunked(self.chunk)
        if self.window is None:
            return Causal() if self.causal else Full()
        return SlidingWindow(self.window - 1, 0 if self.causal else self.window - 1)

    def __getattr__(self, name: str) -> NoReturn:
        raise _NoTensor(
            f"the model reads {name!r} of its mask, to change it by itself; such masks are not served, only those "
            "that a model asks transformers for"
        )

    def __str__(self) -> str:
        words = ["causal" if self.causal else "both ways"]
        words += [] if self.window is None else [f"window {self.window}"]
        words += [] if self.groups is None else ["groups that see each other" + ", in the window" * self.over_groups]
        words += [] if self.chunk is None else [f"chunks of {self.chunk}"]
        return ", ".join(words)


class ConvertedLayerMask(LayerMask):
    """The same for models that convert their mask before layers of theirs add it, which these here do not."""

    ndim = 0

    def to(self, dtype: torch.dtype) -> ConvertedLayerMask:
        """What is hidden, as booleans."""
        return self


class GivenLayerMask(LayerMask):
    """The same for a decoder, whose model asked for it before: transformers returns masks of four dims as they are."""

    ndim = 4
    shape = (1, 1, 1, 1)


def given_masks(mask: object) -> object:
    """What a model with towers gives its decoder for a mask: `LayerMask`s, alone or by types of layers, as given."""
    if isinstance(mask, Mapping):
        return {kind: given_masks(each) for kind, each in mask.items()}
    return GivenLayerMask(*mask) if isinstance(mask, LayerMask) else mask


CONVERTING = {"mpt", "falcon"}
"""The types of these models."""


def requested_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: IndexMask = causal_mask_function,
    local_size: int | None = None,
    config: object = None,
    attention_mask: object = None,
    **more: object,
) -> LayerMask:
    """The mask that a model asks for, by the signature of `AttentionMaskInterface`."""
    if isinstance(attention_mask, GivenLayerMask):
        return LayerMask(*attention_mask)
    compiling = torch.compiler.is_compiling()
    found = _by_arguments(local_size, config, more) if compiling else _read(mask_function)
    return ConvertedLayerMask(*found) if getattr(config, "model_type", None) in CONVERTING else found


def _by_arguments(local_size: int | None, config: object, more: dict[str, object]) -> LayerMask:
    """A mask by the arguments of the request beside its function."""
    causal = "allow_is_bidirectional_skip" not in more
    plain = more.get("allow_is_causal_skip" if causal else "allow_is_bidirectional_skip", True)
    chunk = getattr(config, "attention_chunk_size", None)
    if causal and plain and local_size is not None and local_size == chunk != getattr(config, "sliding_window", None):
        return LayerMask(causal, None, chunk=chunk)
    if more.get("use_vmap") or not plain or local_size not in (None, getattr(config, "sliding_window", None)):
        raise ModelError(
            "a mask that is more than causal or a window cannot be looked at in compiled code; run a batch without "
            "torch.compile to see what it is"
        )
    return LayerMask(causal, local_size if causal or local_size is None else local_size + 1)


def _read(function: IndexMask) -> LayerMask:
    """A mask by its function. See [Note: functions of masks]."""
    MASK_FUNCTIONS.verify()
    return _layer_mask(function)


def _layer_mask(function: IndexMask) -> LayerMask:
    causal, both_ways, window, chunk, with_groups = False, False, None, None, None
    for part in _parts(function):
        code = getattr(part, "__code__", None)
        if part is causal_mask_function:
            causal = True
        elif code is _WINDOW:
            window = _closure_value(part, "sliding_window")
        elif code is _CHUNK:  # counted from where a row's tokens begin (sessions.py)
            chunk = _closure_value(part, "chunk_size")
        elif code is _WINDOW_BOTH:
            both_ways, window = True, _closure_value(part, "sliding_window") + 1
        elif code is _OR and with_groups is None:
            with_groups = _with_groups(part)
        elif (
            part is not bidirectional_mask_function and code is not _PACKED and not _is_reference(part)
        ):  # what jumps in position_ids is a shard
            raise _unknown(part)
    if with_groups is None:
        return LayerMask(causal, window, chunk=chunk)
    if causal or both_ways or chunk is not None or (window is not None and with_groups.window is not None):
        raise _unknown(function)
    return (
        with_groups
        if window is None
        else with_groups._replace(window=window, over_groups=with_groups.groups is not None)
    )


def _with_groups(function: IndexMask) -> LayerMask:
    """A union: of a causal mask, and of one group of tokens each."""
    parts = _closure_value(function, "mask_functions")
    if any(map(_is_reference, (each for part in parts for each in _parts(part)))):
        united = [_layer_mask(part) for part in parts]
        if LayerMask(True, None) in united and all(each.causal and each.groups is None for each in united):
            return LayerMask(True, None)
        raise _unknown(function)
    blocks = [part for part in parts if getattr(part, "__code__", None) is _BLOCKS]
    others = [part for part in parts if part not in blocks]
    if len(blocks) != 1 or len(others) != 1 or not (found := _layer_mask(others[0])).causal or found.groups is not None:
        raise _unknown(next((part for part in others if part is not causal_mask_function), function))
    ids = _closure_value(blocks[0], "block_sequence_ids")
    if ids.is_meta:  # of a text, by which the census probes a model
        return found
    groups = TokenGroups.from_ids(ids)
    return found._replace(groups=groups if any(groups.runs) else None)  # a batch of text has none


def _is_reference(function: IndexMask) -> bool:
    """Whether a function is that of Unlimited-OCR, by which all tokens of a prompt are seen, in a pass without a cache:
    then all are of the prompt."""
    ours = str(getattr(function, "__module__", "")).startswith("transformers.models.unlimited_ocr.")
    return ours and function.__qualname__ == REFERENCE and _closure_value(function, "prefill_length") == float("inf")


REFERENCE = "create_reference_sliding_window_causal_mask.<locals>.prefill_overlay"


def _unknown(function: IndexMask) -> ModelError:
    return ModelError(
        f"the model asks for a mask by {getattr(function, '__qualname__', function)}, which is not served; those that "
        "are: causal or both ways, sliding windows, chunks, groups of tokens that see each other beside those that are "
        "causal, documents by position_ids, padding"
    )


def _parts(function: IndexMask) -> Iterator[IndexMask]:
    """The functions that one is the intersection of."""
    if getattr(function, "__code__", None) is _AND:
        for each in _closure_value(function, "mask_functions"):
            yield from _parts(each)
    else:
        yield function


def _closure_value(function: IndexMask, name: str) -> Any:
    """What a function made by another holds by a name."""
    assert isinstance(function, FunctionType), "its code is known"
    assert function.__closure__ is not None, "and holds something"
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


_AND = and_masks().__code__
_OR = or_masks().__code__
_BLOCKS = blockwise_overlay(torch.zeros(1, 1, device="cpu")).__code__
_CHUNK = chunked_overlay(1, torch.zeros(1, device="cpu")).__code__
_WINDOW = sliding_window_overlay(1).__code__
_WINDOW_BOTH = sliding_window_bidirectional_overlay(1).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1, device="cpu")).__code__


def _functions_agree() -> bool:
    """Whether functions of transformers allow the same pairs as the masks that are read from them."""
    each = torch.arange(8, device="cpu")
    q, k = torch.meshgrid(each, each, indexing="ij")
    cases: list[tuple[IndexMask, LayerMask, Tensor]] = [
        (causal_mask_function, LayerMask(True, None), k <= q),
        (and_masks(sliding_window_overlay(3), causal_mask_function), LayerMask(True, 3), (k <= q) & (k > q - 3)),
        (
            and_masks(chunked_overlay(3, torch.zeros(1, dtype=torch.int64, device="cpu")), causal_mask_function),
            LayerMask(True, None, chunk=3),
            (k <= q) & (k // 3 == q // 3),
        ),
        (bidirectional_mask_function, LayerMask(False, None), k == k),
        (sliding_window_bidirectional_overlay(3), LayerMask(False, 4), (q - k).abs() <= 3),
    ]
    ids = torch.tensor([[0, -1, 1, 1, 1, 0, -1, 0]], device="cpu")
    blocks, same = blockwise_overlay(ids), (ids == ids.T) & (ids >= 0)
    near, groups = sliding_window_overlay(3), TokenGroups.from_ids(ids)
    both = or_masks(causal_mask_function, blocks)
    cases += [
        (both, LayerMask(True, None, groups), (k <= q) | same),
        (and_masks(both, near), LayerMask(True, 3, groups, True), ((k <= q) | same) & (k > q - 3)),
        (
            or_masks(and_masks(near, causal_mask_function), blocks),
            LayerMask(True, 3, groups),
            (k <= q) & (k > q - 3) | same,
        ),
    ]
    for made, layer_mask, allowed in cases:
        found = torch.as_tensor(made(0, 0, q, k), device="cpu").expand(8, 8)
        if (
            _layer_mask(made) != layer_mask
            or not torch.equal(found, allowed)
            or not torch.equal(layer_mask.mask.dense(8), found)
        ):
            return False
    return True


MASK_FUNCTIONS = Assumption(
    "functions of masks are what their code and what they hold say",
    "integrations/huggingface/masking.py",
    "the code objects and closures of `transformers.masking_utils`",
    _functions_agree,
    library="transformers",
)

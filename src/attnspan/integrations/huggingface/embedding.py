"""Prompts with images or sounds: embedded once, and fed to the decoder in steps like any other tokens.

The model is called with a processor's output for one prompt, and the call is ended where it calls its decoder, for the
decoder's arguments (`decoder_arguments`): merged embeddings, positions, features per token. Steps then call the model
on tokens as usual, and a hook before the decoder inserts the rows of such prompts (`EmbeddingInsert`)::

    model(input_ids=tokens)             embeds tokens, knows of no image
        decoder(inputs_embeds, ...)     rows of prompts replaced: embeddings, positions, DeepStack features

Rotary positions with more than one dim continue after a prompt as in transformers: from those of its last token.

[Note: content ids] The prefix cache must distinguish images. The id of a token with the decoder inputs of plain text is
the token itself. Other ids are digests of all decoder inputs for the token: the bits of its embedding, position, type
and features, and of the whole image if its tokens see each other. So prompts share exactly the pages that are equal.

Shapes: S tokens of a prompt, T of a step, N tokens of images, P dims of positions, D width.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from attnspan.engine.model import EmbeddedPrompt, PackedBatch, PromptRows
from attnspan.errors import EngineError
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.masking import LayerMask
from attnspan.integrations.huggingface.towers import FEATURES
from attnspan.masks import TokenGroups

P = ParamSpec("P")
T = TypeVar("T")

TYPES = frozenset({"moe_mm_token_type_ids"})
"""Numbers of each token for a decoder, 0 for a token of text: Ernie 4.5's layers have experts for images."""

KNOWN = frozenset({"inputs_embeds", "position_ids", "attention_mask", *FEATURES, *FEATURES.values(), *TYPES})
"""Tensors for a decoder that are put into steps."""

BEYOND = 1 << 63
"""No token has this bit; every digest does."""


class _DecoderCalled(Exception):
    """Ends a call where the decoder begins."""

    def __init__(self, given: dict[str, object]) -> None:
        super().__init__("the decoder was called")
        self.given = given


@dataclass(frozen=True, eq=False)
class PromptContent:
    """What a decoder is given for a prompt. `positions` go on at `next` in their dims, if they are not plain."""

    embeds: Tensor  # (S, D)
    positions: Tensor | None  # (P, S)
    next: Tensor | None  # (P, 1)
    features: Mapping[str, object] = field(default_factory=dict)  # of (N, ...), by their names
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # (S,) or (S, D): which tokens have one
    types: Mapping[str, Tensor] = field(default_factory=dict)  # (S,)


@dataclass(frozen=True)
class EmbeddingInsert:
    """What the decoder hook does in the call under way: end it, or insert the rows of prompts into a step."""

    names: list[str]  # of the decoder's arguments
    batch: PackedBatch | None = None

    def __call__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[()], dict[str, object]]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if self.batch is None:
            raise _DecoderCalled(given)
        return (), insert_rows(given, self.batch)


_INSERT: ContextVar[EmbeddingInsert | None] = ContextVar("what is inserted into the call of a decoder", default=None)


def before_decoder(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[()], dict[str, object]] | None:
    """The hook: nothing, unless an engine is calling the model."""
    insert = _INSERT.get()
    return None if insert is None else insert(args, kwargs)


def call_with_insert(insert: EmbeddingInsert, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that calls a model, whose decoder is given what `insert` says."""
    context = copy_context()
    context.run(_INSERT.set, insert)
    return context.run(function, *args, **kwargs)


def stops_at_decoder() -> bool:
    """Whether the call under way ends at the decoder. Only then does a model get the masks that it asks for."""
    insert = _INSERT.get()
    return insert is not None and insert.batch is None


def decoder_arguments(
    model: nn.Module, decoder: nn.Module, names: list[str], given: Mapping[str, object]
) -> dict[str, object]:
    """What a decoder is called with when its model is called; the model is as before."""
    with _unwritten(model, decoder), torch.no_grad():
        try:
            call_with_insert(EmbeddingInsert(names), model, **given)
        except _DecoderCalled as call:
            return {name: value for name, value in call.given.items() if value is not None}
    raise EngineError(f"{type(model).__name__} did not call its decoder, {type(decoder).__name__}")


@contextmanager
def _unwritten(model: nn.Module, decoder: nn.Module) -> Iterator[None]:
    """Undo what modules around a decoder write on themselves, such as the positions of the latest prompt."""
    around = [module for module in model.modules() if decoder in set(module.modules()) and module is not decoder]
    before = [dict(vars(module)) for module in around]
    try:
        yield
    finally:
        for module, held in zip(around, before, strict=True):
            if any(vars(module).get(name) is not value for name, value in held.items()):
                vars(module).update(held)


# ---- a prompt --------------------------------------------------------------------------------------------------------


def tensor_in(given: Mapping[str, object], name: str) -> Tensor:
    """One of the tensors that a model is given."""
    found = given[name]
    assert isinstance(found, Tensor), f"{name} is a tensor"
    return found


def one_prompt(inputs: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """What a processor returned for one prompt, on the device of a model; EngineError for anything else."""
    numbers = inputs.get("input_ids")
    ids = torch.as_tensor(numbers, device=device) if numbers is not None else torch.empty(0, device=device)
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or ids.is_floating_point() or not ids.numel():
        raise EngineError(
            f"prompt must have input_ids of (S,) or (1, S), one prompt's tokens, got shape {tuple(ids.shape)}; add "
            "prompts one by one"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask, device=device).bool().all()):
        raise EngineError("prompt must have no padding, got an attention_mask with zeros; process prompts one by one")
    refused = {"labels", "past_key_values", "inputs_embeds", "position_ids", "use_cache"} & inputs.keys()
    if refused:
        raise EngineError(f"prompt must be what a processor returns, got {min(refused)} too")
    given = {name: value for name, value in inputs.items() if name != "attention_mask"}
    moved: dict[str, object] = tree_map_only(Tensor, lambda each: each.to(device), given)
    return moved | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}  # as generate has it


def embedded(
    tokens: list[int],
    found: Mapping[str, object],
    plain: Mapping[str, object],
    layers: Sequence[AttentionLayer],
    first: int = 0,
) -> EmbeddedPrompt:
    """A prompt, by what the decoder is called with, and would be called with for its tokens alone.

    The tokens of a text have the positions from `first` on.
    """
    length = len(tokens)
    _check(found, plain)
    embeds = tensor_in(found, "inputs_embeds")[0]
    ids = tensor_in(found, "position_ids") if "position_ids" in found else None
    positions, following = _positions(ids, length, first)
    special = (embeds != tensor_in(plain, "inputs_embeds")[0]).any(-1)
    if positions is not None:
        special |= (positions != _plain(first, positions)).any(0).to(special.device)
    masks = {where: tensor_in(found, where)[0] for where in FEATURES.values() if where in found}
    features = {name: found.get(name) for name, where in FEATURES.items() if where in masks}
    for mask in masks.values():
        special |= _of_tokens(mask).to(special.device)
    types = {name: tensor_in(found, name)[0] for name in sorted(TYPES) if name in found}
    for each in types.values():
        special |= each.bool().to(special.device)
    groups, grouped_layers = _groups(found.get("attention_mask"), layers)
    if not special.any() and groups is None:
        return EmbeddedPrompt(tokens, array("Q", tokens), None)
    content = PromptContent(embeds, positions, following, features, masks, types)
    content_ids = _content_ids(tokens, content, special.nonzero().flatten().tolist(), groups)
    return EmbeddedPrompt(tokens, content_ids, content, groups, grouped_layers)


def _content_ids(
    tokens: list[int], content: PromptContent, special: list[int], groups: TokenGroups | None
) -> array[int]:
    """The tokens, with a hash of its content in place of each `special` one, and of its group's."""
    content_ids = array("Q", tokens)
    for row in special:
        content_ids[row] = _digest(tokens[row], content, row)
    members: dict[int, list[int]] = {}
    for start, stop, group in () if groups is None else groups.runs[0]:
        members.setdefault(group, []).extend(range(start, stop))
    for rows in members.values():  # what is computed for one of a group depends on all of it
        whole = _hash(repr([content_ids[row] for row in rows]).encode())
        for row in rows:
            content_ids[row] = _hash(repr((content_ids[row], whole)).encode())
    return content_ids


def _check(found: Mapping[str, object], plain: Mapping[str, object]) -> None:
    """EngineError for what a decoder is given that cannot be put into steps."""
    for name, value in found.items():
        tensors, by_text = _tensors(value), _tensors(plain.get(name))
        same = len(tensors) == len(by_text) and all(map(torch.equal, tensors, by_text))
        if name not in KNOWN and not same:
            raise EngineError(
                f"the decoder is given {name} of shape {tuple(tensors[0].shape)} beside the tokens of this prompt, "
                "which is not served in generation"
            )


def _groups(mask: object, layers: Sequence[AttentionLayer]) -> tuple[TokenGroups | None, frozenset[int]]:
    """The groups of a prompt by the masks that its model asks for, and the layers that have them."""
    found: dict[LayerMask, TokenGroups] = {}
    for each in mask.values() if isinstance(mask, Mapping) else [mask]:
        if isinstance(each, Tensor) and each.dim() == 2:  # a prompt without padding
            continue
        if isinstance(each, Tensor) or (isinstance(each, LayerMask) and (not each.causal or _is_wider(each))):
            shown = f"a tensor of shape {tuple(each.shape)}" if isinstance(each, Tensor) else each
            raise EngineError(f"the tokens of this prompt see each other by a mask that is not served: {shown}")
        if isinstance(each, LayerMask) and each.groups is not None:
            found[each.without_groups] = each.groups
    if len(set(found.values())) > 1:
        raise EngineError("the tokens of this prompt see each other in different groups by layer, which is not served")
    grouped_layers = frozenset(place for place, layer in enumerate(layers) if LayerMask.of(layer) in found)
    return next(iter(found.values()), None), grouped_layers


def _is_wider(layer_mask: LayerMask) -> bool:
    """Whether tokens of a group see each other beyond the window of a layer."""
    if layer_mask.groups is None or layer_mask.window is None or layer_mask.over_groups:
        return False
    return any(stop - start > layer_mask.window for start, stop in layer_mask.groups.spans)


def _tensors(value: object) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _plain(first: int, positions: Tensor) -> Tensor:
    """(S,) those of a text, like positions (P, S)."""
    return torch.arange(first, first + positions.shape[1], device=positions.device)


def _positions(ids: Tensor | None, length: int, first: int) -> tuple[Tensor | None, Tensor | None]:
    """Positions (P, S), and (P, 1) where they go on; None where they are those of plain text."""
    if ids is None:
        return None, None
    found = ids.reshape(-1, length) if ids.dim() == 3 else ids[:1]
    if bool((found == _plain(first, found)).all()):
        return None, None
    return found, found[:, -1:] + 1


def _hash(*parts: bytes) -> int:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "little") | BEYOND


def _digest(token: int, content: PromptContent, row: int) -> int:
    """See [Note: content ids]."""
    positions = [] if content.positions is None else content.positions[:, row].tolist()
    rows = [content.embeds[row]]
    for name, where in FEATURES.items():
        if where in content.masks and bool(_of_tokens(content.masks[where])[row]):
            at = int(_of_tokens(content.masks[where])[:row].sum())
            rows += _tensors(_rows(content.features[name], at, at + 1))
    types = [int(each[row]) for each in content.types.values()]
    octets = (each.contiguous().view(torch.uint8).cpu().numpy().tobytes() for each in rows)
    return _hash(repr((token, positions, types)).encode(), *octets)


# ---- a step ----------------------------------------------------------------------------------------------------------


def insert_rows(given: dict[str, object], batch: PackedBatch) -> dict[str, object]:
    """What a decoder is given in a step, with the rows of prompts put in."""
    embeds, total = tensor_in(given, "inputs_embeds").clone(), len(batch.tokens)
    plain = batch.positions.unsqueeze(0)
    dims = max((len(content.positions) for _, content in _contents(batch) if content.positions is not None), default=0)
    positions = plain.expand(max(dims, 1), total).clone()
    masks: dict[str, Tensor] = {}
    types: dict[str, Tensor] = {}
    features: dict[str, list[object]] = {}
    for rows, content in _contents(batch):
        length, count = len(content.embeds), rows.stop - rows.start
        inside = min(count, max(length - rows.first, 0))  # of the prompt; the others were generated
        here, there = slice(rows.start, rows.start + inside), slice(rows.first, rows.first + inside)
        embeds[0, here] = content.embeds[there]
        if content.positions is not None and content.next is not None:
            beyond = content.next + torch.arange(count - inside, device=plain.device) + max(rows.first - length, 0)
            positions[:, rows.start : rows.stop] = torch.cat([content.positions[:, there], beyond], dim=1)
        for name, each in content.types.items():
            types.setdefault(name, each.new_zeros(total))[here] = each[there]
        for name, where in FEATURES.items():
            if where in content.masks and bool(_of_tokens(content.masks[where][there]).any()):
                mask = content.masks[where]
                step = masks.setdefault(where, mask.new_zeros(total, *mask.shape[1:]))
                step[here] = mask[there]
                begin, stop = (int(_of_tokens(mask[:end]).sum()) for end in (there.start, there.stop))
                features.setdefault(name, []).append(_rows(content.features[name], begin, stop))
    found: dict[str, object] = {name: rows.unsqueeze(0) for name, rows in (masks | types).items()}
    found |= {name: tree_map(lambda *parts: torch.cat(parts), *each) for name, each in features.items()}
    found["position_ids"] = positions.unsqueeze(1) if dims > 1 else positions
    return given | found | {"inputs_embeds": embeds}


def _contents(batch: PackedBatch) -> Iterator[tuple[PromptRows, PromptContent]]:
    for rows in batch.embedded:
        assert isinstance(rows.prompt.content, PromptContent), "made here"
        yield rows, rows.prompt.content


def _of_tokens(mask: Tensor) -> Tensor:
    """(S,) which tokens a mask of (S,) or (S, D) is of."""
    return mask if mask.dim() == 1 else mask.any(-1)


def _rows(features: T, begin: int, stop: int) -> T:
    rows: T = tree_map_only(Tensor, lambda each: each[begin:stop], features)
    return rows

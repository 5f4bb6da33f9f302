"""Modules that use positions, and the hooks that pass them the positions of a rank's tokens.

Most modules get the global positions of the shard as an argument. Exceptions are::

    counting      embeddings that count tokens from 0 unless positions are given (BART; GPT-2 and the like take them)
    by the mask   embeddings that count the ones of an attention_mask unless positions are given (OPT)
    by length     rotary embeddings whose frequencies depend on the last position: "dynamic" and "longrope"

[Note: the last position] Rotary embeddings by length use the largest position that they get, which on a rank is that of
its own tokens. So they also get the largest of the whole sequence, as an additional token, which is removed from their
result: the frequencies, and the state kept between batches, are those of one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.interface_calls import calls_of
from attnspan.integrations.huggingface.mixers import is_mixer

if TYPE_CHECKING:
    from attnspan.integrations.huggingface.batches import Entries
    from attnspan.integrations.huggingface.forward_pass import ForwardPass

ArgsAndKwargs = tuple[tuple[object, ...], dict[str, object]]
Before = Callable[[nn.Module, tuple[object, ...], dict[str, object]], ArgsAndKwargs]
After = Callable[[nn.Module, tuple[object, ...], object], object]
"""Hooks before and after forward."""

BY_LENGTH = ("dynamic", "longrope")

P = ParamSpec("P")
T = TypeVar("T")


def counts_by_mask(module: nn.Module) -> bool:
    """Whether a module is an embedding of positions that counts by an attention_mask unless they are given."""
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(type(module).forward).parameters


def counts_by_itself(module: nn.Module) -> bool:
    """Whether a module is an embedding of positions that counts tokens unless they are given."""
    wanted = {"position_ids", "past_key_values_length"}
    return isinstance(module, nn.Embedding) and wanted <= set(inspect.signature(type(module).forward).parameters)


_POSITIONS: ContextVar[Tensor | None] = ContextVar("positions of the tokens in the call under way", default=None)


def give_positions(counting: Iterable[nn.Module]) -> None:
    """Let embeddings that count tokens take the positions of an engine's step (`call_at_positions`)."""
    for module in counting:
        if _add_positions not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_add_positions, with_kwargs=True)


def _add_positions(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> ArgsAndKwargs:
    """A hook, which does nothing while no engine calls the model."""
    positions = _POSITIONS.get()
    return args, kwargs if positions is None else kwargs | {"position_ids": positions[0]}


def call_at_positions(positions: Tensor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that calls a decoder, whose tokens have these positions, (1, S). To be called inside
    `run_call`, whose context ends with the call."""
    _POSITIONS.set(positions)
    return function(*args, **kwargs)


CONTENT = "create_position_ids_from_input"
"""The beginning of the names of functions that count the tokens that are not padding (RoBERTa)."""


class ContentCount(Protocol):
    """An embedding whose count of tokens is a method, as RoBERTa's."""

    padding_idx: int
    create_position_ids_from_input_ids: Callable[[Tensor, int], Tensor]
    create_position_ids_from_inputs_embeds: Callable[[Tensor, int], Tensor]


def counts_content(module: nn.Module) -> bool:
    """Whether a module counts positions by what is in input_ids."""
    methods = [each for each in vars(type(module)).values() if inspect.isfunction(each)]
    return any(used.startswith(CONTENT) for each in methods for used in each.__code__.co_names)


def _has_count(module: nn.Module) -> TypeGuard[ContentCount]:
    return all(hasattr(module, f"{CONTENT}{end}") for end in ("_ids", "s_embeds"))


def takes_counted(module: nn.Module) -> bool:
    """Whether one that does takes positions instead, and has its count as a method."""
    forward = inspect.getsource(inspect.unwrap(type(module).forward))
    return "if position_ids is None:" in forward and _has_count(module)


def counted_positions(model: nn.Module, entries: Entries) -> Tensor | None:
    """The positions (B, S) of a whole batch, as a model's embeddings count them; None if they do not."""
    counting = next(filter(_has_count, filter(counts_content, model.modules())), None)
    if counting is None:
        return None
    tokens = entries.get("input_ids")
    if tokens is None:
        return counting.create_position_ids_from_inputs_embeds(entries["inputs_embeds"], counting.padding_idx)
    return counting.create_position_ids_from_input_ids(tokens, counting.padding_idx)


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding that depends on the last position."""
    found = getattr(module, "rope_type", None)  # one for all layers, or one for each type of layer
    kinds = found.values() if isinstance(found, dict) else [found]
    return any(isinstance(kind, str) and word in kind for kind in kinds for word in BY_LENGTH)


@dataclass(frozen=True)
class PositionHook:
    """A module that must be given positions, and the hooks that do it."""

    module: nn.Module
    before: Before
    after: After | None = None

    def register(self) -> list[RemovableHandle]:
        """Give it positions from here on."""
        before = self.module.register_forward_pre_hook(self.before, with_kwargs=True)
        return [before] if self.after is None else [before, self.module.register_forward_hook(self.after)]


def position_hooks(
    model: PreTrainedModel,
    takes: Container[str],
    current_pass: Callable[[], ForwardPass],
    encoder: set[nn.Module],
    by_bias: bool = False,
) -> list[PositionHook]:
    """The hooks that give a model's modules the positions of the current pass; `takes` are forward's arguments.

    A model that counts, and takes no positions, is refused. `encoder` are the modules of the first of two sequences.
    Recurrent layers know the order of tokens by themselves: a model of them alone may have no positions at all. So may
    one whose layers all have biases (`by_bias`).
    """
    counting = [module for module in model.modules() if counts_by_itself(module)]
    hooks = [
        PositionHook(each, _with_last(current_pass), _without_last)
        for each in model.modules()
        if depends_on_length(each)
    ]
    for name in ("position_ids", "decoder_position_ids") if encoder else ("position_ids",):
        if name in takes:
            continue
        first = bool(encoder) and name == "position_ids"
        found = [module for module in counting if (module in encoder) == first]
        if not found and not by_bias and not has_no_positions(model):
            raise ModelError(
                f"{type(model).__name__} takes no {name} and would count each rank's tokens from 0, which is not served"
            )
        hooks += [PositionHook(module, _own(current_pass, first)) for module in found]
    return hooks


def has_no_positions(model: PreTrainedModel) -> bool:
    """Whether a model has no attention, and nothing that counts positions."""
    mixers = [module for module in model.modules() if is_mixer(module)]
    inside = {inner for mixer in mixers for inner in mixer.modules()}
    others = [module for module in model.modules() if module not in inside]
    return bool(mixers) and not any(calls_of(each) or counts_by_mask(each) or _counts(each) for each in others)


def _counts(module: nn.Module) -> bool:
    return "arange" in inspect.unwrap(type(module).forward).__code__.co_names


def _own(current_pass: Callable[[], ForwardPass], encoder: bool) -> Before:
    """Gives an embedding the positions of a rank's tokens."""

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> ArgsAndKwargs:
        session = current_pass().encoder if encoder else current_pass().session
        assert session is not None, "an encoder has a session"
        return args, kwargs | {"position_ids": session.positions}

    return before


def _with_last(current_pass: Callable[[], ForwardPass]) -> Before:
    """Gives a rotary embedding, called with (x, position_ids), one token more. See [Note: the last position]."""

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> ArgsAndKwargs:
        named = "position_ids" in kwargs
        ids = kwargs["position_ids"] if named else args[1]
        assert isinstance(ids, Tensor), "rotary embeddings are called with (x, position_ids)"
        last = torch.as_tensor(current_pass().max_position, dtype=ids.dtype, device=ids.device)
        longer = torch.cat([ids, last.expand(*ids.shape[:-1], 1)], dim=-1)
        return (args, kwargs | {"position_ids": longer}) if named else ((args[0], longer, *args[2:]), kwargs)

    return before


def _without_last(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    """What a rotary embedding returned, (..., S, D), without that token."""
    return tree_map_only(Tensor, lambda each: each[..., :-1, :], output)

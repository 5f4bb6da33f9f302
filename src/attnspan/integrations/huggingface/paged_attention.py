"""Attention over pages, and recurrences over states, during one call of a transformers model.

A model looks up its attention by name. While it is served (serving_binding.py) the name is `attnspan_paged`, a function
registered with transformers' AttentionInterface (`paged_attention`), and its recurrent mixers have replaced methods
(mixers.py). Both find the current `ModelCall` in a context variable, since not every model passes arguments down to its
layers. Threads that serve one model over different pages do not interfere.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnspan.engine.model import StepAttention
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface.embedding import stops_at_decoder
from attnspan.integrations.huggingface.inline_attention import CURRENT_ATTENTION
from attnspan.integrations.huggingface.latents import LatentSource, latents_in
from attnspan.integrations.huggingface.lora import AdapterRows
from attnspan.integrations.huggingface.masking import LayerMask, requested_mask
from attnspan.integrations.huggingface.mixers import RecurrentMixer
from attnspan.integrations.huggingface.plain_attention import OWN_MASK
from attnspan.recurrence import Rule

NAME = "attnspan_paged"

NAME_WITH_TOWERS = "attnspan_paged_towers"
"""The same of a model with towers, whose masks are asked for too; its towers keep their own attention."""

P = ParamSpec("P")
T = TypeVar("T")


class ModuleAttention:
    """Attention, module by module, where not every module is a decoder's layer over pages (encoder_decoder.py)."""

    def of(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Tensor | None
    ) -> Tensor:
        """Of a module, (B, H, S, Dv), with the scale and the bias of its call."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class ModelCall:
    """A call of a model under way: its attention, which counts layers, and the modules in the order in which a probe
    saw them attend."""

    attention: StepAttention
    order: tuple[nn.Module, ...]  # by layer number: the module that attends; some attend more than once
    mixers: tuple[str, ...] | None  # by state number: the mixer that uses it; None while a probe finds that out
    latents: Container[nn.Module] = ()  # modules that hand over latents
    modules: ModuleAttention | None = None  # in place of `attention`, if set
    logits_to_keep: Tensor | None = None  # the tokens whose logits are wanted, of a model that computes all
    used: list[str] = field(default_factory=list)  # by state number, so far: the mixer that used it
    adapters: AdapterRows | None = None  # None: no row names any

    def next_layer(self, module: nn.Module) -> int:
        """The number of the layer that attends now; ModelError if another module than `module` has that number."""
        number = self.attention.calls
        if self.order[number : number + 1] != (module,):
            raise ModelError(
                f"{type(module).__name__} attends as number {number} of a pass, unlike when its model was probed; the "
                "model has changed since the engine was made: make a new one"
            )
        return number


@dataclass(frozen=True, slots=True, eq=False)
class ServedTokens:
    """The tokens of a call as a mixer sees them. `padding` and `called`: see `MixerTokens`."""

    call: ModelCall
    mixer: str
    padding: Tensor | None = None
    called: set[tuple[str, str]] = field(default_factory=set)

    def recurrence(self, rule: Rule) -> Tensor:
        """Go on from the states of the samples."""
        return self.call.attention.recurrence(self._state(), rule)

    def conv1d(self, channels_first: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Go on from the last tokens of the samples."""
        out = self.call.attention.conv1d(self._state(), channels_first[0].T, weight, bias)
        return out.T.unsqueeze(0)

    def _state(self) -> int:
        """The number of the state that is used next, which must be this mixer's."""
        wanted, number = self.call.mixers, len(self.call.used)
        if wanted is not None and wanted[number : number + 1] != (self.mixer,):
            raise ModelError(
                f"{self.mixer} uses state {number} of its model, unlike when it was probed; the model has changed "
                "since the engine was made: make a new one"
            )
        self.call.used.append(self.mixer)
        return number


_CALL: ContextVar[ModelCall | None] = ContextVar("the model call under way", default=None)


def run_call(model_call: ModelCall, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function in which layers find `model_call`: in a context of its own, so that no interrupt can
    leave it set."""
    context = copy_context()
    context.run(_CALL.set, model_call)
    context.run(CURRENT_ATTENTION.set, paged_attention)
    return context.run(function, *args, **kwargs)


def keep_logits(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The hook before the head of a model that takes no logits_to_keep, which gets hidden states (1, T, D).

    Every engine of a model registers it; the first one in a call does its work.
    """
    call = _CALL.get()
    if call is None or call.logits_to_keep is None:
        return None
    kept, call.logits_to_keep = call.logits_to_keep, None
    return (args[0][:, kept],)


def adapter_rows() -> AdapterRows | None:
    """Which rows of the call under way name which adapter."""
    call = _CALL.get()
    return None if call is None else call.adapters


def call_wants_latents(source: LatentSource, _: Tensor) -> bool:
    """Whether the call that is under way wants a module's latents."""
    call = _CALL.get()
    return call is not None and source.module in call.latents


def mixer_tokens(mixer: RecurrentMixer) -> ServedTokens:
    """What a mixer knows of the call under way."""
    call = _CALL.get()
    if call is None:
        raise called_while_served(mixer.module)
    return ServedTokens(call, mixer.name)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    s_aux: Tensor | None = None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **checked: object,
) -> tuple[Tensor, None]:
    """The attention function of a served model, for one layer.

    The arguments in `checked` were read from the layer's source, and compared with a probe, when the engine was made.
    """
    call = _CALL.get()
    if call is None:
        raise called_while_served(module)
    if attention_mask is not None and attention_mask is not OWN_MASK:
        raise ModelError(f"{type(module).__name__} is given a mask by its model, and an engine knows of none")
    if call.modules is not None:
        return call.modules.of(module, query, key, value, scaling, position_bias).transpose(1, 2), None
    source = latents_in(module, key, value)
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    number = call.next_layer(module)
    if source is not None:
        given = query, key.squeeze(1), source.heads(), s_aux
        return call.attention.attend_latent(number, *given).unsqueeze(0), None
    out = call.attention.attend(number, query, key, value, s_aux)
    return out.unsqueeze(0), None


def called_while_served(module: nn.Module) -> EngineError:
    """The refusal of a call from elsewhere while a model is served or probed."""
    return EngineError(
        f"{type(module).__name__} was called while an engine serves its model; call the model when the engine's step "
        "is over"
    )


def mask_of_prompt(*sizes: Any, **request: Any) -> LayerMask | None:
    """The mask function of prompts that are embedded; in a step, where all is known, there is none."""
    return requested_mask(*sizes, **request) if stops_at_decoder() else None


def register_paged_attention() -> None:
    """Make the names known to transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionInterface.register(NAME_WITH_TOWERS, paged_attention)
    AttentionMaskInterface.register(NAME_WITH_TOWERS, mask_of_prompt)

"""Attention over pages, and recurrences over states, for a transformers model, for as long as one call of it takes.

A model asks for attention by name. While it is served the name is `attnspan_paged`, a function registered with
transformers' own AttentionInterface (`paged_attention`). Its recurrent mixers have methods of their own meanwhile
(mixers.py). The call under way (`ModelCall`) is a context variable, since not every model passes arguments down to its
layers. Threads that serve one model over different pages do not meet. Afterwards the model has its own name and methods
back.

[Note: several engines] Several engines may serve one model at once, as virtual ranks do. The first to come sets the
name, the last to leave restores it. The name is written to the configs that layers read it from: calling
`set_attn_implementation`, which visits every module, would cost a small model a tenth of its step.

[Note: interrupts] Engines are kept by identity, not counted: one that was interrupted on its way out leaves with its
next step. Locks are taken and released within one line (engine/owner.py, [Note: one line]).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_not
from threading import Lock
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from attnspan.engine.fingerprint import ServingMethod
from attnspan.engine.model import StateSpec, StepAttention
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface.adapters import adapted, check_adapters
from attnspan.integrations.huggingface.attention import configs_of, is_bound
from attnspan.integrations.huggingface.checking import check_alone, check_positions, counting_modules
from attnspan.integrations.huggingface.embedding import capturing
from attnspan.integrations.huggingface.latents import METHOD, LatentSource, latents_in
from attnspan.integrations.huggingface.layers import (
    AttentionLayer,
    attention_layers,
    check_decodes,
    check_is_model,
    is_left_out,
    split_idle,
)
from attnspan.integrations.huggingface.lora import AdapterRows, forward_by_rows, lora_layers
from attnspan.integrations.huggingface.masking import Pattern, requested_pattern
from attnspan.integrations.huggingface.mixers import RecurrentMixer, recurrent_mixers
from attnspan.integrations.huggingface.own_attention import CURRENT_ATTENTION, dispatch_forward
from attnspan.integrations.huggingface.plain_attention import OWN_MASK
from attnspan.integrations.huggingface.positions import give_positions
from attnspan.integrations.huggingface.token_mixing import token_mixing
from attnspan.integrations.huggingface.towers import decoder_of, modules_outside
from attnspan.recurrence import Rule

NAME = "attnspan_paged"

NAME_MERGING = "attnspan_paged_merging"
"""The same of a model with towers, whose masks are asked for too; its towers keep their own attention."""

_ENTRY = "_attn_implementation_internal"

WHILE_SERVED = frozenset({_ENTRY, "_attn_implementation", METHOD})
"""Entries of a config, or of a module, that change because the model is served."""

P = ParamSpec("P")
T = TypeVar("T")


class ModuleAttention:
    """Attention of modules that are not all a decoder's over pages."""

    def of(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Tensor | None
    ) -> Tensor:
        """Of a module, (B, H, S, Dv), with the scale and the bias of its call."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class ModelCall:
    """A call of a model: attention and states, which layer has which number, and which mixer uses which state."""

    attention: StepAttention
    order: tuple[nn.Module, ...]  # the modules that attend, as they come in a pass; some more than once
    mixers: tuple[str, ...] | None  # by state, in the order of their use; None while that is found out
    latents: Container[nn.Module] = ()  # modules that hand over latents
    modules: ModuleAttention | None = None  # in the place of attention over pages
    logits_to_keep: Tensor | None = None  # the tokens whose logits are wanted, of a model that computes all
    used: list[str] = field(default_factory=list)  # mixers, by state
    adapters: AdapterRows | None = None  # None: no row names any
    attended: int = 0

    def next_layer(self, module: nn.Module) -> int:
        """The number of the layer that attends now, which must be the one of a module."""
        number = self.attended
        if self.order[number : number + 1] != (module,):
            raise ModelError(
                f"{type(module).__name__} attends as number {number} of a pass, unlike when its model was probed; the "
                "model has changed since the engine was made: make a new one"
            )
        self.attended += 1
        return number


@dataclass(frozen=True, slots=True, eq=False)
class ServedTokens:
    """The tokens of a call as a mixer sees them. `padding` and `called`: see `TokensOfMixer`."""

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


_ATTENTION: ContextVar[ModelCall | None] = ContextVar("the model call under way", default=None)


def run_call(model_call: ModelCall, call: Callable[[], T]) -> T:
    """Call a model whose layers find this: in a context of its own, so that no interrupt can leave it set."""
    context = copy_context()
    context.run(_ATTENTION.set, model_call)
    context.run(CURRENT_ATTENTION.set, paged_attention)
    return context.run(call)


def keep_logits(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The hook before the head of a model that takes no logits_to_keep, which gets hidden states (1, T, D).

    Every engine of a model registers it; the first one in a call does its work.
    """
    call = _ATTENTION.get()
    if call is None or call.logits_to_keep is None:
        return None
    kept, call.logits_to_keep = call.logits_to_keep, None
    return (args[0][:, kept],)


def _adapter_rows() -> AdapterRows | None:
    """Which rows of the call under way name which adapter."""
    call = _ATTENTION.get()
    return None if call is None else call.adapters


def wants_latents(source: LatentSource, _: Tensor) -> bool:
    """Whether the call that is under way wants a module's latents."""
    call = _ATTENTION.get()
    return call is not None and source.module in call.latents


def _tokens_of(mixer: RecurrentMixer) -> ServedTokens:
    """What a mixer knows of the call under way."""
    call = _ATTENTION.get()
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
    """The attention function; what `checked` may hold was read from the layers, and probed, when the model came."""
    call = _ATTENTION.get()
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


@dataclass(frozen=True, slots=True)
class ServedLayers:
    """The layers of a model that look at other tokens: those that attend, and recurrent mixers."""

    attention: list[AttentionLayer]
    mixers: list[RecurrentMixer]
    lora: list[nn.Module] = field(default_factory=list)  # with adapters that requests may name

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
    AttentionInterface.register(NAME, paged_attention)
    AttentionInterface.register(NAME_MERGING, paged_attention)
    AttentionMaskInterface.register(NAME_MERGING, pattern_of_prompt)
    return ServedLayers(layers, mixers, lora_layers(model))


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The module that computes logits: of a model, or of its decoder or one around that."""
    inside = adapted(model)  # a PeftModel is none of transformers, and has no head of its own
    decoder = decoder_of(inside)
    around = [each for each in inside.modules() if isinstance(each, PreTrainedModel) and decoder in set(each.modules())]
    heads = (each.get_output_embeddings() for each in around)
    return next((head for head in heads if head is not None), None)


def _of_prompt(ask: Callable[P, Pattern]) -> Callable[P, Pattern | None]:
    """A mask function for prompts that are embedded; in a step, where all is known, there is none."""
    return lambda *sizes, **asked: ask(*sizes, **asked) if capturing() else None


pattern_of_prompt = _of_prompt(requested_pattern)


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


class ProbedCall(NamedTuple):
    """That a layer attends: its place among the layers, its window, and the key heads that it has on this rank."""

    place: int
    window: int | None
    kv_heads: int

    def layer(self, layers: Sequence[AttentionLayer]) -> AttentionLayer:
        """The layer, as it attends."""
        return replace(layers[self.place], window=self.window, kv_heads=self.kv_heads)


class ProbeResult(NamedTuple):
    """What probing a model found: its layers in the order in which they attend; of each state what it is, and whose;
    and whether the model computes the logits of all tokens where some are asked for."""

    calls: list[ProbedCall]
    states: list[tuple[str, StateSpec]]
    all_logits: bool = False


class _PagedBinding:
    """The engines that serve a model, the names that its configs had before, and what probing it found."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = decoder_of(model)
        self.config = model.config  # if it has another, all are looked for again
        self.configs = configs_of(decoder)  # one, for nearly every model
        self.name = NAME if decoder is model else NAME_MERGING
        self.plain = {id(config) for config in self.configs if _is_plain(config)}
        self.names: list[str] | None = None  # None while no engine serves it
        self.owners: set[int] = set()
        self.latents: dict[nn.Module, LatentSource] = {}
        self.described: list[str] = []
        self.probed = ProbeResult([], [])
        self.replaced: list[nn.Module] = []
        self.replacements: list[tuple[dict[str, object], str, ServingMethod]] = []  # attributes of modules
        self.lock = Lock()

    def begin(self, name: str, owner: int) -> None:
        """An owner comes; again, if its last end was broken off."""
        if not self.owners:
            if self.names is None:
                self.names = [self.attention_of(config) for config in self.configs]
            for config in self.configs:
                self.set_attention(config, name)
        for source in self.latents.values():
            source.bind()
        if not self.owners:
            for held, attribute, method in self.replacements:
                held[attribute] = method
        self.owners.add(owner)

    def end(self, owner: int) -> None:
        self.owners.discard(owner)
        if not self.owners and self.names is not None:
            for config, name in zip(self.configs, self.names, strict=True):
                self.set_attention(config, name)
            for source in self.latents.values():
                source.unbind()
            for held, attribute, _ in self.replacements:
                held.pop(attribute, None)
            self.names = None

    def attention_of(self, config: PreTrainedConfig) -> str:
        name: str = vars(config)[_ENTRY] if id(config) in self.plain else config._attn_implementation
        return name

    def set_attention(self, config: PreTrainedConfig, name: str) -> None:
        """`config._attn_implementation = name`, whose setter takes long to look for configs inside."""
        if id(config) in self.plain:
            vars(config)[_ENTRY] = name
        else:
            config._attn_implementation = name

    def probe(self, layers: ServedLayers, name: str, probe: Callable[[], ProbeResult]) -> ProbeResult:
        """See `probed_once`; under the lock."""
        self.update_layers(layers)
        if self.described != layers.described:
            self.check_idle()
            self.begin(name, id(self))
            try:
                self.probed = probe()
            finally:
                self.end(id(self))
            self.described = layers.described
        return self.probed

    def update_layers(self, layers: ServedLayers) -> None:
        """The mixers and LoRA layers of the model, as they are now."""
        modules = [*(mixer.module for mixer in layers.mixers), *layers.lora]
        if len(modules) != len(self.replaced) or any(map(is_not, modules, self.replaced)):
            self.check_idle()
            self.replacements = [
                (vars(module), attribute, ServingMethod(method))
                for mixer in layers.mixers
                for module, attribute, method in mixer.replacements(partial(_tokens_of, mixer))
            ]
            self.replacements += [
                (vars(module), "forward", ServingMethod(forward_by_rows, module, _adapter_rows))
                for module in layers.lora
            ]
            self.replaced = modules

    def check_idle(self) -> None:
        if self.owners:
            raise EngineError("model has changed, and another engine is in the middle of a step with it")


def _is_plain(config: PreTrainedConfig) -> bool:
    """Whether the name of a config's attention is one entry of it and nothing else, shown by a copy."""
    twin = copy(config)
    vars(twin)[_ENTRY] = NAME
    return not config.sub_configs and twin._attn_implementation == NAME


_BINDINGS: WeakKeyDictionary[nn.Module, _PagedBinding] = WeakKeyDictionary()
_LOCK = Lock()


def _binding_of(model: PreTrainedModel) -> _PagedBinding:
    with _LOCK: return _find_binding(model)  # fmt: skip  # noqa: E701


def _find_binding(model: PreTrainedModel) -> _PagedBinding:
    found = _BINDINGS.get(model)
    if found is None or (found.config is not model.config and not found.owners):
        found = _BINDINGS[model] = _PagedBinding(model)
    return found


@contextmanager
def attention_over_pages(model: PreTrainedModel, owner: object = None) -> Iterator[None]:
    """Inside, the model's attention is `paged_attention`, for one owner at least. See [Note: several engines]."""
    binding = _binding_of(model)
    try:
        with binding.lock: binding.begin(binding.name, id(owner))  # fmt: skip  # noqa: E701
        yield
    finally:
        with binding.lock: binding.end(id(owner))  # fmt: skip  # noqa: E701


def serve_latents(model: PreTrainedModel, sources: Iterable[LatentSource]) -> None:
    """While the model is served, these stand in for the keys and values of their modules."""
    binding = _binding_of(model)
    with binding.lock: binding.latents.update((each.module, each) for each in sources)  # fmt: skip  # noqa: E701


def probed_once(
    model: PreTrainedModel, layers: ServedLayers, name: str, probe: Callable[[], ProbeResult]
) -> ProbeResult:
    """What `probe` finds with an attention of that name, or has found before of a model with these layers.

    No engine serves the model meanwhile. An engine for a model that others serve, as on virtual ranks, finds it probed.
    """
    binding = _binding_of(model)
    with binding.lock: return binding.probe(layers, name, probe)  # fmt: skip  # noqa: E701


def update_layers(model: PreTrainedModel, layers: ServedLayers) -> None:
    """From here on these are served: a model that has changed may have others of the same description."""
    binding = _binding_of(model)
    with binding.lock: binding.update_layers(layers)  # fmt: skip  # noqa: E701

"""Attributes that are set on the configs and modules of a transformers model while engines serve it.

[Note: several engines] Several engines may serve one model at once, as virtual ranks do. The first one sets the name of
its attention, the last one restores it. The name is written directly to the configs that layers read it from:
`set_attn_implementation`, which visits every module, would take a tenth of a small model's step.

[Note: interrupts] Engines (and probes, which act as one) are kept in a set by identity, not counted: one whose exit was
interrupted leaves after its next step. Locks are acquired and released within one line (engine/call_lock.py, [Note: one
line]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnspan.engine.fingerprint import ServingMethod
from attnspan.engine.model import StateSpec
from attnspan.errors import EngineError
from attnspan.integrations.huggingface.binding import configs_of
from attnspan.integrations.huggingface.latents import METHOD, LatentSource
from attnspan.integrations.huggingface.layers import AttentionLayer
from attnspan.integrations.huggingface.lora import forward_by_rows
from attnspan.integrations.huggingface.paged_attention import NAME, NAME_WITH_TOWERS, adapter_rows, mixer_tokens
from attnspan.integrations.huggingface.served_layers import ServedLayers
from attnspan.integrations.huggingface.towers import decoder_of

_ENTRY = "_attn_implementation_internal"

WHILE_SERVED = frozenset({_ENTRY, "_attn_implementation", METHOD})
"""Entries of a config, or of a module, that change because the model is served."""


class ProbedCall(NamedTuple):
    """A call of attention in a probed pass: the place of its layer among the layers, the window that it used, and its
    key heads on this rank. A layer that attends twice has two."""

    place: int
    window: int | None
    kv_heads: int

    def layer(self, layers: Sequence[AttentionLayer]) -> AttentionLayer:
        """The layer, as it attends."""
        return replace(layers[self.place], window=self.window, kv_heads=self.kv_heads)


class ProbeResult(NamedTuple):
    """What probing a model found: calls of attention in their order; for each state the name of its mixer and its spec;
    and whether the model computes the logits of all tokens though few are wanted."""

    calls: list[ProbedCall]
    states: list[tuple[str, StateSpec]]
    all_logits: bool = False


class ServingBinding:
    """What serving changes in a model: engines in a step, attributes that they set and restore, what a probe found."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = decoder_of(model)
        self.config = model.config  # a model that has another one by now gets another binding
        self.configs = configs_of(decoder)  # one, for nearly every model
        self.name = NAME if decoder is model else NAME_WITH_TOWERS  # of the attention while it is served
        self.plain = {id(config) for config in self.configs if _is_plain(config)}
        self.names: list[str] | None = None  # by config: its own attention, to be restored; None while not served
        self.engines: set[int] = set()  # engines in a step, by id
        self.latents: dict[nn.Module, LatentSource] = {}
        self.described: list[str] = []
        self.probed = ProbeResult([], [])
        self.replaced: list[tuple[nn.Module, tuple[object, ...]]] = []  # modules with other methods, and their kinds
        self.replacements: list[tuple[dict[str, object], str, ServingMethod]] = []  # (vars of a module, name, method)
        self.fused: list[tuple[dict[str, object], str, ServingMethod]] = []  # likewise; a model's own take precedence
        self.lock = Lock()

    def begin(self, name: str, engine: int) -> None:
        """The step of an engine begins, by its id; the first sets the attributes. One whose `end` was interrupted may
        begin again."""
        if not self.engines:
            if self.names is None:
                self.names = [self.attention_of(config) for config in self.configs]
            for config in self.configs:
                self.set_attention(config, name)
        for source in self.latents.values():
            source.bind()
        if not self.engines:
            for held, attribute, method in self.replacements:
                held[attribute] = method
            for held, attribute, method in self.fused:
                held.setdefault(attribute, method)  # a model may have set one of its own while it ran
        self.engines.add(engine)

    def end(self, engine: int) -> None:
        """The step of an engine ends; the last one restores the attributes."""
        self.engines.discard(engine)
        if not self.engines and self.names is not None:
            for config, name in zip(self.configs, self.names, strict=True):
                self.set_attention(config, name)
            for source in self.latents.values():
                source.unbind()
            for held, attribute, _ in self.replacements:
                held.pop(attribute, None)
            for held, attribute, method in self.fused:
                if held.get(attribute) is method:
                    del held[attribute]
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
        """The mixers, LoRA layers and fused modules of the model, as they are now."""
        modules = [*(mixer.module for mixer in layers.mixers), *layers.lora]
        replaced = [*((module, ()) for module in modules), *((each.module, each.formula) for each in layers.fused)]
        if replaced != self.replaced:
            self.check_idle()
            self.replacements = [
                (vars(module), attribute, ServingMethod(method))
                for mixer in layers.mixers
                for module, attribute, method in mixer.replacements(partial(mixer_tokens, mixer))
            ]
            self.replacements += [
                (vars(module), "forward", ServingMethod(forward_by_rows, module, adapter_rows))
                for module in layers.lora
            ]
            self.fused = [(vars(each.module), "forward", ServingMethod(each.forward)) for each in layers.fused]
            self.replaced = replaced

    def check_idle(self) -> None:
        if self.engines:
            raise EngineError("model has changed, and another engine is in the middle of a step with it")


def _is_plain(config: PreTrainedConfig) -> bool:
    """Whether the name of a config's attention is one entry of it and nothing else, shown by a copy."""
    twin = copy(config)
    vars(twin)[_ENTRY] = NAME
    return not config.sub_configs and twin._attn_implementation == NAME


_BINDINGS: WeakKeyDictionary[nn.Module, ServingBinding] = WeakKeyDictionary()
_LOCK = Lock()


def _binding_of(model: PreTrainedModel) -> ServingBinding:
    with _LOCK: return _find_binding(model)  # fmt: skip  # noqa: E701


def _find_binding(model: PreTrainedModel) -> ServingBinding:
    found = _BINDINGS.get(model)
    if found is None or (found.config is not model.config and not found.engines):
        found = _BINDINGS[model] = ServingBinding(model)
    return found


@contextmanager
def attention_over_pages(model: PreTrainedModel, engine: object = None) -> Iterator[None]:
    """Inside, the model's attention is `paged_attention`, for one engine at least. See [Note: several engines]."""
    binding = _binding_of(model)
    try:
        with binding.lock: binding.begin(binding.name, id(engine))  # fmt: skip  # noqa: E701
        yield
    finally:
        with binding.lock: binding.end(id(engine))  # fmt: skip  # noqa: E701


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
    """Serve these layers from now on: a model that has changed may have other modules with the same description."""
    binding = _binding_of(model)
    with binding.lock: binding.update_layers(layers)  # fmt: skip  # noqa: E701

"""Attention over pages for a transformers model, for as long as one call of it takes.

A model asks for attention by name. While it is served the name is `attnspan_paged`, a function registered with
transformers' own AttentionInterface (`paged_attention`). The attention of the step is a context variable
(`call_with_attention`), since not every model passes arguments down to its layers. Threads that serve one model over
different pages do not meet. Afterwards the model has its own name back.

[Note: several engines] Several engines may serve one model at once, as virtual ranks do. The first to come sets the
name, the last to leave restores it. The name is written to the configs that layers read it from: calling
`set_attn_implementation`, which visits every module, would cost a small model a tenth of its step.

[Note: interrupts] Engines are kept by identity, not counted: one that was interrupted on its way out leaves with its
next step. Locks are taken and released within one line (engine/owner.py, [Note: one line]).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from copy import copy
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from attnspan.engine.model import StepAttention
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface.adapters import check_adapters
from attnspan.integrations.huggingface.attention import configs_of, is_bound
from attnspan.integrations.huggingface.checking import check_alone, check_positions, check_takes_positions
from attnspan.integrations.huggingface.latents import METHOD, LatentSource, latents_in
from attnspan.integrations.huggingface.layers import AttentionLayer, attention_layers, decoder_layers, split_idle
from attnspan.integrations.huggingface.own_attention import ASKED, dispatch_forward

NAME = "attnspan_paged"

_ENTRY = "_attn_implementation_internal"

WHILE_SERVED = frozenset({_ENTRY, "_attn_implementation", METHOD})
"""Entries of a config, or of a module, that change because the model is served."""

T = TypeVar("T")

_ATTENTION: ContextVar[StepAttention | ModuleAttention | None] = ContextVar("attention of the call", default=None)
_LATENTS: ContextVar[Container[nn.Module]] = ContextVar("modules that give it latents", default=())


class ModuleAttention:
    """Attention of modules that are not all a decoder's over pages."""

    def of(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Of a module, (B, H, S, Dv), with the options of its call."""
        raise NotImplementedError


def call_with_attention(
    attention: StepAttention | ModuleAttention, latents: Container[nn.Module], call: Callable[[], T]
) -> T:
    """Call a model whose layers attend by this: in a context of its own, so that no interrupt can leave it set.
    `latents` are modules that hand over latents."""
    context = copy_context()
    context.run(_ATTENTION.set, attention)
    context.run(_LATENTS.set, latents)
    context.run(ASKED.set, paged_attention)
    return context.run(call)


def wants_latents(source: LatentSource, _: Tensor) -> bool:
    """Whether the call that is under way wants a module's latents."""
    return source.module in _LATENTS.get()


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    s_aux: Tensor | None = None,
    **checked: object,
) -> tuple[Tensor, None]:
    """The attention function; what `checked` may hold was read from the layers, and probed, when the model came."""
    attention = _ATTENTION.get()
    if attention is None:
        raise called_while_served(module)
    if attention_mask is not None:
        raise ModelError(f"layer {module.layer_idx} is given a mask by its model, and an engine knows of none")
    if isinstance(attention, ModuleAttention):
        return attention.of(module, query, key, value, **checked).transpose(1, 2), None
    source = latents_in(module, key, value)
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    if source is not None:
        given = query, key.squeeze(1), source.heads(), s_aux
        return attention.attend_latent(module.layer_idx, *given).unsqueeze(0), None  # type: ignore[arg-type]  # an int
    out = attention.attend(module.layer_idx, query, key, value, s_aux)  # type: ignore[arg-type]  # an int
    return out.unsqueeze(0), None


def called_while_served(module: nn.Module) -> EngineError:
    """The refusal of a call from elsewhere while a model is served or probed."""
    return EngineError(
        f"{type(module).__name__} was called while an engine serves its model; call the model when the engine's step "
        "is over"
    )


def served_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """The attention layers of a model, by their index; ModelError for what cannot be generated with."""
    if isinstance(model, nn.Module) and is_bound(model):
        raise ModelError("model is enabled for training over ranks; call disable() of its handle before it is served")
    layers, _ = split_idle(model, attention_layers(model))
    check_adapters(model)
    check_alone(model)
    check_positions(model)
    if not model.config.is_encoder_decoder and any(layer.bias is None for layer in layers):
        check_takes_positions(model)
    _check_compiled(model, layers)
    if model.config.is_encoder_decoder:
        encoder = set(model.get_encoder().modules())
        layers = [layer for layer in layers if not layer.cross and layer.module not in encoder]
    layers = decoder_layers(layers, "an engine")
    for layer in layers:
        dispatch_forward(layer.module)
    if not callable(getattr(model, "set_attn_implementation", None)) or model.get_output_embeddings() is None:
        raise ModelError(f"model must have a head for the next token, got {type(model).__name__}")
    if not isinstance(getattr(model.get_input_embeddings(), "weight", None), Tensor):
        raise ModelError(f"model must have one embedding for each token, got {type(model).__name__}, which has several")
    AttentionInterface.register(NAME, paged_attention)
    return layers


def _check_compiled(model: nn.Module, layers: list[AttentionLayer]) -> None:
    """Refuse compiled attention: a graph of it knows nothing of pages. Compiled parts without any are served."""
    attends = {layer.module for layer in layers}
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


class _Serving:
    """The engines that serve a model, the names that its configs had before, and what probing it found."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config  # if it has another, all are looked for again
        self.configs = configs_of(model)  # one, for nearly every model
        self.plain = {id(config) for config in self.configs if _is_plain(config)}
        self.names: list[str] | None = None  # None while no engine serves it
        self.owners: set[int] = set()
        self.latents: dict[nn.Module, LatentSource] = {}
        self.probed: list[str] = []
        self.windows: list[int | None] = []
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
        self.owners.add(owner)

    def end(self, owner: int) -> None:
        self.owners.discard(owner)
        if not self.owners and self.names is not None:
            for config, name in zip(self.configs, self.names, strict=True):
                self.set_attention(config, name)
            for source in self.latents.values():
                source.unbind()
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

    def probe(self, layers: list[str], name: str, probe: Callable[[], list[int | None]]) -> list[int | None]:
        """See `probed_once`; under the lock."""
        if self.probed != layers:
            if self.owners:
                raise EngineError("model has changed, and another engine is in the middle of a step with it")
            self.begin(name, id(self))
            try:
                self.windows = probe()
            finally:
                self.end(id(self))
            self.probed = layers
        return self.windows


def _is_plain(config: PreTrainedConfig) -> bool:
    """Whether the name of a config's attention is one entry of it and nothing else, shown by a copy."""
    twin = copy(config)
    vars(twin)[_ENTRY] = NAME
    return not config.sub_configs and twin._attn_implementation == NAME


_SERVED: WeakKeyDictionary[nn.Module, _Serving] = WeakKeyDictionary()
_LOCK = Lock()


def _serving(model: PreTrainedModel) -> _Serving:
    with _LOCK: return _found(model)  # fmt: skip  # noqa: E701


def _found(model: PreTrainedModel) -> _Serving:
    found = _SERVED.get(model)
    if found is None or (found.config is not model.config and not found.owners):
        found = _SERVED[model] = _Serving(model)
    return found


@contextmanager
def served(model: PreTrainedModel, owner: object = None) -> Iterator[None]:
    """Inside, the model's attention is `paged_attention`, for one owner at least. See [Note: several engines]."""
    serving = _serving(model)
    try:
        with serving.lock: serving.begin(NAME, id(owner))  # fmt: skip  # noqa: E701
        yield
    finally:
        with serving.lock: serving.end(id(owner))  # fmt: skip  # noqa: E701


def serve_latents(model: PreTrainedModel, sources: Iterable[LatentSource]) -> None:
    """While the model is served, these stand in for the keys and values of their modules."""
    serving = _serving(model)
    with serving.lock: serving.latents.update((each.module, each) for each in sources)  # fmt: skip  # noqa: E701


def probed_once(
    model: PreTrainedModel, layers: list[AttentionLayer], name: str, probe: Callable[[], list[int | None]]
) -> list[int | None]:
    """What `probe` finds with an attention of that name, or has found before of a model with these layers.

    No engine serves the model meanwhile. An engine for a model that others serve, as on virtual ranks, finds it probed.
    """
    serving, described = _serving(model), [str(layer) for layer in layers]
    with serving.lock: return serving.probe(described, name, probe)  # fmt: skip  # noqa: E701

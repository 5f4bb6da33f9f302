"""A model of transformers whose attention goes over pages, for as long as a step takes.

A model asks for attention by name. While it is being served the name is `attnspan_paged`, a function registered with
transformers' own AttentionInterface, and what belongs to the step is a context variable for as long as the model is
called (`attending`), since not every model hands arguments down to its layers; nothing is patched, and threads that
serve one model with different pages do not meet. Afterwards the model has the name back that it had.

[Note: who serves] Several engines may serve one model at once (virtual ranks do). The first to come sets the name,
the last to leave sets it back. It is set at every step, so it is written to the configs that layers read it from: to
ask `set_attn_implementation`, which looks at every module, would cost a small model a tenth of its step.

[Note: interrupts] Engines are noted by name, not counted: one that was interrupted on its way out leaves with its next
step. Locks are taken and given back within one line (owner.py, [Note: one line]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from attnspan.errors import EngineError, ModelError

NAME = "attnspan_paged"

Layers = list[Any]
"""Of AttentionLayer, which is told by attnspan.integrations.huggingface.attention_layers."""


class Attends(Protocol):
    """What serves a call of the model: attention of one layer's packed tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """(1, H, T, D) queries, keys and values of the new tokens; (1, T, H, D) out."""
        ...


class Call:
    """One call of a model: who serves it, and how many layers have attended."""

    def __init__(self, attends: Attends) -> None:
        self.attends, self.count = attends, 0


_CALL: ContextVar[Call | None] = ContextVar("the call of a model that is running", default=None)


@contextmanager
def attending(attends: Attends, layers: int) -> Iterator[None]:
    """While it lasts, attention of this thread's call of a model is this; ModelError unless so many layers came by."""
    call = Call(attends)
    before = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(before)
    if call.count != layers:
        raise ModelError(
            f"{call.count} of {layers} layers attended over pages in a call of the model; it has changed since the "
            "engine was made: make a new one"
        )


def paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    s_aux: Tensor | None = None,
    **known: Any,
) -> tuple[Tensor, None]:
    """The attention function. All that `known` may hold was read from layers, and seen, when the engine was made."""
    call = _CALL.get()
    if call is None:
        raise called_meanwhile(module)
    if attention_mask is not None:
        raise ModelError(f"layer {module.layer_idx} is given a mask by its model, and an engine knows of none")
    call.count += 1
    return call.attends.attend(module.layer_idx, query, key, value, s_aux), None  # type: ignore[arg-type]


def called_meanwhile(module: nn.Module) -> EngineError:
    """What is said to whoever calls a model that is being served, or looked at."""
    return EngineError(
        f"{type(module).__name__} was called while an engine serves its model; call the model when the engine's step "
        "is over"
    )


def layers_of(model: Any) -> Layers:
    """The attention layers of a model, by their index; ModelError for what cannot be generated with."""
    from transformers import AttentionInterface

    from attnspan.integrations.huggingface import attention_layers
    from attnspan.integrations.huggingface.adapters import check_adapters
    from attnspan.integrations.huggingface.attending import is_seated
    from attnspan.integrations.huggingface.checking import check_positions

    if isinstance(model, nn.Module) and is_seated(model):
        raise ModelError("model is enabled for training over ranks; call disable() of its handle before it is served")
    layers: Layers = attention_layers(model)
    check_adapters(model)
    check_positions(model)
    _check_compiled(model, layers)
    for layer in layers:
        for wrong, what in (
            (layer.cross, "cross-attention"),
            (not layer.causal, "attention that looks ahead"),
            (layer.index is None, "no index, and so no place in a cache"),
        ):
            if wrong:
                raise ModelError(f"{layer.name} has {what}, and an engine serves decoder-only models")
    indices = [layer.index for layer in layers]
    if sorted(indices) != list(range(len(layers))):
        raise ModelError(f"layers must be numbered 0 to {len(layers) - 1}, each once, got {indices}")
    if not callable(getattr(model, "set_attn_implementation", None)) or model.get_output_embeddings() is None:
        raise ModelError(f"model must have a head for the next token, got {type(model).__name__}")
    AttentionInterface.register(NAME, paged)
    return sorted(layers, key=lambda layer: layer.index)


def _check_compiled(model: nn.Module, layers: Layers) -> None:
    """Refuse compiled attention: a graph of it knows nothing of pages. Compiled parts without any are served."""
    attends = {layer.module for layer in layers}
    for name, module in model.named_modules():
        how = None
        if type(module).__name__ == "OptimizedModule":  # to import it takes longer than all of this package
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
    """Who serves a model, and the names that its configs had before; and what it was seen to ask for."""

    def __init__(self, model: nn.Module) -> None:
        found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        self.config = model.config  # if it has another, all are looked for again
        self.configs: list[Any] = list(found.values())  # one, for nearly every model
        self.names: list[str] | None = None  # None while nobody serves it
        self.owners: set[int] = set()
        self.seen: list[str] = []
        self.found: list[int | None] = []
        self.lock = Lock()

    def begin(self, name: str, owner: int) -> None:
        """An owner comes; again, if its last end was broken off."""
        if not self.owners:
            if self.names is None:
                self.names = [config._attn_implementation for config in self.configs]
            for config in self.configs:
                config._attn_implementation = name
        self.owners.add(owner)

    def end(self, owner: int) -> None:
        self.owners.discard(owner)
        if not self.owners and self.names is not None:
            for config, name in zip(self.configs, self.names, strict=True):
                config._attn_implementation = name
            self.names = None

    def look(self, known: list[str], name: str, look: Callable[[], list[int | None]]) -> list[int | None]:
        """See `seen_once`; under the lock."""
        if self.seen != known:
            if self.owners:
                raise EngineError("model has changed, and another engine is in the middle of a step with it")
            self.begin(name, id(self))
            try:
                self.found = look()
            finally:
                self.end(id(self))
            self.seen = known
        return self.found


_SERVED: WeakKeyDictionary[nn.Module, _Serving] = WeakKeyDictionary()
_LOCK = Lock()


def _serving(model: Any) -> _Serving:
    with _LOCK: return _known(model)  # fmt: skip  # noqa: E701


def _known(model: Any) -> _Serving:
    found = _SERVED.get(model)
    if found is None or (found.config is not model.config and not found.owners):
        found = _SERVED[model] = _Serving(model)
    return found


@contextmanager
def served(model: nn.Module, owner: object = None) -> Iterator[None]:
    """While it lasts, the model's attention is `paged`, for one owner at least. See [Note: who serves]."""
    serving = _serving(model)
    try:
        with serving.lock: serving.begin(NAME, id(owner))  # fmt: skip  # noqa: E701
        yield
    finally:
        with serving.lock: serving.end(id(owner))  # fmt: skip  # noqa: E701


def seen_once(model: nn.Module, layers: Layers, name: str, look: Callable[[], list[int | None]]) -> list[int | None]:
    """What `look` finds, with an attention of that name, or has found of a model with these layers.

    Nobody serves it meanwhile. Who makes an engine for a model that others serve, as virtual ranks do, finds it seen.
    """
    serving, known = _serving(model), [str(layer) for layer in layers]
    with serving.lock: return serving.look(known, name, look)  # fmt: skip  # noqa: E701

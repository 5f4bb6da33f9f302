"""What enabling sets on the modules and configs of a model, and restores afterwards (layer_binding.py: on a layer)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from attnspan.errors import ModelError
from attnspan.integrations.huggingface.attention import (
    NAME,
    session_wants_latents,
    sharded_attention,
    tune_temperature,
)
from attnspan.integrations.huggingface.biases import bind_bias, unbind_bias
from attnspan.integrations.huggingface.inline_attention import bind_forward, unbind_forward
from attnspan.integrations.huggingface.latents import METHOD, LatentSource, latent_source
from attnspan.integrations.huggingface.layer_binding import BINDING, LayerBinding, ModuleBinding, is_bound

if TYPE_CHECKING:
    from attnspan.integrations.huggingface.enabling import Enabled
    from attnspan.integrations.huggingface.model_parts import ModelParts

P = ParamSpec("P")
T = TypeVar("T")


class ModelBinding:
    """The bindings of a model's layers and mixers. `kind_indices` has the index in `Enabled.kinds` of each layer's."""

    def __init__(self, enabled: Enabled, parts: ModelParts, kind_indices: Sequence[int]) -> None:
        self._enabled, self._parts, self._kind_indices = enabled, parts, kind_indices
        self._own_names: list[tuple[PreTrainedConfig, str]] = []  # of the attention of each config
        self._lock = RLock()

    def bind(self) -> None:
        """From now on layers use attention over ranks."""
        self._own_names = [(config, config._attn_implementation) for config in configs_of(self._parts.decoder)]
        for config, _ in self._own_names:
            config._attn_implementation = NAME
        for layer, kind_index in zip(self._parts.layers, self._kind_indices, strict=True):
            setattr(layer.module, BINDING, LayerBinding(self._enabled, layer, kind_index))
            source = latent_source(layer.module, session_wants_latents)
            if source is not None:
                source.bind()
            bind_bias(layer.module, layer.bias, layer.cross)
            bind_forward(layer.module, sharded_attention)
            tune_temperature(layer, by_itself=False)
        for layer in self._parts.idle:
            setattr(layer.module, BINDING, LayerBinding(self._enabled, layer, None))
        for mixer in self._parts.mixers:
            setattr(mixer.module, BINDING, ModuleBinding(self._enabled))
            mixer.bind(lambda: self._enabled.current_pass().mixer_tokens)

    def unbind(self) -> None:
        """Restore every module and config."""
        for layer in self._parts.idle:
            delattr(layer.module, BINDING)
        for layer in self._parts.layers:
            delattr(layer.module, BINDING)
            if isinstance(source := vars(layer.module).get(METHOD), LatentSource):
                source.unbind()
            unbind_bias(layer.module, layer.cross)
            unbind_forward(layer.module)
            tune_temperature(layer, by_itself=True)
        for mixer in self._parts.mixers:
            delattr(mixer.module, BINDING)
            mixer.unbind()
        for config, name in self._own_names:
            config._attn_implementation = name

    def check(self) -> None:
        """Refuse a model whose configs were changed in the meantime."""
        check_configs(config for config, _ in self._own_names)

    def run_again(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Recompute a region with the model enabled, as when it first ran."""
        with self._lock:
            if is_bound(self._parts.model):
                raise ModelError(
                    "a checkpointed region runs backward after disable(), and the model is enabled again; run it before"
                )
            self.bind()
            try:
                return run(*args, **kwargs)
            finally:
                self.unbind()


# ---- configs ---------------------------------------------------------------------------------------------------------


def own_config(model: PreTrainedModel) -> None:
    """Give a model a config that no other has. See [Note: a config of its own] in enabling.py."""
    memo: dict[int, object] = {}
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        theirs = vars(module).get("config")
        if isinstance(theirs, PreTrainedConfig) and id(theirs) in memo:
            vars(module)["config"] = memo[id(theirs)]


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model's modules, each once: where layers read the name of their attention."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


def check_configs(configs: Iterable[PreTrainedConfig]) -> None:
    """Refuse configs of an enabled model that name another attention since: layers would attend to a rank's tokens."""
    for config in configs:
        if config._attn_implementation != NAME:
            raise ModelError(
                f"the attention of an enabled model was set to {config._attn_implementation!r}, which sees a rank's "
                "tokens alone; disable() it before set_attn_implementation"
            )

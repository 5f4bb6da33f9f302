"""LoRA adapters of peft by name: several in one packed row, beside rows of the base model.

A LoRA layer computes ``base(x) + B(A(x)) * scaling`` with its active adapters. Adapters are not switched for a step:
while the model is served, the forward of such layers is `forward_by_rows`. The base layer runs once on all rows, and
each adapter on the rows that name it. Rows that name none are computed by the layer's own forward, with the adapters
that are active in the model.

Supported are plain LoRAs on Linear layers. Requests that name an adapter are refused if it changes other layers, or is
another kind of LoRA; such adapters can still be active for the whole model (adapters.py). The formula is compared with
the layer's own forward on two tokens. peft is not imported.

[Note: rows] A layer must get all rows of the step in order, (1, T, ...), or those whose logits are computed. Layers
inside experts get a selection of rows, without the first dim, which is refused.

Shapes: T rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from attnspan.engine.fingerprint import ServingMethod
from attnspan.engine.model import PackedBatch
from attnspan.errors import EngineError, ModelError
from attnspan.integrations.huggingface.classes import class_of

BASE = "__base__"
"""The base model without adapters, as peft calls it where adapters are named."""

LAYER = ("peft.tuners.lora.layer", "Linear")


Groups = Mapping[str | None, slice | Tensor]
"""The rows of each adapter; None: of those that name none."""


class AdapterRows:
    """Which adapter each row of a step names."""

    def __init__(self, batch: PackedBatch) -> None:
        self.names = [name for count, name in batch.adapters for _ in range(count)]
        self.logits_to_keep, self.device = batch.logits_to_keep, batch.tokens.device

    @cached_property
    def all(self) -> Groups:
        return self._groups(self.names)

    @cached_property
    def kept(self) -> Groups:
        """Of the rows whose logits are wanted."""
        if self.logits_to_keep is None:
            return self.all
        return self._groups([self.names[row] for row in self.logits_to_keep.tolist()])

    def among(self, given: Tensor, what: str) -> Groups:
        """The rows of what a layer is given. See [Note: rows]."""
        if given.dim() == 3 and len(given) == 1:
            if given.shape[1] == len(self.names):
                return self.all
            if self.logits_to_keep is not None and given.shape[1] == len(self.logits_to_keep):
                return self.kept
        raise ModelError(
            f"{what} has LoRA adapters and is given {tuple(given.shape)} in a step of {len(self.names)} tokens, so "
            "adapters cannot be named by request; activate one for the whole model, model.set_adapter(...)"
        )

    def _groups(self, names: Sequence[str | None]) -> Groups:
        found: dict[str | None, list[int]] = {}
        for row, name in enumerate(names):
            found.setdefault(name, []).append(row)
        return {name: self._index(rows) for name, rows in found.items()}

    def _index(self, rows: list[int]) -> slice | Tensor:
        if rows[-1] - rows[0] + 1 == len(rows):
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self.device)


def lora_layers(model: nn.Module) -> list[nn.Module]:
    """The Linear layers of a model that have LoRA adapters, and no forward but that of their class."""
    return [module for module in model.modules() if is_lora_layer(module) and not _own_forward(module)]


def _own_forward(module: nn.Module) -> bool:
    return not isinstance(vars(module).get("forward", ServingMethod(module)), ServingMethod)


def is_lora_layer(module: nn.Module) -> bool:
    """Whether it is a Linear layer with LoRA adapters."""
    found = class_of(module)
    return (found.__module__, found.__name__) == LAYER


def forward_by_rows(
    module: nn.Module, rows_of: Callable[[], AdapterRows | None], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """The forward of a layer while its model is served; `rows_of` the step under way."""
    rows, own = rows_of(), partial(type(module).forward, module)
    result: Tensor
    if rows is None:
        result = own(x, *args, **kwargs)
        return result
    layer = _Layer(module)
    groups = rows.among(x, type(module).__name__)
    result = layer.base(x, *args, **kwargs)
    for name, some in groups.items():
        if name is None:
            result[:, some] = own(x[:, some], *args, **kwargs)
        elif name in layer.adapters:
            result[:, some] = layer.adapted(name, x[:, some], result[:, some])
    return result


class _Layer:
    """A LoRA layer of peft, by its attributes."""

    def __init__(self, module: nn.Module) -> None:
        held: dict[str, Any] = {**vars(module), **module._modules}
        self.base: nn.Module = held["base_layer"]
        self.down: Mapping[str, nn.Linear] = held["lora_A"]
        self.up: Mapping[str, nn.Linear] = held["lora_B"]
        self.scaling: Mapping[str, float] = held["scaling"]
        self.variants: Mapping[str, object] = held["lora_variant"]
        self.merged: Sequence[str] = held["merged_adapters"]
        self.adapters = frozenset(self.down)

    def adapted(self, name: str, x: Tensor, base: Tensor) -> Tensor:
        """What an adapter makes of results of the base layer."""
        down, up = self.down[name], self.up[name]
        result: Tensor = base + up(down(x.to(down.weight.dtype))) * self.scaling[name]
        return result.to(base.dtype)


def check_adapter(model: nn.Module, name: str) -> None:
    """EngineError for an adapter that requests cannot name."""
    layers = {path: module for path, module in model.named_modules() if is_lora_layer(module)}
    known = sorted({each for module in layers.values() for each in _Layer(module).adapters})
    if name != BASE and name not in known:
        kinds = ", ".join(map(repr, [*known, BASE])) if known else "none: the model has no LoRA adapters"
        raise EngineError(f"adapter must be one that the model has, {kinds}, got {name!r}")
    for path, module in model.named_modules():
        reason = _refusal(module, name)
        if reason is not None:
            layer = f"{path} ({type(module).__name__})"
            raise EngineError(f"adapter={name!r} cannot be named by a request: {layer} {reason}")


def _refusal(module: nn.Module, name: str) -> str | None:
    """Why a module cannot be computed by rows, if it cannot."""
    if not is_lora_layer(module):
        bases = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("peft.")}
        if "AuxiliaryTrainingWrapper" in bases:
            return "has weights of its own for each adapter; activate one for the whole model, model.set_adapter(...)"
        if "BaseTunerLayer" in bases:
            return "is not a Linear layer with LoRA adapters; activate one for the whole model, model.set_adapter(...)"
        return None
    layer = _Layer(module)
    if _own_forward(module):
        return "has a forward of its own instead of its class's; activate the adapter, model.set_adapter(...)"
    if layer.merged:
        return f"has {', '.join(layer.merged)} merged into its weights; call model.unmerge_adapter() first"
    if name in layer.variants:
        kind = type(layer.variants[name]).__name__.removesuffix("LinearVariant")
        return f"has it as {kind}, another kind of LoRA; activate it for the whole model, model.set_adapter({name!r})"
    if name in layer.adapters and not _agrees(module, layer, name):
        return "computes something else than base(x) + B(A(x)) * scaling"
    return None


def _agrees(module: nn.Module, layer: _Layer, name: str) -> bool:
    """Whether a layer's own forward, with adapters by name, is the formula; on two tokens."""
    down = layer.down[name]
    x = torch.linspace(-1.0, 1.0, 2 * down.in_features, device=down.weight.device).view(1, 2, -1)
    with torch.no_grad():
        x = x.to(next(layer.base.parameters()).dtype)
        base = layer.base(x)
        expected = base if getattr(module, "disable_adapters", False) else layer.adapted(name, x, base)
        found = type(module).forward(module, x, adapter_names=[name])
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-5)

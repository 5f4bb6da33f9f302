"""Layers of multi-head latent attention (MLA), and how the attention function gets their latents.

Such a layer (DeepSeek V2 and V3, Mistral 4, GLM-4.7 Flash, LongCat, MiniCPM3 and others) computes keys and values by
one method, and passes them to the attention function unchanged::

    key, value = self.expand_kv(kv_nope, k_rot)  # (B, 1, S, R), (B, 1, S, P) -> (B, H, S, N + P), (B, H, S, Dv)

While its model is served or enabled, a `LatentSource` replaces the module's `expand_kv`. If latents are wanted, it
returns the latent (B, 1, S, R + P) in place of key and value, as one tensor, and the attention function expands it
where that is needed.

[Note: known layers] Two things are read from the class: that the method is transformers' own, and that its results are
not changed afterwards. To be absorbed into queries, the matrix must be a plain Linear, and is compared with the method
on a few latents. All other layers pass keys and values, which is correct and takes more memory and traffic.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnspan.engine.model import LatentHeads
from attnspan.errors import ModelError
from attnspan.integrations.huggingface.classes import class_of
from attnspan.integrations.huggingface.interface_calls import parse

METHOD = "expand_kv"

MATRIX = "kv_b_proj"
"""The part of a layer that expands its latents."""

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Of one product of matrices by two orders of sums, over its largest number."""


WantsLatents = Callable[["LatentSource", Tensor], bool]
"""Whether the call that is under way wants a source's latents, of the numbers (B, 1, S, R) that are multiplied."""


class LatentSource:
    """The `expand_kv` of a module, which hands over latents where they are wanted."""

    def __init__(self, module: nn.Module, wanted: WantsLatents) -> None:
        self.module, self._wanted = module, wanted

    def bind(self) -> None:
        """Stand in for the method."""
        vars(self.module)[METHOD] = self

    def unbind(self) -> None:
        vars(self.module).pop(METHOD, None)

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """The latent in the place of key and value, or both of them."""
        if not self._wanted(self, kv_nope):
            return self._expanded(kv_nope, k_rot)
        latent = torch.cat([kv_nope, k_rot], dim=-1)
        return latent, latent

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latents (B, S, R + P)."""
        return self._expanded(
            *latent.unsqueeze(1).split([self._size("kv_lora_rank"), self._size("qk_rope_head_dim")], -1)
        )

    def _expanded(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        method: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]] = getattr(type(self.module), METHOD)
        return method(self.module, kv_nope, k_rot)

    def _size(self, name: str) -> int:
        return int(getattr(self.module, name))

    @property
    def width(self) -> int:
        """Numbers of a latent."""
        return self._size("kv_lora_rank") + self._size("qk_rope_head_dim")

    @property
    def rank(self) -> int:
        """How many of them are multiplied."""
        return self._size("kv_lora_rank")

    @property
    def matrix(self) -> nn.Module:
        """What multiplies them."""
        return self.module.get_submodule(MATRIX)

    # ---- absorbed ----------------------------------------------------------------------------------------------

    @property
    def _weight(self) -> Tensor:
        matrix = self.matrix
        assert isinstance(matrix, nn.Linear), "only such a matrix is absorbed"
        return matrix.weight

    @property
    def is_absorbable(self) -> bool:
        """Whether one matrix is all that expands; adapters and quantised weights are more."""
        up = getattr(self.module, MATRIX, None)
        return type(up) is nn.Linear and up.bias is None and not up._forward_hooks and not up._forward_pre_hooks

    def heads(self) -> LatentHeads:
        """The matrix, as queries and results take it."""
        if not self.is_absorbable:
            raise ModelError(
                f"{type(self.module).__name__}.kv_b_proj has changed since the engine was made: make a new one"
            )
        weight = self._weight
        key, value = self._size("qk_nope_head_dim"), self._size("v_head_dim")
        of_keys, of_values = weight.unflatten(0, (-1, key + value)).split([key, value], dim=1)
        return LatentHeads(of_keys, of_values)

    @torch.no_grad()
    def agrees(self) -> bool:
        """Whether the matrix makes the keys and values that the method makes, of a few latents."""
        weight = self._weight
        numbers = torch.arange(3 * self.width, device=weight.device, dtype=torch.float64).add(1).mul(0.7).cos()
        latent = numbers.view(1, 3, self.width).to(weight.dtype)
        pairs = zip(self.expand(latent), self.heads().expand(latent), strict=True)
        bound = TOLERANCE.get(weight.dtype, 0.0)
        return all(x.shape == y.shape and bool((x - y).abs().amax() <= bound * x.abs().amax()) for x, y in pairs)


def latents_in(module: nn.Module, key: Tensor, value: Tensor) -> LatentSource | None:
    """The source of what an attention function was given, if that is a latent."""
    source = vars(module).get(METHOD)
    return source if key is value and isinstance(source, LatentSource) else None


def latent_source(module: nn.Module, wanted: WantsLatents) -> LatentSource | None:
    """What stands in for a module's keys and values; None for one that is no known layer of latents."""
    cls = class_of(module)
    sized = all(isinstance(getattr(module, name, None), int) for name in SIZES)
    own = isinstance(vars(module).get(METHOD), LatentSource) or METHOD not in vars(module)
    known = sized and own and cls.__module__.startswith("transformers.") and _hands_over(cls)
    return LatentSource(module, wanted) if known else None


@functools.lru_cache(maxsize=64)
def _hands_over(cls: type[nn.Module]) -> bool:
    """Whether a forward gives the attention function what `expand_kv` returns, and does nothing else with it."""
    method, forward = getattr(cls, METHOD, None), cls.forward
    if method is None or any(not each.__module__.startswith("transformers.") for each in (method, forward)):
        return False
    try:
        tree = parse(inspect.getsource(forward))
    except (OSError, TypeError, SyntaxError):
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=key), ast.Name(id=value)])],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr="expand_kv")),
            ):
                names = [each.id for each in ast.walk(tree) if isinstance(each, ast.Name)]
                return names.count(key) == names.count(value) == 2 and _is_passed(tree, key, value)
    return False


def _is_passed(tree: ast.AST, key: str, value: str) -> bool:
    """Whether a call is given both, after the module and the query."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(args=[ast.Name(id="self"), _, ast.Name(id=first), ast.Name(id=second), *_]):
                if (first, second) == (key, value):
                    return True
    return False

"""Latents (MLA): a small vector per token travels, and is expanded to keys and values where it arrives.

Multi-head latent attention (MLA) computes the keys and values of all heads from one small vector per token, the latent:
576 numbers, where DeepSeek-V3's keys and values are 40,960. The expansion is that function, ``expand(latent) -> (key,
value)``. Every rank runs it for the tokens that it attends over. Only latents travel, and in backward their gradients.

[Note: weights] An expansion is a function, a method or a module, and reads its weights itself. They are found by
running it on one token and walking the autograd graph of the result. So they are inputs of the autograd node and get
gradients, like the weights of a Linear: those of the tokens that this rank attended over. The sum over ranks is the
gradient on one device, which is what DDP and FSDP2 average.

[Note: token by token] A latent is expanded on another rank, among other tokens. A function that mixes tokens, depends
on their indices or draws random numbers would give different keys there. So a new expansion is tested once: a token
must have the same keys alone and among others. The test runs in a new thread, so that hooks of the caller's thread,
such as those of activation checkpointing, do not record it.

Inside attention, a latent (B, S, R) is a key (B, 1, S, R) with a value of size 0, and travels as keys do.
Shapes: latent (B, S, R), key (B, Hk, S, D), value (B, Hk, S, Dv).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from attnspan.assumptions import in_new_thread
from attnspan.dtypes import dtype_name
from attnspan.errors import AttentionError
from attnspan.kernels.autograd import differentiable
from attnspan.transports import Transport

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]

TRIED = 4
"""The number of tokens that an expansion is tested on."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""The largest difference between two results for one token, relative to the largest number: matrix products of
different sizes sum in a different order. If tokens are mixed, or told their indices, the difference is about 1."""

SHARDED = "RegisterPostBackwardFunction"
"""The autograd node in the output of a module that FSDP2 shards as a unit of its own."""

_PLAIN = (Tensor, nn.Parameter)

EXPANDING: ContextVar[bool] = ContextVar("whether a latent is being expanded", default=False)
"""While set, modules are called once per buffer of latents, not once per call of attention."""


def as_keys(key: Tensor, value: Tensor | None, expand: Expand | None) -> tuple[Tensor, Tensor]:
    """Key and value; with `expand`, the latent in place of both."""
    if (value is None) != (expand is not None):
        raise AttentionError("give key and value, or a latent and what expands it: (query, latent, expand=function)")
    return key, key if value is None else value


class Expanded(NamedTuple):
    """Keys and values made of latents; for backward, with the autograd graph."""

    key: Tensor
    value: Tensor
    latent: Tensor | None = None
    made: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Expander:
    """An expansion as of one call of attention: its weights that require gradients, and the shapes that it returns."""

    expand: Expand = field(repr=False)
    weights: Sequence[Tensor]
    heads: int
    head_dim: int
    v_head_dim: int
    autocast: torch.dtype | None  # of the caller's autocast, if that was on

    @staticmethod
    def of(expand: Expand, latent: Tensor, transport: Transport) -> Expander:
        """The expander for a latent (B, S, R), tested if the expansion is new to the group."""
        if latent.dim() != 3 or not latent.is_floating_point():
            raise AttentionError(
                f"latent must be (batch, tokens, numbers), floating point, got {dtype_name(latent.dtype)} of shape "
                f"{tuple(latent.shape)}"
            )
        if not callable(expand):
            raise AttentionError(f"expand must be a function of a latent, got {type(expand).__name__}")
        device = latent.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        example, wanted = _example(latent), torch.is_grad_enabled()
        recorded = not torch.is_inference_mode_enabled()  # without gradients too, to see what is called
        with saved_tensors_hooks(_same, _same), torch.set_grad_enabled(recorded):
            example.requires_grad_(recorded)
            key, value = made_of(expand, example[:1, :1])
        _check_unsharded((key, value))
        weights = list(dict.fromkeys(x for x in _leaves((key, value)) if x is not example)) if wanted else []
        found = Expander(expand, weights, key.shape[1], key.shape[3], value.shape[3], autocast)
        found._check_weights()
        tried = transport.memo.setdefault(Expander, WeakKeyDictionary()).setdefault(_owner(expand), set())
        what = (getattr(expand, "__name__", ""), latent.shape[2], latent.dtype, *(x.shape for x in weights))
        if what not in tried:
            in_new_thread(lambda: found._try(_example(latent)))
            tried.add(what)
        return found

    @property
    def makes(self) -> tuple[int, int, int]:
        """Heads, and their sizes, of keys and of values."""
        return self.heads, self.head_dim, self.v_head_dim

    def stand_ins(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the shapes that latents (B, 1, S, R) expand to, without their memory: to ask kernels
        with."""
        batch, _, tokens, _ = latent.shape
        one = [latent.new_empty(batch, self.heads, 1, dim) for dim in (self.head_dim, self.v_head_dim)]
        key, value = (x.expand(-1, -1, tokens, -1) for x in one)
        return key, value

    # ---- there and back ----------------------------------------------------------------------------------------

    def forward(self, latent: Tensor) -> Expanded:
        """The keys and values of latents (B, 1, S, R)."""
        with torch.no_grad(), self._as_called(latent):
            return Expanded(*made_of(self.expand, latent.squeeze(1)))

    def recorded(self, latent: Tensor) -> Expanded:
        """The same, with the graph that `backward` needs."""
        with differentiable(), self._as_called(latent):
            latent = latent.detach().requires_grad_()
            made = made_of(self.expand, latent.squeeze(1))
        key, value = (x.detach() for x in made)
        return Expanded(key, value, latent, made)

    def backward(self, expanded: Expanded, *grads: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradients of the latents and of the weights, from those of keys and values."""
        latent = expanded.latent
        assert latent is not None, "keys were recorded"
        flows = [(x, grad) for x, grad in zip(expanded.made, grads, strict=True) if x.requires_grad]
        with differentiable():
            of_latent, *of_weights = torch.autograd.grad(
                [x for x, _ in flows], [latent, *self.weights], [grad for _, grad in flows], allow_unused=True
            )
        if any(x is None for x in of_weights):
            raise AttentionError(
                "expand used other weights in backward than in forward: keep its parameters as they are"
            )
        return torch.zeros_like(latent) if of_latent is None else of_latent, list(of_weights)

    def _as_called(self, latent: Tensor) -> torch.autocast:
        on = self.autocast is not None
        return torch.autocast(latent.device.type, dtype=self.autocast, enabled=on, cache_enabled=False)

    # ---- trials ------------------------------------------------------------------------------------------------

    def _check_weights(self) -> None:
        for x in self.weights:
            if type(x) not in _PLAIN:
                raise AttentionError(
                    f"expand: weights must be plain tensors where it is called, got {type(x).__name__}"
                )

    def _try(self, latent: Tensor) -> None:
        """See [Note: token by token]."""
        with torch.set_grad_enabled(bool(self.weights)), self._as_called(latent):
            many = made_of(self.expand, latent)
            inside = set(_nodes(many))
            for row, token in ((0, 0), (1, TRIED - 1)):
                at = slice(row, row + 1), slice(token, token + 1)
                alone = made_of(self.expand, latent[at])
                if not all(_alike(x[at[0], :, at[1]], y) for x, y in zip(many, alone, strict=True)):
                    raise AttentionError(
                        "expand must give a token the same key and value whatever tokens are beside it, and it does "
                        "not: it mixes tokens, counts them, or draws random numbers; do that before, to the latent"
                    )
                if any(node in inside and not hasattr(node, "variable") for node in _nodes(alone)):
                    raise AttentionError(
                        "expand uses a tensor that is computed outside of it and requires a gradient; compute it inside"
                    )


def made_of(expand: Expand, latent: Tensor) -> tuple[Tensor, Tensor]:
    """The key and value of a latent, checked."""
    before = EXPANDING.set(True)
    try:
        made = expand(latent)
    except AttentionError:
        raise
    except Exception as wrong:  # on this rank, perhaps alone
        told = f"{type(wrong).__name__}: {wrong}"
        raise AttentionError(f"expand failed on a latent of shape {tuple(latent.shape)}: {told}") from wrong
    finally:
        EXPANDING.reset(before)
    if not isinstance(made, tuple) or len(made) != 2 or not all(type(x) in _PLAIN for x in made):
        kinds = [type(x).__name__ for x in made] if isinstance(made, tuple) else type(made).__name__
        raise AttentionError(f"expand must return (key, value), two plain tensors, got {kinds}")
    key, value = made
    batch, tokens, _ = latent.shape
    if not key.dim() == value.dim() == 4 or not key.shape[:3] == value.shape[:3] == (batch, key.shape[1], tokens):
        raise AttentionError(
            f"expand must return key and value of (batch, heads, tokens, head dim), of {tokens} tokens for a latent of "
            f"shape {tuple(latent.shape)}, got shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if {key.dtype, value.dtype} != {latent.dtype} or {key.device, value.device} != {latent.device}:
        raise AttentionError(
            f"expand must return {dtype_name(latent.dtype)} on {latent.device} like the latent, got "
            f"{dtype_name(key.dtype)} on {key.device} and {dtype_name(value.dtype)} on {value.device}"
        )
    return key, value


def _check_unsharded(made: tuple[Tensor, ...]) -> None:
    """Refuse a module that FSDP2 shards as its own unit: it would gather and reduce weights in every expansion, and
    ranks run different numbers of them."""
    if any(SHARDED in node.name() for node in _nodes(made)):
        raise AttentionError(
            "expand calls a module that FSDP2 shards by itself; shard the layer that calls attention instead"
        )


def _example(latent: Tensor) -> Tensor:
    """Latents of two rows of `TRIED` tokens, all different."""
    count = 2 * TRIED * latent.shape[2]
    numbers = torch.arange(count, dtype=torch.float64, device=latent.device).add(1).mul(0.7).cos()
    return numbers.view(2, TRIED, latent.shape[2]).to(latent.dtype)


def _alike(x: Tensor, y: Tensor) -> bool:
    most = max(1e-30, float(x.detach().abs().amax())) if x.numel() else 1.0
    return bool(torch.allclose(x, y, rtol=0, atol=TOLERANCE[x.dtype] * most, equal_nan=True))


def _nodes(made: tuple[Tensor, ...]) -> Iterator[Node]:
    """Every node of the autograd graph of some tensors, once."""
    found: set[Node] = set()
    waiting = [x.grad_fn for x in made]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]


def _leaves(made: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """The tensors that gradients end in; an output may be one itself."""
    yield from (x for x in made if x.requires_grad and x.is_leaf)
    held = (getattr(node, "variable", None) for node in _nodes(made))
    yield from (x for x in held if isinstance(x, Tensor))


def _owner(expand: Expand) -> Hashable:
    """The object whose lifetime is that of the expansion: its module, or its code."""
    if isinstance(expand, MethodType) and isinstance(expand.__self__, nn.Module):
        return expand.__self__
    function = expand.__func__ if isinstance(expand, MethodType) else expand
    return function.__code__ if isinstance(function, FunctionType) else function


def _same(x: Tensor) -> Tensor:
    return x

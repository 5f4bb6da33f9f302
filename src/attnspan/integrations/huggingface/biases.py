"""Biases that layers add to scores, relative position biases and ALiBi, as score_mods over global positions.

A model that adds a tensor of (B, H, S, S) to its scores computes it from a small table, which a score_mod can look up::

    distance    table[h, clamp(k - q, -reach, reach) + reach]    T5 and kin: learned, and the same from `reach` on
    key         table[row, h, k]                                 Bloom, Falcon: rounded as the model rounds
    slope       table[h] * (k - q)                               MPT

So it can be evaluated for any pair of positions, on any rank and over pages. The table is an argument of the call. A
learned one is computed where the model computes its bias: in the forward of the first layer, from which the model
passes it to the others, so that gradients, checkpointing and sharded parameters work as for any other tensor.

[Note: by distance] A layer of T5 has a method `compute_bias(query_length, key_length, ...)`. While enabled, that method
returns the table instead, which is read from two rows of the original's result. A self-test on a module of the class
checks that the original depends on distance only, and is constant beyond the reach.

Shapes: table (H, 2 * reach + 1), (R, H, S) for R = 1 or B rows, or (H,).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Literal

import torch
from torch import Tensor, nn

from attnspan.attention.score import DTYPES, ScoreFunction
from attnspan.integrations.huggingface.classes import class_of

COMPUTED = "compute_bias"
"""The method of a layer that computes a relative position bias."""

CPU = torch.device("cpu")

FIRST = "has_relative_attention_bias"
"""The attribute of a layer that says whether it computes one, or is handed it."""


@dataclass(frozen=True, slots=True)
class ScoreBias:
    """What a layer adds to its scores. `reach` is that of a bias by distance."""

    kind: Literal["distance", "key", "slope"]
    heads: int
    reach: int = 0

    def __str__(self) -> str:
        return f"bias by distance up to {self.reach}" if self.kind == "distance" else "ALiBi"

    def shape(self, length: int, rows: int) -> tuple[int, ...]:
        """The shape of its table for `length` tokens, of which `rows` batch rows have positions of their own."""
        by_kind = {
            "distance": (self.heads, 2 * self.reach + 1),
            "key": (rows, self.heads, length),
            "slope": (self.heads,),
        }
        return by_kind[self.kind]

    def score_mod(self, shape: tuple[int, ...], device: torch.device) -> ScoreFunction:
        """The score_mod, of a table of that shape, which comes with each call in place of this one of zeros.

        >>> mod = ScoreBias("slope", heads=2).score_mod((2,), torch.device("cpu"))
        >>> mod(torch.ones(()), 0, torch.tensor(1), torch.tensor(5), torch.tensor(3))
        tensor(1.)
        """
        single, double = (torch.zeros((), dtype=dtype, device=device).expand(shape) for dtype in DTYPES)
        look_up = LOOKUPS[self.kind]

        def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + look_up(double if score.dtype == torch.float64 else single, b, h, q_idx, kv_idx)

        return biased


def _by_distance(table: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    reach = table.shape[1] // 2
    return table[h, (k - q).clamp(-reach, reach) + reach]


def _by_key(table: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return table[b if len(table) > 1 else torch.zeros_like(b), h, k]


def _by_slope(table: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return table[h] * (k - q)


LOOKUPS = {"distance": _by_distance, "key": _by_key, "slope": _by_slope}


def table_by_key(table: Tensor, positions: Tensor | None) -> Tensor:
    """A table (H, S) by position as one (R, H, S) by key, for keys at `positions`, (R, S)."""
    return table[None] if positions is None else table[:, positions.to(table.device)].transpose(0, 1)


# ---- relative position biases ----------------------------------------------------------------------------------------


def relative_bias(module: nn.Module) -> ScoreBias | None:
    """The bias of a layer that hands on a `position_bias`; None for one of another kind. See [Note: by distance]."""
    names = ("n_heads", "is_decoder", "relative_attention_num_buckets", "relative_attention_max_distance")
    heads, decodes, buckets, furthest = (getattr(module, name, None) for name in names)
    if not isinstance(heads, int) or not isinstance(buckets, int) or not isinstance(furthest, int):
        return None
    reach = 2 * furthest  # farther than the largest distance, as logarithms are rounded
    attributes = (("is_decoder", decodes), *zip(names[2:], (buckets, furthest), strict=True))
    return (
        ScoreBias("distance", heads, reach) if _goes_by_distance(class_of(module), attributes, buckets, reach) else None
    )


@functools.cache
def _goes_by_distance(
    cls: type[nn.Module], attributes: tuple[tuple[str, object], ...], buckets: int, reach: int
) -> bool:
    """See [Note: by distance]. The module has one head, and the number of each bucket for its bias."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    table = nn.Embedding.from_pretrained(torch.arange(buckets, device=CPU, dtype=torch.float32)[:, None])
    for name, value in (*attributes, ("relative_attention_bias", table)):
        setattr(module, name, value)
    try:
        compute = getattr(module, COMPUTED)
        found, by_distance = compute(3, 2 * reach, past_seen_tokens=reach), distance_table(compute, reach, CPU)
        ahead, behind = compute(1, 4 * reach)[0, :, 0, reach:], compute(1, 1, past_seen_tokens=1 << 30)[0, :, 0]
    except Exception:  # whatever another kind of bias may raise
        return False
    q, k = torch.arange(3, device=CPU)[:, None] + reach, torch.arange(2 * reach, device=CPU)
    expected = by_distance[:, (k - q).clamp(-reach, reach) + reach][None]
    same = found.shape == expected.shape and torch.equal(found, expected)
    return same and bool((ahead == by_distance[:, -1:]).all()) and torch.equal(behind, by_distance[:, :1])


def distance_table(compute: Callable[..., Tensor], reach: int, device: torch.device) -> Tensor:
    """The table (H, 2 * reach + 1) of a bias by distance, from what computes (1, H, queries, keys) of it."""
    ahead = compute(1, reach + 1, device=device, past_seen_tokens=0)[0, :, 0]
    behind = compute(1, reach + 1, device=device, past_seen_tokens=reach)[0, :, 0]
    return torch.cat([behind, ahead[:, 1:]], dim=1)


def bind_bias(module: nn.Module, bias: ScoreBias | None, cross: bool) -> None:
    """Let a layer compute the table of its bias. Between two sequences there is none, and nothing is made for it."""
    if cross and hasattr(module, FIRST):
        vars(module)[FIRST], vars(module)[COMPUTED] = True, _none
    elif bias is not None and bias.kind == "distance" and getattr(module, FIRST, False):
        vars(module)[COMPUTED] = MethodType(_table_up_to(bias.reach), module)


def unbind_bias(module: nn.Module, cross: bool) -> None:
    """As before."""
    if vars(module).pop(COMPUTED, None) is not None and cross:
        vars(module)[FIRST] = False


def _none(*lengths: int, device: torch.device | None = None, **more: object) -> Tensor:
    return torch.zeros(0, device=device)


def _table_up_to(reach: int) -> Callable[..., Tensor]:
    def compute_bias(module: nn.Module, *lengths: int, device: torch.device, **more: object) -> Tensor:
        compute: Callable[..., Tensor] = getattr(type(module), COMPUTED)
        return distance_table(functools.partial(compute, module), reach, device)

    return compute_bias

"""Keys that arrived in a forward pass and stay for its backward pass, which then moves gradients alone.

Without them the keys travel again: two thirds of what a backward pass moves, and no memory between the passes. With
them a layer keeps the arenas of all its steps and, under Ulysses, the queries, keys and values of its heads, from its
forward pass to its backward pass.

[Note: where keys are kept] Kept keys are an attribute of the header that the forward pass returns: the one tensor of
an autograd node that nobody but the node holds. So they live as long as what autograd saved, no longer; recomputation
by activation checkpointing brings its own; and compiled code, which knows tensors alone, hands them on unseen. Where
somebody saves a copy of the header instead (as torch.autograd.graph.save_on_cpu does), there are none, and keys travel
again. Ranks must do so alike: a backward pass from kept keys is an operation of another name (operations.py).

[Note: when auto keeps] "auto" keeps keys if on no rank they take more memory than what autograd saves of the call
anyway (query, key, value, out and lse of own tokens). Each rank knows its own; ranks agree once, with the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from attnspan.attention.lane import Arena

FROM_KEPT = " from kept keys"

Steps = list[list[Arena]]  # by step, then by lane


@dataclass
class KeptKeys:
    """What each loop over steps received, in the order in which the loops ran, and what their lanes were made of."""

    loops: list[Steps] = field(default_factory=list)
    heads: list[list[Tensor]] = field(default_factory=list)  # under Ulysses: query, key, value of this rank's heads


def kept_by(header: Tensor) -> KeptKeys | None:
    """The keys that wait for the backward pass of an operation. See [Note: where keys are kept]."""
    found: KeptKeys | None = getattr(header, "kept", None)
    return found


def keep(header: Tensor, keys: KeptKeys | None) -> Tensor:
    """The header, with the keys."""
    vars(header)["kept"] = keys
    return header

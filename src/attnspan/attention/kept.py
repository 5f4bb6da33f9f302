"""Keys that a forward pass keeps for its backward pass, which then only moves gradients.

By default keys travel again in backward: no memory is held between the passes, and keys are two thirds of what the
backward pass moves. With `keep_keys` a layer keeps the arenas of all its steps and, under Ulysses, the queries, keys
and values of its heads, from its forward pass to its backward pass.

[Note: where keys are kept] Kept keys are an attribute of the header that the forward pass returns, the one tensor of an
autograd node that only the node holds. So they live exactly as long as what autograd saved, activation checkpointing
keeps those of its recomputation, and compiled code, which only passes tensors, passes them along. If a hook saves a
copy of the header instead (as torch.autograd.graph.save_on_cpu does), the copy has none, and keys travel again. All
ranks must do the same, so a backward pass from kept keys is an operation with another name (operations.py).

[Note: when auto keeps] "auto" keeps keys if they take no more memory, on any rank, than what autograd saves of the call
anyway (query, key, value, out and lse of own tokens). Each rank computes its own share; ranks agree once, together with
the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from attnspan.attention.lane import Arena

FROM_KEPT = " from kept keys"

ArenasByStep = list[list[Arena]]  # and in each step by lane


@dataclass
class KeptKeys:
    """The arenas that each loop over steps received, in the order of the loops, and the tensors of their lanes."""

    loops: list[ArenasByStep] = field(default_factory=list)
    heads: list[list[Tensor]] = field(default_factory=list)  # under Ulysses: query, key, value of this rank's heads


def kept_by(header: Tensor) -> KeptKeys | None:
    """The keys that a forward pass kept, if it did. See [Note: where keys are kept]."""
    found: KeptKeys | None = getattr(header, "kept", None)
    return found


def keep(header: Tensor, keys: KeptKeys | None) -> Tensor:
    """The header, with the keys."""
    vars(header)["kept"] = keys
    return header

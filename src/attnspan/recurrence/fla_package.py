"""The package fla-core, whose private functions are called: of one version, with the arguments that are known.

flash-linear-attention computes one device's recurrence. What fla_laws.py needs are parts of that, which the package
does not document; so they are listed here with their arguments, and compared before they are first used.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.assumptions import Assumption
from attnspan.packages import installed_version, takes
from attnspan.recurrence.plan import PIECE, PackedChunks

VERSION = "0.6.0"
"""The version of fla-core whose parts are called."""

LN2 = 1.4426950216
"""The package's 1 / log(2): it computes with powers of two."""

PARTS = {
    "ops.utils.cumsum chunk_local_cumsum": "g chunk_size reverse scale cu_seqlens chunk_indices",
    "ops.common.chunk_delta_h chunk_gated_delta_rule_fwd_h": (
        "k w u g gk initial_state output_final_state chunk_size cu_seqlens chunk_indices chunk_offsets"
    ),
    "ops.common.chunk_delta_h chunk_gated_delta_rule_bwd_dhu": (
        "q k w do dv g gk h0 dht scale cu_seqlens chunk_size chunk_indices chunk_offsets"
    ),
    "ops.common.chunk_o chunk_fwd_o": "q k v h g scale cu_seqlens chunk_size chunk_indices",
    "ops.common.chunk_o chunk_bwd_dv_local": "q k do g scale cu_seqlens chunk_size chunk_indices",
    "ops.common.chunk_o chunk_bwd_dqkwg": "q k v do h dh w g dv scale cu_seqlens chunk_size chunk_indices",
    "ops.common.chunk_h chunk_fwd_h": "k v g gk h0 output_final_state cu_seqlens chunk_size",
    "ops.common.chunk_h chunk_bwd_dh": "q k v do h0 dht scale g gk cu_seqlens chunk_size states_in_fp32",
    "ops.gated_delta_rule.chunk_fwd chunk_gated_delta_rule_fwd_intra": (
        "k v g beta cu_seqlens chunk_size chunk_indices"
    ),
    "ops.gated_delta_rule.wy_fast recompute_w_u_fwd": "k v beta A g cu_seqlens chunk_indices",
    "ops.gated_delta_rule.wy_fast prepare_wy_repr_bwd": "k v beta A dw du g cu_seqlens chunk_indices",
    "ops.kda.chunk_intra chunk_kda_fwd_intra": "q k v gk beta scale cu_seqlens chunk_size chunk_indices",
    "ops.kda.wy_fast recompute_w_u_fwd": "k v beta A gk q cu_seqlens chunk_indices",
    "ops.kda.chunk_bwd chunk_kda_bwd_dAv": "q k v do A scale cu_seqlens chunk_size chunk_indices",
    "ops.kda.chunk_bwd chunk_kda_bwd": (
        "q k v beta Aqk Akk scale initial_state do dht g cu_seqlens chunk_indices chunk_size disable_recompute"
    ),
    "ops.gla.chunk chunk_gla_fwd_intra_gk": "q k g scale cu_seqlens chunk_size chunk_indices",
    "ops.gla.chunk chunk_gla_fwd_o_gk": "q v g A h scale cu_seqlens chunk_size chunk_indices",
    "ops.gla.chunk chunk_gla_bwd": (
        "q k v g g_cumsum scale initial_state h A do dht cu_seqlens chunk_size chunk_indices"
    ),
    "ops.simple_gla.chunk chunk_simple_gla_bwd": (
        "q k v g g_gamma initial_state do dht scale cu_seqlens chunk_size chunk_indices"
    ),
}
"""The functions that are called, by module and name, and the arguments that they are given."""


def installed() -> str | None:
    """The version of fla-core that is here; None if there is none."""
    return installed_version("fla-core")


@cache
def part(name: str) -> Any:
    """A function of the package, by module and name."""
    module, function = name.split()
    return getattr(import_module(f"fla.{module}"), function)


def _takes() -> bool:
    """Whether every part has the arguments that it is given, and needs no other. Where it is not installed, none is."""
    return installed() is None or all(takes(part(name), names) for name, names in PARTS.items())


TAKES = Assumption(
    "fla-core has the functions and arguments that are known",
    "recurrence/fla_package.py",
    "functions below `fla.ops`, of one version",
    _takes,
    library="fla-core",
)

ONE_AT_A_TIME = Lock()
"""Held while the package is called: it compiles and tunes what is new to it, and virtual ranks are threads."""


class PartCall(NamedTuple):
    """What every part is told beside tensors."""

    chunks: PackedChunks
    scale: float

    def __call__(self, name: str, offsets: bool = False, /, **given: object) -> Any:
        """A part of the package, called for this rank's chunks."""
        cut = {"cu_seqlens": self.chunks.cu_seqlens, "chunk_size": PIECE, "chunk_indices": self.chunks.chunk_indices}
        cut |= {"chunk_offsets": self.chunks.chunk_offsets} if offsets else {}
        known = {key: value for key, value in cut.items() if key in PARTS[name].split()}
        return part(name)(**given, **known)

    def summed(self, decay: Tensor) -> Tensor:
        """Sums of decays within pieces, to base two."""
        found: Tensor = self("ops.utils.cumsum chunk_local_cumsum", g=decay, scale=LN2)
        return found

    def summed_back(self, grad: Tensor) -> Tensor:
        """The gradient of decays, from that of their sums."""
        found: Tensor = self("ops.utils.cumsum chunk_local_cumsum", g=grad, reverse=True)
        return found

    def totals(self, decay: Tensor) -> Tensor:
        """The factor of each chunk, (n, H, 1 or K, 1)."""
        lengths = self.chunks.cu_seqlens.diff()
        sums = torch.segment_reduce(decay[0].flatten(1), "sum", lengths=lengths, axis=0, unsafe=True)
        return sums.view(len(lengths), *decay.shape[2:], *[1] * (5 - decay.dim())).exp()

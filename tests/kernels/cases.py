"""What the kernels are tried on: tiles of every shape, and how their tensors may differ.

A case is data; `Problem` makes its tensors. The tile's rows and columns lie inside a larger attention, so that final
out and lse differ from the tile's own, and a kernel that mixes them up is caught.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from attnspan.kernels import Spec
from attnspan.masks.tile import Tile
from tests import oracle

TILES = {
    "full": Tile(range(64), range(48), -63, 47),
    "one pair": Tile(range(1), range(1), 0, 0),
    "one row": Tile(range(1), range(33), 0, 32),
    "one column": Tile(range(33), range(1), -32, 0),
    "causal, square": Tile(range(96), range(96), -95, 0),
    "causal, more rows": Tile(range(70), range(40), -69, 0),
    "causal, far more rows": Tile(range(150), range(20), -149, 0),  # [Note: windows wider than the keys]
    "causal, fewer rows": Tile(range(40), range(70), -39, 0),  # not tight: the last columns are seen by no row
    "causal, shifted": Tile(range(40), range(70), -39, 30),
    "anti-causal": Tile(range(60), range(60), 0, 59),
    "anti-causal, more rows": Tile(range(150), range(20), -140, 19),
    "anti-causal, fewer rows": Tile(range(20), range(90), 3, 89),
    "window": Tile(range(100), range(100), -15, 0),
    "window of two sides": Tile(range(64), range(90), -7, 40),
    "window, both cut far apart": Tile(range(150), range(20), -140, 5),
    "diagonal": Tile(range(50), range(50), 0, 0),
    "diagonals, strided": Tile(range(0, 128, 2), range(1, 129, 2), -3, -1),
    "rows that see no key": Tile(range(30), range(10), 4, 7),
    "window over several blocks": Tile(range(700), range(600), -300, 40),
}

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Case:
    """One way to call a kernel."""

    tile: str = "window"
    dtype: str = "float32"
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    layout: str = "BHSD"
    scale: float = 0.125
    device: str = "cpu"

    def __str__(self):
        other = {
            name: value
            for name, value in vars(self).items()
            if name not in ("tile", "dtype", "device") and value != getattr(Case, name)
        }
        return ", ".join([self.tile, self.dtype, *(f"{name}={value}" for name, value in other.items())])


_FEATURES = [
    *({"heads": h, "key_heads": hk} for h, hk in ((1, 1), (4, 4), (8, 2), (4, 1), (6, 2))),
    *({"layout": layout} for layout in ("BSHD", "BHDS", "rows of more")),
    *({"head_dim": d} for d in (8, 16, 80, 128)),
    *({"head_dim": d, "value_dim": dv} for d, dv in ((64, 32), (32, 64))),
    *({"scale": scale} for scale in (0.5, 0.01)),
    {"head_dim": 20},
    {"head_dim": 256},
]

CASES = [
    *(Case(tile=tile, dtype=dtype) for tile in TILES for dtype in DTYPES),
    *(
        replace(Case(tile=tile, dtype=dtype), **feature)
        for tile in ("full", "causal, square", "causal, more rows", "window")
        for dtype in ("float32", "bfloat16")
        for feature in _FEATURES
    ),
]


@contextmanager
def deterministic(*, warn_only=False):
    """torch told to use deterministic algorithms, for a while."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Problem:
    """The tensors of a case: a tile, and an attention that it is part of."""

    def __init__(self, case):
        self.case, self.tile, self.spec = case, TILES[case.tile], Spec(scale=case.scale)
        self.mask = oracle.tile_mask(self.tile, case.device)
        n, m = self.mask.shape
        # Errors are compared as root mean squares, and those of a few rows are luck: with flash's
        # roundings written out in torch, the dk of one pair is off by 1.04 +- 0.19 times what it is in a longer
        # attention, over 100 seeds, in a batch of 2, and by 0.98 +- 0.02 times in a batch of 128.
        self.batch = max(2, 128 // min(n, m))
        random = torch.Generator().manual_seed(0)
        value_dim = case.value_dim or case.head_dim
        self.q = self._tensor(random, case.heads, n, case.head_dim)
        self.k = self._tensor(random, case.key_heads, m, case.head_dim)
        self.v = self._tensor(random, case.key_heads, m, value_dim)
        self.grad = self._tensor(random, case.heads, n, value_dim)
        # Keys of another tile, seen by every row, so that what is final differs from the tile's own.
        self.other = Tile(range(n), range(m + 1), 1 - n, m)
        self.other_k = self._tensor(random, case.key_heads, m + 1, case.head_dim)
        self.other_v = self._tensor(random, case.key_heads, m + 1, value_dim)

    @property
    def inputs(self):
        return self.q, self.k, self.v

    @cached_property
    def own(self):
        """(out, lse) of the tile alone."""
        return oracle.attention(*self.inputs, self.mask, self.case.scale)

    @cached_property
    def both(self):
        """(k, v, mask) of the tile and the other one."""
        k, v = torch.cat([self.k, self.other_k], 2), torch.cat([self.v, self.other_v], 2)
        return k, v, torch.cat([self.mask, oracle.tile_mask(self.other, self.case.device)], 1)

    @cached_property
    def share(self):
        """The tile's share of (dq, dk, dv) in the attention over both."""
        k, v, mask = self.both
        m = self.mask.shape[1]
        only = mask.clone()
        only[:, m:] = False
        dq, dk, dv = oracle.share(self.q, k, v, mask, only, self.case.scale, self.grad)
        return dq, dk[:, :, :m], dv[:, :, :m]

    def final(self, kernel):
        """(out, lse) over both: the true out, written down once, and the kernel's own lses together.

        The true lse would be too good. A float32 score is off by some 1e-6, and so is the exponential of it; but in
        use the same score is in lse, and the two errors cancel. An out merged from rounded outs would be too bad:
        what that costs is a matter of merging, not of the kernel.
        """
        k, v, mask = self.both
        out, _ = oracle.attention(self.q, k, v, mask, self.case.scale)
        _, lse = kernel.forward(self.spec, *self.inputs, self.tile)
        _, other_lse = kernel.forward(self.spec, self.q, self.other_k, self.other_v, self.other)
        return out.to(self.q.dtype), torch.logaddexp(lse, other_lse)

    def _tensor(self, random, heads, length, dim):
        x = torch.randn(self.batch, heads, length, dim, generator=random)
        x = x.to(dtype=DTYPES[self.case.dtype], device=self.case.device)
        match self.case.layout:
            case "BHSD":
                return x
            case "BSHD":
                return x.transpose(1, 2).contiguous().transpose(1, 2)
            case "BHDS":
                return x.mT.contiguous().mT
            case "rows of more":  # every second row of a larger buffer, from the third on
                buffer = x.new_full((self.batch, heads, 2 * length + 3, dim), torch.nan)
                buffer[:, :, 3::2] = x
                return buffer[:, :, 3::2]

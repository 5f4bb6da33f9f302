"""The escape hatch: any FlexAttention mask_mod as a mask.

A function can only be asked, so it is asked: strip by strip of `block` query rows, every pair once, never S x
S in memory. What comes back is joined into bands, so that plans, layouts and tiles treat it like any other
mask. This costs S x S evaluations once per length (memoised); a mask that can be written as a pattern is far
cheaper.

[Note: arguments that matter] A mask_mod may depend on its batch row or its head. Ours says how many rows it
tells apart, and no mask here differs between heads; a function that depends on more would be wrong in silence
for every other row or head. So it is called once with one argument batched and the others not: vmap itself
then knows whether that argument reached the result, and the function is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnspan.errors import MaskError, whole, whole_list
from attnspan.masks.algebra import joined
from attnspan.masks.band import Band, tight
from attnspan.masks.block_sparse import BlockSparse, spans_of
from attnspan.masks.full import Full
from attnspan.masks.mask import Mask, MaskFunction, Rule, Space, evaluated

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class MaskMod(Mask):
    """The pairs for which `fn(batch_row, head, q_idx, kv_idx)` is true.

    `rows` says how many batch rows the function tells apart, `device` where the tensors it captures live,
    `lengths` which (q_len, kv_len) it is for, if not for any. Equal when the function is the same object.

    >>> print(MaskMod(lambda b, h, q, k: (q >= k) & (k % 2 == 0)).draw(4))
    █ · · ·
    █ · · ·
    █ · █ ·
    █ · █ ·
    """

    fn: MaskFunction
    rows: int = 1
    block: int = 128
    lengths: tuple[int, int] | None = None
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise MaskError(f"fn must be a function (b, h, q_idx, kv_idx) -> bool tensor, got {self.fn!r}")
        object.__setattr__(self, "rows", whole("rows", self.rows, at_least=1, error=MaskError))
        object.__setattr__(self, "block", whole("block", self.block, at_least=1, error=MaskError))
        if self.lengths is not None:
            if not isinstance(self.lengths, list | tuple) or len(self.lengths) != 2:
                raise MaskError(f"lengths must be (q_len, kv_len), got {self.lengths!r}")
            lengths = whole_list("lengths", self.lengths, at_least=1, error=MaskError)
            object.__setattr__(self, "lengths", lengths)
        _check_function(self)

    @property
    def natural_len(self) -> int | None:
        return self.lengths[0] if self.lengths else None

    @property
    def natural_kv_len(self) -> int | None:
        return self.lengths[1] if self.lengths else None

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        if self.lengths is not None and self.lengths != (q_len, kv_len):
            raise MaskError(f"{_name(self.fn)} is for lengths {self.lengths}, got {(q_len, kv_len)}")

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        pieces: list[Band] = []
        for start in range(0, q_len, self.block):
            allowed = _evaluated(self, row, range(start, min(start + self.block, q_len)), kv_len)
            strip = (
                tight(start + i, start + i + 1, k0, k1) for i, spans in enumerate(spans_of(allowed)) for k0, k1 in spans
            )
            pieces += joined(band for band in strip if band is not None)
        return joined(pieces)

    def _rule(self, space: Space) -> Rule:
        fn, here, there = self.fn, torch.device(self.device), space.device

        def ask(b: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            b = torch.as_tensor(b)
            # Head 0 stands for all: a function that differs between heads was refused.
            return _called(fn, b, torch.zeros_like(b), q, k)

        def ask_elsewhere(b: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return ask(b.to(here), q.to(here), k.to(here)).to(there)

        # A function that captures nothing says "cpu" and runs anywhere: a kernel cannot copy between devices.
        return ask if here.type in ("cpu", there.type) else ask_elsewhere

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskMod):
            return NotImplemented
        return self.fn is other.fn and (self.rows, self.lengths) == (other.rows, other.lengths)

    def __hash__(self) -> int:
        return hash((id(self.fn), self.rows, self.lengths))

    def __repr__(self) -> str:
        rows = f", rows={self.rows}" if self.rows > 1 else ""
        return f"MaskMod({_name(self.fn)}{rows})"


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The full blocks of a BlockMask, and its mask_mod within the others that it lists."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise MaskError(f"block_mask must be a FlexAttention BlockMask, got {type(block_mask).__name__}")
    if len(block_mask.shape) != 4 or block_mask.shape[1] != 1:
        raise MaskError(
            f"block_mask must be (rows, 1, q_len, kv_len), the same for all heads, got {tuple(block_mask.shape)}"
        )
    q_len, kv_len = block_mask.seq_lengths
    asked: Mask = Full()
    if block_mask.mask_mod is not noop_mask:
        device, rows = block_mask.kv_indices.device, block_mask.shape[0]
        asked = MaskMod(block_mask.mask_mod, rows=rows, lengths=(q_len, kv_len), device=device)
    mask = _listed_blocks(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices) & asked
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return mask
    return mask | _listed_blocks(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _listed_blocks(block_mask: BlockMask, counts: torch.Tensor, indices: torch.Tensor) -> BlockSparse:
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    counts, indices = counts[:, 0].cpu(), indices[:, 0].cpu()
    row, i, nth = (torch.arange(indices.shape[-1]) < counts[..., None]).nonzero(as_tuple=True)
    chosen = torch.zeros(*counts.shape, columns, dtype=torch.bool)
    chosen[row, i, indices[row, i, nth].long()] = True
    return BlockSparse(chosen, block_mask.BLOCK_SIZE)


def _evaluated(mask: MaskMod, row: int, queries: range, kv_len: int) -> torch.Tensor:
    """The function over a strip; what goes wrong in it is told as ours."""
    rule = mask._rule(Space(None, None, torch.device(mask.device)))
    try:
        return evaluated(rule, row, queries, kv_len, mask.device)
    except MaskError:
        raise
    except Exception as error:
        raise MaskError(f"{_name(mask.fn)} could not be evaluated as a mask_mod: {error}") from error


def _called(fn: MaskFunction, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    allowed = fn(b, h, q, k)
    if isinstance(allowed, bool):
        return torch.full_like(q + k, allowed, dtype=torch.bool)
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool:
        kind = allowed.dtype if isinstance(allowed, torch.Tensor) else type(allowed).__name__
        raise MaskError(f"{_name(fn)} must return a bool tensor, got {kind}")
    return allowed


def _check_function(mask: MaskMod) -> None:
    """See [Note: arguments that matter]."""
    answer = _evaluated(mask, 0, range(1), 1)
    if answer.shape != (1, 1):
        raise MaskError(
            f"{_name(mask.fn)} must return one bool for one pair of indices, got shape {tuple(answer.shape[2:])}"
        )
    if _matters(mask, 1):
        raise MaskError(f"{_name(mask.fn)} reads its head index; a mask here is the same for every head")
    if mask.rows == 1 and _matters(mask, 0):
        raise MaskError(
            f"{_name(mask.fn)} reads its batch index; say how many rows it tells apart: MaskMod(fn, rows=...)"
        )


def _matters(mask: MaskMod, argument: int) -> bool:
    """Whether the result depends on the function's batch index (argument 0) or head index (1)."""

    def call(*indices: torch.Tensor) -> torch.Tensor:
        return _called(mask.fn, *indices)

    indices = [torch.tensor(0, device=mask.device) for _ in range(4)]
    indices[argument] = torch.zeros(2, dtype=torch.int64, device=mask.device)
    try:
        torch.vmap(call, in_dims=tuple(0 if i == argument else None for i in range(4)), out_dims=None)(*indices)
    except Exception:  # vmap: "can not return a BatchedTensor when out_dim is None"
        return True
    return False


def _name(fn: MaskFunction) -> str:
    return getattr(fn, "__name__", type(fn).__name__)

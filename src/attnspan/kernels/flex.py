"""FlexAttention itself, compiled, for CUDA: any program, one call for everything between two buffers.

Tiles become the block lists of a BlockMask (masks/blocks.py), in O(blocks): blocks that certain tiles fill are full,
the others that any tile touches are partial. Inside partial blocks FlexAttention evaluates the mask's own rule, at the
global positions of rows and columns; every allowed pair between the two buffers is computed by this call, so the rule
alone is right there, whatever tile a block belongs to. Positions, batch rows and heads are looked up in tensors, and
captured tensors are tensors: other documents, ranks and values run the same compiled code.

[Note: what is compiled] torch recompiles for other programs, dtypes, numbers of heads and so on, and gives up in
silence after a few times for the same code. So each program gets a code object of its own, shapes that change become
symbolic, and nothing may fall back (fullgraph). Compiling is not for two threads at once, and virtual ranks are
threads.

[Note: strides] What is symbolic is not known to be a multiple of anything, and is then loaded number by number, which
takes more than twice the time. Where sizes change, torch takes strides to be symbolic too, unless they follow from
sizes, as a dense tensor's do. So keys and values that lie side by side in a buffer are handed over as that buffer, and
taken apart inside.

[Note: backward by parts] FlexAttention's gradients are those of its own out_i and lse_i, not of the merged out and
lse. But merging is a formula: with w = e^(lse_i - lse), d out / d out_i = w and d out / d lse_i = w (out_i - out). So
the call is made again with autograd, and given the gradients w grad of out_i, and w (sum(grad (out_i - out)) +
grad_lse) of lse_i. Where the part is all there is, out_i and lse_i are final, and so are their gradients.

Captured tensors are prepared once (split.py), and autograd walks the rest of the way from what was looked up.

Shapes: kernel.py. Half precision comes back in half precision.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from types import FunctionType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnspan.dtypes import lse_dtype
from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.autograd import differentiable
from attnspan.kernels.kernel import Gradients, MergedOutputs, Spec, StepTiles, Tiles, Traits
from attnspan.kernels.mods import Mods
from attnspan.kernels.split import split, tables
from attnspan.masks.blocks import lists_of_tiles
from attnspan.masks.mask import MaskFunction
from attnspan.masks.program import Program
from attnspan.packages import has_triton

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

name = "flex"
traits = Traits(
    devices=("cuda",),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    order=70,
    rounds_gradients=True,
    programs=True,
    needs_mask_program=True,
    measured=False,
)

BLOCK = 128
"""Rows and columns of a block."""

MIN_DIM = 16
_ONE_AT_A_TIME = RLock()
_NUMBERS = itertools.count()
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True, "FLOAT32_PRECISION": "'ieee'"}  # never TF32


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
    """Every tile on CUDA, in half and single precision."""
    if reason := traits.misfit(q):
        return f"flex {reason}"
    if not has_triton():
        return "flex needs the package triton, which is not installed"
    for head_dim in (q.shape[3], v.shape[3]):
        if head_dim < MIN_DIM:
            return f"flex needs head dims of at least {MIN_DIM}, got {head_dim}"
    for program in (spec.mods.score_mod, spec.mods.mask_mod) if spec.mods is not None else ():
        if program is not None and not program.is_flat:
            return f"flex needs programs that combine numbers and look them up, got {program.name}"
    return None


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, total: Accumulator) -> None:
    """(out, lse) of all rows, at once."""
    with torch.no_grad():
        keys = _side_by_side(k.detach(), v.detach())
        out, lse = _attend(spec, q.detach(), keys, step, _tables_of(spec, step.captured))
    total.add(range(q.shape[2]), out, lse.to(lse_dtype(q.dtype)))


def backward(
    spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, into: Gradients
) -> None:
    """(dq, dk, dv) of all rows and columns, at once."""
    sums = into.captured
    with differentiable():
        q, *keys = (x.detach().requires_grad_() for x in (q, *_side_by_side(k, v)))
        captured = [
            x.detach() if total is None else x.detach().requires_grad_()
            for x, total in zip(step.captured, sums, strict=True)
        ]
        tables = _tables_of(spec, captured)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tables]
        out, lse = _attend(spec, q, tuple(keys), step, leaves)
        learned = [x for x in leaves if x.requires_grad]
        of_parts, seeds = _seeds(merged, out, lse, step.is_final and not merged.sinks)
        dq, *grads = torch.autograd.grad(of_parts, [q, *keys, *learned], seeds)
        if learned:
            _walk_back([x for x in tables if x.requires_grad], grads[len(keys) :], captured, sums)
    into.add(range(q.shape[2]), range(k.shape[2]), dq, *_apart(tuple(grads[: len(keys)]), k.shape[3]))


def _walk_back(
    tables: list[Tensor], grads: Sequence[Tensor], captured: list[Tensor], sums: Sequence[Tensor | None]
) -> None:
    """From tables to the captured tensors that they were prepared from."""
    wanted = [(x, total) for x, total in zip(captured, sums, strict=True) if total is not None]
    parts = torch.autograd.grad(tables, [x for x, _ in wanted], grads, allow_unused=True)
    with torch.no_grad():
        for (_, total), part in zip(wanted, parts, strict=True):
            if part is not None:
                total += part


def _seeds(merged: MergedOutputs, out: Tensor, lse: Tensor, is_final: bool) -> tuple[list[Tensor], list[Tensor]]:
    """What to differentiate of a part, and its gradients. See [Note: backward by parts]."""
    if is_final:
        pairs = [(out, merged.grad)] + ([(lse, merged.grad_lse)] if merged.grad_lse is not None else [])
        return [part for part, _ in pairs], [grad.to(part.dtype) for part, grad in pairs]
    with torch.no_grad():
        share = (lse - merged.lse).exp().masked_fill(lse == -torch.inf, 0.0)
        wide = merged.lse.dtype
        slope = (merged.grad.to(wide) * (out.to(wide) - merged.out.to(wide))).sum(-1)
        if merged.grad_lse is not None:
            slope = slope + merged.grad_lse
        seeds = [(share.unsqueeze(-1) * merged.grad).to(out.dtype), (share * slope).to(lse.dtype)]
    return [out, lse], seeds


Keys = tuple[Tensor, ...]
"""Keys and values, or one dense tensor that holds both. See [Note: strides]."""


def _side_by_side(k: Tensor, v: Tensor) -> Keys:
    """Keys and values; if they are the two halves of one packed buffer, that: (S, B, Hk, D + Dv)."""
    batch, heads, rows, dim = k.shape
    width = dim + v.shape[3]
    packed = (heads * width, width, batch * heads * width, 1)
    if k.stride() == v.stride() == packed and v.data_ptr() - k.data_ptr() == dim * k.element_size():
        return (k.as_strided((rows, batch, heads, width), (packed[2], packed[0], width, 1)),)
    return k, v


def _apart(keys: Keys, dim: int) -> tuple[Tensor, Tensor]:
    """Keys (B, Hk, S, D) and values (B, Hk, S, Dv)."""
    if len(keys) == 1:
        both = keys[0].permute(1, 2, 0, 3)
        return both[..., :dim], both[..., dim:]
    return keys[0], keys[1]


def _attend(spec: Spec, q: Tensor, keys: Keys, step: StepTiles, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """FlexAttention over the tiles of a step; `tables` are what the score_mod looks into."""
    columns = len(step.where.cols)
    mods, where = spec.mods or Mods(), step.where
    assert mods.mask_mod is not None, "a mask's own rule comes with every call of this kernel"
    lists = lists_of_tiles(step.tiles, (q.shape[2], columns), (BLOCK, BLOCK), q.device)
    offsets = None
    if where.batch.start or where.heads.start:
        offsets = _offsets(where.batch.start, where.heads.start, q.shape[2], q.device)
    place = (where.rows, where.cols, offsets)
    score_mod = None
    if mods.score_mod is not None:
        score_mod = _bound_score(split(mods.score_mod).ask, place, tuple(tables))
    mask_mod = _bound_mask(split(mods.mask_mod).ask, place, _fixed_tables(mods.mask_mod))
    block_mask = lists.block_mask(mask_mod, (q.shape[2], columns), (BLOCK, BLOCK))
    compiled = _compiled(f"{mods.key} {offsets is None}")
    with _ONE_AT_A_TIME, compiled.roomy(q, *keys):
        return compiled.fn(q, keys, score_mod, block_mask, spec.scale)


Place = tuple[Tensor, Tensor, Tensor | None]


def _bound_score(ask: Callable[..., Tensor], place: Place, tables: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    rows, cols, offsets = place

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if offsets is not None:
            b, h = b + offsets[0, q_idx], h + offsets[1, q_idx]
        return ask(None, score, b, h, rows[q_idx], cols[kv_idx], *tables)

    return score_mod


def _bound_mask(ask: Callable[..., Tensor], place: Place, tables: tuple[Tensor, ...]) -> MaskFunction:
    rows, cols, offsets = place

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if offsets is not None:
            b, h = b + offsets[0, q_idx], h + offsets[1, q_idx]
        return ask(None, b, h, rows[q_idx], cols[kv_idx], *tables)

    return mask_mod


@functools.lru_cache(maxsize=256)
def _offsets(batch: int, head: int, rows: int, device: torch.device) -> Tensor:
    """The first batch row and head, (2, n): looked up by row, because code is compiled for numbers and not for tensors.

    One of each would do, but FlexAttention's backward cannot add up gradients at an index that is a loaded number.
    """
    with torch.inference_mode(False):
        return torch.tensor([[batch], [head]], device=device).expand(2, rows).contiguous()


def _call(
    q: Tensor, keys: Keys, score_mod: Callable[..., Tensor] | None, block_mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    k, v = _apart(keys, q.shape[3])
    out, aux = flex_attention(  # type: ignore[call-overload]  # FLOAT32_PRECISION is none of its named options
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=_OPTIONS,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


class Compiled:
    """FlexAttention for one pair of programs. See [Note: what is compiled]."""

    def __init__(self) -> None:
        code = _call.__code__.replace(co_name=f"flex_{next(_NUMBERS)}")
        self.fn: Callable[..., tuple[Tensor, Tensor]] = torch.compile(
            FunctionType(code, _call.__globals__), fullgraph=True
        )
        self._seen: set[tuple[object, ...]] = set()

    def roomy(self, *tensors: Tensor) -> AbstractContextManager[object]:
        """Inside, code may be recompiled many times. Saying so costs more than a call: done for new shapes alone."""
        shapes = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors)
        if shapes in self._seen:
            return nullcontext()
        self._seen.add(shapes)
        room: AbstractContextManager[object] = torch._dynamo.config.patch(recompile_limit=64)
        return room


@functools.lru_cache(maxsize=256)
def _compiled(key: str) -> Compiled:
    return Compiled()


def _tables_of(spec: Spec, captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a score_mod looks into, prepared."""
    return () if spec.mods is None or spec.mods.score_mod is None else tables(spec.mods.score_mod, captured)


_FIXED: WeakKeyDictionary[Program, tuple[Tensor, ...]] = WeakKeyDictionary()


def _fixed_tables(program: Program) -> tuple[Tensor, ...]:
    """What a mask's rule looks into, prepared once."""
    if program not in _FIXED:
        with torch.inference_mode(False), torch.no_grad():
            _FIXED[program] = tables(program, program.captured)
    return _FIXED[program]

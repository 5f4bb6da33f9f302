"""FlashAttention-4, where its package is installed: all tiles of a step in as few calls as can be (segments.py).

`flash-attn-4` has kernels for Hopper and Blackwell GPUs. A call takes the segments of one batch row by offset and
length, through a window that is aligned at the bottom right, with grouped key heads as they are. One segment alone
needs neither offsets nor lengths, so that all batch rows are one call.

Forward writes out and lse of a layer into one buffer. Where every row is in one layer, as with `gather` and
`needed(1)` under a causal mask, nothing is merged. Backward is given the final out and lse, and writes gradients where
they stay or leave from; only what a second call adds to the same rows or columns is added.

[Note: offsets and lengths] The package documents offsets (`cu_seqlens`) or lengths (`seqused`). It takes both, and
then an offset says where a segment begins and a length where it ends: segments may leave gaps, and in forward share
keys. That was read in the sources of one version, which is the only one that is called.

Its backward sums dq by atomics. Where torch is told to use deterministic algorithms, it takes turns instead.

[Note: padded head dims] On Hopper its backward adds dq, and for grouped heads dk and dv, to sums of rows that are
padded to a multiple of 16, and reads them back as rows padded to a multiple of 32. Where the two differ gradients are
wrong as soon as there are two segments or two blocks. Above 128 both pad to a multiple of 64.

Shapes: kernel.py; the package's are (B, n, H, D), or (T, H, D) for segments, with lse (B, H, n) or (H, T).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnspan.assumptions import Assumption
from attnspan.dtypes import lse_dtype
from attnspan.errors import AttnspanError
from attnspan.kernels.accumulator import Accumulator
from attnspan.kernels.adding import add_into
from attnspan.kernels.kernel import Gradients, MergedOutputs, Spec, StepTiles, Tiles, Traits
from attnspan.kernels.mods import as_slice
from attnspan.kernels.parts import last_dim_dense
from attnspan.kernels.segments import BackwardCall, CallLayer, Coverage, SegmentCall, packed_calls
from attnspan.packages import installed_version, takes

name = "flash4"
traits = Traits(
    devices=("cuda",), dtypes=(torch.float16, torch.bfloat16), order=25, rounds_gradients=True, optional=True
)

VERSION = "4.0.0b36"
"""The version of flash-attn-4 that is called. See [Note: offsets and lengths]."""

MAX_DIM = {9: 256, 10: 128}
"""The largest head dim by the GPU's compute capability."""

FORWARD = "q k v softmax_scale window_size_left window_size_right out lse"
BACKWARD = "q k v out dout lse softmax_scale window_size_left window_size_right deterministic dq dk dv dlse"
SEGMENTS = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k"


# ---- the package ---------------------------------------------------------------------------------------------------


def installed() -> str | None:
    """The version of flash-attn-4 that is here; None if there is none."""
    return installed_version("flash-attn-4")


def interface() -> Any:
    """Its module with both calls."""
    return import_module("flash_attn.cute.interface")


def _takes() -> bool:
    """Whether both calls have all arguments that are given, and need no other. Where it is not installed, none is."""
    if installed() is None:
        return True
    calls = (interface()._flash_attn_fwd, FORWARD), (interface()._flash_attn_bwd, BACKWARD)
    return all(takes(call, f"{names} {SEGMENTS}") for call, names in calls)


TAKES = Assumption(
    "flash-attn-4 has the arguments that are known",
    "kernels/flash4.py",
    "`_flash_attn_fwd` and `_flash_attn_bwd` in `flash_attn.cute.interface`",
    _takes,
    library="flash-attn-4",
)


_ONE_AT_A_TIME = Lock()
"""Held while the package is called: it compiles what is new to it, and virtual ranks are threads."""


def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability."""
    return torch.cuda.get_device_capability(device)


# ---- the kernel ----------------------------------------------------------------------------------------------------


def supports(spec: Spec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> str | None:
    """Every tile in half precision, on the GPUs that the package is for."""
    if reason := traits.misfit(q):
        return f"flash4 {reason}"
    if (found := installed()) is None:
        return "flash4 needs the package flash-attn-4, which is not installed; pip install 'attnspan[fa4]'"
    if found != VERSION:
        return f"flash4 calls flash-attn-4 {VERSION}, got {found}; pip install 'attnspan[fa4]'"
    major, minor = capability(q.device)
    if major not in MAX_DIM:
        known = " and ".join(f"{each}.x" for each in MAX_DIM)
        return f"flash4 needs a GPU of compute capability {known}, got {major}.{minor}"
    if q.shape[3] != v.shape[3]:  # its backward has no others for grouped heads
        return f"flash4 needs one head dim for keys and values, got {q.shape[3]} and {v.shape[3]}"
    if q.shape[3] % 8 or q.shape[3] > MAX_DIM[major]:
        return f"flash4 needs a head dim that is a multiple of 8 up to {MAX_DIM[major]}, got {q.shape[3]}"
    if major == 9 and not _pads_alike(q.shape[3]):
        right = ", ".join(str(dim) for dim in range(8, 128, 8) if _pads_alike(dim))
        return f"flash4 needs a head dim of {right} or 128 and more, got {q.shape[3]}: others have wrong gradients"
    if spec.scale <= 0:  # the largest score is found before scaling
        return f"flash4 needs a scale above 0, got {spec.scale}"
    try:
        TAKES.verify()
    except AttnspanError as moved:
        return f"flash4 cannot call flash-attn-4 {found}: {moved}"
    return None


def _pads_alike(dim: int) -> bool:
    """Whether backward writes and reads sums of rows of one length. See [Note: padded head dims].

    >>> [dim for dim in range(8, 129, 8) if _pads_alike(dim)]
    [24, 32, 56, 64, 88, 96, 120, 128]
    """
    return dim > 128 or -(-dim // 16) == 2 * -(-dim // 32)


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, total: Accumulator) -> None:
    """Layer by layer, into the total."""
    q, k, v = last_dim_dense(q, k, v)
    for layer in packed_calls(step.tiles).forward:
        out, lse = _layer(spec, q, k, v, layer)
        for span in layer.spans:
            at = _within(span, layer.rows)
            total.add(span, out[:, :, at], lse[:, :, at])


def backward(
    spec: Spec, merged: MergedOutputs, q: Tensor, k: Tensor, v: Tensor, step: StepTiles, grads: Gradients
) -> None:
    """Call by call, to where gradients stay or leave from."""
    q, k, v, out, grad = last_dim_dense(q, k, v, merged.out.to(q.dtype), merged.grad.to(q.dtype))
    lse, grad_lse = merged.lse, None if merged.grad_lse is None else merged.grad_lse.to(merged.lse.dtype)
    calls, into = packed_calls(step.tiles), grads.open()
    sums = (
        _GradientSum(into.dq, "rows", calls.rows, q.dtype, begun=into.add_rows),
        _GradientSum(into.dk, "cols", calls.cols, q.dtype, begun=False),
        _GradientSum(into.dv, "cols", calls.cols, q.dtype, begun=False),
    )
    for turn in calls.backward:
        rows, cols = as_slice(turn.call.rows), as_slice(turn.call.cols)
        inputs = [q[:, :, rows], k[:, :, cols], v[:, :, cols], out[:, :, rows], grad[:, :, rows]]
        parts = [each.part(turn) for each in sums]
        for launch in _launches(turn.call, spec, q):
            dq, dk, dv = map(launch.tokens, parts)
            options = {
                "dq": dq, "dk": dk, "dv": dv,
                "dlse": None if grad_lse is None else launch.numbers(grad_lse[:, :, rows]),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }  # fmt: skip
            with torch.cuda.device_of(q), _ONE_AT_A_TIME:
                interface()._flash_attn_bwd(
                    *map(launch.tokens, inputs), launch.numbers(lse[:, :, rows]), **options, **launch.options
                )
        for each, part in zip(sums, parts, strict=True):
            each.take(turn, part)
    grads.close(into)


def _layer(spec: Spec, q: Tensor, k: Tensor, v: Tensor, layer: CallLayer) -> tuple[Tensor, Tensor]:
    """(out, lse) of the rows of a layer; what is between its spans is not written."""
    batch, heads, rows = q.shape[0], q.shape[1], len(layer.rows)
    out = q.new_empty(batch, heads, rows, v.shape[3])
    lse = q.new_empty(batch, heads, rows, dtype=lse_dtype(q.dtype))
    for call in layer.calls:
        at, cols = _within(call.rows, layer.rows), as_slice(call.cols)
        inputs = [q[:, :, as_slice(call.rows)], k[:, :, cols], v[:, :, cols]]
        for launch in _launches(call, spec, q):
            into = {"out": launch.tokens(out[:, :, at]), "lse": launch.numbers(lse[:, :, at])}
            with torch.cuda.device_of(q), _ONE_AT_A_TIME:
                interface()._flash_attn_fwd(*map(launch.tokens, inputs), **into, **launch.options)
    return out, lse


class _GradientSum:
    """Gradients of all rows, or all columns: calls write to them, or to a part that is added.

    `begun`: they hold a sum already. What no call writes to is 0.
    """

    def __init__(
        self, total: Tensor, side: Literal["rows", "cols"], covered: Coverage, dtype: torch.dtype, *, begun: bool
    ):
        self.total, self.side, self.dtype = total, side, dtype
        self.straight = not begun and total.dtype == dtype
        complete = covered.spans == (range(total.shape[2]),)
        if not begun and (covered.mixed or not (self.straight and complete)):
            total.zero_()

    def part(self, turn: BackwardCall) -> Tensor:
        """What a call writes to: its rows of the total, where they are its own, or else memory that `take` adds."""
        span, rows = self._of(turn)
        if self._is_own(turn):
            return rows
        filled = sum(len(getattr(segment, self.side)) for segment in turn.call.segments) == len(span)
        return (torch.empty if filled else torch.zeros)(rows.shape, dtype=self.dtype, device=rows.device)

    def take(self, turn: BackwardCall, part: Tensor) -> None:
        """What a call has written."""
        if not self._is_own(turn):
            add_into(self._of(turn)[1], part)

    def _of(self, turn: BackwardCall) -> tuple[range, Tensor]:
        span: range = getattr(turn.call, self.side)
        return span, self.total[:, :, as_slice(span)]

    def _is_own(self, turn: BackwardCall) -> bool:
        return self.straight and not (turn.rows_again if self.side == "rows" else turn.cols_again)


# ---- calls ---------------------------------------------------------------------------------------------------------


class _Launch(NamedTuple):
    """One call of the package: of all batch rows, or of one, and the arguments that do not depend on tensors."""

    row: int | None
    options: dict[str, Any]

    def tokens(self, x: Tensor) -> Tensor:
        """(B, H, n, D) as (B, n, H, D), or one batch row as (n, H, D)."""
        return x.transpose(1, 2) if self.row is None else x[self.row].transpose(0, 1)

    def numbers(self, x: Tensor) -> Tensor:
        """(B, H, n) as it is, or one batch row."""
        return x if self.row is None else x[self.row]


def _launches(call: SegmentCall, spec: Spec, q: Tensor) -> Iterator[_Launch]:
    """A call of one segment once, for all batch rows; one of many for each of them."""
    left, right = call.window
    options = {"softmax_scale": spec.scale, "window_size_left": left, "window_size_right": right}
    if len(call.segments) == 1:
        yield _Launch(None, options)
        return
    table = offsets(call, q.device)
    for row in range(q.shape[0]):
        yield _Launch(row, {**options, **table})


@lru_cache(maxsize=2048)
def offsets(call: SegmentCall, device: torch.device) -> dict[str, Any]:
    """Where the segments of a call begin and how long they are, counted from its first row and column.

    >>> from attnspan.kernels.segments import Segment
    >>> segments = Segment(range(2, 4), range(2), None, 0), Segment(range(6, 9), range(8), None, 0)
    >>> for name, numbers in offsets(SegmentCall((None, 0), segments), torch.device("cpu")).items():
    ...     print(name, numbers.tolist() if isinstance(numbers, Tensor) else numbers)
    cu_seqlens_q [0, 4, 7]
    cu_seqlens_k [0, 0, 8]
    seqused_q [2, 3]
    seqused_k [2, 8]
    max_seqlen_q 3
    max_seqlen_k 8
    """

    def int32(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device)

    rows, cols = [segment.rows for segment in call.segments], [segment.cols for segment in call.segments]
    sides = (rows, call.rows), (cols, call.cols)
    lengths = [[len(span) for span in spans] for spans in (rows, cols)]
    with torch.inference_mode(False):  # made during evaluation, they serve training later
        begins = [int32([*(span.start - whole.start for span in spans), len(whole)]) for spans, whole in sides]
        used = [int32(each) for each in lengths]
    return dict(zip(SEGMENTS.split(), (*begins, *used, *map(max, lengths)), strict=True))


def _within(span: range, whole: range) -> slice:
    """Rows as they lie in a buffer that begins with the first of `whole`, and holds no others than those."""
    return slice(None) if span == whole else slice(span.start - whole.start, span.stop - whole.start)

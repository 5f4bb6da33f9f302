"""Keys and values as they travel: both in one buffer, positions outermost.

A packed buffer is (S, B, Hk, D + Dv): K and V of one position side by side, so that any run of positions is one
contiguous piece of memory, one message carries both, and what arrives is received in place. Kernels read it through
views; nothing is copied on arrival.

[Note: messages] A transfer is one message per run, received straight into the arena. With more than `MAX_RUNS` runs it
is one message, gathered by the sender and laid out by the receiver: a copy is then cheaper than the latency of many
small messages. A ring hands whole buffers on, and those are one message always. Both ends decide alike, from the
transfer alone.

Knows transfers and tensors, nothing of kernels. Shapes: B batch rows, Hk key heads, S positions, D and Dv head dims.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from attnspan.kernels import write_into
from attnspan.layouts.run import Run, Runs, tokens_in
from attnspan.plan.step import Transfer

MAX_RUNS = 8
"""The most runs of a transfer that travel as messages of their own."""


def packed(key: Tensor, value: Tensor) -> Tensor:
    """K (B, Hk, S, D) and V (B, Hk, S, Dv) as one buffer (S, B, Hk, D + Dv)."""
    buffer = empty(key, value, key.shape[2])
    for view, tensor in zip(unpacked(buffer, key.shape[3]), (key, value), strict=True):
        write_into(view, tensor)
    return buffer


def empty(key: Tensor, value: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """A packed buffer for `rows` positions of such keys and values."""
    batch, heads, _, dim = key.shape
    return key.new_empty(rows, batch, heads, dim + value.shape[3], dtype=dtype)


def unpacked(buffer: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of a packed buffer (..., S, B, Hk, D + Dv), as views (..., B, Hk, S, D) and (..., B, Hk, S, Dv)."""
    both = buffer.movedim(-4, -2)
    return both[..., :head_dim], both[..., head_dim:]


class RunOffsets:
    """Where runs lie in a buffer that holds other runs one after another."""

    def __init__(self, runs: Runs):
        self._found: dict[Runs, list[slice]] = {}
        starts = accumulate((len(run.positions) for run in runs), initial=0)
        held = sorted(zip(runs, starts, strict=False))
        self._plain = [(run, at) for run, at in held if run.step == 1]
        self._striped = [(run, at) for run, at in held if run.step > 1]
        self._rows = tokens_in(runs)

    def __len__(self) -> int:
        return self._rows

    def slices(self, runs: Runs) -> list[slice]:
        """For each run, its rows in the buffer; a run lies inside one run of the buffer."""
        if runs not in self._found:
            self._found[runs] = [self._slice(run) for run in runs]
        return self._found[runs]

    def _slice(self, run: Run) -> slice:
        index = bisect_right(self._plain, run.start, key=lambda held: held[0].start) - 1
        near = self._plain[index : index + 1] if index >= 0 else []
        for held, at in (*near, *self._striped):
            if run.start in held.positions and (run.step == held.step or len(run.positions) == 1):
                first = at + held.positions.index(run.start)
                return slice(first, first + len(run.positions))
        raise AssertionError(f"{run} is not in this buffer")


@lru_cache(maxsize=1024)
def run_offsets(runs: Runs) -> RunOffsets:
    """Of a buffer of such runs: the same at every call, so found once."""
    return RunOffsets(runs)


def leaving(buffer: Tensor, offsets: RunOffsets, transfer: Transfer, whole: bool) -> list[Tensor]:
    """The messages of a transfer out of a buffer."""
    if whole:
        return [buffer]
    pieces = [buffer[rows] for rows in offsets.slices(transfer.runs)]
    return pieces if _by_run(transfer) else [torch.cat(pieces)]


def arriving(
    buffer: Tensor, offsets: RunOffsets, transfer: Transfer, whole: bool
) -> tuple[list[Tensor], StagedMessage | None]:
    """Where the messages of a transfer go, and what is left to do when they have arrived."""
    if whole:
        return [buffer], None
    pieces = [buffer[rows] for rows in offsets.slices(transfer.runs)]
    if _by_run(transfer):
        return pieces, None
    staged = StagedMessage(buffer.new_empty(tokens_in(transfer.runs), *buffer.shape[1:]), pieces)
    return [staged.buffer], staged


class ReturningGradients:
    """Gradients that come home from several ranks.

    Those of one run lie side by side, so that all of them are added in one pass; a transfer of many runs comes as one
    message and is taken apart. The order is the plan's: the same sum on every run.
    """

    def __init__(self, transfers: Sequence[Transfer], empty: Callable[[int], Tensor]):
        counts = Counter(run for transfer in transfers for run in transfer.runs if _by_run(transfer))
        rows = {run: len(run.positions) for run in counts}
        self._together = {run: empty(n * rows[run]).unflatten(0, (n, rows[run])) for run, n in counts.items()}
        self._apart = [(t, empty(t.tokens)) for t in transfers if not _by_run(t)]
        free = {run: iter(buffer) for run, buffer in self._together.items()}
        alone = iter(buffer for _, buffer in self._apart)
        self.receives = [
            (transfer.source, part)
            for transfer in transfers
            for part in ([next(free[run]) for run in transfer.runs] if _by_run(transfer) else [next(alone)])
        ]

    @property
    def many(self) -> bool:
        """Whether they are of so many runs that each is best added by itself."""
        return bool(self._apart)

    def parts(self) -> Iterator[tuple[Run, Tensor]]:
        """What arrived for each run, (any number, S, B, Hk, D + Dv), to be summed."""
        yield from self._together.items()
        for transfer, buffer in self._apart:
            pieces = buffer.split([len(run.positions) for run in transfer.runs])
            yield from ((run, piece.unsqueeze(0)) for run, piece in zip(transfer.runs, pieces, strict=True))


def _by_run(transfer: Transfer) -> bool:
    """See [Note: messages]."""
    return len(transfer.runs) <= MAX_RUNS


class StagedMessage:
    """A message of many runs that waits to be laid out."""

    def __init__(self, buffer: Tensor, pieces: Sequence[Tensor]):
        self.buffer, self._pieces = buffer, pieces

    def land(self) -> None:
        """Copy what arrived to where it belongs."""
        for piece, part in zip(self._pieces, self.parts(), strict=True):
            piece.copy_(part)

    def parts(self) -> Iterator[Tensor]:
        """The message, cut into the pieces it is made of."""
        yield from self.buffer.split([len(piece) for piece in self._pieces])

"""The wire format of keys and values: both in one buffer, with positions outermost.

A packed buffer is (S, B, Hk, D + Dv): K and V of one position are adjacent, so that any run of positions is contiguous,
one message carries both, and messages are received in place. Kernels read views of the buffer; nothing is copied on
arrival.

[Note: messages] A transfer is one message per run, received directly into the arena. With more than `MAX_RUNS` runs it
is a single message, which the sender gathers and the receiver scatters: the copies are cheaper than the latency of many
small messages. A ring passes whole buffers on, always as one message. Both ends decide from the transfer alone.

Knows transfers and tensors, nothing of tiles. Shapes: B batch rows, Hk key heads, S positions, D and Dv head dims.
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
"""The most runs of a transfer that are sent as separate messages."""


def pack(key: Tensor, value: Tensor) -> Tensor:
    """K (B, Hk, S, D) and V (B, Hk, S, Dv) as one buffer (S, B, Hk, D + Dv)."""
    buffer = empty_packed(key, value, key.shape[2])
    for view, tensor in zip(unpack_views(buffer, key.shape[3]), (key, value), strict=True):
        write_into(view, tensor)
    return buffer


def empty_packed(key: Tensor, value: Tensor, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
    """A packed buffer for so many positions of such keys and values."""
    batch, heads, _, dim = key.shape
    return key.new_empty(tokens, batch, heads, dim + value.shape[3], dtype=dtype)


def unpack_views(buffer: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of a packed buffer (..., S, B, Hk, D + Dv), as views (..., B, Hk, S, D) and (..., B, Hk, S, Dv)."""
    both = buffer.movedim(-4, -2)
    return both[..., :head_dim], both[..., head_dim:]


class RunOffsets:
    """Where runs lie in a buffer that is a concatenation of larger runs."""

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
    """The offsets of a buffer of these runs, cached: every call asks again."""
    return RunOffsets(runs)


def send_views(buffer: Tensor, offsets: RunOffsets, transfer: Transfer) -> list[Tensor]:
    """The messages to send for a transfer, as views of a buffer where possible."""
    pieces = [buffer[rows] for rows in offsets.slices(transfer.runs)]
    return pieces if _by_run(transfer) else [torch.cat(pieces)]


def receive_views(buffer: Tensor, offsets: RunOffsets, transfer: Transfer) -> tuple[list[Tensor], StagedMessage | None]:
    """The buffers to receive a transfer into, and a message to be scattered on arrival, if there is one."""
    pieces = [buffer[rows] for rows in offsets.slices(transfer.runs)]
    if _by_run(transfer):
        return pieces, None
    staged = StagedMessage(buffer.new_empty(tokens_in(transfer.runs), *buffer.shape[1:]), pieces)
    return [staged.buffer], staged


class ReturningGradients:
    """Buffers for the gradients of own keys that other ranks send.

    Gradients of one run are adjacent, so that one pass sums them all; a transfer of many runs arrives as one message,
    which is split. The order is the plan's, so that the sum has the same bits in every execution.
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
        """Whether there are so many runs that each is best added separately."""
        return bool(self._apart)

    def parts(self) -> Iterator[tuple[Run, Tensor]]:
        """The gradients that arrived for each run, (any number, S, B, Hk, D + Dv), to be summed."""
        yield from self._together.items()
        for transfer, buffer in self._apart:
            pieces = buffer.split([len(run.positions) for run in transfer.runs])
            yield from ((run, piece.unsqueeze(0)) for run, piece in zip(transfer.runs, pieces, strict=True))


def _by_run(transfer: Transfer) -> bool:
    """See [Note: messages]."""
    return len(transfer.runs) <= MAX_RUNS


class StagedMessage:
    """A message of many runs, to be scattered when it has arrived."""

    def __init__(self, buffer: Tensor, pieces: Sequence[Tensor]):
        self.buffer, self._pieces = buffer, pieces

    def land(self) -> None:
        """Copy each part to its place."""
        parts = self.buffer.split([len(piece) for piece in self._pieces])
        for piece, part in zip(self._pieces, parts, strict=True):
            piece.copy_(part)

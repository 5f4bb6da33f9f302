"""A step that the device computes, and whose tokens the host has not read.

Steps overlap: while the device computes one, the host reads the tokens of the step before, reports them, and prepares
the next::

    device   | step 1 | step 2 | step 3 |
    host     launch 1, launch 2, read 1, report 1 | launch 3, read 2, report 2 | ...

A step is launched ahead if its batch is known before the tokens of the step before are: they are on the device
(scheduler.py, [Note: a step ahead]). One call of `EngineCore.step` launches it (`_launch_ahead`), and the next one
adopts it (`_adopt_ahead`). By then a sample may have ended, at a stop token, by a stop string, or because it was
cancelled. Its row was computed for nothing; the other rows count.

[Note: ahead and undone] To the journal, a step ahead is a batch that is planned and not computed: whatever breaks off a
call rolls it back. The device may still be computing it. That does no harm: it writes behind the tokens that count, and
work that reuses its pages comes later on the same stream.

Knows nothing of requests or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnspan.engine.host_tensor import host_tensor
from attnspan.engine.sampler import PendingTokens, SampledToken
from attnspan.engine.scheduler import Chunk


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A batch that was launched, which of its chunks get a token, and where those tokens will be."""

    batch: Sequence[Chunk]
    token_chunks: Sequence[Chunk]  # all but those of prompts that are not at their end
    pending: PendingTokens | None  # None: no chunk gets a token
    rows: Sequence[int] | None = None  # of `pending`, one for each of `token_chunks`; None: all rows, with forks' ones

    def only(self, places: Sequence[int]) -> InFlight:
        """The chunks at some places of a batch that was launched ahead, in which every chunk gets one token."""
        if len(places) == len(self.batch):
            return self
        some = [self.batch[place] for place in places]
        return InFlight(
            some, some, self.pending, [place if self.rows is None else self.rows[place] for place in places]
        )

    def inputs_of(self, batch: Sequence[Chunk]) -> Tensor:
        """The tokens of this step that a next `batch` is fed, on the device: its samples are some of this one's, in
        the same order."""
        assert self.pending is not None, "each chunk has a token"
        tokens, going = self.pending.tokens, {id(chunk.sample) for chunk in batch}
        if self.rows is None and len(batch) == len(self.token_chunks):
            return tokens
        rows = range(len(self.token_chunks)) if self.rows is None else self.rows
        kept = [row for row, chunk in zip(rows, self.token_chunks, strict=True) if id(chunk.sample) in going]
        return tokens[host_tensor(kept, tokens.device).to(tokens.device, non_blocking=True)]

    def read(self) -> list[SampledToken]:
        """The tokens of the chunks that get any; waits for the device."""
        if self.pending is None:
            return []
        found = self.pending.read()
        return found if self.rows is None else [found[row] for row in self.rows]

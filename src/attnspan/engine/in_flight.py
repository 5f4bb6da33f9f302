"""A step that the device computes, and whose tokens the host has not read.

Steps overlap: while the device computes one, the host reads the tokens of the step before, reports them, and prepares
the next::

    device   | step 1 | step 2 | step 3 |
    host     launch 1, launch 2, read 1, report 1 | launch 3, read 2, report 2 | ...

A step is launched ahead when it is known before the tokens are that it is fed: they are on the device (scheduler.py,
[Note: a step ahead]). A sample may then turn out to have ended, at a stop token, by a stop string, or because it was
cancelled. Its row was computed for nothing; the others' count.

[Note: ahead and undone] A step ahead is planned and not computed, as the journal sees it: whatever breaks off a call
rolls it back. The device may still be computing it. What it writes is behind the tokens that count, in pages that
others get from work that comes later on the same stream.

Knows nothing of requests or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnspan.engine.row_selection import host_tensor
from attnspan.engine.sampler import ChosenToken, PendingTokens
from attnspan.engine.scheduler import Chunk


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """What is fed, which chunks get tokens, and where these are among those that are pending."""

    batch: Sequence[Chunk]
    ended: Sequence[Chunk]
    pending: PendingTokens | None  # None: no chunk ends its sample
    rows: Sequence[int] | None = None  # None: all of them

    def only(self, places: Sequence[int]) -> InFlight:
        """Some of the chunks of a step that was launched ahead, of which each has a row."""
        if len(places) == len(self.batch):
            return self
        some = [self.batch[place] for place in places]
        return InFlight(
            some, some, self.pending, [place if self.rows is None else self.rows[place] for place in places]
        )

    def tokens_of(self, batch: Sequence[Chunk]) -> Tensor:
        """On the device, what a batch is fed that goes on with some of these chunks, in their order."""
        assert self.pending is not None, "each chunk has a token"
        tokens, going = self.pending.tokens, {id(chunk.sample) for chunk in batch}
        if self.rows is None and len(batch) == len(self.ended):
            return tokens
        rows = range(len(self.ended)) if self.rows is None else self.rows
        kept = [row for row, chunk in zip(rows, self.ended, strict=True) if id(chunk.sample) in going]
        return tokens[host_tensor(kept, tokens.device).to(tokens.device, non_blocking=True)]

    def read(self) -> list[ChosenToken]:
        """The tokens of the chunks that get any; waits for the device."""
        if self.pending is None:
            return []
        found = self.pending.read()
        return found if self.rows is None else [found[row] for row in self.rows]

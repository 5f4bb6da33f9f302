"""A step is a transaction: whatever breaks it off, at whatever line, the engine is afterwards as before, or as after.

What counts is what callers were told: requests, and the tokens of their samples. Everything else (pages, prefixes, who
runs, how far each sample is) can be computed again from those. So nothing is undone piece by piece::

    journal.begin()                  # from here on the books are being changed
    batch = scheduler.step() ...     # ints, copies, swaps
    journal.planned(batch)           # the books are whole again, and ahead of the model by one batch
    ...                              # the model, sampling, text: what is computed here nobody has seen
    journal.commit(tell, book)       # callers are told; then the books

No handler runs when something fails, since an interrupt could come in the middle of that too. The journal says how far
it came, and the next call `settle`s it:

- while the books were being changed: pages are given back, and samples are computed again from their tokens
- while the model computed: the batch is rolled back, which costs nothing
- while callers were told: they are told again. `tell` sets what must be, and may run twice
- while it was settled: it is settled again

Knows nothing of models, text or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Chunk, Scheduler

Action = Callable[[], None]


class Journal:
    """How far the call under way has come. `live` are the samples that there are."""

    def __init__(self, scheduler: Scheduler, live: Callable[[], Iterable[Sample]]) -> None:
        self.scheduler, self.live = scheduler, live
        self.torn = False  # the books are being changed
        self.batch: Sequence[Chunk] = ()  # planned, and not computed
        self.mend: Action | None = None  # what makes whole again what callers see

    @property
    def settled(self) -> bool:
        """Whether nothing was broken off."""
        return not (self.torn or self.batch or self.mend)

    def begin(self, mend: Action | None = None) -> None:
        """The books are about to be changed; if what callers see is too, `mend` makes that whole, again and again."""
        self.torn = True
        self.mend = mend

    def planned(self, batch: Sequence[Chunk]) -> None:
        """The books are whole, and there is room for a batch that is not computed."""
        self.batch = batch
        self.torn = False

    def end(self) -> None:
        """All is as it should be."""
        self.mend = None
        self.batch = ()
        self.torn = False

    def commit(self, tell: Action, book: Action) -> None:
        """Tell callers, then change the books. Once `tell` has begun it is carried through."""
        self.begin(mend=tell)
        tell()
        self.mend = None
        book()
        self.end()

    def settle(self) -> None:
        """Carry through or roll back what was broken off."""
        if self.mend is not None:
            self.mend()
            self.mend = None
        if self.torn:
            self.scheduler.reset(self.live())
        elif self.batch:
            self.torn = True
            self.scheduler.rollback(self.batch)
        self.end()

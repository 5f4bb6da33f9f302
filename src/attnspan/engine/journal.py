"""A step is a transaction: whatever breaks it off, at whatever line, the engine is afterwards as before, or as after.

What counts is what callers have seen: requests, and the tokens of their samples. Everything else (pages, prefixes, what
runs, how far each sample is) can be recomputed from those. So nothing is undone piece by piece::

    journal.begin()                  # from here on the scheduler's state is being changed
    batch = scheduler.schedule() ... # ints, copies, swaps
    journal.planned(batch)           # that state is consistent again, and ahead of the model by one batch
    ...                              # the model, sampling, text: results that no caller has seen
    journal.commit(report, record)   # callers see them; then the scheduler's state

No handler runs when something fails, since an interrupt could come in the middle of that too. The journal says how far
it came, and the next call `settle`s it:

- while the scheduler's state was being changed: all pages are given back, and samples are recomputed from their tokens
- while the model computed: the batch is rolled back, which costs nothing
- while results were reported: they are reported again. `report` sets what must be, and may run twice
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
        self.torn = False  # the scheduler's state is being changed
        self.batch: Sequence[Chunk] = ()  # planned, and not computed
        self.redo: Action | None = None  # what makes consistent again what callers see

    @property
    def settled(self) -> bool:
        """Whether nothing was broken off."""
        return not (self.torn or self.batch or self.redo)

    def begin(self, redo: Action | None = None) -> None:
        """The scheduler's state is about to change; `redo` completes what callers see, any number of times."""
        self.torn = True
        self.redo = redo

    def planned(self, batch: Sequence[Chunk]) -> None:
        """The scheduler's state is consistent, and there is room for a batch that is not computed."""
        self.batch = batch
        self.torn = False

    def end(self) -> None:
        """Everything is consistent."""
        self.redo = None
        self.batch = ()
        self.torn = False

    def commit(self, report: Action, record: Action) -> None:
        """Report to callers, then tell the scheduler. Once `report` has begun it is completed."""
        self.begin(redo=report)
        report()
        self.redo = None
        record()
        self.end()

    def settle(self) -> None:
        """Complete or roll back what was broken off."""
        if self.redo is not None:
            self.redo()
            self.redo = None
        if self.torn:
            self.scheduler.reset(self.live())
        elif self.batch:
            self.torn = True
            self.scheduler.rollback(self.batch)
        self.end()

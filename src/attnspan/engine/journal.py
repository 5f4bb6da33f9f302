"""The journal makes a step a transaction: after an interrupt at any line, the engine is as before the step or after it.

The state that counts is what callers have seen: requests, and the tokens of their samples. Everything else (pages,
prefixes, the queue, the progress of samples) can be recomputed from it. So nothing needs to be undone piece by piece::

    journal.begin()                  # the scheduler's state is about to change
    batch = scheduler.schedule() ... # ints, copies, swaps
    journal.planned(batch)           # that state is consistent again, and ahead of the model by one batch
    ...                              # the model, sampling, text: results that no caller has seen
    journal.commit(publish, update)  # callers see them; then the scheduler's state is updated

No handler runs when something fails, since an interrupt could hit the handler too. The journal records how far the step
came, and the next call `settle`s it. If the step was interrupted

- while the scheduler's state changed: all pages are freed, and samples are recomputed from their tokens
- while the model computed: the batch is rolled back, which costs nothing
- while results were published: they are published again; `publish` is idempotent
- while it was settled: it is settled again

A step that was launched `ahead` outlasts the call (in_flight.py, [Note: ahead and undone]). It is rolled back with
whatever is, and counts only when a later call has made it its own batch.

Knows nothing of models, text or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attnspan.engine.in_flight import InFlight
from attnspan.engine.sample import Sample
from attnspan.engine.scheduler import Chunk, Scheduler

Action = Callable[[], None]


class Journal:
    """How far the running call has come. `live` returns the unfinished samples."""

    def __init__(self, scheduler: Scheduler, live: Callable[[], Iterable[Sample]]) -> None:
        self.scheduler, self.live = scheduler, live
        self.torn = False  # whether the scheduler's state is inconsistent
        self.batch: Sequence[Chunk] = ()  # planned and not computed yet
        self.redo: Action | None = None  # completes an interrupted `publish`
        self.ahead: InFlight | None = None  # the next batch, launched already: planned too, and not counted yet

    @property
    def settled(self) -> bool:
        """Whether no call was interrupted."""
        return not (self.torn or self.batch or self.redo)

    def begin(self, redo: Action | None = None) -> None:
        """The scheduler's state is about to change; `redo` completes an interrupted change, and is idempotent."""
        self.torn = True
        self.redo = redo

    def planned(self, batch: Sequence[Chunk]) -> None:
        """The scheduler's state is consistent again, one batch ahead of the model."""
        self.batch = batch
        self.torn = False

    def end(self) -> None:
        """Everything is consistent."""
        self.redo = None
        self.batch = ()
        self.torn = False

    def commit(self, publish: Action, update: Action) -> None:
        """Publish results to callers, then update the scheduler. Once `publish` has begun it is completed."""
        self.begin(redo=publish)
        publish()
        self.redo = None
        update()
        self.end()

    def adopt_ahead(self, in_flight: InFlight) -> None:
        """The step that was launched ahead is the batch of this call; `in_flight` is what is left of it."""
        self.planned(in_flight.batch)
        self.ahead = None

    def drop_ahead(self) -> None:
        """Roll back a step that was launched ahead: it does not count."""
        if self.ahead is not None:
            self._roll_back()
            self.ahead = None
            self.end()

    def settle(self) -> None:
        """Complete or roll back an interrupted call."""
        if self.redo is not None:
            self.redo()
            self.redo = None
        if self.torn:
            self.scheduler.reset(self.live())
        else:
            self._roll_back()
        self.ahead = None
        self.end()

    def _roll_back(self) -> None:
        batch = [*self.batch, *(() if self.ahead is None else self.ahead.batch)]
        if batch:
            self.torn = True
            self.scheduler.rollback(batch)

"""What an engine has done and holds, in numbers: for dashboards, logs and load balancers.

Totals are replaced as a whole by each call that changes them, in the same assignment that lets callers see its results
(journal.py): a step that is broken off counts nothing, and none counts twice. Times are those of this process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from attnspan.engine.kv_cache_manager import KVCacheGroup
from attnspan.engine.output_processor import Outcome
from attnspan.engine.request import Request
from attnspan.engine.scheduler import Scheduler

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Times in seconds: how many are at most each of `bounds`, beyond the one before; the last are longer than all.

    >>> Histogram().plus([0.004, 0.1, 100.0]).mean
    33.368
    """

    bounds: tuple[float, ...] = BOUNDS
    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many times there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean, 0 where there are none."""
        return self.total / self.count if self.count else 0.0

    def plus(self, times: Sequence[float]) -> Histogram:
        """With some more."""
        if not times:
            return self
        counts = list(self.counts)
        for time in times:
            counts[bisect_left(self.bounds, time)] += 1
        return Histogram(self.bounds, tuple(counts), self.total + sum(times))


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted since the engine was made."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    time_to_first_token: Histogram = Histogram()
    time_per_token: Histogram = Histogram()

    def ended(self, reasons: Iterable[str]) -> Totals:
        """With samples that have ended."""
        finished = dict(self.finished)
        for reason in reasons:
            finished[reason] = finished.get(reason, 0) + 1
        return replace(self, finished=finished)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment. Pages are those of all its pools; of each rank, as all others.

    `states` are the places of recurrent states, 0 in a model without recurrent layers; they are no pages.

    `prompt_tokens` are those of added requests, `prefix_tokens` those of prompts that were found in the prefix cache,
    `computed_tokens` were fed to the model, `drafted_tokens` of them proposed by prompt lookup, and
    `accepted_tokens` of those were right. `finished` counts samples by `finish_reason`. `time_to_first_token` begins
    when a request is added; `time_per_token` is each sample's mean for its later tokens.
    """

    running: int
    waiting: int
    preempted: int  # how often a running sample was sent back to the queue
    pages: int
    pages_used: int
    pages_free: int
    pages_cached: int  # only the prefix cache holds them
    states: int
    states_used: int
    states_free: int
    states_cached: int  # snapshots that only the prefix cache holds
    steps: int
    requests: int
    prompt_tokens: int
    prefix_tokens: int
    computed_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    finished: Mapping[str, int]
    time_to_first_token: Histogram
    time_per_token: Histogram

    def __str__(self) -> str:
        first, later = 1000 * self.time_to_first_token.mean, 1000 * self.time_per_token.mean
        states = (
            f"{self.states} states: {self.states_used} used, {self.states_free} free, {self.states_cached} cached\n"
        )
        drafts = f", {self.accepted_tokens} of {self.drafted_tokens} drafts accepted"
        return (
            f"{self.running} running, {self.waiting} waiting, {self.preempted} preempted so far\n"
            f"{self.pages} pages: {self.pages_used} used, {self.pages_free} free, {self.pages_cached} cached\n"
            f"{states if self.states else ''}"
            f"{self.requests} requests of {self.prompt_tokens} tokens, {self.prefix_tokens} found in the prefix cache\n"
            f"{self.steps} steps: {self.computed_tokens} tokens computed, {self.generated_tokens} generated"
            f"{drafts if self.drafted_tokens else ''}\n"
            f"on average {first:.1f} ms to the first token, {later:.1f} ms for each later one"
        )


class Meter:
    """The totals of an engine, and when its unfinished requests were added and their samples began to speak."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.added: dict[int, float] = {}
        self.began: dict[tuple[int, int], float] = {}

    def add(self, request: Request) -> None:
        """A request was added."""
        self.added[request.number] = monotonic()
        totals = self.totals
        self.totals = replace(
            totals, requests=totals.requests + 1, prompt_tokens=totals.prompt_tokens + len(request.prompt)
        )

    def discard(self, request: Request) -> None:
        """A request has ended, or was never added."""
        self.added.pop(request.number, None)
        for number in range(len(request.continuations)):
            self.began.pop((request.number, number), None)

    def after(self, outcomes: Sequence[Outcome]) -> Totals:
        """The totals with these outcomes, which are not reported yet."""
        totals, now, first, later, reasons = self.totals, monotonic(), list[float](), list[float](), list[str]()
        spoken = len(outcomes)
        for outcome in outcomes:
            if outcome.error is not None:
                spoken -= 1
            elif outcome.position == 0:
                request = outcome.token.request.number
                first.append(now - self.added[request])
                self.began[request, outcome.token.sample_index] = now
            if outcome.token.finish_reason is not None:
                reasons.append(outcome.token.finish_reason)
                if outcome.position and outcome.error is None:
                    request = outcome.token.request.number
                    later.append((now - self.began[request, outcome.token.sample_index]) / outcome.position)
        totals = totals.ended(reasons) if reasons else totals
        return replace(
            totals,
            generated_tokens=totals.generated_tokens + spoken,
            time_to_first_token=totals.time_to_first_token.plus(first),
            time_per_token=totals.time_per_token.plus(later),
        )

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """All there is to know."""
        totals, counts = self.totals, scheduler.counts
        groups = scheduler.kv_cache.groups
        pages, free, cached = _held(group for group in groups if not group.states)
        states, free_states, cached_states = _held(group for group in groups if group.states)
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.queued),
            preempted=counts.preempted,
            pages=pages,
            pages_used=pages - free - cached,
            pages_free=free,
            pages_cached=cached,
            states=states,
            states_used=states - free_states - cached_states,
            states_free=free_states,
            states_cached=cached_states,
            steps=counts.steps,
            requests=totals.requests,
            prompt_tokens=totals.prompt_tokens,
            prefix_tokens=counts.cached,
            computed_tokens=counts.tokens,
            generated_tokens=totals.generated_tokens,
            drafted_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            finished=dict(totals.finished),
            time_to_first_token=totals.time_to_first_token,
            time_per_token=totals.time_per_token,
        )


def _held(groups: Iterable[KVCacheGroup]) -> tuple[int, int, int]:
    """All pages of these groups, those that are free, and those that only a prefix cache holds."""
    found = [(group.num_pages, group.allocator.free_pages, group.allocator.cached_pages) for group in groups]
    pages, free, cached = (sum(each[place] for each in found) for place in range(3))
    return pages, free, cached

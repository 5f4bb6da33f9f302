"""The scheduler: each step is a ragged batch of (sample, number of its tokens), within a token budget.

Samples are running or queued. Running samples have pages; queued ones have none, or have them on the host. A step::

    1. every running sample that decodes gets its one token; prompts share the rest of the budget, in order
    2. while that needs more pages than there are, the running sample that is last in order is preempted
    3. if none was preempted, queued samples are admitted in order, while pages, rows and budget allow

[Note: order] Samples are ordered by priority; among equals, scheduling is first come, first served. The first queued
sample is admitted, and the last running one is preempted, so within a priority every running sample is older than every
queued one. A new sample preempts nothing: it waits at the head of the queue until there is room. The first running
sample always continues; it fits into the pool alone (`add` checks that) and ends. So every sample gets its turn, unless
samples of higher priority keep arriving: nothing guards against that starvation.

[Note: preemption] A preempted sample keeps its tokens. Its pages are swapped to the host if there is room, and are
swapped in again unchanged; else they are freed, and recomputed except for what the prefix cache has.

[Note: admission] A prompt is admitted only if there are pages for all of it, for what running samples still need, and
one page for each of them to grow into: a preemption halfway would waste computed pages.

[Note: alone] A sample that runs alone may still lack a page: if it started on a shared page that it must copy, while it
holds the original. It is restarted on pages of its own. Similarly, a sample that grows longer than a windowed pool
shares nothing: a prefix cache evicts pages from the end, and would keep all pages that the window has left.

[Note: cached on demand] The pages of a sample are given to the prefix cache when a sample with the same first page is
about to be admitted, or before they are freed. Most samples share no prefix, and are cached once, when they end. The
latest state of a running sample is left out: a page that is in use keeps all cached ones before it from eviction.

[Note: reset] Everything that a sample has computed can be recomputed from its tokens. So after an interrupted step,
`reset` frees all pages and queues every sample from its first token, as if all had been preempted.

[Note: context parallelism] A prompt of at least `context_parallel_from` tokens is prefilled by all ranks together, as a
step by itself and without chunks. Prompts with images are not: every rank has all of their embeddings anyway.

[Note: a step ahead] If every running sample decodes next, the next batch is known before the tokens of this one are.
`ahead` plans it, unless a queued sample might be admitted instead. Samples may turn out to have ended; the results of
their rows are then dropped. `computed` of a sample does not change before its tokens are known, so `rollback` undoes
both steps.

[Note: drafts] Drafts (prompt_lookup.py) only use the budget and pages that a batch leaves. They preempt nothing and
delay nothing; if they do not all fit, the step runs without them.

Ints only: knows nothing of models, tensors or time. The same calls give the same steps, on every rank.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from operator import attrgetter
from typing import NamedTuple

from attnspan.engine.kv_cache_manager import KVCacheManager
from attnspan.engine.sample import Sample
from attnspan.errors import EngineError

_ORDER = attrgetter("order")


class Chunk(NamedTuple):
    """The next `new` tokens of a sample, including those of a draft at the end."""

    sample: Sample
    new: int
    draft: tuple[int, ...] = ()

    @property
    def gets_token(self) -> bool:
        """Whether it reaches the end of the sample's tokens, so that its logits choose the next one."""
        return self.new - len(self.draft) == len(self.sample.tokens) - self.sample.computed

    @property
    def tokens(self) -> list[int]:
        """The tokens that are fed to the model."""
        begin = self.sample.computed
        return [*self.sample.tokens[begin : begin + self.new], *self.draft]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most rows and tokens of one step; `context_parallel_from` as in [Note: context parallelism]."""

    max_sequences: int = 64
    max_tokens: int = 512
    context_parallel_from: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < self.max_sequences:
            raise EngineError(
                f"max_tokens must be at least max_sequences={self.max_sequences}, so that all of them can decode in "
                f"one step, got {self.max_tokens}"
            )


@dataclass(slots=True)
class Counts:
    """Counts since the engine was made."""

    steps: int = 0
    tokens: int = 0  # fed to the model
    cached: int = 0  # found in the prefix cache instead
    swapped_out: int = 0
    swapped_in: int = 0
    recomputed: int = 0  # samples whose pages were given up
    preempted: int = 0  # samples that were sent back to the queue
    drafted: int = 0  # tokens that were proposed
    accepted: int = 0  # and turned out to be the next ones


class Scheduler:
    """Running and queued samples, over the pages of a KV cache.

    >>> from attnspan.engine.kv_cache_manager import KVCacheGroup
    >>> from attnspan.paged import PageAllocator
    >>> allocator = PageAllocator(num_pages=8, page_size=4)
    >>> scheduler = Scheduler(
    ...     KVCacheManager([KVCacheGroup(allocator, allocator)]), Limits(max_sequences=2, max_tokens=6)
    ... )
    >>> for number, length in enumerate([4, 5, 2]):
    ...     scheduler.add(Sample(number, tokens=[7] * length, max_length=length + 2))
    >>> [(chunk.sample.request_number, chunk.new) for chunk in scheduler.schedule()]
    [(0, 4), (1, 2)]
    """

    def __init__(
        self, kv_cache: KVCacheManager, limits: Limits, version: Callable[[bool], int] = lambda found: 0
    ) -> None:
        self.kv_cache, self.limits, self.counts = kv_cache, limits, Counts()
        self._version = version  # the version of the model, for a sample that starts on cached pages or on none
        self.max_chunk = kv_cache.max_chunk(limits.max_tokens)
        self.running: list[Sample] = []
        self.queued: list[Sample] = []
        self._page_size = gcd(*(group.allocator.page_size for group in kv_cache.groups))
        self._frees = 0  # counts the events that may have freed pages
        self._refused: tuple[Sample, int] | None = None  # which sample did not fit, and at which count

    # ---- samples come and go ---------------------------------------------------------------------------------------

    def add(self, sample: Sample) -> None:
        """Queue a sample; EngineError if it could not run even alone."""
        self.check_fits(sample)
        sample.unshared = not self.kv_cache.holds(sample.max_length)
        sample.first_page = hash((sample.encoder_prompt, *sample.content_ids[: self._page_size]))
        insort(self.queued, sample, key=_ORDER)

    def check_fits(self, sample: Sample) -> None:
        """EngineError for a sample that could not run even alone."""
        reason = self.kv_cache.refusal(sample.max_length, self.max_chunk)
        if reason is not None:
            prompt = sample.prompt_length
            raise EngineError(
                f"the request does not fit: {prompt} tokens of prompt and up to {sample.max_length - prompt} more, "
                f"{reason}; shorten it, or give the engine more pages"
            )
        longest = max((stop - start for start, stop in sample.atomic_spans), default=0)
        room = min(self.limits.max_tokens - self.limits.max_sequences + 1, self.max_chunk)
        if longest > room:
            raise EngineError(
                f"the request does not fit: {longest} tokens of its prompt see each other and are computed in one "
                f"step, which has room for {room} beside other samples; give the engine a larger max_tokens"
            )
        if sample.forks >= self.limits.max_sequences:
            raise EngineError(
                f"n must be at most max_sequences={self.limits.max_sequences}, since samples of one prompt start "
                f"together, got {sample.forks + 1}"
            )

    def remove(self, sample: Sample, cache: bool = True) -> None:
        """A sample has ended or was cancelled; with `cache`, later prompts may find what it computed."""
        side = self.running if sample in self.running else self.queued
        side.remove(sample)
        if sample.seq >= 0:
            if cache and not sample.swapped:
                self._cache_prefix(sample, sample.computed)
            self._free(sample)
        self._frees += 1

    def fork(self, sample: Sample, forks: Sequence[Sample]) -> None:
        """Let samples that were forked from one whose prompt is computed run beside it, on the same pages."""
        for fork, seq in zip(forks, self.kv_cache.fork(sample.seq, len(forks)), strict=True):
            fork.seq, fork.computed, fork.cached = seq, sample.computed, sample.cached
            insort(self.running, fork, key=_ORDER)

    def reset(self, samples: Iterable[Sample]) -> None:
        """Forget all pages, and queue these samples alone, each from its first token. See [Note: reset]."""
        self.kv_cache.reset()
        self.running.clear()
        self.queued[:] = sorted(samples, key=_ORDER)
        for sample in self.queued:
            self.counts.recomputed += sample.computed > 0
            sample.forget_pages()
        self._refused = None

    # ---- a step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """The next batch, for which there are pages; empty only if nothing runs or queues."""
        return self._drafted(self._batch())

    def _batch(self) -> list[Chunk]:
        """The next batch, without drafts."""
        batch = self._chunks()
        preempted = False
        while batch and not self._make_room(batch):
            self._preempt()
            preempted = True
            batch = self._chunks()
        if not self.queued or (preempted and batch):
            return batch
        while self._admit():
            pass
        batch = self._chunks()
        if batch and not self._make_room(batch):
            [sample] = self.running  # admitted alone: more are admitted only with pages to spare
            self._restart(sample)
            batch = self._chunks()
            fits = self._make_room(batch)
            assert fits, "what fits alone was added"
        return batch

    def ahead(self, batch: Sequence[Chunk]) -> list[Chunk]:
        """The batch after one whose tokens are not known yet, for which there are pages: a token for every sample that
        goes on, unless it turns out to end. Empty if that is not known. See [Note: a step ahead]."""
        if len(batch) != len(self.running) or self._may_admit():
            return []
        going = [chunk.sample for chunk in batch if len(chunk.sample.tokens) < chunk.sample.max_length]
        if not all([_can_step_ahead(chunk) for chunk in batch]) or (self.queued and len(going) < len(batch)):  # noqa: C419
            return []
        found = [Chunk(sample, 1) for sample in going]
        return found if self._make_room(found) else []

    def still_running(self, batch: Sequence[Chunk]) -> list[int]:
        """Which chunks of a batch that was planned ahead are of samples that have not ended, by their places in it."""
        running = set(map(id, self.running))
        return [place for place, chunk in enumerate(batch) if id(chunk.sample) in running]

    def mark_computed(self, batch: Sequence[Chunk]) -> None:
        """The batch was fed to the model, and its keys are in pages."""
        self.counts.steps += 1
        for chunk in batch:
            sample, count, draft = chunk
            self.counts.tokens += count
            if draft:
                count = self._trim_draft(chunk)
            sample.computed += count
            if self._left_window(sample, count):
                if sample.cached < sample.prompt_length or self.kv_cache.keeps_states:
                    self._cache_prefix(sample)
                self._frees += self.kv_cache.release_windows(sample.seq, sample.computed)

    def rollback(self, batch: Sequence[Chunk]) -> None:
        """The batch was planned and not computed: pages forget it."""
        for chunk in batch:
            if chunk.sample.seq >= 0:
                self.kv_cache.trim(chunk.sample.seq, chunk.sample.computed)

    # ---- within ----------------------------------------------------------------------------------------------------

    def _chunks(self) -> list[Chunk]:
        """The next chunks of running samples: a token for those that decode, then prompts, in order."""
        limits = self.limits
        for sample in self.running if limits.context_parallel_from is not None else ():
            if self._is_context_parallel(sample):
                return [Chunk(sample, sample.remaining)]
        counts = [1 if len(sample.tokens) - sample.computed == 1 else 0 for sample in self.running]
        left = limits.max_tokens - sum(counts)
        if 0 in counts:
            for place, sample in enumerate(self.running):
                if not counts[place]:
                    border = self.kv_cache.to_border(sample.computed) or left
                    counts[place] = sample.round_to_spans(min(sample.remaining, self.max_chunk, left, border))
                    left -= counts[place]
        return [Chunk(sample, count) for sample, count in zip(self.running, counts, strict=True) if count]

    def _drafted(self, batch: list[Chunk]) -> list[Chunk]:
        """A batch with drafts behind the samples that decode, if there is room. See [Note: drafts]."""
        if not any([chunk.sample.lookup for chunk in batch]):  # noqa: C419  # twice as fast
            return batch
        left, drafted = self.limits.max_tokens - sum(chunk.new for chunk in batch), list[Chunk]()
        for chunk in batch:
            sample = chunk.sample
            if sample.lookup is not None and sample.remaining == 1 and not sample.forks:
                most = min(left, self.max_chunk - 1, sample.max_length - len(sample.tokens))
                draft = sample.lookup.draft(sample.tokens, most)
                left -= len(draft)
                chunk = Chunk(sample, 1 + len(draft), draft)
            drafted.append(chunk)
        return drafted if drafted != batch and self._make_room(drafted) else batch

    def _trim_draft(self, chunk: Chunk) -> int:
        """Trim the keys of rejected draft tokens; how many tokens of the chunk count."""
        sample = chunk.sample
        count = max(len(sample.tokens) - 1 - sample.computed, 0)  # the last that was chosen was not fed
        self.kv_cache.trim(sample.seq, sample.computed + count)
        self.counts.drafted += len(chunk.draft)
        self.counts.accepted += max(count - 1, 0)
        return count

    def _make_room(self, batch: Sequence[Chunk]) -> bool:
        """Whether there are pages for a batch, after evicting cached prefixes if necessary."""
        return self.kv_cache.make_room([(chunk.sample.seq, chunk.new) for chunk in batch])

    def _may_admit(self) -> bool:
        """Whether the first sample of the queue might run in the next step, if no other ends."""
        if not self.queued or self._refused == (self.queued[0], self._frees):
            return False
        rows = sum(1 + each.forks for each in self.running)
        return rows + 1 + self.queued[0].forks <= self.limits.max_sequences

    def _admit(self) -> bool:
        """Admit the first queued sample if it fits. See [Note: admission]."""
        if not self._may_admit() or sum(chunk.new for chunk in self._chunks()) >= self.limits.max_tokens:
            return False
        sample = self.queued[0]
        fits = self._swap_in(sample) if sample.swapped else self._start(sample)
        if not fits:
            self._refused = (sample, self._frees)
            return False
        self.queued.pop(0)
        insort(self.running, sample, key=_ORDER)
        return True

    def _start(self, sample: Sample) -> bool:
        """Start a sample, on cached pages if there are any; whether it fits."""
        for other in self.running:  # see [Note: cached on demand]
            if other.first_page == sample.first_page:
                self._cache_prefix(other)
        self._look_up(sample, self._version(False))
        if sample.computed:  # are the pages that were found of the model as it is now?
            version = self._version(True)
            if version != sample.version:
                self._free(sample)
                self._look_up(sample, version)
        if self.running and not self._fits(sample):
            self._free(sample)
            return False
        self.counts.cached += sample.computed
        return True

    def _look_up(self, sample: Sample, version: int) -> None:
        """Add the sample's sequence, on cached pages of this version of the model, if there are any."""
        sample.version = version
        sample.seq, sample.computed = self.kv_cache.add(sample.content_ids, sample.cache_salt, not sample.unshared)

    def _swap_in(self, sample: Sample) -> bool:
        if self.running and not self._fits(sample):
            return False
        if not self.kv_cache.swap_in(sample.seq):
            if self.running:
                return False
            self._drop_pages(sample)  # alone, and yet no room: see [Note: alone]
            return self._start(sample)
        sample.swapped = False
        self.counts.swapped_in += 1
        return True

    def _fits(self, sample: Sample) -> bool:
        """Whether all running samples, and this one, fit with all of their tokens, and a page to spare for each."""
        everyone = [(each.seq, each.remaining) for each in self.running]
        newcomer = len(sample.tokens) if sample.swapped else 0
        if not sample.swapped:
            everyone.append((sample.seq, sample.remaining))
        max_chunk = None if self._is_context_parallel(sample) else self.max_chunk
        return self.kv_cache.make_room(everyone, spare=len(self.running) + 1, max_chunk=max_chunk, newcomer=newcomer)

    def _is_context_parallel(self, sample: Sample) -> bool:
        """See [Note: context parallelism]."""
        least = self.limits.context_parallel_from
        if least is None or sample.computed or sample.remaining < least or sample.embedded is not None:
            return False
        return self.kv_cache.holds(sample.remaining)

    def _preempt(self) -> None:
        """Send the running sample that is last in order back to the queue. See [Note: preemption]."""
        if len(self.running) == 1:
            self._restart(self.running[0])
            return
        sample = self.running.pop()
        self.counts.preempted += 1
        self._cache_prefix(sample, sample.computed)
        if sample.computed and self.kv_cache.swap_out(sample.seq):
            sample.swapped = True
            self.counts.swapped_out += 1
        else:
            self._drop_pages(sample)
        insort(self.queued, sample, key=_ORDER)
        self._frees += 1

    def _restart(self, sample: Sample) -> None:
        """See [Note: alone]."""
        assert not sample.unshared, "what fits alone was added, and it is alone"
        self._drop_pages(sample)
        sample.unshared = True
        sample.seq, _ = self.kv_cache.add(sample.content_ids, sample.cache_salt, False)

    def _drop_pages(self, sample: Sample) -> None:
        """Free the pages of a sample, which has to be recomputed."""
        self._free(sample)
        self.counts.recomputed += 1

    def _free(self, sample: Sample) -> None:
        self.kv_cache.free(sample.seq)
        sample.forget_pages()

    def _cache_prefix(self, sample: Sample, until: int | None = None) -> None:
        """Give a sample's pages to the prefix cache, if there is a full one that it does not have, until some token.

        None: until the last one that it can spare. See [Note: cached on demand].
        """
        if until is None:
            until = sample.computed - self.kv_cache.keeps_states
        if until - sample.cached >= self._page_size and not sample.unshared:
            self.kv_cache.cache_prefix(sample.seq, sample.content_ids[:until], sample.cache_salt)
            sample.cached = until - until % self._page_size

    def _left_window(self, sample: Sample, count: int) -> bool:
        """Whether a page may have left a window, which happens only where a new page was begun."""
        for group in self.kv_cache.groups:
            if group.window is not None:
                size, behind = group.allocator.page_size, sample.computed - group.window + 1
                if behind >= size and (behind // size > (behind - count) // size):
                    return True
        return False


def _can_step_ahead(chunk: Chunk) -> bool:
    """Whether a sample is fed its next token alone after this chunk, and nothing but tokens."""
    sample = chunk.sample
    alone = not sample.forks and sample.lookup is None and sample.embedded is None and sample.adapter is None
    return alone and chunk.gets_token

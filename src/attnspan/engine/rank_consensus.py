"""What the ranks of an engine must have in common: options, the model, requests, cancellations, and each step.

Each rank decides by itself what to do next, and all decide alike because all know the same. What they know is therefore
compared, and refused on every rank where it differs. One rank alone compares nothing.

[Note: shards] Of a tensor parallel model each rank along "tp" has a shard. Ranks with the same shard are those that
pages are spread over; their shards are compared too.

[Note: records] What is compared while an engine runs is a record of a fixed size: what a rank is doing, a digest of it,
and a number. So ranks that do different things, one adding a request while another steps, learn of that as well.

| compared | when | where it differs |
|---|---|---|
| options, and the model: weights, buffers, modules, adapters | when an engine is made | it is not made |
| a request | when it is added | it is not added |
| weights and buffers, how often the model was found changed | where requests begin | the step is not made |
| cancellations, samples, their versions, the tokens they are fed | in every step | the engine takes no more |

The record of a step is sent when its batch is known, and awaited when the model is about to be called: it travels while
the step is planned. A cancellation sends nothing by itself, and is part of the next record.

See transports/abort.py for what becomes of a group on which a rank failed in the middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attnspan.engine.engine_ranks import EngineRanks
from attnspan.engine.fingerprint import ModelFingerprint
from attnspan.engine.scheduler import Chunk
from attnspan.errors import AttnspanError, EngineError, ModelError
from attnspan.parallel.checksum import check_same
from attnspan.transports import consensus
from attnspan.transports.abort import abort_on_error
from attnspan.transports.group import transport_of

T = TypeVar("T")

ACTIVITIES = ("adding a request", "beginning a request", "making a step")
"""What a rank may be doing when it is heard of."""

DIGEST, NUMBER = 23, 8
"""Bytes of a record, after one for what is being done."""


class RanksDiverged(EngineError):
    """Ranks of an engine do different things, and cannot be brought together again."""


class RankConsensus:
    """The ranks of an engine. `transport` is None for one rank; `page_ranks` is the number of those that pages are
    spread over. See [Note: shards]."""

    def __init__(self, ranks: EngineRanks) -> None:
        transport = None if ranks.mesh is None else transport_of(ranks.mesh)
        self.transport = None if transport is None or transport.ranks == 1 else transport
        self.page_ranks = 1 if self.transport is None else transport_of(ranks.pages).ranks
        self._shard, self._shards = ranks.shard, list[int | None]()  # of this rank, and of all
        self._cancelled: list[int] = []  # since the last step
        self._agreed = False  # on the model, in this step

    @property
    def ranks(self) -> int:
        return 1 if self.transport is None else self.transport.ranks

    # ---- records ---------------------------------------------------------------------------------------------------

    def _post(self, doing: str, content: bytes, number: int = 0) -> Callable[[], list[bytes]]:
        """Send a record; returns what waits for those of all ranks, as (digest, number). See [Note: records]."""
        assert self.transport is not None, "there are others to hear"
        transport = self.transport
        digest = hashlib.blake2b(content, digest_size=DIGEST).digest()
        record = bytes([ACTIVITIES.index(doing)]) + digest + number.to_bytes(NUMBER, "little")
        with abort_on_error(transport):
            arrived = consensus.post(transport, record, "records of an engine")

        def receive() -> list[bytes]:
            with abort_on_error(transport):
                records = arrived()
            others = consensus.differing_ranks([each[:1] for each in records])
            if others:
                here, there = (ACTIVITIES[records[rank][0]] for rank in (0, others[0]))
                raise RanksDiverged(
                    f"rank 0 is {here} while ranks {others} are not: rank {others[0]} is {there}; every rank adds, "
                    "cancels and steps alike, in the same order"
                )
            return [each[1:] for each in records]

        return receive

    def _numbers(self, records: list[bytes], refusal: str) -> list[int]:
        """The numbers of records; EngineError, which names the `ranks`, if their digests differ."""
        others = consensus.differing_ranks([each[:DIGEST] for each in records])
        if others:
            raise EngineError(refusal.format(ranks=others))
        return [int.from_bytes(each[DIGEST:], "little") for each in records]

    def _ranks_with_other_shards(self, said: Sequence[object]) -> list[int]:
        """The ranks that say something else than the first one with their shard."""
        return [rank for rank, shard in enumerate(self._shards) if said[rank] != said[self._shards.index(shard)]]

    def compare_request(self, request: tuple[Any, ...], seed: int) -> int:
        """Rank 0's seed; EngineError if requests differ."""
        if self.transport is None:
            return seed
        records = self._post(ACTIVITIES[0], repr(request).encode(), seed)()
        return self._numbers(
            records, "requests differ between rank 0 and ranks {ranks}; every rank adds the same, in the same order"
        )[0]

    def compare_version(self, model: ModelFingerprint, again: bool) -> None:
        """Give a model the version that all ranks have; EngineError if weights or buffers differ.

        A change on one rank, such as a hook that only watches, is a new version on all: cached pages are not found by
        some and missed by others. Compared once in a step, and `again` where weights were read once more.
        """
        if self.transport is None or (self._agreed and not again):
            return
        refusal = (
            "the model was changed in another way, or at another time, on {first} than on ranks {ranks}: its weights "
            "or buffers differ; change it on all ranks alike, between the same calls of the engine"
        )
        records = self._post(ACTIVITIES[1], f"{model.content.whole:x}".encode(), model.version)()
        versions = self._numbers(records, refusal.replace("{first}", "rank 0"))
        if self._shards:
            others = self._ranks_with_other_shards(self._post(ACTIVITIES[1], f"{model.content.parts:x}".encode())())
            if others:
                raise EngineError(refusal.format(first="the first rank with their shard", ranks=others))
        model.version = max(versions)
        self._agreed = True

    def compare_step(self, batch: Sequence[Chunk]) -> Callable[[], None]:
        """What waits for the others, and raises RanksDiverged if they are about to compute something else."""
        if self.transport is None:
            return lambda: None
        content = [repr(self._cancelled).encode()]
        for chunk in batch:
            sample, fed = chunk.sample, chunk.tokens
            content.append(repr((sample.request_number, sample.number, sample.version, sample.computed, *fed)).encode())
        receive = self._post(ACTIVITIES[2], b"".join(content))
        self._cancelled, self._agreed = [], False

        def compare() -> None:
            others = consensus.differing_ranks(receive())
            if others:
                raise RanksDiverged(
                    f"steps differ between rank 0 and ranks {others}: they cancelled other requests, or chose other "
                    "tokens; every rank adds, cancels and steps alike, in the same order"
                )

        return compare

    def cancelled(self, request: int) -> None:
        """A request was ended from outside, which the others are to have done as well."""
        if self.transport is not None:
            self._cancelled.append(request)

    # ---- when an engine is made ------------------------------------------------------------------------------------

    def gather(self, said: T | AttnspanError, what: str) -> list[T]:
        """What every rank says, by rank; what one refuses, all refuse."""
        if self.transport is None:
            if isinstance(said, AttnspanError):
                raise said
            return [said]
        with abort_on_error(self.transport):
            return consensus.all_gather_object(self.transport, said, what)

    def compare_options(self, options: dict[str, Any]) -> None:
        """EngineError if engines differ in an option."""
        if self.transport is None:
            return
        by_rank = self.gather(options, "options of an engine")
        for name in options:
            found = [each[name] for each in by_rank]
            if found != found[:1] * len(found):
                raise EngineError(f"{name} must be the same on every rank, got {found}, by rank")

    def compare_model(self, model: ModelFingerprint) -> None:
        """ModelError if models differ: in weights and buffers, or in modules and adapters."""
        if self.transport is None:
            return
        with abort_on_error(self.transport, except_for=(ModelError,)):
            known = {"weights or buffers": model.content.whole, "modules or adapters": model.description()}
            check_same(known, self.transport)
        if self._shard is not None:
            self._compare_shards(model)

    def _compare_shards(self, model: ModelFingerprint) -> None:
        """ModelError if ranks with the same shard differ in it."""
        said = self.gather([self._shard, model.content.parts], "shards of a model")
        self._shards = [shard for shard, _ in said]
        others = self._ranks_with_other_shards([parts for _, parts in said])
        if others:
            raise ModelError(
                f"shards of the model differ between ranks {others} and the first rank with the same shard; load one "
                "checkpoint on all ranks"
            )

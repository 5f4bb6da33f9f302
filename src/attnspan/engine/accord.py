"""What the ranks of an engine must have in common: options, weights, requests, and how often weights changed.

Each rank decides by itself what to do next, and all decide alike because all know the same. What they were told is
therefore compared, when it comes, and refused on every rank where it differs. Of one rank, nothing is asked.

See attention/unbroken.py for what becomes of a group on which a rank failed in the middle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from attnspan.attention.unbroken import unbroken
from attnspan.errors import EngineError, ModelError
from attnspan.transports import Transport


class Accord:
    """The ranks of an engine. `transport` is None for one rank."""

    def __init__(self, transport: Transport | None) -> None:
        self.transport = None if transport is None or transport.ranks == 1 else transport

    @property
    def ranks(self) -> int:
        """How many there are."""
        return 1 if self.transport is None else self.transport.ranks

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, ranks do the same, and exchange messages; what is raised here ends the group for this rank."""
        if self.transport is None:
            yield
        else:
            with unbroken(self.transport):
                yield

    def _heard(self, said: bytes, what: str) -> list[bytes]:
        assert self.transport is not None, "there are others to hear"
        with unbroken(self.transport):
            return self.transport.agree(said, what)

    def _odd(self, said: bytes, what: str) -> list[int]:
        """The ranks that say something else than rank 0."""
        told = self._heard(said, what)
        return [rank for rank, each in enumerate(told) if each != told[0]]

    def on_options(self, options: dict[str, Any]) -> None:
        """EngineError if engines differ in an option."""
        if self.transport is None:
            return
        told = [json.loads(each) for each in self._heard(json.dumps(options).encode(), "options of an engine")]
        for name in options:
            found = [each[name] for each in told]
            if found != found[:1] * len(found):
                raise EngineError(f"{name} must be the same on every rank, got {found}, by rank")

    def on_weights(self, model: nn.Module) -> None:
        """ModelError if weights differ."""
        if self.transport is not None:
            from attnspan.integrations.huggingface.weights import check_same

            with unbroken(self.transport, but=(ModelError,)):
                check_same(model, self.transport)

    def on_version(self, version: int) -> int:
        """How often weights changed; EngineError if it was not as often on every rank."""
        if self.transport is not None:
            others = self._odd(str(version).encode(), "versions of weights")
            if others:
                raise EngineError(
                    f"weights were changed at another time on rank 0 than on ranks {others}; change them on all ranks "
                    "between the same calls of the engine"
                )
        return version

    def on_request(self, request: tuple[Any, ...], seed: int) -> int:
        """Rank 0's seed; EngineError if requests differ."""
        if self.transport is None:
            return seed
        told = self._heard(hashlib.sha256(repr(request).encode()).digest() + seed.to_bytes(16, "little"), "requests")
        others = [rank for rank, said in enumerate(told) if said[:32] != told[0][:32]]
        if others:
            raise EngineError(
                f"requests differ between rank 0 and ranks {others}; every rank adds the same, in order, and changes "
                "its model's weights between the same ones"
            )
        return int.from_bytes(told[0][32:], "little")

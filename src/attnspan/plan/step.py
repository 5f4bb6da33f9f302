"""A step: what arrives at a rank, where it lands, and which tiles are then computed.

The key buffer of a step (its arena) holds runs of positions one after another, in the order of `arena`; the rank's own
keys are among them where the step uses them. In backward the keys travel the same ways again, and after a step the
gradients of the keys that it used go straight to their owners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attnspan.layouts.run import Runs, tokens_in
from attnspan.masks.tile import Tile


class Transfer(NamedTuple):
    """Keys and values of some positions, on their way from one rank to another.

    `origin` is the rank that owns them; it is not the source where shards are handed on, as in a ring.
    """

    source: int
    target: int
    origin: int
    runs: Runs

    @property
    def tokens(self) -> int:
        """The number of positions that travel."""
        return tokens_in(self.runs)


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does at one step of a plan: `receives` into `arena` while sending, then computes `tiles`.

    `own` are the rank's own keys in the arena; the others are what it receives. In backward, gradients of others' keys
    leave by `grad_sends` and those of its own arrive by `grad_receives`.
    """

    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    own: Runs
    arena: Runs
    tiles: tuple[Tile, ...]
    grad_sends: tuple[Transfer, ...] = ()
    grad_receives: tuple[Transfer, ...] = ()

    def between(self, degree: int, place: int) -> Step:
        """The same step with transfers between ranks instead of groups of `degree`, each at `place` in its group."""

        def ranks(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
            return tuple(Transfer(rank(t.source), rank(t.target), rank(t.origin), t.runs) for t in transfers)

        def rank(group: int) -> int:
            return group * degree + place

        receives, sends = map(ranks, (self.receives, self.sends))
        grad_sends, grad_receives = map(ranks, (self.grad_sends, self.grad_receives))
        return Step(receives, sends, self.own, self.arena, self.tiles, grad_sends, grad_receives)

    @property
    def area(self) -> int:
        """The number of pairs computed."""
        return sum(tile.area for tile in self.tiles)

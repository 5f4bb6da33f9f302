"""Tokens of one group see each other: those of an image, or of a prefix, beside a causal mask."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from attnspan.errors import MaskError
from attnspan.masks.band import Band, tight
from attnspan.masks.documents import rows_of
from attnspan.masks.mask import Mask, Rule, Space
from attnspan.masks.rows import of_row, select
from attnspan.masks.typical import rounded

Runs = tuple[tuple[int, int, int], ...]
"""Of one batch row: (start, stop, group), ascending. Tokens between runs are of no group."""


@dataclass(frozen=True, slots=True)
class TokenGroups(Mask):
    """A query sees the keys of its own group; one of no group sees nothing. Made by `from_ids`.

    Tokens of a group may stand apart, as the frames of a video do. The mask of Gemma 3:

    >>> from attnspan.masks import Causal
    >>> print((Causal() | TokenGroups.from_ids([-1, 0, 0, -1, 1, 1])).draw(6))
    █ · · · · ·
    █ █ █ · · ·
    █ █ █ · · ·
    █ █ █ █ · ·
    █ █ █ █ █ █
    █ █ █ █ █ █
    """

    runs: tuple[Runs, ...]
    length: int

    @classmethod
    def from_ids(cls, ids: torch.Tensor | Sequence[int] | Sequence[Sequence[int]]) -> TokenGroups:
        """From the number of every token's group, (S,) or (rows, S); a number below 0 is none.

        >>> TokenGroups.from_ids([[7, 7, -1], [-1, 2, 2]])
        TokenGroups.from_ids([[0, 0, -1], [-1, 0, 0]])
        """
        table = rows_of("ids", ids)
        return cls(tuple(_runs(row) for row in table), table.shape[-1])

    def cut(self, start: int, stop: int) -> Runs:
        """The runs of the first batch row within [start, stop), counted from there."""
        return tuple(
            (max(first, start) - start, min(last, stop) - start, group)
            for first, last, group in self.runs[0]
            if first < stop and last > start
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[start, stop) from the first token of a group to its last, for each group of the first batch row."""
        ends: dict[int, tuple[int, int]] = {}
        for start, stop, group in self.runs[0]:
            ends[group] = ends.get(group, (start, stop))[0], stop
        return list(ends.values())

    @property
    def rows(self) -> int:
        return len(self.runs)

    @property
    def natural_len(self) -> int | None:
        return self.length

    def typical(self, q_len: int) -> Mask:
        counts = [len({group for _, _, group in runs}) for runs in self.runs]
        tokens = [sum(stop - start for start, stop, _ in runs) for runs in self.runs]
        return _even(round(rounded(fmean(counts), 1)), round(rounded(fmean(tokens), 2)), self.length)

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        if (q_len, kv_len) != (self.length, self.length):
            raise MaskError(f"ids must be one for each of {q_len} queries and {kv_len} keys, got {self.length}")

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        members: dict[int, list[tuple[int, int]]] = {}
        for start, stop, group in of_row(self.runs, row):
            members.setdefault(group, []).append((start, stop))
        return (tight(*query, *key) for runs in members.values() for query in runs for key in runs)

    def _rule(self, space: Space) -> Rule:
        ids = self._ids().to(space.device)
        return lambda b, h, q, k: (select(ids, b)[q] == select(ids, b)[k]) & (select(ids, b)[q] >= 0)

    def _ids(self) -> torch.Tensor:
        """A group number per token, (rows, S)."""
        ids = torch.full((self.rows, self.length), -1, device="cpu")
        for row, runs in enumerate(self.runs):
            for start, stop, group in runs:
                ids[row, start:stop] = group
        return ids

    def __repr__(self) -> str:
        ids = self._ids().tolist()
        return f"TokenGroups.from_ids({reprlib.repr(ids if self.rows > 1 else ids[0])})"


@functools.lru_cache(maxsize=256)
def _even(groups: int, tokens: int, length: int) -> TokenGroups:
    """So many groups at equal distances, with so many tokens together."""
    each = min(max(tokens // max(groups, 1), 1), length)
    starts = [group * (length - each) // max(groups - 1, 1) for group in range(min(groups, length // each))]
    return TokenGroups((tuple((start, start + each, group) for group, start in enumerate(starts)),), length)


def _runs(ids: torch.Tensor) -> Runs:
    values, lengths = torch.unique_consecutive(ids, return_counts=True)
    numbers: dict[int, int] = {}  # groups by the order of their first tokens: equal masks are equal
    stops = lengths.cumsum(0).tolist()
    return tuple(
        (stop - length, stop, numbers.setdefault(value, len(numbers)))
        for value, length, stop in zip(values.tolist(), lengths.tolist(), stops, strict=True)
        if value >= 0
    )

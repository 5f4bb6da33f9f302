"""Documents packed one after another see only themselves."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from attnspan.errors import MaskError, all_ints, integers
from attnspan.masks.band import Band
from attnspan.masks.columns import Columns
from attnspan.masks.mask import Mask, Rule, Space
from attnspan.masks.rows import as_table, listed, of_row, select, shown
from attnspan.masks.typical import typical_lengths

Lengths = Sequence[int] | Sequence[Sequence[int]]
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, init=False)
class Documents(Mask):
    """A query sees the keys of its own document; training packs are `Causal() & Documents(lengths)`.

    `lengths` is one list, or one list per batch row. `kv_lengths` gives the documents of the keys where they
    differ (cross-attention of packed pairs): document i of the queries sees document i of the keys.

    >>> print(Documents([1, 3]).draw(4))
    █ · · ·
    · █ █ █
    · █ █ █
    · █ █ █
    """

    lengths: Rows
    kv_lengths: Rows | None = None
    _hash: int = field(init=False, repr=False, compare=False)  # of thousands of numbers: plans and layouts ask often

    def __init__(self, lengths: Lengths, kv_lengths: Lengths | None = None):
        object.__setattr__(self, "lengths", _per_row("lengths", lengths))
        object.__setattr__(self, "kv_lengths", None if kv_lengths is None else _per_row("kv_lengths", kv_lengths))
        counts, kv_counts = ([len(row) for row in rows] for rows in (self.lengths, self._kv_lengths))
        if counts != kv_counts:
            raise MaskError(
                f"kv_lengths must hold as many documents as lengths, per batch row {counts}, got {kv_counts}"
            )
        object.__setattr__(self, "_hash", hash((self.lengths, self.kv_lengths)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor | Sequence[int]) -> Documents:
        """From the running sum of lengths that variable-length kernels take.

        >>> Documents.from_cu_seqlens(torch.tensor([0, 3, 8], dtype=torch.int32))
        Documents([3, 5])
        """
        edges = integers("cu_seqlens", listed(cu_seqlens), error=MaskError)
        if len(edges) < 2 or edges[0] != 0:
            raise MaskError(
                f"cu_seqlens must start at 0 and hold at least one document, got {reprlib.repr(list(edges))}"
            )
        for i, (start, stop) in enumerate(pairwise(edges)):
            if stop <= start:
                raise MaskError(
                    f"cu_seqlens must rise at every document, got {start} and then {stop} at {i + 1}; "
                    "leave out empty documents"
                )
        return cls([stop - start for start, stop in pairwise(edges)])

    @classmethod
    def from_ids(cls, ids: torch.Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Documents:
        """From a document id per token, (S,) or (rows, S); a document's tokens must stand together.

        >>> Documents.from_ids(torch.tensor([[7, 7, 7, 9], [1, 2, 2, 2]]))
        Documents([[3, 1], [1, 3]])
        """
        return cls([_run_lengths(row) for row in rows_of("ids", ids)])

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Documents:
        """From the position of every token in its document, (S,) or (rows, S), as collators of packs write it.

        A document begins where positions do not go up by one.

        >>> Documents.from_position_ids(torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]))
        Documents([[3, 1], [1, 3]])
        """
        table = rows_of("position_ids", position_ids).long()
        begins = table.diff(dim=1, prepend=table[:, :1]) != 1
        return cls([_run_lengths(row) for row in begins.cumsum(1)])

    @property
    def _kv_lengths(self) -> Rows:
        return self.lengths if self.kv_lengths is None else self.kv_lengths

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def natural_len(self) -> int | None:
        return sum(self.lengths[0])

    @property
    def natural_kv_len(self) -> int | None:
        return sum(self._kv_lengths[0])

    def typical(self, q_len: int) -> Mask:
        return self if self.kv_lengths else _of(typical_lengths(self.lengths))

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        if self.kv_lengths is None and q_len != kv_len:
            raise MaskError(f"kv_lengths must be given when q_len ({q_len}) and kv_len ({kv_len}) differ")
        _check_sum("lengths", "q_len", of_row(self.lengths, row), q_len)
        _check_sum("kv_lengths", "kv_len", of_row(self._kv_lengths, row), kv_len)

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        queries = accumulate(of_row(self.lengths, row), initial=0)
        keys = accumulate(of_row(self._kv_lengths, row), initial=0)
        for (q0, q1), (k0, k1) in zip(pairwise(queries), pairwise(keys), strict=True):
            yield Band(q0, q1, k0, k1, k0 - q1 + 1, k1 - 1 - q0)  # tight: no document is empty

    def _band_columns(self, q_len: int, kv_len: int, row: int) -> Columns | None:
        if self.kv_lengths is not None:
            return None
        edges = torch.tensor([0, *of_row(self.lengths, row)], device="cpu").cumsum(0)
        return Columns.squares(edges[:-1], edges[1:])

    def _rule(self, space: Space) -> Rule:
        queries, keys = _ids(self.lengths, space.device), _ids(self._kv_lengths, space.device)
        return lambda b, h, q, k: select(queries, b)[q] == select(keys, b)[k]

    def __repr__(self) -> str:
        keys = "" if self.kv_lengths is None else f", kv_lengths={_shown(self._kv_lengths)}"
        return f"Documents({_shown(self.lengths)}{keys})"


@functools.lru_cache(maxsize=256)
def _of(lengths: Rows) -> Documents:
    return Documents(lengths)


def _per_row(name: str, lengths: object) -> Rows:
    values = listed(lengths)
    if not isinstance(values, list | tuple) or not values:
        raise MaskError(
            f"{name} must be a list of document lengths, or one list per batch row, got {reprlib.repr(lengths)}"
        )
    hint = "each document needs at least one token"
    items = values if all_ints(values) else [listed(value) for value in values]
    if not isinstance(items[0], list | tuple):
        return (integers(name, items, at_least=1, hint=hint, error=MaskError),)
    rows = tuple(
        integers(f"{name}[{row}]", item, at_least=1, hint=hint, error=MaskError) for row, item in enumerate(items)
    )
    totals = [sum(row) for row in rows]
    if 0 in totals:
        raise MaskError(f"{name}[{totals.index(0)}] must hold at least one document, got an empty list")
    if len(set(totals)) != 1:
        raise MaskError(
            f"{name} must sum to the same length in every batch row, got sums {reprlib.repr(totals)}; "
            "give the padding at the end a document of its own"
        )
    return rows


def _check_sum(name: str, length_name: str, lengths: tuple[int, ...], total: int) -> None:
    if sum(lengths) != total:
        raise MaskError(
            f"{name} must sum to {length_name} ({total}), "
            f"got {len(lengths)} documents with sum {sum(lengths)}; "
            "give the padding at the end a document of its own"
        )


def _ids(rows: Rows, device: torch.device) -> torch.Tensor:
    """A document number per token, (rows, S)."""
    ids = [torch.arange(len(row), device="cpu").repeat_interleave(torch.tensor(row, device="cpu")) for row in rows]
    return torch.stack(ids).to(device)


def rows_of(name: str, ids: object) -> torch.Tensor:
    """A whole number per token, (rows, S)."""
    table = as_table(name, ids, "a whole number per token, (S,) or (rows, S)")
    if table.dim() not in (1, 2) or table.numel() == 0:
        raise MaskError(f"{name} must be (S,) or (rows, S), none of them 0, got shape {tuple(table.shape)}")
    if table.dtype == torch.bool or table.is_floating_point() or table.is_complex():
        raise MaskError(f"{name} must be whole numbers, got {table.dtype}")
    return table.view(-1, table.shape[-1])


def _run_lengths(ids: torch.Tensor) -> list[int]:
    values, lengths = torch.unique_consecutive(ids, return_counts=True)
    seen: set[int] = set()
    for run, i in enumerate(values.tolist()):
        if i in seen:
            again = int(lengths[:run].sum())
            raise MaskError(f"ids must keep each document's tokens together, got id {i} again at {again}")
        seen.add(i)
    found: list[int] = lengths.tolist()
    return found


def _shown(rows: Rows) -> str:
    return shown([list(row) for row in rows])

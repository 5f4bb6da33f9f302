"""Layouts by name, made for a mask and a length.

`chunk` is the smallest piece a layout deals. Where it is not given, striped takes 1, and those that follow
the mask's work take 128, or less where a rank would otherwise have fewer than 64 chunks (`fitting_chunk`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnspan.errors import LayoutError, one_of
from attnspan.layouts import Balanced, Contiguous, HeadTail, Layout, PerDocument, RoundRobinByWork, Striped
from attnspan.layouts.balanced import fitting_chunk
from attnspan.masks import Documents, Mask
from attnspan.masks.combined import And, Not, Or
from attnspan.masks.documents import Lengths


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """What a layout is made for."""

    mask: Mask
    seq_len: int
    ranks: int
    chunk: int | None = None

    @property
    def fitting_chunk(self) -> int:
        return self.chunk or fitting_chunk(self.seq_len, self.ranks)


LAYOUTS: dict[str, Callable[[LayoutRequest], Layout]] = {
    "contiguous": lambda ask: Contiguous(ranks=ask.ranks),
    "head_tail": lambda ask: HeadTail(ranks=ask.ranks),
    "striped": lambda ask: Striped(ranks=ask.ranks, chunk=ask.chunk or 1),
    "per_document": lambda ask: PerDocument(_document_lengths(ask.mask), ranks=ask.ranks),
    "round_robin_by_work": lambda ask: RoundRobinByWork(ask.mask, ranks=ask.ranks, block=ask.fitting_chunk),
    "balanced": lambda ask: Balanced(ask.mask, ranks=ask.ranks, chunk=ask.fitting_chunk),
}
CHUNKED = ["striped", "round_robin_by_work", "balanced"]


def named(name: str, ask: LayoutRequest) -> Layout:
    """The layout of that name; case, `-` and `_` do not matter.

    >>> from attnspan.masks import Causal
    >>> named("HeadTail", LayoutRequest(Causal(), seq_len=8, ranks=2))
    HeadTail(ranks=2)
    """
    plain = {known.replace("_", ""): known for known in LAYOUTS}
    known = plain.get(name.lower().replace("-", "").replace("_", ""), name)
    one_of("--layout", known, list(LAYOUTS), error=LayoutError)
    if ask.chunk is not None and known not in CHUNKED:
        raise LayoutError(f"--chunk is for the layouts {', '.join(CHUNKED)}, got {known}; leave --chunk out")
    return LAYOUTS[known](ask)


def _document_lengths(mask: Mask) -> Lengths:
    """The lengths of the documents that a mask speaks of."""
    found = list({documents.lengths for documents in _documents(mask)})
    if len(found) != 1:
        raise LayoutError(
            f"--layout per_document needs a mask with one list of documents, got {len(found)}; "
            "write one, as in causal & documents(4096, 1000)"
        )
    return found[0]


def _documents(mask: Mask) -> Iterator[Documents]:
    match mask:
        case Documents():
            yield mask
        case And() | Or():
            yield from _documents(mask.left)
            yield from _documents(mask.right)
        case Not():
            yield from _documents(mask.inner)

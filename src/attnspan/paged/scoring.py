"""How attention over pages is scored: the mask, the window, the scale and the score_mod.

Masks refer to positions in a sequence: query p and key k of the same sequence, both counted from its start. So
``Causal()`` means the same for a prompt, the third chunk of it, and one token. Masks with several batch rows refer to
the rows of the plan, in order.

Common masks are two numbers, `causal` and `window`, which every kernel supports; any other is evaluated pair by pair,
through its mask_mod. [Note: bounds] The two numbers also bound other masks: with `causal` no later key counts, and with
`window` none further back, so that pages outside are not read.

[Note: one pair at a time] A FlexAttention function takes one pair of indices. It is evaluated under vmap, as
FlexAttention does, over the positions of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.attention.score import ScoreFunction
from attnspan.errors import MaskError
from attnspan.masks import Causal, Full, Mask, SlidingWindow
from attnspan.masks.combined import And
from attnspan.masks.mask import MaskFunction
from attnspan.paged.metadata import PagedMetadata


class VisibleKeys(NamedTuple):
    """The queries of a row, among all of a step, and the keys [begin, end) that any of them may see."""

    row: int
    queries: slice
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Scale, mask and score_mod. `window` counts the query's own position: a query at p sees p - window + 1 to p."""

    scale: float
    causal: bool = False
    window: int | None = None
    mask_mod: MaskFunction | None = None
    score_mod: ScoreFunction | None = None

    @property
    def program(self) -> str:
        """The kind of function that a kernel must evaluate besides the two numbers; "" for none."""
        return "score_mod" if self.score_mod is not None else "mask" if self.mask_mod is not None else ""

    def visible(self, metadata: PagedMetadata, row: int) -> tuple[int, int]:
        """Bounds of the keys of a row that any of its queries may see. See [Note: bounds]."""
        begin, end = metadata.host_key_begins[row], metadata.host_key_ends[row]
        start = metadata.query_starts[row]
        if self.causal:
            end = min(end, metadata.spread.local_length(metadata.last(row) + 1))
        if self.window is not None:
            begin = max(begin, metadata.spread.local_length(max(0, start - self.window + 1)))
        return begin, max(begin, end)

    def rows(self, metadata: PagedMetadata, done: Container[int] = ()) -> Iterator[VisibleKeys]:
        """The rows with queries that may see a key, except for those that are done."""
        first = 0
        for row, count in enumerate(metadata.query_lens):
            begin, end = self.visible(metadata, row) if count and row not in done else (0, 0)
            if begin < end:
                yield VisibleKeys(row, slice(first, first + count), begin, end)
            first += count

    def applied(self, scores: Tensor, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores (heads, n, m) of query and key positions of a row, after the score_mod; -inf where they are masked."""
        heads, distance = scores.shape[0], queries.unsqueeze(-1) - keys
        if self.score_mod is not None:
            scores = over_pairs(self.score_mod, row, heads, queries, keys, scores)
        if self.causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if self.window is not None:
            scores = scores.masked_fill(distance >= self.window, -torch.inf)
        if self.mask_mod is not None:
            scores = scores.masked_fill(~over_pairs(self.mask_mod, row, heads, queries, keys), -torch.inf)
        return scores


def over_pairs(
    fn: Callable[..., Tensor], row: int, heads: int, queries: Tensor, keys: Tensor, *scores: Tensor
) -> Tensor:
    """`fn` of every head, query and key of a row, (heads, n, m). See [Note: one pair at a time]."""
    device = queries.device
    b, h = torch.full((), row, device=device), torch.arange(heads, device=device)
    each = len(scores) * (0,)
    levels = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None))
    return mapped(fn, [(*each, *dims) for dims in levels], *scores, b, h, queries, keys)


def mapped(fn: Callable[..., Tensor], levels: Iterable[tuple[int | None, ...]], *args: Tensor) -> Tensor:
    """`fn` under vmap over the dims of each level, the innermost first. See [Note: one pair at a time]."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for dims in levels:
        fn = torch.vmap(fn, in_dims=dims)
    with TransformGetItemToIndex():
        result = fn(*args)
    return result


def scoring(mask: Mask, window: int | None, device: torch.device) -> Scoring:
    """A mask, and a layer's own window, as a Scoring of scale 1.

    >>> made = scoring(Causal() & SlidingWindow(3), 8, torch.device("cpu"))
    >>> made.causal, made.window, made.mask_mod
    (True, 4, None)
    """
    found = _numbers(mask) or Scoring(1.0, mask_mod=mask.mask_mod(device=device))
    if window is None:
        return found
    return replace(found, window=window if found.window is None else min(window, found.window))


def _numbers(mask: Mask) -> Scoring | None:
    """A mask that two numbers describe, or None."""
    match mask:
        case Causal(align=None | "top"):
            return Scoring(1.0, causal=True)
        case Full():
            return Scoring(1.0)
        case SlidingWindow(left=left, right=0, align=None | "top"):
            return Scoring(1.0, causal=True, window=left + 1)
        case And(left=left, right=right):
            a, b = _numbers(left), _numbers(right)
            if a is None or b is None:
                return None
            windows = [each.window for each in (a, b) if each.window is not None]
            return Scoring(1.0, causal=a.causal or b.causal, window=min(windows, default=None))
    return None


def check_fits(mask: Mask, lengths: tuple[int, ...], heads: int) -> None:
    """Refuse a mask for other numbers of rows or heads, or for shorter sequences."""
    mask.check_heads(heads)
    if not lengths:
        return
    mask.check_rows(len(lengths))
    longest = max(lengths)
    for known in (mask.natural_len, mask.natural_kv_len):
        if known is not None and longest > known:
            raise MaskError(f"mask is for sequences of {known} tokens, got one of {longest}: {mask!r}")

"""torch's load balancers, as names for layouts.

A load balancer gives indices that reorder a sequence before it is cut into equal parts; a layout says which positions
each rank owns, in what order. Where all parts are equal the indices are the layout's positions, rank after rank, and so
they are given here; sequences are cut by the layout, which also has parts that are not equal::

    _HeadTailLoadBalancer               HeadTail
    _PerDocumentHeadTailLoadBalancer    PerDocument: rank-major, as balance needs; torch's is document-major
    _PTRRLoadBalancer                   blocks dealt by their number of key blocks, as torch counts
    any other object with _generate_indices, torch's own too: its indices, cut as DTensor cuts

Shapes: indices are (1, S), or (B, S) where batch rows are dealt differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.errors import LayoutError, integer
from attnspan.layouts import Contiguous, HeadTail, Layout, PerDocument
from attnspan.layouts.layout import Shards, check_ranks
from attnspan.layouts.round_robin import dealt
from attnspan.layouts.run import Run, Runs, tokens_in
from attnspan.masks.piecewise import Piecewise, pieces_of
from attnspan.torch_compat.errors import LayoutAssertion, LayoutNotImplemented
from attnspan.torch_compat.options import _cp_options


class _LoadBalancer(ABC):
    """The order of a sequence on ranks. A new one defines `_generate_indices`."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """The positions in the order of shards, (1, S) or (B, S); with `restore`, the way back. None: as they are."""


class _Layout(_LoadBalancer):
    """A load balancer that is a layout over a length."""

    layout: Layout
    seq_length: int
    device: str | torch.device
    dtype = torch.int64

    def _generate_indices(self, restore: bool = False) -> Tensor:
        """The layout's permutation, or its inverse."""
        order = self.layout.inverse if restore else self.layout.permutation
        rows = torch.stack([order(self.seq_length, row) for row in range(self.layout.rows)])
        return rows.to(self.device, torch.int64 if restore else self.dtype)


class _HeadTailLoadBalancer(_Layout):
    """Rank r owns chunk r and chunk 2 * world_size - 1 - r. Any length will do.

    >>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices().tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    >>> _HeadTailLoadBalancer(7, 2, "cpu")._generate_indices().tolist()
    [[0, 5, 6, 1, 2, 3, 4]]
    """

    dtype = torch.int32  # torch's

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device):
        self.seq_length = integer("seq_length", seq_length, at_least=1, error=LayoutError)
        self.world_size = check_ranks(world_size)
        self.device = device
        self.layout = HeadTail(self.world_size)


class _PerDocumentHeadTailLoadBalancer(_Layout):
    """Head and tail of every document on every rank, in rank-major order. Any document lengths will do.

    >>> _PerDocumentHeadTailLoadBalancer([[4, 12]], 2, "cpu")._generate_indices().tolist()
    [[0, 3, 4, 5, 6, 13, 14, 15, 1, 2, 7, 8, 9, 10, 11, 12]]
    """

    def __init__(self, seq_length_per_doc: list[list[int]], world_size: int, device: str | torch.device):
        self.seq_length_per_doc = seq_length_per_doc
        self.world_size = check_ranks(world_size)
        self.device = device
        self.layout = PerDocument(seq_length_per_doc, ranks=self.world_size)
        self.seq_length = self.layout.natural_len or 0

    def _generate_indices_for_batch(self, seq_length_per_doc: list[int], restore: bool) -> Tensor:
        """The indices of one batch row of such documents, (S,).

        >>> _PerDocumentHeadTailLoadBalancer([[8]], 2, "cpu")._generate_indices_for_batch([4], False).tolist()
        [0, 3, 1, 2]
        """
        return _PerDocumentHeadTailLoadBalancer([seq_length_per_doc], self.world_size, self.device)._generate_indices(
            restore
        )[0]


class _PTRRLoadBalancer(_Layout):
    """Query blocks, sorted by how many key blocks they see, dealt back and forth.

    Blocks of any size, not the keys' too; any number of them; masks of several heads are counted together.
    """

    def __init__(self, block_mask: BlockMask, world_size: int):
        if not isinstance(block_mask, BlockMask):
            raise LayoutError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
        self.block_mask = block_mask
        self.world_size = check_ranks(world_size)
        self.device = block_mask.kv_num_blocks.device
        self.seq_length = block_mask.seq_lengths[0]
        seen = block_mask.kv_num_blocks
        if block_mask.full_kv_num_blocks is not None:
            seen = seen + block_mask.full_kv_num_blocks
        counts = seen.sum(1).tolist()  # (B, query blocks): over heads
        block = block_mask.BLOCK_SIZE[0]
        self.layout = ListedLayout(tuple(_by_counts(row, self.seq_length, self.world_size, block) for row in counts))

    @staticmethod
    def ptrr_scheduling(process_time: Tensor, group_size: int) -> Tensor:
        """Which tasks each group gets, (group_size, tasks / group_size), in ascending order.

        >>> _PTRRLoadBalancer.ptrr_scheduling(torch.tensor([1, 2, 3, 4]), 2).tolist()
        [[0, 3], [1, 2]]
        """
        if process_time.dim() != 1:
            raise LayoutAssertion(f"process_time must be (tasks,), got shape {tuple(process_time.shape)}")
        tasks = len(process_time)
        if tasks % check_ranks(group_size):
            raise LayoutNotImplemented(
                f"process_time must have a multiple of group_size ({group_size}) tasks, got {tasks}"
            )
        places = process_time.unique(return_inverse=True)[1]  # in whole numbers, which sum without rounding
        hands = _by_counts(places.tolist(), tasks, group_size, 1)
        found = [[task for run in hand for task in run.positions] for hand in hands]
        return torch.tensor(found, device=process_time.device).view(group_size, -1)


def _by_counts(counts: Sequence[int], seq_len: int, ranks: int, block: int) -> Shards:
    """Blocks dealt by a number for each."""
    pieces = pieces_of((i * block, (i + 1) * block, n, 0) for i, n in enumerate(counts))
    return dealt(Piecewise(pieces), seq_len, ranks, block)


def _create_default_load_balancer(seq_length: int, world_size: int, device: str | torch.device) -> _LoadBalancer | None:
    """The default load balancer: head-tail, for any length, or None if `enable_load_balance` is off."""
    return _HeadTailLoadBalancer(seq_length, world_size, device) if _cp_options.enable_load_balance else None


# ---- layouts of load balancers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListedLayout(Layout):
    """A layout that is its list of runs: of every rank, for every batch row.

    >>> ListedLayout(((((Run(0, 2), Run(6, 8))), (Run(2, 6),)),)).positions(8)
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    listed: tuple[Shards, ...]

    @property
    def ranks(self) -> int:
        return len(self.listed[0])

    @property
    def rows(self) -> int:
        return len(self.listed)

    @property
    def natural_len(self) -> int | None:
        return sum(map(tokens_in, self.listed[0]))

    def _shards(self, seq_len: int, row: int) -> Shards:
        if seq_len != self.natural_len:
            raise LayoutError(f"the load balancer is for {self.natural_len} tokens, got {seq_len}")
        return self.listed[row]


def layout_of(balancer: object, ranks: int) -> tuple[Layout, int | None]:
    """The layout that a load balancer stands for, and its length; without one, spans of any length.

    >>> layout_of(_HeadTailLoadBalancer(8, 2, "cpu"), 2)
    (HeadTail(ranks=2), 8)
    """
    if isinstance(balancer, _Layout):
        layout, length = balancer.layout, balancer.seq_length
    else:
        ask = getattr(balancer, "_generate_indices", None)
        if balancer is not None and ask is None:
            raise LayoutError(f"load_balancer must have _generate_indices, got {type(balancer).__name__}")
        indices = None if ask is None else ask(restore=False)
        if indices is None:
            return Contiguous(ranks), None
        layout, length = _of_indices(indices, ranks), indices.shape[-1]
    if layout.ranks != ranks:
        raise LayoutError(f"load_balancer must be for the mesh's {ranks} ranks, got one for {layout.ranks}")
    return layout, length


def _of_indices(indices: Tensor, ranks: int) -> ListedLayout:
    if indices.dim() != 2 or not indices.numel():
        raise LayoutAssertion(f"load_balancer: indices must be (1, S) or (B, S), got shape {tuple(indices.shape)}")
    rows = indices.cpu().to(torch.int64)
    if not torch.equal(rows.sort(-1).values, torch.arange(rows.shape[1], device=rows.device).expand_as(rows)):
        raise LayoutError(f"load_balancer: indices must hold each of {rows.shape[1]} positions once, in every row")
    size = -(-rows.shape[1] // ranks)  # as DTensor cuts: the last parts are shorter
    return ListedLayout(tuple(tuple(_runs(row[r * size : (r + 1) * size]) for r in range(ranks)) for row in rows))


def _runs(positions: Tensor) -> Runs:
    """Positions, in their order, as runs.

    >>> _runs(torch.tensor([0, 1, 6, 7, 2]))
    (Run(start=0, stop=2, step=1), Run(start=6, stop=8, step=1), Run(start=2, stop=3, step=1))
    """
    ends = (torch.nonzero(positions.diff() != 1).flatten() + 1).tolist()
    parts = [part.tolist() for part in torch.tensor_split(positions, ends) if len(part)]
    return tuple(Run(part[0], part[-1] + 1) for part in parts)

"""torch's experimental PagedAttention, by its own names: change the import, keep the program.

The class, its attributes and its methods are those of `torch.nn.attention.experimental._paged_attention`; what is wrong
there is right here:

- `batch_idx` may name any rows in any order: masks and score_mods look pages up under the row's own number.
- `erase` forgets sequences for good, takes an index of any shape, and gives back a page once no row lists it.
- `assign` to a position that was not reserved is refused; there it overwrites another sequence. Under torch.compile it
  is one op, which checks when it runs.
- What fails changes nothing. `reserve` costs what it takes, not what is free.
- A converted mask has no part for a backward pass, which there is 95 % of the cost; it always has a list of full
  blocks, without which torch does not compile on a CPU, and a column past the last, which kernels read.

New programs are better off with `attnspan.paged`: pages that are shared, copied on write and found by content, and
steps that do not wait for the device, as `reserve`, `erase` and the check of `assign` have to.

[Note: one op] To refuse a position that was not reserved is to look at numbers, which torch.compile does not do. So
`assign` ends in an op of its own, which looks when it runs. To look is to wait for the device: a CUDA graph cannot hold
the op, and torch.compile is told so.

Shapes: caches (1, H, n_pages * page_size, D); values to assign (B, H, S, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from attnspan.errors import PageError, integer, integers
from attnspan.torch_compat.errors import PageIndex, PageRuntime, PoolAssertion

__all__ = ["PagedAttention"]

TAGS = [tag for name in ("cudagraph_unsafe",) if (tag := getattr(torch.Tag, name, None)) is not None]
"""Of an op that waits for the device. See [Note: one op]."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class PagedAttention:
    """`n_pages` pages of `page_size` tokens, dealt to up to `max_batch_size` sequences.

    >>> paged = PagedAttention(n_pages=4, page_size=2, max_batch_size=2, device="cpu")
    >>> paged.reserve(torch.tensor([1]), torch.tensor([3]))
    >>> paged.page_table[1].tolist(), paged.capacity.tolist()
    ([1, 0, -1, -1], [0, 4])
    """

    def __init__(self, n_pages: int, page_size: int, max_batch_size: int, device: str | torch.device = "cuda") -> None:
        self.n_pages = integer("n_pages", n_pages, at_least=1, error=PageError)
        self.page_size = integer("page_size", page_size, at_least=1, error=PageError)
        rows = integer("max_batch_size", max_batch_size, at_least=1, error=PageError)
        # [row, index in the sequence] -> page, and back; -1 where there is none
        self.page_table = torch.full((rows, self.n_pages), -1, dtype=torch.int64, device=device)
        self.physical_to_logical = torch.full((rows, self.n_pages), -1, dtype=torch.int64, device=device)
        self.capacity = torch.zeros(rows, dtype=torch.int64, device=device)
        self.empty_pages = list(range(self.n_pages - 1, -1, -1))
        self._index = torch.full((self.n_pages,), -1, dtype=torch.int32, device=device)  # of a page in its sequence

    def reserve(self, batch_idx: Tensor | int, seq_len: Tensor | int) -> None:
        """Give a row pages for at least `seq_len` tokens; PoolExhausted, and no change, if there are not enough."""
        row, length = self._row(batch_idx), integer("seq_len", _item(seq_len), error=PageError)
        first = int(self.capacity[row]) // self.page_size
        last = -(-length // self.page_size)
        if last <= first:
            return
        if last - first > len(self.empty_pages):
            raise PoolAssertion(last - first, len(self.empty_pages))
        taken = self.empty_pages[first - last :]
        del self.empty_pages[first - last :]
        pages = torch.tensor(taken, device=self.page_table.device)
        self.page_table[row, first:last] = pages
        self.physical_to_logical[row, pages] = torch.arange(first, last, device=pages.device)
        self._index[pages] = torch.arange(first, last, dtype=torch.int32, device=pages.device)
        self.capacity[row] = last * self.page_size

    def erase(self, batch_idx: Tensor | int) -> None:
        """Forget a row, or several. Pages that other rows list too stay theirs."""
        rows = self._rows(batch_idx)
        others = torch.ones_like(self.capacity, dtype=torch.bool)
        others[rows] = False
        listed = {*self.page_table[others].flatten().tolist(), -1}
        freed = [page for page in dict.fromkeys(self.page_table[rows].flatten().tolist()) if page not in listed]
        self.capacity[rows] = 0
        self.physical_to_logical[rows] = -1
        self.page_table[rows] = -1
        self._index[freed] = -1
        self.empty_pages += freed

    def assign(
        self, batch_idx: Tensor, input_pos: Tensor, k_val: Tensor, v_val: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """Write keys and values (B, H, S, D) of rows `batch_idx` (B,) at positions `input_pos` (B, S)."""
        self._check_values(batch_idx, input_pos, k_val, v_val, k_cache, v_cache)
        _assign(self.page_table, self.page_size, batch_idx, input_pos, k_val, v_val, k_cache, v_cache)

    def convert_logical_block_mask(
        self, block_mask: BlockMask, batch_idx: Tensor | None = None, kv_len: Tensor | None = None
    ) -> BlockMask:
        """A mask over tokens in order as one over the cache: `batch_idx` (B,) says which row each of the mask's is.

        `kv_len` (B,), if given, is the number of tokens of each of the mask's rows.
        """
        if block_mask.BLOCK_SIZE[1] != self.page_size:
            raise PageRuntime(
                f"block_mask must have columns of page_size={self.page_size}, got {block_mask.BLOCK_SIZE[1]}; "
                f"create it with BLOCK_SIZE=(q, {self.page_size})"
            )
        batch, device = block_mask.kv_indices.shape[0], block_mask.kv_indices.device
        rows = torch.arange(batch, device=device) if batch_idx is None else batch_idx.to(device).view(-1)
        if len(rows) != batch:
            raise PageError(f"batch_idx must name a row for each of the mask's {batch}, got {len(rows)}")
        tables = self.page_table[rows]
        counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        if counts is None or indices is None:
            counts, indices = torch.zeros_like(block_mask.kv_num_blocks), block_mask.kv_indices[..., :0]
        return BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks,
            self._pages(tables, block_mask.kv_indices),
            counts,
            self._pages(tables, indices),
            block_mask.BLOCK_SIZE,
            self.get_mask_mod(block_mask.mask_mod, kv_len, rows),
            seq_lengths=(block_mask.seq_lengths[0], self.n_pages * self.page_size),
            compute_q_blocks=False,
        )

    def _pages(self, tables: Tensor, indices: Tensor) -> Tensor:
        """Pages for indices of blocks, as wide as the pool, and with at least one column more than there are blocks."""
        width = max(indices.shape[-1] + 1, self.n_pages)
        pages = torch.zeros(*indices.shape[:-1], width, dtype=torch.int32, device=indices.device)
        found = tables.gather(1, indices.flatten(1).long()).view(indices.shape)
        pages[..., : indices.shape[-1]] = found.clamp(min=0)  # past a row's blocks the mask's own lists say nothing
        return pages

    def get_mask_mod(
        self, mask_mod: MaskMod | None, kv_len: Tensor | None = None, batch_idx: Tensor | None = None
    ) -> MaskMod:
        """A mask_mod of tokens in order as one of places in the cache; `batch_idx` as in the conversion."""
        ask = noop_mask if mask_mod is None else mask_mod
        size, logical, rows = self.page_size, self.physical_to_logical, batch_idx

        def over_pages(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            index = logical[b if rows is None else rows[b], kv_idx // size]
            position = index * size + kv_idx % size
            live = index >= 0
            if kv_len is not None:
                live = live & (position < kv_len[b])
            return live & ask(b, h, q_idx, position)

        return over_pages

    def get_score_mod(
        self, score_mod: ScoreMod | None, kv_len: Tensor | None = None, batch_idx: Tensor | None = None
    ) -> ScoreMod:
        """A score_mod of tokens in order as one of places in the cache.

        Without `batch_idx` it serves any rows: a page has the same index in every row that lists it.
        """
        size, logical, anyone, rows = self.page_size, self.physical_to_logical, self._index, batch_idx

        def over_pages(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            index = anyone[kv_idx // size] if rows is None else logical[rows[b], kv_idx // size]
            position = index * size + kv_idx % size
            live = index >= 0
            if kv_len is not None:
                live = live & (position < kv_len[b])
            changed = score if score_mod is None else score_mod(score, b, h, q_idx, position)
            return torch.where(live, changed, -torch.inf)

        return over_pages

    def _row(self, batch_idx: Any) -> int:
        row = integer("batch_idx", _item(batch_idx), error=PageError)
        if row >= len(self.capacity):
            raise PageIndex(f"batch_idx must be below max_batch_size={len(self.capacity)}, got {row}")
        return row

    def _rows(self, batch_idx: Any) -> Tensor:
        """Rows by their numbers, or by a flag for each."""
        rows = torch.as_tensor(batch_idx, device="cpu").reshape(-1)
        if rows.dtype == torch.bool:
            if len(rows) != len(self.capacity):
                raise PageIndex(f"batch_idx must have max_batch_size={len(self.capacity)} flags, got {len(rows)}")
            rows = rows.nonzero().flatten()
        listed = integers("batch_idx", rows.tolist(), error=PageError)
        return torch.tensor([self._row(row) for row in listed], dtype=torch.int64, device=self.page_table.device)

    def _check_values(
        self, batch_idx: Tensor, input_pos: Tensor, k_val: Tensor, v_val: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        batch, heads, tokens = k_val.shape[:3]
        if k_val.requires_grad or v_val.requires_grad:
            raise PageRuntime("values must not require grad: a cache has no gradients")
        if tuple(batch_idx.shape) != (batch,) or tuple(input_pos.shape) != (batch, tokens):
            raise PageRuntime(
                f"batch_idx must be ({batch},) and input_pos ({batch}, {tokens}) for k_val {tuple(k_val.shape)}, got "
                f"{tuple(batch_idx.shape)} and {tuple(input_pos.shape)}"
            )
        for name, values, cache in (("k", k_val, k_cache), ("v", v_val, v_cache)):
            wanted = (1, heads, self.n_pages * self.page_size, values.shape[3])
            if values.shape[:3] != k_val.shape[:3] or tuple(cache.shape) != wanted:
                raise PageRuntime(
                    f"{name}_cache must be (1, heads, n_pages * page_size, dim) = {wanted} for {name}_val "
                    f"{tuple(values.shape)}, got {tuple(cache.shape)}"
                )


@torch.library.custom_op("attnspan::paged_assign", mutates_args=("k_cache", "v_cache"), tags=TAGS)
def _assign(
    page_table: Tensor,
    page_size: int,
    batch_idx: Tensor,
    input_pos: Tensor,
    k_val: Tensor,
    v_val: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """Write values where the page table says; nothing, if a position was not reserved. See [Note: one op]."""
    index = (input_pos // page_size).long()
    pages = page_table[batch_idx].gather(1, index.clamp(0, page_table.shape[1] - 1))
    reserved = (pages >= 0) & (input_pos >= 0) & (index < page_table.shape[1])
    if not bool(reserved.all()):
        row, place = (~reserved).nonzero()[0].tolist()
        room = int((page_table[batch_idx[row]] >= 0).sum()) * page_size
        raise PageRuntime(
            f"position {int(input_pos[row, place])} of row {int(batch_idx[row])} is not reserved; the row has room "
            f"for {room} tokens; call reserve first"
        )
    slots = (pages * page_size + input_pos % page_size).flatten()
    for cache, values in ((k_cache, k_val), (v_cache, v_val)):
        cache[:, :, slots] = values.transpose(0, 1).flatten(1, 2).unsqueeze(0)


@_assign.register_fake
def _(*arguments: object) -> None:
    """It only writes."""


def _item(value: Any) -> Any:
    """The one number of a tensor of any shape."""
    return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value

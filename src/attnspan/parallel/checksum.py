"""A checksum of the bits of many tensors, computed on their device; equal bits give equal checksums on any device.

Weights may change without a new tensor version: fused optimizers, writes through `.data` and foreign kernels do not
raise it. So contents are compared. Bits are read as 64-bit integers, whose sums do not depend on the order::

    words      (blocks, 17, 1021): 17 rows of 1021 words are added up, which reads memory about as fast as it can be
    sums       (blocks, 1021), each times a weight of its column and one of its block, then all added

A prime number of columns puts words that are a power of two apart into different sums, and each sum has another factor:
the same numbers in another order, or a block that moved, give another checksum. Upper bits are mixed into lower ones
before a product, where otherwise only their parity would count; the number of rows is odd so that a change of all signs
does not cancel. Undetected are collisions, with probability 2**-64, and words exchanged with one that is exactly 1 to
16 times 1021 words away.

Small tensors are concatenated first, so that a model with many of them needs few kernels.

Ranks compare the checksums of replicated tensors; of sharded weights (DTensors, FSDP and the like) each rank has its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attnspan.errors import ModelError
from attnspan.splitmix import INCREMENT, mix
from attnspan.transports import Transport
from attnspan.transports.consensus import all_gather_object, differing_ranks

COLUMNS = 1021
ROWS = 17
BLOCK = ROWS * COLUMNS
"""Words of a block."""

WIDTH = 8
"""Bytes of a word."""

SMALL = 1 << 20
"""Bytes below which a tensor is put in a row with others: to copy it costs less than kernels of its own."""


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number of 64 bits for tensors in this order.

    >>> one = torch.arange(6.0)
    >>> checksum([one]) == checksum([one.clone()]) != checksum([one.flip(0)])
    True
    """
    sums: dict[torch.device, list[Tensor]] = {}
    small: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            for part in plain_parts(tensor):
                octets = _octets(part)
                read = 0
                if len(octets) >= SMALL:
                    read = len(octets) // (WIDTH * BLOCK) * (WIDTH * BLOCK)
                    sums.setdefault(part.device, []).append(_sum(octets[:read].view(torch.int64)))
                if read < len(octets):
                    small.setdefault(part.device, []).append(octets[read:])
        for device, row in small.items():
            sums.setdefault(device, []).append(_sum(_words(row)))
        totals = [_weighted(torch.stack(some)) for some in sums.values()]
    found = 0
    for place, total in enumerate(totals):  # waits for the device here, once for each
        found += int(total) * (2 * place + 1)
    return found & (1 << 64) - 1


class Content(NamedTuple):
    """Checksums of a model's parameters and buffers: of those that lie whole on every rank, and of parts."""

    whole: int
    parts: int


class Weights:
    """A model's parameters and buffers, found once; `content` is what they are by now.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> Weights(one).content() == Weights(other).content()
    False
    >>> _ = other.load_state_dict(one.state_dict())
    >>> Weights(one).content() == Weights(other).content()
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._replicated: list[Tensor] = []
        self._parts: list[Tensor] = []
        flat = any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules())
        for each in chain(model.parameters(), model.buffers()):  # those of FSDP1 are parts that look like wholes
            (self._parts if flat or not _is_replicated(each) else self._replicated).append(each)

    def __iter__(self) -> Iterator[Tensor]:
        return chain(self._replicated, self._parts)

    def content(self) -> Content:
        """Reads all of them."""
        return Content(checksum(self._replicated), checksum(self._parts))


def check_same(model: Mapping[str, object], transport: Transport) -> None:
    """ModelError on every rank if ranks differ in what is known of their model, such as a checksum of its weights.

    Ranks with other random weights, or another checkpoint, would compute parts of different models without an error.
    """
    by_rank = all_gather_object(transport, list(model.values()), "what is known of a model")
    for name, each in zip(model, zip(*by_rank, strict=True), strict=True):
        others = differing_ranks(each)
        if others:
            raise ModelError(
                f"{name} differ between rank 0 and ranks {others}; every rank must have the same: load one checkpoint, "
                "or set one seed (virtual ranks share torch's random numbers: make the model first, and give each rank "
                "a copy)"
            )


def _is_replicated(tensor: Tensor) -> bool:
    """Not a DTensor or another tensor that wraps some, nor one of ZeRO-3's."""
    return not (is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "to_local") or hasattr(tensor, "ds_id"))


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the numbers here: of one that wraps others (DTensor, quantised), those; none of a meta."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in inner:
            if isinstance(part, Tensor):  # a DTensor names its mesh among them too
                yield from plain_parts(part)
    elif tensor.layout == torch.strided:
        if not tensor.is_meta and tensor.numel():
            yield tensor.detach()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor.detach()._indices(), tensor.detach()._values())
    else:
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        where = (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
        yield from (*where, tensor.detach().values())


def _octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in a row, so placed that they can be read as words."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    row = tensor.contiguous().view(-1).view(torch.uint8)
    return row if row.storage_offset() % WIDTH == 0 or len(row) < SMALL else row.clone()


def _words(row: list[Tensor]) -> Tensor:
    """Bytes of several tensors as words, filled up with zeros to whole blocks."""
    length = sum(map(len, row))
    block = WIDTH * (BLOCK if length > WIDTH * BLOCK else 1)
    filler = row[0].new_zeros(-length % block)
    return torch.cat([*row, filler]).view(torch.int64)


def _sum(words: Tensor) -> Tensor:
    """() of whole blocks of words, or of less than one."""
    if len(words) <= BLOCK:
        return _weighted(words)
    sums = words.view(-1, ROWS, COLUMNS).sum(1)
    return _weighted((sums ^ sums >> 32).mul_(weights(COLUMNS, words.device)).sum(1))


def _weighted(words: Tensor) -> Tensor:
    """() the sum of words, each times a weight of its own."""
    return (words ^ words >> 32).mul_(weights(len(words), words.device)).sum()


def weights(count: int, device: torch.device) -> Tensor:
    """(count,) odd pseudo-random numbers of 64 bits, the same on every device."""
    known = 1 << (count - 1).bit_length() if count else 1
    return _weights(known, device)[:count]


@functools.lru_cache(maxsize=32)
def _weights(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return mix(torch.arange(1, count + 1, device=device) * INCREMENT) | 1

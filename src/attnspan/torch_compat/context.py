"""``with context_parallel(mesh, buffers=...)``: buffers are shards inside, SDPA is context parallel.

A buffer is cut in place, so that every reference to the tensor sees the shard: its data are exchanged for this rank's
part, and exchanged back. Nothing is written to the memory of the whole, which is why buffers may be views of one
another (inputs and labels that are slices of one tensor), and why restoring costs nothing.

[Note: versions] Autograd counts changes in place. Both exchanges count as one, so that a backward pass that needs the
buffer as it was raises instead of reading the other one.

[Note: gradients of buffers] A leaf that requires gradients gets the gradient of its part; when the leaf is whole again,
so is the gradient, with zeros at what other ranks own: the sum over ranks is that of one device. A gradient that it had
before is cut and restored with it; if another one is there by then, or none, it was cleared inside. (Zeroed in place,
it is so for this rank's part alone.) A tensor that was computed has no such place to keep a gradient and is refused;
`_context_parallel_shard` cuts it out of place.

[Note: overwritten] DistributedDataParallel sends rank 0's registered buffers to all ranks before a forward pass, shards
or not. Autograd does not count that as a change in torch 2.13, and does in torch 2.11. So two things tell: a shard that
differs although nothing was counted, and one that has become rank 0's, number for number. (If that is one number
throughout, a program may have filled it, and it is let pass.) To look is to wait for a GPU, so there it is done ever
more rarely, after the 1st, 2nd, 4th, 8th ... context of a mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from attnspan.errors import ShardError
from attnspan.masks.versions import version_of
from attnspan.parallel.session import ContextParallel
from attnspan.torch_compat.errors import ShardRuntime
from attnspan.torch_compat.ranks import MeshRanks, Order, ranks_of
from attnspan.torch_compat.sharding import length_of, paired, part_of, part_on
from attnspan.transports.group import Group


@contextmanager
def context_parallel(
    mesh: Group,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Cut `buffers` in place along `buffer_seq_dims`; SDPA inside attends over the shards of all ranks.

    Forward and backward belong inside. The first buffer gives the length of the sequence, which may be any; without
    buffers, the first call of SDPA does, on shards in the mesh's order ([Note: order of sequences] in ranks.py). On
    leaving, by an exception too, all buffers are whole again but those in `no_restore_buffers`. The options
    (`_cp_options`, `set_rotate_method`) are read on entering.
    """
    ranks = ranks_of(mesh)
    given, dims = [] if buffers is None else buffers, [] if buffer_seq_dims is None else buffer_seq_dims
    pairs = list(paired(given, dims, "buffer_seq_dims").values())
    kept = _kept([buffer for buffer, _ in pairs], () if no_restore_buffers is None else no_restore_buffers)
    order = ranks.default(length_of(*pairs[0])) if pairs else Order(ranks.layout_of_shards())
    with ExitStack() as stack:
        if order.seq_len is not None:
            session = ranks.session(order.layout, order.seq_len)
            stack.enter_context(_cut(ranks, [Buffer(*pair, session) for pair in _once(pairs)], kept))
        stack.enter_context(ranks.ordered(order))
        yield


class Buffer:
    """A tensor that is to be a shard for a while: what it is and what it will be. Making one changes nothing yet."""

    def __init__(self, tensor: Tensor, dim: int, session: ContextParallel) -> None:
        if tensor.requires_grad and not tensor.is_leaf:
            raise ShardRuntime(
                f"buffers: a tensor of shape {tuple(tensor.shape)} was computed and requires gradients, so it cannot "
                "be cut in place; use _context_parallel_shard(mesh, [tensor], [dim]), or compute it inside"
            )
        self.tensor, self.dim, self.session = tensor, dim, session
        self.whole, self.grad = tensor.data, tensor.grad
        with torch.no_grad():
            self.part = part_of(tensor, dim, session)
            self.grad_part = None if tensor.grad is None else part_of(tensor.grad, dim, session).clone()
        self.version = 0  # once it is cut

    def cut(self) -> None:
        """Be a shard. See [Note: versions] and [Note: gradients of buffers]."""
        self.tensor.grad = None
        self.tensor.data = self.part
        increment_version(self.tensor)
        self.tensor.grad = self.grad_part
        self.version = self._counted

    def restore(self) -> None:
        """Be whole again, the gradient too. See [Note: gradients of buffers]."""
        grad, self.tensor.grad = self.tensor.grad, None
        self.tensor.data = self.whole
        increment_version(self.tensor)
        if grad is None:
            return
        whole = self._spread(grad)
        if self.grad is not None and (grad is self.grad_part or grad.requires_grad):
            was = part_of(self.grad, self.dim, self.session)
            whole = whole + (self.grad - self._spread(was))  # what it was at the others' positions
        self.tensor.grad = whole

    def overwritten(self) -> bool:
        """Whether the shard is another than it was cut to, and not by the program. See [Note: overwritten]."""
        now = self.tensor.detach()
        if now.shape != self.part.shape or not now.numel() or _same(now, self._on(self.session.rank)):
            return False
        if self._counted == self.version:
            return True
        return _same(now, self._on(0)) and not _same(now, now[(0,) * now.dim()].expand_as(now))

    def _on(self, rank: int) -> Tensor:
        with torch.no_grad():
            return part_on(rank, self.whole, self.dim, self.session)

    @property
    def _counted(self) -> int:
        return version_of(self.tensor)

    def _spread(self, grad: Tensor) -> Tensor:
        whole = torch.zeros_like(self.whole, requires_grad=True)
        with torch.enable_grad():
            (spread,) = torch.autograd.grad(part_of(whole, self.dim, self.session), whole, grad)
        return spread


@contextmanager
def _cut(ranks: MeshRanks, buffers: list[Buffer], kept: list[Tensor]) -> Iterator[None]:
    """The buffers are shards; then whole, but those that are kept as they are."""
    tensors = [buffer.tensor for buffer in buffers]
    for tensor in tensors:
        if _among(tensor, ranks.cut):
            raise ShardError(f"buffers: that of shape {tuple(tensor.shape)} is a shard already, in a context around")
    before, ranks.cut = ranks.cut, [*ranks.cut, *tensors]
    restored = [buffer for buffer in buffers if not _among(buffer.tensor, kept)]
    try:
        for buffer in buffers:
            buffer.cut()
        buffers.clear()  # the memory of what will not be whole again is free
        yield
        _check_kept(ranks, restored)
    finally:
        ranks.cut = before
        for buffer in restored:
            buffer.restore()


def _check_kept(ranks: MeshRanks, buffers: list[Buffer]) -> None:
    """Refuse shards that were overwritten. See [Note: overwritten]."""
    ranks.contexts += 1
    rarely = ranks.contexts & (ranks.contexts - 1)
    for buffer in buffers:
        if not (rarely and buffer.tensor.is_cuda) and buffer.overwritten():
            raise ShardError(
                f"buffers: that of shape {tuple(buffer.whole.shape)} was overwritten while it was a shard, as "
                "DistributedDataParallel does with registered buffers; use DistributedDataParallel(..., "
                "broadcast_buffers=False)"
            )


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same bit for bit."""
    return x.shape == y.shape and torch.equal(*(each.contiguous().view(torch.uint8) for each in (x, y)))


def _once(pairs: list[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    """Each tensor once: a batch may hold one under two names."""
    found: dict[int, tuple[Tensor, int]] = {}
    for tensor, dim in pairs:
        _, other = found.setdefault(id(tensor), (tensor, dim))
        if other != dim:
            raise ShardError(
                f"buffers: a tensor of shape {tuple(tensor.shape)} comes twice, with dims {other} and {dim}"
            )
    return list(found.values())


def _kept(buffers: list[Tensor], no_restore: Iterable[Tensor]) -> list[Tensor]:
    kept = list(no_restore)
    for tensor in kept:
        if not _among(tensor, buffers):
            raise ShardError("no_restore_buffers must be among buffers, got another tensor")
    return kept


def _among(tensor: Tensor, tensors: list[Tensor]) -> bool:
    """Whether it is one of them; `in` would compare numbers."""
    return any(tensor is other for other in tensors)

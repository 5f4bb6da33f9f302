"""Tensors on ranks, written out: random layouts, tensors of any dtype and shape, and what sharding means, by loops."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st

from attnspan.layouts import Balanced, Layout
from attnspan.layouts.run import Run
from attnspan.masks import Causal, Documents
from attnspan.parallel import ContextParallel
from attnspan.testing import loopback
from tests.layouts.strategies import layouts, lengths_of

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLES = [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*WHOLES, *UNSIGNED, *FLOATS, torch.complex64, torch.complex128]


@dataclass(frozen=True)
class Listed(Layout):
    """Any layout at all: for each batch row, the positions in the order of the shards; and every rank's token count."""

    order: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]

    @property
    def ranks(self):
        return len(self.counts)

    @property
    def rows(self):
        return len(self.order)

    def _shards(self, seq_len, row):
        cuts = pairwise(accumulate(self.counts, initial=0))
        return tuple(tuple(Run(p, p + 1) for p in self.order[row][a:b]) for a, b in cuts)


@st.composite
def listed(draw, seq_len, rows):
    """Arbitrary shards in arbitrary order, uneven and empty ones among them, each batch row in its own."""
    ranks = draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, seq_len), min_size=ranks - 1, max_size=ranks - 1)))
    order = tuple(tuple(draw(st.permutations(range(seq_len)))) for _ in range(rows))
    return Listed(order, tuple(b - a for a, b in pairwise([0, *cuts, seq_len])))


@st.composite
def balanced_rows(draw, seq_len, rows):
    """Balanced anew for the documents of each batch row."""
    mask = Causal() & Documents([draw(lengths_of(seq_len)) for _ in range(rows)])
    return Balanced(mask, ranks=draw(st.integers(1, 5)), chunk=draw(st.integers(1, 3)), per_row=True)


@dataclass(frozen=True)
class Case:
    """A whole tensor, where its sequence and its batch rows are, and a layout."""

    layout: Layout
    seq_len: int
    tensor: torch.Tensor
    dim: int
    batch_dim: int

    @property
    def ranks(self):
        return self.layout.ranks

    @property
    def where(self):
        return {"dim": self.dim, "batch_dim": self.batch_dim}

    def part(self, whole, rank):
        """A rank's tokens of a whole tensor, one by one."""
        rows = [self.layout.positions(self.seq_len, row)[rank] for row in range(self.layout.rows)]
        return self.each_row(whole, lambda x, row, dim: chosen(x, rows[row if len(rows) > 1 else 0], dim))

    def each_row(self, whole, do):
        """The whole with `do(part, row, dim of its sequence)` done to every batch row; without rows, at once."""
        dim, batch = self.dim % whole.dim(), self.batch_dim % whole.dim()
        if dim == batch:
            return do(whole, 0, dim)
        rows = [do(x, row, dim - (batch < dim)) for row, x in enumerate(whole.unbind(batch))]
        return torch.stack(rows, batch)


def chosen(x, positions, dim):
    return torch.stack([x.select(dim, p) for p in positions], dim) if positions else x.narrow(dim, 0, 0)


@st.composite
def cases(draw, dtypes=DTYPES):
    """Any layout of up to 5 ranks, any dtype, any number of dims, any of which is the sequence."""
    seq_len, rows = draw(st.integers(1, 9)), draw(st.integers(2, 3))
    plain = st.one_of(layouts(seq_len, draw(st.integers(1, 5))).filter(lambda x: x.rows == 1), listed(seq_len, 1))
    layout = draw(st.one_of(plain, listed(seq_len, rows), balanced_rows(seq_len, rows)))
    dims = draw(st.integers(1 + (layout.rows > 1), 4))
    shape = [draw(st.integers(0 if layout.rows == 1 else 1, 3)) for _ in range(dims)]
    dim, batch = draw(st.permutations(range(dims)))[:2] if dims > 1 else (0, 0)
    shape[batch], shape[dim] = layout.rows if layout.rows > 1 else rows, seq_len
    signs = draw(st.tuples(st.booleans(), st.booleans()))
    dim, batch = (d - dims if negative else d for d, negative in zip((dim, batch), signs, strict=True))
    tensor = numbers(shape, draw(st.sampled_from(dtypes)))
    if tensor.is_complex() and draw(st.booleans()):
        tensor = tensor.conj()  # lazily: the same memory
    elif tensor.dtype == torch.float64 and draw(st.booleans()):
        tensor = torch.complex(tensor, tensor).conj().imag  # negated as lazily
    if draw(st.booleans()) and tensor.dim() > 1:  # laid out otherwise in memory
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return Case(layout, seq_len, tensor, dim, batch)


def numbers(shape, dtype):
    """All different as far as the dtype allows; never NaN, which would not equal itself."""
    count = torch.arange(torch.Size(shape).numel())
    if dtype == torch.bool:
        return (count * 7 % 3 == 1).view(shape)
    if dtype.is_complex:
        return torch.complex(count.double(), -count.double() / 2).to(dtype).view(shape)
    return (count % 127).to(torch.float32 if dtype.itemsize == 1 else torch.float64).to(dtype).view(shape)


def same(x, y):
    """Equal in dtype, shape and every bit."""
    if (x.dtype, x.shape) != (y.dtype, y.shape) or not x.numel():  # nothing is contiguous whatever its strides are
        return (x.dtype, x.shape) == (y.dtype, y.shape)
    bits = [each.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in (x, y)]
    return torch.equal(*bits)


CAUSAL = Causal()


def on_ranks(case, do, mask=CAUSAL, through=lambda world: world):
    """`do(session, rank's own tensor)` on virtual ranks."""
    whole = case.tensor

    def rank(world):
        cp = ContextParallel(through(world), seq_len=case.seq_len, mask=mask, layout=case.layout)
        return do(cp, whole)

    return loopback(case.ranks).run(rank)

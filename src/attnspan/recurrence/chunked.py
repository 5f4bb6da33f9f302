"""Linear recurrences chunk by chunk, in plain torch: every chunk as an affine map of the state before it.

The law of a token, with decays as logarithms g <= 0 and the delta rule where beta is given::

    S = exp(g) * S                      a decay for the whole state, or one for each row (K channels)
    S = S + k (beta * (v - k' S))'      the delta rule; without beta:  S = S + k v'
    out = q' S

Unrolled over a chunk of C tokens all of it is matrix products. With sums of g over the tokens up to i (prefix), after j
(suffix) and between (j, i], and P_ij = q_i (exp(between) k_j) for j <= i::

    out = P v + (q exp(prefix)) S         after = exp(total) S + (k exp(suffix))' v

and for the delta rule, v is replaced by u - W S, where (1 + L) [u W] = beta [v, k exp(prefix)] and L is P with k for q
below the diagonal. So a chunk is a few tensors, which depend on the chunk alone: ``out = out0 + reads @ S`` and
``after = A S + B``, A a matrix for the delta rule, else a decay. Or the delta rule's are left as they are: then the
scan finds ``inner = u - W S``, and ``out = P inner + reads @ S`` (maps.py, [Note: factors]).

[Note: no division] Between tokens there is a product of factors exp(g) <= 1, and it is multiplied up, never divided
out: prefix sums become large after a strong decay, their differences are rounded, and where a gate is shut (g = -inf)
they are NaN. A decay that channels share is multiplied up for every pair of tokens. With a decay per channel, P does
not factor into q and k without exp(-g), which overflows. So P is put together by halves: between a block of tokens and
the next, queries decay from the border and keys to it. Two blocks and what is between them are a block of twice the
size, in which the later queries have decayed by the earlier block, and the earlier keys by the later one. In the end
these are the q exp(prefix) and k exp(suffix) of the chunk.

Shapes: n chunks, H heads, C tokens, K and V head dims; g is (n, H, C, 1) or (n, H, C, K), beta (n, H, C, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from attnspan.recurrence.backward import backward_once
from attnspan.recurrence.maps import Maps, joined

MAX_CHUNK = 64
"""Tokens of a chunk, at most."""

FACTORS_CHUNK = 32
"""The same where maps are factors and heads are narrow: a change of state then costs C * width, so that pairs are the
larger part sooner. With wide heads the states of all chunks fill memory, and pages of it take longer than products."""

CACHED = 2**18
"""Numbers of a tensor that are worked on together on a CPU, where larger ones leave its cache between operations."""

INVERTED, SOLVED = 32, 16
"""Tokens of a block whose triangle is inverted, by products above the second size, and row by row below it: larger ones
take longer to invert, smaller ones make small products."""

ONE_AT_A_TIME = Lock()
"""Held while torch solves: on CUDA it loads a library when it first does, and raises if two threads do so together."""


class RuleInputs(NamedTuple):
    """Tokens in the words of the law above; decay and beta may be missing."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    beta: Tensor | None

    def each(self, do: Callable[[Tensor], Tensor]) -> RuleInputs:
        """The same, with something done to every tensor."""
        decay, beta = (None if x is None else do(x) for x in (self.decay, self.beta))
        return RuleInputs(do(self.query), do(self.key), do(self.value), decay, beta)

    def split(self, count: int) -> list[RuleInputs]:
        """Parts of so many in the first dim, the last one shorter."""
        return [RuleInputs(*part) for part in zip(*(repeat(None) if x is None else x.split(count) for x in self))]  # noqa: B905


class Reads(NamedTuple):
    """How chunks read the states before them: ``out = own + reads @ state``.

    Where maps are factors, `own` is still to be multiplied by what goes through them: see [Note: factors] in maps.py.
    """

    own: Tensor
    reads: Tensor

    def read(self, state: Tensor, inner: Tensor | None) -> Tensor:
        """The output of tokens before heads, (n, C, H, V). Once: without gradients, it takes the place of `own`."""
        own = self.own if inner is None else self.own @ inner
        return _added(own, self.reads, state, in_place=not torch.is_grad_enabled()).transpose(1, 2)


def chunk_size(lengths: Tensor, width: int, factors: bool = False) -> int:
    """How many tokens a chunk has, for stretches of some lengths and a head dim: the power of two with the least work.

    A chunk costs its pairs, its reads of a state and its change of one: (C + width)^2, filled or not.

    >>> chunk_size(torch.tensor([4096]), 128), chunk_size(torch.tensor([3, 4, 5]), 16)
    (64, 4)
    """
    most = min(MAX_CHUNK, max(FACTORS_CHUNK, width // 2)) if factors else MAX_CHUNK
    sizes = [1 << power for power in range(most.bit_length())]
    return min(sizes, key=lambda size: (int(((lengths + size - 1) // size).sum()) * (size + width) ** 2, size))


def chunked(inputs: RuleInputs, factor: float = 1, factors: bool = False) -> tuple[list[Reads], Maps]:
    """How chunks read, some together, and all maps; of tokens before heads, (n, C, H, ...), where C is a power of two.

    Outputs are multiplied by a factor. Maps of delta rules may be kept as factors: see [Note: factors] in maps.py.
    """
    count = max(1, CACHED // inputs.key.shape[1:].numel()) if inputs.key.device.type == "cpu" else len(inputs.key)
    parts = inputs.split(count) if len(inputs.key) else [inputs]
    reads: list[Reads] = []

    def maps() -> Iterator[Maps]:
        for part in parts:
            read, found = _maps(part.each(_by_head), factor, factors)
            reads.append(read)
            yield found

    return reads, joined(maps(), len(inputs.key))


def _by_head(tokens: Tensor) -> Tensor:
    """(n, C, H, D) as (n, H, C, D)."""
    return tokens.transpose(1, 2).contiguous()


def _maps(inputs: RuleInputs, factor: float, factors: bool) -> tuple[Reads, Maps]:
    query, key, value, decay, beta = inputs
    query = query if factor == 1 else query * factor
    decay = key.new_zeros(*key.shape[:3], 1) if decay is None else decay
    if beta is None:
        (pairs,), (reads,), kept, total = _decayed([query], key, decay)
        return Reads(pairs @ value, reads), Maps(total.mT, kept.mT @ value)
    (pairs, among), (reads, known), kept, total = _decayed([query, key], key, decay)
    new, old = TriangularSolve.apply(beta * among, beta * value, -beta * known)
    if factors:
        return Reads(pairs, reads), Maps(total.mT, left=kept, right=old, new=new)
    a = kept.mT @ old
    a.diagonal(dim1=-2, dim2=-1).add_(total.squeeze(2))
    return Reads(pairs @ new, _added(reads, pairs, old)), Maps(a, kept.mT @ new)


def _added(tensor: Tensor, left: Tensor, right: Tensor, in_place: bool = False) -> Tensor:
    """``tensor + left @ right`` in one operation."""
    flat, left, right = (x.flatten(0, 1) for x in (tensor, left, right))
    return torch.baddbmm(flat, left, right, out=flat if in_place else None).view_as(tensor)


class Decayed(NamedTuple):
    """For each of some tensors in the place of q: P (n, H, C, C), and the tensor decayed from the beginning of the
    chunk. Then keys decayed to its end, and the factor of the whole chunk, (n, H, 1, K or 1).
    """

    pairs: Sequence[Tensor]
    rows: Sequence[Tensor]
    key: Tensor
    total: Tensor


def _decayed(rows: list[Tensor], key: Tensor, decay: Tensor) -> Decayed:
    if decay.shape[-1] > 1:
        return _by_halves(rows, key, decay.exp())
    weights = DecayWeights.apply(decay)
    arriving, leaving = decay[:, :, :1].exp() * weights[..., :1], weights[:, :, -1:].mT
    pairs = [(row @ key.mT) * weights for row in rows]
    return Decayed(pairs, [row * arriving for row in rows], key * leaving, arriving[:, :, -1:])


class DecayWeights(torch.autograd.Function):
    """A decay (n, H, C, 1) that channels share, multiplied up between tokens: (n, H, C, C), 0 above the diagonal."""

    apply: ClassVar[Callable[[Tensor], Tensor]]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, decay: Tensor) -> Tensor:
        one = decay.new_ones(decay.shape[2], decay.shape[2])
        weights = torch.addcmul(one.triu(), decay.exp(), one.tril(-1)).cumprod(2).tril_()
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @backward_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        later: Tensor = (grad * weights).flip(2).cumsum(2).flip(2)  # the sums over this token and those after it
        return later.tril_(-1).sum(-1, keepdim=True)


def _by_halves(rows: list[Tensor], key: Tensor, factor: Tensor) -> Decayed:
    pairs, found, key, total = DecayByHalves.apply(key, factor, *rows)
    return Decayed(pairs.unbind(3), found.unbind(3), key, total)


class _Tensors(Protocol):
    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]: ...


class DecayByHalves(torch.autograd.Function):
    """See [Note: no division]: of keys, factors and R rows, what `Decayed` has: pairs (n, H, C, R, C), rows of R too.

    Blocks of tokens are (n, H, blocks, tokens, ...). Of each step, what its products are made of is kept for backward.
    """

    apply: ClassVar[_Tensors]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, key: Tensor, factor: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        pairs = torch.diag_embed(torch.stack([(row * key).sum(-1) for row in rows], 2), dim1=2, dim2=4)
        reads, kept, total = key.new_empty(*key.shape[:3], len(rows), key.shape[3]), key.clone(), factor
        for row, read in zip(rows, reads.unbind(3), strict=True):
            torch.mul(row, factor, out=read)
        saved, size = [key, factor, *rows], 1
        while size < key.shape[2]:
            early, late = _halves(kept, size)[0], _halves(reads, size)[1]
            leaving, arriving = (_copied(x) for x in (early, late)) if any(ctx.needs_input_grad) else (early, late)
            first, second = total[:, :, ::2, None], total[:, :, 1::2, None]
            found = leaving @ arriving.flatten(3, 4).mT  # in this order it is faster where blocks are small
            _between(pairs, size).copy_(found.mT.unflatten(3, (size, -1)))
            torch.mul(arriving, first.unsqueeze(3), out=late)
            torch.mul(leaving, second, out=early)
            saved += [leaving, arriving, first, second]
            total, size = (first * second).squeeze(3), 2 * size
        ctx.save_for_backward(*saved)
        return pairs, reads, kept, total

    @staticmethod
    @backward_once
    def backward(ctx: Any, d_pairs: Tensor, d_reads: Tensor, d_key: Tensor, d_total: Tensor) -> tuple[Tensor, ...]:
        saved, d_reads, d_kept = list(ctx.saved_tensors), d_reads.clone(), d_key.clone()
        size = d_kept.shape[2]
        while size > 1:
            size //= 2
            *saved, leaving, arriving, first, second = saved
            early, late, d_total = _halves(d_kept, size)[0], _halves(d_reads, size)[1], d_total.unsqueeze(3)
            d_between = _between(d_pairs, size).flatten(3, 4)
            d_first = d_total * second + (late * arriving).sum((3, 4)).unsqueeze(3)
            d_second = d_total * first + (early * leaving).sum(3, keepdim=True)
            torch.addcmul((d_between @ leaving).view_as(late), late, first.unsqueeze(3), out=late)
            torch.addcmul(d_between.mT @ arriving.flatten(3, 4), early, second, out=early)
            d_total = torch.stack([d_first, d_second], 3).flatten(2, 4)
        (key, factor, *rows), d_rows = saved, []
        for row, d_read, own in zip(rows, d_reads.unbind(3), d_pairs.diagonal(dim1=2, dim2=4).unbind(2), strict=True):
            d_total = torch.addcmul(d_total, d_read, row)
            d_kept.addcmul_(own.unsqueeze(-1), row)
            d_rows.append(torch.addcmul(d_read * factor, own.unsqueeze(-1), key))
        return d_kept, d_total, *d_rows


def _halves(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Every other block of so many tokens, from the first and from the second."""
    early, late = tokens.unflatten(2, (-1, 2, size)).unbind(3)
    return early, late


def _copied(view: Tensor) -> Tensor:
    return view.clone(memory_format=torch.contiguous_format)


def _squares(pairs: Tensor, size: int) -> Tensor:
    """The squares of such blocks along the diagonal of (n, H, C, ..., C): (n, H, C / size, size, ..., size)."""
    by_block: Tensor = pairs.unflatten(-1, (-1, size)).unflatten(2, (-1, size))
    return by_block.diagonal(dim1=2, dim2=-2).movedim(-1, 2)


def _between(pairs: Tensor, size: int) -> Tensor:
    """The pairs of each second block with the first before it."""
    return _squares(pairs, 2 * size)[:, :, :, size:, ..., :size]


class TriangularSolve(torch.autograd.Function):
    """``(1 + L)^-1 right`` of some tensors, where L is what `lower` has below the diagonal.

    Blocks of tokens on the diagonal are inverted, and the others substituted block by block: few products, and large.
    """

    apply: ClassVar[_Tensors]  # torch's, which it does not annotate

    @staticmethod
    def forward(ctx: Any, lower: Tensor, *right: Tensor) -> tuple[Tensor, ...]:
        inverse = _inverted(lower, min(INVERTED, lower.shape[-1]))
        solved = [_substituted(lower, inverse, each) for each in right]
        ctx.save_for_backward(lower, inverse, *solved)
        return tuple(solved)

    @staticmethod
    @backward_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        lower, inverse, *solved = ctx.saved_tensors
        d_right = [_substituted(lower.mT, inverse.mT, grad, upwards=True) for grad in grads]
        d_lower, *more = (each @ found.mT for each, found in zip(d_right, solved, strict=True))
        return -sum(more, start=d_lower).tril(-1), *d_right


def _inverted(lower: Tensor, size: int) -> Tensor:
    """The inverses of blocks of so many tokens, (n, H, C / size, size, size): of larger ones by those of halves."""
    if size <= SOLVED:
        blocks = _squares(lower, size)
        one = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(blocks)
        with ONE_AT_A_TIME:
            found: Tensor = torch.linalg.solve_triangular(blocks, one, upper=False, unitriangular=True)
        return found
    half = size // 2
    halves = _inverted(lower, half)
    first, second = halves[:, :, ::2], halves[:, :, 1::2]
    inverse = lower.new_zeros(*first.shape[:3], size, size)
    inverse[..., :half, :half], inverse[..., half:, half:] = first, second
    inverse[..., half:, :half] = -(second @ (_between(lower, half) @ first))
    return inverse


def _substituted(triangle: Tensor, inverse: Tensor, right: Tensor, upwards: bool = False) -> Tensor:
    """Block by block: what is already solved is taken from the right side of the next one."""
    triangle, inverse, rest = (x.flatten(0, 1) for x in (triangle, inverse, right))
    solved, (count, size) = torch.empty_like(rest), inverse.shape[1:3]
    for i in reversed(range(count)) if upwards else range(count):
        rows = slice(i * size, (i + 1) * size)
        done = slice((i + 1) * size, None) if upwards else slice(i * size)
        known = rest[:, rows]
        if i != (count - 1 if upwards else 0):
            known = torch.baddbmm(known, triangle[:, rows, done], solved[:, done], alpha=-1)
        solved[:, rows] = inverse[:, i] @ known
    return solved.view_as(right)

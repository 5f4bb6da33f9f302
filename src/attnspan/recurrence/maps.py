"""Affine maps of states, one after another: ``after = a @ before + b``, or ``a * before + b`` where a is a decay.

A chunk of a delta rule decays its state and adds to it what its tokens find there: a is a decay plus a product. That
may be multiplied out, or kept as two factors, which is less work before the scan and one product more in every step::

    inner = new + right @ before          after = a * before + left' inner + b

[Note: factors] Multiplied out, A and what outputs read take two products of every chunk, and the scan one; on CUDA a
Triton program takes all steps of it (programs.py). CPUs wait for products: there factors are kept, and ``inner`` is
what outputs need of the state besides. Where a rank's stretches are needed as maps, their products are needed too, and
are multiplied out.

Shapes: n chunks, H heads, (K, V) a state, C tokens; a is (n, H, K, K), or anything that (n, H, K, V) can be multiplied
by; b is (n, H, K, V), left and right (n, H, C, K), new and inner (n, H, C, V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attnspan.recurrence import programs


class Maps(NamedTuple):
    """The tensors of maps: see above. What is not given is not added."""

    a: Tensor
    b: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    new: Tensor | None = None

    def inner(self, state: Tensor, new: Tensor | None) -> Tensor:
        """What goes through the factors, given the states before maps; in the place of `new`, which may be none."""
        assert self.right is not None, "maps that are multiplied out have no factors"
        return torch.bmm(self.right, state) if new is None else torch.baddbmm(new, self.right, state, out=new)


class Passed(NamedTuple):
    """What a scan leaves behind at every map: the state before it (of gradients, that after it), and its ``inner``."""

    states: Tensor
    inner: Tensor | None = None

    @staticmethod
    def empty(maps: Maps, states: Tensor) -> Passed:
        """Room for it, for states like these; what goes through factors begins with what is new."""
        inner = None if maps.new is None else maps.new.clone()
        return Passed(states.new_empty(len(maps.a), *states.shape[1:]), inner)


T = TypeVar("T", Maps, Passed)


def split(tensors: T, sizes: Sequence[int]) -> list[T]:
    """Parts of so many maps."""
    parts = [repeat(None) if x is None else x.split(list(sizes)) for x in tensors]
    return [type(tensors)(*part) for part in zip(*parts)]  # noqa: B905


def joined(parts: Iterable[T], count: int) -> T:
    """Parts of so many maps in all. Those without gradients are written where they belong while they are cached."""
    if torch.is_grad_enabled():
        every = list(parts)
        by_kind = zip(*every, strict=True)
        return type(every[0])(*(None if x[0] is None else torch.cat(x) for x in by_kind))  # type: ignore[arg-type]
    whole, start = None, 0
    for part in parts:
        whole = whole or _each(part, lambda x: x.new_empty(count, *x.shape[1:]))
        for place, x in zip(whole, part, strict=True):
            if place is not None and x is not None:
                place[start : start + len(x)] = x
        start += len(part[0])
    assert whole is not None, "there is a part, if an empty one"
    return whole


def by_head(tensors: T) -> T:
    """Heads as maps of their own."""
    return _each(tensors, lambda x: x.flatten(0, 1))


def _each(tensors: T, do: Callable[[Tensor], Tensor]) -> T:
    return type(tensors)(*(None if x is None else do(x) for x in tensors))  # type: ignore[arg-type]


@dataclass(frozen=True)
class AffineMaps:
    """What can be done with maps whose a is a matrix, multiplied out or not, or a decay."""

    matrix: bool
    exact: bool = True  # where Triton multiplies: as float32 or as TF32

    def act(self, a: Tensor, state: Tensor) -> Tensor:
        """A of a state."""
        return a @ state if self.matrix else a * state

    def add(self, into: Tensor, a: Tensor, state: Tensor) -> None:
        """Add A of a state."""
        if self.matrix:
            into.view(-1, *into.shape[2:]).baddbmm_(a.flatten(0, 1), state.flatten(0, 1))
        else:
            into.addcmul_(a, state)

    def transposed(self, a: Tensor) -> Tensor:
        return a.mT if self.matrix else a

    def outer(self, grad: Tensor, state: Tensor) -> Tensor:
        """The gradient of A, from those of what it made of states; of a decay before it is summed to its shape."""
        return grad @ state.mT if self.matrix else grad * state

    def apply(self, maps: Maps, state: Tensor, out: Tensor, inner: Tensor | None = None) -> None:
        """What maps make of states, and what goes through factors, into parts of tensors; heads are maps too."""
        if self.matrix and maps.right is None:
            torch.bmm(maps.a, state, out=out) if maps.b is None else torch.baddbmm(maps.b, maps.a, state, out=out)
        else:
            torch.mul(maps.a, state, out=out) if maps.b is None else torch.addcmul(maps.b, maps.a, state, out=out)
        if maps.left is not None:
            torch.baddbmm(out, maps.left.mT, maps.inner(state, inner), out=out)

    def products(self, maps: Maps, state: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of A: those before each map, and of all of a stretch, for stretches with such states."""
        count, heads, rows = state.shape[:3]
        one = torch.eye(rows, dtype=state.dtype, device=state.device) if self.matrix else maps.a.new_ones(1)
        whole = one.expand(count, heads, *(one.shape if self.matrix else maps.a.shape[2:]))
        before = whole.new_empty(len(maps.a), *whole.shape[1:])
        return before, self.scan(maps._replace(b=None, new=None), whole, sizes, Passed(before))

    def compose(
        self, maps: Maps, zero: Tensor, sizes: Sequence[int], states: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The `products` of stretches, and where each ends if it begins with zero; `states` are those before maps."""
        if self.matrix and sizes and programs.can_scan(maps.a, zero):
            return programs.compose(self._scanned(maps), zero, tuple(sizes), states)
        return self.products(maps, zero, sizes), self.scan(maps, zero, sizes, Passed(states))

    def _scanned(self, maps: Maps) -> programs.Scanned:
        return programs.Scanned(maps.a, maps.b, self.matrix, self.exact)

    def scan(self, maps: Maps, state: Tensor, sizes: Sequence[int], passed: Passed) -> Tensor:
        """The states at the ends, for maps that follow each other step by step."""
        ends = state.clone(memory_format=torch.contiguous_format)
        if not sizes:
            return ends
        if maps.left is None and programs.can_scan(maps.a, state):
            return programs.scan(self._scanned(maps), state, tuple(sizes), passed.states)
        steps, last = _by_step(passed.states, sizes), ends.flatten(0, 1)
        steps[0].copy_(last[: len(steps[0])])
        places = [out for now, then in pairwise([*steps, last[:0]]) for out in (then, last[len(then) : len(now)])]
        into = [out for out in places if len(out)]
        counts = [len(out) for out in into]  # of maps after which stretches go on, or that end them
        for each, at, out in zip(split(by_head(maps), counts), split(by_head(passed), counts), into, strict=True):
            self.apply(each, at.states, out, at.inner)
        return ends

    def scan_back(self, maps: Maps, ends: Tensor, sizes: Sequence[int], passed: Passed) -> Tensor:
        """Gradients at the beginnings, from those at the ends. Of maps, `b` and `new` are the gradients of the states
        before them and of their ``inner``, as such.
        """
        begins = ends.clone(memory_format=torch.contiguous_format)
        if not sizes:
            return begins
        if maps.left is None and programs.can_scan(maps.a, ends):
            return programs.scan(self._scanned(maps), ends, tuple(sizes), passed.states, back=True)
        steps, first, more = _by_step(passed.states, sizes), ends.flatten(0, 1), 0
        counts, into = [len(step) for step in steps], [begins.flatten(0, 1), *steps]
        back = maps._replace(left=maps.right, right=maps.left)
        if maps.left is None:
            back = maps._replace(a=self.transposed(maps.a))
        by_step = zip(split(by_head(back), counts), split(by_head(passed), counts), into, strict=False)
        for each, at, out in reversed(list(by_step)):
            at.states[more:] = first[more : len(at.states)]  # these end here
            more = len(at.states)
            self.apply(each, at.states, out[:more], at.inner)
        return begins


def _by_step(tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The part of each step, heads as maps of their own."""
    steps: Sequence[Tensor] = tensor.flatten(0, 1).split([size * tensor.shape[1] for size in sizes])
    return steps

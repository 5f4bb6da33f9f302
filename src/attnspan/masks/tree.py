"""A tree of token runs: each sees its ancestors, and itself causally.

Shared prefixes in training and candidate trees in speculative decoding are this mask. Node i holds
`lengths[i]` tokens, the nodes stand one after another in the sequence, and `parents[i]` is a node's parent or
-1 for a root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from attnspan.errors import MaskError, integers
from attnspan.masks.algebra import joined
from attnspan.masks.band import Band, tight
from attnspan.masks.mask import Mask, Rule, Space
from attnspan.masks.spans import Span, merged


@dataclass(frozen=True, slots=True, init=False)
class Tree(Mask):
    """A token sees all tokens of its node's ancestors and the earlier ones of its own node.

    Without `lengths` every node is one token.

    >>> print(Tree([-1, 0, 0], lengths=[2, 2, 1]))  # a prompt with two continuations
    Tree([-1, 0, 0], [2, 2, 1])
    █ · · · ·
    █ █ · · ·
    █ █ █ · ·
    █ █ █ █ ·
    █ █ · · █
    """

    parents: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    def __init__(self, parents: Sequence[int], lengths: Sequence[int] | None = None):
        parents = integers("parents", parents, at_least=-1, error=MaskError)
        ones = [1] * len(parents)
        lengths = integers("lengths", ones if lengths is None else lengths, at_least=1, error=MaskError)
        if not parents:
            raise MaskError("parents must hold at least one node, got an empty list; a lone root is [-1]")
        if len(lengths) != len(parents):
            raise MaskError(f"lengths must hold one per node of parents ({len(parents)}), got {len(lengths)}")
        for node, parent in enumerate(parents):
            if parent >= len(parents):
                raise MaskError(f"parents[{node}] must be a node below {len(parents)} or -1, got {parent}")
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "lengths", lengths)
        _topological(parents)

    @property
    def natural_len(self) -> int | None:
        return sum(self.lengths)

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        total = sum(self.lengths)
        if q_len != total or kv_len != total:
            raise MaskError(
                f"lengths must sum to q_len ({q_len}) and kv_len ({kv_len}), "
                f"got {len(self.lengths)} nodes with sum {total}"
            )

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        return joined(band for band in self._node_bands() if band is not None)

    def _node_bands(self) -> Iterable[Band | None]:
        # By key: those who see a node are its descendants, and a subtree is one span where nodes stand in the
        # order of a walk. So a tree of n nodes is about 2 n bands, however deep.
        edges = list(accumulate(self.lengths, initial=0))
        below: list[list[Span]] = [[] for _ in self.parents]
        for node in reversed(_topological(self.parents)):
            start, stop = edges[node], edges[node + 1]
            descendants = merged(below[node])
            yield tight(start, stop, start, stop, hi=0)
            for q0, q1 in descendants:
                yield tight(q0, q1, start, stop)
            if self.parents[node] >= 0:
                below[self.parents[node]] += [(start, stop), *descendants]

    def _rule(self, space: Space) -> Rule:
        # Numbered in the order of a walk, a node's descendants follow it without a gap, up to `last`.
        number, last = (numbers.to(space.device) for numbers in self._walk())
        return lambda b, h, q, k: (
            (number[k] <= number[q]) & (last[k] >= number[q]) & ((number[k] < number[q]) | (k <= q))
        )

    def _walk(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token, its node's number in a depth-first walk and the last number below that node."""
        sizes = [1] * len(self.parents)
        order = _topological(self.parents)
        for node in reversed(order):
            if self.parents[node] >= 0:
                sizes[self.parents[node]] += sizes[node]
        number = [0] * len(sizes)
        free = {-1: 0}  # the next free number below each node
        for node in order:
            parent = self.parents[node]
            number[node] = free[parent]
            free[parent] += sizes[node]
            free[node] = number[node] + 1
        lengths = torch.tensor(self.lengths, device="cpu")
        first = torch.tensor(number, device="cpu")
        last = first + torch.tensor(sizes, device="cpu") - 1
        return first.repeat_interleave(lengths), last.repeat_interleave(lengths)

    def __repr__(self) -> str:
        return f"Tree({list(self.parents)}, {list(self.lengths)})"


def _topological(parents: tuple[int, ...]) -> list[int]:
    """Every node after its parent; a cycle is refused."""
    order: list[int] = []
    state = [0] * len(parents)  # 0 new, 1 on the path now, 2 placed
    for node in range(len(parents)):
        path = []
        while node >= 0 and state[node] == 0:
            state[node] = 1
            path.append(node)
            node = parents[node]
        if node >= 0 and state[node] == 1:
            raise MaskError(f"parents must form a tree, got a cycle through node {node}; a root's parent is -1")
        for placed in reversed(path):
            state[placed] = 2
            order.append(placed)
    return order

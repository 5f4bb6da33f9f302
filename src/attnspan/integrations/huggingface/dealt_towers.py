"""Towers whose images are distributed over ranks: each rank computes some, and all ranks gather the results.

    rank r       runs the tower on images [N r / R, N (r + 1) / R), or on the first one if that is empty
    every rank   gathers the rows of all images

Backward sums the gradients of all ranks' tokens at the rank that computed the image. So the gradient of a tower's
parameters is divided differently between ranks, with the same sum: the mean over ranks is still that of one device.

[Note: what is dealt] The first tensor of a call has a row for each image, (N, ...), or one for each patch of all
images, (P, ...), together with a grid (N, 2) or (N, 3) that gives the patches of each image. All other tensors have N
or P rows. A single image, and images in a single row, are computed by every rank.

[Note: by themselves] The result of an image must not depend on other images. Before a tower is first distributed, it
runs on its first image, and on its first two, in eval mode and without gradients: the rows of the first must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from attnspan.errors import ModelError
from attnspan.parallel.moves import GatheredTokens
from attnspan.transports import Transport


@dataclass(frozen=True)
class TowerCall:
    """What a tower is called with, and the rows of its first tensor that each image has."""

    path: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    rows: list[int]

    @classmethod
    def of(cls, path: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> TowerCall | None:
        """A call that can be dealt; None if it is of one image, or of one row. See [Note: what is dealt]."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if not tensors:
            return None
        first, grids = tensors[0], [each for each in tensors[1:] if each.dim() == 2 and each.shape[1] in (2, 3)]
        counts = [each.prod(1).tolist() for each in grids if not each.is_floating_point()]
        alone = [len(first)] if first.dim() == 2 else [1] * len(first)
        rows = next((each for each in counts if sum(each) == len(first)), alone)
        return cls(path, args, kwargs, rows) if len(rows) > 1 else None

    def images(self, start: int, stop: int) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments for some of the images."""
        many, patches = len(self.rows), sum(self.rows)
        before, behind = sum(self.rows[:start]), sum(self.rows[:stop])

        def cut(name: object, value: object) -> object:
            if isinstance(value, Tensor) and value.dim() and len(value) == patches:
                return value[before:behind]
            if isinstance(value, Tensor) and value.dim() and len(value) == many:
                return value[start:stop]
            if any(isinstance(each, Tensor) for each in tree_leaves(value)) or isinstance(value, list | tuple):
                shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ModelError(
                    f"towers must be 'whole': {self.path} is called with {name} of {shown}, which is not a row for "
                    f"each of {many} images or {patches} patches"
                )
            return value

        args = tuple(cut(f"argument {place}", value) for place, value in enumerate(self.args))
        return args, {name: cut(name, value) for name, value in self.kwargs.items()}


def deal_tower(path: str, tower: nn.Module, transport: Transport) -> None:
    """Let a tower compute this rank's images, and return all, until `whole_tower`."""
    share: list[Fraction] = []  # of each output, the rows for each row that goes in; once they are known

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        original = MethodType(type(self).forward, self)
        call = TowerCall.of(path, args, kwargs)
        if call is None:
            return original(*args, **kwargs)
        if not share:
            share.extend(_shares(self, original, call))
        return _dealt(original, call, share, transport)

    vars(tower)["forward"] = MethodType(forward, tower)


def whole_tower(tower: nn.Module) -> None:
    """Let a tower run as it is."""
    vars(tower).pop("forward", None)


def _dealt(original: Callable[..., object], call: TowerCall, share: Sequence[Fraction], transport: Transport) -> object:
    ranks, many = transport.ranks, len(call.rows)
    edges = [many * rank // ranks for rank in range(ranks + 1)]
    patches = [sum(call.rows[start:stop]) for start, stop in pairwise(edges)]
    start, stop = edges[transport.rank], edges[transport.rank + 1]
    empty = start == stop
    args, kwargs = call.images(0, 1) if empty else call.images(start, stop)
    computed = sum(call.rows[:1]) if empty else patches[transport.rank]

    def gathered(own: Tensor) -> Tensor:
        rows = next(following)
        if len(own) != rows * computed:
            raise ModelError(
                f"towers must be 'whole': {call.path} returns {len(own)} rows for {computed}, and for others {rows} "
                "times as many"
            )
        sizes = [int(rows * each) for each in patches]
        own = own[:0] if empty else own  # none of it: but every rank calls the tower, and its parameters have gradients
        full: Tensor = GatheredTokens.apply(own.contiguous(), transport, sizes, f"images of {call.path}")
        return full

    output, following = original(*args, **kwargs), iter(share)
    return tree_map_only(Tensor, gathered, output)


def _shares(tower: nn.Module, original: Callable[..., object], call: TowerCall) -> list[Fraction]:
    """The rows of each output for each row that goes in. See [Note: by themselves]."""
    modes = {module: module.training for module in tower.modules()}
    tower.eval()
    try:
        with torch.no_grad():
            one, two = (_tensors(original(*args, **kwargs)) for args, kwargs in map(call.images, (0, 0), (1, 2)))
    finally:
        for module, mode in modes.items():
            module.training = mode
    first, both = call.rows[0], sum(call.rows[:2])
    if len(one) != len(two) or not all(map(_is_part, one, two, [first] * len(one), [both] * len(one))):
        raise ModelError(
            f"towers must be 'whole': what {call.path} ({type(tower).__name__}) computes of an image is not rows of "
            "its own, or depends on the other images"
        )
    return [Fraction(len(each), first) for each in one]


def _is_part(one: Tensor, two: Tensor, first: int, both: int) -> bool:
    """Whether rows of the first of two images are those of it alone."""
    if not one.dim() or not one.numel() or len(two) * first != len(one) * both or one.shape[1:] != two.shape[1:]:
        return False
    bound = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
    return bool(((two[: len(one)] - one).abs() <= bound * one.abs().amax()).all())


def _tensors(output: object) -> list[Tensor]:
    return [each for each in tree_leaves(output) if isinstance(each, Tensor)]

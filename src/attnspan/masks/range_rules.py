"""What an operation makes of ranges of numbers: interval arithmetic, operation by operation.

[Note: the same arithmetic] A rule calls the operation itself on the ends of ranges, on tensors of the dtypes that it is
called on pair by pair. So types are promoted and results rounded as they are there; and because rounding keeps order, a
result lies between those of the ends.

[Note: unsure] Where a pair may raise (a lookup beyond its table, a division by zero), overflow or be NaN, a range is
not `sure`, and its box is left to be asked pair by pair. What is asked raises what it always did.

An operation without a rule gives any value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.masks.graphs import CONVERT

aten = torch.ops.aten


class Range(NamedTuple):
    """Values between which a number lies, both included; see [Note: unsure]."""

    low: Tensor
    high: Tensor
    sure: Tensor | None = None


def low(x: Any) -> Any:
    """The lower end of a range; a constant is its own."""
    return x.low if isinstance(x, Range) else x


def high(x: Any) -> Any:
    """The upper end of a range."""
    return x.high if isinstance(x, Range) else x


Rule = Callable[..., Range | None]
"""(operation, *arguments, **more) -> the range of its results, or None where nothing is known."""


def _monotone(*signs: int) -> Rule:
    """Results rise (1) or fall (-1) with each argument."""

    def rule(op: Any, *args: Any, **kwargs: Any) -> Range | None:
        if len(args) > len(signs):
            return None
        ends = [(low(x), high(x))[::sign] for x, sign in zip(args, signs, strict=False)]
        least, greatest = zip(*ends, strict=True)
        return not_nan(Range(op(*least, **kwargs), op(*greatest, **kwargs)))

    return rule


def _extreme_at_corners(op: Any, left: Any, right: Any, **kwargs: Any) -> Range:
    """Results rise or fall with each argument, this way or that way depending on the other."""
    found = [op(x, y, **kwargs) for x, y in product((low(left), high(left)), (low(right), high(right)))]
    return not_nan(Range(reduce(torch.minimum, found), reduce(torch.maximum, found)))


def _computed(rule: Rule) -> Rule:
    """Arithmetic: sure where results are finite and cannot overflow."""

    def checked(op: Any, *args: Any, **kwargs: Any) -> Range | None:
        found = rule(op, *args, **kwargs)
        if found is None or kwargs.get("alpha", 1) != 1:
            return None
        dtype = found.low.dtype
        wide = found if dtype.is_floating_point else rule(op, *map(_doubled, args), **kwargs)
        return None if wide is None else surely(found, _fits(wide, dtype))

    return checked


def _doubled(x: Any) -> Any:
    if isinstance(x, Range):
        return Range(x.low.double(), x.high.double())
    return x.double() if isinstance(x, Tensor) else x


def _fits(wide: Range, dtype: torch.dtype) -> Tensor:
    """Whether a dtype holds what was computed, with room to spare where that was rounded."""
    if dtype.is_floating_point:
        return wide.low.isfinite() & wide.high.isfinite()
    if dtype == torch.bool:
        return torch.ones_like(wide.low, dtype=torch.bool)
    return (wide.low >= torch.iinfo(dtype).min / 2) & (wide.high <= torch.iinfo(dtype).max / 2)


def surely(found: Range, sure: Tensor) -> Range:
    return found._replace(sure=sure if found.sure is None else found.sure & sure)


def not_nan(found: Range) -> Range:
    if not found.low.dtype.is_floating_point:
        return found
    return surely(found, ~(found.low.isnan() | found.high.isnan()))


def equal(op: Any, left: Any, right: Any) -> Range:
    always = aten.eq(low(left), high(right)) & aten.eq(high(left), low(right))
    return Range(always, aten.le(low(left), high(right)) & aten.ge(high(left), low(right)))


def unequal(op: Any, left: Any, right: Any) -> Range:
    return _negated(op, equal(op, left, right))


def _negated(op: Any, x: Any) -> Range:
    x = _truth(x)
    return Range(~high(x), ~low(x))


def _truth(x: Any) -> Any:
    """A number as a bool: whether it is not 0."""
    if not isinstance(low(x), Tensor):
        return bool(x)
    return x if low(x).dtype == torch.bool else unequal(None, x, 0)


def _of_truths(rule: Rule) -> Rule:
    """Of numbers taken as bools."""
    return lambda op, *args: rule(op, *map(_truth, args))


def _of_bools(rule: Rule) -> Rule:
    """Of bools; nothing is known of the bits of other numbers."""

    def bitwise(op: Any, *args: Any) -> Range | None:
        return rule(op, *args) if all(_dtype(low(x)) == torch.bool for x in args) else None

    return bitwise


def _absolute(op: Any, x: Any) -> Range:
    first, last = op(low(x)), op(high(x))
    across = (low(x) < 0) & (high(x) > 0)
    return Range(torch.minimum(first, last).masked_fill(across, 0), torch.maximum(first, last))


def _quotient(op: Any, left: Any, right: Any, **kwargs: Any) -> Range | None:
    """Sure where no divisor is 0; of whole numbers, if it is rounded."""
    rounds = op.overloadpacket is aten.floor_divide or kwargs.get("rounding_mode") is not None
    divisor = _safe(right, lambda low, high: (low > 0) | (high < 0))
    if divisor is None or (rounds and (_is_float(left) or _is_float(right))):
        return None
    found = _extreme_at_corners(op, left, divisor, **kwargs)
    found = surely(found, _fits(found, found.low.dtype))
    return found if divisor.sure is None else surely(found, divisor.sure)


def _remainder(op: Any, left: Any, right: Any) -> Range | None:
    """Of whole numbers by a constant: a part of one period, or all of it."""
    period = _safe(right, lambda low, high: (low == high) & (low > 0))
    if period is None or _is_float(left) or _is_float(right) or not isinstance(low(left), Tensor):
        return None
    first, last, by = low(left), high(left), period.low
    once = torch.floor_divide(first, by) == torch.floor_divide(last, by)
    return Range(torch.where(once, op(first, by), 0), torch.where(once, op(last, by), by - 1), period.sure)


def _safe(x: Any, fine: Callable[[Any, Any], Any]) -> Range | None:
    """A divisor that is fine; where it is not, 1, of which nothing is sure. None for a number that is not."""
    if not isinstance(low(x), Tensor):
        return Range(x, x) if fine(x, x) else None
    sure = fine(low(x), high(x))
    return Range(torch.where(sure, low(x), 1), torch.where(sure, high(x), 1), sure)


def _is_float(x: Any) -> bool:
    return _dtype(low(x)).is_floating_point


def _where(op: Any, chosen: Any, left: Any, right: Any) -> Range:
    yes, no = low(chosen), ~high(chosen)
    always, never = torch.ones_like(yes), torch.zeros_like(yes)
    lows, highs = ([op(which, end(left), end(right)) for which in (always, never)] for end in (low, high))
    least = torch.where(yes, lows[0], torch.where(no, lows[1], torch.minimum(*lows)))
    return not_nan(Range(least, torch.where(yes, highs[0], torch.where(no, highs[1], torch.maximum(*highs)))))


def _shifted(op: Any, x: Any, by: Any) -> Range | None:
    return _monotone(1, 1)(op, x, by) if isinstance(by, int) and 0 <= by < 32 else None


def _converted(op: Any, x: Any, **kwargs: Any) -> Range:
    if kwargs.get("dtype") == torch.bool:
        return Range(*_truth(x)[:2])
    found = not_nan(Range(op(x.low, **kwargs), op(x.high, **kwargs)))
    return found if found.low.dtype.is_floating_point else surely(found, _fits(_doubled(x), found.low.dtype))


RULES: dict[Any, Rule] = {
    **dict.fromkeys([aten.alias, aten.clone, aten.detach, aten.lift_fresh_copy], _monotone(1)),
    **dict.fromkeys([aten.ceil, aten.floor, aten.sign, aten.trunc], _monotone(1)),
    **dict.fromkeys([aten.ge, aten.gt], _monotone(1, -1)),
    **dict.fromkeys([aten.le, aten.lt], _monotone(-1, 1)),
    **dict.fromkeys([aten.maximum, aten.minimum], _monotone(1, 1)),
    **dict.fromkeys([aten.clamp, aten.clamp_max, aten.clamp_min], _monotone(1, 1, 1)),
    **dict.fromkeys([aten.bitwise_and, aten.bitwise_or], _of_bools(_monotone(1, 1))),
    **dict.fromkeys([aten.logical_and, aten.logical_or], _of_truths(_monotone(1, 1))),
    **dict.fromkeys([aten.bitwise_right_shift, aten.__rshift__], _shifted),
    **dict.fromkeys([aten.div, aten.floor_divide], _quotient),
    CONVERT.overloadpacket: _converted,
    aten.abs: _computed(_absolute),
    aten.add: _computed(_monotone(1, 1)),
    aten.bitwise_not: _of_bools(_negated),
    aten.bitwise_xor: _of_bools(unequal),
    aten.eq: equal,
    aten.logical_not: _negated,
    aten.logical_xor: _of_truths(unequal),
    aten.mul: _computed(_extreme_at_corners),
    aten.ne: unequal,
    aten.neg: _computed(_monotone(-1)),
    aten.remainder: _remainder,
    aten.rsub: _computed(_monotone(-1, 1)),
    aten.sub: _computed(_monotone(1, -1)),
    aten.where: _where,
}
"""By operation, whatever its overload."""


def _dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu").dtype

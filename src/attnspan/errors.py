"""What a caller hears when a request cannot be met exactly.

Every error names the argument, says what was asked of it and what arrived, and where it helps, what to do::

    AttnspanError (a ValueError)
    ├── MaskError          a mask, or lengths it cannot be drawn over
    ├── LayoutError        a layout, or a sequence it does not describe
    ├── PlanError          a plan that cannot be made as asked
    ├── AttentionError     tensors, or a group of ranks, that a plan was not made for
    ├── RecurrenceError    tensors, states or a function that a recurrence over ranks cannot take
    ├── ShardError         a tensor that does not lie on the ranks as it should
    ├── KernelError        a kernel that cannot compute what it was asked to
    ├── TuningError        a table of measured times that is damaged, or of another machine
    ├── ExpressionError    a mask written as text, as on the command line
    ├── ModelError         a model of another library that has, or is asked for, what is not served
    ├── PageError          a page, or a plan over pages, that is not there for what it was asked for
    │   ├── PoolExhausted      fewer pages are free than are needed; nothing was changed
    │   └── UnknownSequence    a sequence that was never added, or was freed
    ├── EngineError        a model, a request or a sampling value that the engine does not serve
    │   ├── UnknownRequest     a request that has ended, or is another engine's
    │   ├── EngineBusy         an engine whose queue is full; try again later
    │   ├── EngineClosed       an engine that is shutting down, or has failed
    │   └── StepFailed         a request that was ended because a step of its engine failed
    └── TransportError     a group of ranks that cannot be reached, or a rank that did not answer (a RuntimeError too)
        └── RankError          ranks that were started for a test raised, died or did not end

The three checks below write such messages, so that the same mistake reads the same everywhere:

>>> integer("ranks", 0, at_least=1, hint="one process is ranks=1")
Traceback (most recent call last):
attnspan.errors.AttnspanError: ranks must be a whole number >= 1, got 0; one process is ranks=1

Each takes the error to raise as ``error=``. Knows nothing of masks, layouts or plans.
"""

import operator
import reprlib
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import SupportsIndex, TypeGuard


class AttnspanError(ValueError):
    """The root: catch it to catch everything this library refuses."""


class MaskError(AttnspanError):
    """A mask was given a size, a length or a partner that it cannot have."""


class LayoutError(AttnspanError):
    """A layout was given a rank count or a sequence that it cannot divide."""


class PlanError(AttnspanError):
    """No plan does exactly what was asked."""


class AttentionError(AttnspanError):
    """Tensors or a group that do not fit the plan, or ranks that do not agree on one."""


class RecurrenceError(AttnspanError):
    """Tensors or states that do not fit a recurrence, or a function that is not affine in its state."""


class ShardError(AttnspanError):
    """A tensor that is not whole, not a shard, or a shard of something else."""


class KernelError(AttnspanError):
    """A kernel was asked for by name and cannot compute this exactly."""


class TuningError(AttnspanError):
    """A table of measured times cannot be used: it is damaged, or of another device, torch or version."""


class ExpressionError(AttnspanError):
    """A mask written as text cannot be read."""


class ModelError(AttnspanError):
    """A model of another library that cannot be served exactly, or a call of it that cannot."""


class PageError(AttnspanError):
    """Pages, tensors or a plan that do not fit what was asked of the paged cache; nothing was overwritten."""


class PoolExhausted(PageError):
    """`needed` pages were asked for where only `free` could be had; the allocator is as it was."""

    def __init__(self, needed: int, free: int, what: str = "pages"):
        super().__init__(
            f"{needed} {what} needed, {free} free; free, trim or swap out a sequence, or take a larger pool"
        )
        self.needed, self.free = needed, free


class UnknownSequence(PageError):
    """A sequence id that names nothing: it was never given out, or its sequence was freed."""


class EngineError(AttnspanError):
    """A model, a request or a sampling value that the engine cannot serve exactly; the engine is as it was."""


class UnknownRequest(EngineError):
    """A request that has ended already, or was never added to this engine."""


class EngineBusy(EngineError):
    """The queue is full; `retry_after` estimates the seconds until there is room. Nothing was queued."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosed(EngineError):
    """An `AsyncEngine` that is shutting down, or whose engine has failed."""


class StepFailed(EngineError):
    """A step failed, and ended the requests of an `AsyncEngine`; `__cause__` is what the step raised."""


class TransportError(AttnspanError, RuntimeError):
    """A group cannot be used as asked, or a rank of it did not do its part."""


class RankError(TransportError):
    """Processes that were started as ranks raised, died or did not end; `outcomes` says by rank what became of each."""

    def __init__(self, message: str, outcomes: tuple[object, ...] = ()):
        super().__init__(message)
        self.outcomes = outcomes


def integer(
    name: str, value: object, *, at_least: int = 0, hint: str = "", error: type[AttnspanError] = AttnspanError
) -> int:
    """Return ``value`` as an int, or raise ``error`` naming the argument ``name``.

    Whatever Python itself would index with is one (numpy's ints, an integer tensor of one element). A bool
    is not, and neither is a float, however round: 4096.0 tells of a division that may not be exact next time.

    >>> integer("seq_len", 4096)
    4096
    """
    number = _index(value)
    if number is None or number < at_least:
        raise error(_message(f"{name} must be a whole number >= {at_least}", value, hint))
    return number


def integers(
    name: str, values: object, *, at_least: int = 0, hint: str = "", error: type[AttnspanError] = AttnspanError
) -> tuple[int, ...]:
    """Return ``values`` as a tuple of ints, or raise ``error`` naming the first item that is not whole.

    >>> integers("lengths", [3, 5])
    (3, 5)
    >>> integers("lengths", [3, -5])
    Traceback (most recent call last):
    attnspan.errors.AttnspanError: lengths[1] must be a whole number >= 0, got -5
    """
    items = _items(values)
    if items is None:
        raise error(_message(f"{name} must be a list of whole numbers >= {at_least}", values, hint))
    if all_ints(items) and min(items) >= at_least:
        return tuple(items)
    return tuple(
        integer(f"{name}[{i}]", item, at_least=at_least, hint=hint, error=error) for i, item in enumerate(items)
    )


def all_ints(items: Sequence[object]) -> TypeGuard[Sequence[int]]:
    """Whether there are items, and all are plain ints: asked of thousands of lengths at once."""
    return {*map(type, items)} == {int}


def one_of(
    name: str, value: object, choices: Collection[str], *, hint: str = "", error: type[AttnspanError] = AttnspanError
) -> str:
    """Return ``value`` if it is among ``choices``, or raise ``error`` with the nearest name that is.

    >>> one_of("align", "bottm", ["top", "bottom"])
    Traceback (most recent call last):
    attnspan.errors.AttnspanError: align must be one of top, bottom, got 'bottm'; did you mean 'bottom'?
    """
    if isinstance(value, str) and value in choices:
        return value
    near = get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}?" if near else hint
    raise error(_message(f"{name} must be one of {', '.join(choices)}", value, hint))


def _index(value: object) -> int | None:
    """The int that ``value`` stands for, or None."""
    if type(value) is int:  # nearly always
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value) if isinstance(value, SupportsIndex) else None
    except TypeError:  # as of a float that is a tensor
        return None


def _items(values: object) -> list[object] | None:
    """The items of a list-like thing, or None. Text is not a list: its items would be letters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return None
    try:
        return list(values)
    except TypeError:  # a tensor of no dimensions has __iter__ too, and refuses when asked
        return None


def _message(rule: str, value: object, hint: str) -> str:
    return f"{rule}, got {_shown(value)}" + (f"; {hint}" if hint else "")


def _shown(value: object) -> str:
    """What arrived, on one line; its type too, where the value alone would not say what is wrong with it."""
    text = " ".join(reprlib.repr(value).split())
    return text if isinstance(value, int | str | list | tuple | None) else f"{text} ({type(value).__name__})"

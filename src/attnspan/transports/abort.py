"""All or nothing: a group on which a call broke off is not used again.

A rank that raises in the middle of a call, because memory ran out or it was interrupted, owes the others messages and
is owed some. If it caught the error and went on with its next call, its new keys would be taken for those it owes:
they look alike, and the result would be wrong on every rank, without an error. So from then on it refuses every call
on that group; the others time out, and refuse in their turn. What NCCL has under way on the device is aborted
(watchdog.py). What all ranks refuse together, before the first key travels, aborts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from attnspan.transports.transport import Transport

_ABORTED: WeakKeyDictionary[object, str] = WeakKeyDictionary()  # by group, for as long as it lives: what was raised


@contextmanager
def abort_on_error(transport: Transport, *, except_for: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Abort the group if its block raises, except for these errors; refuse to enter if an earlier block did."""
    group = transport.group
    if group in _ABORTED:
        raise transport.error(
            f"an earlier attention broke off here with {_ABORTED[group]}; its messages may still be under way, and "
            "would be taken for those of this one; make a new group, as by torch.distributed.new_group()"
        )
    try:
        yield
    except except_for:
        raise
    except BaseException as error:
        _ABORTED[group] = f"{type(error).__name__}: {error}"
        transport.abort()
        raise

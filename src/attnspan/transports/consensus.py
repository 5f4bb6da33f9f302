"""Consensus: every rank says what it is about to do, or why it refuses; all of them go on, or all raise.

A rank that raised alone would leave the others waiting for its part, and ranks that do different things would take each
other's messages for their own. So before anything of weight travels each says in a few bytes what it is about to do,
hears everybody, and names the ranks that differ::

    all_gather_object(transport, words, what)     what every rank says, by rank; a refusal of any is raised by all
    all_gather_outcomes(transport, words, what)   the same, with refusals among it; `refusal` makes one error of them
    post(transport, record, what)                 a record of a fixed size, gathered while the rank does something else
    differing_ranks(said)                         the ranks that say something else than rank 0
    ranks_by_value(said)                          what is said, with the ranks that say it, most of them first
    digest(...)                                   a short word for something long

Words are anything that JSON can write (a tuple arrives as a list), or an error, by which a rank refuses. Errors keep
their class. `what` names the exchange where it fails. It costs one small exchange; whoever asks often remembers what
was agreed on.

Not known here: whether a rank asks at all. One that is wrong where the others agreed long ago is not answered; when the
group's timeout has passed it raises its own reason, and the others that they waited in vain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from attnspan import errors
from attnspan.errors import AttnspanError, TransportError
from attnspan.transports.transport import Transport

T = TypeVar("T")


def all_gather_object(transport: Transport, words: T | AttnspanError, what: str) -> list[T]:
    """What every rank says, by rank. If any refuses, it raises its own error, and the others one that names it."""
    try:
        said = all_gather_outcomes(transport, words, what)
    except TransportError as silence:
        if isinstance(words, AttnspanError):
            raise words from silence
        raise
    if isinstance(words, AttnspanError):
        raise words
    refused = refusal(said)
    if refused is not None:
        raise refused
    return [each for each in said if not isinstance(each, AttnspanError)]


def all_gather_outcomes(transport: Transport, words: T | AttnspanError, what: str) -> list[T | AttnspanError]:
    """What every rank says, by rank; the error of one that refuses.

    >>> from attnspan.testing import loopback
    >>> def rank(world):
    ...     return all_gather_outcomes(world, AttnspanError("no room") if world.rank else "go", "an example")
    >>> loopback(ranks=2).run(rank)[0]
    ['go', AttnspanError('no room')]
    """
    kind, text = (_kind(words), str(words)) if isinstance(words, AttnspanError) else (None, words)
    said = map(json.loads, transport.all_gather_bytes(json.dumps([kind, text]).encode(), what))
    return [each if kind is None else getattr(errors, kind)(each) for kind, each in said]


def refusal(said: Sequence[object], mixed: type[AttnspanError] = AttnspanError) -> AttnspanError | None:
    """One error for all ranks that refuse, of their class, or of `mixed` where theirs differ; None if none does.

    >>> refusal([AttnspanError("no room"), "go", AttnspanError("no room")])
    AttnspanError('on ranks 0, 2: no room')
    """
    complaints: dict[tuple[type[AttnspanError], str], list[int]] = {}
    for rank, each in enumerate(said):
        if isinstance(each, AttnspanError):
            complaints.setdefault((type(each), str(each)), []).append(rank)
    kinds = {kind for kind, _ in complaints}
    if not kinds:
        return None
    texts = [
        text if len(ranks) == len(said) else f"on {ranks_text(ranks)}: {text}"
        for (_, text), ranks in complaints.items()
    ]
    return (kinds.pop() if len(kinds) == 1 else mixed)("; ".join(texts))


def post(transport: Transport, record: bytes, what: str) -> Callable[[], list[bytes]]:
    """Send a record, which has the same length on every rank; what waits for all of them, and returns them by rank."""
    own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(transport.device)
    records = own.new_empty(transport.ranks, len(record))
    pending = transport.gather(own, list(records.unbind()), what)

    def arrived() -> list[bytes]:
        pending.wait()
        return [bytes(each) for each in records.tolist()]

    return arrived


def differing_ranks(said: Sequence[object]) -> list[int]:
    """The ranks that say something else than rank 0.

    >>> differing_ranks(["a", "b", "a"])
    [1]
    """
    return [rank for rank, each in enumerate(said) if each != said[0]]


def ranks_by_value(said: Sequence[T]) -> list[tuple[T, list[int]]]:
    """Everything that is said, with the ranks that say it: what most say first, of equals what the first of them says.

    >>> ranks_by_value(["a", "b", "b"])
    [('b', [1, 2]), ('a', [0])]
    """
    found: list[tuple[T, list[int]]] = []
    for rank, words in enumerate(said):
        ranks = next((ranks for each, ranks in found if each == words), None)
        if ranks is None:
            found.append((words, [rank]))
        else:
            ranks.append(rank)
    return sorted(found, key=lambda group: -len(group[1]))


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a sentence.

    >>> ranks_text([1]), ranks_text([1, 2])
    ('rank 1', 'ranks 1, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def digest(*parts: object) -> str:
    """A short word, the same for parts that are written alike.

    >>> digest(1, "a") == digest(1, "a") != digest("a", 1)
    True
    """
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]


def _kind(error: AttnspanError) -> str:
    """The name of the nearest class in errors.py that is made of a text alone."""
    known = (each for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
    name: str = next(each.__name__ for each in known if each.__init__ is AttnspanError.__init__)
    return name

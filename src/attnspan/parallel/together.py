"""Refuse together: what one rank finds wrong, every rank raises, before anything of weight travels.

A rank that raised alone would leave the others waiting for its part. So each says what it is about to do, or what it
refuses, and hears everybody. That costs one small exchange; whoever asks often remembers what was agreed on.

Not known here: whether a rank asks at all. One that is wrong where the others agreed long ago is not answered; when
the group's timeout has passed it raises its own reason, and the others that they waited in vain.
"""

from __future__ import annotations

from attnspan.errors import ShardError, TransportError
from attnspan.transports import Transport

Said = str | ShardError


def heard(transport: Transport, said: Said, what: str) -> list[str]:
    """What every rank said, by rank; a refusal of any is raised by all."""
    try:
        texts = [text.decode() for text in transport.agree(_written(said), what)]
    except TransportError as silence:
        if isinstance(said, ShardError):
            raise said from silence
        raise
    if isinstance(said, ShardError):
        raise said
    for rank, text in enumerate(texts):
        if text.startswith(_REFUSAL):
            raise ShardError(f"on rank {rank}: {text.removeprefix(_REFUSAL)}")
    return texts


def agreed(transport: Transport, said: Said, what: str) -> None:
    """Raise on every rank if any refuses, or if they do not say the same."""
    texts = heard(transport, said, what)
    usual = max(texts, key=texts.count)
    for rank, text in enumerate(texts):
        if text != usual:
            raise ShardError(f"all ranks must ask for the same; rank {rank} asks for {text}, others for {usual}")


_REFUSAL = "refused: "


def _written(said: Said) -> bytes:
    return (f"{_REFUSAL}{said}" if isinstance(said, ShardError) else said).encode()

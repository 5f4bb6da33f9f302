"""One rank's end of a group, and what is under way on it.

A transport moves tensors between ranks. It is one idea, messages, and four collectives made of it::

    exchange(sends, receives)           messages between pairs of ranks
    gather(tensor, outputs)             everybody's tensor, at everybody's
    reduce_scatter(inputs, output)      the sum of what everybody has for me
    all_reduce(tensor)                  the sum of everybody's tensor, in place
    all_gather_bytes(payload)           everybody's bytes: the only one that waits by itself

All but `all_gather_bytes` return a `Pending` at once. Until it is waited for, what was sent must not be written and
what is received must not be read. After `wait` both are the caller's again: on a CUDA device in the order of the
current stream (the host does not block), on the CPU outright.

A new transport writes `_post` and inherits the rest; one around another is a `Wrapped` (wrapped.py). Knows nothing of
masks, plans or what the tensors mean: `what` is a word for messages, as in "waiting for keys from rank 2".

[Note: sums] Sums over ranks are taken in rank order and in float32 for half precision, rounded once. Every rank, every
transport and every run gets the same bits, and the error does not grow with ranks. A transport may use its own
reduction where it keeps to that within float32 rounding, and stays the same from run to run.

[Note: who takes part] A message involves its two ends alone; a rank with nothing to send or receive need not call
`exchange`. A collective is called by every rank, in the same order. Messages between two ranks are matched in the
order they were posted, and say which operation they belong to (operations.py). Tensors without elements never travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnspan.errors import TransportError
from attnspan.transports.operations import Operation, enter_operation, ledger_of

Messages = Sequence[tuple[int, Tensor]]  # (the other rank, the tensor)

HALVES = (torch.float16, torch.bfloat16)


class Pending:
    """Something under way. The first `wait` finishes it; later ones return, or raise, the same at once."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], object] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Return when what was received may be read and what was sent may be written."""
        if self._finish is None:
            return
        try:
            self._finish()
        except BaseException as error:
            self._finish = _raiser(error)
            raise
        self._finish = None  # and with it the references that kept buffers alive

    def then(self, work: Callable[[], object]) -> Pending:
        """Pending also until ``work`` is done, which happens inside `wait`."""

        def finish() -> None:
            self.wait()
            work()

        return Pending(finish)


class Transport(ABC):
    """One rank's end of a group of ranks."""

    rank: int
    ranks: int
    device: torch.device
    name: str  # of the group, for messages

    @abstractmethod
    def _post(self, sends: Messages, receives: Messages, what: str) -> Pending:
        """Start messages to and from other ranks; every tensor is contiguous, on `device` and has elements."""

    def exchange(self, sends: Messages, receives: Messages, what: str = "tensors") -> Pending:
        """Send each tensor to its rank and fill each receive, in place, with what its rank sent.

        A send that is not contiguous is copied first; a receive has to be contiguous. A rank may send to itself.
        """
        sends = [(peer, self._sent(peer, tensor, what)) for peer, tensor in sends if tensor.numel()]
        receives = [(peer, self._filled(peer, tensor, what)) for peer, tensor in receives if tensor.numel()]
        self._keep(sends, receives, what)
        sends, receives = self._travelling(sends), self._travelling(receives)
        return self._post(sends, receives, what) if sends or receives else Pending()

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], what: str = "tensors") -> Pending:
        """Fill ``outputs[r]`` with rank r's ``tensor``; sizes may differ from rank to rank."""
        self._one_each("outputs", outputs, what)
        return self.exchange(
            [(peer, tensor) for peer in self._round()], [(peer, outputs[peer]) for peer in self._round()], what
        )

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, what: str = "tensors") -> Pending:
        """Fill ``output`` with the sum, over ranks, of their ``inputs[self.rank]``; see [Note: sums]."""
        self._one_each("inputs", inputs, what)
        own = inputs[self.rank]
        parts = [own if peer == self.rank else torch.empty_like(own) for peer in range(self.ranks)]
        sends = [(peer, inputs[peer]) for peer in self._round()[1:]]
        receives = [(peer, parts[peer]) for peer in self._round()[1:]]
        return self.exchange(sends, receives, what).then(lambda: output.detach().copy_(_sum(parts)))

    def all_reduce(self, tensor: Tensor, what: str = "tensors") -> Pending:
        """Replace ``tensor`` by its sum over ranks, the same bits on each. For small ones: everybody gets them all."""
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        with self._operation(what):
            return self.gather(tensor, parts, what).then(lambda: tensor.detach().copy_(_sum(parts)))

    def all_gather_bytes(self, payload: bytes, what: str = "an agreement") -> list[bytes]:
        """Every rank's ``payload``, by rank. Returns when all have called: with ``b""`` it is a barrier."""
        sizes = [torch.empty(1, dtype=torch.int64, device=self.device) for _ in range(self.ranks)]
        with enter_operation(self, "an agreement"):  # on whatever: who compares the payloads knows better what differs
            self.gather(torch.full_like(sizes[0], len(payload)), sizes, what).wait()
            texts = [torch.empty(int(size), dtype=torch.uint8, device=self.device) for size in sizes]
            own = torch.tensor(list(payload), dtype=torch.uint8, device=self.device)
            self.gather(own, texts, what).wait()
        return [bytes(text.tolist()) for text in texts]

    def _operation(self, what: str) -> AbstractContextManager[Operation]:
        """The operation that is under way, or one of its own for a collective outside of any."""
        current = ledger_of(self).current
        return enter_operation(self, f"a sum of {what}") if current is None else nullcontext(current)

    def abort(self) -> None:
        """Give the group up: what still waits for other ranks on a device ends, and nothing is sent any more."""
        return

    @property
    def hosts(self) -> Transport:
        """A transport between the same ranks for tensors of the host, which nobody waits for a device to read.

        Where there is none, this one.
        """
        return self

    @property
    def group(self) -> object:
        """What all transports of one group have in common."""
        return self

    @property
    def memo(self) -> dict[Hashable, Any]:
        """What is remembered for these ranks, by whoever asks: it lives as long as they do, and keeps nobody alive."""
        found: dict[Hashable, Any] = vars(self).setdefault("_memo", {})
        return found

    def contains(self, other: Transport) -> bool:
        """Whether every rank of another group is in this one too."""
        return other is self or other == self

    def _round(self) -> list[int]:
        """All ranks, self first: if all send in this order, no rank is everyone's first."""
        return [(self.rank + hop) % self.ranks for hop in range(self.ranks)]

    def _travelling(self, messages: Messages) -> list[tuple[int, Tensor]]:
        return [(peer, tensor) for peer, tensor in messages if peer != self.rank]

    def _keep(self, sends: Messages, receives: Messages, what: str) -> None:
        """What a rank sends to itself stays where it is: one copy, now."""
        kept = [tensor for peer, tensor in sends if peer == self.rank]
        filled = [tensor for peer, tensor in receives if peer == self.rank]
        if [tensor.numel() for tensor in kept] != [tensor.numel() for tensor in filled]:
            raise self.error(f"{what}: sends itself {_shapes(kept)} but expects {_shapes(filled)}")
        for target, source in zip(filled, kept, strict=True):
            target.copy_(source.view_as(target))

    def _sent(self, peer: int, tensor: Tensor, what: str) -> Tensor:
        self._check(peer, tensor, f"{what} to rank {peer}")
        return tensor.detach().contiguous()

    def _filled(self, peer: int, tensor: Tensor, what: str) -> Tensor:
        self._check(peer, tensor, f"{what} from rank {peer}")
        if not tensor.is_contiguous():
            raise self.error(
                f"{what} from rank {peer}: a receive must be contiguous, got strides {tensor.stride()} for shape "
                f"{tuple(tensor.shape)}; receive into a buffer and copy after wait()"
            )
        return tensor.detach()

    def _check(self, peer: int, tensor: Tensor, message: str) -> None:
        if not 0 <= peer < self.ranks:
            raise self.error(f"{message}: ranks are 0 to {self.ranks - 1}")
        if tensor.device != self.device:
            raise self.error(f"{message}: this transport moves tensors on {self.device}, got {tensor.device}")

    def _one_each(self, name: str, tensors: Sequence[Tensor], what: str) -> None:
        if len(tensors) != self.ranks:
            raise self.error(f"{what}: {name} must be one tensor per rank, {self.ranks}, got {len(tensors)}")

    def error(self, message: str) -> TransportError:
        """An error that says whose it is."""
        return TransportError(f"rank {self.rank} of {self.ranks}, group {self.name}: {message}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.ranks}, {self.device}, group {self.name})"


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ``parts``; see [Note: sums]."""
    first = parts[0].detach()
    total = first.to(torch.float32 if first.dtype in HALVES else first.dtype, copy=True)
    for part in parts[1:]:
        total += part.detach()
    return total


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "nothing"


def _raiser(error: BaseException) -> Callable[[], object]:
    def again() -> None:
        raise error

    return again

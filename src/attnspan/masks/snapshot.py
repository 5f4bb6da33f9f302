"""A function as it was when it was asked: its program, on copies of what it read.

A mask is compared, hashed, planned for and remembered, so it must be a value; a function is none, because what it reads
may change. `Snapshot` makes one of it: the traced graph, in which Python's numbers are constants, and a copy of every
tensor that the function captured. Two snapshots are equal when graph and content are, whatever function objects
they came from, and everything that is ever computed of a mask is computed from its snapshot: a function that changes
meanwhile changes nothing.

Whether it changed is another question, asked before a pass over ranks (`is_current`): a mask is refused, or read again,
once its function would compute another one. A fingerprint answers in microseconds for most functions; the others
are traced again.

[Note: snapshot content] Content is compared bit by bit, because torch does not count every write (numpy, `.data`,
messages). On a CPU that costs less than reading the tensor once. On CUDA the count decides, at no cost; where it says
that nothing changed, the bits are compared on the device, without waiting for the answer, by an assertion there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from attnspan.errors import MaskError
from attnspan.masks.content import bits_of
from attnspan.masks.fingerprint import fingerprint
from attnspan.masks.program import Program
from attnspan.masks.tracing import traced
from attnspan.masks.versions import version_of


class Copies:
    """Copies of tensors, and the tensors, to see whether these still hold the same.

    >>> ids = torch.tensor([0, 0, 1])
    >>> copies = Copies([ids])
    >>> ids.numpy()[2] = 0
    >>> copies.are_current, copies.own[0].tolist()
    (False, [0, 0, 1])
    """

    def __init__(self, live: Iterable[Tensor]):
        self.live = tuple(live)
        self._versions = [_version(x) for x in self.live]
        with torch.inference_mode(False), torch.no_grad():
            self.own = tuple(x.detach().clone() for x in self.live)

    @property
    def are_current(self) -> bool:
        """See [Note: snapshot content]."""
        return self.hold(self.live)

    def hold(self, tensors: Iterable[Tensor]) -> bool:
        """Whether tensors, in this order, have the bits of the copies."""
        return all(self._same(i, x) for i, x in enumerate(tensors))

    def of(self, tensors: Iterable[Tensor]) -> Copies:
        """These copies, of other tensors that hold the same."""
        other = copy(self)
        other.live = tuple(tensors)
        other._versions = [_version(x) for x in other.live]
        return other

    def _same(self, i: int, x: Tensor) -> bool:
        mine, version = self.own[i], _version(x)
        if (x.shape, x.dtype, x.device) != (mine.shape, mine.dtype, mine.device):
            return False
        if x.device.type == "cuda" and x is self.live[i] and version is not None and version == self._versions[i]:
            torch._assert_async((bits_of(x) == bits_of(mine)).all(), UNSEEN)
            return True
        same = torch.equal(bits_of(x), bits_of(mine))
        if same and x is self.live[i]:
            self._versions[i] = version
        return same


UNSEEN = (
    "a tensor that a mask's function captured was written to where torch does not count it (.data, a kernel or message "
    "of your own); make a new mask after such writes"
)


class Snapshot:
    """A mask_mod as it was when this was made. Equal to another that computes the same from the same content.

    >>> window = 2
    >>> before = Snapshot(lambda b, h, q, k: q - k < window)
    >>> before == Snapshot(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 2)
    True
    >>> window = 3
    >>> before.is_current
    False
    """

    def __init__(self, fn: Callable[..., object], device: torch.device | str = "cpu"):
        self.fn, self.device = fn, torch.empty(0, device=device).device
        known = fingerprint(fn)  # before it runs, and perhaps changes something
        read = traced(fn, device=device, error=MaskError)
        self._fingerprint = None if read.reads_values else known
        self._copies = Copies(read.captured)
        self.program: Program = replace(read, captured=self._copies.own)

    @property
    def is_current(self) -> bool:
        """Whether the function computes the same now."""
        if self._fingerprint is not None and fingerprint(self.fn) == self._fingerprint:
            return self._copies.are_current
        known = fingerprint(self.fn)
        again = traced(self.fn, device=self.device, error=MaskError)
        same = again.key == self.program.key and self._copies.hold(again.captured)
        if same and not again.reads_values:  # other objects that hold the same: proved cheaply the next time
            self._fingerprint, self._copies = known, self._copies.of(again.captured)
        return same

    def check_current(self) -> None:
        """Refuse a function that computes another mask now than the one that was planned for."""
        if not self.is_current:
            name = self.program.name
            raise MaskError(
                f"{name} has changed: a tensor or a value that it reads is not what it was when the mask was made; "
                f"make a new mask of it, as MaskMod({name}), and a session for that, as cp.with_mask(mask)"
            )

    def __getstate__(self) -> dict[str, object]:
        """What travels to another process: ids mean nothing there, the function is traced to see what it computes."""
        assert self.key, "a graph that travelled has other names; what tells it apart is worked out before"
        return {**self.__dict__, "_fingerprint": None}

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What it computes."""
        return self.program.key, self.program.content, self.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _version(x: Tensor) -> int | None:
    """How often a tensor was written to; torch does not count for one that was made in inference mode."""
    return None if x.is_inference() else version_of(x)

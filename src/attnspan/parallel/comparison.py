"""Two runs of a model compared: loss, gradients, and what every module was given and returned.

Each rank compares with its own tokens of the dense run's tensors; the sequence is found by shape. A tensor without one
must be the same on every rank. Errors are relative to the largest magnitude in the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from attnspan.parallel.session import ContextParallel
from attnspan.transports import consensus


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same on ranks as on one device."""

    where: str
    what: str
    error: float
    inside: str = ""  # between which modules in it, where that can be told

    def __str__(self) -> str:
        return f"{self.where}: {self.what} (error {self.error:.1e})" + (self.inside and f"\ninside: {self.inside}")


class ModuleCall(NamedTuple):
    """What went into a module and came out of it, in one of its calls."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class Comparison:
    """What a rank holds, beside the dense run's tensors."""

    def __init__(self, session: ContextParallel, tolerance: float):
        self.session, self.tolerance = session, tolerance

    def loss(self, ours: Tensor, dense: Tensor) -> float:
        """The error of the loss that training sees: its average over ranks."""
        return _error_of(self.session.mean(ours.detach().reshape(1)), dense.reshape(()))

    def error(self, ours: Tensor, dense: Tensor) -> float:
        """The error of a tensor that is this rank's part of a dense one, or the same as it."""
        expected = self._part(ours, dense)
        return float("nan") if expected is None else _error_of(ours, expected)

    def _part(self, ours: Tensor, dense: Tensor) -> Tensor | None:
        """What should be here of a dense tensor; None if the shapes tell of no sequence."""
        if ours.shape == dense.shape:
            return dense
        if ours.dim() != dense.dim():
            return None
        length, tokens = self.session.seq_len, self.session.sharding.tokens
        for dim, (here, there) in enumerate(zip(ours.shape, dense.shape, strict=True)):
            if here != there:
                groups = there // length  # batch rows in front of the sequence may be in one dim with it
                if there % length or here != groups * tokens:
                    return None
                full = dense.unflatten(dim, (groups, length)).to(self.session.transport.device)
                batch_dim = dim if groups > 1 else 0
                part = self.session.sharding.shard_on(self.session.rank, full, dim + 1, batch_dim)
                part = part.flatten(dim, dim + 1).to(dense.device)
                return part if part.shape == ours.shape else None
        return None

    def first(self, ours: list[ModuleCall], dense: list[ModuleCall]) -> Difference | None:
        """Where the runs part: the first module to return something else although it was given the same."""
        names, expected = [each.name for each in ours], [each.name for each in dense]
        if names != expected:
            name = next(theirs or mine for mine, theirs in zip_longest(names, expected, fillvalue="") if mine != theirs)
            return Difference(name, "modules are not called in the same order, or as often", float("inf"))
        given_other: Difference | None = None
        given: dict[str, str] = {}  # modules that are given something else, with what
        agreeing: list[str] = []
        for mine, theirs in zip(ours, dense, strict=True):
            inputs, outputs = (
                self._largest(getattr(mine, side), getattr(theirs, side)) for side in ("inputs", "outputs")
            )
            if not inputs <= self.tolerance:
                given_other = Difference(mine.name, "it is given something else", inputs)
                given.setdefault(mine.name, self._argument(mine, theirs))
            elif not outputs <= self.tolerance:
                return Difference(mine.name, "its inputs agree, its output differs", outputs, _between(given, agreeing))
            elif not given:
                agreeing.append(mine.name)
        return given_other  # the outermost: what it calls only passes it on

    def _argument(self, ours: ModuleCall, dense: ModuleCall) -> str:
        """Which of its tensors differs."""
        wrong = [not self.error(x, y) <= self.tolerance for x, y in zip(ours.inputs, dense.inputs, strict=False)]
        return f"argument {wrong.index(True)}" if True in wrong else "number of arguments"

    def _largest(self, ours: list[Tensor], dense: list[Tensor]) -> float:
        if len(ours) != len(dense):
            return float("inf")
        return max((self.error(x, y) for x, y in zip(ours, dense, strict=True)), key=severity, default=0.0)

    def agreed(
        self, errors: dict[str, float], first: Difference | None, loss: float
    ) -> tuple[dict[str, float], Difference | None, bool]:
        """The largest errors of all ranks, the difference of the first rank that has one, and if they have one loss."""
        said = errors, None if first is None else astuple(first), loss
        heard = consensus.all_gather_object(self.session.transport, said, "what differs")
        firsts = [Difference(*found) for _, found, _ in heard if found is not None]
        largest = {name: max((each[name] for each, *_ in heard), key=severity) for name in errors}
        losses = [each for *_, each in heard]
        alike = max(losses) - min(losses) <= self.tolerance * max(map(abs, losses))
        return largest, firsts[0] if firsts else None, alike


def _between(given: Mapping[str, str], agreeing: list[str]) -> str:
    """Where inside a module its parts come apart; both in the order in which they returned, parts before wholes."""
    if not given:
        return ""
    first = next(iter(given))
    outer = [name for name in given if name == first or first.startswith(f"{name}.")][-1]
    before = [name for name in agreeing if not name.startswith(f"{outer}.")]
    return f"{before[-1] if before else 'what it is given'} agrees, {outer} is given another {given[outer]}"


def gradient_errors(ours: Mapping[str, Tensor | None], dense: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By parameter. Where terms cancel, as in the bias of keys, only rounding is left: a small gradient is measured by
    a hundredth of the largest."""
    largest = max(
        (float(grad.abs().max()) for grad in dense.values() if grad is not None and grad.numel()), default=0.0
    )
    return {name: _error_of(ours[name], dense[name], at_least=largest / 100) for name in dense}


def _error_of(ours: Tensor | None, dense: Tensor | None, at_least: float = 0.0) -> float:
    """The largest error over the largest magnitude; a gradient that one side lacks is zero."""
    if ours is None or dense is None:
        given = ours if dense is None else dense
        return 0.0 if given is None or not given.any() else 1.0
    if ours.shape != dense.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    ours, dense = ours.double(), dense.double()
    off = (ours - dense).abs().masked_fill(ours == dense, 0.0)  # infinities that agree
    return float(off.max()) / (max(float(dense.abs().max()), at_least) or 1.0)


def severity(error: float) -> float:
    """For comparing errors: NaN is the worst."""
    return float("inf") if error != error else error

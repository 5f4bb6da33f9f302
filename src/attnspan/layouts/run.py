"""A run: positions start, start + step, ... below stop, held together by one rank.

Most runs have step 1 and are plain spans. A step makes a striped layout a handful of runs instead of one per
token, and two runs of equal step keep a band a band (`Band.thin`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Positions start, start + step, ... below stop. `stop` is one past the last position.

    >>> Run(2, 5).positions, Run.of(range(1, 8, 2))
    (range(2, 5), Run(start=1, stop=8, step=2))
    >>> len(Run(1, 8, 2).positions)
    4
    """

    start: int
    stop: int
    step: int = 1

    @classmethod
    def of(cls, positions: range) -> Run:
        """The run of a non-empty ascending range, its stop trimmed to one past the last position."""
        assert positions, "a run holds at least one position"
        assert positions.step > 0, "a run holds its positions in ascending order"
        return cls(positions[0], positions[-1] + 1, positions.step if len(positions) > 1 else 1)

    @property
    def positions(self) -> range:
        return range(self.start, self.stop, self.step)

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})" + (f" step {self.step}" if self.step > 1 else "")


Runs = tuple[Run, ...]


def joined_runs(runs: Runs) -> Runs:
    """The same positions in the same order, neighbours joined.

    >>> joined_runs((Run(0, 4), Run(4, 8), Run(12, 16)))
    (Run(start=0, stop=8, step=1), Run(start=12, stop=16, step=1))
    """
    if len(runs) == 1:
        return runs
    out: list[Run] = []
    for run in runs:
        if out and out[-1].step == run.step == 1 and out[-1].stop == run.start:
            out[-1] = Run(out[-1].start, run.stop)
        else:
            out.append(run)
    return tuple(out)


def tokens_in(runs: Runs) -> int:
    """The number of positions in runs.

    >>> tokens_in((Run(0, 4), Run(5, 10, 2)))
    7
    """
    return sum([(stop - start + step - 1) // step for start, stop, step in runs])


def positions_of(runs: Iterable[Sequence[int]]) -> Tensor:
    """The positions of runs, one after another.

    >>> positions_of((Run(0, 3), Run(5, 10, 2))).tolist(), positions_of(()).tolist()
    ([0, 1, 2, 5, 7, 9], [])
    """
    return torch.cat([torch.arange(*run, device="cpu") for run in ((0, 0), *runs)])

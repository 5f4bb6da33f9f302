"""The escape hatch: any FlexAttention mask_mod as a mask.

A function is evaluated (question.py): for whole blocks where its program shows that all of their pairs are alike, pair
by pair elsewhere; never S x S in memory, and once per length. What comes back is joined into bands where they are few,
as for a causal mask, a window or documents; plans, layouts and tiles then treat it like any other mask. Where they
would be many, as for every second key, the answers are kept by block: `cover` then says which blocks are certain and
which are partial: kernels evaluate the function in them again. Either way a mask that is written as a pattern is
cheaper to plan for.

[Note: a value] A mask is what its function computed when the mask was made, with the tensors and numbers that it read
then (snapshot.py). It stays that mask; masks of one function, made before and after something changed, are two. A user
who changes what a function reads may expect the mask to follow, so a session refuses a mask whose function computes
something else by now, and says to make a new one.

[Note: arguments that matter] A mask_mod may depend on its batch row or its head. Ours says how many rows and heads it
tells apart; a function that depends on more would be wrong in silence for every other. Its program (program.py) shows
what its result depends on, and a function that reads what was not declared is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from attnspan.errors import MaskError, integer, integers
from attnspan.masks.band import Band
from attnspan.masks.cover import Cover
from attnspan.masks.mask import Mask, MaskFunction, Rule, Space
from attnspan.masks.program import Program
from attnspan.masks.question import Question
from attnspan.masks.snapshot import Snapshot
from attnspan.masks.tracing import function_name


@dataclass(frozen=True, slots=True, repr=False)
class MaskMod(Mask):
    """The pairs for which `fn(batch_row, head, q_idx, kv_idx)` is true.

    `rows` and `heads` say how many batch rows and heads the function tells apart, `device` where the tensors it
    captures live, `lengths` which (q_len, kv_len) it is for, if not for any. It is what the function computes when the
    mask is made, see [Note: a value]; equal to another mask that computes the same from the same content.

    >>> print(MaskMod(lambda b, h, q, k: (q >= k) & (k % 2 == 0)).draw(4))
    █ · · ·
    █ · · ·
    █ · █ ·
    █ · █ ·
    """

    fn: MaskFunction = field(compare=False)
    rows: int = 1
    block: int = 128
    lengths: tuple[int, int] | None = None
    device: torch.device | str = field(default="cpu", compare=False)
    heads: int = 1
    snapshot: Snapshot = field(init=False)
    single: tuple[bool, bool] = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise MaskError(f"fn must be a function (b, h, q_idx, kv_idx) -> bool tensor, got {self.fn!r}")
        for name in ("rows", "block", "heads"):
            object.__setattr__(self, name, integer(name, getattr(self, name), at_least=1, error=MaskError))
        if self.lengths is not None:
            if not isinstance(self.lengths, list | tuple) or len(self.lengths) != 2:
                raise MaskError(f"lengths must be (q_len, kv_len), got {self.lengths!r}")
            lengths = integers("lengths", self.lengths, at_least=1, error=MaskError)
            object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "snapshot", Snapshot(self.fn, self.device))
        object.__setattr__(self, "single", single_row_and_head(self.fn))
        check_reads(self.program, self.rows, self.heads, "MaskMod(fn, {}=...)")

    @property
    def program(self) -> Program:
        """What the function computed when the mask was made."""
        return self.snapshot.program

    @property
    def natural_len(self) -> int | None:
        return self.lengths[0] if self.lengths else None

    @property
    def natural_kv_len(self) -> int | None:
        return self.lengths[1] if self.lengths else None

    def _check(self, q_len: int, kv_len: int, row: int) -> None:
        if self.lengths is not None and self.lengths != (q_len, kv_len):
            raise MaskError(f"{function_name(self.fn)} is for lengths {self.lengths}, got {(q_len, kv_len)}")

    def check_fresh(self) -> None:
        self.snapshot.check_current()

    def _bands(self, q_len: int, kv_len: int, row: int) -> Iterable[Band | None]:
        cover = self.cover(q_len, kv_len, row)
        if cover.is_exact:
            return cover.certain
        question = self._question(q_len, kv_len, row)
        return question.bands(question.blocks())

    def _cover(self, q_len: int, kv_len: int, row: int) -> Cover:
        question = self._question(q_len, kv_len, row)
        return question.cover(question.blocks())

    def _question(self, q_len: int, kv_len: int, row: int) -> Question:
        block, device = (self.block, self.block), torch.device(self.device)
        return Question(self.program, row, self.heads, (q_len, kv_len), block, device)

    def _rule(self, space: Space) -> Rule:
        return rule_of(self.program, space.device)

    def __repr__(self) -> str:
        told = [f"{name}={getattr(self, name)}" for name in ("rows", "heads") if getattr(self, name) > 1]
        return f"MaskMod({', '.join([function_name(self.fn), *told])})"


def check_reads(program: Program, rows: int, heads: int, usage: str) -> None:
    """See [Note: arguments that matter]."""
    for name, index, count, many in (("h", "head", heads, "heads"), ("b", "batch", rows, "rows")):
        if count == 1 and name in program.reads:
            raise MaskError(
                f"{program.name} reads its {index} index; say how many {many} it tells apart: {usage.format(many)}"
            )


def single_row_and_head(fn: object) -> tuple[bool, bool]:
    """Whether a function is for one batch row alone, and for one head, as it was told their index."""
    found: tuple[bool, bool] = getattr(fn, "single", (False, False))
    return found


def rule_of(program: Program, device: torch.device) -> Rule:
    """A program as a rule that is asked, and answers, on a device."""
    there = program.on(device)
    run, captured = there.function, there.captured

    def ask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return run(None, torch.as_tensor(b, device=device), torch.as_tensor(h, device=device), q, k, *captured)

    return ask

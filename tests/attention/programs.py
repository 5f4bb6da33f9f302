"""FlexAttention programs as people write them: masks, score_mods and both, over global positions.

    problem = PROGRAMS["alibi"](HeadTail(ranks=3), "ring")

Every program is a function of a layout, a strategy and what else a Problem may have; lengths, documents and tables are
its own. Functions that only combine numbers broadcast, so the oracle calls the very same on whole tensors, without vmap
and without tracing; the one that does not has a second form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from attnspan.layouts import Layout
from attnspan.masks import Causal, Documents, Full, Mask, MaskMod, SlidingWindow, Tree
from tests.attention.harness import Problem, Scoring

N, HEADS, BATCH, BLOCK = 37, 4, 2, 8
"""Small, of no round length; blocks so short that there are some of each sort."""

IDS = torch.tensor([[0] * 9 + [1] * 17 + [2] * 11, [0] * 20 + [1] * 3 + [2] * 14])
LENGTHS = torch.tensor([29, 0])
PREFIX = torch.tensor([5, 18])
WINDOWS = torch.tensor([2, 5, 11, 40])
WIDTH = 7  # of a picture, row by row
MAP = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)) < 0.45
PARENT_OF = torch.tensor([-1, 0, 0, 1, 1, 2])


def causal(b, h, q, k):
    return q >= k


def sliding_window(b, h, q, k):
    return (q - k >= 0) & (q - k < 9)


def document(b, h, q, k):
    return (IDS[b, q] == IDS[b, k]) & (q >= k)


def prefix_lm(b, h, q, k):
    return (k < PREFIX[b]) | (q >= k)


def natten(b, h, q, k):
    near_x = ((q % WIDTH) - (k % WIDTH)).abs() <= 1
    return near_x & ((q // WIDTH) - (k // WIDTH)).abs().le(2)


def dilated(b, h, q, k):
    return (q >= k) & ((q - k) % 3 == 0)


def block_sparse(b, h, q, k):
    return MAP[q // BLOCK, k // BLOCK]


def per_head_window(b, h, q, k):
    return (q >= k) & (q - k < WINDOWS[h])


def padding(b, h, q, k):
    return k < LENGTHS[b]


def jagged(b, h, q, k):
    return (q < LENGTHS[b]) & (k < LENGTHS[b])


def row_and_head(b, h, q, k):
    return (q - k).abs() <= WINDOWS[h] + 3 * b


def tree(b, h, q, k):
    """Nodes of 7 tokens: a token sees its node so far and all of its ancestors."""
    node, other = q // 7, k // 7
    up = PARENT_OF[node]
    upper = torch.where(up >= 0, PARENT_OF[up.clamp(min=0)], -1)
    return ((node == other) & (k <= q)) | (other == up) | (other == upper)


# ---- score_mods: functions of what they capture ----------------------------------------------------------------------


def alibi(slopes):
    return lambda score, b, h, q, k: score - slopes[h].exp() * (q - k)


def relative(table):
    return lambda score, b, h, q, k: score + table[h, (q - k).clamp(-6, 6) + 6]


def softcap():
    return lambda score, b, h, q, k: 3.0 * torch.tanh(score / 3.0)


def learned(bias, scale):
    return lambda score, b, h, q, k: score * torch.sigmoid(scale) + bias[h, q, k]


def only_past_by_score():
    return lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf"))


def by_row(rows):
    return lambda score, b, h, q, k: score * (1 + rows[b, h].tanh()) + 0.1 * b


def gated(table):
    """Looks up a row of a table, then an entry of it: does not broadcast."""
    return lambda score, b, h, q, k: score + torch.sigmoid(table)[h][q] * table[h][k]


def gated_dense(table):
    return lambda score, b, h, q, k: score + torch.sigmoid(table)[h, q] * table[h, k]


class Gate(torch.nn.Module):
    """A module whose parameter is captured."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def forward(self, score, b, h, q, k):
        return score * self.gate[h] - 0.01 * (q - k).abs()


# ---- programs --------------------------------------------------------------------------------------------------------


def listed(fn: Callable, size: tuple[int, int], heads: int | None) -> BlockMask:
    """What torch makes of a function; made per call, so that nothing is kept between tests."""
    return create_block_mask(fn, BATCH, heads, N, N, device="cpu", BLOCK_SIZE=size)


def _mod(fn: Callable, **told: int) -> Callable[[], Mask]:
    return lambda: MaskMod(fn, block=BLOCK, **told)


def _scored(*args) -> Scoring:
    return Scoring(*args)


WRITTEN: dict[str, tuple[Callable[[], Mask], Scoring | None]] = {
    "causal": (_mod(causal), None),
    "sliding window": (_mod(sliding_window), None),
    "document": (_mod(document, rows=BATCH), None),
    "prefix-LM": (_mod(prefix_lm, rows=BATCH), None),
    "NATTEN": (_mod(natten), None),
    "dilated": (_mod(dilated), None),
    "block-sparse random": (_mod(block_sparse), None),
    "per-head window": (_mod(per_head_window, heads=HEADS), None),
    "padding": (_mod(padding, rows=BATCH), None),
    "jagged batch": (_mod(jagged, rows=BATCH), None),
    "window by row and head": (_mod(row_and_head, rows=BATCH, heads=HEADS), None),
    "tree": (_mod(tree), None),
    "our masks with a function": (lambda: (Causal() & ~MaskMod(dilated, block=BLOCK)) | SlidingWindow(2, 0), None),
    "a BlockMask": (lambda: Mask.from_block_mask(listed(document, (16, 8), None)), None),
    "a BlockMask by head": (lambda: Mask.from_block_mask(listed(row_and_head, (8, 16), HEADS)), None),
    "ALiBi": (Causal, _scored(alibi, ((HEADS,),))),
    "relative bias table": (Full, _scored(relative, ((HEADS, 13),))),
    "tanh soft-cap": (lambda: SlidingWindow(9, 3), _scored(softcap)),
    "learned bias": (Causal, _scored(learned, ((HEADS, N, N), ()))),
    "masked by score": (Full, _scored(only_past_by_score)),
    "score by row and head": (lambda: Documents(IDS_LENGTHS), _scored(by_row, ((BATCH, HEADS),))),
    "rows of tables": (lambda: Tree([-1, 0, 0], [11, 12, 14]), _scored(gated, ((HEADS, N),), gated_dense)),
    "a module": (_mod(dilated), _scored(Gate, ((HEADS,),))),
    "relative bias, per-head window": (_mod(per_head_window, heads=HEADS), _scored(relative, ((HEADS, 13),))),
}

IDS_LENGTHS = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in IDS]


def problem(name: str, layout: Layout, strategy: str, **features) -> Problem:
    """The problem of a program."""
    mask, scoring = WRITTEN[name]
    shape = {"heads": HEADS, "kv_heads": 2, "batch": BATCH, "dim": 8, "scoring": scoring}
    return Problem(mask(), layout, N, strategy, **{**shape, **features})

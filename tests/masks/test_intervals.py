"""Interval arithmetic over a traced mask_mod: what it says of a box of pairs holds for each of them.

The oracle asks pair by pair, as FlexAttention does. Every operation that has a rule is tried on random tables, compared
with thresholds that its results straddle.
"""

import functools
import operator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from attnspan.masks import range_rules
from attnspan.masks.boxes import Boxes
from attnspan.masks.intervals import Intervals
from attnspan.masks.range_rules import RULES
from attnspan.masks.tracing import traced

INTS = [torch.int64, torch.int32, torch.int16, torch.int8]
FLOATS = [torch.float32, torch.float64, torch.float16]
NUMBERS = [*INTS, torch.uint8, *FLOATS]
BOOLS = [torch.bool]

OPERATIONS = {
    "add": (operator.add, NUMBERS),
    "add a number": (lambda x, y: x + 2, NUMBERS),
    "add a float": (lambda x, y: x + 0.5, NUMBERS),
    "subtract": (operator.sub, NUMBERS),
    "subtract from": (lambda x, y: 3 - x, NUMBERS),
    "multiply": (operator.mul, NUMBERS),
    "negate": (lambda x, y: -x, [*INTS, *FLOATS]),
    "absolute": (lambda x, y: (x - y).abs(), [*INTS, *FLOATS]),
    "divide": (operator.truediv, NUMBERS),
    "divide by a number": (lambda x, y: x / -3, NUMBERS),
    "floor divide": (lambda x, y: x // y, INTS),
    "floor divide by a number": (lambda x, y: x // 3, INTS),
    "truncating divide": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), INTS),
    "remainder": (lambda x, y: x % 5, INTS),
    "remainder by a table": (lambda x, y: x % y, INTS),
    "shift": (lambda x, y: x >> 1, INTS),
    "bits shifted": (lambda x, y: torch.bitwise_right_shift(x, 2), INTS),
    "larger": (torch.maximum, NUMBERS),
    "smaller": (torch.minimum, NUMBERS),
    "clamp": (lambda x, y: x.clamp(-2, 3), [*INTS, *FLOATS]),
    "clamp from below": (lambda x, y: x.clamp_min(1), NUMBERS),
    "clamp from above": (lambda x, y: x.clamp_max(1), NUMBERS),
    "floor": (lambda x, y: torch.floor(x / 2), FLOATS),
    "ceil": (lambda x, y: torch.ceil(x / 2), FLOATS),
    "trunc": (lambda x, y: torch.trunc(x / 2), FLOATS),
    "sign": (lambda x, y: torch.sign(x), [*INTS, *FLOATS]),
    "to float": (lambda x, y: x.float(), NUMBERS),
    "to int": (lambda x, y: x.int(), NUMBERS),
    "to bool": (lambda x, y: x.bool(), NUMBERS),
    "copy": (lambda x, y: x.clone().detach(), NUMBERS),
    "where": (lambda x, y: torch.where(x > 1, x, y), NUMBERS),
    "where a number": (lambda x, y: torch.where(x > 1, x, 7), NUMBERS),
    "equal": (operator.eq, [*NUMBERS, torch.bool]),
    "unequal": (operator.ne, [*NUMBERS, torch.bool]),
    "less": (operator.lt, NUMBERS),
    "less or equal": (operator.le, NUMBERS),
    "greater": (operator.gt, NUMBERS),
    "greater or equal": (operator.ge, NUMBERS),
    "and": (operator.and_, BOOLS),
    "or": (operator.or_, BOOLS),
    "xor": (operator.xor, BOOLS),
    "not": (lambda x, y: ~x, BOOLS),
    "logical and": (torch.logical_and, [*NUMBERS, torch.bool]),
    "logical or": (torch.logical_or, [*NUMBERS, torch.bool]),
    "logical xor": (torch.logical_xor, [*NUMBERS, torch.bool]),
    "logical not": (lambda x, y: torch.logical_not(x), [*NUMBERS, torch.bool]),
    "bools multiplied": (lambda x, y: x * y, BOOLS),
    "bools added": (lambda x, y: x + y, BOOLS),
    "no rule": (lambda x, y: torch.bitwise_and(x, y), INTS),
}
ALIASED = {torch.ops.aten.alias, torch.ops.aten.lift_fresh_copy}  # what some versions of torch trace a copy as


def check_boxes(program, allowed_HQK, row=0):
    """What is said of boxes of every size is true of all their pairs; how many boxes of one pair were decided."""
    heads, *lengths = allowed_HQK.shape
    said, boxes = Intervals(program, row, heads), Boxes.covering(tuple(lengths), (1, 1))
    while True:
        full, empty = said.decide(boxes)
        for claimed, holds in ((full, allowed_HQK.all(0)), (empty, ~allowed_HQK.any(0))):
            grid = torch.zeros([-(-n // size) for n, size in zip(lengths, boxes.size, strict=True)], dtype=torch.bool)
            grid[boxes.i, boxes.j] = claimed
            pairs = grid.repeat_interleave(boxes.size[0], 0).repeat_interleave(boxes.size[1], 1)
            assert (pairs[: lengths[0], : lengths[1]] <= holds).all()
        if boxes.size == (1, 1):
            return int((full | empty).sum())
        boxes = boxes.halved()


def check_mask(fn, lengths, rows=1, heads=1):
    """Against FlexAttention's own evaluation; the least number of boxes of one pair that were decided for a row."""
    allowed = create_mask(fn, rows, heads, *lengths, device="cpu")
    return min(check_boxes(traced(fn), allowed[row], row) for row in range(rows))


def table(dtype, seed, length=12):
    """Values between -4 and 6, some of them in runs."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 7, (length,), generator=random)
    values = torch.where(torch.rand(length, generator=random) < 0.5, values, values.roll(1))
    if dtype in (torch.uint8, torch.bool):
        values = values.clamp(min=0) % (2 if dtype == torch.bool else 8)
    return (values / 2 if dtype.is_floating_point else values).to(dtype)


@functools.cache
def program_of(name, compare, *dtypes):
    """x[q], y[k] and a limit, traced once, and the places of the three among what it captured."""
    operation, _ = OPERATIONS[name]
    tables = x, y, limit = [torch.ones(12, dtype=dtype) for dtype in dtypes]
    program = traced(lambda b, h, q, k: compare(operation(x[q], y[k]), limit[b]))
    return program, [next(i for i, each in enumerate(tables) if each is used) for used in program.captured]


@settings(max_examples=3 * settings.default.max_examples)
@given(st.sampled_from(list(OPERATIONS)), st.data())
def test_what_is_said_of_a_box_holds_for_its_pairs(name, data):
    check_operation(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@given(st.data())
def test_what_is_said_of_a_box_holds_for_every_operation(name, data):
    check_operation(name, data)


def check_operation(name, data):
    operation, dtypes = OPERATIONS[name]
    left, right = (table(data.draw(st.sampled_from(dtypes)), data.draw(st.integers(0, 1 << 20))) for _ in "xy")
    if name in ("floor divide", "truncating divide", "remainder by a table"):
        right = torch.where(right == 0, torch.ones_like(right), right)  # others raise
    values = operation(left[:, None], right[None, :])
    limit = values.flatten()[data.draw(st.integers(0, 11))].reshape(1)
    compare = data.draw(st.sampled_from([operator.ge, operator.lt, operator.eq]))
    program, places = program_of(name, compare, left.dtype, right.dtype, limit.dtype)
    captured = tuple((left, right, limit)[place] for place in places)
    check_boxes(replace(program, captured=captured), compare(values, limit).expand(1, 12, 12))


def test_every_rule_is_tried():
    tried = set()
    for operation, dtypes in OPERATIONS.values():
        left, right = (table(dtypes[0], seed) for seed in (0, 1))
        program = traced(lambda b, h, q, k, f=operation, x=left, y=right: f(x[q], y[k]) == 1)
        tried |= {getattr(node.target, "overloadpacket", None) for node in program.graph.graph.nodes}
    by_version = {torch.ops.aten.detach}  # no longer traced in 2.15
    assert set(RULES) - tried <= ALIASED | by_version | {torch.ops.aten.clamp_max, torch.ops.aten.clamp_min}


def test_a_wrong_rule_is_found(monkeypatch):
    """As if a difference grew with what is subtracted."""

    def window(b, h, q, k):
        return (q - k >= 0) & (q - k < 3)

    assert check_mask(window, (12, 12)) == 144
    monkeypatch.setitem(RULES, torch.ops.aten.sub, range_rules._monotone(1, 1))
    with pytest.raises(AssertionError):
        check_mask(window, (12, 12))


DOCUMENTS = torch.tensor([[5, 5, 5, -2, -2, 9, 9, 9, 9, 5, 0], [1, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3]])
WINDOWS, BLOCKS = torch.tensor([2, 5, 3]), torch.rand(3, 6, generator=torch.Generator().manual_seed(0)) < 0.5
DENSE = torch.rand(2, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.9
PROGRAMS = {
    "documents of rows": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b][k],
    "windows of heads": lambda b, h, q, k: (q - k).abs() <= WINDOWS[h],
    "both": lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & ((q >= k) | (k < WINDOWS[h])),
    "from the end": lambda b, h, q, k: DOCUMENTS[b, q - 11] == DOCUMENTS[b, -1 - k],
    "a map of blocks": lambda b, h, q, k: BLOCKS[q // 4, k // 2],
    "a mask as a table": lambda b, h, q, k: DENSE[b, q, k],
    "a table of a table": lambda b, h, q, k: DOCUMENTS[b % 2, WINDOWS[q % 3] + k // 2] > 2,
    "constants of its own": lambda b, h, q, k: DOCUMENTS.cumsum(1)[b, q] > WINDOWS.sum() - k,
    "everything": lambda b, h, q, k: torch.ones((), dtype=torch.bool),
    "nothing": lambda b, h, q, k: q < 0,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_decided_pair_by_pair_at_the_latest(name):
    heads = 3 if "heads" in name or name == "both" else 1
    decided = check_mask(PROGRAMS[name], (11, 11), rows=2, heads=heads)
    assert decided == 121 or heads > 1


SHORT, ZERO, NAN = torch.arange(8), torch.tensor([1, 0, 2, 3]), torch.tensor([1.0, float("nan"), 2.0, 3.0])
LARGE, SMALL = torch.tensor([1 << 40, -(1 << 62), 1 << 62, 3]), torch.tensor([100, -100, 3, 4]).to(torch.int8)
INFINITE = torch.tensor([float("inf"), 1.0, -float("inf"), 2.0])
NAMES = torch.tensor([7, 7, 7, -2, -2, 9, 9, 9, 1, 1, 0, 0])
NAMES_OF_ROWS, OTHER_NAMES = torch.stack([NAMES, NAMES.roll(5)]), NAMES.flip(0).to(torch.int16)


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: NAMES[q] == NAMES[k],
        lambda b, h, q, k: NAMES[q] != OTHER_NAMES[k],
        lambda b, h, q, k: NAMES_OF_ROWS[b, q] == NAMES_OF_ROWS[1, k],
        lambda b, h, q, k: (NAMES[q] == NAMES[k]) & (NAMES[q] > 0),
        lambda b, h, q, k: NAMES[q] == NAMES.float()[k],
    ],
)
def test_numbers_that_are_only_compared_may_have_any_names(fn):
    assert check_mask(fn, (12, 12), rows=2) == 144


def test_documents_are_told_apart_whatever_their_ids():
    """As soon as boxes are as small as documents, those of two documents are empty."""
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    ids = order.repeat_interleave(4)
    boxes = Boxes.covering((32, 32), (4, 4)).halved().halved()
    _, empty = Intervals(traced(lambda b, h, q, k: ids[q] == ids[k]), 0, 1).decide(boxes)
    assert torch.equal(empty, boxes.i != boxes.j)


UNSURE = {
    "beyond a table": lambda b, h, q, k: (q >= k) & (SHORT[q] == SHORT[k]),
    "beyond a table, by itself decided": lambda b, h, q, k: (q < 0) & (SHORT[q + k] > 2),
    "division by zero": lambda b, h, q, k: (q >= 4) | (q // ZERO[k % 4] > 1),
    "remainder by zero": lambda b, h, q, k: (q >= 4) | (q % ZERO[k % 4] > 1),
}


@pytest.mark.parametrize("name", UNSURE)
def test_pairs_that_may_raise_are_left_to_be_asked(name):
    full, empty = Intervals(traced(UNSURE[name]), 0, 1).decide(Boxes.covering((12, 12), (12, 12)))
    assert not (full | empty).any()


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: LARGE[q % 4] + LARGE[k % 4] > 0,
        lambda b, h, q, k: LARGE[q % 4] * LARGE[k % 4] > 0,
        lambda b, h, q, k: -LARGE[q % 4] * 2 > k,
        lambda b, h, q, k: LARGE[q % 4].int() > 0,
        lambda b, h, q, k: SMALL[q % 4] + SMALL[k % 4] > 0,
        lambda b, h, q, k: NAN[q % 4] > 0,
        lambda b, h, q, k: NAN[q % 4] != NAN[k % 4],
        lambda b, h, q, k: torch.where(k > 2, NAN[1], NAN[0]) < 5,
        lambda b, h, q, k: INFINITE[q % 4] - INFINITE[k % 4] <= float("inf"),
        lambda b, h, q, k: INFINITE[q % 4] * (k - 1) < 7,
        lambda b, h, q, k: INFINITE[q % 4] > -float("inf"),
        lambda b, h, q, k: (q + 16777210).float() == 16777216.0,
        lambda b, h, q, k: (q + 16777210) < 16777215.5,
        lambda b, h, q, k: SHORT[(q % 4).to(torch.uint8).long()] == k,
    ],
)
def test_overflow_nan_infinity_and_rounding_are_as_pair_by_pair(fn):
    check_mask(fn, (12, 12))


def test_a_program_under_vmap_is_not_decided():
    program = traced(lambda b, h, q, k: (DOCUMENTS[0].roll(1)[:4] + q == k).any())
    assert not program.is_flat
    assert not torch.cat(Intervals(program, 0, 1).decide(Boxes.covering((11, 11), (1, 1)))).any()

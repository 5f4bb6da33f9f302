"""A total is the sum of its parts, whatever waits and whatever was added before, and is rounded once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan.attention.sums import DeferredSum

ROWS = 12
SHAPES = [torch.Size((2, 2, ROWS, 3)), torch.Size((2, 2, ROWS, 5))]
SPANS = st.builds(lambda a, b: range(min(a, b), max(a, b) + 1), *[st.integers(0, ROWS - 1)] * 2)
STRIPES = st.builds(lambda start, step: range(start, ROWS, step), st.integers(0, 3), st.integers(2, 4))
STEPS = st.lists(
    st.tuples(SPANS | STRIPES, st.integers(1, 3), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16])),
    max_size=8,
)


def part(count, rows, shape, dtype):
    """Whole numbers: their sums are exact, in any order and in half precision too."""
    return torch.randint(-3, 4, (count, *shape[:2], len(rows), shape[3])).to(dtype)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_total_is_the_sum_of_its_parts(steps, dtype):
    total, expected = DeferredSum(SHAPES, torch.float32), [torch.zeros(shape) for shape in SHAPES]
    for rows, count, wait, kind in steps:
        stacks = [part(count, rows, shape, kind) for shape in SHAPES]
        for target, stack in zip(expected, stacks, strict=True):
            target[:, :, rows.start : rows.stop : rows.step] += stack.float().sum(0)
        total.gather(rows, *stacks, wait=wait)
    for found, target in zip(total.result(dtype), expected, strict=True):
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert torch.equal(found.float(), target)


def test_what_waits_is_rounded_once():
    total = DeferredSum([torch.Size((1, 1, 1, 1))], torch.float32)
    for x in (1.0, 2**-8, 2**-8):  # each alone is lost beside 1 in bfloat16, both together are not
        total.add(range(1), torch.tensor(x, dtype=torch.bfloat16).view(1, 1, 1, 1))
    assert total.result(torch.bfloat16)[0].item() == 1 + 2**-7


def test_one_part_of_all_rows_is_the_total_itself():
    part = torch.randn(1, 1, 4, 2)
    total = DeferredSum([part.shape], torch.float32)
    total.add(range(4), part)
    assert total.result(torch.float32)[0].data_ptr() == part.data_ptr()


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 3), (torch.float32, 2)])
def test_no_more_waits_than_a_sum_and_a_part_would_take(dtype, most):
    total = DeferredSum([torch.Size((1, 1, 4, 2))], torch.float32)
    for count in range(1, 7):
        total.add(range(4), torch.ones(1, 1, 4, 2, dtype=dtype))
        assert len(total._waiting) == (count if count <= most else 1)
    assert (total.result(torch.float32)[0] == 6).all()


def test_one_writer_of_all_rows_adds_to_what_waited():
    total = DeferredSum([torch.Size((1, 1, 4, 2))], torch.float32)
    total.add(range(2), torch.ones(1, 1, 2, 2))
    (view,), begun = total.open()
    assert begun
    assert view[0, 0, :, 0].tolist() == [1, 1, 0, 0]

"""Writing and adding between layouts: the fast form equals torch's."""

import pytest
import torch

from attnspan.kernels import add_into, sum_into, write_into

LAYOUTS = {
    "dense": lambda x: x,
    "positions outermost": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "half of a wider row": lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
    "every second row": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
}


def check(device, dtype, part_dtype, layout, part_layout, dim):
    target, part = (torch.randn(2, 3, 37, dim).to(device) for _ in range(2))
    target, part = LAYOUTS[layout](target.to(dtype)), LAYOUTS[part_layout](part.to(part_dtype))
    expected = target + part.to(dtype)
    add_into(target, part)
    assert torch.equal(target, expected)
    write_into(target, part)
    assert torch.equal(target, part.to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part_layout", LAYOUTS)
def test_writing_and_adding_keep_to_the_target(layout, part_layout):
    check("cpu", torch.float32, torch.bfloat16, layout, part_layout, 24)


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [16, 24, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part_layout", LAYOUTS)
@pytest.mark.parametrize("part_dtype", [torch.bfloat16, torch.float32])
def test_the_triton_form_equals_torchs(layout, part_layout, part_dtype, dim):
    check("cuda", torch.float32, part_dtype, layout, part_layout, dim)


def check_sum(device, dtype, layout, counts, add):
    """Against float64, rounded: what lies near the middle of two numbers may be rounded to either."""
    target = LAYOUTS[layout](torch.randn(2, 3, 37, 24, device=device).to(dtype))
    stacks = [
        torch.stack([LAYOUTS[layout](torch.randn(2, 3, 37, 24, device=device).to(kind)) for _ in range(count)])
        for count, kind in zip(counts, (torch.bfloat16, torch.float32, torch.bfloat16), strict=False)
    ]
    expected = sum((stack.double().sum(0) for stack in stacks), target.double() if add else torch.zeros(1).to(target))
    sum_into(target, stacks, add=add)
    torch.testing.assert_close(target.double(), expected.to(dtype).double(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("counts", [(1,), (2, 1), (1, 7, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_are_summed_wide_and_rounded_once(dtype, layout, counts, add):
    check_sum("cpu", dtype, layout, counts, add)


@pytest.mark.cuda
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("counts", [(1,), (2, 1), (1, 7, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_triton_form_sums_stacks(dtype, layout, counts, add):
    check_sum("cuda", dtype, layout, counts, add)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_sum_is_rounded_once(device):
    parts = torch.tensor([1.0, 2**-8, 2**-8], dtype=torch.bfloat16, device=device).view(3, 1, 1, 1, 1)
    target = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16, device=device)
    sum_into(target, [parts])
    assert target.item() == 1 + 2**-7

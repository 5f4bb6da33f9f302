"""Writing and adding between layouts: the fast form equals torch's."""

import pytest
import torch

from attnspan.kernels import add_into, write_into

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

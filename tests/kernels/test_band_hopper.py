"""The program for Hopper GPUs gives what the general one gives, and nothing of other rows."""

import pytest
import torch

from attnspan.kernels import GradientBuffers, MergedOutputs, Spec, band_hopper, bands
from attnspan.masks.tile import Tile

TILES = (
    Tile(range(0, 333), range(0, 201), -332, 200),  # full
    Tile(range(333, 1001), range(201, 777), -666, 0),  # causal
    Tile(range(333, 1001), range(777, 1100), -700, 17),  # a window, of the same rows
    Tile(range(1001, 1003), range(1100, 1103), -1, 2),
)  # rows from 1003 on see nothing, and columns from 1103 on are seen by none
ROWS, COLS = 1010, 1111


def results(q, k, v, grad, scale=0.1):
    """Out, lse, dk and dv."""
    spec = Spec(scale)
    out, lse = bands.forward(spec, q, k, v, TILES, torch.float32)
    into = GradientBuffers(torch.empty_like(q), *(torch.full_like(x, torch.nan, dtype=torch.float32) for x in (k, v)))
    bands.backward(spec, MergedOutputs(grad, None, out.to(q.dtype), lse), q, k, v, TILES, into)
    return out, lse, into.dk, into.dv


def random(heads, rows, dim, dtype=torch.bfloat16):
    return torch.randn(2, heads, rows, dim, dtype=dtype, device="cuda")


def assert_alike(x, y):
    """As near as half precision tells numbers apart: probabilities are rounded, in blocks of other sizes."""
    assert torch.equal(x.isfinite(), y.isfinite())
    x, y = (each.nan_to_num(neginf=0.0) for each in (x, y))
    torch.testing.assert_close(x, y, rtol=2**-7, atol=float(y.abs().max()) * 2**-8)


@pytest.fixture(autouse=True)
def serves_small_tensors(monkeypatch):
    monkeypatch.setattr(band_hopper, "SMALL", 0)


def hopper():
    return torch.cuda.get_device_capability()[0] == 9


def test_nothing_is_served_elsewhere():
    x = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16)
    assert not band_hopper.serves(x, x, x, x)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("scale", [0.1, -0.1])
def test_it_gives_what_the_general_program_gives(dtype, dims, heads, scale, monkeypatch):
    torch.manual_seed(0)
    q, grad = (random(heads[0], ROWS, dim, dtype) for dim in dims)
    packed = random(heads[1], COLS, sum(dims), dtype).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    k, v = packed[..., : dims[0]], packed[..., dims[0] :]
    assert band_hopper.serves(q, k, v, grad) == hopper()
    found = results(q, k, v, grad, scale=scale)
    again = results(q, k, v, grad, scale=scale)
    monkeypatch.setattr(band_hopper, "serves", lambda *tensors: False)
    for x, same, y in zip(found, again, results(q, k, v, grad, scale=scale), strict=True):
        assert torch.equal(x, same)
        assert_alike(x, y)


@pytest.mark.cuda
def test_what_is_no_number_in_other_rows_is_left_out():
    torch.manual_seed(0)
    q, grad, k, v = random(4, ROWS, 128), random(4, ROWS, 128), random(4, COLS, 128), random(4, COLS, 128)
    expected = results(q, k, v, grad)
    for x in (q, grad):
        x[:, :, 333:1001] = torch.nan
    for x in (k, v):
        x[:, :, 201:1100] = torch.nan
    found = results(q, k, v, grad)
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(x[:, :, :333], y[:, :, :333])
        assert torch.equal(x[:, :, 1001:], y[:, :, 1001:])
        assert x[:, :, 333:1001].isnan().all()
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(x[:, :, :201], y[:, :, :201])
        assert torch.equal(x[:, :, 1100:], y[:, :, 1100:])
        assert x[:, :, 201:777].isnan().any()


@pytest.mark.cuda
def test_tensors_that_lie_askew_are_left_to_the_general_program():
    torch.manual_seed(0)
    whole = random(4, ROWS, 132)
    q, grad, k, v = whole[..., 1:129], random(4, ROWS, 128), random(4, COLS, 128), random(4, COLS, 128)
    assert not band_hopper.serves(q, k, v, grad)
    for x, y in zip(results(q, k, v, grad), results(q.contiguous(), k, v, grad), strict=True):
        assert_alike(x, y)

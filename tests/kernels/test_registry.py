"""A kernel that was asked for is met or refused, never replaced; what it says is compared whole."""

import re

import pytest
import torch

from attnspan.errors import KernelError
from attnspan.kernels import KERNELS, Spec, band, choose_kernel, kernel_for_tile, refusals
from attnspan.masks.tile import Tile
from tests.kernels.cases import deterministic

SPEC = Spec(scale=1.0)
FULL = Tile(range(4), range(4), -3, 3)
CAUSAL = Tile(range(4), range(4), -3, 0)
WINDOW = Tile(range(4), range(4), -1, 0)


class Placed:
    """A tensor's outside, on a device that may not be here: `supports` looks at nothing else."""

    def __init__(self, dtype="bfloat16", dim=64, length=4, device="cuda"):
        self.dtype, self.shape, self.device = getattr(torch, dtype), (1, 2, length, dim), torch.device(device)

    def element_size(self):
        return self.dtype.itemsize

    def is_floating_point(self):
        return self.dtype.is_floating_point


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    """As on a machine with a GPU, wherever this runs."""
    monkeypatch.setattr(band, "has_triton", lambda: True)


def inputs(value_dim=None, **placed):
    x = Placed(**placed)
    return x, x, x if value_dim is None else Placed(**placed | {"dim": value_dim})


@pytest.mark.parametrize(
    ("kernel", "placed", "tile", "reason"),
    [
        ("reference", {"dtype": "int64"}, FULL, "reference needs a floating-point dtype, got torch.int64"),
        ("cpu_flash", {}, FULL, "cpu_flash runs on cpu, got tensors on cuda"),
        (
            "cpu_flash",
            {"device": "cpu", "dtype": "int64"},
            FULL,
            "cpu_flash needs float32, float64, bfloat16 or float16, got int64",
        ),
        (
            "cpu_flash",
            {"device": "cpu", "value_dim": 32},
            FULL,
            "cpu_flash needs one head dim for keys and values, got 64 and 32",
        ),
        ("cuda_flash", {"device": "cpu"}, FULL, "cuda_flash runs on cuda, got tensors on cpu"),
        ("cuda_flash", {"dtype": "float32"}, FULL, "cuda_flash needs float16 or bfloat16, got float32"),
        ("cuda_flash", {"value_dim": 32}, FULL, "cuda_flash needs one head dim for keys and values, got 64 and 32"),
        ("cuda_flash", {"dim": 20}, FULL, "cuda_flash needs a head dim that is a multiple of 8 up to 256, got 20"),
        ("cuda_flash", {"dim": 264}, FULL, "cuda_flash needs a head dim that is a multiple of 8 up to 256, got 264"),
        ("cudnn", {"device": "cpu"}, FULL, "cudnn runs on cuda, got tensors on cpu"),
        ("cudnn", {"dtype": "float32"}, FULL, "cudnn needs float16 or bfloat16, got float32"),
        ("cudnn", {"dim": 136}, FULL, "cudnn needs head dims that are multiples of 8 up to 128, got 136"),
        ("cudnn", {"value_dim": 4}, FULL, "cudnn needs head dims that are multiples of 8 up to 128, got 4"),
        (
            "cudnn",
            {},
            WINDOW,
            "cudnn computes full and causal tiles, got general [0, 4) x [0, 4) within -1..0",
        ),
        ("cudnn", {"length": 1}, Tile(range(1), range(1), 0, 0), "cudnn needs more than one key, got 1"),
        ("band", {"device": "cpu"}, FULL, "band runs on cuda, got tensors on cpu"),
        ("band", {"dtype": "float64"}, FULL, "band needs float32, float16 or bfloat16, got float64"),
        ("band", {"dim": 264}, FULL, "band needs head dims up to 256, got 264"),
        ("band", {"value_dim": 257}, WINDOW, "band needs head dims up to 256, got 257"),
        ("efficient", {"device": "cpu"}, FULL, "efficient runs on cuda, got tensors on cpu"),
        ("efficient", {"dtype": "float64"}, FULL, "efficient needs float32, float16 or bfloat16, got float64"),
        ("efficient", {"dim": 20}, FULL, "efficient needs head dims that are multiples of 8, got 20"),
        (
            "efficient",
            {"dim": 18, "dtype": "float32"},
            FULL,
            "efficient needs head dims that are multiples of 4, got 18",
        ),
    ],
)
def test_a_refusal_is_a_reason(kernel, placed, tile, reason):
    q, k, v = inputs(**placed)
    assert KERNELS[kernel].supports(SPEC, q, k, v, (tile,)) == reason
    assert refusals(SPEC, q, k, v, (tile,))[kernel] == reason
    with pytest.raises(KernelError, match=re.escape(f"kernel={kernel!r} cannot compute {tile}: {reason}; ")):
        choose_kernel(kernel, SPEC, q, k, v, (tile,))


@pytest.mark.parametrize(
    ("placed", "tile", "chosen"),
    [
        ({}, FULL, "cudnn"),
        ({"dtype": "float16"}, CAUSAL, "cudnn"),
        ({}, WINDOW, "band"),
        ({"dim": 256}, FULL, "band"),
        ({"dim": 256, "value_dim": 128}, FULL, "band"),
        ({"dim": 20}, FULL, "band"),
        ({"dim": 264}, FULL, "efficient"),
        ({"dtype": "float32"}, CAUSAL, "efficient"),
        ({"dtype": "float32"}, WINDOW, "efficient"),
        ({"dtype": "float64"}, WINDOW, "reference"),
        ({"dtype": "float32", "dim": 18}, FULL, "band"),
        ({"dim": 268}, FULL, "reference"),
        ({"device": "cpu"}, WINDOW, "cpu_flash"),
        ({"device": "cpu", "dtype": "float64"}, FULL, "cpu_flash"),
        ({"device": "cpu", "value_dim": 32}, FULL, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can(placed, tile, chosen):
    assert kernel_for_tile(SPEC, *inputs(**placed), tile).name == chosen


@pytest.mark.parametrize(
    ("placed", "tile", "chosen"),
    [
        ({}, WINDOW, "cuda_flash"),
        ({"dim": 256, "value_dim": 128}, FULL, "efficient"),
        ({"dim": 20}, FULL, "reference"),
    ],
)
def test_without_triton_auto_takes_the_next(placed, tile, chosen, monkeypatch):
    monkeypatch.setattr(band, "has_triton", lambda: False)
    assert kernel_for_tile(SPEC, *inputs(**placed), tile).name == chosen
    reason = "band needs the package triton, which is not installed"
    with pytest.raises(KernelError, match=re.escape(f"kernel='band' cannot compute {tile}: {reason}; ")):
        choose_kernel("band", SPEC, *inputs(**placed), (tile,))


def test_a_scale_of_nothing_is_refused_by_band_alone():
    """It looks for the largest score before scaling, and nothing times -inf is no number."""
    assert refusals(Spec(scale=0.0), *inputs(), (FULL,))["band"] == "band needs a scale other than 0"
    assert kernel_for_tile(Spec(scale=0.0), *inputs(), WINDOW).name == "cuda_flash"


def test_where_torch_must_be_deterministic_auto_leaves_cudnn_out_and_asking_for_it_is_refused():
    """See test_determinism.py for what the kernels do then."""
    assert kernel_for_tile(SPEC, *inputs(), CAUSAL).name == "cudnn"
    with deterministic():
        assert kernel_for_tile(SPEC, *inputs(), CAUSAL).name == "band"
        reason = "cudnn's backward is not deterministic, which torch.use_deterministic_algorithms(True) asks for"
        with pytest.raises(KernelError, match=re.escape(f"{CAUSAL}: {reason}; for this tile use band or ")):
            choose_kernel("cudnn", SPEC, *inputs(), (CAUSAL,))
    with deterministic(warn_only=True):
        assert kernel_for_tile(SPEC, *inputs(), CAUSAL).name == "cudnn"


def test_an_explicit_request_names_those_that_would_do():
    message = (
        "kernel='cudnn' cannot compute general [0, 4) x [0, 4) within -1..0: cudnn computes full and causal tiles, "
        "got general [0, 4) x [0, 4) within -1..0; "
        "for this tile use band or cuda_flash or efficient or reference, or auto"
    )
    with pytest.raises(KernelError, match=f"^{re.escape(message)}$"):
        choose_kernel("cudnn", SPEC, *inputs(), (WINDOW,))


def test_a_name_that_is_no_kernel_is_refused_with_the_nearest():
    message = (
        "kernel must be one of auto, cudnn, band, flash4, cuda_flash, efficient, cpu_flash, reference, flex, blocks, "
        "got 'cuda-flash'; did you mean 'cuda_flash'?"
    )
    with pytest.raises(KernelError, match=f"^{re.escape(message)}$"):
        choose_kernel("cuda-flash", SPEC, *inputs(), (FULL,))


def test_where_none_can_auto_tells_every_reason():
    with pytest.raises(KernelError, match=r"no kernel can; .*cudnn runs on.*reference needs a floating-point dtype"):
        kernel_for_tile(SPEC, *inputs(dtype="int64", device="cpu"), FULL)

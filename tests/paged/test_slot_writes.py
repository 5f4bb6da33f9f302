"""New keys go to their slots in one kernel, as they do in several: on CUDA, and in Triton's interpreter.

The interpreter converts to 8 bits of float in a way of its own, so that they are left to CUDA.

TRITON_INTERPRET=1 python -m pytest tests/paged/test_slot_writes.py
"""

import pytest
import torch

from attnspan.paged import slot_writes
from attnspan.paged.quantised import Quantised, quantise
from tests.kernels.compiling import Compiling
from tests.kernels.interpreter import compiles, in_interpreter

STORED = [None, torch.int8, torch.float8_e4m3fn]
where_it_runs = pytest.mark.parametrize(
    ("device", "stored"),
    [
        *(pytest.param("cuda", stored, marks=pytest.mark.cuda) for stored in STORED),
        *(pytest.param("cpu", stored, marks=in_interpreter) for stored in STORED[:2]),
    ],
    ids=str,
)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
SLOTS = [7, 3, 1, 31, 12]


def pages(heads, dim, dtype, stored, device):
    if stored is None:
        return torch.zeros(8, 4, heads, dim, dtype=dtype, device=device)
    codes = torch.zeros(8, 4, heads, dim, dtype=torch.int8, device=device)
    return Quantised(codes, torch.zeros(8, 4, heads, device=device), stored)


def drawn(heads, dim, dtype, device):
    """Of tokens whose heads are part of others; the first is 0."""
    x = torch.randn(len(SLOTS), heads + 2, dim, generator=torch.Generator().manual_seed(dim)) * 3
    x[0] = 0.0
    return x.to(device, dtype)[:, :heads]


def slots_of(found, dim):
    """What each of the slots holds, and whether others are as they were."""
    if isinstance(found, Quantised):
        found = found.dequantise()
    flat = found.flatten(0, 1)
    others = flat.clone()
    others[SLOTS] = 0
    assert not others.any()
    return flat[SLOTS]


@where_it_runs
@pytest.mark.parametrize("dtype", slot_writes.DTYPES)
@pytest.mark.parametrize(("heads", "dims"), [(8, (128, 128)), (3, (24, 16)), (1, (1, 5)), (2, (576,))])
def test_slots_hold_what_they_would_and_others_what_they_did(heads, dims, dtype, stored, device):
    given = [drawn(heads, dim, dtype, device) for dim in dims]
    written = [pages(heads, dim, dtype, stored, device) for dim in dims]
    pairs = list(zip(written, given, strict=True))
    if device == "cuda":
        assert all(slot_writes.can_write(*pair) for pair in pairs)
    slot_writes.write(pairs, torch.tensor(SLOTS, device=device))
    for into, x in pairs:
        found = slots_of(into, x.shape[2])
        if stored is None:
            assert torch.equal(found, x)
            continue
        expected = quantise(x, stored).dequantise()
        if device == "cuda":
            assert torch.equal(found, expected)
        else:  # torch divides on the CPU: a code may be the neighbour
            step = expected.abs().amax(-1, keepdim=True) / 127
            assert ((found - expected).abs() <= step * 1.01).all()


@where_it_runs
def test_a_head_with_a_number_that_is_none_is_none(stored, device):
    x, into = drawn(2, 16, torch.float32, device), pages(2, 16, torch.float32, stored, device)
    x[2, 1, 3] = torch.nan
    slot_writes.write([(into, x)], torch.tensor(SLOTS, device=device))
    held = (into if stored is None else into.dequantise()).flatten(0, 1)[SLOTS]
    assert held[2, 1].isnan().any()
    assert not held[:, 0].isnan().any()


@compiles
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", slot_writes.DTYPES)
def test_it_is_compiled_for_hopper(dtype, stored, monkeypatch):
    compiled = []
    kernel = Compiling(slot_writes._compiled(), compiled)
    monkeypatch.setattr(slot_writes, "_compiled", lambda: kernel)
    given, into = (
        (drawn(8, dim, dtype, "cpu") for dim in (128, 64)),
        (pages(8, d, dtype, stored, "cpu") for d in (128, 64)),
    )
    slot_writes.write(list(zip(into, given, strict=True)), torch.tensor(SLOTS))
    assert [each.name for each in compiled] == ["write_slots"]


@pytest.mark.parametrize(
    "given",
    [torch.zeros(2, 3, 4), torch.zeros(0, 3, 4), torch.zeros(2, 3, 4).double(), torch.zeros(2, 4, 3).mT],
    ids=["cpu", "no tokens", "float64", "apart"],
)
def test_other_writes_are_copies_of_torch(given):
    assert not slot_writes.can_write(torch.zeros(8, 4, 3, 4), given)

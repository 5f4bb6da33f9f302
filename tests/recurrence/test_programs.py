"""Triton programs over states: on CUDA, and in Triton's interpreter, they give what torch gives in float64.

TRITON_INTERPRET=1 python -m pytest tests/recurrence/test_programs.py
"""

import os
from itertools import pairwise

import pytest
import torch

from attnspan.packages import has_triton
from attnspan.recurrence import programs
from attnspan.recurrence.maps import AffineMaps, Maps, Passed
from tests.kernels.compiling import Compiling
from tests.kernels.interpreter import interpreted
from tests.recurrence.cases import normal

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
in_interpreter = pytest.mark.skipif(not INTERPRETS, reason="needs Triton, and TRITON_INTERPRET=1 in the environment")
compiles = pytest.mark.skipif(
    not has_triton() or INTERPRETS, reason="needs Triton, and no TRITON_INTERPRET in the environment"
)
where_it_runs = pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("cpu", marks=in_interpreter)]
)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
SIZES = [(3,), (4, 2, 1), (1,) * 9, (2, 2, 2), (5, 5, 3, 3, 1)]
SHAPES = {"a matrix": (5, 5), "a wide matrix": (33, 33), "one": (1, 1), "rows": (5, 1), "all": (5, 7)}


@pytest.fixture(autouse=True)
def in_the_interpreter():
    if not INTERPRETS:
        yield
        return
    with interpreted():
        yield


def far(found, expected):
    return float((found.cpu().double() - expected).abs().max() / expected.abs().max().clamp_min(1))


@where_it_runs
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("adds", [True, False], ids=["adds", "product"])
@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
def test_a_scan_is_that_of_torch(sizes, kind, adds, back, device):
    """One stretch more than the first step has begins and ends with its state."""
    (rows, wide), heads = SHAPES[kind], 2
    matrix, count, stretches = "matrix" in kind, sum(sizes), sizes[0] + 1
    state_rows = rows if rows > 1 else 5
    a = normal(count, heads, rows, wide, seed=1) / max(wide, 1) ** 0.5
    b, state = normal(count, heads, state_rows, 7, seed=2) if adds else None, normal(stretches, heads, state_rows, 7)
    maps = AffineMaps(matrix)
    in_torch = maps.scan_back if back else maps.scan
    expected = torch.zeros(count, heads, state_rows, 7, dtype=torch.float64)
    ends = in_torch(Maps(a, b), state, sizes, Passed(expected))
    on_device = lambda x: None if x is None else x.to(device, torch.float32)  # noqa: E731
    passed = torch.full_like(expected, torch.nan, dtype=torch.float32, device=device)
    apart = on_device(a.mT.contiguous()).mT  # a view, as of parts of a larger tensor
    found = programs.scan(programs.Scanned(apart, on_device(b), matrix, back), on_device(state), sizes, passed)
    assert max(far(found, ends), far(passed, expected)) < 2e-6


@where_it_runs
def test_it_takes_states_that_are_expanded(device):
    """As the identity of products is."""
    a, one = normal(3, 2, 4, 4), torch.eye(4, dtype=torch.float64).expand(1, 2, 4, 4)
    before, whole = AffineMaps(True).products(Maps(a), one[:1], (1, 1, 1))
    passed = torch.empty(3, 2, 4, 4, device=device)
    given = one.float().to(device)
    found = programs.scan(programs.Scanned(a.float().to(device), None, True), given, (1, 1, 1), passed)
    assert max(far(found, whole), far(passed, before)) < 2e-6


def by_token(x, starts):
    """Maps of chunks of a delta rule whose pieces are solved: in float64, piece by piece."""
    k, w, u = (each[0].double() for each in x[:3])
    heads, group = w.shape[1], w.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1)
    gates = torch.zeros(w.shape[:2]) if x.gates is None else x.gates[0].double()
    a, b = [], []
    for start, stop in pairwise(starts):
        one = torch.eye(w.shape[2], dtype=torch.float64).expand(heads, -1, -1)
        state = torch.cat([torch.zeros(heads, w.shape[2], u.shape[2], dtype=torch.float64), one], 2)
        for at in range(start, stop, programs.PIECE):
            piece = slice(at, min(at + programs.PIECE, stop))
            new = torch.nn.functional.pad(u[piece], (0, w.shape[2])).transpose(0, 1)
            new = new - w[piece].transpose(0, 1) @ state
            last = gates[piece.stop - 1]
            if x.gates is not None and x.gates.dim() == 3:
                new = new * torch.exp2(last - gates[piece]).T.unsqueeze(-1)
            state = state * (torch.exp2(last).view(heads, -1, 1) if x.gates is not None else 1)
            state = state + k[piece].transpose(0, 1).mT @ new
        b.append(state[..., : u.shape[2]])
        a.append(state[..., u.shape[2] :])
    return torch.stack(a), torch.stack(b)


STARTS = [0, 1, 65, 193, 260]


def tokens(gates, dims, dtype, device="cpu", groups=1):
    """So small that states stay about one."""
    rows, columns = dims
    k, w = (normal(1, STARTS[-1], heads, rows, seed=heads) / (8 * rows**0.5) for heads in (groups, 2))
    u = normal(1, STARTS[-1], 2, columns, seed=5)
    g = None if gates is None else -normal(1, STARTS[-1], 2, *gates, seed=6).abs() * 0.1
    half = [each.to(device, dtype) for each in (k, w, u)]
    return programs.SolvedPieces(*half, None if g is None else g.to(device, torch.float32))


GATES = {"none": None, "by head": (), "by channel": (1,)}


@where_it_runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(16, 32), (64, 64), (128, 128), (80, 112), (256, 64)], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_maps_of_chunks_are_those_of_their_tokens(gates, dims, dtype, device):
    """Chunks of one token, of a piece, of two, and of one that is not full; written in another order."""
    if device == "cpu" and (dtype == torch.bfloat16 or dims[0] > 64):
        pytest.skip("the interpreter has no bfloat16 products, and takes long for large ones")
    channels = None if GATES[gates] is None else tuple(dims[0] for _ in GATES[gates])
    x = tokens(channels, dims, dtype, device, groups=1 + (dims[0] == 64))
    order = torch.tensor([2, 0, 3, 1], device=device)
    starts = torch.tensor(STARTS, device=device)
    given = programs.SolvedPieces(*(None if each is None else each.cpu() for each in x))
    expected = [torch.zeros_like(each).index_copy(0, order.cpu(), each) for each in by_token(given, STARTS)]
    found = programs.delta_maps(x, starts, order)
    bound = 2e-6 if device == "cpu" and dtype == torch.float32 else 4e-3
    assert max(map(far, found, expected)) < bound


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_maps_are_compiled_for_hopper(gates, dims, dtype, monkeypatch):
    compiled = []
    channels = None if GATES[gates] is None else tuple(dims[0] for _ in GATES[gates])
    every = programs.Programs(*(Compiling(each, compiled) for each in programs._programs()))
    monkeypatch.setattr(programs, "_programs", lambda: every)
    programs.delta_maps(tokens(channels, dims, dtype), torch.tensor(STARTS), torch.arange(4))
    assert [name for name, _ in compiled] == ["delta_maps"]
    assert all(shared <= 227 * 1024 for _, shared in compiled)


@compiles
@pytest.mark.parametrize(("matrix", "back"), [(True, False), (True, True), (False, False)])
def test_scans_are_compiled_for_hopper(matrix, back, monkeypatch):
    compiled = []
    every = programs.Programs(*(Compiling(each, compiled) for each in programs._programs()))
    monkeypatch.setattr(programs, "_programs", lambda: every)
    state, wide = torch.zeros(2, 4, 128, 128), 128 if matrix else 1
    maps = programs.Scanned(torch.zeros(3, 4, 128, wide), torch.zeros(3, 4, 128, 128), matrix, back)
    programs.scan(maps, state, (2, 1), torch.empty(3, 4, 128, 128))
    assert [name for name, _ in compiled] == ["scan_maps"]
    assert all(shared <= 227 * 1024 for _, shared in compiled)


def test_on_a_cpu_scans_are_those_of_torch():
    assert not programs.can_scan(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))

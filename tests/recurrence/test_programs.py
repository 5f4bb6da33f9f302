"""Triton programs over states: on CUDA, and in Triton's interpreter, they give what torch gives in float64.

TRITON_INTERPRET=1 python -m pytest tests/recurrence/test_programs.py
"""

from itertools import pairwise

import pytest
import torch

from attnspan.recurrence import programs
from attnspan.recurrence.maps import AffineMaps, Maps, Passed
from tests.kernels.compiling import Compiling
from tests.kernels.interpreter import INTERPRETS, compiles, in_interpreter, interpreted
from tests.recurrence.cases import normal

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
    found = programs.scan(programs.Scanned(apart, on_device(b), matrix), on_device(state), sizes, passed, back)
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


@where_it_runs
@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (33, 16), (16, 40)])
@pytest.mark.parametrize("exact", [True, False])
def test_products_come_with_a_scan_from_zero(rows, columns, exact, device):
    sizes = (4, 2, 1)
    a, b = normal(7, 2, rows, rows, seed=1) / rows**0.5, normal(7, 2, rows, columns, seed=2)
    zero, states = normal(4, 2, rows, columns) * 0, torch.empty(7, 2, rows, columns, dtype=torch.float64)
    expected = AffineMaps(True).compose(Maps(a, b), zero, sizes, states)
    single = [x.to(device, torch.float32) for x in (a, b, zero, states)]
    found = programs.compose(programs.Scanned(single[0], single[1], True, exact), single[2], sizes, single[3])
    pairs = zip((*found[0], found[1], single[3]), (*expected[0], expected[1], states), strict=True)
    assert max(far(*pair) for pair in pairs) < (2e-6 if exact or device == "cpu" else 3e-3)


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


def read_by_token(x, queries, states, starts):
    """Outputs from the states before chunks: in float64, piece by piece."""
    k, w, u, q = (each[0].double() for each in (*x[:3], queries.q))
    heads = w.shape[1]
    k, q = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, q))
    gates = torch.zeros(w.shape[:2]) if x.gates is None else x.gates[0].double()
    out = torch.zeros_like(u)
    for state, (start, stop) in zip(states.double(), pairwise(starts), strict=True):
        for at in range(start, stop, programs.PIECE):
            piece = slice(at, min(at + programs.PIECE, stop))
            new = u[piece].transpose(0, 1) - w[piece].transpose(0, 1) @ state
            g, last = gates[piece], gates[piece.stop - 1]
            asked, key = q[piece].transpose(0, 1), k[piece].transpose(0, 1)
            if queries.pairs is not None:
                found = (asked * torch.exp2(g).transpose(0, 1)) @ state * queries.scale
                pairs = queries.pairs[0, piece, :, : len(g)].double().transpose(0, 1).tril()
                out[piece] = (found + pairs @ new).transpose(0, 1)
                state = state * torch.exp2(last).unsqueeze(-1) + key.mT @ new
                continue
            by_head = g.T
            pairs = (asked @ key.mT * torch.exp2(by_head.unsqueeze(-1) - by_head.unsqueeze(-2))).tril()
            found = (asked @ state) * torch.exp2(by_head).unsqueeze(-1) + pairs @ new
            out[piece] = (found * queries.scale).transpose(0, 1)
            decayed = new * torch.exp2(last.unsqueeze(-1) - by_head).unsqueeze(-1)
            state = state * torch.exp2(last).view(-1, 1, 1) + key.mT @ decayed
    return out


def queries_of(x, rows):
    """Queries, and with gates by channel pairs, of which those above the diagonal are none's."""
    q = normal(*x.k.shape, seed=8).to(x.k) / rows**0.5
    pairs = None
    if x.gates is not None and x.gates.dim() == 4:
        pairs = normal(1, STARTS[-1], 2, programs.PIECE, seed=9).to(x.k) / 8
        above = torch.arange(programs.PIECE) > torch.tensor([at - start for at, start in within()]).view(-1, 1)
        pairs[0].transpose(0, 1)[:, above.to(pairs.device)] = torch.nan
    return programs.Queries(q, pairs, 0.3)


def within():
    """Every token, and the first of its piece."""
    return [
        (at, start + (at - start) // programs.PIECE * programs.PIECE)
        for start, stop in pairwise(STARTS)
        for at in range(start, stop)
    ]


@where_it_runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(16, 32), (64, 64), (128, 128), (80, 112)], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_outputs_are_those_of_their_tokens(gates, dims, dtype, device):
    if device == "cpu" and (dtype == torch.bfloat16 or dims[0] > 64):
        pytest.skip("the interpreter has no bfloat16 products, and takes long for large ones")
    channels = None if GATES[gates] is None else tuple(dims[0] for _ in GATES[gates])
    x = tokens(channels, dims, dtype, device, groups=1 + (dims[0] == 64))
    if device == "cuda" and not programs.can_read(x):
        pytest.skip("needs half precision, and a GPU with 160 KB of shared memory for a program")
    queries, order = queries_of(x, dims[0]), torch.tensor([2, 0, 3, 1], device=device)
    states, starts = normal(4, 2, *dims, seed=7).to(device, torch.float32), torch.tensor(STARTS, device=device)
    found = programs.delta_outputs(x, queries, states, starts, order)
    given = [type(each)(*(y.cpu() if isinstance(y, torch.Tensor) else y for y in each)) for each in (x, queries)]
    expected = read_by_token(*given, states.cpu()[order.cpu()], STARTS)
    assert far(found[0], expected) < (2e-6 if device == "cpu" and dtype == torch.float32 else 1e-2)


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_chunks_are_compiled_for_hopper(gates, dims, dtype, monkeypatch):
    compiled = []
    channels = None if GATES[gates] is None else tuple(dims[0] for _ in GATES[gates])
    every = programs.Programs(*(Compiling(each, compiled) for each in programs._programs()))
    monkeypatch.setattr(programs, "_programs", lambda: every)
    x, places = tokens(channels, dims, dtype), (torch.tensor(STARTS), torch.arange(4))
    programs.delta_maps(x, *places)
    if programs.can_read(x):
        programs.delta_outputs(x, queries_of(x, dims[0]), torch.zeros(4, 2, *dims), *places)
    assert len(compiled) == 1 + (dtype == torch.bfloat16 and dims[0] == 128)
    assert all(each.shared <= 227 * 1024 for each in compiled)


@compiles
@pytest.mark.parametrize(("matrix", "back"), [(True, False), (True, True), (False, False)])
def test_scans_are_compiled_for_hopper(matrix, back, monkeypatch):
    compiled = []
    every = programs.Programs(*(Compiling(each, compiled) for each in programs._programs()))
    monkeypatch.setattr(programs, "_programs", lambda: every)
    state, wide = torch.zeros(2, 4, 128, 128), 128 if matrix else 1
    maps = programs.Scanned(torch.zeros(3, 4, 128, wide), torch.zeros(3, 4, 128, 128), matrix)
    programs.scan(maps, state, (2, 1), torch.empty(3, 4, 128, 128), back)
    if matrix:
        programs.compose(maps._replace(exact=False), state, (2, 1), torch.empty(3, 4, 128, 128))
    assert {each.name for each in compiled} == {"scan_maps"}
    assert all(each.shared <= 227 * 1024 for each in compiled)


def test_on_a_cpu_scans_are_those_of_torch():
    assert not programs.can_scan(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))

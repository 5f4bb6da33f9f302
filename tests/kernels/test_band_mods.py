"""`band` with score_mods and mask_mods: exact in Triton's interpreter, and compiled for Hopper without a GPU.

Triton is no dependency on a CPU, so both are skipped without it. To run them:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_band_mods.py
    python -m pytest -m "slow or not slow" tests/kernels/test_band_mods.py
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan.errors import KernelError
from attnspan.kernels import (
    KERNELS,
    GlobalPositions,
    GradientBuffers,
    MergedOutputs,
    Mods,
    Spec,
    StepTiles,
    band,
    band_mods,
    bands,
    choose_kernel,
    triton_mods,
)
from attnspan.kernels.agenda import Runs, agenda
from attnspan.kernels.band_programs import NO_CODE, BandPrograms, programs
from attnspan.layouts import Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, Full, KeyPadding, MaskMod, SlidingWindow
from attnspan.masks.tile import Tile
from attnspan.masks.tracing import traced
from attnspan.packages import has_triton
from tests.attention.harness import Problem, Scoring, check
from tests.attention.programs import problem
from tests.kernels.compiling import Compiling
from tests.kernels.expressions import BATCH, CONDITIONS, HEADS, LENGTH, of, shapes_of, trees

pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero:RuntimeWarning",  # Triton's interpreter, of rows that see nothing
    "ignore:All-NaN slice:RuntimeWarning",  # of pairs that are masked
    "ignore:invalid value:RuntimeWarning",
    "ignore:overflow encountered:RuntimeWarning",
)
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
in_interpreter = pytest.mark.skipif(not INTERPRETS, reason="needs Triton, and TRITON_INTERPRET=1 in the environment")
compiles = pytest.mark.skipif(
    not has_triton() or INTERPRETS, reason="needs Triton, and no TRITON_INTERPRET in the environment"
)


@pytest.fixture
def interpreted():
    from tests.kernels.interpreter import interpreted

    with interpreted():
        yield


# ---- where blocks and spans lie --------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    """Positions of a few runs, of steps 1 to 3."""
    found, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        step, count = draw(st.integers(1, 3)), draw(st.integers(1, 9))
        found.append(range(at, at + step * (count - 1) + 1, step))
        at += step * count + draw(st.integers(0, 5))
    return tuple(found)


def positions(some):
    return [position for run in some for position in run]


@given(runs(), runs(), st.integers(1, 8), st.data())
def test_positions_are_affine_in_the_rows_of_blocks_and_the_columns_of_spans(rows, cols, block, data):
    at = {"rows": positions(rows), "cols": positions(cols)}
    n, m = map(len, at.values())
    needs_mask_mod = data.draw(st.booleans())
    lo = data.draw(st.integers(1 - n, m - 1))
    tile = Tile(range(n), range(m), lo, data.draw(st.integers(lo, m + 2)), needs_mask_mod)
    for side, other in (("rows", "cols"), ("cols", "rows")):
        tables = agenda((tile,), side, len(at[side]), block, torch.device("cpu"), Runs(rows, cols))
        blocks, spans, blocks_at, spans_at = (x.tolist() for x in tables)
        pairs = set()
        for (first, end, span, last), (base, step, _) in zip(blocks, blocks_at, strict=True):
            for start, stop, low, high in spans[span:last]:
                pairs |= {(i, j) for i in range(first, end) for j in range(start, stop) if low <= j - i <= high}
            if span < last:
                assert [base + step * i for i in range(first, end)] == at[side][first:end]
        for (start, stop, *_), (base, step, needs_mod) in zip(spans, spans_at, strict=True):
            assert [base + step * i for i in range(start, stop)] == at[other][start:stop]
            assert needs_mod == needs_mask_mod
        band = {(i, j) for i in range(n) for j in range(m) if tile.lo <= j - i <= tile.hi}
        assert pairs == (band if side == "rows" else {(j, i) for i, j in band})


@given(runs(), st.data())
def test_the_runs_of_every_nth_row(rows, data):
    count = len(positions(rows))
    some = range(data.draw(st.integers(0, count - 1)), count, data.draw(st.integers(1, 4)))
    tile = Tile(some, range(1), 1 - len(some), 0)
    assert positions(Runs(rows, (range(1),)).of(tile).rows) == [positions(rows)[i] for i in some]


# ---- who computes programs -------------------------------------------------------------------------------------------


def cuda(monkeypatch):
    """As if there were Triton and a GPU."""
    monkeypatch.setattr(band, "has_triton", lambda: True)
    monkeypatch.setattr("attnspan.kernels.flex.has_triton", lambda: True)
    return torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")


def soft_cap(score, b, h, q_idx, kv_idx):
    return 5 * torch.tanh(score / 5)


def lgamma(score, b, h, q_idx, kv_idx):
    return torch.lgamma(score)


TILES = (Tile(range(8), range(8), -7, 0),)


@pytest.mark.parametrize("fn", [soft_cap, lgamma])
def test_band_computes_the_programs_that_it_can_compile_and_never_falls_back(monkeypatch, fn):
    x = cuda(monkeypatch)
    monkeypatch.setattr("attnspan.kernels.kernel.Traits.runs_on", lambda *_: True)
    program = traced(fn, "score_mod", score=torch.float32)
    spec = Spec(0.1, Mods(program, traced(lambda b, h, q, k: q >= k)))
    assert choose_kernel("auto", spec, x, x, x, TILES).name == ("band" if fn is soft_cap else "flex")
    if fn is soft_cap:
        assert choose_kernel("band", spec, x, x, x, TILES) is KERNELS["band"]
        return
    why = "band cannot compile aten.lgamma.default in lgamma; flex can on CUDA, blocks anywhere"
    with pytest.raises(KernelError, match=f"^kernel='band' cannot compute .*: {why}; for this tile use"):
        choose_kernel("band", spec, x, x, x, TILES)


def test_a_mask_mod_is_compiled_only_where_it_is_needed(monkeypatch):
    x = cuda(monkeypatch)
    monkeypatch.setattr("attnspan.kernels.kernel.Traits.runs_on", lambda *_: True)
    mask = traced(lambda b, h, q, k: torch.lgamma(q.float()) > 3)
    spec = Spec(0.1, Mods(traced(soft_cap, "score_mod", score=torch.float32), mask))
    assert choose_kernel("band", spec, x, x, x, TILES) is KERNELS["band"]
    with pytest.raises(KernelError, match=r"band cannot compile aten\.lgamma\.default in <lambda>"):
        choose_kernel("band", spec, x, x, x, (TILES[0]._replace(needs_mask_mod=True),))


# ---- exact -----------------------------------------------------------------------------------------------------------

LAYOUTS = {"head-tail": (HeadTail(2), "gather"), "ring": (Contiguous(3), "ring"), "striped": (Striped(2), "needed(2)")}
MASKS = {
    "full": Full,
    "causal": Causal,
    "documents": lambda: Causal() & Documents([9, 2, 10]),
    "window": lambda: SlidingWindow(6, 2),
    "nothing for some": lambda: SlidingWindow(4) & KeyPadding([9, 0]),
}


@in_interpreter
@settings(max_examples=6 if settings().max_examples < 100 else 100)
@given(trees(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(MASKS)), st.booleans())
def test_every_score_mod_is_exact(tree, layout, mask, through_lse):
    from tests.kernels.interpreter import interpreted

    with interpreted():
        shape = {"heads": HEADS, "kv_heads": 1, "batch": BATCH, "dim": 8, "dtype": torch.float32}
        # Where a row gets the same number everywhere, its gradient is 0; errors are of the largest, that of pairs.
        tree = ("add", tree, "pairs")
        scoring = Scoring(of(tree), shapes_of(tree))
        check(Problem(MASKS[mask](), LAYOUTS[layout][0], LENGTH, LAYOUTS[layout][1], kernel="band", scoring=scoring,
                      through_lse=through_lse, **shape))  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("name", CONDITIONS)
def test_every_mask_mod_is_exact(by_blocks, interpreted, name):
    mask = MaskMod(CONDITIONS[name], block=4, rows=BATCH, heads=HEADS)
    shape = {"heads": HEADS, "kv_heads": 1, "batch": BATCH, "dim": 8, "dtype": torch.float32}
    tree = ("add", "score", "table")
    scoring = Scoring(of(tree), shapes_of(tree))
    check(Problem(mask, HeadTail(2), LENGTH, "needed", kernel="band", scoring=scoring, **shape))


WRITTEN = ("ALiBi", "tanh soft-cap", "relative bias table", "document", "per-head window", "learned bias")


@in_interpreter
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("layout", [HeadTail(3), Striped(2)], ids=str)
def test_what_people_write_is_exact(by_blocks, interpreted, name, layout):
    check(problem(name, layout, "gather", kernel="band", dtype=torch.float32, through_lse=True, sinks=True))
    check(problem(name, layout, "needed(2)", kernel="band", dtype=torch.float16))


@in_interpreter
def test_dropout_goes_with_score_mods(interpreted):
    check(problem("ALiBi", HeadTail(2), "gather", kernel="band", dtype=torch.float32, dropout_p=0.3))


@in_interpreter
def test_sums_by_distance_are_the_same_in_several_launches(interpreted, monkeypatch):
    monkeypatch.setattr(band_mods, "AT_ONCE", 1)
    check(problem("relative bias table", HeadTail(2), "gather", kernel="band", dtype=torch.float32))


# ---- compiled --------------------------------------------------------------------------------------------------------

SLOPES, TABLE, PAIRS = torch.rand(4), torch.rand(4, 257), torch.rand(4, 64, 64)
IDS = torch.zeros(2, 4096, dtype=torch.int64)
SCORES = {
    "ALiBi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k),
    "soft-cap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
    "relative bias": lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-128, 128) + 128],
    "by key": lambda s, b, h, q, k: s + PAIRS[h, 0, k] * PAIRS[h, q, 0],
    "by pair": lambda s, b, h, q, k: s + PAIRS[h, q, k],
    "none": None,
}
TREES = (
    "whole",
    "kind",
    "number",
    ("where", "late", "batch", "table"),
    *((one, "table") for one in ("exp2", "log", "relu")),
)
SCORES |= {str(tree): of(tree)(*map(torch.rand, shapes_of(tree))) for tree in TREES}


def documents(b, h, q, k):
    return (IDS[b, q] == IDS[b, k]) & (q >= k)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("name", SCORES)
def test_every_program_is_compiled_for_hopper(monkeypatch, name, asks, learns):
    """In the shared memory of one, with what is looked up ahead of time."""
    memory = 227 << 10
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(bands, "_shared_memory", lambda device: memory)
    compiled = []

    def compiling(code=NO_CODE):
        return BandPrograms(*(Compiling(fn, compiled) for fn in programs(code)))

    monkeypatch.setattr(bands, "programs", compiling)
    n, score = 4096, None
    if SCORES[name] is not None:
        score = traced(SCORES[name], "score_mod", score=torch.float32)
    captured = () if score is None else score.captured
    x, lse = torch.empty(1, 4, n, 128, dtype=torch.bfloat16), torch.empty(1, 4, n)
    tiles = (Tile(range(n), range(n), 1 - n, 0, needs_mask_mod=asks),)
    where = GlobalPositions(torch.arange(n), torch.arange(n), range(1), range(4), ((range(n),), (range(n),)))
    step, spec = StepTiles(tiles, lambda: where, captured), Spec(0.1, Mods(score, traced(documents)))
    bands.forward(spec, x, x, x, tiles, x.dtype, band_mods.ModsArgs.of(spec, step))
    grads = SimpleNamespace(captured=[torch.zeros_like(each) if learns else None for each in captured])
    mods = band_mods.ModsArgs.of(spec, step, band_mods.wanted(spec, step, grads))
    into = GradientBuffers(*(torch.empty(1, 4, n, 128) for _ in range(3)))
    bands.backward(spec, MergedOutputs(x, None, x, lse), x, x, x, tiles, into, mods)
    assert [each.name for each in compiled] == ["forward", "by_rows", "by_keys"]
    assert all(each.shared <= memory for each in compiled), compiled


@compiles
def test_the_functions_of_programs_are_triton_s():
    program = traced(soft_cap, "score_mod", score=torch.float32)
    assert type(triton_mods.mods_code(program, None).change).__name__ == "JITFunction"

"""Many tiles in one call: the agenda holds every pair once, and the call gives what the tiles mean together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.kernels import AUTO, KERNELS, GradientBuffers, MergedOutputs, Spec, band_hopper, bands, choose_kernel
from attnspan.kernels.agenda import agenda
from attnspan.layouts import Balanced, HeadTail
from attnspan.masks import Causal, Documents, Full, SlidingWindow
from attnspan.masks.tile import Tile
from attnspan.plan import Hardware, Plan
from tests import oracle

CPU = torch.device("cpu")


@st.composite
def tile_lists(draw):
    """(tiles, rows, columns): tiles over disjoint stretches of columns, of any rows."""
    n, m, tiles = draw(st.integers(1, 40)), 0, []
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, n - 1))
        rows = range(start, draw(st.integers(start + 1, n)))
        width = draw(st.integers(1, 20))
        lo = draw(st.integers(1 - len(rows), width - 1))
        m += draw(st.integers(0, 3))
        tiles.append(Tile(rows, range(m, m + width), lo, draw(st.integers(lo, width + 3))))
        m += width
    return tuple(tiles), n, m + draw(st.integers(0, 3))


def allowed(tiles, n: int, m: int) -> torch.Tensor:
    """(n, m), how many tiles hold each pair."""
    held = torch.zeros(n, m, dtype=torch.int64)
    for tile in tiles:
        held[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop] += oracle.tile_mask(tile)
    return held


@given(tile_lists(), st.integers(1, 16))
def test_an_agenda_holds_every_row_in_one_block_and_every_pair_once(drawn, block):
    tiles, n, m = drawn
    for side, count, other in (("rows", n, m), ("cols", m, n)):
        blocks, spans, *_ = agenda(tiles, side, count, block, CPU)
        met = torch.zeros(count, other, dtype=torch.int64)
        times = torch.zeros(count, dtype=torch.int64)
        for first, end, span, last in blocks.tolist():
            assert 0 < end - first <= block
            times[first:end] += 1
            for start, stop, lo, hi in spans[span:last].tolist():
                distance = torch.arange(start, stop)[None, :] - torch.arange(first, end)[:, None]
                met[first:end, start:stop] += (lo <= distance) & (distance <= hi)
        assert (times == 1).all()
        held = allowed(tiles, n, m)
        assert torch.equal(met, held if side == "rows" else held.T)


def test_the_most_work_comes_first():
    blocks, *_ = agenda((Tile(range(64), range(64), -63, 0),), "rows", 64, 16, CPU)
    assert [first for first, *_ in blocks.tolist()] == [48, 32, 16, 0]


def test_nothing_is_joined_where_band_cannot_compute():
    x = torch.empty(1, 1, 4, 8)
    tiles = (Tile(range(4), range(4), -3, 0),)
    assert choose_kernel("auto", Spec(1.0), x, x, x, tiles) is AUTO


def test_the_cost_model_joins_what_the_registry_joins():
    assert Hardware.of("h100-nvlink").joins_below == KERNELS["band"].traits.joins_below


MASKS = {
    "documents": Causal() & Documents([100, 37, 1, 350, 12, 500]),
    "window": SlidingWindow(130),
    "causal": Causal(),
    "full": Full(),
}


@pytest.mark.cuda
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", [(64, 32), (64, 128), (128, 128)], ids=str)
def test_one_call_is_all_of_its_tiles(mask, dtype, heads, dims, monkeypatch):
    """Out, lse and gradients, that of lse included, of every rank's tiles, added to what is there or not."""
    monkeypatch.setattr(band_hopper, "SMALL", 0)
    torch.manual_seed(0)
    for layout in (Balanced(MASKS[mask], ranks=3), HeadTail(2)):
        plan = Plan(MASKS[mask], layout, 1000, "gather")
        for rank in range(plan.ranks):
            (step,) = plan.steps(rank)
            n, m = layout.tokens(1000)[rank], sum(len(run.positions) for run in step.arena)
            q, grad = (torch.randn(2, heads[0], n, dim, dtype=dtype, device="cuda") for dim in dims)
            k, v = (torch.randn(2, heads[1], m, dim, dtype=dtype, device="cuda") for dim in dims)
            grad_lse = torch.randn(2, heads[0], n, device="cuda")
            seen = allowed(step.tiles, n, m).bool().cuda()
            true = _truth(q, k, v, seen, grad, grad_lse)
            spec = Spec(0.2)
            out, lse = bands.forward(spec, q, k, v, step.tiles, dtype)
            into = GradientBuffers(
                torch.ones_like(q, dtype=torch.float32),
                *(torch.empty_like(x, dtype=torch.float32) for x in (k, v)),
                add_rows=True,
            )
            bands.backward(spec, MergedOutputs(grad, grad_lse, out, lse), q, k, v, step.tiles, into)
            found = (out, lse, into.dq - 1, into.dk, into.dv)
            rounding = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]  # of p and of scores
            for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, true, strict=True):
                error = (x.double() - y).nan_to_num(0.0, posinf=0.0, neginf=0.0).abs().max() / y[
                    y.isfinite()
                ].abs().max()
                assert torch.equal(x.isfinite(), y.isfinite()), name
                assert error <= rounding, (name, float(error))


def _truth(q, k, v, seen, grad, grad_lse):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    query, key, value = leaves
    key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT * 0.2).masked_fill(~seen, -torch.inf)
    some = seen.any(1)
    lse = scores.logsumexp(-1)
    out = torch.where(seen, (scores - lse.masked_fill(~some, 0.0)[..., None]).exp(), 0.0) @ value
    pairs = ((out, grad), (lse, grad_lse))
    torch.autograd.backward([x[:, :, some] for x, _ in pairs], [g.double()[:, :, some] for _, g in pairs])
    return out.detach(), lse.detach(), *(x.grad for x in leaves)

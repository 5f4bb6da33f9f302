"""Laws of merging, against a float64 sum over all keys. A row without keys is an ordinary row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspan.kernels import Accumulator, merge_into
from attnspan.kernels.merge import PartialResult, _merge_fused, _merge_plain

SHAPE = (2, 3, 5, 4)
TOLERANCE = 2e-6  # of the largest magnitude: some roundings of float32, for each of a few merges


def parts_of(seed, count, dtype=torch.float64, shape=SHAPE):
    """Partial results; each row of each is empty with one chance in three."""
    random = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(count):
        out = torch.randn(shape, generator=random, dtype=torch.float64)
        lse = torch.randn(shape[:3], generator=random, dtype=torch.float64) * 20
        empty = torch.rand(shape[:3], generator=random) < 1 / 3
        parts.append((out.masked_fill(empty[..., None], 0.0).to(dtype), lse.masked_fill(empty, -torch.inf).to(dtype)))
    return parts


def joined(parts):
    """The oracle: weigh every part against the largest, all at once."""
    outs, lses = (torch.stack(x).double() for x in zip(*parts, strict=True))
    most = lses.amax(0).masked_fill(lses.amax(0) == -torch.inf, 0.0)
    weights = (lses - most).exp()
    total = weights.sum(0)
    out = (weights[..., None] * outs).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, most + total.log()


def merged(parts):
    out, lse = (x.clone() for x in parts[0])
    for part in parts[1:]:
        merge_into(out, lse, *part)
    return out, lse


def same(found, true):
    for a, b in zip(found, true, strict=True):
        empty = b == -torch.inf
        assert (a == -torch.inf).equal(empty)
        a, b = a.double().masked_fill(empty, 0.0), b.double().masked_fill(empty, 0.0)
        assert float((a - b).abs().max()) <= TOLERANCE * max(1.0, float(b.abs().max()))


seeds, counts = st.integers(0, 2**32), st.integers(1, 5)
dtypes = st.sampled_from([torch.float32, torch.float64])


@given(seeds, counts, dtypes)
def test_merging_is_the_sum_over_all_keys(seed, count, dtype):
    parts = parts_of(seed, count, dtype)
    same(merged(parts), joined(parts))


@given(seeds, counts, st.randoms())
def test_the_order_does_not_matter(seed, count, random):
    parts = parts_of(seed, count, torch.float32)
    shuffled = random.sample(parts, count)
    same(merged(shuffled), merged(parts))


@given(seeds, st.integers(1, 4))
def test_merging_is_associative(seed, left):
    parts = parts_of(seed, 5, torch.float32)
    same(merged([merged(parts[:left]), merged(parts[left:])]), merged(parts))


@given(seeds)
def test_an_empty_part_changes_nothing_at_all(seed):
    [(out, lse)] = parts_of(seed, 1, torch.float32)
    empty = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for parts in ([(out, lse), empty], [empty, (out, lse)]):
        found = merged(parts)
        assert found[0].equal(out)
        assert found[1].equal(lse)


def test_rows_without_keys_stay_so():
    empty = torch.zeros(SHAPE), torch.full(SHAPE[:3], -torch.inf)
    out, lse = merged([empty, empty, empty])
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_nan_stays_in_its_row():
    parts = parts_of(0, 2, torch.float32)
    parts[1][1][0, 0, 0] = torch.nan
    out, lse = merged(parts)
    assert lse.isnan().sum() == 1
    assert out.isnan().any(-1).equal(lse.isnan())


def test_half_precision_parts_are_merged_in_the_accumulators_precision():
    parts = parts_of(1, 3, torch.float32)
    rounded = [(out.bfloat16(), lse) for out, lse in parts]
    start = rounded[0][0].float(), rounded[0][1]
    same(merged([start, *rounded[1:]]), joined([(out.float(), lse) for out, lse in rounded]))


def test_rows_of_a_larger_buffer_are_merged_in_place():
    (out, lse), part = parts_of(2, 2, torch.float32)
    buffer, lses = torch.full((2, 3, 12, 4), 7.0), torch.full((2, 3, 12), 7.0)
    buffer[:, :, 1:11:2], lses[:, :, 1:11:2] = out, lse
    merge_into(buffer[:, :, 1:11:2], lses[:, :, 1:11:2], *part)
    same((buffer[:, :, 1:11:2], lses[:, :, 1:11:2]), joined([(out, lse), part]))
    assert (buffer[:, :, ::2] == 7).all()


row_ranges = st.tuples(st.integers(0, 39), st.integers(1, 40), st.integers(1, 3)).map(
    lambda x: range(40)[x[0] : x[0] + x[1] : x[2]]
)


@given(seeds, st.lists(row_ranges, max_size=5))
def test_an_accumulator_holds_the_sum_of_what_was_added(seed, added):
    shape = (1, 2, 40, 4)
    total = Accumulator(shape, torch.float32)
    parts = []
    for i, rows in enumerate(added):
        [(out, lse)] = parts_of(seed + i, 1, torch.float32, (1, 2, len(rows), 4))
        everywhere = torch.zeros(shape), torch.full(shape[:3], -torch.inf)
        everywhere[0][:, :, rows.start : rows.stop : rows.step] = out
        everywhere[1][:, :, rows.start : rows.stop : rows.step] = lse
        parts.append(everywhere)
        total.add(rows, out, lse)
    empty = torch.zeros(shape), torch.full(shape[:3], -torch.inf)
    same(total.result(torch.float32), joined([empty, *parts]))


def test_a_tile_that_covers_all_rows_alone_is_the_result_without_a_copy():
    [(out, lse)] = parts_of(3, 1, torch.float32)
    total = Accumulator(SHAPE, torch.float32)
    total.add(range(5), out.bfloat16(), lse)
    found, found_lse = total.result(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found_lse.data_ptr() == lse.data_ptr()


def test_an_accumulator_of_no_rows_has_no_rows():
    out, lse = Accumulator((1, 2, 0, 4), torch.float32).result(torch.float32)
    assert out.shape == (1, 2, 0, 4)
    assert lse.shape == (1, 2, 0)


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [1, 4, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_the_fused_merge_is_the_plain_one(dim, dtype, strided):
    shape = (2, 3, 301, dim)
    (out, lse), (part, part_lse) = parts_of(dim, 2, torch.float32, shape)
    part = part.to(dtype)
    if strided:  # rows of a larger buffer, heads inside rows

        def lay(x):
            buffer = x.new_full((x.shape[0], 2 * x.shape[2] + 1, x.shape[1], *x.shape[3:]), 7.0)
            buffer[:, 1::2] = x.transpose(1, 2)
            return buffer.cuda()[:, 1::2].transpose(1, 2)
    else:

        def lay(x):
            return x.cuda()

    plain, fused = (lay(out), lay(lse)), (lay(out), lay(lse))
    _merge_plain(PartialResult(*plain), PartialResult(*plain), PartialResult(lay(part), lay(part_lse)))
    _merge_fused(PartialResult(*fused), PartialResult(*fused), PartialResult(lay(part), lay(part_lse)))
    same([x.cpu() for x in fused], [x.cpu() for x in plain])
    same([x.cpu() for x in fused], joined([(out, lse), (part.float(), part_lse)]))
    assert not fused[0].isnan().any()


@pytest.mark.cuda
def test_the_triton_merge_joins_halves_into_a_third_buffer_in_one_pass():
    (a, a_lse), (b, b_lse) = parts_of(8, 2, torch.float32, (2, 3, 130, 64))
    halves = PartialResult(a.cuda().bfloat16(), a_lse.cuda()), PartialResult(b.cuda().bfloat16(), b_lse.cuda())
    for dtype in (torch.bfloat16, torch.float32):
        fused, plain = (
            PartialResult(torch.empty_like(a, dtype=dtype).cuda(), torch.empty_like(a_lse).cuda()) for _ in range(2)
        )
        _merge_fused(fused, *halves)
        _merge_plain(plain, *halves)
        same([fused.lse.cpu()], [plain.lse.cpu()])
        # Rounded once from values that differ by float32 roundings: equal, or neighbours in half precision.
        assert torch.allclose(fused.out.float(), plain.out.float(), rtol=2**-8, atol=1e-6)

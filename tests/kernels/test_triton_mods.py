"""What is written for Triton computes what a program does, and its derivatives are autograd's."""

import pytest
import torch
from hypothesis import given, settings

from attnspan.kernels import band_mods, mod_lookups, split, triton_mods
from attnspan.kernels.mods import Mods
from attnspan.masks.tracing import traced
from tests.kernels.expressions import BATCH, CONDITIONS, HEADS, LENGTH, of, shapes_of, trees
from tests.kernels.standin_triton import Pointer, standin

CLOSE = 1e-5
"""Of float64: the polynomial for tanh is one for float32 (3e-7), gradients of tables are summed in float32."""

INDICES = [torch.arange(size) for size in (BATCH, HEADS, LENGTH, LENGTH)]
PLACES = [(b, h) for b in range(BATCH) for h in range(HEADS)]


def whole(parts):
    """What was computed for each batch row and head, (B, H, n, m)."""
    return torch.stack([x.expand(LENGTH, LENGTH).double() for x in parts]).view(BATCH, HEADS, LENGTH, LENGTH)


def each(function, score, pointers, dims):
    """A function of blocks, for every batch row and head."""
    q, k = INDICES[2][:, None], INDICES[3][None, :]
    return [function(score[b, h], torch.tensor(b), torch.tensor(h), q, k, pointers, dims) for b, h in PLACES]


@settings(max_examples=25 if settings().max_examples < 100 else 400)
@given(trees())
def test_code_computes_the_program_and_its_derivatives(tree):
    random = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes_of(tree)]
    score = torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=random, dtype=torch.float64).requires_grad_()
    grad = torch.randn(score.shape, generator=random, dtype=torch.float64)
    spread = [index.reshape(-1, *[1] * (3 - dim)) for dim, index in enumerate(INDICES)]
    true = of(tree)(*leaves)(score, *spread).expand(score.shape)
    by_score, *by_leaf = torch.autograd.grad(true, [score, *leaves], grad, materialize_grads=True)

    program = traced(of(tree)(*(x.detach().float() for x in leaves)), "score_mod", score=torch.float32)
    assert triton_mods.uncompilable(program) is None
    by_shape = {(x.dtype, tuple(x.shape)): x.detach() for x in leaves}
    captured = [
        by_shape.get((torch.float64, tuple(x.shape)), x) if x.is_floating_point() else x for x in program.captured
    ]
    learned = mod_lookups.learned(program, program.differentiable)
    with standin():
        code = triton_mods.mods_code(program, None, learned)
        tables, dims = triton_mods.prepared(split.tables(program, captured))
        pointers = tuple(map(Pointer, tables))
        changed = whole(each(code.change, score.detach(), pointers, dims))
        found, slope, *parts = map(whole, zip(*each(code.pull, score.detach(), pointers, dims), strict=True))
    torch.testing.assert_close(changed, true.detach(), rtol=CLOSE, atol=CLOSE)
    assert torch.equal(found, changed)
    torch.testing.assert_close(slope * grad, by_score, rtol=CLOSE, atol=CLOSE)
    sums = [torch.zeros_like(x) if x.is_floating_point() else None for x in captured]
    put = band_mods._TableGradients(program, captured, sums)
    for lookup, part in zip(learned, parts, strict=True):
        put((lookup,), INDICES, (part * grad).unsqueeze(0))
    for leaf, expected in zip(leaves, by_leaf, strict=True):
        places = [i for i, x in enumerate(captured) if x.is_floating_point() and x.shape == leaf.shape]
        total = sums[places[0]] if places else torch.zeros_like(expected)
        torch.testing.assert_close(total, expected, rtol=CLOSE, atol=CLOSE * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", CONDITIONS)
def test_code_asks_what_a_mask_mod_does(name):
    program = traced(CONDITIONS[name])
    with standin():
        code = triton_mods.mods_code(None, program)
        tables, dims = triton_mods.prepared(split.tables(program, program.captured))
        pointers = tuple(map(Pointer, tables))

        def allow(score, *rest):
            return code.allow(*rest)

        found = whole(each(allow, torch.zeros(BATCH, HEADS, 1, 1), pointers, dims)).bool()
    assert torch.equal(found, program.over(*INDICES).expand(found.shape))


ALONG = {
    "head": (lambda x: lambda s, b, h, q, k: s * x[b, h], "rows"),
    "query": (lambda x: lambda s, b, h, q, k: s + x[h, q + 1], "rows"),
    "key": (lambda x: lambda s, b, h, q, k: s + x[h, k // 2], "cols"),
    "distance": (lambda x: lambda s, b, h, q, k: s + x[h, (k - q).abs()], "distances"),
    "buckets of distances": (lambda x: lambda s, b, h, q, k: s + x[h, ((q - k) // 4).clamp(0, 3)], "distances"),
    "distance and query": (lambda x: lambda s, b, h, q, k: s + x[q, (k - q).abs()], "pairs"),
    "query and key": (lambda x: lambda s, b, h, q, k: s + x[q, k], "pairs"),
    "sum": (lambda x: lambda s, b, h, q, k: s + x[h, q + k], "pairs"),
}


@pytest.mark.parametrize("name", ALONG)
def test_gradients_of_one_entry_are_found_by_what_its_index_depends_on(name):
    of, along = ALONG[name]
    program = traced(of(torch.rand(9, 9)), "score_mod", score=torch.float32)
    assert [each.along for each in mod_lookups.learned(program, (0,))] == [along]
    assert mod_lookups.learned(program, ()) == ()


def test_other_tensors_run_the_same_code():
    def made(table, window):
        program = traced(lambda s, b, h, q, k: s + table[h, (q - k).clamp(0, 3)], "score_mod", score=torch.float32)
        mask = traced(lambda b, h, q, k: q - k < window[h])
        return triton_mods.mods_code(program, mask, mod_lookups.learned(program, (0,)))

    with standin():
        first = made(torch.rand(2, 4), torch.tensor([1, 2]))
        assert made(torch.rand(5, 7), torch.tensor([3, 4, 5])) is first


def lgamma(score, b, h, q_idx, kv_idx):
    return score + torch.lgamma(score)


TABLE = torch.rand(8)

REFUSED = {
    "an operation": (lgamma, "aten.lgamma.default in lgamma"),
    "a lookup by score": (lambda s, b, h, q, k: s + TABLE[s.to(torch.int64)], "a lookup by score in <lambda>"),
    "a row of a table": (lambda s, b, h, q, k: s + (TABLE * q).sum(), "aten.mul.Tensor in <lambda>"),
    "float floors": (lambda s, b, h, q, k: s // 2.0, "aten.floor_divide.default of numbers that are not whole in"),
    "a power": (lambda s, b, h, q, k: s**2.5, "aten.pow.Tensor_Scalar in <lambda>"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_named(name):
    fn, reason = REFUSED[name]
    mods = Mods(traced(fn, "score_mod", score=torch.float32))
    (line,) = band_mods.explain_programs(mods, needs_mask_mod=False)
    assert f"band cannot compile {reason}" in line
    assert line.endswith("; flex can on CUDA, blocks anywhere")


def test_a_lookup_beyond_its_table_is_seen_in_the_result():
    program = traced(lambda s, b, h, q, k: s + TABLE[q - k], "score_mod", score=torch.float32)
    with standin():
        code = triton_mods.mods_code(program, None)
        tables, dims = triton_mods.prepared(program.captured)
        q, k = INDICES[2][:, None], INDICES[3][None, :]
        found = code.change(
            torch.zeros(LENGTH, LENGTH), *torch.zeros(2, dtype=torch.int64), q, k, (Pointer(tables[0]),), dims
        )
    assert torch.equal(found.isnan(), (q - k >= 8) | (q - k < -8))

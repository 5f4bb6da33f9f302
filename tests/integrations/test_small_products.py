"""Products of few rows: they are those of float64 up to a rounding, and their order holds however they are launched.

Kernels run on CUDA, and in Triton's interpreter, which rounds to bfloat16 by cutting off and is left float16:

    TRITON_INTERPRET=1 python -m pytest tests/integrations/test_small_products.py
"""

import re
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from attnspan.integrations.huggingface import dependent_launch, fused_kernels, small_products
from attnspan.integrations.huggingface.fused_kernels import ACTIVATIONS, fused_add_norm, fused_gate, fused_norm
from attnspan.integrations.huggingface.small_products import (
    MAX_ROWS,
    Tiling,
    gated_product,
    gated_tiling,
    product,
    products,
    tiling,
)
from tests.kernels.compiling import Compiling
from tests.kernels.interpreter import INTERPRETS, compiles, in_interpreter, interpreted

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
where_kernels_run = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(pytest.param("cuda", dtype, marks=pytest.mark.cuda) for dtype in small_products.DTYPES),
        pytest.param("cpu", torch.float16, marks=in_interpreter),
    ],
)
SHARED_MEMORY = 227 << 10
"""Bytes that a program on Hopper may have."""

TILINGS = [
    None,
    Tiling(32, 64, 1, 64, 2),
    Tiling(64, 32, 3, 128, 3),
]


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted() if INTERPRETS else nullcontext():
        yield


def drawn(*shape, device, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def matrices(rows, n, k, device, dtype):
    """x (1, R, K) and W (N, K) whose product is about 1."""
    x = drawn(1, rows, k, device=device, dtype=dtype)
    return x, (drawn(n, k, device=device, dtype=torch.float32, seed=1) * k**-0.5).to(dtype)


def close(found, expected, roundings=1):
    """Half a unit in the last place for each rounding, and what a sum in float32 is off."""
    assert found.shape == expected.shape
    eps = torch.finfo(found.dtype).eps
    allowed = 0.55 * roundings * eps * (expected.abs() + expected.abs().amax() / 8)
    assert bool(((found.double() - expected).abs() <= allowed).all())


# ---- products --------------------------------------------------------------------------------------------------------


@where_kernels_run
@pytest.mark.parametrize("cut", TILINGS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 96, 128), (2, 75, 272), (5, 33, 80), (17, 70, 448), (64, 16, 64)])
def test_a_product_is_that_of_float64(rows, n, k, cut, device, dtype):
    """N is no multiple of a block, and K neither; with a bias, a residual, both or none."""
    x, weight = matrices(rows, n, k, device, dtype)
    bias, residual = drawn(n, device=device, dtype=dtype, seed=2), drawn(1, rows, n, device=device, dtype=dtype, seed=3)
    expected = x.double() @ weight.double().T
    close(product(x, weight, cut=cut), expected)
    close(product(x, weight, bias, cut=cut), expected + bias.double())
    close(product(x, weight, None, residual, cut), expected + residual.double(), 2)
    close(product(x, weight, bias, residual, cut), expected + bias.double() + residual.double(), 3)


@where_kernels_run
@pytest.mark.parametrize("cut", TILINGS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "sizes", "k"),
    [(1, (96, 32), 128), (2, (32, 8, 75), 272), (3, (64, 64, 64), 64), (33, (40, 40), 1056), (64, (8, 72, 1), 80)],
)
def test_products_of_several_matrices_are_those_of_each(rows, sizes, k, has_bias, cut, device, dtype):
    """Each result is contiguous, as it is of a single matrix."""
    weights = [matrices(1, n, k, device, dtype)[1] * (i + 1) for i, n in enumerate(sizes)]
    x, _ = matrices(rows, 1, k, device, dtype)
    biases = [drawn(n, device=device, dtype=dtype, seed=n) for n in sizes] if has_bias else None
    found = products(x, weights, biases, cut)
    for i, (each, weight) in enumerate(zip(found, weights, strict=True)):
        assert each.is_contiguous()
        close(each, x.double() @ weight.double().T + (biases[i].double() if has_bias else 0))


@where_kernels_run
@pytest.mark.parametrize("splits", [1, 3])
def test_several_matrices_have_the_bits_of_one_after_another(splits, device, dtype):
    x, weight = matrices(3, 192, 448, device, dtype)
    bias, cut = drawn(192, device=device, dtype=dtype), Tiling(32, 64, splits, 64, 2)
    parts = [each.contiguous() for each in weight.split([128, 8, 56])], [*bias.split([128, 8, 56])]
    alone = [product(x, *each, cut=cut) for each in zip(*parts, strict=True)]
    assert all(map(torch.equal, products(x, *parts, cut), alone))


@where_kernels_run
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("cut", [None, Tiling(32, 64, 1, 64, 2)])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 96, 128), (2, 37, 272), (40, 65, 80)])
def test_a_gated_product_is_that_of_float64(rows, n, k, cut, activation, device, dtype):
    """Of two matrices, and of the halves of one."""
    x, weight = matrices(rows, 2 * n, k, device, dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](gate) * up
    halves = weight.chunk(2)
    close(gated_product(x, *halves, activation, cut), expected, 5)
    apart = gated_product(x, *(each.clone() for each in halves), activation, cut)
    assert torch.equal(apart, gated_product(x, *halves, activation, cut))


@where_kernels_run
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_that_lie_apart_are_those_that_are_together(splits, device, dtype):
    x, weight = matrices(3, 48, 128, device, dtype)
    both, cut = torch.cat([x, x + 1], dim=-1), Tiling(32, 32, splits, 64, 2)
    assert torch.equal(product(both[..., :128], weight, cut=cut), product(x, weight, cut=cut))


@where_kernels_run
def test_numbers_that_are_none_stay_with_their_row(device, dtype):
    x, weight = matrices(3, 48, 128, device, dtype)
    x[0, 1, 7] = torch.nan
    found = product(x, weight)
    assert found[0, 1].isnan().all()
    assert found[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, MAX_ROWS])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (99, 80)])
def test_every_part_of_k_is_some_blocks(n, k, rows):
    cut = tiling(rows, n, k)
    assert cut.splits == 1 or k >= 512 * cut.splits
    assert cut.ahead % 64 == 0


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("float32", lambda x, w: product(x.float(), w.float())),
        ("a weight of another dtype", lambda x, w: product(x, w.bfloat16())),
        ("a bias of another dtype", lambda x, w: product(x, w, w[:, 0].float())),
        ("a bias of another length", lambda x, w: product(x, w, w[0, :5].clone())),
        ("a residual of another shape", lambda x, w: product(x, w, None, x)),
        ("many rows", lambda x, w: product(x.repeat(1, 33, 1), w)),
        ("no rows", lambda x, w: product(x[:, :0], w)),
        ("several rows of tokens", lambda x, w: product(x.repeat(2, 1, 1), w)),
        ("numbers that lie apart", lambda x, w: product(x.mT.contiguous().mT, w)),
        ("a weight by columns", lambda x, w: product(x, w.T.contiguous().T)),
        ("an odd K", lambda x, w: product(x[..., :24], w[:, :24].contiguous())),
        ("an address that is not aligned", lambda x, w: product(drawn_at_one(x), w)),
        ("a gate of another size", lambda x, w: gated_product(x, w[:7], w, "silu")),
        ("four matrices", lambda x, w: products(x, [w] * 4)),
        ("matrices of another K", lambda x, w: products(x, [w, w[:, :48].contiguous()])),
        ("results that are not aligned", lambda x, w: products(x, [w[:7], w])),
        ("a bias of some", lambda x, w: products(x, [w, w], [w[:, 0].clone()])),
        ("up by columns", lambda x, w: gated_product(x, w, w.T.contiguous().T, "silu")),
    ],
)
def test_there_is_no_kernel_for(what, call):
    x, weight = matrices(2, 8, 64, "cpu", torch.float16)
    assert call(x, weight) is None, what


def drawn_at_one(x):
    return torch.cat([x.flatten(), x.new_zeros(1)])[1:].view(x.shape)


# ---- how they are launched -------------------------------------------------------------------------------------------


def test_only_a_gpu_that_knows_dependent_launches_is_asked_for_one():
    assert dependent_launch.dependent_launch(torch.device("cpu")) == {"pdl": False}


@compiles
@pytest.mark.parametrize("dtype", small_products.DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_every_kernel_is_compiled_for_hopper(rows, dtype, monkeypatch):
    compiled = []
    kernels = {name: Compiling(fn, compiled) for name, fn in small_products._compiled().items()}
    monkeypatch.setattr(small_products, "_compiled", lambda: kernels)
    monkeypatch.setattr(small_products, "dependent_launch", lambda device: {"pdl": True, "launch_pdl": True})
    x, weight = matrices(rows, 32, 4096, "cpu", dtype)
    residual, bias = product(x, weight, None, None), weight[:, 0].clone()
    product(x, weight, bias, residual, tiling(rows, 28672, 4096))
    products(x, [weight] * 2, None, tiling(rows, 28672, 4096))
    products(x, [weight] * 3, [bias] * 3, tiling(rows, 6144, 4096))
    gated_product(x, weight, weight, "silu", gated_tiling(rows, 8192))
    gated_product(x, weight, weight, "silu", gated_tiling(rows, 14336))
    assert Counter(each.name for each in compiled) == Counter(multiply=6, join=2)
    assert max(each.shared for each in compiled) <= SHARED_MEMORY
    for each in compiled:
        if each.name == "multiply":  # weights and tokens are copied to shared memory, 16 bytes at a time
            copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", each.ptx)
            assert len(copies) >= 4
            assert set(copies) == {"0x10"}


@pytest.fixture
def no_dependent_launch(monkeypatch):
    def switch():
        for module in (small_products, fused_kernels):
            monkeypatch.setattr(module, "dependent_launch", lambda device: {"pdl": False})

    return switch


def layers(x, weights, between):
    """A few layers without attention, as a served model has them, with `between` in two places of each."""
    one = torch.ones(x.shape[-1], device=x.device, dtype=x.dtype)
    for i, (q, k, v, o, gate, up, down) in enumerate(weights):
        y = fused_norm(x, one, 1e-5, "rounded")
        y = between(products(y, [q, k, v])[0])
        x, y = fused_add_norm(x, between(product(y, o)), one, 1e-5, "rounded")
        y = gated_product(y, gate, up, "silu") if i % 2 else fused_gate(*products(y, [gate, up]), "silu")
        x = product(y, down, None, x)
    return x


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("between", ["nothing", "kernel", "copy", "host"])
def test_on_cuda_a_chain_has_the_bits_of_one_without_dependent_launches(between, rows, no_dependent_launch):
    """Captured, and call by call; with nothing between products, torch's kernels, copies, or a wait of the host."""
    hidden, inner = 1024, 2816
    x = drawn(1, rows, hidden, device="cuda", dtype=torch.bfloat16)
    weights = [
        [(drawn(n, k, device="cuda", dtype=torch.float32, seed=7 * i + j) * k**-0.5).bfloat16()
         for j, (n, k) in enumerate([(hidden, hidden), *[(256, hidden)] * 2, (hidden, hidden),
                                     *[(inner, hidden)] * 2, (hidden, inner)])]
        for i in range(4)
    ]  # fmt: skip
    kept = torch.empty_like(x)

    def waits(x):
        torch.cuda.synchronize()
        return x

    change = {"nothing": lambda x: x, "kernel": lambda x: x + 0, "copy": lambda x: kept.zero_().copy_(x), "host": waits}
    eager = [layers(x, weights, change[between]) for _ in range(5)]
    replayed = []
    if between != "host":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layers(x, weights, change[between])
        for _ in range(20):
            found.fill_(torch.nan)
            graph.replay()
            replayed.append(found.clone())
    no_dependent_launch()
    expected = layers(x, weights, change[between])
    assert expected.isfinite().all()
    assert all(torch.equal(each, expected) for each in eager + replayed)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (5632, 2048), (2048, 5632)])
def test_on_cuda_products_of_real_sizes_are_as_near_to_float64_as_torchs(n, k, rows):
    x, weight = matrices(rows, n, k, "cuda", torch.bfloat16)
    expected = x.double() @ weight.double().T
    ours, theirs = (float((each.double() - expected).norm()) for each in (product(x, weight), F.linear(x, weight)))
    assert ours <= 1.1 * theirs

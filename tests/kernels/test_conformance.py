"""Every kernel, every case: the cell is exact against the oracle, or refused with the kernel's reason.

Tolerances. float64: rounding of sums of some hundred terms, 1e-13. float32: 2e-6 of the largest magnitude, the bar of
the whole library, or, where large scores make that more than float32 holds, what torch's own attention attains (see
[Note: float32]). Half precision rounds its scores' exponentials by design, so there torch's own attention on the same
numbers is the only yardstick: an error no more than 1.1 times its error, as root mean square, because the largest
single error is a matter of luck.

[Note: whose error] SDPA is several kernels, and they are not equally exact. A kernel of ours is measured by the one
that it is made of: what differs then is our doing. (On an H200, without grouped heads, the dk of `efficient` is at 0.98
to 1.04 of SDPA's efficient, but at 1.2 of its flash and cuDNN.) Where that one cannot do the problem, as flash
takes no mask, or the kernel is ours alone, as reference is, SDPA promises its user no more than the least exact that
can.

[Note: float32] e^(score - lse) is off by as much as score and lse are, and those of 20 are rounded by up to 1e-6
each time they are written down. torch writes lse once; ours is written by the tile, by the other tile and by their
join. Hence 1.5 times torch's error, where the 2e-6 cannot be had; TF32 would be a thousand times.

[Note: lse in half precision] aten's CPU kernel is coarser there: over 16 keys and more its lse is off by up to 6e-5,
and by 1e-6 for the same numbers in float32. Half a rounding step of bfloat16 is 2e-3.
"""

import functools
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnspan.errors import KernelError
from attnspan.kernels import KERNELS, choose_kernel
from tests import oracle
from tests.kernels.cases import CASES, DTYPES, TILES, Case, Problem

HALF = ("bfloat16", "float16")

# See [Note: whose error].
MADE_OF = {
    "cpu_flash": SDPBackend.FLASH_ATTENTION,
    "cuda_flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SDPA = [*dict.fromkeys(MADE_OF.values()), SDPBackend.MATH]


def refuses(kernel, case):
    """What each kernel is allowed to refuse: said again here, so that a refusal cannot spread unseen."""
    dims = (case.head_dim, case.value_dim or case.head_dim)
    match kernel:
        case "reference":
            return False
        case "cpu_flash":
            return case.device != "cpu" or dims[0] != dims[1]
        case "cuda_flash":
            odd = dims[0] != dims[1] or dims[0] % 8 or dims[0] > 256
            return case.device != "cuda" or case.dtype not in HALF or bool(odd)
        case "cudnn":
            odd = any(dim % 8 or dim > 128 for dim in dims)
            tile = TILES[case.tile]
            beyond = tile.kind == "general" or len(tile.cols) == 1
            return case.device != "cuda" or case.dtype not in HALF or odd or beyond
        case "efficient":
            whole = 4 if case.dtype == "float32" else 8
            odd = any(dim % whole for dim in dims)
            return case.device != "cuda" or case.dtype == "float64" or odd
        case "band":
            return case.device != "cuda" or case.dtype == "float64" or max(dims) > 256
    raise AssertionError(f"no row for {kernel}")


def cells(device, kernels):
    placed = [Case(**(vars(case) | {"device": device})) for case in CASES]
    return pytest.mark.parametrize(
        ("kernel", "case"),
        [
            pytest.param(kernel, case, id=f"{kernel}: {case}", marks=[] if is_daily(case) else [pytest.mark.slow])
            for kernel in kernels
            for case in placed
        ],
    )


def is_daily(case):
    """Every tile in every dtype, and features on one of their four tiles, in one dtype on two; the largest, which has
    several blocks on a GPU, on a CPU in one dtype."""
    if case.tile == "window over several blocks" and case.device == "cpu" and case.dtype != "float32":
        return False
    plain = Case(case.tile, case.dtype, device=case.device)
    return case == plain or case.tile == "window" or (case.tile == "causal, square" and case.dtype == "float32")


@cells("cpu", ["reference", "cpu_flash"])
def test_every_cell_is_exact_or_refused_on_cpu(kernel, case):
    check(kernel, case)


@pytest.mark.cuda
@cells("cuda", ["reference", "cudnn", "cuda_flash", "efficient", "band"])
def test_every_cell_is_exact_or_refused_on_cuda(kernel, case):
    check(kernel, case)


def check(kernel, case):
    problem = Problem(case)
    request = (kernel, problem.spec, *problem.inputs, (problem.tile,))
    reason = KERNELS[kernel].supports(*request[1:])
    assert (reason is not None) == refuses(kernel, case), reason
    if reason is not None:
        with pytest.raises(KernelError) as refusal:
            choose_kernel(*request)
        assert reason in str(refusal.value)
        return
    check_forward(choose_kernel(*request).kernel, problem)
    check_backward(choose_kernel(*request).kernel, problem)


def check_forward(kernel, problem):
    out, lse = kernel.forward(problem.spec, *problem.inputs, problem.tile)
    true_out, true_lse = oracle.attention(*problem.inputs, problem.mask, problem.case.scale)
    empty = true_lse == -torch.inf
    assert out.shape == true_out.shape
    assert lse.shape == true_lse.shape
    assert lse.dtype == torch.promote_types(problem.q.dtype, torch.float32)
    assert (lse == -torch.inf).equal(empty)
    assert not out[empty].any()
    torchs = functools.partial(torch_errors, problem, problem.k, problem.v, problem.mask)
    exact(kernel, problem, "out", out, true_out, torchs)
    lse_bound = 1e-4 if problem.case.dtype in HALF else bound(problem)  # [Note: lse in half precision]
    assert largest(lse[~empty] - true_lse[~empty]) <= lse_bound * max(1, largest(true_lse[~empty]))


def check_backward(kernel, problem):
    final = problem.final(kernel)
    grads = kernel.backward(problem.spec, problem.grad, *problem.inputs, *final, problem.tile)
    assert [x.shape for x in grads] == [x.shape for x in problem.inputs]
    # The tile's keys are seen by no other pair, so torch's dk and dv are the same sums as the tile's share, and its
    # dq is a longer one.
    torchs = functools.cache(lambda: torch_errors(problem, *problem.both))
    for name, found, true in zip(("dq", "dk", "dv"), grads, problem.share, strict=True):
        exact(kernel, problem, name, found, true, torchs)


def exact(kernel, problem, name, found, true, torchs):
    """Assert that what was found is true; `torchs` gives torch's errors, where they are the yardstick."""
    off, dtype = found - true, problem.case.dtype
    # What float32 may be off by is nothing in half precision: where a row sees one key, torch's out is that very value.
    if largest(off) <= bound(problem) * largest(true):
        return
    assert dtype != "float64", f"{name} is off by {largest(off) / largest(true):.1e} of the largest"
    errors = {backend: found[name] for backend, found in torchs().items()}
    allowed = errors.get(MADE_OF.get(kernel.name), max(errors.values()))  # [Note: whose error]
    # Writing the true values down is no error of anyone's: where a row sees one key, torch makes no other.
    allowed = max(allowed, rms(true.to(DTYPES[dtype]) - true))
    slack = 1.1 if dtype in HALF else 1.5  # [Note: float32]
    assert rms(off) <= slack * allowed, f"{name} is off by {rms(off) / allowed:.2f} times torch's error"


def bound(problem):
    return 1e-13 if problem.case.dtype == "float64" else 2e-6


def largest(x):
    return float(x.abs().max())


def rms(x):
    return float(x.square().mean().sqrt())


def torch_errors(problem, k, v, mask):
    """By backend of SDPA that can do the problem: its errors in out, dq, and the dk and dv of the tile's keys."""
    m, sees = problem.mask.shape[1], mask.any(1)
    true_out, _ = oracle.attention(problem.q, k, v, mask, problem.case.scale)
    grads = oracle.gradients(problem.q, k, v, mask, problem.case.scale, problem.grad)
    true = cut([true_out[:, :, sees], *grads], m)
    errors = {}
    for backend in SDPA:
        if found := by_torch(backend, problem, k, v, mask):
            errors[backend] = {name: rms(x - true[name]) for name, x in cut(found, m).items()}
    return errors


def cut(results, m):
    out, dq, dk, dv = results
    return {"out": out, "dq": dq, "dk": dk[:, :, :m], "dv": dv[:, :, :m]}


def by_torch(backend, problem, k, v, mask):
    """(out, dq, dk, dv) by one backend of SDPA, or None where it cannot; out without the rows that see nothing."""
    q, k, v = (x.detach().contiguous().clone().requires_grad_() for x in (problem.q, k, v))
    sees = mask.any(1)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)[sees]
    # On CUDA only the slow backend takes grouped heads together with a bias.
    on_cuda, group = q.is_cuda, q.shape[1] // k.shape[1]
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # why a backend cannot: that it cannot is all we ask
            out = scaled_dot_product_attention(
                q[:, :, sees],
                k.repeat_interleave(group, 1) if on_cuda else k,
                v.repeat_interleave(group, 1) if on_cuda else v,
                attn_mask=None if mask.all() else bias,
                scale=problem.case.scale,
                enable_gqa=not on_cuda,
            )
            return out.detach(), *torch.autograd.grad(out, (q, k, v), problem.grad[:, :, sees])
    except RuntimeError as refused:
        if any(words in str(refused) for words in ("No available kernel", "No viable backend", "cuDNN")):
            return None
        raise

"""Every kernel, every case: the cell is exact against the oracle, or refused with the kernel's reason.

Tolerances. float64: rounding of sums of some hundred terms, 1e-13. float32: 2e-6 of the largest magnitude, the bar of
the whole library. Half precision rounds its scores' exponentials by design, so the yardstick is torch's own
attention on the same numbers: an error no more than 1.1 times its error, as root mean square, because the largest
single error is a matter of luck.

[Note: lse in half precision] aten's CPU kernel is coarser there: over 16 keys and more its lse is off by up to 6e-5,
and by 1e-6 for the same numbers in float32. Half a rounding step of bfloat16 is 2e-3.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnspan.errors import KernelError
from attnspan.kernels import KERNELS, choose
from tests import oracle
from tests.kernels.cases import CASES, DTYPES, TILES, Case, Problem

HALF = ("bfloat16", "float16")


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
    raise AssertionError(f"no row for {kernel}")


def cells(device, kernels):
    placed = [Case(**(vars(case) | {"device": device})) for case in CASES]
    return pytest.mark.parametrize(
        ("kernel", "case"),
        [pytest.param(kernel, case, id=f"{kernel}: {case}") for kernel in kernels for case in placed],
    )


@cells("cpu", ["reference", "cpu_flash"])
def test_every_cell_is_exact_or_refused_on_cpu(kernel, case):
    check(kernel, case)


@pytest.mark.cuda
@cells("cuda", ["reference", "cudnn", "cuda_flash", "efficient"])
def test_every_cell_is_exact_or_refused_on_cuda(kernel, case):
    check(kernel, case)


def check(kernel, case):
    problem = Problem(case)
    request = (kernel, problem.spec, *problem.inputs, problem.tile)
    reason = KERNELS[kernel].supports(*request[1:])
    assert (reason is not None) == refuses(kernel, case), reason
    if reason is not None:
        with pytest.raises(KernelError) as refusal:
            choose(*request)
        assert reason in str(refusal.value)
        return
    check_forward(choose(*request), problem)
    check_backward(choose(*request), problem)


def check_forward(kernel, problem):
    out, lse = kernel.forward(problem.spec, *problem.inputs, problem.tile)
    true_out, true_lse = oracle.attention(*problem.inputs, problem.mask, problem.case.scale)
    empty = true_lse == -torch.inf
    assert out.shape == true_out.shape
    assert lse.shape == true_lse.shape
    assert lse.dtype == torch.promote_types(problem.q.dtype, torch.float32)
    assert (lse == -torch.inf).equal(empty)
    assert not out[empty].any()
    if problem.case.dtype in HALF:
        assert rms(out - true_out) <= 1.1 * torch_error(problem, problem.k, problem.v, problem.mask)[0]
        assert largest(lse[~empty] - true_lse[~empty]) <= 1e-4  # [Note: lse in half precision]
    else:
        assert largest(out - true_out) <= bound(problem) * largest(true_out)
        assert largest(lse[~empty] - true_lse[~empty]) <= bound(problem) * max(1, largest(true_lse[~empty]))


def check_backward(kernel, problem):
    final = problem.final(kernel)
    grads = kernel.backward(problem.spec, problem.grad, *problem.inputs, *final, problem.tile)
    errors = [found - true for found, true in zip(grads, problem.share, strict=True)]
    assert [x.shape for x in grads] == [x.shape for x in problem.inputs]
    if problem.case.dtype in HALF:
        # The tile's keys are seen by no other pair, so torch's dk and dv are the same sums as the tile's share, and
        # its dq is a longer one.
        _, *torchs = torch_error(problem, *problem.both)
        for name, off, allowed in zip(("dq", "dk", "dv"), errors, torchs, strict=True):
            assert rms(off) <= 1.1 * allowed, name
    else:
        for name, off, true in zip(("dq", "dk", "dv"), errors, problem.share, strict=True):
            assert largest(off) <= bound(problem) * largest(true), name


def bound(problem):
    return 1e-13 if problem.case.dtype == "float64" else 2e-6


def largest(x):
    return float(x.abs().max())


def rms(x):
    return float(x.square().mean().sqrt())


def torch_error(problem, k, v, mask):
    """The errors of torch's own attention in out, dq, and the dk and dv of the tile's keys."""
    case, m = problem.case, problem.mask.shape[1]
    q, k, v = (x.detach().contiguous().clone().requires_grad_() for x in (problem.q, k, v))
    sees = mask.any(1)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)[sees]
    # On CUDA only the slow kernel takes grouped heads together with a bias, and it is more exact than any fast one.
    fast = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    on_cuda, group = case.device == "cuda", case.heads // case.key_heads
    with sdpa_kernel(fast if on_cuda else [*fast, SDPBackend.MATH]):
        out = scaled_dot_product_attention(
            q[:, :, sees],
            k.repeat_interleave(group, 1) if on_cuda else k,
            v.repeat_interleave(group, 1) if on_cuda else v,
            attn_mask=None if mask.all() else bias,
            scale=case.scale,
            enable_gqa=not on_cuda,
        )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), problem.grad[:, :, sees])
    true_out, _ = oracle.attention(q.detach(), k.detach(), v.detach(), mask, case.scale)
    true_dq, true_dk, true_dv = oracle.gradients(q.detach(), k.detach(), v.detach(), mask, case.scale, problem.grad)
    return [
        max(rms(found - true), rounding(problem, true))
        for found, true in (
            (out.detach(), true_out[:, :, sees]),
            (dq, true_dq),
            (dk[:, :, :m], true_dk[:, :, :m]),
            (dv[:, :, :m], true_dv[:, :, :m]),
        )
    ]


def rounding(problem, true):
    """The error of writing the true values down: where a row sees one key, torch makes no other."""
    return rms(true.to(DTYPES[problem.case.dtype]) - true)

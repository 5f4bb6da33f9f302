"""What came before, or how its gradient is laid out, does not change what a kernel computes."""

import pytest
import torch

from attnspan.kernels import KERNELS
from attnspan.kernels.cudnn import laid_out_as
from tests.kernels.cases import Case, Problem


def layouts(x):
    """The same numbers in memory in other ways; the last is a number seen everywhere, as the gradient of a sum."""
    padded = x.new_full((*x.shape[:2], x.shape[2] + 5, x.shape[3]), torch.nan)
    padded[:, :, 2:-3] = x
    return {
        "BHSD": x.contiguous(),
        "BSHD": x.transpose(1, 2).contiguous().transpose(1, 2),
        "rows of more": padded[:, :, 2:-3],
        "BHDS": x.mT.contiguous().mT,
    }


def backward_is_the_same_in_every_layout(kernel, device, dtype):
    problem = Problem(Case("causal, square", dtype, device=device))
    kernel = KERNELS[kernel].kernel
    out, lse = problem.final(kernel)
    wide = torch.stack([lse, lse], -1)[..., 0]  # not dense
    first = kernel.backward(problem.spec, problem.grad, *problem.inputs, out, lse, problem.tile)
    for grad in layouts(problem.grad).values():
        for out_laid in layouts(out).values():
            again = kernel.backward(problem.spec, grad, *problem.inputs, out_laid, wide, problem.tile)
            for a, b in zip(first, again, strict=True):  # sums may be in another order, where atomics are used
                assert float((a - b).abs().max()) <= 0.01 * float(a.abs().max())
    one = torch.ones(1, 1, 1, 1, dtype=out.dtype, device=device).expand_as(out)
    seen = kernel.backward(problem.spec, one, *problem.inputs, out, lse, problem.tile)
    told = kernel.backward(problem.spec, one.contiguous(), *problem.inputs, out, lse, problem.tile)
    for a, b in zip(seen, told, strict=True):
        assert float((a - b).abs().max()) <= 0.01 * float(a.abs().max())


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_is_the_same_in_every_layout_on_cpu(kernel, dtype):
    backward_is_the_same_in_every_layout(kernel, "cpu", dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["reference", "cudnn", "cuda_flash", "efficient", "band"])
def test_backward_is_the_same_in_every_layout_on_cuda(kernel):
    backward_is_the_same_in_every_layout(kernel, "cuda", "bfloat16")


ON_CUDA = [
    pytest.param(kernel, "cuda", marks=pytest.mark.cuda) for kernel in ("reference", "cuda_flash", "efficient", "band")
]
anywhere = pytest.mark.parametrize(("kernel", "device"), [("reference", "cpu"), ("cpu_flash", "cpu"), *ON_CUDA])


def dtype_on(device):
    return "float32" if device == "cpu" else "bfloat16"


@anywhere
def test_a_row_that_saw_no_key_gets_no_gradient(kernel, device):
    problem = Problem(Case("rows that see no key", dtype_on(device), device=device))
    out, lse = KERNELS[kernel].kernel.forward(problem.spec, *problem.inputs, problem.tile)
    empty = lse == -torch.inf
    assert empty.any()
    grads = KERNELS[kernel].kernel.backward(problem.spec, problem.grad, *problem.inputs, out, lse, problem.tile)
    assert not grads[0][empty].any()
    assert all(x.isfinite().all() for x in grads)


@anywhere
def test_a_row_whose_final_lse_is_empty_gets_no_gradient_even_inside_a_tile(kernel, device):
    problem = Problem(Case("causal, square", dtype_on(device), device=device))
    out, lse = problem.final(KERNELS[kernel].kernel)
    lse[0, 0, 5] = -torch.inf
    grads = KERNELS[kernel].kernel.backward(problem.spec, problem.grad, *problem.inputs, out, lse, problem.tile)
    assert not grads[0][0, 0, 5].any()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "rows of more"])
@pytest.mark.parametrize("value_dim", [64, 32])
def test_out_and_grad_are_laid_out_as_cudnn_lays_out_its_own(layout, value_dim):
    """torch's own rule for the output of cuDNN attention, as its meta function has it."""
    q = layouts(torch.randn(2, 4, 8, 64))[layout].to("meta")
    k, v = q, q[..., :value_dim]
    out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    for x in layouts(torch.empty(out.shape)).values():
        assert laid_out_as(q, x).stride() == out.stride()

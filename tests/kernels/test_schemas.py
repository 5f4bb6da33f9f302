"""The CUDA kernels' calls fit the ops of the torch that is here, also where there is no GPU: on meta tensors."""

import pytest

from attnspan.kernels import KERNELS
from tests.kernels.cases import TILES, Case, Problem


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kernel", ["cudnn", "cuda_flash", "efficient"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_calls_fit_the_ops_and_shapes_come_out_right(kernel, tile, key_heads):
    if kernel == "cudnn" and TILES[tile].kind == "general":
        pytest.skip("cudnn computes full and causal tiles")
    problem = Problem(Case(tile, "bfloat16", key_heads=key_heads))
    q, k, v, grad = (x.to("meta") for x in (*problem.inputs, problem.grad))
    out, lse = KERNELS[kernel].kernel.forward(problem.spec, q, k, v, problem.tile)
    assert out.shape == grad.shape
    assert lse.shape == grad.shape[:3]
    grads = KERNELS[kernel].kernel.backward(problem.spec, grad, q, k, v, out, lse, problem.tile)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]

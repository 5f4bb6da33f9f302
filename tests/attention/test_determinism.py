"""The same bits from run to run, on CUDA.

`band` is so by itself: it adds nothing by atomics, and sums over ranks are taken in the plan's order. cuDNN's and
FlashAttention-2's backward add up dq by atomics. Told to by torch.use_deterministic_algorithms(True), the latter does
without; cuDNN does not listen, so it is refused then, and `auto` takes `band` in its place.
"""

import pytest
import torch

from attnspan import Attention
from attnspan.errors import KernelError
from attnspan.layouts import HeadTail
from attnspan.masks import Causal, Documents, SlidingWindow
from attnspan.testing import loopback
from tests.attention.harness import Problem, run
from tests.kernels.cases import deterministic

pytestmark = pytest.mark.cuda

MASKS = {
    "causal": Causal(),
    "window": SlidingWindow(300),
    "documents": Causal() & Documents([300, 1100, 1672]),
}
STRATEGIES = ("ring", "gather", "needed(2)", "ulysses")
AGAIN = 4

masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def problem(mask, strategy, kernel, length=3072, **differs):
    shape = {"heads": 8, "kv_heads": 2, "dim": 64, "batch": 1, "dtype": torch.bfloat16} | differs
    return Problem(mask, HeadTail(8), length, strategy, kernel=kernel, device="cuda", **shape)


def is_same_every_time(whole):
    first = run(whole)
    again = [run(whole) for _ in range(AGAIN)]
    return all(torch.equal(x, y) for each in again for x, y in zip(first[:5], each[:5], strict=True))


@masks
@strategies
def test_band_gives_the_same_bits_every_time(mask, strategy):
    assert is_same_every_time(problem(mask, strategy, "band"))


@pytest.mark.parametrize("differs", [{"dtype": torch.float16, "dim": 128}, {"dtype": torch.float32, "length": 1024}])
def test_band_does_in_every_dtype(differs):
    assert is_same_every_time(problem(Causal(), "gather", "band", **differs))


@masks
@strategies
@pytest.mark.parametrize("kernel", ["auto", "cuda_flash", "efficient"])
def test_where_torch_must_be_deterministic_the_others_give_the_same_bits_every_time(kernel, mask, strategy):
    with deterministic():
        assert is_same_every_time(problem(mask, strategy, kernel))


def test_where_torch_must_be_deterministic_cudnn_is_refused_also_when_it_was_served_before():
    """Ranks agree anew, so that all refuse before anything travels."""
    whole = Problem(Causal(), HeadTail(1), 512, "gather", kernel="cudnn", dim=64, dtype=torch.bfloat16, device="cuda")
    refusal = "cudnn's backward is not deterministic"

    def rank(world):
        attend = Attention(whole.plan, world, kernel="cudnn")
        q, k, v = (whole.shard(x, 0) for x in whole.whole[:3])
        attend(q, k, v)
        with deterministic(), pytest.raises(KernelError, match=refusal):
            attend(q, k, v)
        attend(q, k, v)

    loopback(1, "cuda").run(rank)

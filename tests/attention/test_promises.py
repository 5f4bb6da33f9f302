"""What the op returns is what it promises to compiled code, and a scale may have either sign."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnspan.attention import attention
from attnspan.layouts import HeadTail, Striped
from attnspan.masks import Causal, Documents, SlidingWindow
from attnspan.testing import loopback
from tests.turns import in_turn

STRATEGIES = ["ring", "gather", "needed(2)", "ulysses", "ulysses(2) x ring", "ulysses(2) x needed"]


class Returned(TorchDispatchMode):
    """Remembers what our ops were given and returned."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "attnspan":
            self.calls.append((func._opname, args, found))
        return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_real_results_are_what_compiled_code_was_promised(strategy, dtype):
    """Autograd casts gradients in silence; compiled code reads memory as what it was told is there."""

    def rank(world):
        q, k, v = (torch.randn(2, heads, 6, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
        with Returned() as seen:
            attention(
                q, k, v, mask=Causal(), layout=HeadTail(4), seq_len=24, group=world, strategy=strategy
            ).sum().backward()
        given = {"attention": (q,), "attention_backward": (q, k, v)}
        assert [name for name, *_ in seen.calls] == list(given)
        for name, _, found in seen.calls:
            for real, like in zip(found, given[name], strict=False):
                assert (real.dtype, real.shape, real.stride()) == (dtype, like.shape, like.stride()), name

    loopback(4).run(rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("mask", "scale"), in_turn([Causal(), SlidingWindow(5), Causal() & Documents([9, 15])], [-0.3, 0.0]), ids=str
)
def test_a_scale_of_zero_or_below_is_as_good_as_any(strategy, mask, scale):
    """Libraries mask before they multiply by the scale, and -inf becomes inf, or no number."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 4, 24, 8, dtype=torch.float64)
    scores = (whole[0] @ whole[1].mT * scale).masked_fill(~mask.dense(24), -torch.inf)
    expected = scores.softmax(-1) @ whole[2]
    expected.backward(grad)
    layout = Striped(4)

    def rank(world):
        own = layout.positions(24)[world.rank]
        q, k, v = (x.detach()[:, :, own].requires_grad_() for x in whole)
        out = attention(q, k, v, mask=mask, layout=layout, seq_len=24, group=world, strategy=strategy, scale=scale)
        out.backward(grad[:, :, own])
        return own, [out, q.grad, k.grad, v.grad]

    for own, found in loopback(4).run(rank):
        for x, y in zip(found, [expected, *(x.grad for x in whole)], strict=True):
            torch.testing.assert_close(x, y[:, :, own], rtol=0, atol=1e-12)  # float64: sums in another order

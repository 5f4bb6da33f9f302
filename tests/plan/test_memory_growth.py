"""Under ring and needed, no allocation grows with ranks: more of them carry longer sequences at the same cost.

A rank has the same tokens however many ranks there are. Twice: as `Plan.memory` predicts, and as counted on a CPU,
where a dispatch mode sees every tensor made, and by a finalizer on its storage when it is freed. One rank runs alone,
nothing travels.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan.attention import execute
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.kernels import MergedOutputs
from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal, Full, SlidingWindow
from attnspan.plan import Plan, Shape
from benchmarks.silent import Silent

TOKENS, SHAPE = 64, Shape(heads=2, kv_heads=1, head_dim=16, dtype="float32")
CASES = [
    ("ring", Full(), Contiguous),
    ("ring", Causal(), HeadTail),
    ("needed(2)", Causal() & SlidingWindow(63), Contiguous),
    ("needed(1)", Causal() & SlidingWindow(63), Contiguous),
]
every_case = pytest.mark.parametrize(("strategy", "mask", "layout"), CASES, ids=lambda case: str(case).split("(")[0])


class Live(TorchDispatchMode):
    """Bytes of tensors made inside that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in (x for x in tree_leaves(found) if isinstance(x, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage not in self._known and storage.nbytes():
                self._known.add(storage)
                self.now += storage.nbytes()
                self.peak, self.largest = max(self.peak, self.now), max(self.largest, storage.nbytes())
                weakref.finalize(storage, self._freed, storage.nbytes())
        return found

    def _freed(self, size):
        self.now -= size


def plan_for(strategy, mask, layout, ranks):
    return Plan(mask, layout(ranks), TOKENS * ranks, strategy)


def measured(plan):
    """The peak and the largest tensor, forward and backward, of a rank in the middle."""
    rank = plan.ranks // 2
    call = BoundPlan(plan, Silent(rank, plan.ranks, "cpu"))
    q, k, v, grad = (torch.randn(1, heads, TOKENS, 16) for heads in (2, 1, 1, 2))
    with torch.no_grad(), Live() as forward:
        out, lse = execute.forward(call, Inputs(q, k, v))
    with torch.no_grad(), Live() as backward:
        execute.backward(call, Inputs(q, k, v), MergedOutputs(grad, None, out, lse))
    return forward.peak, forward.largest, backward.peak, backward.largest


@every_case
def test_the_plan_predicts_the_same_peak_for_any_number_of_ranks(strategy, mask, layout):
    for backward in (False, True):
        peaks = set()
        for ranks in (8, 32, 128):
            plan = plan_for(strategy, mask, layout, ranks)
            peaks.add(plan.memory(ranks // 2, SHAPE, backward=backward).total)
        assert len(peaks) == 1


@every_case
def test_and_that_is_what_is_allocated(strategy, mask, layout):
    few, many = (measured(plan_for(strategy, mask, layout, ranks)) for ranks in (8, 32))
    assert many == few


def test_twin_a_gather_grows_and_that_is_noticed():
    few, many = (measured(plan_for("gather", Full(), Contiguous, ranks)) for ranks in (8, 32))
    assert all(more > 2 * less for more, less in zip(many, few, strict=True))

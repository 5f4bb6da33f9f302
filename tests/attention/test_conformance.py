"""Attention over ranks is attention: any plan, any kernel, any feature, forward and backward, against the oracle.

Three ways to ask. Random plans, in float64, where an error is a bug and not rounding. The table that is published in
docs/support.md: kernels under strategies, with masks and with features, each cell exact or refused with the stated
reason; daily any two of kernel, strategy and mask or feature meet, under `slow` all, and masks x features too. Of the
hybrids one is tried daily: each is Ulysses outside and one of the others inside, and these are. And numerical
differences, which trust no formula for gradients.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan.attention import wire
from attnspan.errors import AttnspanError, KernelError
from attnspan.kernels import flash4
from attnspan.layouts import HeadTail, Striped
from attnspan.masks import Causal, Documents
from benchmarks.support import DEVICES, FEATURES, MASKS, PAGE, PLAIN, STRATEGIES, UNEQUAL, Cell, page
from tests.attention.harness import Problem, check, run
from tests.plan.strategies import plans

# ---- random plans --------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Any plan, any number of heads, any of the features that tensors can have."""
    kv_heads = draw(st.integers(1, 3))
    return Problem.of(
        draw(plans(max_len=24, max_ranks=5)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 3, 4])),
        value_dim=draw(st.sampled_from([None, None, 2])),
        kernel=draw(st.sampled_from(["auto", "reference"])),
        scale=draw(st.sampled_from([None, 0.3])),
        sinks=draw(st.booleans()),
        through_lse=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
        memory=draw(st.sampled_from(["BHSD", "BSHD", "BHDS", "rows of more"])),
        seed=draw(st.integers(0, 1 << 20)),
    )


@given(problems(), st.sampled_from([1, 8]))
@settings(max_examples=max(1, settings.default.max_examples * 3 // 2))
def test_any_plan_is_exact(problem, most_runs):
    """Also with transfers of more runs than travel one by one: short sequences have few."""
    with patch.object(wire, "MAX_RUNS", most_runs):
        check(problem)


# ---- the table -----------------------------------------------------------------------------------------------------


def every_cell(device, masks=("Causal",), features=(PLAIN,)):
    # FlexAttention is compiled for every program and dtype; its cells are those of test_programs.py.
    kernels = [kernel for kernel, where in DEVICES.items() if where == device and kernel != "flex"]
    return [Cell(k, s, m, f) for k in kernels for s in STRATEGIES for m in masks for f in features]


def cells(*table, **rest):
    return pytest.mark.parametrize("cell", every_cell(*table, **rest), ids=str)


def try_cell(cell):
    """Exact, or refused with a reason that its plan or its kernel gives. A mask for equal lengths has fewer cells."""
    if cell.reasons == [UNEQUAL]:
        return
    if not cell.reasons:
        check(cell.problem)
        return
    with pytest.raises(AttnspanError) as refused:
        check(cell.problem)
    assert any(reason in str(refused.value) for reason in cell.reasons)


DAILY = [strategy for strategy in STRATEGIES if " x " not in strategy or strategy == "ulysses(2) x needed"]


def daily(cells):
    """Kernels take turns over strategies and columns. `test_every_cell_is_exact_or_refused` has them all."""
    kernels = sorted({cell.kernel for cell in cells})
    columns = list(dict.fromkeys((cell.mask, cell.feature.name) for cell in cells))

    def in_turn(cell):
        return kernels[(DAILY.index(cell.strategy) + columns.index((cell.mask, cell.feature.name))) % len(kernels)]

    return [cell for cell in cells if cell.strategy in DAILY and cell.kernel == in_turn(cell)]


def try_daily(cell):
    """What a kernel refuses, `reference` computes beside it, so that any strategy meets any column exactly."""
    try_cell(cell)
    if cell.reasons:
        try_cell(replace(cell, kernel="reference"))


DAILY_MASKS = daily(every_cell("cpu", masks=MASKS))
DAILY_FEATURES = daily(every_cell("cpu", features=FEATURES))


@pytest.mark.parametrize("cell", DAILY_MASKS, ids=str)
def test_every_mask_is_exact_or_refused(cell):
    try_daily(cell)


@pytest.mark.parametrize("cell", DAILY_FEATURES, ids=str)
def test_every_feature_is_exact_or_refused(cell):
    try_daily(cell)


@pytest.mark.parametrize(
    ("daily", "every", "column"),
    [
        (DAILY_MASKS, list(MASKS), lambda cell: cell.mask),
        (DAILY_FEATURES, [feature.name for feature in FEATURES], lambda cell: cell.feature.name),
    ],
    ids=["masks", "features"],
)
def test_in_the_daily_cells_any_two_of_kernel_strategy_and_column_meet(daily, every, column):
    kernels = {cell.kernel for cell in every_cell("cpu")}
    assert {(cell.kernel, cell.strategy) for cell in daily} == {(k, s) for k in kernels for s in DAILY}
    assert {(cell.kernel, column(cell)) for cell in daily} == {(k, n) for k in kernels for n in every}
    assert {(cell.strategy, column(cell)) for cell in daily} == {(s, n) for s in DAILY for n in every}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", [kernel for kernel, where in DEVICES.items() if where == "cpu"])
def test_every_cell_is_exact_or_refused(kernel, mask, strategy):
    for feature in FEATURES:
        try_cell(Cell(kernel, strategy, mask, feature))


def try_on_cuda(cell):
    if cell.kernel == "flash4" and flash4.installed() is None:
        pytest.skip("flash-attn-4 is not installed")
    try_cell(cell)


@pytest.mark.cuda
@cells("cuda", masks=MASKS)
def test_every_mask_is_exact_or_refused_on_cuda(cell):
    try_on_cuda(cell)


@pytest.mark.cuda
@cells("cuda", features=FEATURES)
def test_every_feature_is_exact_or_refused_on_cuda(cell):
    try_on_cuda(cell)


@pytest.mark.parametrize("kernel", [kernel for kernel, where in DEVICES.items() if where == "cuda"])
def test_a_kernel_for_cuda_is_refused_on_the_cpu(kernel):
    problem = Problem(Causal(), HeadTail(ranks=2), 8, "ring", kernel=kernel, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=f"{kernel} runs on cuda, got tensors on cpu"):
        check(problem)


def test_the_table_can_fail():
    """A cell that is served but said to be refused, and one that is refused but said to be served."""
    named = {feature.name: Cell("cpu_flash", "ring", "Causal", feature) for feature in FEATURES}
    served, refused = named["scale"], named["value head dim 24 beside 32"]
    vars(served)["reasons"], vars(refused)["reasons"] = ["some reason"], []
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        try_cell(served)
    with pytest.raises(KernelError, match="needs one head dim"):
        try_cell(refused)


def test_the_published_table_is_this_one():
    assert PAGE.read_text() == page(), "run python -m benchmarks.support"


# ---- numerical differences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        # Formulas for gradients are the same under all; daily one that keeps shards, one that adds them up, and heads.
        strategy
        if strategy in ("gather", "ring", "ulysses(2) x needed")
        else pytest.param(strategy, marks=pytest.mark.slow)
        for strategy in [*STRATEGIES, "ulysses(2) x needed(2)"]
    ],
)
def test_gradients_are_the_slopes_of_the_loss(strategy):
    """Central differences in float64 of the loss over all ranks: error step^2 and 1e-16 / step, both below 1e-9."""
    mask = Causal() & Documents([4, 1])
    shape = {"heads": 2, "kv_heads": 1, "dim": 2, "value_dim": 1, "batch": 1, "sinks": True, "through_lse": True}
    problem = Problem(mask, Striped(ranks=4), 5, strategy, **shape)
    moved, step = replace(problem, wanted=""), 1e-5
    found = run(problem)
    for name, x in zip(("dq", "dk", "dv", "dsinks"), moved.whole[:4], strict=True):
        slopes = torch.empty_like(x)
        for i in range(x.numel()):
            number = x.view(-1)[i].clone()
            x.view(-1)[i] = number + step
            above = loss(moved)
            x.view(-1)[i] = number - step
            slopes.view(-1)[i] = (above - loss(moved)) / (2 * step)
            x.view(-1)[i] = number
        torch.testing.assert_close(getattr(found, name), slopes, rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def loss(problem):
    out, lse, *_ = run(problem)
    return (out * problem.whole.grad).sum() + (lse * problem.whole.grad_lse).sum()

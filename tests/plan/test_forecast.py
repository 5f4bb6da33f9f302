"""The forecast of all ranks and strategies at once says what the timeline says of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attnspan.layouts import Balanced, Contiguous, HeadTail, Layout, PerDocument
from attnspan.masks import Causal, Documents, Mask, PrefixLM, SinkTokens, SlidingWindow
from attnspan.plan import Hardware, Plan, Shape
from attnspan.plan import forecast as module
from attnspan.plan.choose import Candidate, KeepKeys, all_strategies, predicted
from attnspan.plan.cost import Curve, Link
from attnspan.plan.forecast import SLACK, forecast
from attnspan.plan.group_forecast import Estimate, ForecastSetting
from attnspan.plan.strategy import Needed, strategy_name
from benchmarks.packs import pack

H100 = Hardware.of("h100-nvlink")
NODES = replace(H100, ranks_per_node=2)
MEASURED = replace(
    Hardware.of("cpu-gloo"),
    inside=Link(1e9, 1e-4, spread=2.5e9),
    between=Link(5e8, 2e-4, spread=6e8),
    ranks_per_node=2,
    launch_backward=5e-5,
    joins_below=1e8,
    curves=tuple(
        Curve(kind, (16.0, 256.0, 4096.0), (1e9 * rate, 8e9 * rate, 2e10 * rate), (5e8 * rate, 3e9 * rate, 9e9 * rate))
        for kind, rate in (("full", 1.0), ("causal", 0.9), ("general", 0.5))
    ),
)
SHARED = replace(MEASURED, ranks_per_device=2)  # ranks take turns
LENGTHS = [700, 33, 1, 1290, 257, 400, 1415]
MASKS: list[Mask] = [
    Causal() & Documents(LENGTHS),
    Documents(LENGTHS),
    Causal() & Documents([LENGTHS, [4000, 96]]),
    Causal() & Documents(LENGTHS) & SlidingWindow(100),
    Causal() & Documents(LENGTHS) & (SlidingWindow(100) | SinkTokens(4)),
    PrefixLM(300) & Documents(LENGTHS),
    Causal() & Documents([4096]),
]


def all_of(plan: Plan, setting: ForecastSetting) -> dict[str, Estimate]:
    """Every strategy: none is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLACK", -1e9)
        found = forecast(plan, all_strategies(plan.ranks, setting.shape), setting)
    return {strategy_name(each.strategy): each for each in found}


def walked(plan: Plan, setting: ForecastSetting) -> dict[str, Candidate]:
    """Every strategy, rank by rank."""
    how = {"limit": setting.memory, "keep_keys": setting.keep_keys, "sampled": plan.ranks}
    plans = (replace(plan, strategy=each) for each in all_strategies(plan.ranks, setting.shape))
    return {strategy_name(each.strategy): predicted(each, setting.shape, setting.hardware, **how) for each in plans}


def furthest(plan: Plan, setting: ForecastSetting) -> float:
    """How far the forecast is from the timeline, as a part of the time; the worst strategy."""
    found, expected = all_of(plan, setting), walked(plan, setting)
    assert found.keys() == expected.keys()
    return max(abs(found[name].seconds / expected[name].seconds - 1) for name in expected)


@pytest.mark.parametrize("keep_keys", [False, True, "auto"])
@pytest.mark.parametrize("hardware", [H100, NODES, MEASURED, SHARED], ids=["h100", "nodes", "measured", "shared"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: repr(mask)[:60])
def test_a_forecast_says_what_the_timeline_says(mask: Mask, hardware: Hardware, keep_keys: KeepKeys):
    setting = ForecastSetting(Shape(8, 4, batch=mask.rows), hardware, keep_keys, hardware.memory / 2)
    assert furthest(Plan(mask, Balanced(mask, ranks=4), 4096), setting) <= 0.03  # bands that share keys; tiles: exact


@pytest.mark.parametrize("layout", [Contiguous(3), HeadTail(3), PerDocument(LENGTHS, ranks=3)], ids=repr)
def test_a_forecast_takes_any_layout_without_strides(layout: Layout):
    assert furthest(Plan(MASKS[0], layout, 4096), ForecastSetting(Shape(6, 2, 64, 32), NODES)) <= 1e-6


@settings(max_examples=25)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 6), st.sampled_from([H100, NODES]))
def test_random_packs_are_met(lengths: list[int], ranks: int, hardware: Hardware):
    mask = Causal() & Documents(lengths)
    plan, setting = (
        Plan(mask, Balanced(mask, ranks=ranks, chunk=8), sum(lengths)),
        ForecastSetting(Shape(6, 2), hardware),
    )
    assert furthest(plan, setting) <= 0.03  # tiny packs: bands that masks/tile.py joins


@pytest.mark.parametrize("mask", MASKS[:3], ids=lambda mask: repr(mask)[:60])
def test_exchanges_and_memory_are_those_of_the_plan(mask: Mask):
    plan, setting = Plan(mask, Balanced(mask, ranks=4), 4096), ForecastSetting(Shape(8, 4, batch=mask.rows), H100, True)
    found, expected = all_of(plan, setting), walked(plan, setting)
    for name, each in expected.items():
        assert found[name].exchanges == each.exchanges
        assert found[name].needs == pytest.approx(each.needs, rel=0.05)  # rows of a batch have their peaks apart


@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_out_could_not_win(seed: int):
    name = ["lognormal", "two lengths", "equal"][seed % 3]
    mask = Causal() & Documents(pack(name, 1 << 14, 8 << seed, seed))
    plan, setting = Plan(mask, Balanced(mask, ranks=8), 1 << 14), ForecastSetting(Shape(32, 8), NODES)
    found = {strategy_name(each.strategy) for each in forecast(plan, all_strategies(8, setting.shape), setting)}
    everything = all_of(plan, setting)
    best = min(everything[name].seconds for name in found)
    assert min(each.seconds for each in everything.values()) >= best * (1 - SLACK)


def test_something_is_left_out():
    mask = Causal() & Documents(pack("lognormal", 1 << 17, 500, 1))
    plan, setting = Plan(mask, Balanced(mask, ranks=8), 1 << 17), ForecastSetting(Shape(32, 8), H100)
    found = [each.strategy for each in forecast(plan, all_strategies(8, setting.shape), setting)]
    assert Needed(2) in found
    assert len(found) < len(all_strategies(8, setting.shape)) / 2


def test_a_machine_with_another_link_has_another_forecast():
    """The twin: what the laws compare does depend on what they vary."""
    plan, shape = Plan(MASKS[0], Balanced(MASKS[0], ranks=4), 4096), Shape(8, 4)
    slow = replace(H100, inside=Link(1e10, 1e-5))
    fast, other = all_of(plan, ForecastSetting(shape, H100)), walked(plan, ForecastSetting(shape, slow))
    assert fast["gather"].seconds < 0.9 * other["gather"].seconds


def test_a_strategy_that_does_not_fit_does_not_rule_out_others():
    plan, shape = Plan(MASKS[6], Balanced(MASKS[6], ranks=4), 4096), Shape(8, 4)
    least = min(each.needs for each in all_of(plan, ForecastSetting(shape, H100)).values())
    found = forecast(plan, all_strategies(4, shape), ForecastSetting(shape, H100, memory=least))
    assert any(each.needs <= least for each in found)


def test_a_forecast_is_made_under_fake_tensors_and_without_gradients():
    plan, setting = Plan(MASKS[0], Balanced(MASKS[0], ranks=2), 4096), ForecastSetting(Shape(8, 4), H100)
    expected = forecast(plan, [Needed(2)], setting)
    with FakeTensorMode(), torch.enable_grad():
        assert forecast(plan, [Needed(2)], setting) == expected

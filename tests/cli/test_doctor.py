"""The doctor says what is here, and does not call a sick attention well."""

from typer.testing import CliRunner

from attnspan.cli.app import app
from attnspan.cli.doctor import BOUND, STRATEGIES, self_test
from attnspan.kernels import KERNELS, reference


def doctor():
    return CliRunner().invoke(app, ["doctor"])


def test_it_names_versions_kernels_and_the_result():
    said = doctor()
    assert said.exit_code == 0
    assert "torch 2." in said.output
    assert all(f"  {name}" in said.output for name in KERNELS)
    assert "cudnn runs on cuda" in said.output
    assert said.output.rstrip().endswith("all well")


def test_every_strategy_is_far_below_the_bound():
    assert all(self_test(strategy, "cpu") < BOUND / 4 for strategy in STRATEGIES)


def test_twin_a_wrong_kernel_is_told_and_ends_with_1(monkeypatch):
    monkeypatch.setattr("attnspan.kernels.cpu_flash.forward", lambda spec, q, k, v, tile: _wrong(spec, q, k, v, tile))
    said = doctor()
    assert said.exit_code == 1
    assert "wrong: an error above" in said.output


def _wrong(spec, q, k, v, tile):
    out, lse = reference.forward(spec, q, k, v, tile)
    return out * 1.001, lse

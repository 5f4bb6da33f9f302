"""`attnspan plan`, as a user runs it."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from attnspan.cli.app import app


def run(*args: str):
    return CliRunner().invoke(app, ["plan", *args])


def test_the_comparison_names_a_choice_and_a_reason_for_every_other():
    result = run("causal", "--seq-len", "64k", "--ranks", "4", "--kv-heads", "8")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("forward and backward on h100-nvlink")
    assert lines[1].split() == ["strategy", "layout", "imbalance", "moved/rank", "peak", "KV", "predicted", "why"]
    assert lines[2].endswith("chosen")
    assert any(line.startswith("take ") for line in lines)


def test_json_holds_the_same_and_nothing_else():
    result = run("causal & documents(4k*4)", "--ranks", "4", "--json", "--inference")
    data = json.loads(result.stdout)
    assert data["chosen"] == data["candidates"][0]["strategy"]
    assert all(candidate["peak_kv_bytes"] > 0 for candidate in data["candidates"])


def test_one_strategy_prints_its_plan_and_timeline():
    result = run("causal", "--seq-len", "1k", "--ranks", "2", "--strategy", "ring", "--layout", "head-tail")
    assert result.stdout.splitlines()[0] == "Causal(), 1024 tokens, HeadTail(ranks=2), ring"
    compute, link = result.stdout.splitlines()[-2:]
    assert re.search(r" [1-9][0-9.]* µs$", compute), "microseconds are not 0.000 s"
    assert re.search(r"waits [0-9.]+ µs$", link)
    assert json.loads(run("causal", "--seq-len", "1k", "--ranks", "2", "--strategy", "ring", "--json").stdout)


def test_the_command_of_the_readme_runs():
    words = "causal --seq-len 1M --ranks 64 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --hardware h100-nvlink"
    assert run(*words.split()).exit_code == 0


def test_one_strategy_as_json_lists_what_ranks_do():
    data = json.loads(run("causal", "--seq-len", "1k", "--ranks", "2", "--strategy", "gather", "--json").stdout)
    assert data["imbalance"] == 1.0
    assert [rank["rank"] for rank in data["per_rank"]] == [0, 1]
    assert sum(rank["work"] for rank in data["per_rank"]) == 1024 * 1025 // 2
    for rank in data["per_rank"]:
        assert (rank["tokens"], rank["received_keys"], rank["peak_keys"], rank["steps"]) == (512, 512, 1024, 1)
        assert rank["tiles"] > 0


def test_many_ranks_are_sampled():
    data = json.loads(run("window(63)", "--seq-len", "8k", "--ranks", "100", "--strategy", "needed", "--json").stdout)
    assert 32 <= len(data["per_rank"]) <= 33


def test_the_batch_is_the_masks_unless_said():
    args = ("padding([64, 32])", "--seq-len", "64", "--ranks", "2", "--strategy", "gather", "--json")
    assert run(*args).stdout == run(*args, "--batch", "2").stdout
    for refused in (run(*args, "--batch", "3"), run(*args[:5], "--batch", "1")):
        assert refused.exit_code == 2
        assert "batch must be the mask's 2 batch rows" in refused.stderr


@pytest.mark.parametrize("mask", ["~full", "padding(0)"])
def test_a_mask_that_allows_nothing_is_planned(mask: str):
    assert run(mask, "--seq-len", "64", "--ranks", "2").exit_code == 0
    assert run(mask, "--seq-len", "64", "--ranks", "2", "--strategy", "ring").exit_code == 0


def test_memory_is_asked_of_a_single_strategy_too():
    args = ("causal", "--seq-len", "64k", "--ranks", "2", "--kv-heads", "8", "--strategy", "gather", "--memory")
    assert run(*args, "0.3").exit_code == 0
    refused = run(*args, "0.1")
    assert refused.exit_code == 2
    assert "--memory: gather needs 268.4 MB, the limit is 100.0 MB; use more ranks" in refused.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["causal", "--ranks", "2"], "--seq-len must be given: causal has no length of its own"),
        (["causal", "--seq-len", "64", "--ranks", "2", "--hardware", "h100"], "hardware must be one of"),
        (["causal", "--seq-len", "64", "--ranks", "2", "--dtype", "bf61"], "dtype must be one of"),
        (["causal", "--seq-len", "64", "--ranks", "2", "--strategy", "rng"], "did you mean 'ring'?"),
        (["causal", "--seq-len", "64", "--ranks", "2", "--heads", "6", "--kv-heads", "4"], "heads must be a multiple"),
        (["causal", "--seq-len", "1M", "--ranks", "2", "--memory", "0.001"], "memory: no plan fits into 1.0 MB"),
        (["causal", "--seq-len", "64", "--ranks", "2", "--memory", "nan"], "memory must be a positive number"),
        (["docs(3, 4)", "--seq-len", "8", "--ranks", "2"], "lengths must sum to q_len (8)"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(args: list[str], message: str):
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output

"""`attnspan bench`, as a user runs it: on virtual ranks, on processes that it starts, and under torchrun."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from attnspan.cli.app import app
from attnspan.cli.bench import text
from attnspan.measure import Measured, Ranks, ranks
from attnspan.measure.tiles import SIZES
from attnspan.tuning import device_name, write
from tests.processes import Patient
from tests.tuning.test_table import rate, table

SMALL = ("--heads", "2", "--head-dim", "8", "--dtype", "fp32", "--device", "cpu")


def run(*args):
    return CliRunner().invoke(app, ["bench", *args])


def virtual(*args):
    return run(*args, "--ranks", "2", "--virtual", "--repeats", "1", *SMALL)


def test_the_table_has_a_line_for_every_strategy_and_kernel():
    result = virtual("causal", "--seq-len", "64", "--kernel", "auto", "--kernel", "reference")
    assert result.exit_code == 0, result.output
    what, predicted, head, *lines = result.stdout.splitlines()
    assert what == (
        "causal, 64 tokens, Balanced over 2 virtual ranks on cpu; 2 heads, head dim 8, fp32; forward + backward"
    )
    assert predicted.startswith("predicted with cpu-gloo: ")
    assert head.split() == ["strategy", "kernel", "measured", "predicted", "ratio", "over", "the", "fastest"]
    strategies = ["gather", "needed(1)", "needed(2)", "ring", "ulysses"]
    assert [line.split()[0] for line in lines[2:]] == [each for each in strategies for _ in range(2)]
    assert all(line.startswith("auto: ") for line in lines[:2])
    assert any(line.endswith("1.00x") for line in lines)


def test_json_holds_seconds_and_what_auto_took():
    result = virtual(
        "window(7)", "--seq-len", "64", "--strategy", "auto", "--strategy", "ring", "--inference", "--json"
    )
    auto, ring = json.loads(result.stdout)["rows"]
    assert auto["seconds"] > 0
    assert auto["predicted"] > 0
    assert auto["chosen"].startswith("needed")
    assert (ring["chosen"], ring["refused"]) == ("", "")


def test_a_kernel_that_cannot_is_a_line_with_its_reason():
    result = virtual("causal", "--seq-len", "64", "--strategy", "ring", "--kernel", "cudnn", "--kernel", "auto")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("ring with cudnn: kernel='cudnn' cannot compute")


def test_predictions_go_by_the_table_that_is_given_or_measured(tmp_path, monkeypatch):
    name = device_name(torch.device("cpu"))
    slow = [rate("cpu_flash", kind, head_dim=8, forward=1e3, backward=1e3) for kind in ("full", "causal", "general")]
    write(table(*slow, device=name, torch=torch.__version__), tmp_path / "table.json")
    asked = ("causal", "--seq-len", "64", "--strategy", "gather", "--json")
    given = json.loads(virtual(*asked, "--tuning", str(tmp_path / "table.json")).stdout)
    assert given["predicted_with"].startswith(f"{name}: measured 2026-01-01")
    assert given["rows"][0]["predicted"] > 0.1, "as slow as the table says"
    monkeypatch.setitem(SIZES, "cpu", (16,))
    measured = json.loads(virtual(*asked, "--tune").stdout)
    assert "by attnspan tune" in measured["predicted_with"]
    assert measured["rows"][0]["predicted"] < 0.1


def test_a_chart_is_drawn(tmp_path):
    result = virtual("causal", "--seq-len", "64", "--strategy", "ring", "--chart", str(tmp_path / "chart.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "run", lambda *_: pytest.fail("measured"))
    for path, message in {
        "chart.text": "--chart must be a file such as chart.png, of one kind of ",
        "nowhere/chart.png": "--chart: the folder ",
    }.items():
        result = virtual("causal", "--seq-len", "64", "--chart", str(tmp_path / path))
        assert (result.exit_code, message in result.stderr) == (2, True), result.output
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    result = virtual("causal", "--seq-len", "64", "--chart", str(tmp_path / "chart.png"))
    assert result.exit_code == 2
    assert (
        'attnspan: --chart needs matplotlib, which is not installed; run pip install "attnspan[plot]"' in result.stderr
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["causal"], "--seq-len must be given: causal has no length of its own"),
        (["causal", "--seq-len", "64", "--strategy", "rng"], "did you mean 'ring'?"),
        (["causal", "--seq-len", "64", "--kernel", "cpuflash"], "--kernel must be one of auto"),
        (["causal", "--seq-len", "64", "--device", "tpu"], "device must be one of cpu, cuda, got 'tpu'"),
        (["docs(3, 4)", "--seq-len", "8"], "lengths must sum to q_len (8)"),
        (["causal", "--seq-len", "64", "--tune", "--tuning", "x.json"], "give one of them"),
        (["causal", "--seq-len", "64", "--tuning", "nowhere.json", "--device", "cpu"], "nowhere.json cannot be read"),
        (["causal", "--seq-len", "64", "--layout", "stripd"], "did you mean 'striped'?"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(args, message):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


PROCESSES = ("causal", "--seq-len", "64", "--ranks", "2", "--repeats", "1", "--strategy", "ring", *SMALL)


def test_ranks_are_processes(monkeypatch):
    monkeypatch.setattr(ranks, "processes", Patient)  # that start as the suite's do
    result = run(*PROCESSES, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (row,) = found["rows"]
    assert row["seconds"] > row["waits"] > 0
    assert row["wire"] > 0
    assert found["link"]["latency"] > 0
    assert found["link"]["bandwidth"] > 0


def test_the_text_shows_the_link_and_what_of_the_wire_is_hidden():
    row = Measured("ring", "auto", seconds=0.5, predicted=0.25, waits=0.002, wire=0.005)
    link = {"bandwidth": 5e9, "latency": 3e-5}
    found = {"what": "causal", "predicted_with": "a table", "virtual": False, "link": link, "rows": [row.data()]}
    *_, link, head, line = text(found).splitlines()
    assert link == "link measured: 5 GB/s, 30 µs, all ranks sending at once"
    columns = ["strategy", "kernel", "measured", "predicted", "ratio", "on the wire", "waits", "hidden"]
    assert re.split(r"\s{2,}", head) == [*columns, "over the fastest"]
    assert line.split()[2:] == [
        "500.00",
        "ms",
        "250.00",
        "ms",
        "2.00",
        "5.00",
        "ms",
        "2.00",
        "ms",
        "3.00",
        "ms",
        "1.00x",
    ]


@pytest.mark.slow
def test_a_refusal_in_a_process_is_heard():
    refused = run(*PROCESSES, "--tuning", "nowhere.json")
    assert refused.exit_code == 2
    assert "nowhere.json cannot be read" in refused.stderr


@pytest.mark.slow
def test_under_torchrun_rank_0_alone_speaks():
    words = ["causal", "--seq-len", "64", "--repeats", "1", "--strategy", "auto", *SMALL, "--json"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "attnspan",
        "bench",
        *words,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["what"].startswith("causal, 64 tokens, Balanced over 2 ranks on cpu")

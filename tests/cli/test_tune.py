"""`attnspan tune`, as a user runs it."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attnspan.cli.app import app
from attnspan.masks.tile import Tile
from attnspan.measure import ranks
from attnspan.tuning import cache_path, device_name, table_for
from tests.processes import Patient

SMALL = ("--size", "16", "--size", "64", "--heads", "2", "--head-dim", "8", "--device", "cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ATTNSPAN_TUNING")
    return tmp_path


def run(*args):
    return CliRunner().invoke(app, ["tune", *args])


def test_what_is_measured_is_kept_where_auto_looks_for_it(cache):
    result = run(*SMALL, "--kernel", "cpu_flash", "--kernel", "reference")
    assert result.exit_code == 0, result.output
    name = device_name(torch.device("cpu"))
    assert result.stdout.splitlines()[-1] == f"saved to {cache_path(name)}"
    table = table_for(torch.device("cpu"))
    assert (table.device, table.torch) == (name, torch.__version__)
    # Three kinds, two sizes, two kernels; every time is positive, or the table would have refused itself.
    assert len(table.rates) == 12
    assert {rate.kind for rate in table.rates} == {"full", "causal", "general"}
    assert {rate.rows for rate in table.rates if rate.kind == "general"} == {32, 128}
    assert set(table.order("float32", 8, Tile(range(4096), range(4096), -4095, 4095))) == {"cpu_flash", "reference"}
    shown = run("--show", "--device", "cpu")
    assert shown.stdout.splitlines()[0] == f"{name}, torch {torch.__version__}, {table.date}"


def test_without_a_table_there_is_nothing_to_show(cache):
    result = run("--show", "--device", "cpu")
    assert result.exit_code == 2
    assert "no tuning table for" in result.stderr


def test_links_are_measured_between_ranks_and_written_where_asked(cache, monkeypatch):
    monkeypatch.setattr(ranks, "processes", Patient)  # that start as the suite's do
    path = cache / "mine.json"
    result = run(*SMALL, "--ranks", "2", "--out", str(path), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["inside"]["bandwidth"] > 1e6
    assert 0 < data["inside"]["latency"] < 1
    assert (data["between"], data["ranks_per_node"]) == (None, 2)
    assert json.loads(path.read_text()) == data
    assert not cache_path(device_name(torch.device("cpu"))).exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kernel", "cpuflash"], "kernel must be one of"),
        (["--dtype", "bf61"], "dtype must be one of"),
        (["--size", "0"], "--size must be a whole number >= 1, got 0"),
        (
            ["--kernel", "cudnn", "--device", "cpu", "--size", "16"],
            "none of the kernels cudnn computes such tiles on cpu",
        ),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(args, message, cache):
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output

"""The benchmark for clusters writes one page, on ranks that it starts and on those of torchrun, and names no host."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.pace import stretched

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]])
def test_a_page_has_the_self_test_and_every_strategy(tmp_path, launcher):
    alone = [] if launcher else ["--ranks", "2"]
    sizes = ["--tokens-per-rank", "64", "--heads", "4", "--kv-heads", "2", "--repeats", "1", "--device", "cpu", "--out"]
    command = [sys.executable, *launcher, "-m", "benchmarks.cluster", *alone, *sizes, str(tmp_path / "cluster.md")]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | paths, cwd=tmp_path, capture_output=True, text=True, timeout=stretched(180)
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "cluster.md").read_text()
    assert page.startswith("# 2 ranks on 1 host\n")
    assert "Self-test against dense float64: passed on every rank." in page
    assert re.findall(r"^## (.*)$", page, re.M) == ["causal", "packed documents", "window of 4096"]
    for strategy in ("auto: ", "ring", "gather", r"needed\(1\)", r"needed\(2\)", "ulysses"):
        assert len(re.findall(rf"^\| {strategy}[^|]*\|( [\d.]+ (?:µs|ms|s) \|){{4}}$", page, re.M)) == 3
    assert socket.gethostname() not in page
    assert str(tmp_path) not in page


def test_the_template_asks_for_the_page():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/results.yml").read_text())
    assert "cluster.md" in [part["attributes"]["label"] for part in form["body"]]
    assert form["name"] in " ".join((ROOT / "docs/cluster.md").read_text().split())

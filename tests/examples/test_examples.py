"""Every example runs as it says it does: alone with one command, and under torchrun. Each checks itself."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/[0-9]*.py"))
OVER_RANKS = [path for path in EXAMPLES if "launch(main" in path.read_text()]
TWO_SCREENS = 100  # lines

LIMIT = 120  # seconds: far more than any of them takes alone, for a machine that does other things too


def run(*command):
    # Python's own switch for deprecations that torch brings about is not ours to set: only our output is looked at.
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ours, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_one_command(example):
    assert run(sys.executable, str(example)).strip()


@pytest.mark.parametrize("example", OVER_RANKS, ids=lambda path: path.stem)
def test_an_example_runs_under_torchrun(example):
    free = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
    assert run(*torchrun(*free), str(example)).strip()


def test_no_example_writes_escape_codes_of_its_own():
    """They would be in a file that its output goes to; rich knows a terminal from a pipe."""
    for path in ROOT.glob("examples/*.py"):
        assert not re.search(r"\\(033|x1b|e)\[", path.read_text(encoding="utf-8")), path


def test_the_demo_says_that_it_is_not_for_torchrun():
    ours = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT / "src")}
    demo = [sys.executable, str(ROOT / "examples" / "demo.py")]
    done = subprocess.run(demo, cwd=ROOT, env=ours, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert done.stderr.strip() == "the demo starts its own 4 ranks: run it without torchrun, as `make demo`"


def test_two_agents_make_one_group():
    """As on two hosts: two torchruns that know each other by an address alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    example = str(ROOT / "examples" / "08_two_hosts.py")
    meeting = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    ours = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    hosts = [
        subprocess.Popen(
            [*torchrun(*meeting), f"--node-rank={host}", example],
            cwd=ROOT, env=ours, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for host in range(2)
    ]  # fmt: skip
    try:
        said = [host.communicate(timeout=LIMIT)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    assert "2 hosts x 2 ranks" in said[0]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(example):
    text = example.read_text()
    assert text.count("\n") <= TWO_SCREENS
    assert re.search(rf"{example.name}", text.split('"""')[1])

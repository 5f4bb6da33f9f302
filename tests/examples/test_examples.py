"""Every example runs as it says it does: alone with one command, and under torchrun. Each checks itself.

Most of a command's time is its import of torch, once for itself and once for each of its ranks. Daily an example is
therefore a fork of an interpreter that has imported torch, and its ranks are forks of it; one runs under torchrun, as a
command on each of two hosts. The slow tests run each as a command.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import patiently

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/[0-9]*.py"))
OVER_RANKS = [path for path in EXAMPLES if "launch(main" in path.read_text()]
TWO_SCREENS = 100  # lines

LIMIT = 120  # seconds of an idle machine: far more than any of them takes


def started(*command, stdin=None):
    # Python's own switch for deprecations that torch brings about is not ours to set: only our output is looked at.
    ours = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    piped = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=ours, start_new_session=True, **piped)


def ended(process):
    """Its status, and what it wrote to stdout and stderr. Whatever is left of it when its time is over is killed."""
    said = []

    def wait(seconds):
        try:
            said[:] = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    try:
        assert patiently(wait, LIMIT), f"{process.args} did not end in time"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, *said


def run(*command):
    status, out, errors = ended(started(*command))
    assert status == 0, out + errors
    return out


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options]


FORKS = """
import json, os, runpy, sys, tempfile, traceback

import torch.distributed.fsdp, torch.distributed.tensor.parallel, torch.nn.attention.flex_attention
import torch.multiprocessing as mp
from transformers import LlamaForCausalLM

import attnspan

mp.spawn = lambda fn, args, nprocs: mp.start_processes(fn, args, nprocs, start_method="fork")
sys.path[0] = "examples"  # where an example finds its neighbours

for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            status = 1
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            try:
                path, environment = json.loads(line)
                os.environ.update(environment)
                runpy.run_path(path, run_name="__main__")
                status = 0
            except SystemExit as left:
                print(left, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        said = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        for file in (out, errors):
            file.seek(0)
            said.append(file.read())
        print(json.dumps(said), flush=True)
"""


@pytest.fixture(scope="module")
def forked():
    """``forked(example)``: its status in a fork of one interpreter, and what it wrote to stdout and stderr."""
    with started(sys.executable, "-c", FORKS, stdin=subprocess.PIPE) as fresh:

        def run(example, **environment):
            print(json.dumps([str(example), environment]), file=fresh.stdin, flush=True)
            heard = patiently(lambda seconds: select.select([fresh.stdout], [], [], seconds)[0], LIMIT)
            assert heard, f"{example} did not end in time"
            return json.loads(fresh.stdout.readline())

        try:
            yield run
        finally:
            os.killpg(fresh.pid, signal.SIGKILL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(forked, example):
    status, out, errors = forked(example)
    assert status == 0, out + errors
    assert out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_one_command(example):
    assert run(sys.executable, str(example)).strip()


@pytest.mark.slow  # all join a group in one place, examples/launch.py: `test_two_agents_make_one_group` shows it daily
@pytest.mark.parametrize("example", OVER_RANKS, ids=lambda path: path.stem)
def test_an_example_runs_under_torchrun(example):
    free = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
    assert run(*torchrun(*free), str(example)).strip()


def test_no_example_writes_escape_codes_of_its_own():
    """They would be in a file that its output goes to; rich knows a terminal from a pipe."""
    for path in ROOT.glob("examples/*.py"):
        assert not re.search(r"\\(033|x1b|e)\[", path.read_text(encoding="utf-8")), path


def test_the_demo_says_that_it_is_not_for_torchrun(forked):
    status, _, errors = forked(ROOT / "examples" / "demo.py", RANK="0", WORLD_SIZE="2")
    assert status == 1
    assert errors.strip() == "the demo starts its own 4 ranks: run it without torchrun, as `make demo`"


def test_two_agents_make_one_group():
    """As on two hosts: two torchruns that know each other by an address alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    example = str(ROOT / "examples" / "08_two_hosts.py")
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    hosts = [started(*torchrun(*meeting), f"--node-rank={host}", example) for host in range(2)]
    try:
        told = [ended(host) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [status for status, *_ in told] == [0, 0], told
    assert "2 hosts x 1 ranks" in told[0][1]  # with two ranks each: `test_an_example_runs`


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(example):
    text = example.read_text()
    assert text.count("\n") <= TWO_SCREENS
    assert re.search(rf"{example.name}", text.split('"""')[1])

"""``import attnspan`` needs torch alone, and starts nothing.

Each test runs a fork of a fresh interpreter in which the optional packages cannot be found. torch comes first, once,
with its warnings let through: what it says about a missing numpy is its own business. From then on a warning is an
error.
"""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.architecture.test_imports import OPTIONAL

COLD = """
import sys, threading, warnings

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())

import torch
import torch.distributed as dist

warnings.simplefilter("error")
"""

QUIET = """
assert not (dist.is_available() and dist.is_initialized()), "a process group was started"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert threading.active_count() == threads, "a thread was started"
assert torch.get_rng_state().equal(seed), "random numbers were drawn"
"""


FORKS = """
import json, os, tempfile, traceback

for line in sys.stdin:
    files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        status = 1
        try:
            exec(json.loads(line))
            status = 0
        except SystemExit as left:
            status = left.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    told = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    for file in files:
        file.seek(0)
        told.append(file.read())
        file.close()
    print(json.dumps(told), flush=True)
"""


@contextmanager
def interpreter(*absent):
    """``run(body)`` runs code in a fork of an interpreter that lacks these packages: its exit status, what it printed.

    torch is imported, once.
    """
    command = [sys.executable, "-c", COLD + FORKS, *absent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as fresh:

        def run(body):
            print(json.dumps(body), file=fresh.stdin, flush=True)
            return tuple(json.loads(fresh.stdout.readline()))

        yield run


@pytest.fixture(scope="module")
def cold():
    """``cold(body)`` runs code where nothing optional is installed: its exit status and what it printed to stderr."""
    with interpreter(*OPTIONAL) as run:

        def told(body):
            status, _, said = run(body)
            return status, said

        yield told


@pytest.fixture
def quiet(cold):
    """``quiet(body)`` runs code, then looks for what it may have started."""
    return lambda body: cold(f"threads, seed = threading.active_count(), torch.get_rng_state()\n{body}\n{QUIET}")


def test_importing_needs_no_optional_package_and_warns_of_nothing(cold):
    status, said = cold("import attnspan")
    assert status == 0, said


@pytest.mark.parametrize("package", sorted(OPTIONAL))
def test_twin_an_optional_package_cannot_be_imported(package, cold):
    status, said = cold(f"import {package}")
    assert status != 0
    assert f"No module named '{package}'" in said


def test_twin_a_warning_is_noticed(cold):
    status, said = cold("warnings.warn('careful')")
    assert status != 0
    assert "UserWarning: careful" in said


def test_importing_starts_nothing(quiet):
    status, said = quiet("import attnspan")
    assert status == 0, said


GROUP = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
DEVICE = "torch.cuda.is_initialized = lambda: True"  # as if: there may be no device here
THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(
    ("deed", "noticed"),
    [
        (GROUP, "a process group was started"),
        (DEVICE, "CUDA was initialised"),
        (THREAD, "a thread was started"),
        ("torch.rand(1)", "random numbers were drawn"),
    ],
)
def test_twin_what_an_import_might_start_is_noticed(deed, noticed, quiet):
    status, said = quiet(deed)
    assert status != 0
    assert noticed in said

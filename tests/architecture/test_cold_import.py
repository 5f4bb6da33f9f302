"""``import attnspan`` needs torch alone, and starts nothing.

Each test runs a fresh interpreter in which the optional packages cannot be found. torch comes first, with
its warnings let through: what it says about a missing numpy is its own business. From then on a warning is
an error.
"""

import subprocess
import sys

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


def cold(body):
    """Run ``body`` where nothing optional is installed; its exit status and what it printed to stderr."""
    command = [sys.executable, "-c", COLD + body, *OPTIONAL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def quiet(body):
    """Run ``body``, then look for what it may have started."""
    return cold("threads, seed = threading.active_count(), torch.get_rng_state()\n" + body + QUIET)


def test_importing_needs_no_optional_package_and_warns_of_nothing():
    status, said = cold("import attnspan")
    assert status == 0, said


@pytest.mark.parametrize("package", sorted(OPTIONAL))
def test_twin_an_optional_package_cannot_be_imported(package):
    status, said = cold(f"import {package}")
    assert status != 0
    assert f"No module named '{package}'" in said


def test_twin_a_warning_is_noticed():
    status, said = cold("warnings.warn('careful')")
    assert status != 0
    assert "UserWarning: careful" in said


def test_importing_starts_nothing():
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
def test_twin_what_an_import_might_start_is_noticed(deed, noticed):
    status, said = quiet(deed)
    assert status != 0
    assert noticed in said

"""How every test runs: one thread, a known search for counterexamples, and CUDA awake where it is needed.

Hypothesis profiles, by ``HYPOTHESIS_PROFILE`` or else by where we are::

    dev     at a desk: 40 new examples for each law on every run
    ci      where CI=true: the same 40 on every run, so that a red build is red again when looked at
    long    `make test-slow`: 2000

No profile has a deadline or minds slow examples: time is measured in benchmarks, never in tests.
"""

import gc
import os
import warnings

# Before torch is imported, and for the processes that tests start: ranks share the cores with each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What was measured on this machine must not decide what is tested.
os.environ.setdefault("ATTNSPAN_TUNING", "none")

import pytest
from hypothesis import HealthCheck, settings

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
settings.register_profile("dev", untimed)
settings.register_profile("ci", untimed, derandomize=True, print_blob=True)
settings.register_profile("long", untimed, max_examples=2000)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))


def pytest_configure(config):
    """One measurement for all workers of pytest-xdist, which inherit the environment of the process they start from."""
    if getattr(config.option, "numprocesses", None):
        from tests.pace import pace

        pace()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Importing and collecting make a million objects that stay: no search for garbage looks at them, 0.2 s each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """What was collected stays until the end: later searches pass over it. They are rarer than Python's own, which take
    a fifteenth of the time of all tests; a test that needs one asks for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True, scope="session")
def unhurried():
    """Virtual ranks await each other for longer where the machine is slow, if that was measured."""
    from tests.pace import KEPT, stretched

    if KEPT in os.environ:
        from attnspan.testing import loopback

        loopback.__kwdefaults__["timeout"] = stretched(loopback.__kwdefaults__["timeout"])


@pytest.fixture(autouse=True)
def awake(request):
    """autograd's thread with a CUDA context.

    Backward runs in a thread of its own. cuBLAS, if it is the first thing called there, finds no context, makes one
    and warns; any other kernel makes one in silence.
    """
    if request.node.get_closest_marker("cuda") is not None:
        request.getfixturevalue("cuda_context")


@pytest.fixture(scope="session")
def cuda_context():
    import torch

    torch.ones(2, device="cuda", requires_grad=True).exp().sum().backward()
    torch.cuda.synchronize()


@pytest.fixture
def by_blocks(monkeypatch):
    """Functions are asked by kernels, however regular they are. What is remembered of them otherwise is forgotten."""
    from attnspan.masks import mask, question
    from attnspan.plan import plan

    memos = (mask._cached_bands, mask._cached_cover, mask._cached_columns, plan._geometry, plan._shifts, plan._steps)

    def forget():
        for memo in memos:
            memo.cache_clear()

    forget()
    monkeypatch.setattr(question, "MAX_SPANS", float("-inf"))
    yield
    forget()


@pytest.fixture
def quietly():
    """What transformers has to say of tiny configs."""
    import transformers

    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

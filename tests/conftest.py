"""How every test runs: one thread, and a known search for counterexamples.

Hypothesis profiles, by ``HYPOTHESIS_PROFILE`` or else by where we are::

    dev     at a desk: new examples on every run
    ci      where CI=true: the same examples on every run, so that a red build is red again when looked at
    long    `make test-slow`: many more examples

No profile has a deadline or minds slow examples: time is measured in benchmarks, never in tests.
"""

import os

# Before torch is imported, and for the processes that tests start: ranks share the cores with each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", untimed)
settings.register_profile("ci", untimed, derandomize=True, print_blob=True)
settings.register_profile("long", untimed, max_examples=2000)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))

"""How slow this machine is, so that no test fails because others work on it too.

A limit in a test says how long something takes at most on an idle machine of today. `stretched` makes it longer by the
machine's `pace`: 1 or more, the time that a Python takes to start and to import torch, by the time it takes there.
It is measured once and kept in the environment, for the workers of pytest-xdist and for the processes that tests start.

A machine may become busy later. `patiently` therefore asks again, once the limit has passed and before it gives up.
"""

import os
import subprocess
import sys
import time

IDLE = 2.0
"""Seconds in which an idle machine starts Python and imports torch."""

KEPT = "ATTNSPAN_TEST_PACE"


def measured():
    """The pace of this moment."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - began) / IDLE)


def pace():
    """The pace of this session, or of a later moment that was slower."""
    if KEPT not in os.environ:
        os.environ[KEPT] = str(measured())
    return float(os.environ[KEPT])


def stretched(seconds):
    return seconds * pace()


def patiently(wait, seconds, began=None):
    """Whether ``wait(timeout)`` comes true within ``seconds`` of an idle machine's time, from ``began`` or from now."""
    began = time.monotonic() if began is None else began
    while not wait(max(0.0, began + stretched(seconds) - time.monotonic())):
        now = measured()
        if now < 1.2 * pace():  # no slower than was known, or hardly
            return False
        os.environ[KEPT] = str(now)
    return True


def in_time(took, seconds):
    """Whether what ``took`` so long has taken no more than ``seconds`` of an idle machine's time."""
    return patiently(lambda _: took <= stretched(seconds), 0)

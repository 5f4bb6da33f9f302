"""Where a test runs: on the CPU always, so that it is known to be right before a device is there, and on CUDA."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
on_every_device = pytest.mark.parametrize("device", DEVICES)

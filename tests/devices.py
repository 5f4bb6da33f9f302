"""Where a test runs: on the CPU always, so that it is known to be right before a device is there, and on CUDA.

In the processes of `tests.processes.spawn` the default device is the world's. `here` and `mesh_of` go by it: random
numbers are drawn on the CPU, which gives the same ones everywhere, and moved.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
on_every_device = pytest.mark.parametrize("device", DEVICES)


def here(x):
    """A tensor or a module on the default device."""
    return x.to(torch.get_default_device())


def mesh_of(*shape, names=("cp",)):
    """A mesh of this process's group, on the default device."""
    return init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)

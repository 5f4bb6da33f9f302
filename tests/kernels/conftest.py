"""CUDA, woken before the first test that needs it."""

import pytest


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

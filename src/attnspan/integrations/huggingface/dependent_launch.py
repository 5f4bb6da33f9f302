"""Programmatic dependent launch: a kernel is launched while the one before it still runs, and waits on the device.

Between two kernels of a stream a GPU is idle for a microsecond or two, and before a kernel has its first numbers for
another. A step of few tokens is some hundred kernels of five microseconds. So each of our kernels announces at its
start that the next one may be launched, and each that was launched so waits before it reads or writes anything::

    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
        ...  # at most prefetches into the second-level cache
        tl.extra.cuda.gdc_wait()

[Note: order of launches] `gdc_wait` returns when the kernel before has ended and all it wrote can be seen. That kernel
has waited for the one before it, and so on: after the wait everything before has ended, whether it was launched in this
way or not. Kernels of torch neither announce nor wait; one after ours starts when ours has ended, and one of ours after
it is launched when its last programs end. Before the wait a kernel may only prefetch. All multiprocessors share that
cache, and what is written later is written there, so that a prefetch never makes a number old.

It needs compute capability 9.0, and is kept by captured graphs. Triton's interpreter knows none of it.
"""

from __future__ import annotations

from functools import cache

import torch


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """How a kernel with a constant `pdl` is launched."""
    return {"pdl": True, "launch_pdl": True} if _is_supported(device) else {"pdl": False}


@cache
def _is_supported(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)

"""Virtual ranks for tests, notebooks and a single GPU: the code that runs on many processes, in one.

>>> def both(world):
...     total = torch.tensor([world.rank + 1.0])
...     world.all_reduce(total).wait()
...     return total.item()
>>> loopback(ranks=2).run(both)
[3.0, 3.0]
"""

import torch

from attnspan.transports.loopback import Loopback, World

__all__ = ["Loopback", "World", "loopback"]


def loopback(ranks: int = 4, device: torch.device | str = "cpu", *, timeout: float = 60.0) -> Loopback:
    """A group of virtual ranks on one device; ``.run(fn)`` calls ``fn(world)`` on each and returns the results.

    A world stands where a process group or a DeviceMesh does. Ranks are threads: what that means for random numbers,
    autocast and the like is told in the docstring of `attnspan.transports.loopback`.

    >>> loopback(ranks=3).run(lambda world: world.rank)
    [0, 1, 2]
    """
    return Loopback(ranks, device, timeout)

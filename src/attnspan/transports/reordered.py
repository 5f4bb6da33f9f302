"""A process group whose ranks are counted in another order: that of a mesh.

torch numbers the members of a group by their global ranks, whatever order they were named in. A mesh may have another
one, such as [[0, 2], [1, 3]], where neighbours in a row are the GPUs that are close to each other. Here rank r is the
r-th member of the mesh, row by row, as `DeviceMesh.get_local_rank` counts. Messages go to the same processes under
their other numbers; collectives are made of messages, because a backend's own go by its own numbers.

In errors, peers have the group's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from attnspan.transports.distributed import Distributed
from attnspan.transports.transport import Messages, Pending, Transport


class Reordered(Distributed):
    """This process's end of a process group; `order[r]` is the group's number for rank r."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | None,
        order: tuple[int, ...],
        registered: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(group, device, registered)
        self.order, self.rank = order, order.index(self.rank)
        self._identity += order

    def _on_hosts(self, hosts: dist.ProcessGroup) -> Reordered:
        return Reordered(hosts, torch.device("cpu"), self.order, self.group)

    def _post(self, sends: Messages, receives: Messages, what: str) -> Pending:
        return super()._post(self._renamed(sends), self._renamed(receives), what)

    def _renamed(self, messages: Messages) -> Messages:
        return [(self.order[peer], tensor) for peer, tensor in messages]

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], what: str = "tensors") -> Pending:
        """As any transport's."""
        return Transport.gather(self, tensor, outputs, what)

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, what: str = "tensors") -> Pending:
        """As any transport's."""
        return Transport.reduce_scatter(self, inputs, output, what)

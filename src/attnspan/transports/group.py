"""Which transport serves a group, whatever the caller calls a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import TransportError
from attnspan.transports.distributed import Distributed
from attnspan.transports.transport import Transport

Group = DeviceMesh | dist.ProcessGroup | Transport | None


def transport_of(group: Group) -> Transport:
    """The transport of a one-dimensional DeviceMesh, a process group, a virtual world, or None: the default group."""
    if isinstance(group, Transport):
        return group
    if isinstance(group, DeviceMesh):
        return _of_mesh(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TransportError("group: this process is not a member; only members take part")
    if not dist.is_initialized():
        raise TransportError(
            f"group must be a DeviceMesh, a process group or a virtual world, got {group!r} and torch.distributed is "
            "not initialised; call init_process_group() or init_device_mesh(), or use attnspan.testing.loopback()"
        )
    if group is None:
        return Distributed(dist.group.WORLD)  # type: ignore[arg-type]  # initialised, so there is one
    if isinstance(group, dist.ProcessGroup):
        return Distributed(group)
    raise TransportError(
        f"group must be a DeviceMesh, a process group or a virtual world, got {group!r} ({type(group).__name__})"
    )


def _of_mesh(mesh: DeviceMesh) -> Transport:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        hint = f"take one axis, as in mesh[{names[0]!r}]" if names else "name its axes and take one"
        raise TransportError(
            f"group must be a DeviceMesh of one axis, got {mesh.ndim} axes of {tuple(mesh.shape)}; {hint}"
        )
    if mesh.get_coordinate() is None:
        raise TransportError("group: this process is not a member; only members take part")
    cpu = torch.device("cpu") if mesh.device_type == "cpu" else None
    return Distributed(mesh.get_group(), cpu)

"""Which transport serves a group, whatever the caller calls a group.

[Note: flat meshes] Two axes of a larger mesh need a group of their own. The mesh makes it together with those of its
other places: every process of the mesh must take part, so all of them make the session. A mesh whose axes have no names
cannot do that. There the members alone make their group, which works as long as they have made the same groups before.
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import TransportError
from attnspan.transports.distributed import Distributed
from attnspan.transports.loopback import Post, World
from attnspan.transports.reordered import Reordered
from attnspan.transports.transport import Transport

Group = DeviceMesh | dist.ProcessGroup | Transport | torch.device | None


def transport_of(group: Group) -> Transport:
    """The transport of a DeviceMesh, a process group, a virtual world, or None: the default group.

    A device stands for this process alone, the one rank of a group that needs no torch.distributed.
    A DeviceMesh of two axes, as for Ulysses and something between its groups, is all of its ranks, row by row.
    Ranks are counted in the order of the mesh, whatever their global numbers are.
    """
    if isinstance(group, Transport):
        return group
    if isinstance(group, DeviceMesh):
        return _of_mesh(group)
    if isinstance(group, torch.device):
        return _of_one_process(torch.empty(0, device=group).device)  # "cuda" becomes the current one, "cuda:0"
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # a number, where a group is meant
    if group is outside:
        raise TransportError("group: this process is not a member; only members take part")
    if not dist.is_initialized():
        raise TransportError(
            f"group must be a DeviceMesh, a process group or a virtual world, got {group!r} and torch.distributed is "
            "not initialised; call init_process_group() or init_device_mesh(), give a torch.device for this process "
            "alone, or use attnspan.testing.loopback()"
        )
    found = dist.group.WORLD if group is None else group
    if isinstance(found, dist.ProcessGroup):
        return Distributed(found)
    raise TransportError(
        f"group must be a DeviceMesh, a process group or a virtual world, got {group!r} ({type(group).__name__})"
    )


@cache
def _of_one_process(device: torch.device) -> Transport:
    return World(Post(1, 60.0), 0, device)


def _of_mesh(mesh: DeviceMesh) -> Transport:
    if mesh.ndim > 2:
        names = mesh.mesh_dim_names
        hint = f"take one axis or two, as in mesh[{names[0]!r}]" if names else "name its axes and take one or two"
        raise TransportError(
            f"group must be a DeviceMesh of one axis or two, got {mesh.ndim} axes of {tuple(mesh.shape)}; {hint}"
        )
    if mesh.get_coordinate() is None:
        raise TransportError("group: this process is not a member; only members take part")
    cpu = torch.device("cpu") if mesh.device_type == "cpu" else None
    group = mesh.get_group() if mesh.ndim == 1 else _flat(mesh)
    members = dist.get_process_group_ranks(group)
    order = tuple(members.index(rank) for rank in mesh.mesh.flatten().tolist())
    return Distributed(group, cpu) if order == tuple(range(len(order))) else Reordered(group, cpu, order)


def _flat(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of a mesh of two axes as one group."""
    ranks = mesh.mesh.flatten().tolist()
    if sorted(ranks) == list(range(dist.get_world_size())):
        assert dist.group.WORLD is not None, "initialised, so there is one"
        return dist.group.WORLD
    if mesh not in _FLAT:
        _FLAT[mesh] = _group_of_axes(mesh, ranks)
    return _FLAT[mesh]


def _group_of_axes(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup:
    """See [Note: flat meshes]."""
    if not mesh.mesh_dim_names:
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    else:
        group = mesh._flatten("_".join(["attnspan", *mesh.mesh_dim_names])).get_group()
    return group


_FLAT: WeakKeyDictionary[DeviceMesh, dist.ProcessGroup] = WeakKeyDictionary()  # a group is made once per mesh

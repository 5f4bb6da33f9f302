"""The ranks of an engine: all of them share the requests, and some of them share pages.

Without tensor parallelism every rank has the whole model, and pages are spread over all ranks. A tensor parallel model
is computed by the ranks along the axis "tp" of the mesh: each has some of the heads, and the pages of their keys. Pages
are spread over the other axes of the mesh, along which ranks have the same heads::

    mesh of ("tp", "cp")      rank 0: heads 0-3, even pages     rank 1: heads 0-3, odd pages
    2 x 2, of 8 heads         rank 2: heads 4-7, even pages     rank 3: heads 4-7, odd pages

All ranks schedule the same batches, since they have the same requests and the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnspan.engine.model import ModelInfo
from attnspan.errors import EngineError
from attnspan.transports.group import Group

AXIS = "tp"
"""The axis of a mesh over which a model is tensor parallel."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineRanks:
    """`mesh` are all ranks, None for one; `pages` those that pages are spread over; `shard` is the number of the part
    of a tensor parallel model that this rank has."""

    mesh: Group
    pages: Group
    shard: int | None = None


def engine_ranks(mesh: Group, info: ModelInfo) -> EngineRanks:
    """The ranks of a mesh for a model; EngineError if the model is tensor parallel over other ranks than its axis "tp".

    A mesh without this axis, or with one of a single rank, is for a model that is whole on every rank.
    """
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    rest = tuple(name for name in names if name != AXIS)
    if not info.tp_ranks:
        if rest == names:
            return EngineRanks(mesh, mesh)
        assert isinstance(mesh, DeviceMesh), "it has names"
        if mesh[AXIS].size() > 1:
            raise EngineError(
                f"mesh has an axis {AXIS!r}, and the model is whole on this rank; load it with load_tensor_parallel, "
                "or give a mesh without that axis"
            )
        return EngineRanks(mesh, mesh[rest] if rest else info.device)
    if AXIS not in names:
        raise EngineError(
            f"the model is tensor parallel over ranks {list(info.tp_ranks)}; give mesh= a DeviceMesh whose axis "
            f"{AXIS!r} has these ranks, got {mesh!r}"
        )
    assert isinstance(mesh, DeviceMesh), "it has names"
    along = tuple(dist.get_process_group_ranks(mesh.get_group(AXIS)))
    if along != info.tp_ranks:
        raise EngineError(
            f"the model is tensor parallel over ranks {list(info.tp_ranks)}, and axis {AXIS!r} of mesh has ranks "
            f"{list(along)}; give the mesh that the model was loaded with"
        )
    return EngineRanks(mesh, mesh[rest] if rest else info.device, mesh.get_local_rank(AXIS))

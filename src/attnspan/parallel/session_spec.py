"""What defines a session: its ranks, its sequence, its masks, and its layout.

The parts of a session (session.py) that run attention and intercept calls are built from its spec; `attach` and
`shard_batch` take the session itself. A spec is frozen: another batch has another spec. Specs are compared by identity,
so that a spec identifies the session whose attention a checkpointed region used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from attnspan.attention import Attention
from attnspan.attention.api import check_mesh
from attnspan.errors import AttentionError, integer, one_of
from attnspan.layouts import Balanced, Layout
from attnspan.layouts.balanced import fitting_chunk
from attnspan.masks import Mask
from attnspan.parallel.sharding import Sharding
from attnspan.plan import Plan, Strategy
from attnspan.plan.choose import KeepKeys
from attnspan.transports import Transport
from attnspan.transports.group import Group, transport_of

Masks = Mask | Mapping[str, Mask]


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a session, as given; `with_mask` passes them on."""

    layout: Layout | str = "auto"
    strategy: Strategy | str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    weights: Mapping[str, float] | None = None
    keep_keys: KeepKeys = "auto"


@dataclass(frozen=True, eq=False)
class SessionSpec:
    """A sequence of `seq_len` tokens on the ranks of `transport`, laid out for `masks` (by name)."""

    mesh: Group
    transport: Transport
    seq_len: int
    masks: Mapping[str, Mask]
    options: SessionOptions
    layout: Layout
    sharding: Sharding

    @staticmethod
    def of(
        mesh: Group, seq_len: int, mask: Masks, options: SessionOptions, transport: Transport | None = None
    ) -> SessionSpec:
        """The spec of a session on `mesh`, a DeviceMesh, a process group or a virtual world; or on its `transport`."""
        if transport is None:
            _check_axes(mesh)
            transport = transport_of(mesh)
        masks = named_masks(mask)
        seq_len = integer("seq_len", seq_len, at_least=1, error=AttentionError)
        layout = _layout_of(options, masks, seq_len, transport.ranks)
        return SessionSpec(
            mesh, transport, seq_len, masks, options, layout, Sharding(layout, seq_len, transport, masks)
        )

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def ranks(self) -> int:
        return self.transport.ranks

    def mask_name(self, mask: str | None) -> str:
        """The name of a mask, checked; None stands for the only one."""
        if mask is None and len(self.masks) == 1:
            return next(iter(self.masks))
        if mask is None:
            raise AttentionError(f"mask must name one of the session's masks, {' or '.join(map(repr, self.masks))}")
        return one_of("mask", mask, self.masks, error=AttentionError)

    def check_scale(self, scale: float | None) -> None:
        """Refuse a call of SDPA or flex_attention without a scale where the session has one."""
        if scale is None and self.options.scale is not None:
            raise AttentionError(
                f"scale must be given: the session was made with scale={self.options.scale}, and a call without means "
                "1 / sqrt(head dim); give it in the call, or make the session without"
            )

    def bind_attention(self, mask: Mask, keys: SessionSpec | None = None) -> Attention:
        """Attention of this sequence under a mask, over its own keys or those of another."""
        strategy, auto = self.options.strategy, self.options.strategy == "auto"
        mesh = self.mesh if isinstance(self.mesh, DeviceMesh) and self.mesh.ndim == 2 else None
        if auto:
            # A mesh of two axes says itself how many ranks exchange heads; otherwise tensors decide, when they come.
            strategy, auto = (f"ulysses({mesh.shape[1]}) x needed", False) if mesh else ("needed", True)
        lengths = (None, None) if keys is None else (keys.seq_len, keys.layout)
        plan = Plan(mask, self.layout, self.seq_len, strategy, *lengths)
        options = {name: getattr(self.options, name) for name in ("kernel", "scale", "keep_keys")}
        check_mesh(plan, self.mesh)
        return Attention(plan, self.transport, auto=auto, **options)


def named_masks(mask: Masks) -> dict[str, Mask]:
    """Masks by name; a single one has none."""
    masks = {"": mask} if isinstance(mask, Mask) else dict(mask) if isinstance(mask, Mapping) else {}
    if not masks or not all(isinstance(name, str) and isinstance(each, Mask) for name, each in masks.items()):
        raise AttentionError(f"mask must be a mask such as Causal(), or a dict of them by name, got {mask!r}")
    return masks


def _layout_of(options: SessionOptions, masks: Mapping[str, Mask], seq_len: int, ranks: int) -> Layout:
    layout, weights = options.layout, options.weights
    if isinstance(layout, Layout):
        if layout.ranks != ranks:
            raise AttentionError(f"layout must have the group's {ranks} ranks, got {layout!r}")
        return layout
    if layout != "auto":
        raise AttentionError(f"layout must be 'auto' or a layout such as HeadTail(ranks={ranks}), got {layout!r}")
    weighing = None if weights is None else [_weight(weights, name) for name in masks]
    return Balanced(list(masks.values()), ranks=ranks, weights=weighing, chunk=fitting_chunk(seq_len, ranks))


def _weight(weights: Mapping[str, float], name: str) -> float:
    if name not in weights:
        raise AttentionError(f"weights must have one for each mask, got none for {name!r}")
    return weights[name]


def _check_axes(mesh: Group) -> None:
    """Refuse a mesh whose axes are not for the sequence: data parallel ranks do not hold parts of one sequence."""
    names = (isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names) or ()
    others = [name for name in names if name.split("_")[0] in OTHER_AXES]
    if others:
        good = [name for name in names if name not in others]
        hint = f"mesh[{good[0]!r}]" if good else "an axis for the sequence, such as mesh['cp']"
        raise AttentionError(f"mesh: axis {others[0]!r} does not split the sequence; pass {hint}")


OTHER_AXES = {
    *("dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard"),
    *("tp", "pp", "ep", "tensor", "pipeline", "expert"),
}
"""Names, or first words of names, that mesh axes for other things have."""

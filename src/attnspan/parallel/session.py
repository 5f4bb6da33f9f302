"""ContextParallel: one sequence, its masks and its layout, on a group of ranks. What a training script touches.

>>> import torch
>>> import attnspan as span
>>> def rank(world):
...     cp = span.ContextParallel(world, seq_len=8, mask=span.Causal() & span.Documents([3, 5]))
...     tokens = cp.shard(torch.arange(8).view(1, 8), dim=1)
...     labels = cp.shift(tokens, by=-1, fill=-100, documents=True)
...     return cp.positions.tolist(), labels.tolist()
>>> for positions, labels in span.testing.loopback(ranks=2).run(rank):
...     print(positions, labels)
[0, 1, 2, 7] [[1, 2, -100, -100]]
[3, 4, 5, 6] [[4, 5, 6, 7]]

A session holds no state that matters but what it is made of: another batch is another session (`with_mask`), several
live at once, and nothing is patched. It counts what it is used for, as a witness (report.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from attnspan.attention import Attention
from attnspan.errors import AttentionError, ShardError, one_of, whole
from attnspan.layouts import Balanced, Layout
from attnspan.layouts.balanced import fitting_chunk
from attnspan.masks import Full, Mask
from attnspan.parallel import loss
from attnspan.parallel.documents import documents_of
from attnspan.parallel.sharding import Moves, Sharding, shifted
from attnspan.plan import Plan, Strategy
from attnspan.transports.group import Group, transport_of

MOST_KEPT = 64
"""How many sessions `with_mask` remembers."""

Masks = Mask | Mapping[str, Mask]


@dataclass(frozen=True, slots=True)
class Options:
    """How a session works, as asked for; another session of the family is made with the same."""

    layout: Layout | str = "auto"
    strategy: Strategy | str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    weights: Mapping[str, float] | None = None


class ContextParallel:
    """A sequence of `seq_len` tokens on the ranks of `mesh`, attended to under `mask`.

    `mesh` is a DeviceMesh of one axis (or of two: the second exchanges heads), a process group, or a virtual world.
    `mask` is one mask, or a dict of them by name for models whose layers differ; `layout` is then balanced over all,
    by `weights` (how many layers have each). `strategy` and `kernel` are chosen by the shapes of the tensors if "auto".
    """

    def __init__(
        self,
        mesh: Group = None,
        *,
        seq_len: int,
        mask: Masks,
        layout: Layout | str = "auto",
        strategy: Strategy | str = "auto",
        kernel: str = "auto",
        scale: float | None = None,
        weights: Mapping[str, float] | None = None,
    ):
        _check_axes(mesh)
        self.mesh, self.transport = mesh, transport_of(mesh)
        self.seq_len = whole("seq_len", seq_len, at_least=1, error=AttentionError)
        self.masks = _named(mask)
        self.options = Options(layout, strategy, kernel, scale, weights)
        self.layout = self._laid_out(layout, weights)
        self.sharding = Sharding(self.layout, self.seq_len, self.transport)
        self._family: OrderedDict[object, ContextParallel] = OrderedDict()
        self._moves: dict[tuple[int, object], Moves] = {}
        self._attends = {name: self._attend(each) for name, each in self.masks.items()}

    def _laid_out(self, layout: Layout | str, weights: Mapping[str, float] | None) -> Layout:
        ranks, masks = self.transport.ranks, list(self.masks.values())
        if isinstance(layout, Layout):
            if layout.ranks != ranks:
                raise AttentionError(f"layout must have the group's {ranks} ranks, got {layout!r}")
            return layout
        if layout != "auto":
            raise AttentionError(f"layout must be 'auto' or a layout such as HeadTail(ranks={ranks}), got {layout!r}")
        weighing = None if weights is None else [_weight(weights, name) for name in self.masks]
        return Balanced(masks, ranks=ranks, weights=weighing, chunk=fitting_chunk(self.seq_len, ranks))

    def _attend(self, mask: Mask, keys: ContextParallel | None = None) -> Attention:
        strategy, auto = self.options.strategy, self.options.strategy == "auto"
        mesh = self.mesh if isinstance(self.mesh, DeviceMesh) and self.mesh.ndim == 2 else None
        if auto:
            # A mesh of two axes says itself how many ranks exchange heads; otherwise tensors decide, when they come.
            strategy, auto = (f"ulysses({mesh.shape[1]}) x needed", False) if mesh else ("needed", True)
        lengths = (None, None) if keys is None else (keys.seq_len, keys.layout)
        plan = Plan(mask, self.layout, self.seq_len, strategy, *lengths)
        return Attention(plan, mesh or self.transport, kernel=self.options.kernel, scale=self.options.scale, auto=auto)

    # ---- other sequences -----------------------------------------------------------------------------------------

    def with_mask(self, mask: Masks, *, seq_len: int | None = None) -> ContextParallel:
        """The same on another sequence: the next batch, with other documents. Remembered, so that asking is cheap."""
        length = self.seq_len if seq_len is None else seq_len
        key = (tuple(_named(mask).items()), length)
        family = self._family
        if key not in family:
            options = {name: getattr(self.options, name) for name in Options.__slots__}
            family[key] = ContextParallel(self.mesh, seq_len=length, mask=mask, **options)
            family[key]._family = family
            if len(family) > MOST_KEPT:
                family.popitem(last=False)
        family.move_to_end(key)
        return family[key]

    def cross(self, keys: ContextParallel, mask: Mask | None = None) -> Attention:
        """Attention of this session's queries over the keys of another: `cross(q, k, v)` with a shard of each."""
        if keys.transport != self.transport:
            raise AttentionError("cross-attention needs queries and keys on the same ranks, got two groups")
        return self._attend(Full() if mask is None else mask, keys)

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def ranks(self) -> int:
        """How many ranks the sequence is spread over."""
        return self.transport.ranks

    @property
    def plan(self) -> Plan:
        """The plan of the first mask; with strategy "auto", the one last used, or before that one with "needed"."""
        return self.plan_of(next(iter(self.masks)))

    def plan_of(self, mask: str) -> Plan:
        """The plan of a mask, by its name."""
        return self._attends[self._name(mask)].call.latest

    @property
    def positions(self) -> Tensor:
        """The global positions of this rank's tokens, on the group's device: (S,), or (B, S) if rows lie differently.

        Rotary embeddings, and everything else that asks where a token is, need these.
        """
        return self.sharding.positions().to(self.transport.device)

    # ---- attention -----------------------------------------------------------------------------------------------

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: str | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the keys of all ranks; (B, H, S, D) each.

        `mask` names one of the session's masks, if it has several.
        """
        attend = self._attends[self._name(mask)]
        if sinks is not None:
            sinks = loss.shared(sinks, self.ranks)
        out, lse = attend.with_lse(query, key, value, sinks=sinks)
        return (out, lse) if return_lse else out

    def _name(self, mask: str | None) -> str:
        if mask is None and len(self.masks) == 1:
            return next(iter(self.masks))
        if mask is None:
            raise AttentionError(f"mask must name one of the session's masks, {' or '.join(map(repr, self.masks))}")
        return one_of("mask", mask, self.masks, error=AttentionError)

    # ---- tensors along the sequence ------------------------------------------------------------------------------

    def shard(self, tensor: Any, dim: int = 1, *, batch_dim: int = 0) -> Any:
        """This rank's tokens of a whole tensor, or of each in dicts and lists. Differentiable, out of place."""
        return _each(lambda x: self.sharding.shard(x, dim, batch_dim), tensor)

    def unshard(self, tensor: Any, dim: int = 1, *, batch_dim: int = 0) -> Any:
        """The whole tensor on every rank, from everybody's shard. Differentiable: see [Note: gradients]."""
        return _each(lambda x: self.sharding.unshard(x, dim, batch_dim), tensor)

    def shard_from(self, tensor: Any, dim: int = 1, *, batch_dim: int = 0, source: int = 0) -> Any:
        """This rank's tokens of a tensor that only rank `source` has; the others give None."""
        source = whole("source", source, error=ShardError)
        if source >= self.ranks:
            raise ShardError(f"source must be one of the {self.ranks} ranks, got {source}")
        return self.sharding.shard_from(tensor, dim, batch_dim, source)

    def shift(
        self,
        tensor: Tensor,
        by: int = -1,
        fill: float = 0,
        *,
        dim: int = 1,
        batch_dim: int = 0,
        documents: bool = False,
    ) -> Tensor:
        """A shard whose position p holds what was at p - by, as torch.roll counts; `fill` where nothing comes from.

        With `documents`, nothing comes from another document of the mask. Labels for the next token are
        ``cp.shift(tokens, by=-1, fill=-100, documents=True)``.
        """
        if not isinstance(by, int) or isinstance(by, bool):
            raise ShardError(f"by must be a whole number of tokens, got {by!r}")
        names = documents_of(self.masks.values(), self.seq_len) if documents else None
        key = (by, documents)
        if key not in self._moves:
            self._moves[key] = shifted(self.sharding, by, names)
        return self.sharding.shift(tensor, dim, batch_dim, self._moves[key], fill)

    # ---- losses and metrics --------------------------------------------------------------------------------------

    def mean_loss(self, per_token: Tensor, valid: Tensor | None = None, *, over: Group = None) -> Tensor:
        """The mean over the valid tokens of all ranks, with the gradient that averaging makes right.

        `over` is the group that gradients are averaged over, if larger than this one: data-parallel ranks too.
        """
        return loss.mean_loss(per_token, valid, self._over(over))

    def mean(self, values: Tensor, valid: Tensor | None = None, *, over: Group = None) -> Tensor:
        """The mean of a metric over all ranks, without a gradient; NaN where no rank has a valid value."""
        return loss.mean(values, valid, self._over(over))

    def sum(self, values: Tensor, valid: Tensor | None = None, *, over: Group = None) -> Tensor:
        """The sum of a metric over all ranks, without a gradient."""
        return loss.total(values, valid, self._over(over))

    def average_gradients(self, model: nn.Module | Iterable[nn.Parameter], *, over: Group = None) -> None:
        """Average gradients over ranks, where neither DDP nor FSDP2 does."""
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        loss.average_gradients(parameters, self._over(over))

    def _over(self, group: Group) -> Any:
        return self.transport if group is None else transport_of(group)

    def __repr__(self) -> str:
        masks = ", ".join(f"{name}: {mask!r}" if name else repr(mask) for name, mask in self.masks.items())
        return f"ContextParallel(rank {self.rank} of {self.ranks}, {self.seq_len} tokens, {masks}, {self.layout!r})"


def _named(mask: Masks) -> dict[str, Mask]:
    """Masks by name; a single one has none."""
    masks = {"": mask} if isinstance(mask, Mask) else dict(mask) if isinstance(mask, Mapping) else {}
    if not masks or not all(isinstance(name, str) and isinstance(each, Mask) for name, each in masks.items()):
        raise AttentionError(f"mask must be a mask such as Causal(), or a dict of them by name, got {mask!r}")
    return masks


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


OTHER_AXES = {"dp", "ddp", "fsdp", "hsdp", "data", "tp", "pp", "ep", "tensor", "pipeline", "expert", "batch"}
"""Names, or first words of names, that mesh axes for other things have."""


def _each(do: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Dicts, lists and tuples of tensors, each done."""
    if isinstance(tree, Mapping):
        return {key: _each(do, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_each(do, value) for value in tree)
    return do(tree)

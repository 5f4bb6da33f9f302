"""ContextParallel: a sequence, its masks and its layout on a group of ranks; the entry point of a training script.

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

A session is defined by its spec (session_spec.py), which is frozen: another batch is another session (`with_mask`), and
several can be alive. Nothing of torch is changed, except the code of flex_attention while `flex()` or an attachment
with ``flex=True`` is open (flex_dispatch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions

from attnspan.attention.inputs import Inputs
from attnspan.attention.latent import Expand, as_keys
from attnspan.attention.score import ScoreFunction
from attnspan.errors import AttentionError, ShardError, integer
from attnspan.layouts import Layout, Run
from attnspan.masks import Full, Mask
from attnspan.masks.borders import documents_of
from attnspan.parallel import loss
from attnspan.parallel.attach import Attachment, attach
from attnspan.parallel.attached_modules import ModulePatterns
from attnspan.parallel.attentions import Attentions, SessionAttention
from attnspan.parallel.batch import Batch, shard_batch
from attnspan.parallel.call_args import FlexArgs, FlexResult
from attnspan.parallel.eager import skip_frames
from attnspan.parallel.family import Family
from attnspan.parallel.flex import flex_attention
from attnspan.parallel.handler import SessionHandler
from attnspan.parallel.moves import Moves, shifted
from attnspan.parallel.profile import Profile
from attnspan.parallel.recurrences import Convolution, Recurrences
from attnspan.parallel.report import Report, check_used
from attnspan.parallel.run_attention import run_attention
from attnspan.parallel.sdpa import AttentionMode
from attnspan.parallel.session_spec import Masks, SessionOptions, SessionSpec, named_masks
from attnspan.plan import Plan, Strategy
from attnspan.plan.choose import KeepKeys
from attnspan.recurrence import Rule
from attnspan.transports import Transport
from attnspan.transports.group import Group, transport_of

T = TypeVar("T")


class ContextParallel:
    """A sequence of `seq_len` tokens on the ranks of `mesh`, attended to under `mask`.

    `mesh` is a DeviceMesh of one axis (or of two: the second exchanges heads), a process group, a virtual world, or a
    torch.device: this process alone.
    `mask` is one mask, or a dict of them by name for models whose layers differ; `layout` is then balanced over all,
    by `weights` (how many layers have each). `strategy` and `kernel` are chosen by the shapes of the tensors if "auto".
    With `keep_keys` received keys are kept until backward, which then only moves gradients; "auto" keeps them if they
    take no more memory than what autograd saves of a call.
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
        keep_keys: KeepKeys = "auto",
    ):
        options = SessionOptions(layout, strategy, kernel, scale, weights, keep_keys)
        self._begin(SessionSpec.of(mesh, seq_len, mask, options))

    def _begin(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.mesh, self.transport, self.seq_len, self.masks = spec.mesh, spec.transport, spec.seq_len, spec.masks
        self.options, self.layout, self.sharding = spec.options, spec.layout, spec.sharding
        self.attentions = Attentions(spec)
        self.layers: int | Mapping[str, int] | None = None  # the number of attention layers, if a caller has set it
        self.family = Family(_key(spec.masks, spec.seq_len, spec.options.layout), self)
        self._moves: dict[tuple[int, bool], Moves] = {}
        self._recurrences = Recurrences(spec)
        self._handlers: dict[str | None, SessionHandler] = {None: SessionHandler(self.attentions, None)}

    # ---- other sequences -----------------------------------------------------------------------------------------

    def with_mask(self, mask: Masks, *, seq_len: int | None = None, layout: Layout | None = None) -> ContextParallel:
        """A session for another sequence, such as the next batch with other documents; cached.

        A shard of one session is no shard of another with a different layout, and an "auto" layout depends on the mask;
        `layout` fixes one, for the new session and for those made from it. May be called in another thread while this
        session is in use: [Note: plans ahead] in family.py.
        """
        length = self.seq_len if seq_len is None else seq_len
        options = self.options if layout is None else replace(self.options, layout=layout)
        made = partial(self._sibling, mask, length, options)
        return self.family.session(_key(named_masks(mask), length, options.layout), made)

    def _sibling(self, mask: Masks, seq_len: int, options: SessionOptions) -> ContextParallel:
        """A session of this family on the same transport, since another thread has another current device."""
        other = ContextParallel.__new__(ContextParallel)
        other._begin(SessionSpec.of(self.mesh, seq_len, mask, options, self.transport))
        other.family = self.family
        return other

    def cross(self, keys: ContextParallel, mask: Mask | None = None, *, scale: float | None = None) -> SessionAttention:
        """Attention of this session's queries over the keys of another: `cross(q, k, v)` with a shard of each."""
        if keys.transport != self.transport:
            raise AttentionError("cross-attention needs queries and keys on the same ranks, got two groups")
        attend = self.spec.bind_attention(Full() if mask is None else mask, keys.spec)
        return SessionAttention(self.spec, attend if scale is None else attend.variant(scale=scale))

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number in the group; in a mesh of two axes, counted row by row."""
        return self.transport.rank

    @property
    def ranks(self) -> int:
        """How many ranks the sequence is spread over."""
        return self.transport.ranks

    @property
    def mask(self) -> Mask:
        """The mask, if there is only one."""
        return self.masks[self.spec.mask_name(None)]

    @property
    def plan(self) -> Plan:
        """The plan of the first mask; with strategy "auto", the one that last ran, or "needed" before any call."""
        return self.plan_of(next(iter(self.masks)))

    def plan_of(self, mask: str) -> Plan:
        """The plan of a mask, by its name."""
        return self.attentions.named[self.spec.mask_name(mask)].bound.latest

    @property
    def positions(self) -> Tensor:
        """The global positions of this rank's tokens, on the group's device: (S,), or (B, S) if batch rows differ.

        Rotary embeddings and other position embeddings need these. A copy, which may be modified.
        """
        own = self.sharding.own
        return own[0].clone() if self.layout.rows == 1 else own.clone()

    # ---- attention -----------------------------------------------------------------------------------------------

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        expand: Expand | None = None,
        mask: str | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the keys of all ranks; (B, H, S, D) each.

        With `expand`, a latent (B, S, R) stands for key and value, `attention(query, latent, expand=f)`: it travels,
        and ``key, value = f(latent)`` are made of it where it arrives, for any number of tokens, each by itself. The
        function's weights get gradients of the tokens that this rank attended over, to be averaged like others.
        `mask` names one of the session's masks, if it has several. With `return_lse`, on all ranks or on none, also the
        log-sum-exp of every row, (B, H, S), which may be in the loss of any of them. `dropout_p` drops probabilities as
        SDPA does, the same ones for any number of ranks; their seed is drawn from torch's generator, which must be
        seeded alike on all ranks, or given.
        """
        attend = self.attentions.named[self.spec.mask_name(mask)]
        if not torch.compiler.is_compiling():  # finds only shards passed directly: computed tensors have no mark
            for tensor in (query, key, value):
                if tensor is not None:
                    self.sharding.check_mark(tensor)
        key, value = as_keys(key, value, expand)
        inputs = Inputs(query, key, value, sinks, return_lse=return_lse, dropout_p=dropout_p, dropout_seed=dropout_seed)
        out, lse = run_attention(self.spec, attend, inputs, expand)
        return (out, lse) if return_lse else out

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreFunction | None = None,
        block_mask: BlockMask | Mask | SessionAttention | str | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: FlexKernelOptions | None = None,
        *,
        return_aux: AuxRequest | None = None,
    ) -> FlexResult:
        """torch's flex_attention on shards: this rank's queries over the keys of all ranks (flex.py).

        `block_mask` is the BlockMask of the whole sequence, a mask, the name of one of the session's, or a result of
        `attention_for`. None attends to everything, as in torch, and is refused unless the session's mask does too.
        score_mod and mask_mod see global positions; tensors that a score_mod captures get gradients, which are averaged
        over ranks like those of other parameters.
        """
        rest = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)
        return flex_attention(self.attentions, FlexArgs(query, key, value, *rest))

    def attention_for(
        self,
        mask: str | Mask | BlockMask | None = None,
        *,
        scale: float | None = None,
        score_mod: ScoreFunction | None = None,
    ) -> SessionAttention:
        """Attention under a mask, a scale and a score_mod, made once and called with shards: `attend(q, k, v)`.

        `mask` is a mask, the BlockMask of the whole sequence, or the name of one of the session's; None stands for the
        session's only one. Make it outside of torch.compile and use it inside, also as the `block_mask` of
        flex_attention; another one does not recompile.
        """
        return self.attentions.attention_for(mask, scale, score_mod)

    def sdpa(self, *, mask: str | None = None) -> AttentionMode:
        """A context manager: inside, F.scaled_dot_product_attention is this session's attention, in this thread
        (sdpa.py).

        flex_attention is refused, see `flex`. `mask` names one of the session's masks, if it has several. Activation
        checkpointing needs `attach`.
        """
        return AttentionMode(self._handler(self.spec.mask_name(mask)))

    def flex(self, *, mask: str | None = None) -> AttentionMode:
        """A context manager: inside, torch's flex_attention is `flex_attention` of this session, in this thread.

        SDPA is this session's too; `mask` names one of its masks for it, if it has several.
        """
        unnamed = mask is None and len(self.masks) > 1
        return AttentionMode(self._handlers[None] if unnamed else self._handler(self.spec.mask_name(mask)), flex=True)

    def attach(
        self, model: nn.Module, modules: ModulePatterns | None = None, *, mask: str | None = None, flex: bool = False
    ) -> Attachment:
        """Run the forward of a model's modules inside `sdpa`, also when checkpointing recomputes them (attach.py).

        `modules` are modules, or patterns for their names such as "layers.*.attention"; by default all. A dict maps
        patterns to names of masks, and `mask` is then for the rest. Modules that call flex_attention need `flex=True`.
        The result has a `detach`, and is a context manager.
        """
        return attach(self, model, modules, mask, flex)

    def _handler(self, name: str) -> SessionHandler:
        """The handler of scopes under a mask; made once, in eager code."""
        if name not in self._handlers:
            if torch.compiler.is_compiling():
                raise AttentionError("under torch.compile, call cp.sdpa() once outside before it is used inside")
            self._handlers[name] = SessionHandler(self.attentions, name)
        return self._handlers[name]

    # ---- what it was used for ------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Calls, bytes, work and times of this session on this rank since it was made, or last reset."""
        return replace(self.attentions.report(), recurrences=dict(self._recurrences.uses))

    def explain(self, mask: str | None = None) -> str:
        """Explain the choice of strategy, in words.

        Shows the predicted time of every strategy for the tensors that attention last ran on, why the others lost, and
        measured rates, links and passes of this session. `mask` names one of several masks. Recurrent layers that ran
        count in the times, in proportion to calls of attention.
        """
        calls = self.report().calls
        return self.attentions.explain(self.spec.mask_name(mask), self._recurrences.layers(calls) if calls else [])

    def profile(self) -> Profile:
        """A context manager that records every attention on this session's ranks, step by step, with predictions.

        Prints as a table for each kind of pass, forward and backward: compute, transfers and waiting of every step on
        this rank; `trace(FILE)` writes the same for a trace viewer (profile.py). Includes sessions with other masks on
        these ranks, but no recurrent layers.
        """
        return Profile(self.transport, self.attentions.hardware)

    def reset(self) -> None:
        """Start counting again."""
        self.attentions.reset()
        self._recurrences.reset()

    def assert_used(self, layers: int | Mapping[str, int] | None = None, *, passes: int = 1) -> None:
        """Raise unless attention ran once in each of `layers`, in each of `passes` forward passes since the last reset.

        With several masks, `layers` may be a dict of such counts by name. Models that were enabled set it themselves.
        """
        known = self.layers if layers is None else layers
        if known is None:
            raise AttentionError("layers must be given: how many attention layers the model has")
        check_used(self.report(), known, passes)

    # ---- tensors along the sequence ------------------------------------------------------------------------------

    def shard(self, tensor: object, dim: int = 1, *, batch_dim: int = 0) -> Any:
        """This rank's tokens of a whole tensor, or of each in dicts and lists. Differentiable, out of place.

        A BlockMask or mask becomes the BlockMask of this rank's queries, in their order, against all keys in the order
        of the sequence (`unshard` gathers those): for calls of flex_attention outside of this session.
        """
        return _each(lambda x: self._shard(x, dim, batch_dim), tensor)

    def _shard(self, given: Tensor | BlockMask | Mask, dim: int, batch_dim: int) -> object:
        if isinstance(given, BlockMask | Mask):
            return self.attentions.shard(given)
        return self.sharding.shard(given, dim, batch_dim)

    def shard_batch(
        self,
        batch: Mapping[str, object],
        *,
        shift_labels: bool = False,
        padding: Literal["refuse", "mask"] = "refuse",
        dims: Mapping[str, int | None] | None = None,
    ) -> Batch:
        """This rank's part of a whole batch, a dict such as a data loader returns; batch.py has the rules.

        Adds `position_ids`, the global positions, if there are none. With `shift_labels` also `shift_labels`: the label
        of the next token, -100 at the ends of documents. An `attention_mask` that pads on the right must be in the
        session's mask; with ``padding="mask"`` it is added to it, and the result's `session` is the one to use. `dims`
        gives the sequence dim of entries whose name and shape do not determine it; None if they have none.
        """
        return shard_batch(self, batch, shift_labels=shift_labels, padding=padding, dims=dims or {})

    def unshard(self, tensor: T, dim: int = 1, *, batch_dim: int = 0) -> T:
        """The whole tensor on every rank, from all shards. Differentiable: see [Note: gradients] in sharding.py."""
        whole: T = _each(lambda x: self.sharding.unshard(x, dim, batch_dim), tensor)
        return whole

    def shard_from(
        self, tensor: Mapping[str, Tensor] | Tensor | None, dim: int = 1, *, batch_dim: int = 0, source: int = 0
    ) -> Any:
        """This rank's tokens of a tensor, or of a dict of them, that only rank `source` has; the others give None.

        For data: no gradient flows.
        """
        source = integer("source", source, error=ShardError)
        if source >= self.ranks:
            raise ShardError(f"source must be one of the {self.ranks} ranks, got {source}")
        return self.sharding.shard_from(tensor, dim, batch_dim, source)

    def shift(
        self,
        tensor: Tensor,
        by: int = -1,
        fill: complex = 0,
        *,
        dim: int = 1,
        batch_dim: int = 0,
        documents: bool = False,
    ) -> Tensor:
        """Shift a shard along the sequence: position p gets what was at p - by, as in torch.roll, or `fill`.

        With `documents`, no token crosses to another document of the mask. Labels for the next token are
        ``cp.shift(tokens, by=-1, fill=-100, documents=True)``.
        """
        if not isinstance(by, int) or isinstance(by, bool):
            raise ShardError(f"by must be a whole number of tokens, got {by!r}")
        return self.sharding.shift(tensor, dim, batch_dim, self._shifted(by, bool(documents)), fill)

    def _shifted(self, by: int, within: bool) -> Moves:
        if (by, within) not in self._moves:
            names = documents_of(self.masks.values(), self.seq_len) if within else None
            self._moves[by, within] = shifted(self.layout, self.seq_len, self.rank, by, names)
        return self._moves[by, within]

    # ---- recurrent layers and convolutions -----------------------------------------------------------------------

    @property
    def stretches(self) -> list[list[Run]]:
        """For each batch row that lies differently, this rank's stretches in the order of its shard.

        A stretch is a run of consecutive positions of one document, over which a recurrent layer runs at once.
        """
        return self._recurrences.stretches

    def recurrence(
        self,
        rule: Rule,
        *,
        initial_state: Tensor | None = None,
        return_final_state: bool = False,
        kernel: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A recurrent layer over the whole sequence, for this rank's tokens: `cp.recurrence(GatedDelta(q, k, v, ...))`.

        The state is reset at every document of the mask. `initial_state` has one state per document, numbered through
        the batch rows, the same on every rank; so do the final states of `return_final_state`. Each rank that needs a
        state of this one gets one message, forward and backward (recurrence/plan.py). `kernel` is "chunked", "fla" or
        "auto" (recurrence/kernels.py); a named kernel that does not support the rule raises its reason.
        """
        out, final = self._recurrences.run(rule, initial_state, return_final_state, kernel)
        return out if final is None else (out, final)

    def conv1d(
        self,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dim: int = 1,
        activation: str | None = None,
    ) -> Tensor:
        """A short causal convolution along the sequence, a filter for each channel, within documents.

        `tensor` is (B, S, channels), or (B, channels, S) with ``dim=2``; `weight` is (channels, width), or that of a
        depthwise nn.Conv1d. Its last column is multiplied with the token itself. `activation` is "silu" or None.
        """
        return self._recurrences.conv1d(tensor, Convolution(weight, bias, dim, activation))

    def halo(self, tensor: Tensor, left: int, *, dim: int = 1, batch_dim: int = 0) -> Tensor:
        """The `left` tokens before each of `stretches`, one after another in `dim`; zero where a document begins.

        Differentiable; only what crosses between ranks travels. Batch rows with fewer stretches than others have zeros
        at the end.
        """
        return self._recurrences.halo(tensor, left, dim, batch_dim)

    # ---- losses and metrics --------------------------------------------------------------------------------------

    def mean_loss(
        self,
        per_token: Tensor,
        valid: Tensor | None = None,
        *,
        count: Tensor | float | None = None,
        over: Group = None,
    ) -> Tensor:
        """The mean over the valid tokens of all ranks; averaging its gradients over ranks gives those of one device.

        `over` is the group that gradients are averaged over, if it is larger and includes data-parallel ranks. `count`
        is the number of tokens to divide by, if not that of this batch: with gradient accumulation, the valid tokens of
        all micro-batches and ranks, as `cp.sum` counts them. With `over` it must be a result of `cp.sum(..., over=)`
        with the same group. Waits for the device, so that an error of one rank is raised on all.
        """
        return loss.mean_loss(per_token, valid, self._over(over), count, self.transport)

    def mean(self, values: Tensor, valid: Tensor | None = None, *, over: Group = None) -> Tensor:
        """The mean of a metric over all ranks, without a gradient; NaN where no rank has a valid value.

        `over` is a larger group to average over, as in `mean_loss`.
        """
        return loss.mean(values, valid, self._over(over))

    def sum(self, values: Tensor, valid: Tensor | None = None, *, over: Group = None) -> Tensor:
        """The sum of a metric over all ranks, without a gradient; an integer for integers and bools.

        `over` is a larger group to sum over, as in `mean_loss`.
        """
        return loss.total(values, valid, self._over(over))

    def average_gradients(self, model: nn.Module | Iterable[nn.Parameter], *, over: Group = None) -> None:
        """Average gradients over ranks; for models without DDP or FSDP2."""
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        loss.average_gradients(parameters, self._over(over))

    def _over(self, group: Group) -> Transport:
        """The ranks to average over, which must include the session's."""
        if group is None:
            return self.transport
        over = transport_of(group)
        if not over.contains(self.transport):
            raise ShardError(
                f"over must hold all ranks of the session's group and perhaps more, such as the mesh of (dp, cp) "
                f"flattened, got {over!r} for {self.transport!r}"
            )
        return over

    def __deepcopy__(self, memo: object) -> ContextParallel:
        return self  # a copy of a model that holds one is on the same ranks

    def __repr__(self) -> str:
        masks = ", ".join(f"{name}: {mask!r}" if name else repr(mask) for name, mask in self.masks.items())
        return f"ContextParallel(rank {self.rank} of {self.ranks}, {self.seq_len} tokens, {masks}, {self.layout!r})"


skip_frames(ContextParallel.flex_attention.__code__)


def _key(masks: Mapping[str, Mask], seq_len: int, layout: Layout | str) -> object:
    """The key of a session in the cache of `with_mask`."""
    return tuple(masks.items()), seq_len, layout


def _each(do: Callable[[Any], object], tree: object) -> Any:
    """Apply a function to every tensor in dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        return {key: _each(do, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named one takes its items apart
        return type(tree)(*(_each(do, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_each(do, value) for value in tree)
    return do(tree)

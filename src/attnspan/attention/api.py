"""What users call: attention over ranks, as a function or as an object that is made once and called often.

>>> import torch
>>> from attnspan.layouts import HeadTail
>>> from attnspan.masks import Causal
>>> from attnspan.testing import loopback
>>> layout = HeadTail(ranks=2)
>>> def rank(world):
...     query, key, value = torch.ones(3, 1, 2, 4, 8).unbind()  # 4 of 8 tokens: this rank's shard
...     return attention(query, key, value, mask=Causal(), layout=layout, group=world, seq_len=8)
>>> [tuple(out.shape) for out in loopback(ranks=2).run(rank)]
[(1, 2, 4, 8), (1, 2, 4, 8)]

[Note: seeds] What dropout drops follows from a seed (kernels/dropout.py). Each call draws one from torch's default
generator on the CPU, so that torch.manual_seed repeats a run, and activation checkpointing, which restores the
generator, recomputes the call. `dropout_seed` gives it instead. Ranks must have the same one, and are refused otherwise
([Note: one seed] in agreement.py): seed torch alike on all ranks of a group. Groups that hold other batches, as
data-parallel ranks do, are seeded differently, as with torch's own dropout: batch rows are counted from 0 in each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.attention import ops
from attnspan.attention.agreement import check_mask, refuse
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.handles import handle_of
from attnspan.attention.inputs import Inputs
from attnspan.attention.latent import Expand, Expander, as_keys
from attnspan.attention.score import Captured, Score, ScoreFunction
from attnspan.attention.transforms import check_untransformed
from attnspan.errors import AttentionError
from attnspan.layouts import Layout
from attnspan.masks import Mask
from attnspan.plan import Plan
from attnspan.plan.choose import KeepKeys
from attnspan.plan.strategy import Strategy
from attnspan.transports import Transport
from attnspan.transports.group import Group, transport_of


class CallOptions(TypedDict, total=False):
    """The options of `AttentionCallable.__call__`, for type checkers."""

    expand: Expand | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    captured: Sequence[Tensor] | None


class AttentionCallable:
    """Attention that is called with this rank's shards."""

    captured: Captured

    def run(self, inputs: Inputs, expand: Expand | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse) of the inputs."""
        raise NotImplementedError

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        expand: Expand | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        captured: Sequence[Tensor] | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output for this rank's queries (B, H, S, Dv). See [Note: seeds] for dropout.

        With `return_lse`, on all ranks or on none, also the log-sum-exp of every row (B, H, S), differentiable too.
        `captured` are tensors in place of those that the score_mod captured.
        """
        captured = self.captured.for_query(query) if captured is None else captured
        keys = as_keys(key, value, expand)
        out, lse = self.run(Inputs(query, *keys, sinks, captured, return_lse, dropout_p, dropout_seed), expand)
        return (out, lse) if return_lse else out


class Attention(AttentionCallable):
    """A plan on a group of ranks, callable with this rank's shards.

    Make it outside of torch.compile and call it inside: another plan for the same shapes does not recompile.
    With `auto`, the strategy is not the plan's but the one that suits the shapes of the tensors it is called with.

    A `score_mod` is FlexAttention's, of global positions; it is traced here, once. Tensors that it captures are found
    then: change their values in place. Those that require gradients get them, whole on every rank.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group = None,
        *,
        kernel: str = "auto",
        scale: float | None = None,
        score_mod: ScoreFunction | Score | None = None,
        keep_keys: KeepKeys = "auto",
        auto: bool = False,
    ):
        check_mesh(plan, group)
        transport = transport_of(group)
        score = score_of(score_mod, transport)
        self.bound = BoundPlan(plan, transport, kernel, scale, score, auto, keep_keys, watched=plan.mask)
        self.captured = Captured([], []) if score is None else score.captured
        self.handle = handle_of(self.bound)

    @property
    def plan(self) -> Plan:
        """What it does."""
        return self.bound.plan

    def variant(self, **changes: Any) -> Attention:
        """A copy whose `BoundPlan` has other fields; the two share their counts, unless `uses` is among them."""
        other = copy(self)
        other.bound = replace(self.bound, **changes)
        other.handle = handle_of(other.bound)
        return other

    def run(self, inputs: Inputs, expand: Expand | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse) of the inputs; lse has a gradient if it is returned to the model. With `expand`, key and value
        are a latent (`as_keys`)."""
        check_untransformed("attention", *inputs[:4], *inputs.captured)
        return self._run(_under_autocast(inputs)) if expand is None else self._run_latent(inputs, expand)

    @torch._disable_dynamo
    def _run_latent(self, inputs: Inputs, expand: Expand) -> tuple[Tensor, Tensor]:
        query, latent = _as_autocast(inputs.query), _as_autocast(inputs.key)
        key = latent.unsqueeze(1)
        inputs = inputs._replace(query=query, key=key, value=key[..., :0])
        try:
            expander = Expander.of(expand, latent, self.bound.transport)
        except AttentionError as wrong:
            self._refuse(inputs, wrong)
        return self._run(inputs._replace(expander=expander))

    def _run(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        query, key, value, sinks, captured, return_lse, dropout_p, dropout_seed, expander = inputs
        try:
            check_dropout(dropout_p, dropout_seed)
        except AttentionError as wrong:
            self._refuse(inputs, wrong)
        seed = seed_tensor(dropout_seed) if dropout_p else None
        if expander is not None:
            captured = [*captured, *expander.weights]
        tensors = (query, key, value, *captured) if sinks is None else (query, key, value, sinks, *captured)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        more = (return_lse, differentiable, float(dropout_p), seed, None if expander is None else handle_of(expander))
        out, lse, _ = ops.attention(query, key, value, sinks, captured, self.handle, *more)
        return out, lse

    def _refuse(self, inputs: Inputs, wrong: AttentionError) -> NoReturn:
        """Raise what is wrong together with the other ranks; compiled code does not ask them."""
        if torch.compiler.is_compiling():
            raise wrong
        inputs = inputs._replace(dropout_p=math.nan)  # on which ranks never agreed
        refuse(self.bound.for_inputs(inputs), inputs, wrong)
        raise wrong

    @torch._disable_dynamo
    def check_mask(self, mask: Mask, inputs: Inputs) -> None:
        """Refuse tensors, together with the other ranks, if a mask has changed since it was made."""
        inputs = _under_autocast(inputs)
        check_mask(mask, self.bound.for_inputs(inputs), inputs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    expand: Expand | None = None,
    mask: Mask | None = None,
    layout: Layout | None = None,
    seq_len: int | None = None,
    kv_layout: Layout | None = None,
    kv_len: int | None = None,
    strategy: Strategy | str = "auto",
    plan: Plan | None = None,
    group: Group = None,
    kernel: str = "auto",
    scale: float | None = None,
    score_mod: ScoreFunction | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    keep_keys: KeepKeys = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks, exactly as if on one device.

    query (B, H, S, D), key (B, Hk, Sk, D) and value (B, Hk, Sk, Dv) are this rank's shards in the order of `layout`.
    With `expand`, a latent (B, Sk, R) stands for key and value: it travels, and `expand(latent)` makes both of it where
    it arrives (latent.py).
    Give `mask`, `layout` and `seq_len` (and `kv_layout`, `kv_len` for cross-attention), or a ready `plan`. `group` is
    a DeviceMesh, a process group, a virtual world, or None for the default group. `sinks` (H,) is a learned logit per
    head; `score_mod` is FlexAttention's, of global positions, traced at every call (an `Attention` traces it once).
    `dropout_p` drops probabilities as SDPA does, the same ones for any number of ranks; the seed is drawn from torch's
    generator, or given ([Note: seeds]).
    With `keep_keys` the keys that arrive stay until backward, which then moves gradients alone; "auto" keeps them where
    they take no more memory than what autograd saves of the call (see attention/kept.py).
    """
    if torch.compiler.is_compiling():
        raise AttentionError("under torch.compile, make an Attention(plan, group) outside and call it inside")
    given = plan is not None
    if plan is None:
        if mask is None or layout is None or seq_len is None:
            raise AttentionError("give mask, layout and seq_len, or a plan")
        plan = Plan(mask, layout, seq_len, "needed" if strategy == "auto" else strategy, kv_len, kv_layout)
    elif strategy != "auto" or any(part is not None for part in (mask, layout, seq_len, kv_layout, kv_len)):
        raise AttentionError("give a plan, or what one is made of, not both")
    check_mesh(plan, group)
    transport = transport_of(group)
    score = score_of(score_mod, transport)
    auto = strategy == "auto" and not given
    options = {"kernel": kernel, "scale": scale, "score_mod": score, "keep_keys": keep_keys, "auto": auto}
    attend = _memo(transport)(plan, **options)
    captured = [] if score is None else score.captured.for_query(query)
    inputs = Inputs(query, *as_keys(key, value, expand), sinks, captured, return_lse, dropout_p, dropout_seed)
    attend.check_mask(plan.mask, inputs)
    out, lse = attend.run(inputs, expand)
    return (out, lse) if return_lse else out


def _memo(transport: Transport) -> Callable[..., Attention]:
    """Attention on a group, made once for each plan: ranks agree on it once, and a group's ranks forget alike."""
    memo = transport.memo
    if Attention in memo:
        known: Callable[..., Attention] = memo[Attention]
        return known

    @functools.lru_cache(maxsize=256)
    def made(plan: Plan, **options: Any) -> Attention:
        return Attention(plan, transport, **options).variant(watched=None)  # the mask may be an equal one of somebody

    first: Callable[..., Attention] = memo.setdefault(Attention, made)
    return first


def score_of(score_mod: ScoreFunction | Score | None, transport: Transport) -> Score | None:
    """A score_mod, traced for a group's tensors."""
    return score_mod if score_mod is None or isinstance(score_mod, Score) else Score(score_mod, transport.device)


def _under_autocast(inputs: Inputs) -> Inputs:
    query, key, value = (_as_autocast(x) for x in inputs[:3])
    return inputs._replace(query=query, key=key, value=value)


def _as_autocast(tensor: Tensor) -> Tensor:
    """What SDPA does under autocast: compute in its dtype, except float64."""
    device = tensor.device.type
    # Not torch.amp.is_autocast_available(device): torch 2.11 cannot compile it.
    on = device != "meta" and torch.is_autocast_enabled(device)
    if on and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def check_dropout(dropout_p: object, dropout_seed: object = None) -> None:
    """Refuse what is no probability below 1, and what is no seed."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, float | int) or not 0 <= dropout_p < 1:
        raise AttentionError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}")
    if dropout_seed is None:
        return
    if isinstance(dropout_seed, bool) or not isinstance(dropout_seed, int) or not 0 <= dropout_seed <= MAX_SEED:
        raise AttentionError(f"dropout_seed must be an integer in [0, 2**63), got {dropout_seed!r}")


MAX_SEED = (1 << 63) - 1


def seed_tensor(given: int | None) -> Tensor:
    """The seed of a call, as the op takes it: drawn unless it is given. See [Note: seeds]."""
    if given is None:
        return torch.randint(MAX_SEED, (), dtype=torch.int64, device="cpu")
    return torch.full((), given, dtype=torch.int64, device="cpu")  # compiled, as_tensor has other large numbers


def check_mesh(plan: Plan, group: Group) -> None:
    """The columns of a mesh of two axes are the plan's Ulysses groups."""
    if isinstance(group, DeviceMesh) and group.ndim == 2 and group.shape[1] != plan.degree:
        raise AttentionError(
            f"group: the second axis of a mesh exchanges heads, and the plan does so in groups of {plan.degree}, "
            f"got a mesh of {tuple(group.shape)}; use strategy='ulysses({group.shape[1]}) x ...'"
        )

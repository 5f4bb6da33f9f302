"""The custom ops: one node in the autograd graph, opaque to torch.compile, recomputable by checkpointing.

`attnspan::attention` takes tensors, flags and a number (see [Note: handles] in handles.py), so everything that backward
needs is in its node: queries, keys, values, sinks, captured tensors, out, lse, the handle, the share of dropout, and
the header: the number by which ranks match their backward passes (transports/operations.py), and dropout's seed. No
context manager has to be alive when activation checkpointing recomputes it, and a selective policy can save
`torch.ops.attnspan.attention.default` so that its collectives do not run again.

[Note: saved seeds] Backward takes the seed from the header, a result of forward, and not from forward's arguments. A
selective policy that saves the op computes its arguments again, and would draw another seed unless the generator is
restored (`preserve_rng_state=False`); out and seed are then still those of one call.

[Note: layouts] torch.compile is told the strides of results before anything runs. They are contiguous always, in
memory of their own, whatever the layout of queries or of a kernel's output.

[Note: sinks] A sink is a learned logit per head that takes part in every row's softmax and has no value. It is folded
in once, after everything is merged: lse' = log(e^lse + e^sink), out' = out * e^(lse - lse'). Backward with the folded
out and lse is then right as it stands, and the sink's own gradient is -sum of its probability times sum(grad * out),
over rows and over ranks. A row that saw no key keeps out 0; its lse becomes the sink. A sink of -inf is none at all.

[Note: gradients of lse over ranks] Under Ulysses heads are exchanged in backward too, and with them the gradient of
lse. A rank whose own loss leaves lse out has none; the others expect it all the same. So what is exchanged follows from
`return_lse`, which ranks agree on, and a gradient that did not come is zero.

[Note: captured tensors] Tensors that a score_mod captured (a learned bias) are inputs too, whole on every rank. A
rank's pairs give a part of their gradients; every rank gets the sum, as of a sink. Weights that expand a latent are
inputs too, and come after them: those keep the part ([Note: weights] in latent.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnspan.attention import execute
from attnspan.attention.agreement import agree
from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.handles import object_of
from attnspan.attention.inputs import Inputs
from attnspan.attention.kept import FROM_KEPT, KeptKeys, keep, kept_by
from attnspan.attention.latent import Expander
from attnspan.attention.pass_timer import PassTimer
from attnspan.attention.recording import recorded
from attnspan.attention.transforms import check_no_tangents, check_untransformed
from attnspan.dtypes import lse_dtype
from attnspan.errors import AttentionError, KernelError
from attnspan.kernels import MergedOutputs
from attnspan.kernels.merge import share_of, with_sinks
from attnspan.transports.abort import abort_on_error
from attnspan.transports.operations import enter_operation

EXPANSION_GONE = "handle is a copy whose original is gone; keep the expansion that it belongs to"


def _with_expander(inputs: Inputs, expander_handle: Tensor | None) -> Inputs:
    """The inputs of an op; weights that expand a latent are then no longer among captured tensors."""
    if expander_handle is None:
        return inputs
    expander = object_of(expander_handle, EXPANSION_GONE)
    assert isinstance(expander, Expander), "handles are of expansions"
    captured = inputs.captured[: len(inputs.captured) - len(expander.weights)]
    return inputs._replace(captured=captured, expander=expander)


@torch.library.custom_op("attnspan::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    captured: Sequence[Tensor],
    plan_handle: Tensor,
    return_lse: bool,
    differentiable: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
    expander_handle: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_no_tangents("attention", query, key, value, sinks, *captured)  # see transforms.py
    seed = None if dropout_seed is None else int(dropout_seed)
    inputs = Inputs(query, key, value, sinks, captured, return_lse, dropout_p, seed)
    inputs = _with_expander(inputs, expander_handle)
    bound = BoundPlan.of(plan_handle).for_inputs(inputs)
    if bound.check_before_forward is not None:
        bound.check_before_forward()
    with abort_on_error(bound.transport, except_for=(AttentionError, KernelError)):
        agreed = agree(bound, inputs)
    kept, timer = KeptKeys() if differentiable and agreed.keeps_keys else None, PassTimer(query.device)
    with (
        abort_on_error(bound.transport),
        _without_autocast(query),
        enter_operation(bound.transport, agreed.name_of(inputs)) as operation,
    ):
        with recorded(bound.transport, "forward", (bound.plan, inputs.shape)):
            out, lse = execute.forward(bound, inputs, kept)
        if sinks is not None:  # see [Note: sinks]
            out, lse = with_sinks(out, lse, sinks[None, :, None])
    bound.uses.add_forward(bound.plan, inputs.shape, timer)
    header = torch.tensor([operation.header, seed or 0], device="cpu")  # see [Note: saved seeds]
    return out.contiguous(), lse.contiguous(), keep(header, kept)


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    captured: Sequence[Tensor],
    plan_handle: Tensor,
    return_lse: bool,
    differentiable: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
    expander_handle: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_no_tangents("attention", query, key, value, sinks, *captured)
    if expander_handle is not None:
        raise AttentionError("a latent is expanded by running it; give real tensors, outside of compiled graphs")
    devices = {x.device for x in (query, key, value, sinks) if x is not None}
    if len(devices) > 1:  # of real tensors too: torch calls this for any that are on the meta device
        raise AttentionError(f"query, key, value and sinks must be on one device, got {sorted(map(str, devices))}")
    batch, heads, rows, _ = query.shape
    out = query.new_empty(batch, heads, rows, value.shape[-1])
    lse = query.new_empty(batch, heads, rows, dtype=lse_dtype(query.dtype))
    return out, lse, torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("attnspan::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    header: Tensor,
    sinks: Tensor | None,
    captured: Sequence[Tensor],
    wanted: Sequence[int],
    plan_handle: Tensor,
    return_lse: bool,
    dropout_p: float,
    expander_handle: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    forward_pass, seed = header.tolist()  # see [Note: saved seeds]
    inputs = Inputs(query, key, value, sinks, captured, return_lse, dropout_p, seed)
    inputs = _with_expander(inputs, expander_handle)
    bound = BoundPlan.of(plan_handle).for_inputs(inputs)
    if grad_lse is None and return_lse and bound.plan.degree > 1:  # see [Note: gradients of lse over ranks]
        grad_lse = torch.zeros_like(lse)
    assert return_lse or grad_lse is None, "an lse that was not returned has no gradient"
    merged, kept = MergedOutputs(grad, grad_lse, out, lse, sinks is not None), kept_by(header)
    operation = enter_operation(bound.transport, forward_pass, FROM_KEPT if kept else "")
    timer = PassTimer(query.device)
    with abort_on_error(bound.transport), _without_autocast(query), operation:
        d_sinks = query.new_empty(0) if sinks is None else _sink_gradient(bound, merged, sinks)
        with recorded(bound.transport, "backward", (bound.plan, inputs.shape)):
            dq, dk, dv, parts, of_weights = execute.backward(bound, inputs, merged, wanted, kept)
        d_captured = [_over_ranks(bound, part, x) for part, x in zip(parts, inputs.captured, strict=True)]
        weights = captured[len(d_captured) :]
        d_captured += [part.to(x.dtype) for part, x in zip(of_weights, weights, strict=True)]
    bound.uses.add_backward(bound.plan, inputs.shape, kept is not None, timer)
    return dq, dk, dv, d_sinks, d_captured


@attention_backward.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    _out, _lse, _header, sinks, captured, wanted, *_ = rest
    d_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    d_captured = [x.new_empty(x.shape if i in wanted else 0) for i, x in enumerate(captured)]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), d_sinks, d_captured


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, sinks, captured, plan_handle, ctx.return_lse, _, ctx.dropout_p, _, expander_handle = inputs
    ctx.save_for_backward(query, key, value, sinks, plan_handle, expander_handle, *output, *captured)
    # A reference of its own, since hooks may save a copy of the handle.
    ctx.expander = None if expander_handle is None else object_of(expander_handle, EXPANSION_GONE)
    ctx.wanted = [i for i, x in enumerate(captured) if x.requires_grad]  # hooks may save copies that do not
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[object, ...]:
    query, key, value, sinks, plan_handle, expander_handle, out, lse, header, *captured = ctx.saved_tensors
    check_untransformed("attention's backward", grad, grad_lse, instead="take one gradient after another")
    grad = torch.zeros_like(out) if grad is None else grad
    wanted, more = ctx.wanted, (ctx.return_lse, ctx.dropout_p, expander_handle)
    dq, dk, dv, d_sinks, d_captured = attention_backward(
        grad, grad_lse, query, key, value, out, lse, header, sinks, captured, wanted, plan_handle, *more
    )
    d_captured = [x if i in wanted else None for i, x in enumerate(d_captured)]
    return dq, dk, dv, None if sinks is None else d_sinks, d_captured, *[None] * 6


def _refuse_second_derivatives(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise AttentionError("attention has no second derivatives; take gradients without create_graph=True")


attention.register_autograd(_backward, setup_context=_setup_context)
attention_backward.register_autograd(_refuse_second_derivatives)


def _without_autocast(query: Tensor) -> torch.autocast:
    """A block without autocast: inputs were cast before the op, and float32 sums must stay float32."""
    return torch.autocast(query.device.type, enabled=False)


def _sink_gradient(bound: BoundPlan, merged: MergedOutputs, sinks: Tensor) -> Tensor:
    lse = merged.lse
    weight = share_of(sinks.to(lse.dtype)[None, :, None].expand_as(lse), lse)
    slope = -(merged.grad.to(lse.dtype) * merged.out.to(lse.dtype)).sum(-1)
    if merged.grad_lse is not None:
        slope = slope + merged.grad_lse
    total = (weight * slope).sum(dim=(0, 2))
    bound.transport.all_reduce(total, "gradients of sinks").wait()
    return total.to(sinks.dtype)


def _over_ranks(bound: BoundPlan, part: Tensor | None, tensor: Tensor) -> Tensor:
    """The gradient of a captured tensor, which all ranks hold alike: the sum of their parts. See [Note: captured
    tensors]."""
    if part is None:
        return tensor.new_empty(0)
    part = part.contiguous()
    bound.transport.all_reduce(part, "gradients of captured tensors").wait()
    return part.to(tensor.dtype)

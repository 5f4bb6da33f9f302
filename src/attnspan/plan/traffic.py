"""What arrives at a rank in one call, in bytes; tests hold it against the wire.

::

    forward     keys and values that the plan moves, or latents; under Ulysses also heads, there and back
    backward    the same keys again, if they were not kept, and gradients of keys; under Ulysses heads, there and back

Gradients of keys travel in float32, or where kernels round them anyway in the tensors' dtype (`rounds`, see
[Note: gradients that travel] in attention/lane.py); those of heads as [Note: gradients of heads] in
attention/ulysses.py says. Not counted: gradients through lse, and sinks.
"""

from __future__ import annotations

from typing import NamedTuple

from attnspan.layouts.run import tokens_in
from attnspan.plan.cost import DTYPES, Shape
from attnspan.plan.heads import split_heads
from attnspan.plan.plan import Plan


class Bytes(NamedTuple):
    """What arrives at a rank, of one call."""

    forward: int
    backward: int


NOTHING = Bytes(0, 0)


def received_bytes(plan: Plan, shape: Shape, rank: int, *, kept: bool = False, rounds: bool = False) -> Bytes:
    """What arrives at a rank in one call: keys and their gradients, and what the exchange of heads brings, tokens of
    own heads and then own tokens of all heads. Backward needs no keys, and no heads of the inputs, that were kept."""
    narrow, wide = DTYPES[shape.dtype], max(4, DTYPES[shape.dtype])
    batch = shape.batch if plan.batch_rows == 1 else 1
    dim, value_dim = shape.head_dim, shape.v_head_dim
    shares = split_heads(shape.heads, shape.kv_heads, plan.degree)
    here, first = rank % plan.degree, rank - rank % plan.degree
    taken_q, taken_k = len(shares[here].query), len(shares[here].key)
    values = shape.kv_values(taken_k)
    of_keys = narrow * shape.widened_heads(plan.degree)
    forward = backward = 0
    for row in range(plan.batch_rows):
        for step in plan.steps(rank, row):
            keys = sum(transfer.tokens for transfer in step.receives) * values * narrow
            forward += keys
            backward += 0 if kept else keys
            returned = sum(transfer.tokens for transfer in step.grad_receives) * values
            backward += returned * (narrow if rounds else wide)
        own_q, own_k = _held(plan, rank, row)
        for member in range(plan.degree):
            if member == here:
                continue
            q, k = _held(plan, first + member, row)
            given_q, given_k = len(shares[member].query), len(shares[member].key)
            brought = (q * taken_q * dim + k * taken_k * (dim + value_dim)) * narrow  # q, k, v
            forward += brought + own_q * given_q * (value_dim * narrow + wide)  # and out and lse
            backward += (0 if kept else brought) + q * taken_q * (2 * value_dim * narrow + wide)  # out, grad, lse
            backward += own_q * given_q * dim * narrow + int(own_k * given_k * (dim + value_dim) * of_keys)  # gradients
    return Bytes(forward * batch, backward * batch)


def _held(plan: Plan, rank: int, row: int) -> tuple[int, int]:
    """How many queries and keys of a batch row lie on a rank."""
    sides = (plan.layout, plan.seq_len), (plan.key_layout, plan.key_len)
    queries, keys = (tokens_in(layout.runs(length, rank, row if layout.rows > 1 else 0)) for layout, length in sides)
    return queries, keys

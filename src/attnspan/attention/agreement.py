"""Agreement: before the first key travels, either all ranks proceed or all raise.

Ranks that run different plans, or tensors of different shapes, would wait for messages that never arrive or interpret
one message as another. So the first time that attention runs on tensors of some shapes, every rank checks its own
tensors, asks the kernel about every tile that it will compute, and sends the others a short description of what it
runs, or its error. If any rank has an error or a different description, all ranks raise and name that rank and the
difference. Later calls with the same shapes exchange only their name, in the headers of their messages
(transports/operations.py). If one rank alone later brings other shapes, it waits for an agreement while the others
compute; the headers then show all of them that they are out of step.

[Note: masks that change] Plans are cached by what their masks compute, so the mask of a plan may be an equal one that
another caller made. A bound plan watches the mask that its own user gave: once the functions in it compute something
else, the call is refused, and the error asks for a new mask.

[Note: captured content] Ranks that run the same program on different captured tensors would compute parts of different
attentions, so the agreement includes the content of captured tensors. A mask's never changes; a score_mod's is compared
once.

[Note: one seed] Dropout needs the same seed on every rank (api.py explains where it comes from). The agreement
compares the first one. Seeds of later calls are part of the operation's name, so message headers compare them without
another exchange.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attnspan.attention.bound_plan import BoundPlan
from attnspan.attention.inputs import Inputs
from attnspan.dtypes import dtype_name, lse_dtype
from attnspan.errors import AttentionError, AttnspanError, KernelError, MaskError, TuningError
from attnspan.kernels import choose_kernel
from attnspan.layouts.run import tokens_in
from attnspan.masks import Mask
from attnspan.masks.content import content
from attnspan.plan.drawing import in_bytes
from attnspan.transports import consensus

OTHERS_SHARD = "attend by the session that sharded it (an attached model is told by attached.use(session))"

SHARED = "a plan that all ranks share"

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Agreement(NamedTuple):
    """What ranks have agreed on for tensors of some shapes: a name for what they do, and whether they keep keys."""

    name: str
    keeps_keys: bool

    def name_of(self, inputs: Inputs) -> str:
        """What ranks do with some inputs. See [Note: one seed]."""
        seed = "" if inputs.dropout is None else f" with dropout_seed={inputs.dropout.seed}, the same on every rank"
        return self.name + seed


def agree(bound: BoundPlan, inputs: Inputs) -> Agreement:
    """What all ranks have agreed to do with such tensors; raises on every rank if one cannot, or differs."""
    if bound.watched is not None:
        check_mask(bound.watched, bound, inputs)
    signature = _signature(bound, inputs)
    if signature in bound.agreed:
        return bound.agreed[signature]
    wrong = local_error(bound, inputs)
    words = {**_description(bound, inputs), VOTE: str(_keeps(bound, inputs))} if wrong is None else wrong
    said = consensus.all_gather_outcomes(bound.transport, words, SHARED)
    votes = {each.pop(VOTE) for each in said if isinstance(each, dict)}
    _raise_if_different(said)
    plan = bound.plan
    name = f"attention over {repr(plan.mask)[:80]} by {plan.strategy!r} [{_hashed(said[0])}]"
    bound.agreed[signature] = Agreement(name, votes == {"True"})
    return bound.agreed[signature]


VOTE = "keep keys here"


def _keeps(bound: BoundPlan, inputs: Inputs) -> bool:
    """Whether this rank would keep keys. See [Note: when auto keeps] in kept.py."""
    shape = inputs.shape
    if bound.keep_keys != "auto" or shape is None:
        return bound.keep_keys is True
    return bound.plan.may_keep(bound.rank, shape)


def check_mask(mask: Mask, bound: BoundPlan, inputs: Inputs) -> None:
    """Refuse a mask that has changed. See [Note: masks that change]."""
    try:
        mask.check_fresh()
    except MaskError as changed:
        refuse(bound, inputs, AttentionError(f"mask: {changed}"))


def refuse(bound: BoundPlan, inputs: Inputs, wrong: AttentionError) -> None:
    """Raise an error of this rank; on all ranks if these tensors are new, so that the others wait for an agreement."""
    if _signature(bound, inputs) not in bound.agreed:
        _raise_if_different(consensus.all_gather_outcomes(bound.transport, wrong, SHARED))
    raise wrong


def _signature(bound: BoundPlan, inputs: Inputs) -> tuple[object, ...]:
    """What identifies an agreement: calls with the same signature need no further one."""
    tensors, expander = (*inputs[:4], *inputs.captured), inputs.expander
    shapes = (None if x is None else (x.shape, x.dtype, x.device) for x in tensors)
    return_lse = inputs.return_lse and bound.plan.degree > 1  # where its gradient travels
    deterministic = torch.are_deterministic_algorithms_enabled()  # which some kernels refuse
    return *shapes, expander and expander.makes, return_lse, inputs.dropout_p, deterministic


def local_error(bound: BoundPlan, inputs: Inputs) -> AttentionError | KernelError | None:
    """What is wrong on this rank, or None."""
    misfit = (
        _misfit(bound, inputs)
        or _wrong_length(bound, inputs)
        or _wrong_sinks(inputs)
        or _wrong_captured(bound, inputs)
        or _no_room(bound, inputs)
    )
    if misfit:
        return AttentionError(misfit)
    try:
        _check_kernels(bound, inputs)
    except KernelError as refused:
        return refused
    except TuningError as refused:  # this rank's own table, by which it would choose kernels
        return AttentionError(str(refused))
    return None


def _misfit(bound: BoundPlan, inputs: Inputs) -> str:
    """Why query, key and value do not fit one another, the group or the plan's batch rows; "" if they do."""
    query, latent = inputs.query, inputs.expander is not None
    names = ("query", "latent") if latent else ("query", "key", "value")
    for name, tensor in zip(names, inputs[:3], strict=False):
        if tensor.dim() != 4:
            return f"{name} must be (batch, heads, tokens, head dim), got shape {tuple(tensor.shape)}"
        if tensor.dtype != query.dtype or tensor.device != query.device:
            return f"{name} must be {query.dtype} on {query.device} like query, got {tensor.dtype} on {tensor.device}"
    key, value = inputs.key_value
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}{' as expanded' if latent else ''}"
    if query.dtype not in DTYPES:
        return f"query must be float32, bfloat16, float16 or float64, got {dtype_name(query.dtype)}"
    if query.device != bound.transport.device:
        return f"query must be on {bound.transport.device}, where the group's tensors are, got {query.device}"
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        return f"query, key and value must fit one another, got shapes {shapes}"
    if 0 in (*query.shape[:2], key.shape[1], query.shape[3], value.shape[3]):
        return f"query, key and value must have a batch, heads and a head dim, got shapes {shapes}"
    if query.shape[1] % key.shape[1]:
        return f"query heads must be a multiple of key heads, got {query.shape[1]} and {key.shape[1]}"
    if latent and bound.plan.degree > 1:
        return (
            f"strategy: {bound.plan.strategy_name} exchanges heads, and a latent has none; use 'ring', 'gather', "
            "'needed' or 'auto', on a mesh of one axis, or expand it before"
        )
    if bound.plan.mask.heads not in (1, query.shape[1]):
        return f"query must have the mask's {bound.plan.mask.heads} heads, got {query.shape[1]}"
    if bound.plan.batch_rows not in (1, query.shape[0]):
        return f"query must have the plan's {bound.plan.batch_rows} batch rows, got {query.shape[0]}"
    return ""


def _wrong_length(bound: BoundPlan, inputs: Inputs) -> str:
    plan, latent = bound.plan, inputs.expander is not None
    for name, tensor, layout, length in (
        ("query", inputs.query, plan.layout, plan.seq_len),
        ("latent" if latent else "key", inputs.key, plan.key_layout, plan.key_len),
    ):
        got = tensor.shape[2]
        for row in range(plan.batch_rows):
            expected = tokens_in(layout.runs(length, bound.rank, row))
            if got != expected:
                if tensor.shape[1] == expected and name != "latent":
                    return (
                        f"{name} must be (batch, heads, tokens, head dim), this rank's {expected} of {length} tokens "
                        f"in dim 2, got shape {tuple(tensor.shape)}; transpose(1, 2) it first"
                    )
                todo = "shard it first" if got == length else OTHERS_SHARD
                return f"{name} must hold this rank's {expected} of {length} tokens, got {got}; {todo}"
    return ""


def _wrong_sinks(inputs: Inputs) -> str:
    query, sinks = inputs.query, inputs.sinks
    if sinks is None:
        return ""
    if sinks.shape != query.shape[1:2]:
        return f"sinks must be one logit per query head, ({query.shape[1]},), got shape {tuple(sinks.shape)}"
    if not sinks.dtype.is_floating_point or sinks.device != query.device:
        return f"sinks must be floating point on {query.device}, got {dtype_name(sinks.dtype)} on {sinks.device}"
    return ""


def _wrong_captured(bound: BoundPlan, inputs: Inputs) -> str:
    """Which captured tensor differs from the one that the score_mod was traced with; "" if none does."""
    if bound.score is None:
        return ""
    try:
        program = bound.score.program(lse_dtype(inputs.query.dtype))
    except AttentionError as wrong:
        return str(wrong)
    for found, traced in zip(inputs.captured, program.captured, strict=True):
        if (found.shape, found.dtype) != (traced.shape, traced.dtype):
            return (
                f"{program.name} captured {dtype_name(traced.dtype)} of shape "
                f"{tuple(traced.shape)}, got {dtype_name(found.dtype)} of shape {tuple(found.shape)}"
            )
        if found.dim() and found.device != inputs.query.device:
            return f"tensors that a score_mod captures must be on {inputs.query.device}, got one on {found.device}"
    return ""


def _no_room(bound: BoundPlan, inputs: Inputs) -> str:
    """Why keys that are to be kept do not fit into the memory of the device; "" if they do."""
    shape = inputs.shape
    if bound.keep_keys is not True or shape is None:
        return ""
    kept, memory = bound.plan.kept_bytes(bound.rank, shape), device_memory(inputs.query.device)
    if kept <= memory:
        return ""
    return (
        f"keep_keys: the keys of a call take {in_bytes(kept)} until backward, and {inputs.query.device} has "
        f"{in_bytes(memory)}; use keep_keys='auto', or more ranks"
    )


def device_memory(device: torch.device) -> float:
    """The memory of a device in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _check_kernels(bound: BoundPlan, inputs: Inputs) -> None:
    """Raise what the kernel would at any tile of this rank."""
    spec, tensors = bound.spec(inputs), (inputs.query, *inputs.key_value)
    plan = bound.plan
    tiles = [tile for row in range(plan.batch_rows) for step in plan.steps(bound.rank, row) for tile in step.tiles]
    for tile in {(tile.kind, tile.needs_mask_mod, len(tile.rows), len(tile.cols)): tile for tile in tiles}.values():
        if reason := choose_kernel(bound.kernel, spec, *tensors, (tile,)).supports(spec, *tensors, (tile,)):
            raise KernelError(reason)


def _description(bound: BoundPlan, inputs: Inputs) -> dict[str, str]:
    """A description of what this rank runs, by name: equal on ranks that run the same plan on the same shapes."""
    query, plan = inputs.query, bound.plan
    mods, rows, (key, value) = bound.mods(query), range(plan.batch_rows), inputs.key_value
    return {
        "batch": str(query.shape[0]),
        "heads": str(query.shape[1]),
        "key heads": str(key.shape[1]),
        "head dim": str(query.shape[3]),
        "value dim": str(value.shape[3]),
        "latent": "none" if inputs.expander is None else str(inputs.key.shape[3]),
        "dtype": dtype_name(query.dtype),
        "sinks": "none" if inputs.sinks is None else "some",
        "return_lse": str(inputs.return_lse and plan.degree > 1),
        "dropout_p": str(float(inputs.dropout_p)),
        "dropout_seed": "none" if inputs.dropout is None else str(inputs.dropout.seed),
        "strategy": repr(plan.strategy),
        "kernel": bound.kernel,
        "keep_keys": str(bound.keep_keys),
        "scale": repr(bound.scale),
        "tokens": f"{plan.seq_len} x {plan.key_len}",
        "programs": _hashed("" if mods is None else mods.key),
        "captured tensors": _hashed("" if mods is None else mods.content, content(inputs.captured)),
        "mask": _hashed(*(plan.bands(row) for row in rows)),
        "layout": _hashed(*(plan.layout.shards(plan.seq_len, row) for row in rows)),
        "layout of keys": _hashed(*(plan.key_layout.shards(plan.key_len, row) for row in rows)),
    }


def _hashed(*parts: object) -> str:
    return HASHED + consensus.digest(*parts)


SEEDS = (
    "dropout needs the same seed on every rank: torch.manual_seed(n) with the same n, or dropout_seed=n; virtual ranks "
    "draw from one generator, and need dropout_seed"
)

HASHED = "#"
"""The prefix of words that are hashes, which error messages leave out."""


def _raise_if_different(said: Sequence[dict[str, str] | AttnspanError]) -> None:
    """Raise the same on every rank, if any refused or they do not say the same."""
    wrong = consensus.refusal(said, mixed=AttentionError)
    if wrong is not None:
        raise wrong
    groups: list[tuple[Any, list[int]]] = list(consensus.ranks_by_value(said))
    usual, *others = groups
    if others:
        seeds = {words["dropout_seed"] for words, _ in groups}
        raise AttentionError(
            "all ranks must run the same plan, kernel, scale, programs and shapes; "
            + "; ".join([*(_difference(group, usual) for group in others), *([SEEDS] if len(seeds) > 1 else [])])
        )


def _difference(group: tuple[Any, list[int]], usual: tuple[Any, list[int]]) -> str:
    (mine, ranks), (theirs, others) = group, usual
    differing = [
        name if mine[name].startswith(HASHED) else f"{name} ({mine[name]}, not {theirs[name]})"
        for name in mine
        if mine[name] != theirs[name]
    ]
    verb = "differs" if len(ranks) == 1 else "differ"
    return f"{consensus.ranks_text(ranks)} {verb} from {consensus.ranks_text(others)} in {', '.join(differing)}"

"""Finds the activation checkpointing regions on the stack, and whether they are being recomputed.

A checkpointed region runs twice, the second time in backward. The scope (``with cp.sdpa()`` or its like) or the batch's
session around its first run may be gone by then. Attention would silently run on this rank's tokens only, or under the
mask of another batch. torch does not announce a region, but the stack shows it::

    reentrant        CheckpointFunction.forward, then CheckpointFunction.backward, both with one `ctx`
    non-reentrant    `checkpoint`, which holds a generator with a `_CheckpointFrame`, then `unpack_hook` with the same
                     (torch 2.15: `_checkpoint_impl`)
    other people's   `forward` and `backward` of an autograd function, as the reentrant kind does it

The object that both runs share is the region's name.

[Note: recomputation] Two rules follow (checkpoint_checks.py, attach.py):

* attention may run in a region only if its scope begins inside the region: then the recomputation enters it too;
* the recomputation must use the session that the first run used.

This relies on undocumented names in torch. Before the first use they are tested on a checkpoint of one element of each
kind (`_sees`).

Not detected: third-party checkpointing by saved-tensor hooks. Knows nothing of attention.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from os.path import dirname
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import FunctionCtx

from attnspan.assumptions import Assumption

TORCH = dirname(torch.__file__)
CHECKPOINTS = torch.utils.checkpoint.__file__
DRIVERS = ("checkpoint", "_checkpoint_impl")
"""The functions that drive the generator of a non-reentrant region: until torch 2.13, and in 2.15."""


class CheckpointRegion(NamedTuple):
    """A checkpointed region on the stack: the object that identifies it, or None, and whether it is recomputed."""

    name: object | None
    recomputing: bool


def regions(grad_enabled: bool = True) -> list[CheckpointRegion]:
    """The regions around the caller, innermost first.

    `grad_enabled` is whether autograd records: a non-reentrant region is not recomputed otherwise.
    """
    REGIONS_SEEN.verify()
    return list(_regions(sys._getframe(1), grad_enabled))


def _regions(frame: FrameType | None, grad_enabled: bool) -> Iterator[CheckpointRegion]:
    while frame is not None:
        code = frame.f_code
        if code.co_filename == CHECKPOINTS:
            if code.co_name in DRIVERS and "gen" in frame.f_locals and grad_enabled:
                yield CheckpointRegion(_frame_of(frame.f_locals["gen"]), recomputing=False)
            elif code.co_name == "unpack_hook":
                yield CheckpointRegion(frame.f_locals.get("frame"), recomputing=True)
        if code.co_name in ("forward", "backward") and not _is_torchs(code.co_filename):
            context = _context(frame)
            if context is not None and (code.co_name == "backward" or any(context.needs_input_grad)):
                yield CheckpointRegion(context, recomputing=code.co_name == "backward")
        frame = frame.f_back


def rerun_through(region: object, run: Callable[..., object]) -> bool:
    """Have a region recomputed by `run(function, *args)`, with its function; False if its kind is unknown."""
    name = _rerun_attribute(region)
    if name is not None:
        setattr(region, name, functools.partial(run, getattr(region, name)))
    return name is not None


def _rerun_attribute(region: object) -> str | None:
    """The attribute in which a region keeps the function that it recomputes."""
    return next((name for name in ("recompute_fn", "run_function") if callable(getattr(region, name, None))), None)


def _frame_of(generator: GeneratorType[object, object, object]) -> object | None:
    inside = generator.gi_frame
    return None if inside is None else inside.f_locals.get("new_frame")


def _is_torchs(file: str) -> bool:
    """Whether a file is torch's: its autograd functions, for compiled code and custom ops, do not recompute."""
    return file.startswith(TORCH) and file != CHECKPOINTS


def _context(frame: FrameType) -> Any:
    """The first argument, if the frame is that of an autograd function."""
    names = frame.f_code.co_varnames[:1]
    if not names or names[0] == "self":  # the forward of a module: not worth a look at its variables
        return None
    first = frame.f_locals.get(names[0])
    return first if isinstance(first, FunctionCtx) else None


# ---- where attention was made context parallel ---------------------------------------------------------------------


class _OpenScopes(threading.local):
    def __init__(self) -> None:
        self.regions: list[list[object | None]] = []


_SCOPES = _OpenScopes()  # of each thread: the regions around each scope in which attention is context parallel


def scope_opened() -> None:
    """To be called when a context parallel scope begins."""
    _SCOPES.regions.append([region.name for region in regions()])


def scope_closed() -> None:
    """To be called when it ends."""
    _SCOPES.regions.pop()


def recomputes_outside_scope(grad_enabled: bool = True) -> bool:
    """Whether there is a region between the innermost scope and the caller: it would be recomputed without the
    scope."""
    around = _SCOPES.regions[-1] if _SCOPES.regions else []
    known = {id(name) for name in around if name is not None}
    return any(id(region.name) not in known for region in regions(grad_enabled))


# ---- the proof -------------------------------------------------------------------------------------------------------


class _Theirs(torch.autograd.Function):
    """Third-party checkpointing."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            out = ctx.run(own)
        return None, torch.autograd.grad(out, own, grads[0])[0]


def _sees() -> bool:
    """Whether a region is found in both runs of a checkpoint, with one identity, and torch's can be rerun."""
    torchs = torch.utils.checkpoint.checkpoint
    kinds = {
        "reentrant": lambda run, x: torchs(run, x, use_reentrant=True, preserve_rng_state=False),
        "non-reentrant": lambda run, x: torchs(run, x, use_reentrant=False, preserve_rng_state=False),
        "theirs": _Theirs.apply,
    }
    return all(_sees_both(kind, rerunnable=name != "theirs") for name, kind in kinds.items())


def _sees_both(checkpointed: Callable[..., Tensor], rerunnable: bool) -> bool:
    runs: list[list[CheckpointRegion]] = []

    def run(x: Tensor) -> Tensor:
        runs.append(list(_regions(sys._getframe(), grad_enabled=True)))
        return x.sin()

    x = torch.ones(1, device="cpu", requires_grad=True)
    checkpointed(run, x).sum().backward()
    if [len(found) for found in runs] != [1, 1]:
        return False
    (first,), (second,) = runs
    known = first.name is not None and (first, second) == ((first.name, False), (first.name, True))
    return known and (not rerunnable or _rerun_attribute(first.name) is not None)


REGIONS_SEEN = Assumption(
    "checkpointed regions are seen in both runs",
    "parallel/checkpoint_regions.py",
    "the file of `torch.utils.checkpoint`, local names in `checkpoint` or `_checkpoint_impl`, `unpack_hook`, "
    "`CheckpointFunction`, `_CheckpointFrame.recompute_fn`",
    _sees,
)

"""Dispatch of torch's flex_attention to the blocks in which attention is context parallel.

SDPA hands itself to torch function modes (sdpa.py); flex_attention is plain Python and does not. Before a mode sees
its operator, it has refused the BlockMask of a whole sequence for queries that are a shard. So while a block of
``cp.flex()`` is open, the function has other code, which looks for a block among the modes of its thread and otherwise
runs torch's. There is one function object, under whatever name it was imported or compiled.

[Note: other code] The first block or attachment that needs it, of all threads, puts it in place, and the last one takes
it away. In a thread without a block it costs a look at an empty stack. torch.compile follows it, and guards on it, as
on any code.

[Note: without it] A block of ``cp.sdpa()`` leaves the function alone. What torch's code then does ends in an error, in
eager and in compiled code: it refuses a BlockMask of other lengths, or calls its operator, which the mode sees and
refuses. `raised_in_flex` recognises both when the block ends, so that the error can say what to do.

Knows nothing of sessions.
"""

from __future__ import annotations

import inspect
from threading import RLock
from traceback import walk_tb
from types import FunctionType
from typing import TYPE_CHECKING, Self, TypeGuard

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from attnspan.assumptions import Assumption
from attnspan.parallel.eager import run_eagerly

_FLEX = torch_flex.flex_attention
_LOCK = RLock()  # what is collected ends in whatever thread that happens
_OPEN = [0]  # blocks and attachments that need it, of all threads


class FlexMode(TorchFunctionMode):
    """A mode that flex_attention is handed to."""

    if TYPE_CHECKING:  # torch's, which it does not annotate

        def __enter__(self) -> Self: ...

        def __exit__(self, *raised: object) -> None: ...

    def flex_attention(self, *args: object, **kwargs: object) -> object:
        """In place of torch's."""
        raise NotImplementedError


def install() -> None:
    """A block or an attachment that needs it begins. See [Note: other code]."""
    with _LOCK:
        DISPATCHES.verify()
        _OPEN[0] += 1  # first: a block that is collected in between ends, and may be the last before this one
        if _FLEX.__code__ is not _CODE:
            _FLEX.__code__ = _CODE


def uninstall() -> None:
    """It ends."""
    with _LOCK:
        _OPEN[0] -= 1
        if not _OPEN[0]:
            _FLEX.__code__ = torch_flex_attention.__code__


def raised_in_flex(raised: object) -> TypeGuard[Exception]:
    """Whether torch's flex_attention raised it, in eager code. See [Note: without it]."""
    if not isinstance(raised, Exception):
        return False
    return any(frame.f_code is torch_flex_attention.__code__ for frame, _ in walk_tb(raised.__traceback__))


def dispatch(*args: object, **kwargs: object) -> object:
    """flex_attention by the innermost block of this thread, or by torch."""
    for index in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(index)
        if isinstance(mode, FlexMode):
            return mode.flex_attention(*args, **kwargs)
    return torch_flex_attention(*args, **kwargs)


def _replacement(
    query: object,
    key: object,
    value: object,
    score_mod: object = None,
    block_mask: object = None,
    scale: object = None,
    enable_gqa: object = False,
    return_lse: object = False,
    kernel_options: object = None,
    *,
    return_aux: object = None,
) -> object:
    from attnspan.parallel.flex_dispatch import dispatch  # it runs among the names of torch's module

    rest = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    return dispatch(query, key, value, *rest, return_aux=return_aux)


_CODE = _replacement.__code__.replace(co_name=_FLEX.__name__)


# A thread without a block may have compiled flex_attention itself: torch's own code is then compiled as usual.
run_eagerly(_CODE, callees=False)
run_eagerly(dispatch.__code__, callees=False)

torch_flex_attention = FunctionType(
    _FLEX.__code__, _FLEX.__globals__, _FLEX.__name__, _FLEX.__defaults__, _FLEX.__closure__
)
"""torch's flex_attention, whatever code the function has at present."""

torch_flex_attention.__kwdefaults__ = _FLEX.__kwdefaults__


class _FlexProbe(FlexMode):
    def flex_attention(self, *args: object, **kwargs: object) -> object:
        return args, kwargs


def _reaches() -> bool:
    """Whether the other code has torch's signature, and hands a call to the innermost block, or else to torch."""
    ours, torchs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (_replacement, torch_flex_attention)
    )
    other = FunctionType(_CODE, _FLEX.__globals__, _FLEX.__name__, _FLEX.__defaults__, _FLEX.__closure__)
    other.__kwdefaults__ = _FLEX.__kwdefaults__
    with FlexMode(), _FlexProbe():
        found = other("q", "k", "v", return_aux="aux")
    return ours == torchs and found == (("q", "k", "v", None, None, None, False, False, None), {"return_aux": "aux"})


DISPATCHES = Assumption(
    "a call of flex_attention reaches the innermost block",
    "parallel/flex_dispatch.py",
    "the code and signature of `flex_attention`, `torch._C._len_torch_function_stack`, `_get_function_stack_at`",
    _reaches,
)

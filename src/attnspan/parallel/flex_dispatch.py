"""Dispatch of torch's flex_attention to the context parallel scope of the current thread.

SDPA is passed to torch function modes (sdpa.py); flex_attention is a plain Python function, and is not. Its operator
is, but before that it has already refused the BlockMask of the whole sequence for the queries of a shard. So while a
``cp.flex()`` scope is open, the code object of flex_attention is replaced by one that looks for a scope among the modes
of the thread, and calls torch's code if there is none. Replacing the code works under whatever name the function was
imported or compiled, as there is only one function object.

[Note: other code] The first scope or attachment that needs it, in any thread, installs the replacement, and the last
one removes it. In a thread without a scope it costs a look at an empty stack. torch.compile traces it and guards on it,
like any code.

[Note: without it] A scope of ``cp.sdpa()`` does not replace the code. torch's own code then ends in an error, both
eager and compiled: it refuses a BlockMask of other lengths, or calls its operator, which the mode intercepts and
refuses. `raised_in_flex` recognises both when the scope ends, so that the error can say what to do.

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
from attnspan.parallel.eager import skip_frames

_FLEX = torch_flex.flex_attention
_LOCK = RLock()  # garbage collection may end a scope in any thread, at any time
_OPEN = [0]  # scopes and attachments that need it, of all threads


class DispatchTarget(TorchFunctionMode):
    """A mode to which `dispatch` passes calls of flex_attention.

    The one such mode is `AttentionMode`. It is in sdpa.py, which imports this file, so `dispatch` knows it by this
    base.
    """

    if TYPE_CHECKING:  # torch's, which it does not annotate

        def __enter__(self) -> Self: ...

        def __exit__(self, *raised: object) -> None: ...

    def flex_attention(self, *args: object, **kwargs: object) -> object:
        """In place of torch's."""
        raise NotImplementedError


def install() -> None:
    """To be called when a scope or an attachment begins that needs it. See [Note: other code]."""
    with _LOCK:
        DISPATCHES.verify()
        _OPEN[0] += 1  # first: a scope that is collected in between ends, and may be the last before this one
        if _FLEX.__code__ is not _CODE:
            _FLEX.__code__ = _CODE


def uninstall() -> None:
    """To be called when it ends."""
    with _LOCK:
        _OPEN[0] -= 1
        if not _OPEN[0]:
            _FLEX.__code__ = torch_flex_attention.__code__


def raised_in_flex(raised: object) -> TypeGuard[Exception]:
    """Whether torch's flex_attention raised this, in eager code. See [Note: without it]."""
    if not isinstance(raised, Exception):
        return False
    return any(frame.f_code is torch_flex_attention.__code__ for frame, _ in walk_tb(raised.__traceback__))


def dispatch(*args: object, **kwargs: object) -> object:
    """flex_attention by the innermost scope of this thread, or by torch."""
    for index in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(index)
        if isinstance(mode, DispatchTarget):
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


# A thread without a scope may have compiled flex_attention itself: torch's own code is then compiled as usual.
skip_frames(_CODE, callees=False)
skip_frames(dispatch.__code__, callees=False)

torch_flex_attention = FunctionType(
    _FLEX.__code__, _FLEX.__globals__, _FLEX.__name__, _FLEX.__defaults__, _FLEX.__closure__
)
"""torch's flex_attention, whatever code the function has at present."""

torch_flex_attention.__kwdefaults__ = _FLEX.__kwdefaults__


class _FlexProbe(DispatchTarget):
    def flex_attention(self, *args: object, **kwargs: object) -> object:
        return args, kwargs


def _reaches() -> bool:
    """Whether the replacement has torch's signature, and calls the innermost scope."""
    ours, torchs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (_replacement, torch_flex_attention)
    )
    other = FunctionType(_CODE, _FLEX.__globals__, _FLEX.__name__, _FLEX.__defaults__, _FLEX.__closure__)
    other.__kwdefaults__ = _FLEX.__kwdefaults__
    with DispatchTarget(), _FlexProbe():
        found = other("q", "k", "v", return_aux="aux")
    return ours == torchs and found == (("q", "k", "v", None, None, None, False, False, None), {"return_aux": "aux"})


DISPATCHES = Assumption(
    "a call of flex_attention reaches the innermost scope",
    "parallel/flex_dispatch.py",
    "the code and signature of `flex_attention`, `torch._C._len_torch_function_stack`, `_get_function_stack_at`",
    _reaches,
)

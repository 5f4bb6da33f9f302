"""``with cp.sdpa():`` makes F.scaled_dot_product_attention context parallel in the scope, in the current thread.

The scope is a torch function mode: it intercepts every call of a torch function, under whatever name it was imported,
and inside torch.compile. The arguments of SDPA are checked against the session, which then computes the call or
refuses it. ``with cp.flex():`` is such a scope for flex_attention as well (flex_dispatch.py), whose calls bring their
own masks (flex.py). Attention by any other function (flex_attention in ``cp.sdpa()``, varlen, the fused encoder layer,
MultiheadAttention with weights) would only see this rank's tokens and is refused, as are ops of other libraries with
attention in their names. A mode cannot intercept TorchScript, kernels that are not ops, ops with other names (``fwd``),
or attention written as matmuls, which is what torch.compile makes of torch._scaled_dot_product_attention_math.
`ContextParallel.assert_used` counts the calls that did run.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from attnspan.assumptions import Assumption
from attnspan.errors import AttentionError
from attnspan.parallel import checkpoint_regions, flex_dispatch, multihead
from attnspan.parallel.call_args import FlexArgs, FlexResult, SdpaArgs
from attnspan.parallel.checkpoint_checks import CallContext
from attnspan.parallel.compiled_checkpoints import enter_empty_scope
from attnspan.parallel.eager import eagerly, skip_frames
from attnspan.parallel.flex_dispatch import DispatchTarget, raised_in_flex
from attnspan.parallel.handler import AttentionHandler
from attnspan.parallel.multihead import check_weights

Function = Callable[..., object]
Args = tuple[Any, ...]  # whatever the caller gave
Kwargs = Mapping[str, Any]

FUSED = {
    torch._transformer_encoder_layer_fwd,
    *(each for name, each in vars(torch).items() if "attention" in name and isinstance(each, BuiltinFunctionType)),
}
"""torch functions that compute attention and are not ops."""

OPS = (OpOverload, OpOverloadPacket, HigherOrderOperator)

SDPA_OPS = (torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)

ATTENTION_NAMES = re.compile(r"(?<!fl)att(?!er)|flash|fmha|mha_|(?<!f)sdp(?!_choice)|transformer")
"""Matches names of attention functions, and not flatten, scatter or FSDP."""


class AttentionMode(DispatchTarget):
    """A scope in which SDPA is a session's attention, and flex_attention too if `flex` says so."""

    def __init__(self, handler: AttentionHandler, flex: bool = False, context: CallContext | None = None):
        super().__init__()
        self.handler, self.flex = handler, flex
        self.context = context  # the context of compiled calls, if this scope repeats one that was entered before
        self.compiled = False  # whether the scope itself is in compiled code
        self.pushed: list[bool] = []  # for each time it is open: whether it is on torch's stack of modes

    def __enter__(self) -> AttentionMode:
        self.compiled = torch.compiler.is_compiling()
        if self.compiled:
            return super().__enter__()
        MODE_INTERCEPTS.verify()
        checkpoint_regions.scope_opened()
        around = _get_current_function_mode()
        # A second mode equal to the active one would add overhead to every call of torch, and change nothing.
        same = isinstance(around, AttentionMode) and around.handler is self.handler and around.flex == self.flex
        self.pushed.append(not same)
        if self.flex:
            flex_dispatch.install()
        return super().__enter__() if self.pushed[-1] else self

    def __exit__(self, *raised: object) -> None:
        if self.compiled:
            super().__exit__(*raised)
            return
        checkpoint_regions.scope_closed()
        if self.flex:
            flex_dispatch.uninstall()
        if self.pushed.pop():
            super().__exit__(*raised)
        if not self.flex and raised_in_flex(raised[1]):
            raise AttentionError(NO_FLEX) from raised[1]

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return self._traced_call(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(func, OPS) or _is_attention_name(name):  # nearly every call ends here: it must be cheap
            return self._eager_call(func, name, args, kwargs)
        return func(*args, **kwargs)

    def flex_attention(self, *args: Any, **kwargs: Any) -> FlexResult:
        """A call of flex_attention, which flex_dispatch.py hands over."""
        if not self.flex:  # another scope or attachment has put the dispatch in place
            raise AttentionError(NO_FLEX)
        if not torch.compiler.is_compiling():
            return eagerly(_eager_flex)(self.handler, FlexArgs(*args, **kwargs))
        return self.handler.flex(self._compiled_context(), FlexArgs(*args, **kwargs))

    def _compiled_context(self) -> CallContext:
        """Whether compiled code enters the scope itself: see [Note: call contexts] in checkpoint_checks.py."""
        return self.context or ("compiled_scope" if self.compiled else "compiled_call")

    def _eager_call(self, func: Function, name: str, args: Args, kwargs: Kwargs) -> object:
        """An op, or a function with attention in its name."""
        if func is F.scaled_dot_product_attention or func in SDPA_OPS:
            return self.handler.sdpa("eager", SdpaArgs(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            check_weights(args, kwargs)
            return self.handler.multi_head(*args, **kwargs)
        if _is_attention(func):
            raise AttentionError(_refusal(name))
        if isinstance(func, HigherOrderOperator):  # the mode is off while its functions run
            args = tuple(self._reentering(arg) if _is_function(arg) else arg for arg in args)
        return func(*args, **kwargs)

    def _traced_call(self, func: Function, args: Args, kwargs: Kwargs) -> object:
        """The same under torch.compile, which traces this code: only comparisons by identity."""
        if func is F.scaled_dot_product_attention or func is SDPA_OPS[0] or func is SDPA_OPS[1]:
            return self.handler.sdpa(self._compiled_context(), SdpaArgs(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            check_weights(args, kwargs)
            raise AttentionError(
                "nn.MultiheadAttention inside torch.compile cannot be followed from cp.sdpa(); leave it out of the "
                "compiled code, or call F.scaled_dot_product_attention"
            )
        if func is torch._native_multi_head_attention or func is torch._transformer_encoder_layer_fwd:
            raise AttentionError(_refusal("the fused layer"))
        if isinstance(func, HigherOrderOperator):
            args = self._with_reentering(func, args)
        elif isinstance(func, OpOverload | OpOverloadPacket) and _is_attention(func):
            raise AttentionError(_refusal("an op of attention"))
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo does not follow while a mode is on
            func = torch.unflatten
        return func(*args, **kwargs)

    def _with_reentering(self, func: HigherOrderOperator, args: Args) -> Args:
        """The arguments of a higher-order operator (checkpoint, cond, loop) whose functions enter the mode again.

        torch disables the mode inside such an operator. dynamo lets the functions enter a mode only if the code around
        them entered one before (compiled_checkpoints.py).
        """
        if func is torch.ops.higher_order.flex_attention:
            raise AttentionError(NO_OPERATOR if self.flex else NO_FLEX)
        if not self.compiled:
            enter_empty_scope()
        context = self._compiled_context()
        return tuple(self._reentering(arg, context) if callable(arg) else arg for arg in args)

    def _reentering(self, function: Function, context: CallContext | None = None) -> Function:
        handler, flex = self.handler, self.flex

        def entered(*args: object, **kwargs: object) -> object:
            with AttentionMode(handler, flex, context):
                return function(*args, **kwargs)

        return entered


skip_frames(AttentionMode.__torch_function__.__code__)


def _eager_flex(handler: AttentionHandler, args: FlexArgs) -> FlexResult:
    return handler.flex("eager", args)


def _is_function(arg: object) -> TypeGuard[Function]:
    return callable(arg) and not isinstance(arg, Tensor | type)  # an autograd function is passed as its class


@functools.lru_cache(maxsize=4096)
def _is_attention_name(name: str) -> bool:
    """Whether a name looks like that of an attention function."""
    return ATTENTION_NAMES.search(name) is not None


def _is_attention(func: object) -> bool:
    """Whether a function computes attention: one of torch's, or an op whose name or library says so."""
    if not isinstance(func, OPS):
        return isinstance(func, BuiltinFunctionType) and func in FUSED
    library = (getattr(func, "__module__", None) or "").removeprefix("torch._ops.")
    return library != "attnspan" and (_is_attention_name(func.__name__) or "attn" in library or "attention" in library)


# What torch.compiler.assume_constant_result does, which would import all of dynamo to say so.
vars(_is_attention)["_dynamo_marked_constant"] = True


def _refusal(name: str) -> str:
    return (
        f"{name} would see this rank's tokens alone: attention must be F.scaled_dot_product_attention inside "
        "cp.sdpa(), flex_attention inside cp.flex(), or cp.attention(query, key, value)"
    )


NO_FLEX = (
    "flex_attention would see this rank's tokens alone: it is context parallel inside `with cp.flex()`, by "
    "cp.attach(model, flex=True) and as cp.flex_attention; cp.sdpa() is for F.scaled_dot_product_attention"
)

NO_OPERATOR = (
    "the operator of flex_attention would see this rank's tokens alone: under torch.compile, call "
    "flex_attention inside a `with cp.flex()` around the compiled code, or cp.flex_attention"
)


class _ModeProbe(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _intercepts() -> bool:
    """Whether a mode intercepts SDPA and MultiheadAttention, and the latter can be given another SDPA."""
    x, weight = torch.ones(2, 1, 4, device="cpu"), torch.ones(12, 4, device="cpu")
    # No module is made for it, which would draw random numbers.
    given = (x, x, x, 4, 1, weight, weight[:, 0], None, None, False, 0.0, weight[:4], weight[:4, 0], False, None, False)
    seen: list[SdpaArgs] = []

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(SdpaArgs(*args, **kwargs))
        return seen[-1].value

    with _ModeProbe() as probe:
        current = _get_current_function_mode() is probe
        F.scaled_dot_product_attention(x[None], x[None], x[None])
        F.multi_head_attention_forward(*given)
    multihead.multi_head_attention(attend)(*given)
    check_weights(given, {})
    both = F.scaled_dot_product_attention in probe.seen and F.multi_head_attention_forward in probe.seen
    places = list(inspect.signature(F.multi_head_attention_forward).parameters)
    return current and both and len(seen) == 1 and places[multihead.NEED_WEIGHTS] == "need_weights"


MODE_INTERCEPTS = Assumption(
    "a torch function mode sees SDPA and MultiheadAttention",
    "parallel/sdpa.py",
    "`_get_current_function_mode`, names in `F.multi_head_attention_forward` and the place of `need_weights`",
    _intercepts,
)

"""``with cp.sdpa():`` F.scaled_dot_product_attention inside is context parallel, for that block and thread.

A torch function mode: it sees every call of a torch function, by whatever name that was imported, inside torch.compile
too, and ends with its block. Calls of SDPA are compared with the session, argument by argument, then served by it or
refused. Calls of flex_attention reach the same block (flex_dispatch.py), and bring their masks (flex.py);
``with cp.flex():`` is that block too. Attention by any other function (varlen, the fused encoder layer,
MultiheadAttention with weights) would see this rank's tokens alone and is refused, as are ops of other libraries whose
names tell of attention. What no mode can see: TorchScript, kernels that are no ops, ops whose names say nothing
(``fwd``), attention written out as matmuls, which is what torch.compile makes of
torch._scaled_dot_product_attention_math. `ContextParallel.assert_used` counts what did run.

[Note: is_causal] SDPA's `is_causal` and the session's mask say the same thing twice, so they must agree: True is for
masks in which no query sees a later key, False for the others. A mask in which queries see neither earlier nor later
keys fits both, and so does a rank of at most one query: models write ``is_causal=query.shape[2] > 1``.

[Note: refused together] A rank that raised alone would leave the others waiting for its keys. So in eager code it tells
them, as long as they ask: when tensors of such shapes first come (attention/agreement.py). Later it raises alone.

[Note: handles of three kinds] A call is checked against [Note: replays] in checkpoint_regions.py: in eager code before
it is made; in compiled code when it runs, by the op, since only then a stack can be looked at. A block that was itself
compiled with the code is entered again whenever the code runs, so there only the session has to be the same.

Shapes: (..., H, S, D), S this rank's tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import _get_current_function_mode

from attnspan.assumptions import Assumption
from attnspan.attention import Attention
from attnspan.attention.agreement import Inputs, refuse
from attnspan.errors import AttentionError, AttnspanError
from attnspan.parallel import checkpoint_regions, flex_dispatch
from attnspan.parallel.dtensors import carried, is_dtensor
from attnspan.parallel.flex import Flexes, InBlock, eagerly
from attnspan.parallel.flex_dispatch import FlexMode
from attnspan.parallel.guards import check_block, check_session
from attnspan.parallel.opening import opened

FUSED = {
    torch._transformer_encoder_layer_fwd,
    *(each for name, each in vars(torch).items() if "attention" in name and isinstance(each, BuiltinFunctionType)),
}
"""Attention in functions of torch that are no ops."""

OPS = (OpOverload, OpOverloadPacket, HigherOrderOperator)

SDPA_OPS = (torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)

TELLS = re.compile(r"(?<!fl)att(?!er)|flash|fmha|mha_|(?<!f)sdp(?!_choice)|transformer")
"""What names of attention have in common; not flatten, scatter or FSDP."""

NEED_WEIGHTS = 15
"""The place of `need_weights` among the arguments of F.multi_head_attention_forward."""


class Scope(FlexMode):
    """A block in which SDPA and flex_attention are a session's attention."""

    def __init__(self, served: Serving, eager: bool = False):
        super().__init__()
        self.served = served
        self.eager = eager  # whether it stands, in compiled code, for a block of eager code around that
        self.compiled = False  # whether the block was compiled with what is in it
        self.pushed: list[bool] = []

    def __enter__(self) -> Scope:
        self.compiled = torch.compiler.is_compiling()
        if self.compiled:
            return super().__enter__()
        MODE.hold()
        checkpoint_regions.enter()
        around = _get_current_function_mode()
        # A second mode just like the one that is on would cost every call of torch a detour, and change nothing.
        self.pushed.append(not (isinstance(around, Scope) and around.served is self.served))
        flex_dispatch.install()
        return super().__enter__() if self.pushed[-1] else self

    def __exit__(self, *raised: Any) -> None:
        if self.compiled:
            super().__exit__(*raised)
            return
        checkpoint_regions.leave()
        flex_dispatch.uninstall()
        if self.pushed.pop():
            super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return self._traced(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(func, OPS) or _tells(name):  # nearly every call ends here: it must be cheap
            return self._named(func, name, args, kwargs)
        return func(*args, **kwargs)

    def flex_attention(self, *args: Any, **kwargs: Any) -> Any:
        """A call of flex_attention, which modes do not see by themselves."""
        if not torch.compiler.is_compiling():
            return eagerly(self.served.flex_now)(*args, **kwargs)
        return (self.served.flex_inner if self._with_its_block() else self.served.flex_outer)(*args, **kwargs)

    def _with_its_block(self) -> bool:
        """Whether compiled code enters the block itself: see [Note: handles of three kinds]."""
        return self.compiled and not self.eager

    def _named(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An op, or a function whose name may tell of attention."""
        if func is F.scaled_dot_product_attention or func in SDPA_OPS:
            return self.served.now(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            _check_weights(args, kwargs)
            return self.served.heads_now(*args, **kwargs)
        if _attends(func):
            raise AttentionError(_other(name))
        if isinstance(func, HigherOrderOperator):  # the mode is off while its functions run
            args = tuple(_inside(self.served, arg) if _is_function(arg) else arg for arg in args)
        return func(*args, **kwargs)

    def _traced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same under torch.compile, which follows this code: plain comparisons, no names."""
        if func is F.scaled_dot_product_attention or func is SDPA_OPS[0] or func is SDPA_OPS[1]:
            return (self.served.inner if self._with_its_block() else self.served.outer)(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            _check_weights(args, kwargs)
            raise AttentionError(
                "nn.MultiheadAttention inside torch.compile cannot be followed from cp.sdpa(); leave it out of the "
                "compiled code, or call F.scaled_dot_product_attention"
            )
        if func is torch._native_multi_head_attention or func is torch._transformer_encoder_layer_fwd:
            raise AttentionError(_other("the fused layer"))
        if isinstance(func, HigherOrderOperator):
            args = self._entered(func, args)
        elif isinstance(func, OpOverload | OpOverloadPacket) and _attends(func):
            raise AttentionError(_other("an op of attention"))
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo does not follow while a mode is on
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _entered(self, func: HigherOrderOperator, args: Any) -> Any:
        """The arguments of an operator on functions: a checkpointed one, a branch, the body of a loop.

        The mode is off while such an operator is followed, so functions enter it again; which dynamo allows only if
        a block was entered before in the code that it follows (opening.py).
        """
        if func is torch.ops.higher_order.flex_attention:
            raise AttentionError(
                "the operator of flex_attention would see this rank's tokens alone: under torch.compile, call "
                "flex_attention inside a `with cp.flex()` around the compiled code, or cp.flex_attention"
            )
        if not self.compiled:
            opened()
        eager = not self._with_its_block()
        return tuple(_inside(self.served, arg, eager) if callable(arg) else arg for arg in args)


flex_dispatch.run_eagerly(Scope.__torch_function__.__code__)


class Asked(NamedTuple):
    """The arguments of SDPA."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class Serving(Protocol):
    """What a block hands calls to: see `Served`."""

    heads_now: Callable[..., Any]

    def now(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def inner(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def outer(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def flex_now(self, *args: Any, **kwargs: Any) -> Any: ...

    def flex_inner(self, *args: Any, **kwargs: Any) -> Any: ...

    def flex_outer(self, *args: Any, **kwargs: Any) -> Any: ...


class Served(InBlock):
    """A session's attention under one of its masks, as calls of SDPA may have it.

    Made once, in eager code. `now`, `inner` and `outer` have SDPA's signature: see [Note: handles of three kinds];
    `heads_now` has that of F.multi_head_attention_forward.
    """

    name: str

    def __init__(self, flexes: Flexes, name: str):
        self.core, self.flexes, self.name = flexes.core, flexes, name
        self.attend = flexes.named[name]
        self.mask = self.core.masks[name]
        self.scale = self.core.options.scale
        plan = self.attend.plan
        bands = [band for row in range(plan.rows) for band in plan.bands(row)]
        self.sees_later = any(band.hi > 0 for band in bands)
        self.sees_earlier = any(band.lo < 0 for band in bands)
        self.rows, self.tokens = plan.rows, self.core.sharding.tokens
        self.scaled: dict[float, Attention] = {}
        self.watched = self.attend.variant(guard=self._check_block)
        self.followed = self.attend.variant(guard=self._check_session)
        self.heads_now = _rewired(self.now)

    # ---- three ways in -------------------------------------------------------------------------------------------

    def now(self, *args: Any, **kwargs: Any) -> Tensor:
        """In eager code."""
        asked = Asked(*args, **kwargs)
        for tensor in asked[:3]:
            self.core.sharding.check_mark(tensor)
        attend = self.attend if self._usual(asked) else self._with_scale(asked)
        try:
            self._check(asked)
        except AttentionError as wrong:
            self._refuse(attend, asked, wrong)
        self._before()
        return self._run(attend, asked)

    def inner(self, *args: Any, **kwargs: Any) -> Tensor:
        """In compiled code, with its block."""
        return self._compiled(self.followed, Asked(*args, **kwargs))

    def outer(self, *args: Any, **kwargs: Any) -> Tensor:
        """In compiled code, inside a block of eager code."""
        return self._compiled(self.watched, Asked(*args, **kwargs))

    def _compiled(self, attend: Attention, asked: Asked) -> Tensor:
        self._check(asked)
        if not self._usual(asked):
            raise AttentionError(
                f"scale must be the session's under torch.compile, got {asked.scale}; make it with "
                "ContextParallel(..., scale=...)"
            )
        return self._run(attend, asked)

    def _run(self, attend: Attention, asked: Asked) -> Tensor:
        query, key, value = asked[:3]
        if query.dim() == 4:
            return carried(self.core, attend, query, key, value)[0]
        return attend(*map(_flat, (query, key, value))).reshape(*query.shape[:-1], value.shape[-1])

    # ---- checks --------------------------------------------------------------------------------------------------

    def _refuse(self, attend: Attention, asked: Asked, wrong: AttentionError) -> NoReturn:
        """See [Note: refused together]."""
        tensors = asked[:3]
        if isinstance(attend, Attention) and all(
            isinstance(x, Tensor) and x.dim() > 1 and not is_dtensor(x) for x in tensors
        ):
            flat = [_flat(x) for x in tensors]
            try:
                call = attend.call.suited(*flat)
            except AttnspanError:  # there is no plan for such tensors, on which all could agree
                raise wrong from None
            refuse(call, Inputs(*flat), wrong)
        raise wrong

    def _check(self, asked: Asked) -> None:
        """Refuse what the session was not made for."""
        query, key, value = asked[:3]
        if min(query.dim(), key.dim()) > 1 and key.shape[-2] != query.shape[-2] == self.tokens:
            raise AttentionError(
                f"key must hold this rank's {self.tokens} of {self.core.seq_len} tokens, got {key.shape[-2]}; shard "
                "it first, or where keys are of another sequence, attend by cp.cross(keys)(query, key, value) outside "
                "of this block, with `keys` that sequence's session"
            )
        if asked.attn_mask is not None:
            raise AttentionError(
                f"attn_mask must be None inside cp.sdpa(): the session's mask is {self.mask!r}; describe yours there, "
                "as in ContextParallel(mesh, seq_len=..., mask=Causal() & Documents(lengths)) or, if it is a bool "
                "tensor of the whole sequence, mask=Mask.from_dense(attn_mask)"
            )
        if asked.dropout_p:
            raise AttentionError(f"dropout_p must be 0, got {asked.dropout_p}: dropout over ranks is not served")
        several = query.dim() < 2 or query.shape[-2] > 1  # see [Note: is_causal]
        if asked.is_causal and self.sees_later and several:
            raise AttentionError(
                f"is_causal must be False: in the session's mask {self.mask!r} some queries see later keys; make the "
                "session with mask=... & Causal(), or call with is_causal=False"
            )
        if not asked.is_causal and self.sees_earlier and not self.sees_later and several:
            raise AttentionError(
                f"is_causal must be True: in the session's mask {self.mask!r} no query sees a later key; call with "
                "is_causal=True, or make the session with a mask that is not causal, such as Full()"
            )
        if query.dim() < 2 or key.dim() != query.dim() or value.dim() != query.dim():
            raise AttentionError(
                "query, key and value must be (..., heads, tokens, head dim), got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
            raise AttentionError(
                "query, key and value must have the same dims before heads: they are not broadcast, got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if self.rows > 1 and query.dim() != 4:
            raise AttentionError(
                f"query must be (batch, heads, tokens, head dim) for a mask of {self.rows} batch rows, got shape "
                f"{tuple(query.shape)}"
            )
        if not asked.enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3]:
            raise AttentionError(
                f"enable_gqa must be True where query and key have different numbers of heads, got {query.shape[-3]} "
                f"and {key.shape[-3]}"
            )
        if asked.scale is None and self.scale is not None:
            raise AttentionError(
                f"scale must be given: the session was made with scale={self.scale}, and a call without means "
                "1 / sqrt(head dim); give it in the call, or make the session without"
            )

    def _usual(self, asked: Asked) -> bool:
        """Whether the scale is the one that the session's attention has."""
        if asked.scale is None or 0 in (asked.query.dim(), *asked.query.shape[-1:]):  # which is refused later
            return True
        return asked.scale == (asked.query.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def _with_scale(self, asked: Asked) -> Attention:
        assert asked.scale is not None, "None is the usual one"
        if asked.scale not in self.scaled:
            self.scaled[asked.scale] = self.attend.variant(scale=asked.scale)
        return self.scaled[asked.scale]

    def _check_block(self) -> None:
        """Asked by the op, of compiled code whose block is not compiled."""
        check_block()
        self._check_session()

    def _check_session(self) -> None:
        """Asked by the op, of compiled code with its block."""
        check_session(self.core)


def served(known: dict[str, Served], flexes: Flexes, name: str) -> Served:
    """What a session serves under a mask; made once, in eager code."""
    if name not in known:
        if torch.compiler.is_compiling():
            raise AttentionError("under torch.compile, call cp.sdpa() once outside before it is used inside")
        known[name] = Served(flexes, name)
    return known[name]


class Unserved:
    """Stands where a module has no mask: its attention is refused."""

    def now(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise AttentionError(
            "attention in a module for which no mask was named: name one for the rest, as in "
            "cp.attach(model, {'layers.*.attention': 'window'}, mask='full')"
        )

    inner = outer = heads_now = flex_now = flex_inner = flex_outer = now


UNSERVED = Unserved()


class FlexAlone(InBlock):
    """flex_attention of a session of several masks, none of which is SDPA's."""

    name = None

    def __init__(self, flexes: Flexes):
        self.core, self.flexes = flexes.core, flexes

    def now(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse SDPA."""
        names = " or ".join(f"mask={name!r}" for name in self.core.masks)
        raise AttentionError(f"F.scaled_dot_product_attention has no mask inside this cp.flex(); give it {names}")

    inner = outer = heads_now = now


def _inside(served: Serving, function: Callable[..., Any], eager: bool = False) -> Callable[..., Any]:
    def entered(*args: Any, **kwargs: Any) -> Any:
        with Scope(served, eager):
            return function(*args, **kwargs)

    return entered


def _is_function(arg: Any) -> bool:
    return callable(arg) and not isinstance(arg, Tensor | type)  # an autograd function is passed as its class


@functools.lru_cache(maxsize=4096)
def _tells(name: str) -> bool:
    """Whether the name of a function may tell of attention."""
    return TELLS.search(name) is not None


def _attends(func: Any) -> bool:
    """Whether a function is attention on what it is given: one of torch's, or an op that is called so."""
    if not isinstance(func, OPS):
        return isinstance(func, BuiltinFunctionType) and func in FUSED
    library = (getattr(func, "__module__", None) or "").removeprefix("torch._ops.")
    return library != "attnspan" and (_tells(func.__name__) or "attn" in library or "attention" in library)


# What torch.compiler.assume_constant_result does, which would import all of dynamo to say so.
_attends._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _flat(tensor: Tensor) -> Tensor:
    """(batch, heads, tokens, head dim); a shard may have no tokens, so that -1 would not do."""
    return tensor.reshape(math.prod(tensor.shape[:-3]), *(1, *tensor.shape)[-3:])


def _other(name: str) -> str:
    return (
        f"{name} would see this rank's tokens alone: inside cp.sdpa() attention must be "
        "F.scaled_dot_product_attention, flex_attention or cp.attention(query, key, value)"
    )


def _check_weights(args: Any, kwargs: Any) -> None:
    if kwargs.get("need_weights", args[NEED_WEIGHTS] if len(args) > NEED_WEIGHTS else True):
        raise AttentionError(
            "need_weights must be False inside cp.sdpa(): nn.MultiheadAttention with weights does not use "
            "F.scaled_dot_product_attention, and weights of all ranks are not kept anywhere"
        )


def _rewired(attend: Callable[..., Tensor]) -> Callable[..., Any]:
    """F.multi_head_attention_forward, with SDPA replaced by `attend`.

    It hands itself to the mode, which is off while it handles that: what the function then calls is not seen. So
    the same code is given other names to look up.
    """
    theirs = F.multi_head_attention_forward
    names = {**vars(F), "has_torch_function": lambda _: False, "scaled_dot_product_attention": attend}
    ours = FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


class _Probe(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _is_seen() -> bool:
    """Whether a mode sees SDPA and MultiheadAttention by the functions compared with, and the latter can be rewired."""
    x, weight = torch.ones(2, 1, 4, device="cpu"), torch.ones(12, 4, device="cpu")
    # No module is made for it, which would draw random numbers.
    given = (x, x, x, 4, 1, weight, weight[:, 0], None, None, False, 0.0, weight[:4], weight[:4, 0], False, None, False)
    asked: list[Asked] = []

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(Asked(*args, **kwargs))
        return asked[-1].value

    with _Probe() as probe:
        current = _get_current_function_mode() is probe
        F.scaled_dot_product_attention(x[None], x[None], x[None])
        F.multi_head_attention_forward(*given)
    _rewired(attend)(*given)
    _check_weights(given, {})
    both = F.scaled_dot_product_attention in probe.seen and F.multi_head_attention_forward in probe.seen
    places = list(inspect.signature(F.multi_head_attention_forward).parameters)
    return current and both and len(asked) == 1 and places[NEED_WEIGHTS] == "need_weights"


MODE = Assumption(
    "a torch function mode sees SDPA and MultiheadAttention",
    "parallel/sdpa.py",
    "`_get_current_function_mode`, names in `F.multi_head_attention_forward` and the place of `need_weights`",
    _is_seen,
)

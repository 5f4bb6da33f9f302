"""nn.MultiheadAttention inside a scope: F.multi_head_attention_forward with the SDPA of a session.

torch passes this function to the torch function mode, which is disabled while it handles the call, so that the SDPA
call inside is not intercepted. So the function's code runs with other globals, in which SDPA is the session's. In eager
code only: torch.compile cannot trace that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType

import torch.nn.functional as F
from torch import Tensor

from attnspan.errors import AttentionError

NEED_WEIGHTS = 15
"""The index of `need_weights` among the arguments of F.multi_head_attention_forward."""


def multi_head_attention(attend: Callable[..., Tensor]) -> Callable[..., object]:
    """F.multi_head_attention_forward, with SDPA replaced by `attend`."""
    theirs = F.multi_head_attention_forward
    names = {**vars(F), "has_torch_function": lambda _: False, "scaled_dot_product_attention": attend}
    ours = FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


def check_weights(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Refuse a call that asks for attention weights."""
    if kwargs.get("need_weights", args[NEED_WEIGHTS] if len(args) > NEED_WEIGHTS else True):
        raise AttentionError(
            "need_weights must be False inside cp.sdpa(): nn.MultiheadAttention with weights does not use "
            "F.scaled_dot_product_attention, and weights of all ranks are not kept anywhere"
        )

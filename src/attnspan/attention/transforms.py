"""Which derivatives attention has: reverse mode, once. Everything else is refused in words.

torch's autograd asks an op for its derivatives in several ways, and an op that has none for one of them is not always
an error: forward mode (``torch.func.jvp``, ``jacfwd``, ``torch.autograd.forward_ad``) takes a missing one for zero.
What rows of another rank do to this one's would need an exchange of tangents, in an order of its own. So::

    backward, also under compiled autograd               served
    forward mode                                         refused: a tangent would be lost without a word
    torch.func.grad, vjp, jacrev, hessian, vmap          refused: torch would refuse, and say what its own code lacks
    create_graph=True, then a second backward            refused when the second one is asked for

A tangent is looked for by the op too, when it runs: compiled code hands it tensors that no other code of ours sees.

Knows nothing of plans or ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from attnspan.assumptions import Assumption
from attnspan.errors import AttentionError, AttnspanError

INSTEAD = "use backward(), or torch.autograd.grad(...) without create_graph"


def check_untransformed(
    what: str, *tensors: Tensor | None, instead: str = INSTEAD, error: type[AttnspanError] = AttentionError
) -> None:
    """Refuse tensors of torch.func's transforms, and those with tangents."""
    if torch.compiler.is_compiling():  # which follows this code, and cannot look at a tensor
        if _inside():
            raise error(_transformed(what, instead))
        return
    WRAPPED.verify()
    # Autograd around a transform cannot record what is inside of it.
    records = _inside() and torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (_is_wrapped(tensor) or (records and tensor.requires_grad)):
            raise error(_transformed(what, instead))
    check_no_tangents(what, *tensors, instead=instead, error=error)


def check_no_transform(what: str) -> None:
    """Refuse to begin an autograd function of ours inside a transform of torch.func, whatever its tensors are."""
    if _inside():
        raise AttentionError(_transformed(what, INSTEAD))


def check_no_tangents(
    what: str, *tensors: Tensor | None, instead: str = INSTEAD, error: type[AttnspanError] = AttentionError
) -> None:
    """Refuse tensors with tangents of forward-mode AD, wherever an op runs."""
    for tensor in tensors:
        if tensor is not None and tensor.is_floating_point() and unpack_dual(tensor).tangent is not None:
            raise error(f"{what} has no forward-mode derivative, and a tensor with a tangent came in; {instead}")


def _inside() -> bool:
    """Whether a transform of torch.func is on, in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# What torch.compiler.assume_constant_result does, which would import all of dynamo to say so. Compiled code is guarded
# on the transforms around it, and those inside of it are on while it is followed.
vars(_inside)["_dynamo_marked_constant"] = True


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is that of a transform, or of torch.autograd.grad(..., is_grads_batched=True)."""
    torchs: Any = torch._C._functorch
    return bool(torchs.is_functorch_wrapped_tensor(tensor) or torchs.is_legacy_batchedtensor(tensor))


def _transformed(what: str, instead: str) -> str:
    return f"{what} cannot run inside torch.func's grad, vjp, jvp, jacrev, jacfwd, hessian or vmap; {instead}"


def _transforms_are_seen() -> bool:
    """A transform of one element, as torch.func begins it: that module takes seconds to import."""
    torchs: Any = torch._C._functorch
    plain, before = torch.ones(1, device="cpu"), _inside()
    level = torchs._grad_increment_nesting()
    try:
        wrapped = torchs._wrap_for_grad(plain, level)
        inside = _is_wrapped(wrapped) and _inside()
    finally:
        torchs._grad_decrement_nesting()
    return inside and not before and not _is_wrapped(plain)


WRAPPED = Assumption(
    "torch.func's tensors are told from plain ones",
    "attention/transforms.py",
    "`torch._C._functorch`: `is_functorch_wrapped_tensor`, `is_legacy_batchedtensor`, `peek_interpreter_stack`",
    _transforms_are_seen,
)

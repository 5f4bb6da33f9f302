"""Attention has first derivatives in reverse mode. All other derivatives are refused with an error.

torch does not always raise if an op lacks a derivative: forward mode (``torch.func.jvp``, ``jacfwd``,
``torch.autograd.forward_ad``) treats a missing one as zero. Forward mode would need an exchange of tangents between
ranks. So::

    backward, also under compiled autograd               supported
    forward mode                                         refused: tangents would be dropped silently
    torch.func.grad, vjp, jacrev, hessian, vmap          refused: torch's own error would not name the cause
    create_graph=True, then a second backward            refused in the second backward

The op checks for tangents as well when it runs, since compiled code calls it directly.
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
    """Refuse tensors inside torch.func's transforms, and tensors with tangents."""
    if torch.compiler.is_compiling():  # dynamo traces this code, and cannot inspect a tensor
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
    """Refuse to start an autograd function of this library inside a transform of torch.func."""
    if _inside():
        raise AttentionError(_transformed(what, INSTEAD))


def check_no_tangents(
    what: str, *tensors: Tensor | None, instead: str = INSTEAD, error: type[AttnspanError] = AttentionError
) -> None:
    """Refuse tensors with tangents of forward-mode AD; also called by ops."""
    for tensor in tensors:
        if tensor is not None and tensor.is_floating_point() and unpack_dual(tensor).tangent is not None:
            raise error(f"{what} has no forward-mode derivative, and a tensor with a tangent came in; {instead}")


def _inside() -> bool:
    """Whether a transform of torch.func is active in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# As torch.compiler.assume_constant_result does, without importing dynamo. Compiled code is guarded on the transforms
# around it, and transforms inside it are active while it is traced.
vars(_inside)["_dynamo_marked_constant"] = True


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is that of a transform, or of torch.autograd.grad(..., is_grads_batched=True)."""
    torchs: Any = torch._C._functorch
    return bool(torchs.is_functorch_wrapped_tensor(tensor) or torchs.is_legacy_batchedtensor(tensor))


def _transformed(what: str, instead: str) -> str:
    return f"{what} cannot run inside torch.func's grad, vjp, jvp, jacrev, jacfwd, hessian or vmap; {instead}"


def _transforms_are_seen() -> bool:
    """Whether a transform of one element is seen; started as torch.func does, whose import takes seconds."""
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

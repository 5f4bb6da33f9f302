"""`flex_cp_allgather`: keys and values of all ranks, rank after rank; a custom op, as torch's is.

Backward sums over ranks what belongs to each.

[Note: two ways in] torch.compile is told the shapes of results before anything runs, and no rank knows how many tokens
the others hold. So the op, which is what compiled code and dispatch modes see, is for ranks that hold equal numbers of
tokens, and refuses others when it runs. Eager code does not go through the op: there, ranks may hold any numbers.

[Note: names of groups] An op takes the name of a process group. Eager code may pass the group itself, a mesh or a
virtual world.

Shapes: k and v have the sequence in `seq_dim`; all other dims are free.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import CustomOpDef, infer_schema

from attnspan.errors import AttentionError, ShardError
from attnspan.parallel.moves import GatheredTokens, SummedTokens
from attnspan.torch_compat.ranks import ranks_of
from attnspan.transports import Transport
from attnspan.transports.consensus import all_gather_object


class Allgather(CustomOpDef):
    """The op. Called by eager code on plain tensors, it is not an op: see [Note: two ways in]."""

    def __call__(self, k: Tensor, v: Tensor, seq_dim: int, pg_name: Any) -> Any:
        if torch.compiler.is_compiling() or not _plain(k, v):
            if not isinstance(pg_name, str):
                raise AttentionError(
                    f"pg_name must be the name of a process group under torch.compile, got {type(pg_name).__name__}; "
                    "pass mesh.get_group().group_name"
                )
            return super().__call__(k, v, seq_dim, pg_name)  # type: ignore[no-untyped-call]
        transport = _transport(pg_name)
        sizes = _sizes(k, v, seq_dim, transport)
        return tuple(_gathered(x, seq_dim, transport, sizes) for x in (k, v))


def _forward(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    transport = _transport(pg_name)
    sizes = _sizes(k, v, seq_dim, transport)
    if len(set(sizes)) > 1:
        raise ShardError(
            f"k and v must have as many tokens on every rank under torch.compile, got {sizes}, by rank; cut a length "
            "that ranks divide, or leave flex_cp_allgather out of the compiled code"
        )
    return _gathered(k, seq_dim, transport, sizes), _gathered(v, seq_dim, transport, sizes)


def _backward(grad_full_k: Tensor, grad_full_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    transport = _transport(pg_name)
    tokens, rest = divmod(grad_full_k.shape[seq_dim], transport.ranks)
    if rest or grad_full_v.shape[seq_dim] != grad_full_k.shape[seq_dim]:
        raise ShardError(
            f"gradients must have as many tokens for each of {transport.ranks} ranks in dim {seq_dim}, got shapes "
            f"{tuple(grad_full_k.shape)} and {tuple(grad_full_v.shape)}"
        )
    sizes = [tokens] * transport.ranks
    return _summed(grad_full_k, seq_dim, transport, sizes), _summed(grad_full_v, seq_dim, transport, sizes)


def _op(name: str, fn: Any, kind: type[CustomOpDef] = CustomOpDef) -> CustomOpDef:
    """A custom op of a kind; `torch.library.custom_op` makes plain ones alone."""
    op = kind("attnspan", name, infer_schema(fn, mutates_args=()), fn)
    op.register_kernel(None)(fn)
    return op


flex_cp_allgather = _op("flex_cp_allgather", _forward, Allgather)
flex_cp_allgather_backward = _op("flex_cp_allgather_backward", _backward)


@flex_cp_allgather.register_fake
def _(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    ranks = _ranks(pg_name)
    return _resized(k, seq_dim, k.shape[seq_dim] * ranks), _resized(v, seq_dim, v.shape[seq_dim] * ranks)


@flex_cp_allgather_backward.register_fake
def _(grad_full_k: Tensor, grad_full_v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    ranks = _ranks(pg_name)
    own_k, own_v = (_resized(x, seq_dim, x.shape[seq_dim] // ranks) for x in (grad_full_k, grad_full_v))
    return own_k, own_v


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.where = inputs[2:]


flex_cp_allgather.register_autograd(
    lambda ctx, *grads: (*flex_cp_allgather_backward(*grads, *ctx.where), None, None), setup_context=_save
)
flex_cp_allgather_backward.register_autograd(
    lambda ctx, *grads: (*CustomOpDef.__call__(flex_cp_allgather, *grads, *ctx.where), None, None), setup_context=_save
)


# ---- one tensor ----------------------------------------------------------------------------------------------------


def _plain(*tensors: Tensor) -> bool:
    """Whether these are plain tensors, and no dispatch mode is on that traces them."""
    kinds = {type(tensor) for tensor in tensors}
    return kinds <= {Tensor, torch.nn.Parameter} and not torch._C._len_torch_dispatch_stack()


def _transport(group: Any) -> Transport:
    return ranks_of(_named(group) if isinstance(group, str) else group).transport


def _named(name: Any) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def _ranks(name: Any) -> int:
    return _named(name).size()


def _sizes(k: Tensor, v: Tensor, seq_dim: int, transport: Transport) -> list[int]:
    if k.shape[seq_dim] != v.shape[seq_dim]:
        raise ShardError(
            f"k and v must have as many tokens in dim {seq_dim}, got shapes {tuple(k.shape)} and {tuple(v.shape)}"
        )
    return all_gather_object(transport, k.shape[seq_dim], "the number of keys")


def _gathered(tensor: Tensor, dim: int, transport: Transport, sizes: list[int]) -> Tensor:
    whole = GatheredTokens.apply(tensor.movedim(dim, 0), transport, sizes, f"flex_cp_allgather of {sizes}")
    return _own(whole.movedim(0, dim), tensor)


def _summed(tensor: Tensor, dim: int, transport: Transport, sizes: list[int]) -> Tensor:
    name = f"gradients of flex_cp_allgather of {sizes}"
    return _own(SummedTokens.apply(tensor.movedim(dim, 0), transport, sizes, name).movedim(0, dim), tensor)


def _own(tensor: Tensor, given: Tensor) -> Tensor:
    """Contiguous, as the op says of its results; and no input, as the results of an op must be."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() == given.data_ptr() and tensor.numel() else tensor


def _resized(tensor: Tensor, dim: int, tokens: Any) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = tokens
    return tensor.new_empty(shape)

"""Checks the inputs of a compiled model against the session in use when the code runs.

torch.compile traces a model once, with fake tensors; which batch a tensor is a shard of is only
known at run time. So the comparison is an op in the graph, on the tensors themselves and on a handle of the sharding
([Note: handles] in attention/handles.py). An op whose result is unused would be eliminated, so the model goes on with a
copy of the input: the tokens of a batch, once per pass.

Knows nothing of modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from attnspan.attention.handles import object_of

if TYPE_CHECKING:
    from attnspan.parallel.sharding import Sharding

GONE = "the session that the model was compiled with is gone; keep it, or use() another"


def checked_inputs(sharding: Sharding, given: object) -> Any:
    """What a model is given, each tensor compared when the code runs. Followed by torch.compile."""
    if type(given) is Tensor:
        return compared(given, sharding.handle)
    if type(given) is tuple:
        return tuple(checked_inputs(sharding, each) for each in given)
    if type(given) is list:
        return [checked_inputs(sharding, each) for each in given]
    if type(given) is dict:
        return {name: checked_inputs(sharding, each) for name, each in given.items()}
    return given


@torch.library.custom_op("attnspan::compared", mutates_args=())
def compared(tensor: Tensor, handle: Tensor) -> Tensor:
    cast("Sharding", object_of(handle, GONE)).check_batch(tensor)
    return tensor.clone(memory_format=torch.preserve_format)


@compared.register_fake
def _(tensor: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _back(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


compared.register_autograd(_back)

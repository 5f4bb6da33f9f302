"""torch's experimental context parallelism, by its own names: change the import, keep the program.

>>> import torch
>>> import torch.nn.functional as F
>>> from attnspan.testing import loopback
>>> from attnspan.torch_compat import context_parallel, context_parallel_unshard
>>> whole = torch.randn(3, 1, 2, 7, 8)
>>> def rank(mesh):  # a DeviceMesh, on a cluster
...     query, key, value = whole.clone().unbind()
...     with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
...         out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
...         return context_parallel_unshard(mesh, [out], [2])[0]
>>> expected = F.scaled_dot_product_attention(*whole, is_causal=True)
>>> [torch.allclose(out, expected, atol=1e-6) for out in loopback(ranks=2).run(rank)]
[True, True]

The names, signatures and meaning are those of `torch.distributed.tensor.experimental` and its `_attention` and
`_load_balancer` modules; what is wrong there is right here, and docs/torch_compat.md says where. New programs are
better off with `ContextParallel`, which has no state outside of itself. The layers: options (torch's globals, read
once), balancers (orders of a sequence), sdpa, ranks (what a mesh remembers), then sharding, context, allgather, style
and ring.
"""

from attnspan.torch_compat.allgather import flex_cp_allgather, flex_cp_allgather_backward
from attnspan.torch_compat.balancers import (
    _create_default_load_balancer,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from attnspan.torch_compat.context import context_parallel
from attnspan.torch_compat.flex import _create_cp_block_mask
from attnspan.torch_compat.options import (
    _CausalBehavior,
    _ContextParallelOptions,
    _cp_options,
    _is_causal_behavior,
    _RotateMethod,
    set_rotate_method,
)
from attnspan.torch_compat.paged_attention import PagedAttention
from attnspan.torch_compat.ring import _templated_ring_attention, _templated_ring_attention_backward
from attnspan.torch_compat.sharding import (
    CPBuffer,
    CPBufferContainer,
    CPBufferSeqDims,
    _context_parallel_shard,
    context_parallel_unshard,
)
from attnspan.torch_compat.style import (
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
)

__all__ = [
    "CPBuffer",
    "CPBufferContainer",
    "CPBufferSeqDims",
    "PagedAttention",
    "_CausalBehavior",
    "_ContextParallel",
    "_ContextParallelOptions",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_create_cp_block_mask",
    "_create_default_load_balancer",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "_templated_ring_attention",
    "_templated_ring_attention_backward",
    "context_parallel",
    "context_parallel_unshard",
    "flex_cp_allgather",
    "flex_cp_allgather_backward",
    "set_rotate_method",
]

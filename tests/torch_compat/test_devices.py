"""torch's names on a CUDA device as on a CPU, over virtual ranks; its PagedAttention with compiled flex_attention."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnspan.testing import loopback
from attnspan.torch_compat import (
    _context_parallel_shard,
    _ContextParallel,
    _create_cp_block_mask,
    _HeadTailLoadBalancer,
    context_parallel,
    context_parallel_unshard,
)
from attnspan.torch_compat.paged_attention import PagedAttention
from tests.devices import on_every_device
from tests.torch_compat.harness import alone, close, whole
from tests.torch_compat.test_flex import FLEX, Flex, alibi
from tests.torch_compat.test_flex import alone as flex_alone


@on_every_device
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("ranks", "length"), [(1, 5), (3, 20), (4, 3), (2, 301)])
def test_attention_in_a_context_is_that_of_one_device(ranks, length, is_causal, device):
    expected = alone(length, is_causal, heads=4, kv_heads=2)

    def rank(mesh):
        buffers = [x.to(device) for x in whole(length, heads=4, kv_heads=2)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            leaves = [x.detach().requires_grad_() for x in buffers]
            out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
            (out**2).sum().backward()
            return [x.cpu() for x in context_parallel_unshard(mesh, [out.detach(), *(x.grad for x in leaves)], [2] * 4)]

    for found in loopback(ranks, device).run(rank):
        assert close(found, expected)


LENGTH, DOCUMENTS = 300, [[100, 40, 160], [30, 200, 70]]


@on_every_device
@pytest.mark.parametrize("score_mod", [None, alibi], ids=["plain", "scored"])
def test_flex_attention_of_a_styled_module(score_mod, device):
    true = flex_alone(score_mod)
    ids = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in DOCUMENTS]).to(device)

    def document(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    def rank(mesh):
        balancer = _HeadTailLoadBalancer(LENGTH, 2, device)
        module = _ContextParallel(2, FLEX)._apply(Flex(score_mod), mesh)
        part = _create_cp_block_mask(document, 2, 1, LENGTH, LENGTH, mesh, balancer)
        # FlexAttention's kernels know no float64 and no fewer than 16 numbers a head.
        tensors = [F.pad(x, (0, 8)).to(device, torch.float32) for x in whole(LENGTH)]
        tensors[0] = tensors[0] * 2**0.5  # a scale by 16 numbers where 8 are meant
        shards = _context_parallel_shard(mesh, tensors, [2] * 3, balancer)
        leaves = [x.detach().requires_grad_() for x in shards]
        out = module(*leaves, block_mask=part)
        grads = torch.autograd.grad((out**2).sum(), leaves)
        found = [context_parallel_unshard(mesh, [x.detach()], [2], balancer)[0] for x in (out, *grads)]
        found[1] = found[1] * 2**0.5
        return [x[..., :8].double().cpu() for x in found]

    for found in loopback(2, device).run(rank):
        for one, other in zip(found, true, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # float32, sums of 200 keys


@pytest.mark.cuda
def test_pages_are_read_by_compiled_flex_attention():
    size, heads, dim, lengths = 128, 2, 64, [200, 37, 300]
    cache = PagedAttention(12, size, 4, device="cuda")
    k, v = torch.zeros(2, 1, heads, 12 * size, dim, device="cuda", dtype=torch.bfloat16).unbind()
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 1, heads, n, dim, generator=drawn).to("cuda", torch.bfloat16) for n in lengths]
    for row, (key, value) in enumerate(rows):
        at = torch.tensor([row], device="cuda")
        cache.reserve(at, torch.tensor([lengths[row]], device="cuda"))
        cache.assign(at, torch.arange(lengths[row], device="cuda").unsqueeze(0), key, value, k, v)
    order = [2, 0]  # of which torch's own would read the masks of rows 0 and 1
    limit = torch.tensor([lengths[row] for row in order], device="cuda")
    logical = create_block_mask(lambda b, h, q, kv: kv < limit[b], 2, 1, 1, 384, "cuda", BLOCK_SIZE=size)
    mask = cache.convert_logical_block_mask(logical, torch.tensor(order, device="cuda"))
    q = torch.randn(2, 2 * heads, 1, dim, generator=drawn).to("cuda", torch.bfloat16)
    torch._dynamo.reset()
    out = torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=mask, enable_gqa=True)
    for place, row in enumerate(order):
        query, key, value = (x.double() for x in (q[place : place + 1], *rows[row]))
        true = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        torch.testing.assert_close(out[place : place + 1].double(), true, rtol=0.02, atol=0.02)  # 8 bits

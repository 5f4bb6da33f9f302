"""torch's FlexAttention names: any length and load balancer, exact with global positions, gradients on the CPU too."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnspan.errors import AttentionError
from attnspan.testing import loopback
from attnspan.torch_compat import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _create_cp_block_mask,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel,
    context_parallel_unshard,
    flex_cp_allgather,
    set_rotate_method,
)
from tests.devices import here, mesh_of
from tests.processes import on_backends, spawn
from tests.torch_compat.harness import on_ranks, whole
from tests.turns import in_turn

FLEX = _ContextParallel.AttentionType.FLEX
LENGTH, BATCH, HEADS = 300, 2, 2
DOCUMENTS = [[100, 40, 160], [30, 200, 70]]
IDS = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in DOCUMENTS])


def document(b, h, q_idx, kv_idx):
    return (IDS[b, q_idx] == IDS[b, kv_idx]) & (q_idx >= kv_idx)


def alibi(score, b, h, q_idx, kv_idx):
    return score - 0.01 * (h + 1) * (q_idx - kv_idx)


def block_mask(size=128):
    device = torch.get_default_device()
    return create_block_mask(document, BATCH, None, LENGTH, LENGTH, device=device, BLOCK_SIZE=size)


def alone(score_mod=None):
    """Output and gradients of one device, written out, for the loss `(out ** 2).sum()`."""
    query, key, value = (x.requires_grad_() for x in whole(LENGTH))
    indices = [torch.arange(n).reshape(-1, *[1] * (3 - dim)) for dim, n in enumerate((BATCH, HEADS, LENGTH, LENGTH))]
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores if score_mod is None else score_mod(scores, *indices)
    out = scores.masked_fill(~document(*indices), -torch.inf).softmax(-1) @ value
    return [out.detach(), *torch.autograd.grad((out**2).sum(), (query, key, value))]


def close(found, true):
    """float64: what is left is the order of sums."""
    torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-10)


class Flex(nn.Module):
    """As programs wrap it."""

    def __init__(self, score_mod=None):
        super().__init__()
        self.score_mod = score_mod

    def forward(self, query, key, value, block_mask=None):
        return flex_attention(query, key, value, score_mod=self.score_mod, block_mask=block_mask)


BALANCERS = {
    "spans": lambda ranks: None,
    "head-tail": lambda ranks: _HeadTailLoadBalancer(LENGTH, ranks, "cpu"),
    "per document": lambda ranks: _PerDocumentHeadTailLoadBalancer(DOCUMENTS[:1], ranks, "cpu"),
    "per document and row": lambda ranks: _PerDocumentHeadTailLoadBalancer([[100, 200], [140, 160]], ranks, "cpu"),
    "PTRR": lambda ranks: _PTRRLoadBalancer(block_mask(), ranks),
}


@pytest.mark.parametrize(("name", "score_mod"), in_turn(BALANCERS, [None, alibi]))
def test_a_styled_module_is_one_devices_with_any_load_balancer(name, score_mod):
    true = alone(score_mod)

    def rank(mesh):
        balancer = BALANCERS[name](2)
        module = _ContextParallel(2, FLEX)._apply(Flex(score_mod), mesh)
        buffers = [*whole(LENGTH), block_mask()]
        *tensors, part = _context_parallel_shard(mesh, buffers, [2, 2, 2, 2], balancer)
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = module(*leaves, block_mask=part)
        grads = torch.autograd.grad((out**2).sum(), leaves)
        for found, expected in zip([out.detach(), *grads], true, strict=True):
            close(context_parallel_unshard(mesh, [found], [2], balancer)[0], expected)

    on_ranks(2, rank)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_a_made_mask_goes_with_its_load_balancer(method):
    true = alone(alibi)[0]

    def rank(mesh):
        set_rotate_method(method)
        balancer = _HeadTailLoadBalancer(LENGTH, 3, "cpu")
        module = _ContextParallel(2, FLEX)._apply(Flex(alibi), mesh)
        part = _create_cp_block_mask(document, BATCH, 1, LENGTH, LENGTH, mesh, balancer)
        tensors = _context_parallel_shard(mesh, whole(LENGTH), [2] * 3, balancer)
        out = module(*tensors, block_mask=part)
        close(context_parallel_unshard(mesh, [out], [2], balancer)[0], true)

    on_ranks(3, rank)


def test_the_default_order_is_that_of_a_context():
    """Without a load balancer a mask is made for the order that `context_parallel` cuts in."""
    true = alone(alibi)[0]

    def rank(mesh):
        tensors = whole(LENGTH)
        part = _create_cp_block_mask(document, BATCH, 1, LENGTH, LENGTH, mesh)
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
            out = flex_attention(*tensors, score_mod=alibi, block_mask=part)
            close(context_parallel_unshard(mesh, [out], [2])[0], true)

    on_ranks(2, rank)


def test_a_mask_for_another_order_is_refused():
    def rank(mesh):
        module = _ContextParallel(2, FLEX)._apply(Flex(), mesh)
        part = _create_cp_block_mask(document, BATCH, 1, LENGTH, LENGTH, mesh)  # head-tail
        tensors = _context_parallel_shard(mesh, whole(LENGTH), [2] * 3)  # spans
        match = (
            r"^block_mask was made for 300 tokens in HeadTail\(ranks=2\), and 300 lie in Contiguous\(ranks=2\); give"
        )
        with pytest.raises(AttentionError, match=match):
            module(*tensors, block_mask=part)

    on_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        "head-tail",
        "per document and row",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("spans", "per document", "PTRR")),
    ],
)
def test_by_itself_a_part_fits_gathered_keys(name):
    true = alone()[0]

    def rank(mesh):
        balancer = BALANCERS[name](2)
        buffers = [*whole(LENGTH), block_mask((64, 32))]
        query, key, value, part = _context_parallel_shard(mesh, buffers, [2] * 4, balancer)
        keys, values = flex_cp_allgather(key, value, 2, mesh)
        (expected,) = _context_parallel_shard(mesh, [true], [2], balancer)
        return query, keys, values, part, expected

    for query, keys, values, part, expected in on_ranks(2, rank):  # torch's is not for two threads at once
        assert part.BLOCK_SIZE == (64, 32)
        close(flex_attention(query, keys, values, block_mask=part), expected)


def test_a_part_lists_the_blocks_that_torch_would():
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([70, 300, 142]))

    def packed(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    def rank(mesh):
        return _create_cp_block_mask(packed, 1, 1, 512, 512, mesh, _HeadTailLoadBalancer(512, 2, "cpu"))

    order = _HeadTailLoadBalancer(512, 2, "cpu")._generate_indices()[0].long()
    for r, part in enumerate(on_ranks(2, rank)):
        own = order[r * 256 : (r + 1) * 256]
        made = create_block_mask(
            lambda b, h, i, j, own=own: packed(b, h, own[i], order[j]), 1, 1, 256, 512, device="cpu"
        )
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(part, name), getattr(made, name)), name
        assert torch.equal(part.to_dense(), made.to_dense())


def test_gathering_has_the_gradient_of_a_sum_over_ranks():
    def rank(mesh):
        tokens = 2 + mesh.rank
        key = torch.full((1, 1, tokens, 1), float(mesh.rank), requires_grad=True)
        keys, values = flex_cp_allgather(key, 2 * key, 2, mesh)
        (keys.sum() * (mesh.rank + 1) + values.sum()).backward()
        return keys.flatten().tolist(), key.grad.flatten().tolist()

    for r, (keys, grad) in enumerate(loopback(2).run(rank)):
        assert keys == [0.0, 0.0, 1.0, 1.0, 1.0]
        assert grad == [1 + 2 + 2 * 2.0] * (2 + r)


def test_a_styled_module_compiles_whole_and_other_masks_do_not_compile_anew():
    torch._dynamo.reset()
    true = alone()[0]

    def rank(mesh):
        module = _ContextParallel(2, FLEX)._apply(Flex(), mesh)
        counter = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(module, fullgraph=True, backend=counter)
        for _ in range(3):
            *tensors, part = _context_parallel_shard(mesh, [*whole(LENGTH), block_mask()], [2] * 4)
            close(fast(*tensors, block_mask=part), true)
        assert counter.frame_count == 1

    on_ranks(1, rank)
    torch._dynamo.reset()


def _on_process(world):
    global IDS
    IDS = here(IDS)  # what `document` looks into
    mesh = mesh_of(world.ranks)
    _cp_options.enable_load_balance = True
    balancer = _PTRRLoadBalancer(block_mask(), world.ranks)
    module = _ContextParallel(2, FLEX)._apply(Flex(alibi), mesh)
    *tensors, part = _context_parallel_shard(mesh, [*whole(LENGTH), block_mask()], [2] * 4, balancer)
    out = module(*tensors, block_mask=part)
    key, _ = flex_cp_allgather(tensors[1], tensors[2], 2, mesh.get_group().group_name)
    assert key.shape[2] == LENGTH
    return context_parallel_unshard(mesh, [out], [2], balancer)[0]


@on_backends(2, nccl=(2, 3))
def test_it_is_exact_on_real_processes(ranks, backend):
    true = alone(alibi)[0]
    for found in spawn(ranks, _on_process, backend=backend):
        close(found, true)


@pytest.mark.parametrize("arguments", [("balancer", 64), (64, "balancer"), ("balancer", (64, 32)), ((64, 32),), ()])
def test_a_block_size_may_stand_on_either_side_of_the_load_balancer(arguments):
    """torch 2.15 has it by place; torch 2.13 does not have it."""

    def rank(mesh):
        balancer = _HeadTailLoadBalancer(LENGTH, 2, "cpu")
        given = [balancer if each == "balancer" else each for each in arguments]
        part = _create_cp_block_mask(document, BATCH, 1, LENGTH, LENGTH, mesh, *given)
        (query,) = _context_parallel_shard(mesh, whole(LENGTH)[:1], [2], balancer)
        order = balancer._generate_indices()[0]
        own = torch.arange(LENGTH).view(1, -1)
        (own,) = _context_parallel_shard(mesh, [own], [1], balancer)
        every = torch.arange(BATCH)[:, None, None], 0, own[0][:, None], order[None, :]
        asked = torch.arange(BATCH)[:, None, None], torch.tensor(0), torch.arange(query.shape[2])[:, None]
        assert torch.equal(part.mask_mod(*asked, torch.arange(LENGTH)[None, :]), document(*every))
        return part.BLOCK_SIZE

    size = next((each for each in arguments if each != "balancer"), 128)
    assert on_ranks(2, rank) == [size if isinstance(size, tuple) else (size, size)] * 2


def test_two_block_sizes_are_refused():
    def rank(mesh):
        with pytest.raises(AttentionError, match="load_balancer and BLOCK_SIZE must be one of each"):
            _create_cp_block_mask(document, BATCH, 1, LENGTH, LENGTH, mesh, 64, 32)
        with pytest.raises(AttentionError, match=r"BLOCK_SIZE must be a whole number or two, got \(1, 2, 3\)"):
            _create_cp_block_mask(document, BATCH, 1, LENGTH, LENGTH, mesh, None, (1, 2, 3))

    on_ranks(1, rank)

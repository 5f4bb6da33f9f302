"""torch's hooks of `_ContextParallel`, as programs register them, and the kinds of errors that programs catch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import flex_attention

from attnspan.errors import AttnspanError
from attnspan.masks import Causal
from attnspan.torch_compat import (
    _context_parallel_shard,
    _ContextParallel,
    _create_cp_block_mask,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from attnspan.torch_compat.style import SequenceShard
from tests.devices import mesh_of
from tests.processes import on_backends, spawn
from tests.torch_compat.harness import alone, close, on_ranks, whole

SDPA, FLEX = _ContextParallel.AttentionType.SDPA, _ContextParallel.AttentionType.FLEX


class Inner(nn.Module):
    def forward(self, query, key, value, is_causal=True):
        out = F.scaled_dot_product_attention(query.transpose(1, 2).transpose(1, 2), key, value, is_causal=is_causal)
        return out * 1, out


def hooked(style, module, mesh):
    """As torch's `_apply` registers them."""
    module.register_forward_pre_hook(functools.partial(style.sdpa_input_fn, mesh=mesh), with_kwargs=True)
    module.register_forward_hook(functools.partial(style.sdpa_output_fn, mesh=mesh))
    return module


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_module_with_torchs_hooks_attends_to_all_ranks(is_causal, named):
    expected = alone(13, is_causal)

    def run(mesh):
        module = hooked(_ContextParallel(2, SDPA), Inner(), mesh)
        parts = _context_parallel_shard(mesh, whole(13), [2] * 3, _HeadTailLoadBalancer(13, mesh.ranks, "cpu"))
        leaves = [x.detach().requires_grad_() for x in parts]
        if named:
            out, same = module(leaves[0], key=leaves[1], value=leaves[2], is_causal=is_causal)
        else:
            out, same = module(*leaves, is_causal=is_causal)
        assert {type(out), type(same)} == {torch.Tensor}
        (out**2).sum().backward()
        return context_parallel_unshard(mesh, [out.detach(), *(x.grad for x in leaves)], [2] * 4)

    assert all(close(found, expected) for found in on_ranks(3, run))


def test_what_is_no_attention_is_as_of_a_plain_tensor():
    def run(mesh):
        plain = torch.arange(6.0).view(1, 1, 3, 2)
        shard = SequenceShard.of(plain, mesh)
        assert torch.equal((shard @ shard.mT).sum(-1).as_subclass(torch.Tensor), (plain @ plain.mT).sum(-1))
        (same,) = _ContextParallel(2, SDPA).sdpa_output_fn(None, None, [shard], mesh)
        assert type(same) is torch.Tensor
        return same.data_ptr() == plain.data_ptr()

    assert on_ranks(1, run) == [True]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("given", [0, 1, 3])
def test_flex_attention_with_gathered_keys(given):
    expected = alone(256)[0]

    def run(mesh):
        tensors = _context_parallel_shard(mesh, whole(256), [2] * 3, _HeadTailLoadBalancer(256, 2, "cpu"))
        part = _create_cp_block_mask(Causal().mask_mod(), 1, 1, 256, 256, mesh)
        kwargs = dict(zip(("query", "key", "value"), tensors, strict=True))
        for name in list(kwargs)[:given]:
            del kwargs[name]
        args, kwargs = _ContextParallel(2, FLEX).flex_input_fn(None, tuple(tensors[:given]), kwargs, mesh)
        return context_parallel_unshard(mesh, [flex_attention(*args, **kwargs, block_mask=part)], [2])

    assert all(close(found, [expected]) for found in on_ranks(2, run))


# ---- kinds of errors -----------------------------------------------------------------------------------------------


class Flat:
    def _generate_indices(self, restore=False):
        return torch.arange(8)


def attending(**arguments):
    def run(mesh):
        query, key, value = whole(8)
        with context_parallel(mesh, buffers=[query], buffer_seq_dims=[2]):
            part = slice(0, 3 if arguments.get("is_causal") else 4)  # of 4 on each of 2 ranks
            F.scaled_dot_product_attention(query, key[:, :, part], value[:, :, part], **arguments)

    return run


def computed(mesh):
    with context_parallel(mesh, buffers=[torch.ones(8, requires_grad=True) * 2], buffer_seq_dims=[0]):
        pass


CAUGHT = {
    "a rotate method": (NotImplementedError, lambda mesh: set_rotate_method("ring")),
    "a mask": (NotImplementedError, attending(attn_mask=torch.ones(4, 4, dtype=torch.bool))),
    "causal over other keys": (NotImplementedError, attending(is_causal=True)),
    "tasks": (NotImplementedError, lambda mesh: _PTRRLoadBalancer.ptrr_scheduling(torch.arange(3), 2)),
    "tasks in two dims": (AssertionError, lambda mesh: _PTRRLoadBalancer.ptrr_scheduling(torch.ones(2, 2), 2)),
    "indices in one dim": (AssertionError, lambda mesh: _context_parallel_shard(mesh, [torch.ones(8)], [0], Flat())),
    "two devices": (
        AssertionError,
        lambda mesh: _context_parallel_shard(mesh, [torch.ones(8), torch.ones(8, device="meta")], [0, 0]),
    ),
    "a computed buffer": (RuntimeError, computed),
    "flex_attention of no tensor": (
        AssertionError,
        lambda mesh: _ContextParallel(2, FLEX).flex_input_fn(None, (torch.ones(1, 1, 4, 8), None), {}, mesh),
    ),
    "a mask where a rank has no tokens": (
        NotImplementedError,
        lambda mesh: _create_cp_block_mask(Causal().mask_mod(), 1, 1, 1, 1, mesh),
    ),
    "a mask over other keys": (
        NotImplementedError,
        lambda mesh: _create_cp_block_mask(Causal().mask_mod(), 1, 1, 256, 128, mesh),
    ),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_refusal_is_also_what_torch_raises(name):
    error, run = CAUGHT[name]
    with pytest.raises(error) as caught:
        on_ranks(2, run)
    assert isinstance(caught.value, AttnspanError)


def test_indices_of_one_batch_row():
    ours = _PerDocumentHeadTailLoadBalancer([[8, 8]], 2, "cpu")
    assert ours._generate_indices_for_batch([8], False).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert ours._generate_indices_for_batch([8], True).tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    assert torch.equal(ours._generate_indices_for_batch([8, 8], False), ours._generate_indices()[0])


def _on_process(world):
    mesh = mesh_of(2)
    style, query = _ContextParallel(2, SDPA), whole(8)[0]
    (own,) = _context_parallel_shard(mesh, [query], [2])
    placed = style.sdpa_input_fn(None, (distribute_tensor(query, mesh, [Shard(2)]),), {"scale": None}, mesh)
    assert torch.equal(placed[0][0].as_subclass(torch.Tensor), own)
    assert placed[1] == {"scale": None}
    try:
        style.sdpa_input_fn(None, (distribute_tensor(query, mesh, [Replicate()]),), {}, mesh)
    except AssertionError as refused:
        return str(refused)


@on_backends(2)
def test_dtensors_are_taken_as_shards(ranks, backend):
    for said in spawn(ranks, _on_process, backend=backend):
        assert said.startswith("a DTensor must be Shard(2), got (Replicate(),)")


def test_simulated_ranks_are_refused():
    """Each was taken for rank 0."""
    from torch.distributed._local_tensor import LocalTensorMode

    says = "LocalTensorMode is not served: every rank it stands for would be taken for one"
    with LocalTensorMode(2), pytest.raises(NotImplementedError, match=says):
        _context_parallel_shard(None, [torch.arange(8)], [0])

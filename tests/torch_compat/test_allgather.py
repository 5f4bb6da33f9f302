"""`flex_cp_allgather` is a custom op: torch.compile follows it whole, and torch's own checks of ops pass."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from attnspan.errors import ShardError
from attnspan.torch_compat import flex_cp_allgather, flex_cp_allgather_backward
from tests.devices import here, mesh_of
from tests.processes import on_backends, spawn
from tests.torch_compat.harness import on_ranks


def keys(seed, tokens=4, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    drawn = here(torch.randn(2, 2, 3, tokens, 5, dtype=torch.float64, generator=generator, device="cpu"))
    return [x.requires_grad_(requires_grad) for x in drawn.unbind()]


def trained(gather, name, tokens=4):
    """Everybody's keys and values, and the gradients of a loss that weighs every token differently on every rank."""
    k, v = keys(dist.get_rank(), tokens)
    whole = gather(k, v, 2, name)
    weights = torch.arange(whole[0].numel(), dtype=torch.float64).view_as(whole[0]) * (dist.get_rank() + 1)
    grads = torch.autograd.grad((whole[0] * weights).sum() + (whole[1] ** 2).sum(), (k, v))
    return [x.detach() for x in (*whole, *grads)]


def _on_process(world):
    rank = world.rank
    name = mesh_of(2).get_group().group_name
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The .grad attribute of a Tensor that is not a leaf"
        )  # opcheck's own, in 2.15
        opcheck(flex_cp_allgather, (*keys(rank), 2, name))
    quick = ("test_schema", "test_faketensor")  # a tenth of the time: tracing is seen below
    opcheck(flex_cp_allgather, (*keys(rank, requires_grad=False), 2, name), test_utils=quick)
    opcheck(flex_cp_allgather_backward, (*keys(rank), 2, name), test_utils=quick)
    torch._dynamo.reset()
    whole_graph = torch.compile(
        lambda k, v, dim, name: flex_cp_allgather(k, v, dim, name), fullgraph=True, backend="aot_eager"
    )
    eager, compiled = trained(flex_cp_allgather, name), trained(whole_graph, name)
    try:
        whole_graph(*keys(rank, 4 + rank), 2, name)
        said = ""
    except ShardError as refused:
        said = str(refused)
    return eager, compiled, said


@on_backends(2)
def test_it_is_an_op_that_compiles_whole(ranks, backend):
    told = spawn(ranks, _on_process, backend=backend)
    k, v = (torch.cat(both, 2) for both in zip(keys(0), keys(1), strict=True))
    weights = torch.arange(k.numel(), dtype=torch.float64).view_as(k) * 3  # rank 0's once, rank 1's twice
    for rank, (eager, compiled, said) in enumerate(told):
        own = slice(4 * rank, 4 * rank + 4)
        expected = [k, v, weights[:, :, own], 4 * v[:, :, own]]
        for found in (eager, compiled):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other.detach())
        assert said.startswith("k and v must have as many tokens on every rank under torch.compile, got [4, 5]")


def test_eager_code_gathers_unequal_shards():
    def run(mesh):
        k, v = keys(mesh.rank, tokens=2 * mesh.rank)
        whole = flex_cp_allgather(k, v, 2, mesh)
        torch.autograd.grad(whole[0].sum(), k)
        return whole[0].detach()

    expected = torch.cat([keys(rank, tokens=2 * rank)[0] for rank in range(3)], 2)
    assert all(torch.equal(found, expected) for found in on_ranks(3, run))


def test_compiled_code_wants_a_name():
    def run(mesh):
        with pytest.raises(Exception, match="pg_name must be the name of a process group"):
            torch.compile(lambda k: flex_cp_allgather(k, k, 2, mesh), fullgraph=True, backend="eager")(keys(0)[0])

    on_ranks(1, run)


def test_keys_and_values_of_unequal_lengths_are_refused():
    def run(mesh):
        with pytest.raises(ShardError, match="k and v must have as many tokens in dim 2"):
            flex_cp_allgather(keys(0, 4)[0], keys(0, 3)[1], 2, mesh)

    on_ranks(1, run)

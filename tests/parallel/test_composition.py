"""Context parallelism beside everything else that trains a model: every step's loss and gradients are those of one
device, on real processes.

Each way of training is a function of a process's rank; two spawns, of 2 and of 4 processes, run them all and return how
far each was off; on NCCL there are 3 too. Daily they take `FEW` steps, each with another pack of documents; the slow
tests and NCCL take ten, in second forms too. The model and one-device training are in model.py.
"""

import functools
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from attnspan.parallel import ContextParallel
from attnspan.testing import loopback
from tests.devices import mesh_of
from tests.parallel.model import (
    SEQ_LEN,
    STEPS,
    Dense,
    Llama,
    batch,
    clipped,
    gradients,
    losses,
    off,
    one_device,
    optimizer,
)
from tests.processes import on_backends, spawn

BOUND = 1e-5
"""float32: rounding of ten steps, each of which starts from the last one's."""

FEW = 4


def train(mesh, model, wrapped=lambda model: model, *, steps, average=False, optim=None, **options):
    """Every step's loss and gradients; `wrapped(model)` is what is called."""
    cp, found = ContextParallel(mesh, seq_len=SEQ_LEN, mask=batch(0).mask), []
    run = wrapped(model)
    optim = optim or optimizer(model)
    for step in steps:
        optim.zero_grad()
        found.append(one_step(cp, run, model, step, average, **options))
        optim.step()
    return found


def one_step(cp, run, model, step, average, *, micro=1, rows=slice(None), over=None, clip=True):
    """Forward and backward of a step's micro-batches, of these batch rows."""
    batches = [batch(step, number) for number in range(micro)]
    sessions = [cp.with_mask(each.mask) for each in batches]
    labels = [session.shard(each.labels[rows]) for session, each in zip(sessions, batches, strict=True)]
    count = cp.sum(torch.cat([(each != -100).flatten() for each in labels]), over=over) if micro > 1 else None
    loss = 0.0
    for number, (session, each) in enumerate(zip(sessions, batches, strict=True)):
        waits = isinstance(run, DistributedDataParallel) and number + 1 < micro
        with run.no_sync() if waits else nullcontext():
            tokens = session.shard(each.tokens[rows])
            per_token, valid = losses(run, tokens, labels[number], session.positions, session)
            part = session.mean_loss(per_token, valid, count=count, over=over)
            part.backward()
        loss += part.item()
    if average:
        cp.average_gradients(model, over=over)
    if clip:
        clipped(model)
    return loss, gradients(model)


# ---- two processes, or three -----------------------------------------------------------------------------------------


def two(world, folder, steps):
    mesh, trained = mesh_of(world.ranks), partial(train, steps=range(steps))
    true, three = one_device(steps=range(steps)), one_device(micro=3, steps=range(steps))
    found = {
        "plain": off(trained(mesh, Llama(), average=True), true),
        "DDP": off(trained(mesh, Llama(), DistributedDataParallel), true),
        "FSDP2": off(trained(mesh, Llama(), partial(sharded, mesh=mesh)), true),
        "checkpointing": off(trained(mesh, Llama(reentrant=False), DistributedDataParallel), true),
        "reentrant checkpointing": off(trained(mesh, Llama(reentrant=True), average=True), true),
        "gradient accumulation": off(trained(mesh, Llama(), average=True, micro=3), three),
        "saved half way": off(saved(mesh, folder, range(steps // 2)), true[: steps // 2]),
    }
    found["compiled blocks"], found["compilations"] = compiled(mesh, true, blocks_compiled)
    if steps > FEW:
        found["accumulation under DDP"] = off(trained(mesh, Llama(), DistributedDataParallel, micro=3), three)
    return found


def sharded(model, mesh):
    """FSDP2, block by block."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def blocks_compiled(model, backend):
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
    return model


def model_compiled(model, backend):
    return torch.compile(model, fullgraph=True, backend=backend)


def compiled(mesh, true, how):
    """How far a compiled model was off, and how often it was compiled."""
    # Dynamo looks at an input's .grad, whatever the input is.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    counter = CompileCounterWithBackend("aot_eager" if mesh.device_type == "cpu" else "inductor")
    found = train(mesh, Llama(), partial(how, backend=counter), steps=range(len(true)), average=True)
    return off(found, true), counter.frame_count


def two_compiled(world):
    return compiled(mesh_of(2), one_device(), model_compiled)


def saved(mesh, folder, steps):
    """Half of the training under FSDP2 on two ranks, and then everything written to a folder."""
    model = sharded(Llama(), mesh)
    optim = optimizer(model)
    found = train(mesh, model, steps=steps, optim=optim)
    weights, moments = get_state_dict(model, optim)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return found


# ---- four processes --------------------------------------------------------------------------------------------------


def four(world, folder, steps):
    grid, line, trained = mesh_of(2, 2, names=("dp", "cp")), mesh_of(4), partial(train, steps=range(steps))
    true, row = one_device(steps=range(steps)), grid["dp"].get_local_rank()
    rows = {"rows": slice(row, row + 1), "over": dist.group.WORLD}
    rest = range(steps // 2, steps)
    found = {
        "plain": off(trained(line, Llama(), average=True), true),
        "FSDP2 on (dp, cp)": off(trained(grid["cp"], Llama(), partial(sharded, mesh=grid), **rows), true),
        "DDP on (dp, cp)": off(trained(grid["cp"], Llama(), DistributedDataParallel, **rows), true),
        "tensor parallel": off(tensor_parallel(trained), one_device(clip=False, steps=range(steps))),
        "loaded": off(loaded(line, folder, rest), true[steps // 2 :]),
        "evaluation": evaluation(grid, line),
        "meshes": interleaved(grid, line),
    }
    if steps > FEW:
        again = trained(grid["cp"], Llama(False), partial(sharded, mesh=grid), **rows)
        found["FSDP2, checkpointing"] = off(again, true)
        later = loaded(line, folder, rest, partial(sharded, mesh=line))
        found["loaded into FSDP2"] = off(later, true[steps // 2 :])
    return found


def tensor_parallel(trained):
    """Heads and hidden units over one axis, the sequence over the other."""
    grid = mesh_of(2, 2, names=("tp", "cp"))
    model, columns, rows = Llama(), ColwiseParallel(), RowwiseParallel()
    styles = {f"attention.{name}": columns for name in ("wq", "wk", "wv")} | {"attention.wo": rows}
    styles |= {"feed_forward.w1": columns, "feed_forward.w3": columns, "feed_forward.w2": rows}
    for layer in model.layers:
        parallelize_module(layer, grid["tp"], styles)
    return trained(grid["cp"], model, average=True, clip=False)  # torch takes no norm of DTensors and tensors together


def loaded(mesh, folder, steps, wrapped=None):
    """The other half of the training, from what two ranks saved."""
    model = wrapped(Llama()) if wrapped else Llama()
    optim = optimizer(model)
    weights, moments = get_state_dict(model, optim)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(mesh, model, steps=steps, average=wrapped is None, optim=optim)


def one_rank():
    """A mesh of this process alone."""
    return mesh_of(4, 1, names=("others", "cp"))["cp"]


@torch.no_grad()
def evaluation(grid, line):
    """One model, the same mean on four ranks, on two for each half of the batch, and on one rank of its own."""
    model, each, row = Llama(), batch(3), grid["dp"].get_local_rank()
    halves = (grid["cp"], slice(row, row + 1), dist.group.WORLD)
    means = []
    for mesh, rows, over in ((line, slice(None), None), halves, (one_rank(), slice(None), None)):
        cp = ContextParallel(mesh, seq_len=SEQ_LEN, mask=each.mask)
        shards = cp.shard({"tokens": each.tokens[rows], "labels": each.labels[rows]})
        means.append(cp.mean(*losses(model, **shards, positions=cp.positions, attend=cp), over=over).item())
    return max(abs(mean - means[-1]) / means[-1] for mean in means)


def interleaved(grid, line):
    """Sessions on three meshes at once: all go forward, then all go back."""
    each, found = batch(2), []
    sessions = [ContextParallel(mesh, seq_len=SEQ_LEN, mask=each.mask) for mesh in (line, grid["cp"], one_rank())]
    models = [Llama() for _ in sessions]
    means = []
    for cp, model in zip(sessions, models, strict=True):
        shards = cp.shard({"tokens": each.tokens, "labels": each.labels})
        means.append(cp.mean_loss(*losses(model, **shards, positions=cp.positions, attend=cp)))
    for cp, model, mean in zip(sessions, models, means, strict=True):
        mean.backward()
        cp.average_gradients(model)
        found.append((mean.item(), gradients(model)))
    return off(found[:2], found[2:] * 2)


# ---- the verdict -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What so many processes found in so many steps; four go on with what two have saved."""
    folders = functools.cache(lambda *_: str(tmp_path_factory.mktemp("saved")))

    @functools.cache
    def by(ranks, backend, steps):
        if ranks == 4:
            by(2, backend, steps)
            return spawn(4, four, folders(backend, steps), steps, backend=backend, timeout=240)
        folder = folders(backend, steps) if ranks == 2 else str(tmp_path_factory.mktemp("not read"))
        return spawn(ranks, two, folder, steps, backend=backend, timeout=240)

    return lambda ranks, backend, steps=FEW: by(ranks, backend, STEPS if backend == "nccl" else steps)


@pytest.mark.parametrize("steps", [FEW, pytest.param(STEPS, marks=pytest.mark.slow)])
@on_backends(2, 4, slow=(3,))
def test_every_step_is_that_of_one_device_however_a_model_is_trained(told, ranks, backend, steps):
    for found in told(ranks, backend, steps):
        assert {name: error for name, error in found.items() if name != "compilations" and not error <= BOUND} == {}


@on_backends(2)
def test_another_pack_of_documents_does_not_compile_anew(told, ranks, backend):
    assert [found["compilations"] for found in told(ranks, backend)] == [1, 1]  # both layers are the same code


@on_backends(slow=(2,))
def test_a_whole_model_compiles_once(ranks, backend):
    for error, compilations in spawn(ranks, two_compiled, backend=backend, timeout=240):
        assert error <= BOUND
        assert compilations == 1


def test_twin_a_mean_of_each_ranks_own_tokens_is_not_the_loss_of_one_device():
    def rank(world):
        model, each = Llama(), batch(1)
        cp = ContextParallel(world, seq_len=SEQ_LEN, mask=each.mask)
        shards = cp.shard({"tokens": each.tokens, "labels": each.labels})
        per_token, valid = losses(model, **shards, positions=cp.positions, attend=cp)
        per_token[valid].mean().backward()
        cp.average_gradients(model)
        return off([(1.0, gradients(model))], [(1.0, first_gradients())])

    def first_gradients():
        model, each = Llama(), batch(1)
        dense = Dense(each.mask, SEQ_LEN)
        per_token, valid = losses(model, each.tokens, each.labels, dense.positions, dense)
        per_token[valid].mean().backward()
        return gradients(model)

    assert min(loopback(2).run(rank)) > 100 * BOUND

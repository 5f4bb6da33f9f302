"""Blocks compiled one by one: one or two graphs for any number of layers, with other documents, checkpoints, FSDP2."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import attnspan as span
from attnspan.testing import loopback
from tests.devices import mesh_of
from tests.parallel.models import TURN, WIDTH, Attend, dense, parallel, same, whole
from tests.processes import on_backends, spawn

# Whether a tensor has a gradient is asked by torch.compile itself, which hides the warning only where none is an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

LENGTH, LAYERS = 12, 9
FIRSTS = (5, 3, 7)  # lengths of a batch's first document


def documents(first):
    return span.Causal() & span.Documents([first, LENGTH - first])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.feed = Attend(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.feed(x).relu()


class Model(nn.Module):
    """As torchtitan's: layers in a dict."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def blocks(layers=LAYERS):
    with TURN:
        torch.manual_seed(0)
        return Model(layers).double()


def each(model, change):
    for name, layer in model.layers.items():
        model.layers[name] = change(layer)


ATTACHED = {
    "whole": lambda cp, model: cp.attach(model),
    "attention": lambda cp, model: cp.attach(model, "layers.*.attention"),
    "style": lambda cp, model: styled(cp, model),
}


def styled(cp, model):
    style = span.ContextParallelStyle(cp)
    for layer in model.layers.values():
        style._apply(getattr(layer, "_checkpoint_wrapped_module", layer).attention, None)
    return style


def plain(named):
    out, gradients = named
    for part in ("_orig_mod.", "_checkpoint_wrapped_module."):
        gradients = {name.replace(part, ""): gradient for name, gradient in gradients.items()}
    return out, gradients


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


ORDERS = ["no checkpoints", "checkpoint, then compile", "compile, then checkpoint"]
DAILY = list(zip(ATTACHED, ORDERS, strict=True))
REST = [(attached, order) for attached in ATTACHED for order in ORDERS if (attached, order) not in DAILY]


@pytest.mark.parametrize(
    ("attached", "order"), [*DAILY, *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)]
)
def test_nine_blocks_compiled_one_by_one_are_one_graph_or_two_whatever_the_documents(attached, order):
    true = {first: dense(blocks(), whole(LENGTH), documents(first)) for first in FIRSTS}

    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=documents(FIRSTS[0])), blocks()
        count = CompileCounterWithBackend("aot_eager")
        if order == "checkpoint, then compile":
            each(mine, checkpoint_wrapper)
        using = ATTACHED[attached](cp, mine)
        for layer in mine.layers.values():
            layer.compile(fullgraph=True, backend=count)
        if order == "compile, then checkpoint":
            each(mine, checkpoint_wrapper)
        for first in FIRSTS:
            batch = cp.with_mask(documents(first))
            using.use(batch)
            same(plain(parallel(batch, mine, mine, whole(LENGTH))), true[first])
            assert batch.report().calls >= LAYERS
        assert 1 <= count.frame_count <= 2

    loopback(1).run(rank)


def test_a_compiled_checkpoint_wrapper_around_a_styled_module_is_one_graph():
    true = dense(blocks(), whole(LENGTH), documents(5))

    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=documents(5)), blocks()
        count = CompileCounterWithBackend("aot_eager")
        styled(cp, mine)
        each(mine, lambda layer: torch.compile(checkpoint_wrapper(layer), fullgraph=True, backend=count))
        same(plain(parallel(cp, mine, mine, whole(LENGTH))), true)
        assert count.frame_count == 1

    loopback(1).run(rank)


def test_the_checkpoint_wrapper_is_torchs_again_when_nothing_is_attached():
    gc.collect()  # what other tests have left attached
    theirs = CheckpointWrapper.forward

    def rank(world):
        cp = span.ContextParallel(world, seq_len=LENGTH, mask=span.Causal())
        with cp.attach(blocks(1)), cp.attach(blocks(1)):
            assert CheckpointWrapper.forward is not theirs
        assert CheckpointWrapper.forward is theirs

    loopback(1).run(rank)


class Tall(nn.Module):
    """An attention of `heads` heads, nested one module deeper than a block expects."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.inner = heads, nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.inner)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_layers_that_differ_are_a_graph_each_and_uncompiled_ones_none():
    def uneven():
        mine = blocks(6)
        with TURN:
            torch.manual_seed(1)
            for name in ("1", "4"):
                mine.layers[name].attention = nn.Sequential(Tall(4)).double()
        return mine

    true = dense(uneven(), whole(LENGTH), documents(5))

    def rank(world):
        cp, mine = span.ContextParallel(world, seq_len=LENGTH, mask=documents(5)), uneven()
        count = CompileCounterWithBackend("aot_eager")
        attached = cp.attach(mine)
        for name in ("0", "1", "2", "4"):  # the rest stays eager
            mine.layers[name].compile(fullgraph=True, backend=count)
        same(parallel(cp, mine, mine, whole(LENGTH)), true)
        assert count.frame_count == 2
        mine.eval()
        with torch.no_grad():
            torch.testing.assert_close(cp.unshard(mine(cp.shard(whole(LENGTH)))), true[0])
        mine.train()
        same(parallel(cp, mine, mine, whole(LENGTH)), true)
        attached.detach()

    loopback(1).run(rank)


def _fully_sharded(world, attached):
    """torchtitan's order: parallelize, checkpoint, compile, shard; then batches of other documents."""
    warnings.filterwarnings("ignore", message="The .grad attribute")  # see above
    mesh = mesh_of(2)
    cp, mine = span.ContextParallel(mesh, seq_len=LENGTH, mask=documents(FIRSTS[0])), blocks()
    count = CompileCounterWithBackend("aot_eager" if mesh.device_type == "cpu" else "inductor")
    if attached == "style":
        using = span.ContextParallelStyle(cp)
        parallelize_module(mine, mesh, {"layers.*.attention": using})
    else:
        using = cp.attach(mine)
    each(mine, checkpoint_wrapper)
    for layer in mine.layers.values():
        layer.compile(fullgraph=True, backend=count)
        fully_shard(layer, mesh=mesh)
    fully_shard(mine, mesh=mesh)
    for first in FIRSTS:
        true = dense(blocks(), whole(LENGTH), documents(first))
        batch = cp.with_mask(documents(first))
        using.use(batch)
        mine.zero_grad()
        out = mine(batch.shard(whole(LENGTH)))
        batch.mean_loss(out.square()).backward()
        gradients = {name: p.grad.full_tensor() for name, p in mine.named_parameters() if isinstance(p.grad, DTensor)}
        same(plain((batch.unshard(out.detach()), gradients)), true)
    return count.frame_count


@pytest.mark.parametrize("attached", [pytest.param("whole", marks=pytest.mark.slow), "style"])
@on_backends(2)
def test_blocks_that_are_checkpointed_compiled_and_fully_sharded_are_one_graph_or_two(attached, ranks, backend):
    for graphs in spawn(ranks, _fully_sharded, attached, backend=backend, timeout=240):
        assert 1 <= graphs <= 2

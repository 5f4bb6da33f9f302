"""Groups and virtual worlds are not kept alive by what was done with them."""

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import attnspan as span
from attnspan.testing import loopback
from attnspan.torch_compat import context_parallel
from attnspan.transports import transport_of
from tests.processes import on_backends, spawn

TOKENS = 8


def tensors(ranks):
    return [torch.randn(1, 2, TOKENS // ranks, 8, requires_grad=True) for _ in range(3)]


def by_attention(group, ranks):
    layout = span.Contiguous(ranks)
    return span.attention(*tensors(ranks), mask=span.Causal(), layout=layout, seq_len=TOKENS, group=group)


def by_session(group, ranks):
    cp = span.ContextParallel(group, seq_len=TOKENS, mask=span.Causal())
    with cp.sdpa():
        out = F.scaled_dot_product_attention(*tensors(ranks), is_causal=True)
    return cp.mean_loss(out.sum((0, 1, 3)))


def by_torchs_names(group, ranks):
    whole = tensors(1)
    with context_parallel(group, buffers=[x.detach() for x in whole], buffer_seq_dims=[2, 2, 2]):
        return F.scaled_dot_product_attention(*tensors(ranks), is_causal=True)


USES = [by_attention, by_session, by_torchs_names]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_virtual_worlds_are_gone_when_nobody_holds_them(use):
    worlds = []

    def rank(world):
        worlds.append(weakref.ref(world))
        use(world, world.ranks).sum().backward()

    for _ in range(3):
        loopback(2).run(rank)
    gc.collect()
    assert [world() for world in worlds] == [None] * 6


def test_what_is_made_for_a_group_is_made_once_while_it_lives():
    def rank(world):
        for _ in range(2):
            by_attention(world, world.ranks)
        [made] = world.memo.values()
        return made.cache_info()

    for info in loopback(2).run(rank):
        assert (info.hits, info.misses) == (1, 1)


def on_groups(world):
    """Whether a group is remembered while it lives, alive once it was destroyed, and what its transport then says."""
    found = {}
    for use in USES:
        group = dist.new_group([0, 1])
        reference, transport = weakref.ref(group), transport_of(group)
        use(group, 2).sum().backward()
        remembered = bool(transport_of(group).memo)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        try:
            transport.all_gather_bytes(b"")
            said = "nothing"
        except ValueError as refusal:
            said = str(refusal)
        found[use.__name__] = remembered, reference() is not None, said
    return found


@pytest.fixture(scope="module")
def seen_on_groups():
    return functools.cache(lambda ranks, backend: spawn(ranks, on_groups, backend=backend))


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@on_backends(2)
def test_process_groups_are_gone_when_they_were_destroyed(seen_on_groups, use, ranks, backend):
    for found in seen_on_groups(ranks, backend):
        remembered, alive, said = found[use.__name__]
        assert remembered or use is by_session
        assert not alive
        assert said.endswith("the process group was destroyed")

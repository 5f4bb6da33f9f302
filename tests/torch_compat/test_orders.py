"""In what order shards lie that come without a load balancer: the one they were cut in, or a refusal."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from attnspan.errors import ShardError
from attnspan.layouts import Contiguous, HeadTail
from attnspan.masks import Causal
from attnspan.torch_compat import (
    _context_parallel_shard,
    _cp_options,
    _create_cp_block_mask,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    context_parallel,
    context_parallel_unshard,
    flex_cp_allgather,
)
from tests.torch_compat.harness import alone, close, on_ranks, whole

TOKENS = torch.arange(8).view(1, 8)


def balancer(kind, ranks, length=8):
    if kind == "documents":
        return _PerDocumentHeadTailLoadBalancer([[3, length - 3]], ranks, "cpu")
    return _HeadTailLoadBalancer(length, ranks, "cpu") if kind == "head-tail" else None


def copied(mesh, length=8):
    """This rank's part of a buffer of a context, as a program takes it out."""
    buffer = torch.arange(length).view(1, length)
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
        return buffer.clone()


def unsharded(mesh, part):
    return context_parallel_unshard(mesh, [part], [1])[0].flatten().tolist()


@pytest.mark.parametrize("kind", ["spans", "head-tail"])
def test_what_left_a_context_is_whole_after_an_older_shard_call(kind):
    """The context's shards were put together in the order of the shard call: [0, 1, 6, 7, 2, 3, 4, 5]."""

    def run(mesh):
        _context_parallel_shard(mesh, [TOKENS], [1], balancer(kind, mesh.ranks))
        return unsharded(mesh, copied(mesh))

    assert on_ranks(2, run) == [list(range(8))] * 2


@pytest.mark.parametrize("kind", ["spans", "head-tail"])
def test_attention_in_a_context_after_a_shard_call_is_unsharded_outside(kind):
    expected = alone(8)[:1]

    def run(mesh):
        _context_parallel_shard(mesh, [TOKENS], [1], balancer(kind, mesh.ranks))
        buffers = whole(8)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            out = F.scaled_dot_product_attention(*buffers, is_causal=True)
        return context_parallel_unshard(mesh, [out], [2])

    assert all(close(found, expected) for found in on_ranks(2, run))


@pytest.mark.parametrize("kind", ["spans", "head-tail"])
def test_a_context_cuts_as_the_shard_call_before_it(kind):
    """As in torch, so that shards of both fit together."""

    def run(mesh):
        (part,) = _context_parallel_shard(mesh, [TOKENS], [1], balancer(kind, mesh.ranks))
        return part.tolist() == copied(mesh).tolist()

    assert on_ranks(2, run) == [True, True]


@pytest.mark.parametrize("balanced", [True, False])
def test_options_set_after_a_shard_call_count_again(balanced):
    """torch's own tests set the option before every context, after shard calls of another order."""
    layout = HeadTail(2) if balanced else Contiguous(2)

    def run(mesh):
        _context_parallel_shard(mesh, [TOKENS], [1], balancer("spans" if balanced else "head-tail", mesh.ranks))
        _cp_options.enable_load_balance = balanced
        part = copied(mesh)
        return part.flatten().tolist(), unsharded(mesh, part)

    assert on_ranks(2, run) == [(own, list(range(8))) for own in layout.positions(8)]


def test_a_shard_that_was_just_cut_knows_its_order():
    def run(mesh):
        (part,) = _context_parallel_shard(mesh, [TOKENS], [1], balancer("documents", mesh.ranks))
        copied(mesh)
        return unsharded(mesh, part)

    assert on_ranks(2, run) == [list(range(8))] * 2


REFUSED = r"shards may lie in .* or in .*: sequences were cut in both on this mesh; pass load_balancer="


def test_a_shard_of_either_of_two_orders_is_refused():
    def run(mesh):
        (part,) = _context_parallel_shard(mesh, [TOKENS], [1], balancer("documents", mesh.ranks))
        part = part + 0
        assert unsharded(mesh, part) == list(range(8)), "there is but one order yet"
        copied(mesh)
        with pytest.raises(ShardError, match=REFUSED):
            unsharded(mesh, part)
        entered = context_parallel(mesh, buffers=[TOKENS.clone()], buffer_seq_dims=[1])
        with entered, pytest.raises(ShardError, match=REFUSED):
            unsharded(mesh, part)
        said = context_parallel_unshard(mesh, [part], [1], balancer("documents", mesh.ranks))
        return said[0].flatten().tolist()

    assert on_ranks(2, run) == [list(range(8))] * 2


def test_the_length_tells_two_orders_apart():
    def run(mesh):
        (part,) = _context_parallel_shard(mesh, [TOKENS], [1], balancer("documents", mesh.ranks))
        other = copied(mesh, 12)
        return unsharded(mesh, part + 0), unsharded(mesh, other)

    assert on_ranks(2, run) == [(list(range(8)), list(range(12)))] * 2


def test_an_option_that_contradicts_the_last_cut_is_refused():
    """torch puts the shards together as the option says, whatever they are."""

    def run(mesh):
        part = copied(mesh)
        _cp_options.enable_load_balance = False
        with pytest.raises(ShardError, match=REFUSED):
            unsharded(mesh, part)
        return unsharded(mesh, copied(mesh))

    assert on_ranks(2, run) == [list(range(8))] * 2


@pytest.mark.parametrize("said", [[True], [False, True]], ids=["again", "and put back"])
def test_an_option_that_is_set_and_a_cut_in_another_order_displace_no_earlier_cut(said):
    """The context's shard was put together in the order of the later shard call; torch is right here."""

    def run(mesh):
        part = copied(mesh)
        for balanced in said:
            _cp_options.enable_load_balance = balanced
        _context_parallel_shard(mesh, [TOKENS], [1], balancer("documents", mesh.ranks))
        with pytest.raises(ShardError, match=REFUSED):
            unsharded(mesh, part)

    on_ranks(2, run)


def test_an_option_set_inside_a_context_says_nothing_of_the_contexts_own_cut():
    """The context's order was taken for the one that the option names, and displaced all earlier ones."""

    def run(mesh):
        part = copied(mesh)
        _cp_options.enable_load_balance = False
        buffer = TOKENS.clone()
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            _cp_options.enable_load_balance = True
        with pytest.raises(ShardError, match=REFUSED):
            unsharded(mesh, part)

    on_ranks(2, run)


def test_shards_that_nobody_here_cut_lie_as_the_option_says():
    def run(mesh):
        _cp_options.enable_load_balance = False
        return unsharded(mesh, TOKENS.chunk(2, dim=1)[mesh.rank])

    assert on_ranks(2, run) == [list(range(8))] * 2


def test_options_are_a_virtual_ranks_own():
    def run(mesh):
        _cp_options.enable_load_balance = bool(mesh.rank)
        mesh.all_gather_bytes(b"")  # everybody has
        return _cp_options.enable_load_balance

    assert on_ranks(3, run) == [False, True, True]
    assert _cp_options.enable_load_balance


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["spans", "head-tail"])
def test_a_block_mask_lies_as_the_shard_call_before_it(kind):
    """Without a load balancer it was in head-tail order, and the shards in spans."""
    expected = alone(256)[0]

    def run(mesh):
        query, key, value = _context_parallel_shard(mesh, whole(256), [2] * 3, balancer(kind, mesh.ranks, 256))
        part = _create_cp_block_mask(Causal().mask_mod(), 1, 1, 256, 256, mesh)
        keys, values = flex_cp_allgather(key, value, 2, mesh)
        out = flex_attention(query, keys, values, block_mask=part)
        return context_parallel_unshard(mesh, [out], [2])

    assert all(close(found, [expected]) for found in on_ranks(2, run))


def test_an_older_cut_in_another_order_is_not_forgotten():
    """Two contexts and a shard call later, the first context's part was put together in another order."""

    def run(mesh):
        part = copied(mesh)  # head-tail
        _context_parallel_shard(mesh, [TOKENS], [1])
        assert copied(mesh).flatten().tolist() == Contiguous(2).positions(8)[mesh.rank]
        with pytest.raises(ShardError, match=REFUSED):
            unsharded(mesh, part)
        balanced = context_parallel_unshard(mesh, [part], [1], _HeadTailLoadBalancer(8, mesh.ranks, "cpu"))
        return balanced[0].flatten().tolist()

    assert on_ranks(2, run) == [list(range(8))] * 2


def test_an_option_set_inside_a_context_does_not_bring_older_orders_back():
    def run(mesh):
        (part,) = _context_parallel_shard(mesh, [TOKENS], [1])
        part = part + 0
        _cp_options.enable_load_balance = True
        buffer = TOKENS.clone()
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            _cp_options.enable_load_balance = False
            with pytest.raises(ShardError, match=REFUSED):
                unsharded(mesh, part)

    on_ranks(2, run)


def test_a_context_inside_another_leaves_the_outer_ones_order_alone():
    """An option set between the two counted for the outer one's shards too."""

    def run(mesh):
        outer, inner = torch.arange(12).view(1, 12), TOKENS.clone()
        with context_parallel(mesh, buffers=[outer], buffer_seq_dims=[1]):
            _cp_options.enable_load_balance = False
            with context_parallel(mesh, buffers=[inner], buffer_seq_dims=[1]):
                small = inner.clone()
            part = outer.clone()
            told = unsharded(mesh, part), unsharded(mesh, small)
        return *told, unsharded(mesh, part), unsharded(mesh, small)

    assert on_ranks(2, run) == [(list(range(12)), list(range(8))) * 2] * 2


def test_the_latest_shard_call_counts():
    """torch's own tests cut in one order after another, and pass a load balancer wherever they have one."""

    def run(mesh):
        for kind in ("documents", "head-tail", "spans", "documents", "spans"):
            (part,) = _context_parallel_shard(mesh, [TOKENS], [1], balancer(kind, mesh.ranks))
            assert unsharded(mesh, part + 0) == list(range(8))

    on_ranks(2, run)


def test_orders_one_after_another_as_torchs_own_tests_have_them():
    """Options before every context, and a shard call in the same order after it; all of one length."""

    def run(mesh):
        for balanced in (True, False, True, True, False):
            _cp_options.enable_load_balance = balanced
            assert unsharded(mesh, copied(mesh)) == list(range(8))
            kind = "head-tail" if balanced else "spans"
            (part,) = _context_parallel_shard(mesh, [TOKENS], [1], balancer(kind, mesh.ranks))
            assert unsharded(mesh, part + 0) == list(range(8))

    on_ranks(2, run)

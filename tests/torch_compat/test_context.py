"""Inside `context_parallel` buffers are shards and SDPA is that of one device; outside everything is as it was."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental import _attention as theirs
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.nn.parallel import DistributedDataParallel

from attnspan.errors import AttentionError, ShardError
from attnspan.layouts import Contiguous, HeadTail
from attnspan.torch_compat import (
    _context_parallel_shard,
    _cp_options,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from attnspan.transports.counting import Counting
from tests.devices import mesh_of
from tests.processes import on_backends, spawn
from tests.torch_compat.harness import alone, close, on_ranks, whole
from tests.torch_compat.test_balancers import Reversed


def trained(mesh, length, is_causal=True, attend=F.scaled_dot_product_attention, **options):
    """Output and gradients as in torch's own tests: leaves made inside, all unsharded inside."""
    buffers = whole(length, **options)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        leaves = [x.detach().requires_grad_() for x in buffers]
        out = attend(*leaves, is_causal=is_causal, enable_gqa=True)
        (out**2).sum().backward()
        return context_parallel_unshard(mesh, [out.detach(), *(x.grad for x in leaves)], [2] * 4)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("ranks", "length"), [(1, 5), (2, 8), (2, 7), (3, 20), (4, 3), (4, 1), (5, 64)])
def test_attention_inside_is_that_of_one_device(ranks, length, is_causal):
    expected = alone(length, is_causal)
    assert all(close(found, expected) for found in on_ranks(ranks, lambda mesh: trained(mesh, length, is_causal)))


def test_a_name_imported_before_the_context_is_seen():
    expected = alone(12)
    assert all(close(found, expected) for found in on_ranks(2, lambda mesh: trained(mesh, 12, attend=by_name)))


@pytest.mark.parametrize("options", [{"heads": 6, "kv_heads": 2}, {"batch": 1}, {"heads": 1}])
def test_heads_may_be_grouped(options):
    expected = alone(13, **options)
    assert all(close(found, expected) for found in on_ranks(3, lambda mesh: trained(mesh, 13, **options)))


@pytest.mark.parametrize("scale", [0.5, None])
def test_causal_and_full_calls_of_any_scale_share_a_context(scale):
    expected = [F.scaled_dot_product_attention(*whole(9), is_causal=c, scale=scale) for c in (True, False)]

    def run(mesh):
        buffers = whole(9)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            out = [F.scaled_dot_product_attention(*buffers, is_causal=c, scale=scale) for c in (True, False)]
            return context_parallel_unshard(mesh, out, [2, 2])

    assert all(close(found, expected) for found in on_ranks(2, run))


def test_modules_that_use_sdpa_are_served():
    torch.manual_seed(3)
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    tokens = torch.randn(1, 11, 16, dtype=torch.float64)
    expected = layer(tokens, tokens, tokens, need_weights=False)[0]

    def run(mesh):
        x = tokens.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            return context_parallel_unshard(mesh, [layer(x, x, x, need_weights=False)[0]], [1])

    assert all(close(found, [expected]) for found in on_ranks(2, run))


# ---- buffers -------------------------------------------------------------------------------------------------------


def test_buffers_are_shards_inside_and_whole_outside():
    def run(mesh):
        tokens, table = torch.arange(14).view(2, 7), torch.arange(7.0)
        address = table.data_ptr()
        with context_parallel(mesh, buffers=[tokens, table], buffer_seq_dims=[-1, 0], no_restore_buffers={tokens}):
            inside = tokens.tolist(), table.tolist()
        return inside, tokens.tolist(), table.tolist(), table.data_ptr() == address

    own = [[0, 5, 6], [1, 2, 3, 4]]
    for rank, (inside, kept, restored, same_memory) in enumerate(on_ranks(2, run)):
        assert inside == ([own[rank], [7 + p for p in own[rank]]], [float(p) for p in own[rank]])
        assert kept == inside[0]
        assert restored == list(range(7))
        assert same_memory


def test_buffers_are_whole_again_after_an_exception():
    def run(mesh):
        tokens = torch.arange(7).view(1, 7)
        with pytest.raises(KeyError), context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            raise KeyError
        out = F.scaled_dot_product_attention(*whole(5), is_causal=True)
        return tokens.tolist(), torch.equal(out, F.scaled_dot_product_attention(*whole(5), is_causal=True))

    assert on_ranks(2, run) == [([list(range(7))], True)] * 2


def test_buffers_may_be_slices_of_one_tensor():
    """Inputs and labels as a data loader cuts them. torch writes each shard over the memory that they share."""

    def run(mesh):
        tokens = torch.arange(9).view(1, 9)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        with context_parallel(mesh, buffers=[inputs, labels], buffer_seq_dims=[1, 1]):
            inside = inputs.tolist(), labels.tolist()
        return inside, inputs.tolist(), labels.tolist()

    own = [[0, 1, 6, 7], [2, 3, 4, 5]]
    for rank, (inside, inputs, labels) in enumerate(on_ranks(2, run)):
        assert inside == ([own[rank]], [[p + 1 for p in own[rank]]])
        assert inputs == [list(range(8))]
        assert labels == [list(range(1, 9))]


def test_a_table_may_be_longer_than_the_sequence():
    def run(mesh):
        tokens, table = torch.arange(6).view(1, 6), torch.arange(10.0)
        with context_parallel(mesh, buffers=[tokens, table], buffer_seq_dims=[1, 0]):
            inside = table.tolist()
        return inside, table.tolist()

    own = [[0, 4, 5], [1, 2, 3]]
    assert on_ranks(2, run) == [(own[rank], list(range(10))) for rank in range(2)]


def test_one_tensor_may_come_twice():
    def run(mesh):
        tokens = torch.arange(4).view(1, 4)
        with context_parallel(mesh, buffers=[tokens, tokens], buffer_seq_dims=[1, 1]):
            inside = tokens.tolist()
        return inside, tokens.tolist()

    assert on_ranks(2, run) == [([[0, 3]], [[0, 1, 2, 3]]), ([[1, 2]], [[0, 1, 2, 3]])]


def test_leaves_that_require_gradients_get_them_whole():
    """Each rank has its tokens' gradient and zeros; with what was there before, as gradients add up."""
    expected = alone(7)

    def run(mesh):
        leaves = [x.requires_grad_() for x in whole(7)]
        leaves[0].grad = torch.ones_like(leaves[0])
        with context_parallel(mesh, buffers=leaves, buffer_seq_dims=[2, 2, 2]):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            (out**2).sum().backward()
            own = [x.grad.shape[2] for x in leaves]
        return own, [x.grad for x in leaves]

    told = on_ranks(2, run)
    assert [own for own, _ in told] == [[3] * 3, [4] * 3]
    sums = [sum(grads) for grads in zip(*(grads for _, grads in told), strict=True)]
    assert close([sums[0] - 2, *sums[1:]], expected[1:])


@pytest.mark.parametrize("clear", ["none", "to none", "to none, nothing after"])
def test_a_gradient_is_cleared_inside_as_outside(clear):
    """Before, it is that of all ranks, as after averaging."""

    def run(mesh):
        table = torch.nn.Parameter(torch.arange(5.0))
        table.grad = torch.full((5,), 100.0)
        with context_parallel(mesh, buffers=[table], buffer_seq_dims=[0]):
            if clear != "none":
                torch.optim.SGD([table]).zero_grad()
            if "nothing" not in clear:
                (table**2).sum().backward()
        return table.grad

    told = on_ranks(3, run)
    if "nothing" in clear:
        assert told == [None] * 3
    else:
        assert torch.equal(sum(told), 2 * torch.arange(5.0) + (300 if clear == "none" else 0))


@pytest.mark.parametrize("counted", [True, False])
def test_a_shard_that_is_overwritten_behind_autograds_back_is_refused(counted):
    """As DistributedDataParallel does; what a program writes itself is its own business."""

    def run(mesh):
        table = torch.arange(6.0)
        try:
            with context_parallel(mesh, buffers=[table], buffer_seq_dims=[0]):
                (table if counted else table.data).fill_(1.0)
        except ShardError as error:
            return str(error), table.tolist()
        return "", table.tolist()

    for error, after in on_ranks(2, run):
        assert after == list(range(6))
        assert ("broadcast_buffers=False" in error) is not counted


@pytest.mark.parametrize("written", ["rank 0's", "its own", "another"])
def test_a_shard_that_became_rank_0s_is_refused_however_it_was_written(written):
    """As DistributedDataParallel does in torch 2.11, where it is counted as a change."""
    table = torch.tensor([5.0, 2.0, 3.0, 5.0, 7.0, 7.0, 7.0, 7.0])  # head-tail: 5 2 7 7, and 3 5 7 7
    becomes = {"rank 0's": [5.0, 2.0, 7.0, 7.0], "its own": [3.0, 5.0, 7.0, 7.0], "another": [2.0, 5.0, 7.0, 7.0]}[
        written
    ]

    def run(mesh):
        mine = table.clone()
        try:
            with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[0]):
                mine.copy_(torch.tensor(becomes))
        except ShardError as error:
            return str(error), mine
        return "", mine

    told = on_ranks(2, run)
    assert ["broadcast_buffers=False" in error for error, _ in told] == [False, written == "rank 0's"]
    assert all(torch.equal(after, table) for _, after in told)


def test_a_shard_of_one_number_on_rank_0_may_be_written_by_a_program():
    """A mask that is cleared inside is not rank 0's, though equal to it."""
    table = torch.tensor([0.0, 1.0, 1.0, 0.0])  # head-tail: 0 0, and 1 1

    def run(mesh):
        mine = table.clone()
        with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[0]):
            mine.zero_()
        return mine

    assert all(torch.equal(after, table) for after in on_ranks(2, run))


def _with_ddp(world, broadcast):
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.register_buffer("positions", torch.arange(4.0))

        def forward(self):
            return self.linear(self.positions[:, None])

    mesh, module = mesh_of(2), Positions()
    _cp_options.enable_load_balance = True  # other programs on these ranks may have cut in another order
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later versions have another name for it
        parallel = DistributedDataParallel(module, **({} if broadcast else {"broadcast_buffers": False}))
    try:
        with context_parallel(mesh, buffers=[module.positions], buffer_seq_dims=[0]):
            parallel()
            inside = module.positions.tolist()
    except ShardError as error:
        return str(error)
    return inside


@on_backends(2)
def test_buffers_that_ddp_broadcasts_are_refused(ranks, backend):
    assert spawn(ranks, _with_ddp, False, backend=backend) == [[0.0, 3.0], [1.0, 2.0]]
    said = spawn(ranks, _with_ddp, True, backend=backend)
    assert "DistributedDataParallel(..., broadcast_buffers=False)" in said[1]


@pytest.mark.parametrize("made_inside", [True, False])
def test_evaluation_in_inference_mode(made_inside):
    expected = alone(7)[:1]

    def run(mesh):
        buffers = whole(7)
        with torch.inference_mode():
            buffers = [x.clone() for x in buffers] if made_inside else buffers
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
                out = F.scaled_dot_product_attention(*buffers, is_causal=True)
                found = context_parallel_unshard(mesh, [out], [2])
        return found, [x.shape[2] for x in buffers], {x.is_inference() for x in buffers}

    for found, lengths, kinds in on_ranks(2, run):
        assert close(found, expected)
        assert (lengths, kinds) == ([7] * 3, {made_inside})


def test_a_learned_table_is_trained():
    expected = 2 * torch.arange(5.0)

    def run(mesh):
        table = torch.nn.Parameter(torch.arange(5.0))
        with context_parallel(mesh, buffers=[table], buffer_seq_dims=[0]):
            (table**2).sum().backward()
        return table.shape, table.grad

    told = on_ranks(3, run)
    assert {shape for shape, _ in told} == {(5,)}
    assert torch.equal(sum(grad for _, grad in told), expected)


def test_backward_after_the_context_raises_where_a_buffer_is_needed():
    def run(mesh):
        tokens, embedding = torch.arange(6).view(1, 6), torch.nn.Embedding(6, 2)
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            out = embedding(tokens)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    on_ranks(2, run)


# ---- without buffers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 7, 2])
def test_without_buffers_the_first_call_tells_the_length(length):
    """Shards that somebody else cut, in the default order."""
    expected = alone(length)

    def run(mesh):
        own = HeadTail(mesh.ranks).positions(length)[mesh.rank]
        leaves = [x[:, :, own].requires_grad_() for x in whole(length)]
        with context_parallel(mesh):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            (out**2).sum().backward()
        return context_parallel_unshard(mesh, [out.detach(), *(x.grad for x in leaves)], [2] * 4)

    assert all(close(found, expected) for found in on_ranks(3, run))


def test_a_later_call_of_another_length_is_refused_on_every_rank():
    def run(mesh):
        with context_parallel(mesh):
            F.scaled_dot_product_attention(*(x[:, :, :4] for x in whole(8)), is_causal=True)
            F.scaled_dot_product_attention(*(x[:, :, :3] for x in whole(8)), is_causal=True)

    with pytest.raises(AttentionError, match="query must hold this rank's 4 of 8 tokens, got 3"):
        on_ranks(2, run)


def test_shards_that_are_no_sequence_are_refused():
    def run(mesh):
        with context_parallel(mesh):
            F.scaled_dot_product_attention(*whole(5 - 3 * mesh.rank), is_causal=True)

    with pytest.raises(ShardError, match=r"shards of \[5, 2\] tokens are no sequence in HeadTail\(ranks=2\)"):
        on_ranks(2, run)


# ---- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "strategy"), [("allgather", "gather"), ("alltoall", "ring")])
def test_the_rotate_method_is_a_strategy_and_changes_no_result(method, strategy):
    expected = alone(24)

    def run(mesh):
        set_rotate_method(method)
        found = trained(mesh, 24)
        return found, _cp_options.strategy

    for found, name in on_ranks(3, run):
        assert close(found, expected)
        assert name == strategy


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_keys_travel_once_and_only_once(method):
    """torch concatenates all keys at every step; here each rank receives the other's K and V, and nothing twice."""

    def run(mesh):
        set_rotate_method(method)
        mesh, buffers = Counting(mesh), whole(16, dtype=torch.float32)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3), torch.no_grad():
            F.scaled_dot_product_attention(*buffers, is_causal=False)
            return sum(mesh.received.values()), sum(x.nbytes for x in buffers[1:])

    for received, own in on_ranks(4, run):
        assert received == 3 * own


def test_options_are_read_on_entering():
    expected = alone(8)

    def run(mesh):
        buffers = whole(8)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            mesh.all_gather_bytes(b"")  # everyone has entered
            _cp_options.enable_load_balance = False
            _cp_options.rotate_method = _RotateMethod.ALL_TO_ALL
            out = F.scaled_dot_product_attention(*buffers, is_causal=True)
            return context_parallel_unshard(mesh, [out], [2])

    assert all(close(found, expected[:1]) for found in on_ranks(1, run) + on_ranks(2, run))


def test_without_balance_each_rank_has_one_span():
    expected = alone(10)

    def run(mesh):
        _cp_options.enable_load_balance = False
        positions = torch.arange(10)
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            inside = positions.tolist()
        return inside, trained(mesh, 10)

    for rank, (inside, found) in enumerate(on_ranks(4, run)):
        assert inside == Contiguous(4).positions(10)[rank]
        assert close(found, expected)


def test_torchs_own_options_are_left_alone():
    before = vars(theirs._cp_options).copy()

    def run(mesh):
        set_rotate_method("alltoall")
        _context_parallel_shard(mesh, [torch.arange(8)], [0])
        trained(mesh, 8)

    on_ranks(2, run)
    assert vars(theirs._cp_options) == before


# ---- nesting and orders ----------------------------------------------------------------------------------------------


def test_contexts_nest_and_the_innermost_counts():
    outer, inner = alone(12)[:1], alone(7, seed=1)[:1]

    def run(mesh):
        first, second = whole(12), whole(7, seed=1)
        with context_parallel(mesh, buffers=first, buffer_seq_dims=[2] * 3):
            with context_parallel(mesh, buffers=second, buffer_seq_dims=[2] * 3):
                b = context_parallel_unshard(mesh, [F.scaled_dot_product_attention(*second, is_causal=True)], [2])
            a = context_parallel_unshard(mesh, [F.scaled_dot_product_attention(*first, is_causal=True)], [2])
        return a, b

    for a, b in on_ranks(2, run):
        assert close(a, outer)
        assert close(b, inner)


BALANCERS = {
    "none": lambda ranks: None,
    "head-tail": lambda ranks: _HeadTailLoadBalancer(13, ranks, "cpu"),
    "per document": lambda ranks: _PerDocumentHeadTailLoadBalancer([[4, 9]], ranks, "cpu"),
    "per document, two rows": lambda ranks: _PerDocumentHeadTailLoadBalancer([[4, 9], [13]], ranks, "cpu"),
    "somebody's own": lambda ranks: Reversed(13),
}


@pytest.mark.parametrize("name", BALANCERS)
def test_without_buffers_shards_lie_in_the_order_that_they_were_cut_in(name):
    expected = alone(13)

    def run(mesh):
        parts = _context_parallel_shard(mesh, whole(13), [2] * 3, BALANCERS[name](mesh.ranks))
        leaves = [x.detach().requires_grad_() for x in parts]
        with context_parallel(mesh):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            (out**2).sum().backward()
        return context_parallel_unshard(mesh, [out.detach(), *(x.grad for x in leaves)], [2] * 4)

    assert all(close(found, expected) for found in on_ranks(3, run))


@pytest.mark.parametrize("name", BALANCERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unsharding_what_was_sharded_gives_it_back_whatever_the_order(name, ranks):
    tensor = torch.randn(2, 13, 3)

    def run(mesh):
        balancer = BALANCERS[name](mesh.ranks)
        named = {"x": tensor, "y": tensor.transpose(1, 2)}
        parts = _context_parallel_shard(mesh, named, {"y": 2, "x": 1}, balancer)
        said = context_parallel_unshard(mesh, [parts["x"], parts["y"]], [1, 2], balancer)
        unsaid = context_parallel_unshard(mesh, [parts["x"]], [1])  # the mesh remembers
        return all(torch.equal(a, b) for a, b in zip([*said, *unsaid], [*named.values(), tensor], strict=True))

    assert on_ranks(ranks, run) == [True] * ranks


def test_sharding_one_mesh_changes_nothing_on_another():
    """In torch, a shard call without a load balancer turns balance off everywhere."""

    def run(mesh):
        other = Counting(mesh)
        _context_parallel_shard(other, [torch.arange(8)], [0])
        positions = torch.arange(8)
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            return positions.tolist(), _cp_options.enable_load_balance

    assert on_ranks(2, run) == [(own, True) for own in HeadTail(2).positions(8)]


def test_shard_and_unshard_have_gradients():
    tensor = torch.randn(1, 9, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((tensor**3).sum(), tensor)

    def run(mesh):
        leaf = tensor.detach().requires_grad_()
        (part,) = _context_parallel_shard(mesh, [leaf], [1])
        (back,) = context_parallel_unshard(mesh, [part], [1])
        (back**3).sum().backward()  # every rank computes the same loss: gradients sum to `ranks` times it
        return leaf.grad

    assert close([sum(on_ranks(3, run)) / 3], [expected])

"""Shard, unshard, shift and shard_from, against loops over positions (cases.py): any layout, dtype, dim and rank count.

Gradients are held to the definition of an adjoint: <A x, y> = <x, A' y>, summed over ranks, in whole numbers that
float64 holds exactly, so that "equal" means equal.
"""

import copy
import io
import time
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from attnspan.errors import AttentionError, MaskError, ShardError, TransportError
from attnspan.layouts import Balanced, Contiguous, HeadTail, Striped
from attnspan.masks import Causal, Documents, Full
from attnspan.parallel import ContextParallel
from attnspan.parallel.marks import mark_of
from attnspan.testing import loopback
from attnspan.transports.counting import Counting
from tests.devices import here, mesh_of
from tests.layouts.strategies import lengths_of
from tests.pace import in_time, stretched
from tests.parallel.cases import DTYPES, Case, Listed, cases, numbers, on_ranks, same
from tests.processes import spawn

# ---- laws ------------------------------------------------------------------------------------------------------------


@given(cases())
def test_shard_takes_the_positions_of_the_layout_and_unshard_puts_them_back(case):
    def rank(cp, whole):
        shard = cp.shard(whole, **case.where)
        back = cp.unshard(shard, **case.where)
        assert same(shard, case.part(whole, cp.rank))
        assert same(back, whole)
        assert shard.is_contiguous()
        assert back.is_contiguous()
        assert back.data_ptr() != whole.data_ptr() or not whole.numel()

    on_ranks(case, rank)


def moved(case, whole, by, fill, documents=None):
    """Position p gets what is at p - by: one token after another."""

    def row(x, number, dim):
        names = None if documents is None else documents[number if len(documents) > 1 else 0]
        places = []
        for p in range(case.seq_len):
            there = 0 <= p - by < case.seq_len and (names is None or names[p] == names[p - by])
            nothing = torch.full(x.select(dim, p).shape, fill, dtype=x.dtype)
            places.append(x.select(dim, p - by) if there else nothing)
        return torch.stack(places, dim)

    return case.each_row(whole, row)


distances = st.integers(-12, 12) | st.sampled_from([2**63 - 1, -(2**63), 10**30])


@given(cases(), distances)
def test_shift_is_a_roll_of_the_whole_sequence_with_a_fill(case, by):
    fill = 1  # every dtype has it

    def rank(cp, whole):
        shard = cp.shift(cp.shard(whole, **case.where), by, fill, **case.where)
        assert same(shard, case.part(moved(case, whole, by, fill), cp.rank))
        assert shard.is_contiguous()

    on_ranks(case, rank)


def named(lengths):
    """The document of every position, by row."""
    return [[name for name, length in enumerate(row) for _ in range(length)] for row in lengths]


@given(cases(), st.integers(-12, 12), st.data())
def test_within_documents_nothing_crosses_their_borders(case, by, data):
    rows = case.tensor.shape[case.batch_dim] if case.tensor.dim() > 1 and data.draw(st.booleans()) else 1
    lengths = [data.draw(lengths_of(case.seq_len)) for _ in range(rows)]

    def rank(cp, whole):
        shard = cp.shift(cp.shard(whole, **case.where), by, 1, documents=True, **case.where)
        assert same(shard, case.part(moved(case, whole, by, 1, named(lengths)), cp.rank))

    on_ranks(case, rank, mask=Causal() & Documents(lengths))


@given(cases(), st.integers(-12, 12), st.data())
def test_only_tokens_that_cross_between_ranks_travel_when_shifted(case, by, data):
    lengths = data.draw(lengths_of(case.seq_len))
    names = named([lengths])[0]
    tokens = case.tensor.shape[case.dim]
    row_bytes = case.tensor.nbytes // max(1, tokens) // max(1, case.layout.rows)

    def crossing(source, target):
        """Bytes of the tokens of `target` that lie on `source`."""
        count = 0
        for row in range(case.layout.rows):
            positions = case.layout.positions(case.seq_len, row)
            there = {p for p in positions[source] if 0 <= p + by < case.seq_len and names[p] == names[p + by]}
            count += sum(p - by in there for p in positions[target])
        return count * row_bytes

    def rank(cp, whole):
        shard = cp.shard(whole, **case.where)
        cp.shift(shard, by, documents=True, **case.where)
        others = [peer for peer in range(cp.ranks) if peer != cp.rank]
        assert cp.transport.sent == {peer: n for peer in others if (n := crossing(cp.rank, peer))}
        assert cp.transport.received == {peer: n for peer in others if (n := crossing(peer, cp.rank))}

    on_ranks(case, rank, mask=Documents(lengths), through=Counting)


@given(cases(), st.data())
def test_shard_from_is_shard_and_sends_each_rank_its_own_part_alone(case, data):
    source = data.draw(st.integers(0, case.ranks - 1))

    def rank(cp, whole):
        given = whole if cp.rank == source else None
        shard = cp.shard_from(given, source=source, **case.where)
        assert same(shard, cp.shard(whole, **case.where))
        assert shard.is_contiguous()
        parts = {peer: case.part(whole, peer).nbytes for peer in range(cp.ranks)} if cp.rank == source else {}
        assert cp.transport.sent == {peer: size for peer, size in parts.items() if peer != source and size}

    on_ranks(case, rank, through=Counting)


@given(cases([torch.float64, torch.complex128]), st.integers(-6, 6))
def test_gradients_are_adjoints(case, by):
    """Of each move: what ranks get, against what they put in, with whole numbers for both."""
    moves = {
        "shard": lambda cp, x: cp.shard(x, **case.where),
        "unshard": lambda cp, x: cp.unshard(x, **case.where),
        "shift": lambda cp, x: cp.shift(x, by, **case.where),
    }

    def rank(cp, whole):
        found = {}
        for name, move in moves.items():
            x = whole if name == "shard" else case.part(whole, cp.rank)
            x = (x * (cp.rank + 1)).requires_grad_()
            out = move(cp, x)
            y = numbers(out.shape, out.dtype) * (3 - cp.rank)
            (grad,) = torch.autograd.grad(out, x, y)
            assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
            found[name] = (out.detach().conj() * y).sum(), (x.detach().conj() * grad).sum()
        return found

    told = on_ranks(case, rank)
    for name in moves:
        forth, back = (sum(each[name][side] for each in told) for side in (0, 1))
        assert forth == back, name


@given(cases([torch.float64]))
def test_moves_have_second_derivatives(case):
    """Gradients that keep their graph travel by the same moves: the loss is x^3, once on every rank."""

    def rank(cp, whole):
        x = (case.part(whole, cp.rank) + 1).requires_grad_()
        out = cp.unshard(cp.shift(x, 1, **case.where), **case.where).pow(3).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x)
        return x.detach(), slope.detach(), curve

    for x, slope, curve in on_ranks(case, rank):
        kept = slope != 0  # but for the last token, which a shift drops
        assert torch.equal(slope[kept], case.ranks * 3 * x[kept] ** 2)
        assert torch.equal(curve[kept], case.ranks * 6 * x[kept])
        assert not curve[~kept].any()


# ---- what is kept and what is not ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    tokens: torch.Tensor
    rest: list


def test_dicts_lists_and_named_tuples_are_sharded_leaf_by_leaf_and_left_as_they_were():
    def rank(world):
        cp = ContextParallel(world, seq_len=6, mask=Full(), layout=Contiguous(2))
        x = torch.arange(6.0).view(1, 6)
        tree = {"a": x, "b": Pair(x + 1, [(x + 2,)])}
        shard = cp.shard(tree)
        assert isinstance(shard["b"], Pair)
        assert torch.equal(shard["b"].rest[0][0], cp.shard(x + 2))
        assert torch.equal(cp.unshard(shard)["b"].tokens, x + 1)
        assert torch.equal(x, torch.arange(6.0).view(1, 6))

    loopback(2).run(rank)


def test_positions_are_a_copy_and_those_of_the_layout():
    rows = Listed(((3, 1, 0, 2), (0, 1, 2, 3)), (3, 1))

    def rank(world):
        cp = ContextParallel(world, seq_len=4, mask=Full(), layout=Contiguous(2))
        cp.positions.zero_()
        assert cp.positions.tolist() == [[0, 1], [2, 3]][cp.rank]
        cp = ContextParallel(world, seq_len=4, mask=Full(), layout=rows)
        assert cp.positions.tolist() == [[[3, 1, 0], [0, 1, 2]], [[2], [3]]][cp.rank]

    loopback(2).run(rank)


def test_what_was_made_during_inference_serves_training():
    def rank(world):
        with torch.inference_mode():
            cp = ContextParallel(world, seq_len=6, mask=Causal() & Documents([2, 4]))
            cp.shift(cp.shard(torch.ones(1, 6)), documents=True)
        x = torch.ones(1, 6, requires_grad=True)
        cp.unshard(cp.shift(cp.shard(x), documents=True)).sum().backward()
        return x.grad

    assert sum(loopback(2).run(rank)).tolist() == [[0, 2, 0, 2, 2, 2]]  # by two ranks each; first tokens are dropped


def test_the_default_device_does_not_matter():
    x = torch.arange(6.0).view(1, 6).requires_grad_()

    def rank(world):
        with torch.device("meta"):
            cp = ContextParallel(world, seq_len=6, mask=Causal() & Documents([2, 4]))
            out = cp.unshard(cp.shift(cp.shard(x), by=-1, documents=True))
            (grad,) = torch.autograd.grad(cp.mean_loss(out), x)
        assert out.tolist() == [[1, 0, 3, 4, 5, 0]]
        return grad

    grads = loopback(2).run(rank)
    torch.testing.assert_close(sum(grads) / 2, torch.tensor([[0, 1, 0, 1, 1, 1]]) / 6)  # first tokens are dropped


def test_a_shard_can_be_copied_saved_and_loaded_like_any_tensor():
    def rank(world):
        cp = ContextParallel(world, seq_len=6, mask=Full())
        shard, file = cp.shard(torch.arange(6).view(1, 6)), io.BytesIO()
        assert mark_of(shard) == mark_of(cp.shift(shard)) == cp.sharding.mark
        torch.save(shard, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=True), copy.deepcopy(shard), shard.clone(), shard + 0):
            assert mark_of(other) is None
            assert torch.equal(cp.unshard(other), torch.arange(6).view(1, 6))

    loopback(2).run(rank)


def test_shard_from_hands_out_a_dict_of_tensors():
    batch = {"ids": torch.arange(6).view(1, 6), "weights": torch.rand(1, 6, 2, dtype=torch.bfloat16)}

    def rank(world):
        cp = ContextParallel(world, seq_len=6, mask=Causal())
        found = cp.shard_from(batch if cp.rank == 1 else None, source=1)
        assert list(found) == ["ids", "weights"]
        assert all(same(found[name], cp.shard(whole)) for name, whole in batch.items())

    loopback(3).run(rank)


# ---- what is refused -------------------------------------------------------------------------------------------------

X = torch.arange(16).view(2, 8)
ROWS = Balanced(Causal() & Documents([[2, 6], [5, 3]]), ranks=2, chunk=1, per_row=True)


def session(world, **options):
    return ContextParallel(world, **{"seq_len": 8, "mask": Causal(), "layout": HeadTail(2), **options})


def rows_session(world):
    return session(world, layout=ROWS)


def of_another(cp):
    """A shard of as many tokens, in another layout."""
    return session(cp.transport, layout=Contiguous(2)).shard(X)


WRONG = {
    "a dim that is not": (session, lambda cp: cp.shard(X, dim=2), "dim must be one of the tensor's 2 dims, got 2"),
    "a dim that is no number": (session, lambda cp: cp.shard(X, dim="1"), "dim must be one of the tensor's 2 dims"),
    "a scalar": (session, lambda cp: cp.shard(torch.tensor(1), dim=0), "must be one of the tensor's 0 dims, got 0"),
    "another length": (
        session,
        lambda cp: cp.shard(X[:, :7]),
        "tensor must be whole, with seq_len=8 tokens in dim 1, got shape (2, 7); another length is another session",
    ),
    "another dim": (session, lambda cp: cp.shard(X, dim=0), "with seq_len=8 tokens in dim 0, got shape (2, 8)"),
    "sharded twice": (session, lambda cp: cp.shard(cp.shard(X)), "tensor is a shard already; shard the whole one"),
    "unshard of a whole": (
        session,
        lambda cp: cp.unshard(X),
        "with this rank's 4 of 8 tokens in dim 1, got shape (2, 8); this one is whole, and was never sharded",
    ),
    "shift of a whole": (session, lambda cp: cp.shift(X), "this one is whole, and was never sharded"),
    "unshard of some other length": (session, lambda cp: cp.unshard(X[:, :3]), "this rank's 4 of 8 tokens in dim 1"),
    "unshard of another layout": (
        session,
        lambda cp: cp.unshard(of_another(cp)),
        "part of 8 tokens in Contiguous(ranks=2); here it would be rank",
    ),
    "shift of another layout": (session, lambda cp: cp.shift(of_another(cp)), "use one ContextParallel for a whole"),
    "another device": (session, lambda cp: cp.shard(X.to("meta")), "must be on cpu, where the group is, got meta"),
    "unshard on another device": (session, lambda cp: cp.unshard(X[:, :4].to("meta")), "must be on cpu, where the"),
    "no tensor": (session, lambda cp: cp.shard({"a": [1, 2]}), "must be a tensor, or dicts and lists of them, got int"),
    "a sparse tensor": (session, lambda cp: cp.shard(X.to_sparse()), "tensor must be dense, got one of layout sparse"),
    "other batch rows": (
        rows_session,
        lambda cp: cp.shard(X[:1]),
        "tensor must have 2 batch rows in dim 0, got shape (1, 8)",
    ),
    "one dim for both": (rows_session, lambda cp: cp.shard(X, batch_dim=1), "dim and batch_dim must differ where"),
    "no batch dim": (rows_session, lambda cp: cp.shard(X[0], dim=0), "dim and batch_dim must differ where"),
    "a fill that bytes lack": (
        session,
        lambda cp: cp.shift(cp.shard(X.to(torch.uint8)), fill=-100),
        "fill must be a number that uint8 has, got -100",
    ),
    "a fraction among whole numbers": (session, lambda cp: cp.shift(cp.shard(X), fill=0.5), "that int64 has, got 0.5"),
    "a fill too large": (session, lambda cp: cp.shift(cp.shard(X.half()), fill=1e6), "that float16 has, got 1000000.0"),
    "no fill": (session, lambda cp: cp.shift(cp.shard(X), fill=None), "that int64 has, got None"),
    "a shift by a fraction": (session, lambda cp: cp.shift(cp.shard(X), by=0.5), "by must be a whole number of tokens"),
    "a source that is not": (session, lambda cp: cp.shard_from(X, source=2), "must be one of the 2 ranks, got 2"),
    "everybody a source": (session, lambda cp: cp.shard_from(X), "tensor must be given on rank 0 and be None on all"),
    "nobody a source": (session, lambda cp: cp.shard_from(None), "tensor must be given on rank 0 and be None on all"),
    "a source with another length": (
        session,
        lambda cp: cp.shard_from(X[:, 1:] if cp.rank == 0 else None),
        "with seq_len=8 tokens in dim 1, got shape (2, 7)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tensor_is_refused_on_every_rank_before_anything_travels(name):
    ready, wrong, message = WRONG[name]

    def rank(world):
        cp = ready(Counting(world))
        with pytest.raises(ShardError) as error:
            wrong(cp)
        assert not {"exchange", "gather"} & set(cp.transport.calls), "only an agreement may come before"
        return str(error.value)

    for said in loopback(2).run(rank):
        assert message in said


def test_documents_are_asked_of_a_mask_that_has_them():
    def rank(world):
        cp = session(Counting(world))
        with pytest.raises(MaskError, match=r"the mask must hold one Documents\(lengths\), joined by &, got 0"):
            cp.shift(cp.shard(X), documents=True)

    loopback(2).run(rank)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda cp, x: cp.unshard(x[:, :3]), "on rank 1: tensor must be a shard, with this rank's 4 of 8 tokens"),
        (lambda cp, x: cp.shift(x.half()), "all ranks must ask for the same; rank 1 asks for shift by -1 of "),
        (lambda cp, x: cp.shift(x, by=2), "all ranks must ask for the same; rank 1 asks for shift by 2 of "),
        (lambda cp, x: cp.unshard(x), "rank 1 asks for unshard of "),
        (lambda cp, x: session(cp.transport, layout=Contiguous(2)).shift(x + 0), "all ranks must ask for the same"),
    ],
    ids=["wrong length", "other dtype", "other distance", "other move", "other layout"],
)
def test_when_one_rank_is_wrong_every_rank_says_so(wrong, message):
    def rank(world):
        cp = session(world)
        right = cp.unshard if "unshard" in message and "on rank" in message else cp.shift
        with pytest.raises(ShardError) as error:
            wrong(cp, cp.shard(X)) if cp.rank == 1 else right(cp.shard(X))
        return str(error.value)

    said = loopback(2).run(rank)
    assert message in said[0]
    assert said[1] in said[0]


class Uneven(Listed):
    """One whose second batch row deals the ranks' counts the other way round."""

    def _shards(self, seq_len, row):
        return super()._shards(seq_len, row)[:: 1 - 2 * row]


def test_a_layout_whose_batch_rows_have_other_counts_is_refused_at_once():
    layout = Uneven((tuple(range(8)),) * 2, (5, 3))
    with pytest.raises(ShardError, match=r"layout gives rank 0 \[5, 3\] tokens of the batch rows; the rows of one"):
        loopback(2).run(lambda world: session(world, layout=layout, mask=Full()))


# ---- real processes --------------------------------------------------------------------------------------------------


def real_cases(ranks):
    """A few of everything; the laws above have tried the rest. Three ranks, a slow test, try all dtypes everywhere."""
    wheel = tuple((p * 5 + 3) % 13 for p in range(13))
    rows = Listed((wheel, tuple(range(13))), tuple(13 // ranks + (rank < 13 % ranks) for rank in range(ranks)))
    hollow = Listed((wheel,), (0, 13, *[0] * (ranks - 2)))
    for layout in (HeadTail(ranks), Striped(ranks), rows, hollow):
        every = ranks == 3 or isinstance(layout, HeadTail)
        for dtype in DTYPES if every else (torch.float64, torch.complex64):
            yield Case(layout, 13, numbers((2, 13, 3), dtype), 1, 0)


TIMEOUT = 2  # of the group that is kept waiting, in seconds of an idle machine


def moves(world):
    """Every move on every case, with gradients; then what is refused."""
    rank, ranks = world.rank, world.ranks
    for case in real_cases(ranks):
        cp, whole = session(None, seq_len=13, layout=case.layout, mask=Documents([5, 8])), case.tensor
        shard = cp.shard(whole)
        assert same(shard, case.part(whole, rank))
        assert same(cp.unshard(shard), whole)
        assert same(cp.shard_from(whole if rank == 1 else None, source=1), shard)
        for by, documents in ((-1, False), (3, True)):
            names = named([[5, 8]]) if documents else None
            expected = case.part(moved(case, whole, by, 1, names), rank)
            assert same(cp.shift(shard, by, 1, documents=documents), expected)
        if whole.is_complex() and cp.layout.rows == 1:  # lazily conjugated, in memory not yet what is to be sent
            assert same(cp.unshard(shard[0].conj(), dim=0), whole[0].conj())
        if whole.dtype == torch.float64:
            x = shard.clone().requires_grad_()
            cp.unshard(cp.shift(x, -1)).backward(whole)
            assert same(x.grad, case.part(moved(case, ranks * whole, 1, 0), rank))
    return refused_alike(rank, ranks), meshes() if ranks == 4 else None


def live(world):
    """All of it; then a rank that is wrong later, and a group that is no more."""
    alike, axes = moves(world)
    late = wrong_later(world.rank) if world.ranks == 2 else None
    return alike, late, axes, destroyed(world.ranks)


def refused_alike(rank, ranks):
    """What ranks say when one of them is wrong at first, and when one is wrong later."""
    cp, said = session(None, layout=HeadTail(ranks)), []
    for wrong in (lambda x: x[:, 1:], lambda x: x.half()):
        with pytest.raises(ShardError) as error:
            cp.unshard(wrong(cp.shard(here(X))) if rank == 1 else cp.shard(here(X)))
        said.append(str(error.value))
    return said


def destroyed(ranks):
    cp = session(None, layout=HeadTail(ranks))
    shard = cp.shard(X)
    dist.destroy_process_group()
    said = []
    uses = [cp.unshard, cp.shift, cp.mean_loss, cp.mean, cp.sum, lambda x: cp.attention(*x.expand(3, 1, 2, -1, 4))]
    for use in uses:
        with pytest.raises(TransportError) as error:
            use(shard.double() if use is not uses[-1] else torch.ones(cp.sharding.tokens, 4))
        said.append(str(error.value))
    with pytest.raises(TransportError, match=r"torch\.distributed is not initialised"):
        session(None)
    return said


def wrong_later(rank):
    """Rank 1 is wrong when all others have agreed: nobody returns, nobody hangs."""
    cp = session(dist.new_group(timeout=timedelta(seconds=stretched(TIMEOUT))))
    cp.unshard(cp.shard(X))
    began = time.monotonic()
    with pytest.raises((ShardError, TransportError)) as error:
        cp.unshard(cp.shard(X)[:, 1:] if rank == 1 else cp.shard(X))
    return type(error.value).__name__, time.monotonic() - began


def meshes():
    """What is said to meshes with axes that do not split the sequence."""
    grid = mesh_of(2, 2, names=("dp", "cp"))
    said = []
    for mesh in (grid, grid["dp"], mesh_of(4, names=("tp",))):
        with pytest.raises(AttentionError) as error:
            ContextParallel(mesh, seq_len=8, mask=Causal())
        said.append(str(error.value))
    cube = mesh_of(2, 2, 1, names=("a", "b", "c"))
    with pytest.raises(TransportError) as error:
        ContextParallel(cube, seq_len=8, mask=Causal())
    cp = ContextParallel(grid["cp"], seq_len=8, mask=Causal())
    assert torch.equal(cp.unshard(cp.shard(here(X))), here(X))
    return [*said, str(error.value)]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_processes_move_tensors_refuse_together_and_know_when_their_group_is_gone(ranks):
    told = spawn(ranks, live)
    check_refusals([(alike, axes) for alike, _, axes, _ in told])
    for _, _, _, gone in told:
        assert all("the process group was destroyed" in said for said in gone), gone
    if ranks == 2:
        (other, waited), (wrong, until) = [late for _, late, _, _ in told]
        assert (other, wrong) == ("TransportError", "ShardError")
        assert in_time(max(waited, until), TIMEOUT + 4)


@pytest.mark.nccl
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_of_nccl_move_tensors_and_refuse_together(ranks):
    check_refusals(spawn(ranks, moves, backend="nccl"))


def check_refusals(told):
    for rank, ((length, dtype), axes) in enumerate(told):
        assert "tensor must be a shard, with this rank's " in length
        assert length.startswith("on rank 1: ") == (rank != 1)
        assert "all ranks must ask for the same; rank 1 asks for unshard of float16 [2] along dim 1 in layout " in dtype
        assert (axes is not None) == (len(told) == 4)
        if axes is not None:
            both, dp, tp, three = axes
            assert both == "mesh: axis 'dp' does not split the sequence; pass mesh['cp']"
            assert dp.endswith("does not split the sequence; pass an axis for the sequence, such as mesh['cp']")
            assert tp.startswith("mesh: axis 'tp' does not split the sequence; ")
            assert "of one axis or two, got 3 axes" in three

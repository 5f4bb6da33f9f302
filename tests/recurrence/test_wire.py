"""Only planned bytes travel: maps of runs to ranks that wait for them, once forward and once backward."""

import pytest
import torch
from hypothesis import given, settings

import attnspan as span
from attnspan.layouts import Contiguous, PerDocument, Striped
from attnspan.parallel import recurrences
from attnspan.testing import loopback
from attnspan.transports.counting import Counting
from tests.recurrence.cases import Case, cases, of_rank


def runs(case):
    """By document, through the rows: the ranks of its runs in the order of the sequence, token by token."""
    rows = max(len(case.lengths), case.layout.rows)
    lengths = case.lengths if len(case.lengths) == rows else case.lengths * rows
    for row, each in enumerate(lengths):
        shards = case.layout.positions(case.seq_len, row)
        places = {p: (rank, place) for rank, shard in enumerate(shards) for place, p in enumerate(shard)}
        first = 0
        for length in each:
            held = [places[p] for p in range(first, first + length)]
            yield [
                rank
                for i, (rank, place) in enumerate(held)
                if i == 0 or held[i - 1] != (rank, place - 1)  # not the neighbour of the one before
            ]
            first += length


def expected(case, source, target, state, matrix):
    """Numbers that go from one rank to another, forward and backward."""
    alike = case.batch if max(len(case.lengths), case.layout.rows) == 1 else 1
    sent = [0, 0]
    for chain in runs(case):
        for way, ranks in enumerate((chain, chain[::-1])):
            for i, rank in enumerate(ranks):
                if rank == source and target in ranks[i + 1 :]:
                    sent[way] += state + (matrix if i else 0)
    return [alike * each for each in sent]


def sizes(case):
    """Numbers of a state, and of what a run does to it."""
    heads, k, v = case.heads, case.key_dim, case.value_dim
    per_head = {"GatedDelta": k * k, "DeltaNet": k * k, "KDA": k * k, "GLA": k}
    return heads * k * v, heads * per_head.get(case.rule, 1)


@settings(max_examples=25)
@given(cases(most=20))
def test_maps_travel_to_those_who_wait_for_them_and_to_nobody_else(case):
    def rank(world):
        counted = Counting(world)
        sessions = []
        of_rank(case, counted, session=lambda cp: sessions.append(cp) or cp)
        events = [event for event in counted.log if event.what == "maps of runs" and event.kind == "exchange"]
        assert len(events) == 2
        planned = sessions[0]._recurrences.recurrence.traffic(case.call(shards(sessions[0])))
        arriving = [0, 0]
        for peer in set(range(world.ranks)) - {world.rank}:
            bytes_to = [8 * n for n in expected(case, world.rank, peer, *sizes(case))]
            assert bytes_to == [event.sent.get(peer, 0) for event in events] == list(planned[peer])
            bytes_from = [8 * n for n in expected(case, peer, world.rank, *sizes(case))]
            assert bytes_from == [event.received.get(peer, 0) for event in events]
            arriving = [a + b for a, b in zip(arriving, bytes_from, strict=True)]
        (use,) = sessions[0].report().recurrences.values()
        assert use == (1, *arriving)
        assert layers.over(case.layout, case.mask, case.seq_len).arriving(world.rank) == tuple(arriving)

    sizes_of = (case.heads, case.key_dim, case.value_dim)
    kind = type(case.call(case.tensors)).__name__
    layers = span.RecurrentLayers(kind, *sizes_of, batch=case.batch, dtype="float64")
    assert (layers.state, layers.matrix) == sizes(case)

    def shards(cp):
        return {name: x if x.dim() == 1 else cp.shard(x) for name, x in case.tensors.items()}

    loopback(case.layout.ranks).run(rank)


@pytest.mark.parametrize("tokens", [64, 512])
def test_nothing_that_travels_grows_with_the_sequence(tokens):
    case = Case("GatedDelta", Contiguous(4), tokens, [[tokens]], 1)

    def rank(world):
        counted = Counting(world)
        cp = span.ContextParallel(counted, seq_len=tokens, mask=case.mask, layout=case.layout)
        cp.recurrence(case.call({name: cp.shard(x) for name, x in case.tensors.items()}))
        return sum(counted.sent.values())

    state, matrix = sizes(case)
    assert loopback(4).run(rank) == [8 * 3 * state, 8 * 2 * (state + matrix), 8 * (state + matrix), 0]


def test_documents_that_lie_whole_on_a_rank_send_nothing():
    lengths = [5, 9, 3, 7]
    case = Case("KDA", PerDocument(lengths, ranks=3), 24, [lengths], 2)

    def rank(world):
        counted = Counting(world)
        cp = span.ContextParallel(counted, seq_len=24, mask=case.mask, layout=case.layout)
        cp.recurrence(case.call({name: cp.shard(x) for name, x in case.tensors.items()}))
        return dict(counted.sent)

    whole = [set(chain) for chain in runs(case)]
    found = loopback(3).run(rank)
    assert all(len(ranks) == 1 for ranks in whole) == (found == [{}, {}, {}])
    assert loopback(3).run(rank) == found


def test_runs_so_short_that_their_maps_are_more_work_than_the_tokens_are_warned_of(monkeypatch):
    monkeypatch.setattr(recurrences, "LONG", 64)

    def rank(world):
        cp = span.ContextParallel(world, seq_len=64, mask=span.Causal(), layout=Striped(2, chunk=2))
        q = torch.ones(1, 32, 1, 32)
        cp.recurrence(span.GatedDelta(q, q, q, torch.zeros(1, 32, 1), torch.zeros(1, 32, 1)))
        cp.recurrence(span.Lightning(q, q, q))

    with pytest.warns(UserWarning, match="for maps") as caught:
        loopback(2).run(rank)
    assert {str(each.message) for each in caught} == {
        "GatedDelta: this rank holds 32 tokens in 16 runs, and computes 2.2 times as much for maps as one device does "
        "for all tokens. Use a layout of few long runs: Contiguous(ranks=2), HeadTail(ranks=2), or Balanced with "
        "most_runs=2"
    }


def test_runs_so_short_that_maps_outweigh_the_tokens_are_warned_of_once():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=256, mask=span.Causal(), layout=Striped(2))
        q, k, v = (torch.ones(1, 128, 4, 32) for _ in range(3))
        for _ in range(2):
            cp.recurrence(span.GatedDelta(q, k, v, torch.zeros(1, 128, 4), torch.zeros(1, 128, 4)))

    with pytest.warns(UserWarning, match="of their maps in a forward pass") as caught:
        loopback(2).run(rank)
    said = sorted(str(each.message) for each in caught)
    assert len(said) == 2  # of each rank one
    assert said[1].startswith(
        "GatedDelta: this rank holds 128 tokens in 128 runs, and sends 4.0 MiB of their maps in a "
    )
    assert (
        "sending all tokens to all ranks would take 0.2 MiB. Use a layout of few long runs: Contiguous(ranks="
        in said[1]
    )


def test_a_report_tells_of_recurrences():
    case = Case("GatedDelta", Contiguous(2), 8, [[8]], 1, heads=2, key_dim=2, value_dim=2)

    def rank(world):
        sessions = []
        of_rank(case, world, session=lambda cp: sessions.append(cp) or cp)
        cp = sessions[0]
        told = str(cp.report())
        cp.reset()
        return told, cp.report().recurrences

    first, second = loopback(2).run(rank)
    assert first[0].splitlines()[-1] == "GatedDelta: 1 calls; maps received: 0 B forward, 64 B backward"
    assert second[0].splitlines()[-1] == "GatedDelta: 1 calls; maps received: 64 B forward, 0 B backward"
    assert first[1] == {}

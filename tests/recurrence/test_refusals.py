"""What does not fit is refused on every rank before anything travels, in words."""

import pytest
import torch

import attnspan as span
from attnspan.layouts import Contiguous
from attnspan.testing import loopback
from attnspan.transports.counting import Counting

B, S, H, K, V = 1, 4, 2, 3, 5  # of one rank


def tensors(**changed):
    shapes = {"query": (B, S, H, K), "key": (B, S, H, K), "value": (B, S, H, V), "decay": (B, S, H), "beta": (B, S, H)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()} | changed


def ssd(**changed):
    shapes = {"x": (B, S, H, V), "dt": (B, S, H), "A": (H,), "B": (B, S, 1, K), "C": (B, S, 1, K)}
    return span.SSD(**{name: torch.zeros(shape) for name, shape in shapes.items()} | changed)


def delta(**changed):
    return span.GatedDelta(**tensors(**changed))


REFUSED = {
    "another key": (lambda: delta(key=torch.zeros(B, S, H, 4)), {}, r"key must be \(B, S, G, K\) with .* K = 3, got "),
    "a decay per channel": (
        lambda: delta(decay=torch.zeros(B, S, H, K)),
        {},
        r"decay must be \(B, S, H\) with B = 1, S = 4, H = 2, got shape \(1, 4, 2, 3\)",
    ),
    "heads that do not divide": (
        lambda: delta(value=torch.zeros(B, S, 3, V), decay=torch.zeros(B, S, 3), beta=torch.zeros(B, S, 3)),
        {},
        r"heads of values must be a multiple of those of keys, got 3 and 2",
    ),
    "whole numbers": (
        lambda: delta(beta=torch.zeros(B, S, H, dtype=torch.int64)),
        {},
        r"beta must be a tensor of float32, bfloat16, float16 or float64, got int64",
    ),
    "no heads": (
        lambda: ssd(x=torch.zeros(B, S, 0, V)),
        {},
        r"x must have a batch, heads and a head dim, got shape \(1, 4, 0, 5\)",
    ),
    "another A": (lambda: ssd(A=torch.zeros(3)), {}, r"A must be \(H\) with H = 2, got shape \(3,\)"),
    "whole tensors": (
        lambda: span.Lightning(*[torch.zeros(1, 8, 1, 2)] * 3),
        {},
        r"query must have this rank's 4 of 8 tokens, got 8; these are whole, and were never sharded",
    ),
    "a state of another shape": (
        delta,
        {"initial_state": torch.zeros(2, H, V, K)},
        r"initial_state must be \(2, 2, 3, 5\), a state for each of 2 documents through all batch rows, got ",
    ),
    "a state for each row": (
        delta,
        {"initial_state": torch.zeros(B, H, K, V)},
        r"initial_state must be \(2, 2, 3, 5\), a state for each of 2 documents",
    ),
    "no decay of KDA": (
        lambda: span.KDA(**tensors(decay=None)),
        {},
        r"decay must be a tensor of float.*, got NoneType",
    ),
    "no decay of GLA": (
        lambda: span.GLA(*[torch.zeros(B, S, H, K)] * 3, None),
        {},
        r"decay must be a tensor of float.*, got NoneType",
    ),
    "no beta": (lambda: delta(beta=None), {}, r"beta must be a tensor of float.*, got NoneType"),
    "no dt": (lambda: ssd(dt=None), {}, r"dt must be a tensor of float.*, got NoneType"),
    "no query": (
        lambda: span.Lightning(None, *[torch.zeros(B, S, H, K)] * 2),
        {},
        r"query must be a tensor of float.*, got NoneType",
    ),
    "a scale in words": (lambda: delta(scale="x"), {}, r"scale must be a number, or None .*, got 'x'"),
    "a state that is a number": (delta, {"initial_state": 0.0}, r"initial_state must be a tensor, .*, got float"),
    "a tensor for a list of them": (
        lambda: span.Affine(print, torch.zeros(B, S, 3), (3, 1)),
        {},
        r"inputs must be a list of at least one tensor, as in \[x\], got Tensor",
    ),
    "inputs that are no tensors": (
        lambda: span.Affine(print, [1.0], (3, 1)),
        {},
        r"inputs must be a list of .*, got \['float'\]",
    ),
    "no function": (
        lambda: span.Affine(None, [torch.zeros(B, S, 3)], (3, 1)),
        {},
        r"fn must be a function, .* NoneType",
    ),
    "an empty state": (
        lambda: span.Affine(print, [torch.zeros(B, S, 3)], (3, 0)),
        {},
        r"state_shape must be sizes of at least 1, got \(3, 0\)",
    ),
    "no rule": (lambda: torch.zeros(2), {}, r"rule must be one such as GatedDelta\(query, key, ...\), got Tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_travels(name):
    rule, options, words = REFUSED[name]

    def rank(world):
        counted = Counting(world)
        cp = span.ContextParallel(counted, seq_len=8, mask=span.Documents([5, 3]), layout=Contiguous(2))
        wrong = world.rank == 1
        with pytest.raises(span.RecurrenceError, match=words):
            cp.recurrence(rule() if wrong else delta(), **(options if wrong else {}))
        assert counted.sent == {}
        assert cp.recurrence(delta()).shape == (B, S, H, V)  # and the session goes on

    loopback(2).run(rank)


def test_ranks_that_ask_for_different_rules_are_told_so():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Causal(), layout=Contiguous(2))
        x = torch.zeros(B, S, H, K)
        cp.recurrence(span.Lightning(x, x, x, scale=1.0 if world.rank else None))

    with pytest.raises(span.ShardError, match=r"rank 1 asks for recurrence Lightning of .*, scale=1.0.* scale=None"):
        loopback(2).run(rank)


def test_documents_that_do_not_sum_are_refused():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=span.Documents([5, 2]), layout=Contiguous(2))
        cp.recurrence(delta())

    with pytest.raises(span.AttnspanError, match=r"they must have 8 tokens together, got \[7\]|must (sum|add)"):
        loopback(2).run(rank)


def test_rows_of_another_number_are_refused():
    mask = span.Causal() & span.Documents([[5, 3], [2, 6]])

    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=mask, layout=Contiguous(2))
        cp.recurrence(delta())

    with pytest.raises(span.RecurrenceError, match="query must have the 2 batch rows of the session, got 1"):
        loopback(2).run(rank)


def test_tangents_and_transforms_are_refused():
    def rank(world):
        cp = span.ContextParallel(world, seq_len=4, mask=span.Causal())
        x = torch.zeros(1, 4, 1, 2)
        with pytest.raises(span.RecurrenceError, match="recurrence"):
            torch.func.grad(lambda x: cp.recurrence(span.Lightning(x, x, x)).sum())(x)

    loopback(1).run(rank)


D = span.Documents([5, 3])


@pytest.mark.parametrize(
    "mask",
    [(span.Causal() & D) | (span.PrefixLM(2) & D), D | (D & span.SlidingWindow(2)), span.Causal() & ~D, {"a": D | D}],
)
def test_documents_that_cannot_be_read_are_refused(mask):
    x = torch.ones(1, 4, 2, 3)
    calls = [lambda cp: cp.recurrence(span.Lightning(x, x, x)), lambda cp: cp.conv1d(x[..., 0], torch.ones(2, 3))]
    calls += [lambda cp: cp.halo(x, 1), lambda cp: cp.stretches]

    def rank(world):
        cp = span.ContextParallel(world, seq_len=8, mask=mask, layout=Contiguous(2))
        for call in calls:
            with pytest.raises(
                span.AttnspanError, match=r"must hold Documents\(lengths\) joined by & only, got .*; write"
            ):
                call(cp)

    loopback(2).run(rank)


def test_documents_that_are_also_behind_an_or_are_read():
    def rank(world):
        mask = D & (span.Causal() | (D & span.SlidingWindow(2)))
        return span.ContextParallel(world, seq_len=8, mask=mask, layout=Contiguous(2)).stretches

    assert [[len(run.positions) for run in rows[0]] for rows in loopback(2).run(rank)] == [[4], [1, 3]]

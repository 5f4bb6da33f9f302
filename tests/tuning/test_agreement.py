"""Ranks with different tables run the same plan."""

import sys
import threading

import pytest
import torch

from attnspan.attention import attention
from attnspan.attention.tuned import group_tuning
from attnspan.errors import AttentionError, TuningError
from attnspan.layouts import Contiguous
from attnspan.masks import Causal
from attnspan.plan import Link
from attnspan.testing import loopback
from attnspan.transports import Counting
from tests.tuning.test_table import rate, table

RANKS, TOKENS = 3, 12


@pytest.fixture
def tables(monkeypatch):
    """What each rank finds, to be set by the test; an error is raised."""
    found = {}

    def finding(device):
        mine = found[int(threading.current_thread().name.split()[-1])]
        if isinstance(mine, Exception):
            raise mine
        return mine

    for module in ("tuned", "bound_plan"):
        monkeypatch.setattr(sys.modules[f"attnspan.attention.{module}"], "table_for", finding)
    return found


def heard(world):
    known = group_tuning(world).table
    return known and known.date


def test_tables_that_are_alike_are_taken_as_they_are(tables):
    tables.update({rank: table(date="one") for rank in range(RANKS)})

    def rank(world):
        counting = Counting(world)
        return heard(counting), heard(counting), counting.calls["agree"]

    assert loopback(RANKS).run(rank) == [("one", "one", 1)] * RANKS


def test_of_tables_that_differ_rank_0s_is_everybodys(tables):
    tables.update({0: table(date="zero"), 1: table(date="one"), 2: None})
    assert loopback(RANKS).run(heard) == ["zero"] * RANKS
    tables.update({0: None, 1: table(date="one"), 2: None})
    assert loopback(RANKS).run(heard) == [None] * RANKS


def run_auto(world):
    x = torch.randn(1, 3, TOKENS // RANKS, 8)
    layout = Contiguous(RANKS)
    counting = Counting(world)
    for _ in range(2):
        attention(x, x, x, mask=Causal(), layout=layout, seq_len=TOKENS, group=counting)
    return counting.calls["agree"], sorted(event.what for event in counting.log if event.kind == "exchange")


def test_ranks_with_different_tables_run_one_strategy(tables):
    """Rank 0's table says that messages are dear; by those of the others heads would be exchanged."""
    dear, cheap = table(inside=Link(1e3, 1.0)), table(inside=Link(1e12, 1e-9))
    ran = {}
    for name, found in {"dear": [dear] * 3, "cheap": [cheap] * 3, "mixed": [dear, cheap, cheap]}.items():
        tables.update(enumerate(found))
        ran[name] = loopback(RANKS).run(run_auto)
    assert [what for _, what in ran["mixed"]] == [what for _, what in ran["dear"]]
    assert [what for _, what in ran["mixed"]] != [what for _, what in ran["cheap"]], "or the tables would not matter"
    assert [calls for calls, _ in ran["mixed"]] == [3] * RANKS, "hashes, rank 0's table, the plan"
    assert [calls for calls, _ in ran["dear"]] == [2] * RANKS


def test_a_table_that_one_rank_cannot_read_is_refused_on_every_rank(tables):
    tables.update({0: None, 1: TuningError("x.json is damaged"), 2: None})

    def rank(world):
        with pytest.raises(TuningError) as refused:
            run_auto(world)
        return str(refused.value)

    assert loopback(RANKS).run(rank) == ["on rank 1: x.json is damaged"] * RANKS


def test_so_it_is_where_the_strategy_is_given_and_only_kernels_are_chosen(tables):
    tables.update({0: None, 1: TuningError("x.json is damaged"), 2: None})

    def rank(world):
        x = torch.randn(1, 2, TOKENS // RANKS, 8)
        how = {"mask": Causal(), "layout": Contiguous(RANKS), "seq_len": TOKENS, "group": world, "strategy": "ring"}
        with pytest.raises(AttentionError) as refused:
            attention(x, x, x, **how)
        return str(refused.value), attention(x, x, x, **how, kernel="cpu_flash").shape[2]

    assert loopback(RANKS).run(rank) == [("on rank 1: x.json is damaged", TOKENS // RANKS)] * RANKS


def test_ranks_may_compute_with_kernels_of_their_own(tables):
    slow = (rate("reference", kind, size=4, forward=1.0) for kind in ("full", "causal"))
    fast = (rate("cpu_flash", kind, size=4, forward=9.0) for kind in ("full", "causal"))
    tables.update({0: None, 1: table(*slow, *fast), 2: None})
    assert len(loopback(RANKS).run(run_auto)) == RANKS

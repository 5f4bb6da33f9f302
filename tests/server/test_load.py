"""Under load, with clients that leave and drop their connections, answers stay the engine's and no page is lost.

The long form is benchmarks/server_load.py: 500 clients for ten minutes, and the memory of a server in its own process.
"""

import asyncio
import json

import pytest

from benchmarks.server_load import ACTIONS, MODEL, Case, catalogue, load
from tests.server.servers import engine, is_idle, running, until


@pytest.fixture(scope="module")
def cases():
    return catalogue(engine(), 40, longest=20)


def under_load(cases, streams, seconds):
    with running(options={"max_sequences": 16, "pages": 128}, max_waiting=20) as server:  # samples are preempted
        tally = asyncio.run(load(server.address, cases, streams, seconds))
        until(lambda: is_idle(server))
        stats = server.engine.stats()
        assert server.engine.failed_steps == 0
    return tally, stats


def test_answers_are_those_of_the_engine_and_no_page_is_lost(cases):
    tally, stats = under_load(cases, 24, seconds=3)
    assert tally.wrong == []
    assert tally.counts["finished"] > 10
    assert stats.pages_used == stats.running == stats.waiting == 0


@pytest.mark.slow
def test_for_longer_every_kind_of_client_comes(cases):
    tally, stats = under_load(cases, 60, seconds=40)
    assert tally.wrong == []
    assert all(tally.counts[action] for action in (*ACTIONS, "left", "429"))
    assert stats.finished["cancelled"] > 0
    assert stats.pages_used == 0


def test_twin_an_answer_that_is_wrong_is_noticed(cases):
    other = [Case(case.body, (*case.texts[:-1], "not that")) for case in cases]
    tally, _ = under_load(other, 8, seconds=1)
    assert any("not that" in each for each in tally.wrong)
    assert json.dumps(cases[0].body).count(MODEL) == 1

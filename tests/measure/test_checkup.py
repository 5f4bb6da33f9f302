"""The self-test: what is right is far below its bound, and bytes are those of the plan."""

import pytest

from attnspan.attention import Attention
from attnspan.measure import checkup
from attnspan.measure.checkup import BOUND, Trial, self_test
from attnspan.testing import loopback


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_strategy_is_far_below_the_bound_and_receives_what_is_planned(ranks):
    for found in loopback(ranks).run(self_test):
        assert [finding.wrong for finding in found.strategies] == [""] * len(checkup.strategies(ranks))
        assert all(finding.error < BOUND / 4 for finding in found.strategies)
        assert (found.link is None) == (ranks == 1)


def test_twin_keys_that_nobody_needs_are_noticed(monkeypatch):
    everything = Trial(2).plan("gather")
    monkeypatch.setattr(checkup, "Attention", lambda plan, *given, **options: Attention(everything, *given, **options))
    wrong = {finding.strategy: finding.wrong for finding in loopback(2).run(self_test)[0].strategies}
    assert wrong["gather"] == ""
    assert wrong["needed(2)"] == "received 32768 bytes, the plan says 25600"


def test_an_error_names_the_strategy(monkeypatch):
    def refuse(plan, transport, **options):
        raise ValueError("no such thing")

    monkeypatch.setattr(checkup, "Attention", refuse)
    with pytest.raises(checkup.TransportError, match="ring: ValueError: no such thing"):
        loopback(2).run(self_test)

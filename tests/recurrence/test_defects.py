"""The laws can fail: every planted defect turns one of two cases red that is green without it."""

from dataclasses import replace

import pytest
import torch

from attnspan.layouts import Contiguous, HeadTail
from attnspan.parallel import recurrences
from attnspan.recurrence import chunked, plan, run, scan
from tests.recurrence.cases import Case, distance, on_ranks, truth
from tests.recurrence.test_conv import convolved, expected_conv

CHAIN = Case("GatedDelta", Contiguous(5), 40, [[40]], 1, key_dim=3, value_dim=3)
PACKED = Case("KDA", HeadTail(3), 40, [[9, 20, 11]], 2)


def apart():
    """How far the worst result is from the oracle's."""
    try:
        return max(max(distance(on_ranks(case), truth(case)).values()) for case in (CHAIN, PACKED))
    except RuntimeError as raised:
        return str(raised)


def test_without_a_defect_all_is_well():
    assert apart() < 1e-9


def wrong_order(patch):
    """AffineMaps are composed from the last to the first."""
    whole = plan.RankPlan._route

    def _route(self, step, own):
        route = whole(self, step, own)
        return replace(route, links=route.links.flip(0), link_matrices=route.link_matrices.flip(0))

    patch.setattr(plan.RankPlan, "_route", _route)


def missed_reset(patch):
    """The state goes on where a document begins."""
    patch.setattr(recurrences, "borders", lambda masks, length: torch.zeros(1, length, dtype=torch.int64))
    patch.setattr(recurrences.Recurrences, "_check_state", lambda *given: None)
    whole = run.Recurrence.states

    def states(self, given, rule):
        return whole(self, given[:: len(given) // rule.sizes["B"]], rule)

    patch.setattr(run.Recurrence, "states", states)


def dropped_gradient_of_a(patch):
    """What a run does to a state is taken for constant."""
    patch.setattr(scan.AffineMaps, "outer", lambda self, grad, state: grad @ state.mT * 0)


def untransposed(patch):
    """Gradients go back by the matrices of the forward pass."""
    patch.setattr(scan.AffineMaps, "transposed", lambda self, a: a)


def decay_missed(patch):
    """Keys that do not decay to the end of their chunk."""
    whole = chunked._by_halves
    patch.setattr(chunked, "_by_halves", lambda rows, key, factor: whole(rows, key, factor)._replace(key=key))


def uncorrected(patch):
    """Chunks keep the states of a scan from zero."""
    whole = scan._exchange_maps

    def exchanged(*given):
        header, arrived = whole(*given)
        return header, arrived * 0

    patch.setattr(scan, "_exchange_maps", exchanged)


def forgotten_initial_state(patch):
    """Chains begin with nothing."""
    whole = scan.states_of
    patch.setattr(scan, "states_of", lambda job, maps, initial: whole(job, maps, initial * 0))


DEFECTS = [
    wrong_order,
    missed_reset,
    dropped_gradient_of_a,
    untransposed,
    decay_missed,
    uncorrected,
    forgotten_initial_state,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_seen(defect, monkeypatch):
    defect(monkeypatch)
    found = apart()
    assert isinstance(found, str) or not found < 1e-3


def test_a_halo_across_documents_is_seen(monkeypatch):
    lengths, layout = [9, 20, 11], HeadTail(3)
    assert convolved(layout, lengths) == pytest.approx(expected_conv(lengths), abs=1e-9)
    whole = recurrences.before

    def across(stretches, *rest):
        return whole(replace(stretches, document=torch.zeros_like(stretches.document)), *rest)

    monkeypatch.setattr(recurrences, "before", across)
    assert convolved(layout, lengths) != pytest.approx(expected_conv(lengths), abs=1e-3)

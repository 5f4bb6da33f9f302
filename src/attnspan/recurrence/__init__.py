"""Recurrent layers over ranks: a run of tokens maps a state, affinely. See scan.py for the idea, rules.py for laws."""

from attnspan.layouts.document_runs import Stretches
from attnspan.recurrence.affine import Affine, TestedFunctions
from attnspan.recurrence.packed import PackedSequences
from attnspan.recurrence.plan import RankPlan
from attnspan.recurrence.rules import GLA, KDA, SSD, GatedDelta, Lightning, Rule
from attnspan.recurrence.run import Recurrence

__all__ = [
    "GLA",
    "KDA",
    "SSD",
    "Affine",
    "GatedDelta",
    "Lightning",
    "PackedSequences",
    "RankPlan",
    "Recurrence",
    "Rule",
    "Stretches",
    "TestedFunctions",
]

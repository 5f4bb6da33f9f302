"""Plans: when and where. See plan.py for the idea, strategy.py for who sends what, choose.py for which to take."""

from attnspan.masks.tile import Tile
from attnspan.plan.choose import Choice, choose
from attnspan.plan.cost import Hardware, Link, Shape
from attnspan.plan.plan import Plan
from attnspan.plan.recurrent import RecurrentLayers
from attnspan.plan.step import Step, Transfer
from attnspan.plan.strategy import Gather, Needed, Ring, Strategy, Ulysses
from attnspan.plan.timeline import Timeline, predict

__all__ = [
    "Choice",
    "Gather",
    "Hardware",
    "Link",
    "Needed",
    "Plan",
    "RecurrentLayers",
    "Ring",
    "Shape",
    "Step",
    "Strategy",
    "Tile",
    "Timeline",
    "Transfer",
    "Ulysses",
    "choose",
    "predict",
]

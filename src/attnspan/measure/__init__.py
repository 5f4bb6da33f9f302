"""Measure: a stopwatch for tiles, links and whole strategies.

tune.py makes a table of tiles.py and links, strategies.py a bench; ranks.py finds the ranks to run them on.
checkup.py tests whether ranks compute what they should.
"""

from attnspan.measure.chart import chart
from attnspan.measure.ranks import Ranks
from attnspan.measure.strategies import Bench, Measured, Workload
from attnspan.measure.tune import Tuning, tune

__all__ = ["Bench", "Measured", "Ranks", "Tuning", "Workload", "chart", "tune"]

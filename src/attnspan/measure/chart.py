"""A chart of a bench: for each strategy and kernel two bars, measured and predicted. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnspan.errors import PlanError
from attnspan.measure.strategies import Measured


def chart(rows: Sequence[Measured], title: str, path: str | Path) -> Path:
    """Write it; the kind of file follows from the name."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if not row.refused]
    figure = Figure(figsize=(8.5, 1.2 + 0.45 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    places = [float(place) for place in range(len(shown))]
    for times, shift, label, colour in (
        ([row.seconds for row in shown], -0.2, "measured", "tab:blue"),
        ([row.predicted for row in shown], 0.2, "predicted", "lightgrey"),
        ([row.exposed for row in shown], 0.2, "of it waiting", "tab:orange"),
    ):
        bars, widths = [place + shift for place in places], [1e3 * seconds for seconds in times]
        axes.barh(bars, widths, height=0.38, label=label, color=colour)
    axes.set_yticks(places, [f"{row.strategy}\n{row.kernel}" for row in shown])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title=title)
    axes.legend()
    figure.savefig(path, dpi=110)
    return Path(path)


def check_chart(name: str, path: Path) -> None:
    """Refuse a chart that could not be written, before anything is measured for it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(f'{name} needs matplotlib, which is not installed; run pip install "attnspan[plot]"') from None
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise PlanError(f"{name} must be a file such as chart.png, of one kind of {', '.join(kinds)}, got {path}")
    if not path.parent.is_dir():
        raise PlanError(f"{name}: the folder {path.parent} does not exist; make it first")

"""Curves, in the terminal and as PNGs."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tensorstore_ck.cli.output import printable, red, step_text, table
from tensorstore_ck.maintenance.metric_plot import Point, draw_points, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_CHARS = 50


def save_png(figure: "Figure", path: str) -> None:
    """Writes a figure."""
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")


def draw_text(points: Sequence[Point], metric: str) -> Iterator[str]:
    """A bar for each point, scaled from the lowest value to the highest; a red mark for NaN and infinity."""
    finite = [point.value for point in points if math.isfinite(point.value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = BAR_CHARS / (high - low) if high > low else 0.0
    bars = ["#" * (1 + round(scale * (point.value - low))) if math.isfinite(point.value) else red("!") for point in points]
    rows = [[printable(point.ref), step_text(point.step), f"{point.value:.6g}", bar] for point, bar in zip(points, bars, strict=True)]
    yield from table(["REF", "STEP", printable(metric), ""], rows, right={"STEP", printable(metric)})


def draw_png(points: Sequence[Point], metric: str, path: str) -> None:
    """See `draw_points`."""
    figure, axes = new_figure()
    draw_points(axes, points, metric)
    save_png(figure, path)

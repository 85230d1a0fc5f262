"""Curves, in the terminal and as PNGs."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorstore_ck.cli.output import printable, red, step_text, table
from tensorstore_ck.common.extras import missing_extra
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.log.snapshot import Snapshot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_CHARS = 50


class Point(NamedTuple):
    """A metric of a snapshot."""

    ref: str
    step: int | None
    value: float


def new_figure() -> "tuple[Figure, Any]":
    """A figure and its axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise missing_extra("plot", "drawing") from exc
    figure = Figure(figsize=(7, 4.5))
    return figure, figure.subplots()


def save_png(figure: "Figure", path: str) -> None:
    """Writes a figure."""
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")


def metric_points(snapshots: Sequence[Snapshot], metric: str) -> list[Point]:
    """The values of a metric, NaN and infinity too, oldest snapshot first; without snapshots that lack it.

    Raises:
        NotFoundError: no snapshot has it.
    """
    found = [Point(snapshot.ref, snapshot.step, snapshot.metrics[metric]) for snapshot in reversed(snapshots) if metric in snapshot.metrics]
    if not found:
        known = sorted({name for snapshot in snapshots for name in snapshot.metrics})
        raise NotFoundError(f"no snapshot has a metric {metric!r}; there are: {', '.join(known) or 'no metrics'}", object_id=metric)
    return found


def draw_text(points: Sequence[Point], metric: str) -> Iterator[str]:
    """A bar for each point, scaled from the lowest value to the highest; a red mark for NaN and infinity."""
    finite = [point.value for point in points if math.isfinite(point.value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = BAR_CHARS / (high - low) if high > low else 0.0
    bars = ["#" * (1 + round(scale * (point.value - low))) if math.isfinite(point.value) else red("!") for point in points]
    rows = [[printable(point.ref), step_text(point.step), f"{point.value:.6g}", bar] for point, bar in zip(points, bars, strict=True)]
    yield from table(["REF", "STEP", printable(metric), ""], rows, right={"STEP", printable(metric)})


def draw_png(points: Sequence[Point], metric: str, path: str) -> None:
    """A line for each ref, over steps; it has a gap, and a red line from top to bottom, where a value is NaN or infinite."""
    figure, axes = new_figure()
    lost = "NaN or infinite"
    for ref in dict.fromkeys(point.ref for point in points):
        own = [(number if point.step is None else point.step, point.value) for number, point in enumerate(points) if point.ref == ref]
        axes.plot([step for step, _ in own], [value if math.isfinite(value) else math.nan for _, value in own], marker=".", label=ref)
        for step in (step for step, value in own if not math.isfinite(value)):
            axes.axvline(step, color="red", linestyle=":", label=lost)
            lost = "_"  # matplotlib: not in the legend again
    axes.set(xlabel="step", ylabel=metric)
    axes.legend()
    save_png(figure, path)

"""A metric over the snapshots of branches: its points, and a drawing of them with matplotlib."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorstore_ck.common.extras import extra
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.log.snapshot import Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """A metric of a snapshot."""

    ref: str
    step: int | None
    value: float


def new_figure() -> "tuple[Figure, Any]":
    """A figure, which no window shows, and its axes. Raises `MissingExtraError` if matplotlib is not installed."""
    with extra("plot", "drawing"):
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    figure = Figure(figsize=(7, 4.5))
    return figure, figure.subplots()


def shown_axes() -> "Axes":
    """The axes of a new figure of pyplot, which notebooks show. Raises `MissingExtraError` if matplotlib is not installed."""
    with extra("plot", "drawing"):
        from matplotlib import pyplot  # noqa: PLC0415 - an extra
    axes: Axes = pyplot.subplots()[1]
    return axes


def metric_points(snapshots: Sequence[Snapshot], metric: str) -> list[Point]:
    """The values of a metric, NaN and infinity too, oldest snapshot first; without snapshots that lack it.

    Raises:
        NotFoundError: no snapshot has it.
    """
    points = [
        Point(snapshot.ref, snapshot.step, snapshot.metrics[metric]) for snapshot in reversed(snapshots) if metric in snapshot.metrics
    ]
    if not points:
        known = sorted({name for snapshot in snapshots for name in snapshot.metrics})
        raise NotFoundError(f"no snapshot has a metric {metric!r}; there are: {', '.join(known) or 'no metrics'}", object_id=metric)
    return points


def draw_points(axes: "Axes", points: Sequence[Point], metric: str) -> None:
    """A line for each ref, over steps; it has a gap, and a red line from top to bottom, where a value is NaN or infinite."""
    lost = "NaN or infinite"
    for ref in dict.fromkeys(point.ref for point in points):
        own = [(number if point.step is None else point.step, point.value) for number, point in enumerate(points) if point.ref == ref]
        axes.plot([step for step, _ in own], [value if math.isfinite(value) else math.nan for _, value in own], marker=".", label=ref)
        for step in (step for step, value in own if not math.isfinite(value)):
            axes.axvline(step, color="red", linestyle=":", label=lost)
            lost = "_"  # matplotlib: not in the legend again
    axes.set(xlabel="step", ylabel=metric)
    axes.legend()

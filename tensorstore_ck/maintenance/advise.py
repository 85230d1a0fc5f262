"""Advises how often a job should save, from its history in the log and from measured costs."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from tensorstore_ck.common.units import human_seconds
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.address import resolve
from tensorstore_ck.maintenance.optimal_interval import DEFAULT_MTBF_SECONDS, SaveCosts, best, daly, ettr, require_costs, young
from tensorstore_ck.redaction import one_line

NEWEST: Final = 200
"""Snapshots to look at."""
CURVE_POINTS: Final = 41
DAY_SECONDS: Final = 86_400
NOTE: Final = "checkpointer"
"""Metadata key of `Checkpointer`: when a run began, how often it was resumed, and what saving costs."""
GOOD_ENOUGH: Final = 0.005
"""Share of wall time: an interval that loses less than this against the best one is kept."""

_ASSUMED: Final = {"stall": None, "lag": 0.0, "restart": 300.0, "mtbf": DEFAULT_MTBF_SECONDS}
Source = Literal["given", "measured", "assumed"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Costs, the best interval, and advice. Times in seconds; an interval is training between two saves."""

    ref: str
    costs: SaveCosts
    sources: dict[str, Source]
    """The source of each cost."""
    snapshots: int
    """Number of snapshots that were looked at."""
    interval: float | None
    """The job's present interval: the median between two saves, less the stall; None with fewer than two."""
    ettr_now: float | None
    """The share of wall time that is effective training; see `optimal_interval.ettr` for the formula."""
    best_interval: float
    best_ettr: float
    young_interval: float
    daly_interval: float
    bytes_per_snapshot: int
    """Median of the bytes that snapshots added to the store."""
    bytes_per_day: int
    """The bytes that snapshots add a day at the best interval."""
    bandwidth_share: float | None
    """Share of the store's bandwidth used at the best interval; None if the bandwidth was not given."""
    advice: tuple[str, ...]
    """Most important first."""
    curve: tuple[tuple[float, float], ...]
    """(interval, ETTR), around the best."""

    def __repr__(self) -> str:
        now = "" if self.interval is None else f", now each {self.interval:,.0f} s"
        return f"Advice({one_line(self.ref)}: save each {self.best_interval:,.0f} s{now}, ETTR {self.best_ettr:.2%})"


def advise(
    engine: Engine,
    address: str,
    *,
    stall: float | None = None,
    lag: float | None = None,
    restart: float | None = None,
    mtbf: float | None = None,
    bytes_per_second: float | None = None,
    bytes_per_day: float | None = None,
) -> Advice:
    """Advice for a branch: see `ReadOnlyStore.advise`.

    Raises:
        NotFoundError: no such branch.
        InvalidOptionError: a time that is negative or not a number; or the stall is unknown.
    """
    view = engine.log.newest_view()
    resolved = resolve(view, address)
    history = list(view.history(resolved.branch, limit=NEWEST)) if resolved.branch is not None else [resolved.info]
    history.sort(key=lambda info: info.time_ns)
    given = {"stall": stall, "lag": lag, "restart": restart, "mtbf": mtbf}
    measured = _measured(engine, history[-1])
    values, sources = dict[str, float](), dict[str, Source]()
    for name, given_value in given.items():
        value = given_value if given_value is not None else measured.get(name, _ASSUMED[name])
        if value is None:
            raise InvalidOptionError(
                f"it is unknown how long a save of {address!r} blocks training: give stall_seconds= (--stall), or save with Checkpointer",
                object_id=name,
            )
        values[name], sources[name] = value, "given" if given_value is not None else "measured" if name in measured else "assumed"
    costs = require_costs(SaveCosts(**values))
    for name, value in (("bytes_per_second", bytes_per_second), ("bytes_per_day", bytes_per_day)):
        if value is not None and not value > 0:
            raise InvalidOptionError(f"{name} must be more than 0", object_id=name)
    gaps = [(b.time_ns - a.time_ns) / 1e9 for a, b in pairwise(history) if b.time_ns > a.time_ns]
    interval = max(1e-3, statistics.median(gaps) - costs.stall) if gaps else None
    wanted = best(costs)
    now = None if interval is None else ettr(interval, costs)
    size = int(statistics.median(info.new_bytes for info in history))
    share = None if bytes_per_second is None else size / (wanted + costs.stall) / bytes_per_second
    daily = int(size * DAY_SECONDS / (wanted + costs.stall))
    return Advice(
        ref=resolved.branch or address,
        costs=costs,
        sources=sources,
        snapshots=len(history),
        interval=interval,
        ettr_now=now,
        best_interval=wanted,
        best_ettr=ettr(wanted, costs),
        young_interval=young(costs),
        daly_interval=daly(costs),
        bytes_per_snapshot=size,
        bytes_per_day=daily,
        bandwidth_share=share,
        advice=tuple(_advice(costs, interval, wanted, share=share, daily=daily, bytes_per_day=bytes_per_day, sources=sources)),
        curve=tuple((interval, ettr(interval, costs)) for interval in _around(wanted)),
    )


def note_of(engine: Engine, info: SnapshotRow) -> dict[str, Any]:
    """The note of `Checkpointer` with a snapshot."""
    note = engine.read_metadata(info).get(NOTE)
    return note if isinstance(note, dict) else {}


def _measured(engine: Engine, info: SnapshotRow) -> dict[str, float]:
    """The costs that `Checkpointer` measured until a snapshot, by name."""
    costs, mtbf = note_costs(note_of(engine, info)), mtbf_of(engine, info)
    return costs if mtbf is None else {**costs, "mtbf": mtbf}


def note_costs(note: Mapping[str, Any]) -> dict[str, float]:
    """Stall, lag and restart in a note of `Checkpointer`, as far as measured."""
    costs = note.get("costs")
    return {name: value for name, value in costs.items() if isinstance(value, float)} if isinstance(costs, dict) else {}


def mtbf_of(engine: Engine, info: SnapshotRow) -> float | None:
    """Time from the start of the run to a snapshot, divided by the number of resumes until then; None if not noted."""
    note = note_of(engine, info)
    resumes, began_ns = note.get("resumes"), note.get("began_ns")
    if not isinstance(resumes, int) or not isinstance(began_ns, int) or resumes < 1 or began_ns >= info.time_ns:
        return None
    return (info.time_ns - began_ns) / 1e9 / resumes


def _around(interval: float) -> list[float]:
    return [interval * 10 ** (2 * number / (CURVE_POINTS - 1) - 1) for number in range(CURVE_POINTS)]


def _advice(
    costs: SaveCosts,
    interval: float | None,
    wanted: float,
    *,
    share: float | None,
    daily: int,
    bytes_per_day: float | None,
    sources: dict[str, Source],
) -> list[str]:
    lines, best_text = [], human_seconds(wanted)
    if share is not None and share > 1:
        lines.append(
            f"the store is too slow for a snapshot every {best_text}: that needs {share:.1f} times its bandwidth. Save less often, or "
            "less: codec='small', deltas, fewer optimizer states"
        )
    if bytes_per_day is not None and daily > bytes_per_day:
        lines.append(f"the store would grow by {daily / bytes_per_day:.1f} times the allowed bytes per day: set a policy, and run gc")
    if interval is not None:
        now_text, lost = human_seconds(interval), ettr(wanted, costs) - ettr(interval, costs)
        if lost > GOOD_ENOUGH:
            lines.append(f"save every {best_text} of training instead of every {now_text}, which loses {lost:.1%} of the time")
        else:
            lines.append(f"keep saving every {now_text}: that loses {max(0.0, lost):.2%} against the best interval, {best_text}")
    else:
        lines.append(f"save every {best_text} of training")
    parts = {
        "the stall of a save (save asynchronously, or stage on a local disk)": costs.stall / (wanted + costs.stall),
        "the restart (restore from the staging disk or from peers, keep spare hosts)": costs.restart / costs.mtbf,
        "repeated work": (wanted / 2 + costs.lag) / costs.mtbf,
    }
    most = max(parts, key=lambda part: parts[part])
    lines.append(f"most of the remaining loss is {most}: about {parts[most]:.1%} of the time")
    if sources["mtbf"] == "assumed":
        lines.append("the failure rate is an assumption: give mtbf, or save with Checkpointer, which counts resumes")
    return lines

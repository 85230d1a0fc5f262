"""How often a job should save, by what is known of it: its history in the log, and what a user has measured."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.record import decode_metadata, record_name
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.address import resolve
from tensorstore_ck.maintenance.optimal_interval import DEFAULT_MTBF_SECONDS, SaveCosts, best, daly, ettr, require_costs, young

NEWEST: Final = 200
"""Snapshots that are looked at."""
CURVE_POINTS: Final = 41
DAY_SECONDS: Final = 86_400
NOTE: Final = "checkpointer"
"""What `Checkpointer` leaves in metadata: when a run began, how often it was resumed, and what saving costs."""
GOOD_ENOUGH: Final = 0.005
"""Of wall time: a cadence that loses less than this to the best one is left alone."""

_ASSUMED: Final = {"stall": None, "lag": 0.0, "restart": 300.0, "mtbf": DEFAULT_MTBF_SECONDS}
Source = Literal["given", "measured", "assumed"]


@dataclass(frozen=True, slots=True)
class Advice:
    """What is known, what follows, and what to change first. Times in seconds; an interval is training between two saves."""

    ref: str
    costs: SaveCosts
    sources: dict[str, Source]
    """Where each of the costs is from."""
    snapshots: int
    """That were looked at."""
    interval: float | None
    """What the job does now: the median between two puts, less the stall; None with fewer than two."""
    ettr_now: float | None
    """The share of wall time that is training which counts; see `intervals.ettr` for the formula."""
    best_interval: float
    best_ettr: float
    young_interval: float
    daly_interval: float
    bytes_per_snapshot: int
    """The median of what snapshots added to the store."""
    bytes_per_day: int
    """At the best interval."""
    bandwidth_share: float | None
    """How much of the store's bandwidth saving at the best interval takes; None where that was not said."""
    advice: tuple[str, ...]
    """What to change, the most important first."""
    curve: tuple[tuple[float, float], ...]
    """(interval, ETTR), around the best."""


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
    """What follows for a branch.

    Args:
        engine: The store.
        address: The branch.
        stall: What a save holds the training up for; None: what `Checkpointer` measured and noted with the newest snapshot.
        lag: From then until it is published; None: likewise, or none.
        restart: From a failure until training goes on; None: likewise, of the restore alone, or five minutes.
        mtbf: Mean time between failures; None: by how often the run was resumed, as `Checkpointer` notes, or else four hours.
        bytes_per_second: What the store can take.
        bytes_per_day: What it may grow by.

    Raises:
        NotFoundError: no such branch.
        InvalidOptionError: a time that is negative, or no number; or nobody knows what a save holds the training up for.
    """
    view = engine.log.newest_view()
    found = resolve(view, address)
    history = list(view.history(found.branch, limit=NEWEST)) if found.branch is not None else [found.info]
    history.sort(key=lambda info: info.time_ns)
    given = {"stall": stall, "lag": lag, "restart": restart, "mtbf": mtbf}
    measured = _measured(engine, history[-1])
    values, sources = dict[str, float](), dict[str, Source]()
    for name, said in given.items():
        value = said if said is not None else measured.get(name, _ASSUMED[name])
        if value is None:
            raise InvalidOptionError(
                f"nobody noted what a save of {address!r} holds the training up for: give stall (--stall), or put with Checkpointer",
                object_id=name,
            )
        values[name], sources[name] = value, "given" if said is not None else "measured" if name in measured else "assumed"
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
        found.branch or address,
        costs,
        sources,
        len(history),
        interval,
        now,
        wanted,
        ettr(wanted, costs),
        young(costs),
        daly(costs),
        size,
        daily,
        share,
        tuple(_advice(costs, interval, wanted, share=share, daily=daily, bytes_per_day=bytes_per_day, sources=sources)),
        tuple((each, ettr(each, costs)) for each in _around(wanted)),
    )


def note_of(engine: Engine, info: SnapshotInfo) -> dict[str, Any]:
    """What `Checkpointer` noted with a snapshot."""
    note = decode_metadata(engine.read_record(info), record_name(info.ulid)).get(NOTE)
    return note if isinstance(note, dict) else {}


def _measured(engine: Engine, info: SnapshotInfo) -> dict[str, float]:
    """What `Checkpointer` measured until a snapshot, by name."""
    costs, mtbf = note_costs(note_of(engine, info)), mtbf_of(engine, info)
    return costs if mtbf is None else {**costs, "mtbf": mtbf}


def note_costs(note: Mapping[str, Any]) -> dict[str, float]:
    """What saves and restores took, by a note of `Checkpointer`: stall, lag and restart, as far as measured."""
    costs = note.get("costs")
    return {name: value for name, value in costs.items() if isinstance(value, float)} if isinstance(costs, dict) else {}


def mtbf_of(engine: Engine, info: SnapshotInfo) -> float | None:
    """The time from the begin of the run to a snapshot, by how often it was resumed until then; None where that was not noted."""
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
    found = []
    if share is not None and share > 1:
        found.append(
            f"the store cannot take a snapshot every {_time(wanted)}: it needs {share:.1f} times its bandwidth. Save less often, or less: "
            "codec='small', differences, fewer optimizer states"
        )
    if bytes_per_day is not None and daily > bytes_per_day:
        found.append(f"that adds {daily / bytes_per_day:.1f} times what the store may grow by in a day: set a policy, and run gc")
    if interval is not None:
        lost = ettr(wanted, costs) - ettr(interval, costs)
        if lost > GOOD_ENOUGH:
            found.append(
                f"save every {_time(wanted)} of training instead of every {_time(interval)}: {lost:.1%} of the time are lost by that"
            )
        else:
            found.append(f"leave it: saving every {_time(interval)} loses {max(0.0, lost):.2%} to the best interval, {_time(wanted)}")
    else:
        found.append(f"save every {_time(wanted)} of training")
    parts = {
        "the stall of a save (save beside the training, or stage on a local disk)": costs.stall / (wanted + costs.stall),
        "the restart (restore from the staging disk or from peers, keep spare hosts)": costs.restart / costs.mtbf,
        "work that is done again": (wanted / 2 + costs.lag) / costs.mtbf,
    }
    most = max(parts, key=lambda part: parts[part])
    found.append(f"of what is lost then, most goes to {most}: about {parts[most]:.1%} of the time")
    if sources["mtbf"] == "assumed":
        found.append("how often the job fails was assumed: give it, or put with Checkpointer, which counts")
    return found


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

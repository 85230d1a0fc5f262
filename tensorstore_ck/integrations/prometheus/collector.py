"""The exporter's facts -> metrics. A scrape reads nothing: neither a store nor the catalog."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from prometheus_client.core import Metric

from tensorstore_ck import __version__
from tensorstore_ck.integrations.prometheus import families as of
from tensorstore_ck.integrations.prometheus.families import KINDS, Families
from tensorstore_ck.integrations.prometheus.watched_store import StoreState, WatchedStore
from tensorstore_ck.log.maintenance_outcome import FAILED, FINDINGS, OK, REFUSED
from tensorstore_ck.maintenance.recorded_runs import FSCK, GC

_NS: Final = 1e9
OUTCOMES: Final = (OK, FINDINGS, REFUSED, FAILED)
OTHER: Final = "other"
"""An outcome that this build does not know: it may be any text, and each would be a series of its own."""
MAX_SERIES: Final = 1000
"""The most branches of a store that have metrics (those with the newest saves), and the most quotas. Users choose their names."""


@dataclass(slots=True)
class Readings:
    """The catalog as it was last read, and how often the exporter failed."""

    states: Mapping[int, StoreState] = field(default_factory=dict)
    read_ns: int | None = None
    catalog_errors: int = 0
    scrape_errors: int = 0


class StoreCollector:
    """A collector for a registry of prometheus_client."""

    def __init__(self, watched: Sequence[WatchedStore], readings: Readings) -> None:
        self._watched = watched
        self._readings = readings

    def describe(self) -> Iterable[Metric]:
        """The families, without samples."""
        return [kind.empty() for kind in KINDS]

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        families = Families()
        families.add(of.INFO, 1, __version__)
        families.add(of.CATALOG_READ, _seconds(self._readings.read_ns))
        families.add(of.CATALOG_ERRORS, self._readings.catalog_errors)
        families.add(of.SCRAPE_ERRORS, self._readings.scrape_errors)
        for watched in self._watched:
            _add_watched(families, watched)
        own = {watched.synced.uuid: watched for watched in reversed(self._watched)}
        shown: dict[str, tuple[StoreState, int | None]] = {}
        for state in self._readings.states.values():  # the one that was synced last, of several that were at one URL
            own_store = own.get(state.uuid)
            shown[state.url if own_store is None else own_store.url] = state, None if own_store is None else own_store.read_ns
        for url, (state, read_ns) in shown.items():
            _add_state(families, state, label(url), read_ns)
        return families.all()


def _add_watched(families: Families, watched: WatchedStore) -> None:
    store = label(watched.url)
    families.add(of.UP, watched.is_up, store)
    families.add(of.REFRESH_SECONDS, watched.refresh_seconds, store)
    families.add(of.REFRESH_ERRORS, watched.refresh_errors, store)
    families.add(of.MEASURE_ERRORS, watched.measure_errors, store)
    measured = watched.measured
    if measured is not None:
        for state, count in measured.by_state.items():
            families.add(of.STORED_BYTES, count, store, state)
        families.add(of.UNREFERENCED_BYTES, measured.unreferenced_bytes, store)
        families.add(of.FREEABLE_BYTES, measured.freeable_bytes, store)
        for kind, value in (
            (of.FREE_BYTES, measured.space.free_bytes),
            (of.FREE_INODES, measured.space.free_inodes),
            (of.GROWTH, measured.space.growth_bytes_per_day),
            (of.FULL_IN_DAYS, measured.space.full_in_days),
        ):
            families.add(kind, value, store)
        families.add(of.MEASURED, _seconds(measured.time_ns), store)
        families.add(of.MEASURE_SECONDS, measured.seconds, store)


def _add_state(families: Families, state: StoreState, store: str, read_ns: int | None) -> None:
    """`read_ns`: when its log was last read here; the catalog is synced only when there is something new."""
    families.add(of.SYNCED, _seconds(max(state.synced_ns, read_ns or 0)), store)
    families.add(of.LOG_ENTRIES, state.head_n, store)
    families.add(of.BRANCHES, state.branches, store)
    families.add(of.TAGS, state.tags, store)
    families.add(of.PINS, state.pins, store)
    for name, count in state.snapshots.items():
        families.add(of.SNAPSHOTS, count, store, name)
    _add_runs(families, state, store)
    for quota in state.quotas[:MAX_SERIES]:
        glob = label(quota.glob)
        families.add(of.QUOTA_USED, quota.used_bytes, store, glob)
        families.add(of.QUOTA_WARN, quota.warn_bytes, store, glob)
        families.add(of.QUOTA_REFUSE, quota.refuse_bytes, store, glob)
    for branch in nlargest(MAX_SERIES, state.refs.values(), key=lambda branch: branch.last_save_ns):
        ref = label(branch.ref)
        families.add(of.LAST_SAVE, _seconds(branch.last_save_ns), store, ref)
        families.add(of.SAVE_SECONDS, _seconds(branch.duration_ns), store, ref)
        families.add(of.SAVE_INTERVAL, None if branch.is_finished else _seconds(branch.interval_ns), store, ref)
        families.add(of.HEAD_STEP, branch.head_step, store, ref)
        families.add(of.SAVES, branch.saves, store, ref)
        families.add(of.LOGICAL_BYTES, branch.logical_bytes, store, ref)
        families.add(of.NEW_BYTES, branch.new_bytes, store, ref)


def _add_runs(families: Families, state: StoreState, store: str) -> None:
    gc, fsck = state.runs.get(GC), state.runs.get(FSCK)
    families.add(of.LAST_RUN, _seconds(state.changed_by_gc_ns if gc is None else gc.time_ns), store, GC)
    families.add(of.LAST_RUN, None if fsck is None else _seconds(fsck.time_ns), store, FSCK)
    for name, run in ((GC, gc), (FSCK, fsck)):
        if run is not None:
            families.add(of.RUN_SECONDS, run.duration_seconds, store, name)
            known = run.outcome if run.outcome in OUTCOMES else OTHER
            for outcome in (*OUTCOMES, *([OTHER] if known == OTHER else [])):
                families.add(of.RUN_OUTCOME, outcome == known, store, name, outcome)
    if gc is not None and "deleted_bytes" in gc.counts:
        families.add(of.FREED_BYTES, gc.counts["deleted_bytes"] - gc.counts.get("written_bytes", 0), store)
    if fsck is not None:
        for severity in ("error", "notice"):
            families.add(of.FINDINGS, fsck.counts.get(f"{severity}s"), store, severity)


def label(text: str) -> str:
    """A text that UTF-8 can hold: a path may be any bytes. The text format itself escapes quotes, backslashes and line ends."""
    return text.encode("utf-8", "backslashreplace").decode()


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / _NS

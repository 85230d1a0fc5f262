"""The metrics: their names, help and labels; and the exporter's facts as metrics.

A scrape reads nothing: neither a store nor the catalog.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tensorstore_ck import __version__
from tensorstore_ck.integrations.prometheus.watched_store import StoreState, WatchedStore
from tensorstore_ck.log.maintenance_outcome import FAILED, FINDINGS, OK, REFUSED
from tensorstore_ck.maintenance.recorded_runs import FSCK, GC

OUTCOMES: Final = (OK, FINDINGS, REFUSED, FAILED)
OTHER: Final = "other"
"""An outcome that this build does not know: it may be any text, and each would be a series of its own."""
MAX_SERIES: Final = 1000
"""The most branches of a store that have metrics (those with the newest saves), and the most quotas. Users choose their names."""


Family = CounterMetricFamily | GaugeMetricFamily
_STORE: Final = ("store",)
_REF: Final = ("store", "ref")


@dataclass(frozen=True, slots=True)
class Kind:
    """A metric. Counters are named with ``_total``."""

    name: str
    help: str
    labels: tuple[str, ...] = _STORE

    def empty(self) -> Family:
        """Its family, without samples."""
        if self.name.endswith("_total"):
            return CounterMetricFamily(self.name, self.help, labels=self.labels)
        return GaugeMetricFamily(self.name, self.help, labels=self.labels)


UP: Final = Kind("tsck_up", "1 if the store's log could be read into the catalog at the last refresh, and no refresh hangs")
REFRESH_SECONDS: Final = Kind("tsck_refresh_duration_seconds", "How long the last refresh took")
REFRESH_ERRORS: Final = Kind("tsck_refresh_errors_total", "Refreshes that failed, since the exporter started")
SYNCED: Final = Kind(
    "tsck_catalog_sync_timestamp_seconds", "When the catalog was last found to have, or given, the store's newest log entry"
)
LOG_ENTRIES: Final = Kind("tsck_log_entries_total", "Entries of the store's log that the catalog has read")
BRANCHES: Final = Kind("tsck_branches", "Branches")
TAGS: Final = Kind("tsck_tags", "Tags")
PINS: Final = Kind("tsck_pins", "Pins")
SNAPSHOTS: Final = Kind("tsck_snapshots", "Snapshots, by state: live, forgotten (can be undone) or gone", ("store", "state"))
LAST_RUN: Final = Kind("tsck_last_run_timestamp_seconds", "When gc and fsck ended last, by run: gc, fsck", ("store", "run"))
RUN_SECONDS: Final = Kind("tsck_last_run_duration_seconds", "How long the last run of gc and fsck took", ("store", "run"))
RUN_OUTCOME: Final = Kind(
    "tsck_last_run_outcome",
    "1 for the outcome of the last run of gc and fsck, 0 for others: ok, findings (of fsck: errors), refused (gc did not begin), failed; "
    "other, if this build does not know it",
    ("store", "run", "outcome"),
)
FSCK_FINDINGS: Final = Kind("tsck_fsck_findings", "The findings of the last fsck, by severity: error, notice", ("store", "severity"))
FREED_BYTES: Final = Kind("tsck_last_gc_freed_bytes", "By how much the last gc made the store smaller")

QUOTA_USED: Final = Kind("tsck_quota_used_bytes", "Bytes that the branches of a quota have added to the store", ("store", "glob"))
QUOTA_WARN: Final = Kind("tsck_quota_warn_bytes", "From how many bytes on saves warn", ("store", "glob"))
QUOTA_REFUSE: Final = Kind("tsck_quota_refuse_bytes", "From how many bytes on saves are refused", ("store", "glob"))

LAST_SAVE: Final = Kind("tsck_last_save_timestamp_seconds", "When the branch was last saved to", _REF)
SAVE_SECONDS: Final = Kind(
    "tsck_last_save_duration_seconds", "How long the last save to the branch took, from its begin until it was published", _REF
)
SAVE_INTERVAL: Final = Kind(
    "tsck_save_interval_seconds", "Median time between the last 50 saves to the branch; absent when its run has finished", _REF
)
HEAD_STEP: Final = Kind("tsck_head_step", "Step of the snapshot that the branch is at", _REF)
SAVES: Final = Kind("tsck_saves_total", "Saves to the branch", _REF)
LOGICAL_BYTES: Final = Kind("tsck_logical_bytes", "Full size of the branch's newest save", _REF)
NEW_BYTES: Final = Kind("tsck_new_bytes_total", "Bytes that the saves to the branch added to the store", _REF)

STORED_BYTES: Final = Kind(
    "tsck_stored_bytes",
    "Bytes in the store: live; pinned (held by pins alone); undo_window (forgotten, can be undone); young (in no snapshot, may belong to a "
    "running save); garbage; log_and_tables",
    ("store", "state"),
)
UNREFERENCED_BYTES: Final = Kind("tsck_unreferenced_bytes", "Bytes that nothing holds: young and garbage")
FREEABLE_BYTES: Final = Kind("tsck_freeable_bytes", "Bytes that gc would free now")
FREE_BYTES: Final = Kind("tsck_free_bytes", "Bytes that are free where the store is; absent if that location does not report it")
FREE_INODES: Final = Kind("tsck_free_inodes", "Files that can still be made where the store is; absent without a limit")
GROWTH: Final = Kind("tsck_growth_bytes_per_day", "What the saves of the last 7 days added and something still holds, a day")
FULL_IN_DAYS: Final = Kind("tsck_full_in_days", "Days until the location is full at that pace; absent if it does not grow")
MEASURED: Final = Kind("tsck_usage_timestamp_seconds", "When the bytes by state were measured")
MEASURE_SECONDS: Final = Kind("tsck_usage_duration_seconds", "How long the last measurement of the bytes by state took")
MEASURE_ERRORS: Final = Kind("tsck_usage_errors_total", "Measurements of the bytes by state that failed, since the exporter started")

CATALOG_READ: Final = Kind("tsck_catalog_read_timestamp_seconds", "When the exporter last read the catalog", ())
CATALOG_ERRORS: Final = Kind("tsck_catalog_errors_total", "Readings of the catalog that failed, since the exporter started", ())
SCRAPE_ERRORS: Final = Kind("tsck_exporter_scrape_errors_total", "Scrapes that failed, since the exporter started", ())
INFO: Final = Kind("tsck_exporter_info", "The exporter's version", ("version",))

KINDS: Final = tuple(kind for kind in tuple(vars().values()) if isinstance(kind, Kind))


@dataclass(slots=True)
class Families:
    """The families of one scrape."""

    _by_kind: dict[Kind, Family] = field(default_factory=lambda: {kind: kind.empty() for kind in KINDS})

    def add(self, kind: Kind, value: float | None, *labels: str) -> None:
        """Adds a sample; None: there is no value."""
        if value is not None:
            self._by_kind[kind].add_metric(labels, value)

    def all(self) -> list[Metric]:
        """All families in the order of `KINDS`, also those without samples."""
        return list(self._by_kind.values())


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
        families.add(INFO, 1, __version__)
        families.add(CATALOG_READ, _seconds(self._readings.read_ns))
        families.add(CATALOG_ERRORS, self._readings.catalog_errors)
        families.add(SCRAPE_ERRORS, self._readings.scrape_errors)
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
    families.add(UP, watched.is_up, store)
    families.add(REFRESH_SECONDS, watched.refresh_seconds, store)
    families.add(REFRESH_ERRORS, watched.refresh_errors, store)
    families.add(MEASURE_ERRORS, watched.measure_errors, store)
    measured = watched.measured
    if measured is not None:
        for state, count in measured.by_state.items():
            families.add(STORED_BYTES, count, store, state)
        families.add(UNREFERENCED_BYTES, measured.unreferenced_bytes, store)
        families.add(FREEABLE_BYTES, measured.freeable_bytes, store)
        families.add(FREE_BYTES, measured.space.free_bytes, store)
        families.add(FREE_INODES, measured.space.free_inodes, store)
        families.add(GROWTH, measured.space.growth_bytes_per_day, store)
        families.add(FULL_IN_DAYS, measured.space.full_in_days, store)
        families.add(MEASURED, _seconds(measured.time_ns), store)
        families.add(MEASURE_SECONDS, measured.seconds, store)


def _add_state(families: Families, state: StoreState, store: str, read_ns: int | None) -> None:
    """`read_ns`: when its log was last read here; the catalog is synced only when there is something new."""
    families.add(SYNCED, _seconds(max(state.synced_ns, read_ns or 0)), store)
    families.add(LOG_ENTRIES, state.head_n, store)
    families.add(BRANCHES, state.branches, store)
    families.add(TAGS, state.tags, store)
    families.add(PINS, state.pins, store)
    for name, count in state.snapshots.items():
        families.add(SNAPSHOTS, count, store, name)
    _add_runs(families, state, store)
    for quota in state.quotas[:MAX_SERIES]:
        glob = label(quota.glob)
        families.add(QUOTA_USED, quota.used_bytes, store, glob)
        families.add(QUOTA_WARN, quota.warn_bytes, store, glob)
        families.add(QUOTA_REFUSE, quota.refuse_bytes, store, glob)
    for branch in nlargest(MAX_SERIES, state.refs.values(), key=lambda branch: branch.last_save_ns):
        ref = label(branch.ref)
        families.add(LAST_SAVE, _seconds(branch.last_save_ns), store, ref)
        families.add(SAVE_SECONDS, _seconds(branch.duration_ns), store, ref)
        families.add(SAVE_INTERVAL, None if branch.is_finished else _seconds(branch.interval_ns), store, ref)
        families.add(HEAD_STEP, branch.head_step, store, ref)
        families.add(SAVES, branch.saves, store, ref)
        families.add(LOGICAL_BYTES, branch.logical_bytes, store, ref)
        families.add(NEW_BYTES, branch.new_bytes, store, ref)


def _add_runs(families: Families, state: StoreState, store: str) -> None:
    gc, fsck = state.runs.get(GC), state.runs.get(FSCK)
    families.add(LAST_RUN, _seconds(state.changed_by_gc_ns if gc is None else gc.time_ns), store, GC)
    families.add(LAST_RUN, None if fsck is None else _seconds(fsck.time_ns), store, FSCK)
    for name, run in ((GC, gc), (FSCK, fsck)):
        if run is not None:
            families.add(RUN_SECONDS, run.duration_seconds, store, name)
            known = run.outcome if run.outcome in OUTCOMES else OTHER
            for outcome in (*OUTCOMES, *([OTHER] if known == OTHER else [])):
                families.add(RUN_OUTCOME, outcome == known, store, name, outcome)
    if gc is not None and "deleted_bytes" in gc.counts:
        families.add(FREED_BYTES, gc.counts["deleted_bytes"] - gc.counts.get("written_bytes", 0), store)
    if fsck is not None:
        for severity in ("error", "notice"):
            families.add(FSCK_FINDINGS, fsck.counts.get(f"{severity}s"), store, severity)


def label(text: str) -> str:
    """A text that UTF-8 can hold: a path may be any bytes. The text format itself escapes quotes, backslashes and line ends."""
    return text.encode("utf-8", "backslashreplace").decode()


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e9

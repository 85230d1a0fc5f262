"""The metrics: their names, help and labels."""

from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

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
FINDINGS: Final = Kind("tsck_fsck_findings", "The findings of the last fsck, by severity: error, notice", ("store", "severity"))
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

"""What the methods of `Catalog` return."""

from collections.abc import Mapping
from dataclasses import dataclass

from tensorstore_ck.errors import StoreError
from tensorstore_ck.log.maintenance_outcome import RunOutcome
from tensorstore_ck.log.quota import Quota


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a sync."""

    store: str
    """The store's uuid."""
    url: str
    entries: int
    """Entries of the log that the sync read."""
    snapshots: int
    """Snapshots that these entries published."""
    head_n: int
    """The last entry of the log that the catalog has read."""
    anew: str
    """Why the log was read from its first entry again; empty if it was not."""


@dataclass(frozen=True, slots=True)
class SyncOutcome:
    """The outcome of `Catalog.sync_all` for one store."""

    url: str
    report: SyncReport | None
    """None: the sync failed."""
    error: StoreError | None


@dataclass(frozen=True, slots=True)
class CatalogJob:
    """The snapshots that were saved to one branch, including those that are gone."""

    store: str
    ref: str
    job: str
    """The branch's name without its first folder."""
    puts: int
    processes: int
    live: int
    """Snapshots that a history, tag or pin holds."""
    first_step: int | None
    last_step: int | None
    first_time_ns: int
    last_time_ns: int
    logical_bytes: int
    """The size of the newest snapshot."""
    new_bytes: int
    """The bytes that all snapshots added when they were saved."""


@dataclass(frozen=True, slots=True)
class CatalogStore:
    """A store in the catalog."""

    uuid: str
    url: str
    head_n: int
    synced_ns: int
    snapshots: int
    jobs: tuple[CatalogJob, ...]
    quotas: Mapping[str, Quota]
    """Glob -> quota."""
    last_runs: Mapping[str, RunOutcome]
    """``gc``, ``fsck`` -> the last run that the log records."""


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot that `Catalog.find` returned."""

    store: str
    """The store's URL when it was synced."""
    ref: str
    """The branch that it was saved to."""
    job: str
    root: str
    id: str
    step: int | None
    time_ns: int
    actor: str
    logical_bytes: int
    new_bytes: int
    mark: str
    reason: str
    state: str
    """``live``; ``forgotten``: it can be undone; ``gone``."""
    metrics: Mapping[str, float]
    attributes: Mapping[str, float | str]
    """What the save passed as ``attributes=``, scalars of its metadata, and ``epoch``, ``triggers`` and ``save_seconds``."""
    tags: tuple[str, ...]
    pinned: bool

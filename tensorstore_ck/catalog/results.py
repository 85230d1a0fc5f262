"""What a catalog answers."""

from collections.abc import Mapping
from dataclasses import dataclass

from tensorstore_ck.errors import StoreError


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did."""

    store: str
    """The store's uuid."""
    url: str
    entries: int
    """How many entries of the log it read."""
    snapshots: int
    """How many of them were puts that count."""
    head_n: int
    """The entry up to which the catalog knows the store now."""
    anew: str
    """Why all was read from the first entry on, though some of it was there before; else empty."""


@dataclass(frozen=True, slots=True)
class SyncOutcome:
    """What became of one of several stores that were synced."""

    url: str
    report: SyncReport | None
    """None: it failed."""
    error: StoreError | None
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class CatalogJob:
    """The line of snapshots that were put to one branch, whatever is left of them."""

    store: str
    ref: str
    job: str
    """The branch's name without its first folder."""
    puts: int
    processes: int
    live: int
    """How many of its snapshots a history, tag or pin holds."""
    first_step: int | None
    last_step: int | None
    first_time_ns: int
    last_time_ns: int
    logical_bytes: int
    """Of the newest."""
    new_bytes: int
    """Of all together, when they were put."""


@dataclass(frozen=True, slots=True)
class CatalogStore:
    """A store, as far as the catalog knows it."""

    uuid: str
    url: str
    head_n: int
    synced_ns: int
    snapshots: int
    jobs: tuple[CatalogJob, ...]


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot that fits."""

    store: str
    """The store's URL, as it was when it was synced."""
    ref: str
    """The branch that it was put to."""
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
    tags: tuple[str, ...]
    pinned: bool

"""Options and findings of fsck. A finding has the object, the problem, and the affected refs, steps and tensors.

Damage to one object is one finding; it names the first few affected snapshots and counts the rest.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.common.printed_commands import naming_store
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import (
    BackendUnavailableError,
    InvalidOptionError,
    MissingObjectError,
    PermissionDeniedError,
    PlaceUnavailableError,
    StoreError,
)
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.gc.report import Freeable

MAX_HITS: Final = 10
UNREADABLE: Final = "unreadable"
"""Kind of findings about objects that a read does not reach: they may be intact, so nothing is repaired."""
_UNREADABLE_ADVICE: Final = (
    "it may be intact: check the disk, the mount and the rights, then run `tsck fsck` again; nothing is repaired while an object is "
    "unreadable; if a file stays so, move it out of the store, and it counts as missing"
)
_RUN_FSCK: Final = re.compile(r"; run `tsck fsck[^`]*`( to see what it hits, and restore an older snapshot)?")
"""Advice in errors that fsck itself leaves out."""

Severity = Literal["error", "notice"]
"""``error``: something that a ref reaches, or the store needs, is damaged. ``notice``: nothing is lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of fsck."""

    kind: str
    """``corrupt_object``, ``missing_object``, ``unreadable``, ``broken_log``, ``unreferenced`` ..."""
    object: str
    """Its name in the store."""
    message: str
    hits: tuple[str, ...]
    """``ref@step (root): tensors`` for each affected snapshot; at most `MAX_HITS`, then the number of others."""
    repairable: bool
    """Whether a command can repair it from this store alone; the message names the command, or what else is needed."""
    severity: Severity


@dataclass(frozen=True, slots=True)
class FsckReport:
    """The checks and findings of fsck."""

    findings: tuple[Finding, ...]
    """Errors first."""
    log_entries: int
    snapshots: int
    packs: int
    blocks: int
    """Blocks in the packs' footers."""
    data_bytes: int
    """Bytes of blocks that this run read and hashed."""
    read_packs: int = 0
    """Packs that this run read completely."""
    never_verified: int = 0
    """Packs that this host never verified completely."""
    oldest_verified_ns: int | None = None
    """The earliest time of the other packs' last verification by this host; nanoseconds since 1970."""
    out_of_time: bool = False
    """Whether time ran out before all chosen data was read."""
    freeable: Freeable | None = None
    """The objects that gc can free, if something unreferenced was found and gc can run."""
    not_recorded: str = ""
    """Why the log does not say that this check took place; empty if it does, or should not."""

    def __repr__(self) -> str:
        errors = f"{sum(finding.severity == 'error' for finding in self.findings):,} errors" if not self.ok else "ok"
        notices = sum(finding.severity == "notice" for finding in self.findings)
        return f"FsckReport({errors}, {notices:,} notices; {self.snapshots:,} snapshots, {self.packs:,} packs, {self.blocks:,} blocks)"

    def _repr_html_(self) -> str:
        rows = ((finding.severity, finding.kind, finding.object, finding.message, "; ".join(finding.hits)) for finding in self.findings)
        return html_table(repr(self), ("severity", "kind", "object", "message", "hits"), rows)

    @property
    def ok(self) -> bool:
        """Whether everything that refs reach is intact, as far as it was read."""
        return not any(finding.severity == "error" for finding in self.findings)


@dataclass(slots=True)
class _Gathered:
    message: str
    severity: Severity
    repairable: bool
    hits: list[str] = field(default_factory=list)
    hit_count: int = 0


def kind_of(exc: StoreError) -> str:
    """The kind of a finding about an object that was read with this error."""
    return UNREADABLE if isinstance(exc, BackendUnavailableError | PermissionDeniedError) else exc.kind


def require_reachable(backend: Backend, exc: StoreError) -> None:
    """Raises `exc` if the whole backend is unreachable, not just one object."""
    if isinstance(exc, PlaceUnavailableError):
        raise exc
    if isinstance(exc, BackendUnavailableError):
        try:
            backend.size(CONFIG_NAME)
        except BackendUnavailableError:
            raise exc from None
        except StoreError:
            return


def object_problem(backend: Backend, name: str, decode: Callable[[bytes, str], object]) -> tuple[str, str] | None:
    """(kind, message) if a small object is damaged or unreadable. Raises `MissingObjectError` if it does not exist."""
    try:
        decode(backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
    except MissingObjectError:
        raise
    except StoreError as exc:
        require_reachable(backend, exc)
        return kind_of(exc), str(exc)
    return None


DAMAGED: Final = "damaged"
"""Mark of snapshots that repair left damaged."""


class Findings:
    """Gathers findings from several threads, one per object and kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], _Gathered] = {}

    def add(
        self, kind: str, object_name: str, message: str, *, hit: str | None = None, severity: Severity = "error", repairable: bool = False
    ) -> None:
        """Adds damage; of several messages for one object the first is kept, and of several severities the worst."""
        message = _RUN_FSCK.sub("", message)
        if kind == UNREADABLE:
            message, repairable = f"{message}; {_UNREADABLE_ADVICE}", False
        with self._lock:
            gathered = self._found.setdefault((object_name, kind), _Gathered(message, severity, repairable))
            if severity == "error":
                gathered.severity = severity
            if hit is not None:
                gathered.hit_count += 1
                if len(gathered.hits) < MAX_HITS:
                    gathered.hits.append(hit)

    def advise(self, object_name: str, advice: str, *, repairable: bool) -> None:
        """Adds how an object can be repaired."""
        with self._lock:
            items = list(self._found.items())
        for (name, kind), gathered in items:
            if name == object_name and kind != UNREADABLE and gathered.severity == "error":
                with self._lock:
                    gathered.message, gathered.repairable = f"{gathered.message}; {advice}", repairable

    def names(self, object_name: str) -> bool:
        """Whether there is a finding about an object."""
        with self._lock:
            return any(name == object_name for name, _ in self._found)

    def also_damaged(self) -> str:
        """The damaged objects, to add to the message of an error that ends the check; empty if there are none."""
        errors = [f"{finding.object}: {finding.message}" for finding in self.all() if finding.severity == "error"]
        return f"; also damaged: {'; '.join(errors[:MAX_HITS])}" if errors else ""

    def all(self, url: str = "") -> tuple[Finding, ...]:
        """All findings, errors first, by object. Commands in messages name the store at `url`, if it is given."""
        with self._lock:
            ordered = sorted(self._found.items(), key=lambda item: (item[1].severity != "error", item[0]))
        return tuple(
            Finding(kind, name, naming_store(it.message, url), _hits(it), repairable=it.repairable, severity=it.severity)
            for (name, kind), it in ordered
        )


def _hits(gathered: _Gathered) -> tuple[str, ...]:
    more = gathered.hit_count - len(gathered.hits)
    return (*sorted(gathered.hits), *([f"and {more} more"] if more else []))


Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@short_errors
@renamed_argument(max_bytes_per_second="rate_limit")
@dataclass(frozen=True, slots=True)
class FsckOptions:
    """How much data fsck reads. It always checks the whole structure: log, records, parts, extents, footers of packs."""

    read_data: bool = False
    """Read and hash every stored byte."""
    sample_fraction: float | None = None
    """Read this share of all packs' bytes: first the packs that were never verified, then those verified longest ago."""
    max_seconds: float | None = None
    """Read data in that order until this time is over; the next such run continues there."""
    progress: Progress | None = None
    rate_limit: float | None = None
    """Limit of reads, and of repair's writes, so that jobs keep their bandwidth; None: no limit."""

    def __post_init__(self) -> None:
        if self.sample_fraction is not None and not 0 < self.sample_fraction <= 1:
            raise InvalidOptionError(
                f"sample_fraction must be above 0 and at most 1, not {self.sample_fraction}", object_id="sample_fraction"
            )
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise InvalidOptionError(f"max_seconds must be above 0, not {self.max_seconds}", object_id="max_seconds")

    @property
    def reads_data(self) -> bool:
        """Whether any block is read."""
        return self.read_data or self.sample_fraction is not None or self.max_seconds is not None

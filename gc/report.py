"""What gc is asked, what it says that it did and does, and what it says that it can free: the same words wherever space is spoken of."""

import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import InvalidOptionError

DAY_SECONDS: Final = 86_400.0

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, of how many)."""


@renamed_argument(max_bytes_per_second="rate_limit", settle_seconds="tombstone_seconds")
@dataclass(frozen=True, slots=True)
class GcOptions:
    """How gc decides. None of it bears on safety: whatever is given, nothing that is held is freed."""

    min_age_seconds: float = DAY_SECONDS
    """Younger objects that nothing refers to are left alone, unless their process is known to have ended: a save may be under way."""
    grace_seconds: float = 0.0
    """Objects are freed when they have been condemned for that long: what takes hold of them meanwhile needs no second write."""
    undo_window_seconds: float = DAY_SECONDS
    """What was forgotten longer ago is let go."""
    max_delete: float = 0.5
    """Refuse when a larger fraction of all bytes would go."""
    compact_below: float = 0.5
    """Packs of which a smaller fraction is live are rewritten; 0: none."""
    compact_bytes: int = 256 << 30
    """At most so many live bytes are rewritten in one run, those first that free most."""
    tombstone_seconds: float = 7 * DAY_SECONDS
    """Tombstones are kept for that long: a save that slept longer starts anew."""
    rate_limit: float | str | None = None
    """Reads no more than this a second, and writes no more: ``"100MB"``, or bytes; None: no limit."""

    def __post_init__(self) -> None:
        """Raises `InvalidOptionError` for what makes no sense."""
        for name in ("min_age_seconds", "grace_seconds", "undo_window_seconds", "tombstone_seconds", "compact_bytes"):
            if not getattr(self, name) >= 0:
                raise InvalidOptionError(f"{name} must not be negative", object_id=name)
        for name in ("max_delete", "compact_below"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidOptionError(f"{name} must be from 0 to 1", object_id=name)


@dataclass(frozen=True, slots=True)
class FreedLater:
    """Bytes that no run of gc frees now, and why not. Each counts what it frees beyond those before it."""

    why: str
    """``grace``, ``age``, ``undo window``, ``pins`` (those that expire), or ``packs in use``: dead blocks of packs that are not sparse."""
    bytes: int
    """Of ``packs in use``: a lower bound."""
    objects: int
    """How many objects nothing needs any more then; packs that are rewritten are not among them."""
    due_ns: int | None
    """When gc frees all of it, if nothing takes hold of it; nanoseconds since 1970. None: never by itself."""
    commands: tuple[str, ...]
    """What frees it now, run in this order."""

    def said(self) -> str:
        """One line for a person."""
        reason = {
            "grace": "condemned, until the grace period ends",
            "age": "young and in no snapshot, so it may belong to a save that is under way or staged",
            "undo window": "forgotten, held until the undo window ends",
            "pins": "held by pins that expire",
            "packs in use": "at least, in packs that are not sparse enough to be rewritten",
        }[self.why]
        date = "" if self.due_ns is None else f"by {iso_time(self.due_ns)}: "
        shown = " && ".join(self.commands[-3:])
        more = f"{len(self.commands) - 3} more pins, which `tsck pin` lists, and " if len(self.commands) > 3 else ""
        caution = "; not while a save is under way or staged" if "--min-age 0s" in self.commands[-1] else ""
        return f"{human_bytes(self.bytes)} {'later, ' if date else ''}{date}{reason} ({more}`{shown}` frees it now{caution})"


@dataclass(frozen=True, slots=True)
class Freeable:
    """What gc can free: the same figures from `gc`, `usage`, `fsck` and errors."""

    now_bytes: int
    command: str
    """What frees them; empty where gc never runs."""
    later: tuple[FreedLater, ...]

    def said(self) -> list[str]:
        """A line for a person on what can be freed now, and one for each reason why something can only be freed later."""
        now = f"{human_bytes(self.now_bytes)} now (`{self.command}` frees it)" if self.now_bytes > 0 else "nothing now"
        return [f"gc can free: {now}", *(later.said() for later in self.later)]


@dataclass(frozen=True, slots=True)
class GoneSnapshot:
    """A snapshot that nothing holds any more, and whose record is deleted."""

    id: str
    root: str
    ref: str
    step: int | None


@dataclass(frozen=True, slots=True)
class RewrittenPack:
    """A pack that is mostly garbage."""

    name: str
    bytes: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was done; in a dry run, what would be."""

    dry_run: bool
    snapshots: tuple[GoneSnapshot, ...]
    """Those that go in this run; not those that wait for the grace period, or are too young."""
    deleted: dict[str, int]
    """Kind of object -> how many are deleted."""
    deleted_bytes: int
    rewritten: tuple[RewrittenPack, ...]
    written_bytes: int
    """In new packs and moved objects."""
    waiting: int
    """Objects that are condemned, and wait for the grace period."""
    young: int
    """Objects that nothing refers to, and that are too young to be judged."""
    total_bytes: int
    """In all objects that were listed, before."""
    requests: int
    """Requests to the backend after marking: lists, reads of what is rewritten, writes and deletes."""
    notes: tuple[str, ...]
    """What a user should know: packs that could not be rewritten, and the like."""
    refused: str | None
    """In a dry run: why a real one would refuse; None when it would not."""
    command: str = ""
    """What does what the report says, typed into a shell; empty where gc never runs."""
    later: tuple[FreedLater, ...] = ()
    """What this run does not free, and when a later one does."""

    @property
    def freed_bytes(self) -> int:
        """What the store gets smaller by; the log grows by some hundred bytes."""
        return self.deleted_bytes - self.written_bytes


def ignore_progress(what: str, done: int, total: int) -> None:
    """Reports to nobody."""


class ProgressSum:
    """Adds up progress from several threads."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._total, self._done = progress, what, total, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many more are done."""
        with self._lock:
            self._done += count
            self._progress(self._what, self._done, self._total)


def gc_command(url: str, options: GcOptions, *, exceeds: bool) -> str:
    """The command that runs gc on the store at `url` with these options; `exceeds`: more would go than they allow."""
    usual = GcOptions()
    words = ["tsck", "gc"]
    for name in ("grace", "min_age", "undo_window"):
        seconds = getattr(options, f"{name}_seconds")
        if seconds != getattr(usual, f"{name}_seconds"):
            words += [f"--{name.replace('_', '-')}", f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"]
    for name, fraction in (("max_delete", 1.0 if exceeds else options.max_delete), ("compact_below", options.compact_below)):
        if fraction != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", f"{fraction * 100:.15g}%"]
    return shlex.join([*words, "-s", url])


def unpin_command(url: str, root: str, owner: str) -> str:
    """The command that takes a pin back."""
    return shlex.join(["tsck", "unpin", root, "--owner", owner, "-s", url])


def iso_time(time_ns: int) -> str:
    """Nanoseconds since 1970 -> ``2026-01-31T12:00:00Z``, not before it."""
    try:
        return datetime.fromtimestamp(-(-time_ns // 1_000_000_000), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):  # a clock can say anything
        return f"{time_ns} ns"

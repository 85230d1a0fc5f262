"""Reports of gc: what it did and what it can free. All reports of space use these words."""

import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.gc.options import GcOptions

_LOSSES: Final = {
    "age": "",
    "undo window": ": then it can no longer be undone",
    "pins": ": then the pin is gone, and it can no longer be undone",
}
"""Reason of a protection -> what the commands that end it give up."""
Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


@dataclass(frozen=True, slots=True)
class FreedLater:
    """Bytes that gc frees later, and why. Each counts only what the ones before it do not free."""

    why: str
    """``grace``, ``age``, ``undo window``, ``pins`` (dated ones), or ``packs in use``: dead blocks of packs that are not sparse."""
    bytes: int
    """For ``packs in use``: a lower bound."""
    objects: int
    """Objects that are unneeded then, without rewritten packs."""
    due_ns: int | None
    """When gc frees all of it, unless it is held again; nanoseconds since 1970. None: never by itself."""
    commands: tuple[str, ...]
    """Commands that free it now, in this order."""

    @property
    def is_protected(self) -> bool:
        """Whether its `commands` free objects that a running save, an undo or the owner of a pin may need."""
        return self.why in _LOSSES

    def describe(self, *, early: bool = False) -> str:
        """One line for people, with its commands if they give up no protection; `early`: even if they do, and what is lost then."""
        reason = {
            "grace": "condemned, until the grace period ends",
            "age": "young and in no snapshot, so it may belong to a running or staged save",
            "undo window": "forgotten, held until the undo window ends",
            "pins": "held by pins that expire",
            "packs in use": "at least, in packs that are not sparse enough to rewrite",
        }[self.why]
        date = "" if self.due_ns is None else f"by {due_time(self.due_ns)}: "
        text = f"{human_bytes(self.bytes)} {'later, ' if date else ''}{date}{reason}"
        if self.is_protected and not early:
            return text
        shown = " && ".join(self.commands[-3:])
        more = f"{len(self.commands) - 3} more pins, which `tsck pin` lists, and " if len(self.commands) > 3 else ""
        caution = "; not while a save is running or staged" if "--min-age 0s" in self.commands[-1] else ""
        return f"{text} ({more}`{shown}` frees it now{_LOSSES.get(self.why, '')}{caution})"


@dataclass(frozen=True, slots=True)
class Freeable:
    """The bytes that gc can free, as reported by `gc`, `usage`, `fsck` and errors."""

    now_bytes: int
    command: str
    """The command that frees them; empty where gc never runs."""
    later: tuple[FreedLater, ...]
    forget: str = ""
    """If gc never frees anything unless a snapshot is forgotten: the command that forgets one."""

    def describe(self, *, is_full: bool = False) -> list[str]:
        """For people: a line on what gc can free now, and one for each reason to free something later.

        `is_full`: space is needed now, so if nothing else frees any, the commands that give up a protection are shown too.
        """
        early = is_full and self.now_bytes <= 0 and all(later.is_protected for later in self.later)
        now = f"{human_bytes(self.now_bytes)} now (`{self.command}` frees it)" if self.now_bytes > 0 else "nothing now"
        held = f"branches and tags hold all snapshots: forget some (`{self.forget}`), and gc frees what only they need"
        return [f"gc can free: {now}", *(later.describe(early=early) for later in self.later), *([held] if self.forget else [])]


@dataclass(frozen=True, slots=True)
class GoneSnapshot:
    """A snapshot that nothing holds, and whose record gc deletes."""

    id: str
    root: str
    ref: str
    step: int | None


@dataclass(frozen=True, slots=True)
class RewrittenPack:
    """A pack whose live entries were copied."""

    name: str
    bytes: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """The result of a run of gc; in a dry run, the result that it would have."""

    dry_run: bool
    snapshots: tuple[GoneSnapshot, ...]
    """Deleted in this run; without those in the grace period, and young ones."""
    deleted: dict[str, int]
    """Kind of object -> deleted objects."""
    deleted_bytes: int
    rewritten: tuple[RewrittenPack, ...]
    written_bytes: int
    """In new packs and relocation maps."""
    waiting: int
    """Condemned objects in their grace period."""
    young: int
    """Unreferenced objects that are too young to be judged."""
    total_bytes: int
    """The bytes of all listed objects, before the run."""
    requests: int
    """Requests to the backend after marking: lists, reads of what is rewritten, writes and deletes."""
    notes: tuple[str, ...]
    """For the user, such as packs that could not be rewritten."""
    refused: str | None
    """In a dry run: why a real run would refuse; None if it would not."""
    command: str = ""
    """The shell command for this run; empty where gc never runs."""
    later: tuple[FreedLater, ...] = ()
    """The bytes that later runs free, and when."""
    not_recorded: str = ""
    """Why the log does not record this run; empty if it does, and in a dry run."""

    def __repr__(self) -> str:
        what = "would free" if self.dry_run else "freed"
        refused = ", refused" if self.refused is not None else ""
        counts = f"{len(self.snapshots):,} snapshots, {sum(self.deleted.values()):,} objects"
        return f"GcReport({what} {human_bytes(self.freed_bytes)}: {counts}, {len(self.rewritten):,} packs rewritten{refused})"

    def _repr_html_(self) -> str:
        snapshots = (("snapshot", f"{item.root[:SHOWN_ROOT_DIGITS]} of {item.ref}, step {item.step}") for item in self.snapshots)
        deleted = ((kind, f"{count:,}") for kind, count in self.deleted.items())
        later = (("later", item.describe()) for item in self.later)
        notes = (("note", note) for note in (*self.notes, *([] if self.refused is None else [self.refused])))
        return html_table(repr(self), ("what", ""), [*deleted, *notes, *later, *snapshots])

    @property
    def freed_bytes(self) -> int:
        """Bytes by which the store shrinks; the log grows by some hundred bytes."""
        return self.deleted_bytes - self.written_bytes


def ignore_progress(what: str, done: int, total: int) -> None:
    """Reports to nobody."""


class ProgressSum:
    """Adds up progress from several threads."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._total, self._done = progress, what, total, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Adds to what is done."""
        with self._lock:
            self._done += count
            self._progress(self._what, self._done, self._total)


def gc_command(url: str, options: GcOptions, *, exceeds: bool) -> str:
    """The command that runs gc on the store at `url` with these options; `exceeds`: it would delete more than they allow."""
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


def forget_command(url: str, address: str) -> str:
    """The command that forgets a snapshot."""
    return shlex.join(["tsck", "forget", address, "-s", url])


def unpin_command(url: str, root: str, owner: str) -> str:
    """The command that removes a pin."""
    return shlex.join(["tsck", "unpin", root, "--owner", owner, "-s", url])


def due_time(time_ns: int) -> str:
    """``2026-01-31T12:00:00Z``, rounded up."""
    return iso_time(time_ns + 999_999_999)

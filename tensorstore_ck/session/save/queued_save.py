"""A save in the queue: what the queue calls of it, the thread that works through the saves, the times that its events report, and the
errors that were not raised yet.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from tensorstore_ck.common.save_progress import Progress
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.save_status import SaveStatus

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Slot

Item = TypeVar("Item")

_logger: Final = logging.getLogger("tensorstore_ck")


class Worker(Generic[Item]):
    """A queue and its thread. All but the work itself is done under the lock of `changed`, which is notified at each change."""

    def __init__(
        self, name: str, changed: Changes, work: Callable[[Item], object], broken: Callable[[Item, BaseException], object]
    ) -> None:
        """`broken` is called with an exception of `work`, which should raise none."""
        self._name = name
        self._changed = changed
        self._work = work
        self._broken = broken
        self._waiting: deque[Item] = deque()
        self._working: Item | None = None
        self.thread: threading.Thread | None = None
        """None while there is nothing to do."""

    def put(self, item: Item) -> None:
        """Adds work. In the main thread, call it by `shielded`.

        Raises:
            RuntimeError, MemoryError: no thread can be started.
        """
        with self._changed.lock:
            self._waiting.append(item)
            if self.thread is None:
                # A daemon: a backend that hangs must not keep the process alive; see `process_end`.
                self.thread = Helper(self._run, self._name, is_restartable=True)
                try:
                    self.thread.start()
                except (RuntimeError, MemoryError):
                    self.thread = None
                    self._waiting.pop()
                    raise

    def items(self) -> list[Item]:
        """The item in progress, then the waiting ones."""
        with self._changed.lock:
            return [*([] if self._working is None else [self._working]), *self._waiting]

    def waiting(self) -> Iterator[Item]:
        """The waiting items, oldest first; under the caller's lock."""
        return iter(self._waiting)

    def _run(self) -> None:
        if self._working is not None:  # it ran before, and had no memory even to note an error
            self._note_broken(MemoryError("no memory for a call"))
        while True:
            try:
                item = self._next()
                self._changed.notify_all()
                if item is None:
                    return
                self._work(item)
                self._working = None  # another worker may have it now: an error from here on is not the item's
            except BaseException as exc:  # noqa: BLE001 - the thread must go on: later work needs it
                if self.thread is not threading.current_thread():
                    return
                self._note_broken(exc)

    def _note_broken(self, exc: BaseException) -> None:
        try:
            if self._working is not None:
                self._broken(self._working, exc)
        except BaseException:
            _logger.exception("%s: an error was not noted", self._name)

    def _next(self) -> Item | None:
        """Ends the work on one item, and returns the next; None: there is none, and the thread ends."""
        with self._changed.lock:
            self._working = self._waiting.popleft() if self._waiting else None
            if self._working is None:
                self.thread = None
            return self._working


def items_of(workers: Iterable[Worker[Item]]) -> list[Item]:
    """The items of all workers that run, each once; under the caller's lock.

    A function, since Python 3.12 and 3.13 leave a lock locked if Ctrl-C comes between two turns of a loop in the lock's own block.
    """
    busy = [worker for worker in workers if worker.thread is not None]
    return list(dict.fromkeys(item for worker in busy for item in worker.items()))


class Admission(NamedTuple):
    """The decision about a save before it is captured."""

    admitted: bool
    dropped: tuple[bytes, ...] = ()
    """Keys of queued saves that are dropped to make space for it."""
    failed: bytes = b""
    """The key of an earlier save, whose error is raised instead."""


class Publishable(Protocol):
    """A save that is staged."""

    def replicate(self, status: SaveStatus, /) -> None:
        """Copies the staged files to other hosts, if the store was opened so; never fails."""

    def publish(self, status: SaveStatus, /) -> SnapshotRow:
        """Uploads the staged objects and publishes the snapshot."""


class Runnable(Protocol):
    """A save that can be written and committed."""

    @property
    def key(self) -> bytes:
        """Names the save: the same on all ranks, and of no other save of any of them; empty for one that is never queued to be stored."""

    @property
    def ref(self) -> str:
        """The branch that it moves."""

    @property
    def step(self) -> int | None:
        """The training step."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    def fail(self, error: BaseException, /) -> None:
        """Reports to the other ranks that this one cannot save. May raise the error that all ranks raise."""

    def run(self, status: SaveStatus, /) -> SnapshotRow | Publishable:
        """Writes and commits: returns the snapshot, or what is staged."""


class Capturable(Runnable, Protocol):
    """A save in the background: its state is copied."""

    @property
    def needed_bytes(self) -> int:
        """How much memory the copy needs."""

    @property
    def scope(self) -> bytes:
        """Names the ranks that make it: the same for all their saves."""

    @property
    def frozen_bytes(self) -> int:
        """The bytes of frozen tensors, which are not copied."""

    @property
    def patience_seconds(self) -> float | None:
        """How long it may wait for memory; None: without limit."""

    def decide(self, admit: Callable[[], Admission], /) -> Admission:
        """The result of `admit` on the rank that decides."""

    def skip(self) -> None:
        """Gives the save up before it begins, on all ranks."""

    def copy_into(self, slot: "Slot", /) -> None:
        """Copies the state, which may be changed afterwards."""


class QueuedSave:
    """A save in the queue. It has a `save` until that is staged, and then a `staged` save."""

    def __init__(
        self,
        ref: str,
        step: int | None,
        rank: int,
        called: float,
        *,
        key: bytes = b"",
        scope: bytes = b"",
        save: Runnable | None = None,
        staged: Publishable | None = None,
        is_background: bool,
    ) -> None:
        """`called`: when its caller asked for it."""
        self.status = SaveStatus(ref, step, rank)
        self.key, self.scope = key, scope
        self.save = save
        self.staged = staged
        self.slot: Slot | None = None
        self.is_background = is_background
        """Whether it was started by `put_snapshot_async`, or resumed."""
        self.waited_seconds = 0.0
        """How long it waited for memory."""
        self.waited_for = 0
        """How many saves were in progress when the wait began."""
        self.is_replaced_by_newer = False
        """Whether it is obsolete when a newer such save of its ref is made while it waits."""
        self.is_handed_over = False
        """Whether the queue has all of it, so that it goes on even if its caller is interrupted."""
        self.is_resumed = save is None
        """Whether an earlier process started it."""
        self.called = self.captured = self.begun = called

    def makes_obsolete(self, earlier: "QueuedSave") -> bool:
        """Whether `earlier`, which waits, need not be stored any more."""
        return self.is_replaced_by_newer and earlier.is_replaced_by_newer and earlier.status.ref == self.status.ref

    @property
    def stall_seconds(self) -> float:
        """How long the training was blocked."""
        return self.captured - self.called

    def copy(self, save: Capturable) -> None:
        """Copies the state of `save`, which is this object's save, into the slot."""
        assert self.slot is not None
        with self.status.meter.timed("capture", save.needed_bytes):
            save.copy_into(self.slot)
        self.captured = time.monotonic()

    def note_broken(self, exc: BaseException) -> None:
        """Ends it with an error of a step that should raise none."""
        _logger.error("the steps after the save of %s failed", self.status, exc_info=exc)
        if not self.status.has_ended:
            self.status.fail(exc)

    def forget_state(self, error: BaseException) -> None:
        """Drops all references to the state, including traceback frames of `error`."""
        self.save = self.staged = None
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

    def capture_fields(self, save: Capturable) -> dict[str, int | float]:
        """The fields of an event about the capture. `save` is this object's save, which the thread may have dropped already."""
        return {
            "capture_seconds": self.status.meter.seconds("capture"),
            "stall_seconds": self.stall_seconds,
            "captured_bytes": save.needed_bytes,
            "frozen_bytes": save.frozen_bytes,
        }

    def seconds_fields(self, progress: Progress) -> dict[str, float]:
        """The times in the event of a save that has ended, with this `progress`."""
        total, waited = time.monotonic() - self.called, self.begun - self.captured
        return {"total_seconds": total, "queued_seconds": waited, **progress.seconds_fields()}

    def published_fields(self, snapshot: Snapshot) -> dict[str, int | float]:
        """The times and sizes in the event of a published snapshot."""
        progress = self.status.meter.snapshot()
        hashed, new, written = itemgetter("hash", "encode", "write")(progress.stage_bytes)
        return {
            **self.seconds_fields(progress),
            "stall_seconds": self.stall_seconds,
            "logical_bytes": snapshot.logical_bytes,
            "hashed_bytes": hashed,
            "new_bytes": snapshot.new_bytes,
            "dedup_ratio": 1 - new / hashed if hashed else 0.0,
            "compression_ratio": new / written if written else 1.0,
        }


class UnraisedErrors:
    """The failed saves whose errors were not raised, oldest first. The caller locks changes; `first` needs no lock."""

    def __init__(self) -> None:
        self._failed: list[QueuedSave] = []

    def add(self, queued: QueuedSave) -> None:
        """Adds a failed save."""
        self._failed = [*self._waiting(), queued]

    def first(self) -> QueuedSave | None:
        """The oldest one."""
        return next((queued for queued in self._failed if not queued.status.is_raised), None) if self._failed else None

    def of_key(self, key: bytes) -> QueuedSave | None:
        """The save of that key, even if its error was raised meanwhile."""
        return next((queued for queued in self._failed if queued.key == key), None)

    def take_all(self) -> BaseException | None:
        """The oldest error, with the others as notes."""
        errors = [pop_error(queued) for queued in self._waiting()]
        self._failed = []
        for other in errors[1:]:
            errors[0].add_note(f"and another save failed: {other}")
        return errors[0] if errors else None

    def _waiting(self) -> list[QueuedSave]:
        return [queued for queued in self._failed if not queued.status.is_raised]


def pop_error(queued: QueuedSave) -> BaseException:
    """The error of a save, for the caller to raise; marks it as raised."""
    error = queued.status.error
    assert error is not None
    if not queued.status.is_raised:
        queued.status.is_raised = True
        error.add_note(f"(of the earlier save of {queued.status}, for which nobody waited)")
    return error

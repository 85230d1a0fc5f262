"""The queue of saves of one store handle. One thread stores captured states, in order; of staged saves, a second thread copies the files to
other hosts, and a third uploads and publishes them.

Only memory can run out. Whether a save waits for memory, is skipped, or replaces queued saves is decided before anything is copied; for
many ranks by rank 0 (`Capturable.decide`), so that ranks never drop different snapshots. An error is kept until it is raised: by a wait, or
by the next save. The threads live only while there is work. Knows no torch and no store.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NoReturn

from tensorstore_ck.common.host_memory import memory_error
from tensorstore_ck.common.threads import shielded
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.errors import InvalidOptionError, SnapshotAbortedError, SnapshotDroppedError, StoreError
from tensorstore_ck.events import Event, Kind, Observers
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.capture_budget import CaptureMemory, OnFull
from tensorstore_ck.session.save.drain_report import DrainReport, Staying
from tensorstore_ck.session.save.queued_save import (
    Admission,
    Capturable,
    Publishable,
    QueuedSave,
    Runnable,
    UnraisedErrors,
    Worker,
    items_of,
    pop_error,
)
from tensorstore_ck.session.save.save_status import PendingSnapshot, SaveMilestone, SaveStatus

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Arena

_logger: Final = logging.getLogger("tensorstore_ck")

GIVE_UP_SECONDS: Final = 10.0
"""How long to wait for a save that was asked to give up."""
RAISE_SECONDS: Final = 30.0
"""How long a rank waits for an error that rank 0 has already."""
EXIT_SECONDS: Final = 600.0
"""How long an ending process waits for its saves."""


class SaveQueue:
    """The saves of one store handle. Thread-safe; one thread at a time may save."""

    def __init__(self, open_arena: Callable[[], "Arena"], observers: Observers, stays: Staying) -> None:
        """`open_arena` allocates memory at the first save that needs it. `stays`: when saves stay on a staging disk at the end."""
        self._open_arena = open_arena
        self._observers = observers
        self._stays = stays
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = Changes()
        self._save_worker: Worker[QueuedSave] = Worker("tsck-save", self._changed, self._run_save, QueuedSave.note_broken)
        self._replicate_worker: Worker[QueuedSave] = Worker("tsck-replicate", self._changed, self._replicate, QueuedSave.note_broken)
        self._publish_worker: Worker[QueuedSave] = Worker("tsck-publish", self._changed, self._publish_staged, QueuedSave.note_broken)
        self._workers = (self._publish_worker, self._replicate_worker, self._save_worker)
        self._memory = CaptureMemory(self._open_arena, self._changed)
        self._unraised = UnraisedErrors()
        self._safe: Snapshot | None = None
        self._has_ended = False

    def _enter(self) -> None:
        """Resets the queue in a forked child: the saves are its parent's."""
        if os.getpid() != self._pid:
            self._reset()

    # --- saves --------------------------------------------------------------------------------------------------------

    def submit(self, save: Capturable, on_full: OnFull, called: float) -> PendingSnapshot:
        """Copies a save that was captured after `require_no_worker`, and called at the time `called`; the thread writes and commits it.

        Raises:
            StoreError: it cannot be captured; or the error of an earlier save for which nobody waited.
        """
        queued = QueuedSave(save.ref, save.step, save.rank, called, key=save.key, scope=save.scope, save=save, is_background=True)
        pending = PendingSnapshot(queued.status)
        try:
            admission = save.decide(partial(self._admit, queued, save, on_full))
        except BaseException:
            self._release(queued)
            raise
        if admission.failed:
            save.skip()
            self._raise_error_of(admission.failed, save.ref)
        if not admission.admitted:
            save.skip()
            self._end_dropped(queued, "skipped")
            return pending
        try:
            for other in self._save_worker.items() if admission.dropped else ():
                if other.key in admission.dropped:  # as rank 0 decided; on this rank it may be running already
                    other.status.drop("replaced")
            if queued.slot is None or queued.slot.memory is None:
                self._memory.wait_until_taken(queued, save, len(self._queued()))
            if queued.waited_seconds:
                self._emit(queued.status, "stalled", stall_seconds=queued.waited_seconds, queue_depth=queued.waited_for)
            queued.copy(save)
            if not shielded(partial(self._enqueue, queued), finish=True):
                self._store_here(queued)
        except BaseException as exc:
            if not queued.is_handed_over:  # otherwise Ctrl-C came after the handover, and the thread goes on with the save
                self._release(queued)
                save.fail(exc)
            raise
        queued.status.reach(SaveMilestone.CAPTURED)
        if self._observers.wants("captured"):
            self._emit(queued.status, "captured", **queued.capture_fields(save), **self._in_use())
        if self._has_ended:
            self.drain(EXIT_SECONDS, may_leave=True)
        return pending

    def begin_waited(self, save: Runnable, called: float) -> QueuedSave:
        """A save in the caller's thread, which has called `wait_idle` at the time `called`; `finish` writes and publishes it.

        Raises the error of an earlier save in the background for which nobody waited.
        """
        queued = QueuedSave(save.ref, save.step, save.rank, called, key=save.key, save=save, is_background=False)
        if (unraised := self._unraised.first()) is not None:
            error = pop_error(unraised)
            save.fail(error)
            raise error
        return queued

    def finish(self, queued: QueuedSave) -> Snapshot:
        """Writes and publishes a save; raises its error."""
        self._run_save(queued)
        status = queued.status
        if queued.staged is not None:
            self._publish_staged(queued)
        return status.snapshot if status.snapshot is not None else status.result()

    def pending(self) -> list[PendingSnapshot]:
        """The saves in progress, oldest first."""
        self._enter()
        return [PendingSnapshot(queued.status) for queued in self._queued()]

    def is_quiet(self) -> bool:
        """Whether no save is in progress and no error is left to raise."""
        return self._is_idle() and self._unraised.first() is None

    def resume(self, staged: Publishable, ref: str, step: int | None, rank: int) -> None:
        """Continues a save that an earlier process staged."""
        self._enter()
        queued = QueuedSave(ref, step, rank, time.monotonic(), staged=staged, is_background=True)
        queued.status.is_raised = True
        queued.status.reach(SaveMilestone.STAGED)
        shielded(lambda: self._hand_over(queued, self._publish_worker, self._publish_staged), finish=True)

    def wait_idle(self, *, uploads: bool = True) -> None:
        """Waits until no save is in progress; returns at once in a callback of a save."""
        self._enter()
        if not self._is_idle() and not self._is_worker():
            self._changed.wait_for(self._is_idle if uploads else lambda: self._save_worker.thread is None)

    def require_no_worker(self) -> None:
        """Raises in a callback of a save: a save there might wait for itself.

        Raises:
            InvalidOptionError: this thread is a worker of the queue.
        """
        self._enter()
        if self._is_worker():
            raise InvalidOptionError(
                "a callback of a save cannot save asynchronously, or with group=: it might wait for itself; save in another thread",
                object_id="put",
            )

    def wait_for_upload(self) -> bool:
        """Waits until one more staged save has ended; False if there are none."""
        staged = self._queued(self._publish_worker, self._replicate_worker)
        if staged:
            self._changed.wait_for(lambda: self._queued(self._publish_worker, self._replicate_worker)[:1] != staged[:1])
        return bool(staged)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, seconds: float | None = None, *, give_up_seconds: float = GIVE_UP_SECONDS, may_leave: bool = False) -> DrainReport:
        """Waits for the saves in progress; after `seconds` asks the unpublished ones to give up, for up to `give_up_seconds`.

        With `may_leave` it does not wait for a store that answers nothing or takes no upload. In a callback of a save it returns a report
        at once.
        """
        self._enter()
        saves = self._queued()
        if not self._is_worker():
            self._changed.wait_for(self._is_done_or_left if may_leave else self._is_done, seconds)
            for queued in () if self._is_done() else saves:
                queued.status.drop("abandoned")
            self._changed.wait_for(self._is_idle, give_up_seconds)
        return DrainReport.of([queued.status for queued in saves], self._safe, self._stays.resume_command)

    def end(self) -> DrainReport:
        """Drains at the end of the process. What earlier processes staged stays on the disk; its own does if the store does not answer."""
        self._enter()
        for queued in self._publish_worker.items():
            if queued.is_resumed:
                queued.status.drop("abandoned")
        return self.drain(EXIT_SECONDS, may_leave=True)

    def end_process(self) -> DrainReport:
        """`end`. From now on who saves waits for it: a thread of the program may outlive the main one, but the queue's threads do not."""
        self._has_ended = True
        return self.end()

    def close(self) -> None:
        """Finishes the saves in progress, and frees the memory; idempotent.

        Raises:
            StoreError: the error of a save for which nobody waited.
        """
        report = self.end()
        if report.staged or report.under_way:
            _logger.error("the store is closed with saves in progress: %s", report)
        self._memory.close()
        with self._changed.lock:
            error = self._unraised.take_all()
        if error is not None:
            raise error

    # --- memory -------------------------------------------------------------------------------------------------------

    def prepare(self, size_bytes: int, warm_up: Callable[[], object]) -> None:
        """Allocates memory for copies of this size, in a thread, which then calls `warm_up`."""
        self._enter()
        self._memory.prepare(size_bytes, warm_up)

    def _admit(self, queued: QueuedSave, save: Capturable, on_full: OnFull) -> Admission:
        unraised = self._unraised.first()
        if unraised is not None:
            return Admission(admitted=False, failed=unraised.key)
        return self._memory.admit(queued, save, on_full, waiting=self._save_worker.waiting, under_way=len(self._queued()))

    def _enqueue(self, queued: QueuedSave) -> bool:
        """Hands a captured save over to the thread; False: no thread can be started."""
        queued.status.on_drop = lambda: self._release_if_waiting(queued)
        queued.status.queue_changes = self._changed
        queued.is_handed_over = True
        try:
            self._save_worker.put(queued)
        except (RuntimeError, MemoryError) as exc:
            _logger.warning("%s is stored by the thread that saves, which waits for it: %s", queued.status, exc)
            return False
        return True

    def _store_here(self, queued: QueuedSave) -> None:
        queued.status.is_awaited = True
        self._run_save(queued)
        if (error := queued.status.error) is not None and not isinstance(error, Exception):  # Ctrl-C
            queued.status.is_raised = True
            raise error

    def _release(self, queued: QueuedSave) -> None:
        if queued.slot is not None:
            queued.slot.release()
            self._changed.notify_all()

    def _release_if_waiting(self, queued: QueuedSave) -> None:
        """Frees the memory of a dropped save at once; the ranks end it together when its turn comes."""
        with self._changed.lock:
            if any(queued is other for other in self._save_worker.waiting()):
                self._release(queued)

    def _end_dropped(self, queued: QueuedSave, reason: str) -> None:
        queued.status.drop(reason)
        queued.status.is_ending = True
        error = SnapshotDroppedError(
            f"the save of {queued.status} was {reason}: no host_memory_bytes are left", object_id=queued.status.ref
        )
        queued.status.fail(error)
        self._emit(queued.status, "dropped", reason=reason, **self._in_use())

    # --- errors -------------------------------------------------------------------------------------------------------

    def _raise_error_of(self, key: bytes, ref: str) -> NoReturn:
        """Raises the error of an earlier save that rank 0 raises, too. This rank may not have it yet."""
        self._changed.wait_for(lambda: not any(other.key == key for other in self._queued()), RAISE_SECONDS)
        with self._changed.lock:
            queued = self._unraised.of_key(key)
        if queued is not None:
            raise pop_error(queued)
        raise SnapshotAbortedError(
            f"the save to {ref!r} was not made: rank 0 raised the error of an earlier save; try again", object_id=ref
        )

    # --- the threads --------------------------------------------------------------------------------------------------

    def _queued(self, *workers: Worker[QueuedSave]) -> list[QueuedSave]:
        """The saves of these workers, by default of all workers. A save that is handed over is listed once, though two workers have it."""
        if self._is_idle():
            return []
        with self._changed.lock:
            return items_of(workers or self._workers)

    def _is_idle(self) -> bool:
        # Read in the order in which a save is handed over: also without the lock, no save passes by unseen.
        return self._save_worker.thread is self._replicate_worker.thread is self._publish_worker.thread is None

    def _is_done(self) -> bool:
        """Whether the only saves in progress were asked to give up."""
        return all(queued.status.dropped == "abandoned" for queued in self._queued())

    def _is_done_or_left(self) -> bool:
        """Whether they are done, or all are safe on the staging disk and the store answers nothing or takes no upload."""
        is_safe = all(queued.status.has_reached(SaveMilestone.STAGED) for queued in self._queued())
        return self._is_done() or (is_safe and self._stays.is_store_gone())

    def _is_worker(self) -> bool:
        return threading.current_thread() in (self._save_worker.thread, self._replicate_worker.thread, self._publish_worker.thread)

    def _run_save(self, queued: QueuedSave) -> None:
        assert queued.save is not None
        if queued.is_background:
            queued.begun = time.monotonic()
        try:
            outcome = queued.save.run(queued.status)
        except BaseException as exc:  # noqa: BLE001 - raised by a wait, or by the next save
            self._release(queued)
            self._fail(queued, exc)
            return
        self._release(queued)
        if isinstance(outcome, SnapshotRow):
            self._succeed(queued, outcome)
            return
        queued.save, queued.staged = None, outcome
        progress = queued.status.meter.snapshot()
        self._emit(queued.status, "staged", write_seconds=progress.stage_seconds["write"], new_bytes=progress.stage_bytes["write"])
        queued.status.reach(SaveMilestone.STAGED)
        if queued.is_background:
            self._hand_over(queued, self._replicate_worker, self._replicate)

    def _replicate(self, queued: QueuedSave) -> None:
        assert queued.staged is not None
        try:
            queued.staged.replicate(queued.status)
        finally:
            self._hand_over(queued, self._publish_worker, self._publish_staged)

    @staticmethod
    def _hand_over(queued: QueuedSave, worker: Worker[QueuedSave], work: Callable[[QueuedSave], None]) -> None:
        try:
            worker.put(queued)
        except (RuntimeError, MemoryError):  # no thread can be started, for example while the interpreter ends
            work(queued)

    def _publish_staged(self, queued: QueuedSave) -> None:
        assert queued.staged is not None
        try:
            self._succeed(queued, queued.staged.publish(queued.status))
        except BaseException as exc:  # noqa: BLE001 - raised by a wait, or by the next save
            self._fail(queued, exc)

    def _succeed(self, queued: QueuedSave, info: SnapshotRow) -> None:
        snapshot = self._safe = Snapshot.from_info(info)
        queued.status.is_ending = True
        queued.save = queued.staged = None  # what the state holds may be freed before anybody knows of the end
        if self._observers.wants("published"):
            fields = {**queued.published_fields(snapshot), **self._in_use()}
            self._emit(queued.status, "published", root=snapshot.root, snapshot=snapshot.id, **fields)
        queued.status.succeed(snapshot)

    def _fail(self, queued: QueuedSave, exc: BaseException) -> None:
        status = queued.status
        exc = memory_error(exc, f"the save of {status}")
        status.is_ending = True
        queued.forget_state(exc)
        if status.dropped and isinstance(exc, SnapshotAbortedError):
            self._emit(status, "dropped", reason=status.dropped, **self._in_use())
            exc = exc if isinstance(exc, SnapshotDroppedError) else SnapshotDroppedError(str(exc), object_id=exc.object_id)
        else:
            kind = exc.kind if isinstance(exc, StoreError) else type(exc).__name__
            fields = {**queued.seconds_fields(status.meter.snapshot()), **self._in_use(), "is_waited_for": int(not queued.is_background)}
            self._emit(status, "failed", error=str(exc), error_kind=kind, **fields)
        status.fail(exc)
        with self._changed.lock:
            if not status.is_raised and queued.is_background:
                self._unraised.add(queued)

    def _emit(self, status: SaveStatus, kind: Kind, **fields: int | float | str) -> None:
        self._observers.emit(Event(kind, status.id, status.ref, status.step, status.rank, time.time_ns(), fields))

    def _in_use(self) -> dict[str, int]:
        arena, depth = self._memory.arena, [*map(attrgetter("status.is_ending"), self._queued())].count(False)
        return {"queue_depth": depth, "memory_bytes": arena.allocated_bytes if arena is not None else 0}

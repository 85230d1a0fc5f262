"""The queue of puts of one store handle: what is captured waits here for the one thread that stores it, in order; and what was stored on
a staging disk, for the one that has it copied to other hosts, and the one that uploads and publishes it.

Memory is the only thing that can run out: whether a put waits for it, is skipped, or takes that of queued ones is decided before anything
is captured, for many ranks by rank 0 alone (`Put.decide`), so that ranks never drop different snapshots. An error is kept until somebody
is told: by a wait, or by the next put. The thread lives only while there is work. Knows no torch and no store.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NoReturn, cast

from tensorstore_ck.errors import InvalidOptionError, SnapshotAbortedError, SnapshotDroppedError, StoreError
from tensorstore_ck.events import Event, Kind, Observers
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.capture_budget import CaptureMemory
from tensorstore_ck.session.save.drain_report import DrainReport
from tensorstore_ck.session.save.pending import PendingSnapshot
from tensorstore_ck.session.save.put_protocol import Admission, Put, StagedPut
from tensorstore_ck.session.save.put_status import PutMilestone, PutStatus
from tensorstore_ck.session.save.queued_put import QueuedPut, UnraisedErrors, pop_error
from tensorstore_ck.session.save.worker import Worker

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Arena, Slot

OnFull = Literal["block", "skip", "replace"]
"""What a put does when no memory is left to capture into: wait for it; do not take place; or take that of the oldest queued put."""

_logger: Final = logging.getLogger("tensorstore_ck")

GIVE_UP_SECONDS: Final = 10.0
"""How long a put that was told to give up is waited for."""
RAISE_SECONDS: Final = 30.0
"""How long a rank waits to meet the error that rank 0 has met."""
EXIT_SECONDS: Final = 600.0
"""How long a process that ends waits for its puts."""


class SaveQueue:
    """The puts of one store handle. Thread-safe; puts must come from one thread at a time."""

    def __init__(self, open_arena: Callable[[], "Arena"], observers: Observers) -> None:
        """`open_arena` is asked for memory at the first put that needs it."""
        self._open_arena = open_arena
        self._observers = observers
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._stores: Worker[QueuedPut] = Worker("tsck-save", self._changed, self._store, self._broken)
        self._copies: Worker[QueuedPut] = Worker("tsck-copy", self._changed, self._copy, self._broken)
        self._uploads: Worker[QueuedPut] = Worker("tsck-publish", self._changed, self._publish, self._broken)
        self._memory = CaptureMemory(self._open_arena, self._changed)
        self._unraised = UnraisedErrors()
        self._safe: Snapshot | None = None

    def _enter(self) -> None:
        """A forked child begins anew: its parent's puts are its parent's."""
        if os.getpid() != self._pid:
            self._reset()

    # --- puts ---------------------------------------------------------------------------------------------------------

    def submit(self, make: Callable[[], Put], on_full: OnFull) -> PendingSnapshot:
        """Captures what `make` makes a put of, and leaves the rest to the thread.

        Raises:
            StoreError: it cannot be captured; or, before that, what an earlier put that nobody waited for failed with.
        """
        if on_full not in ("block", "skip", "replace"):
            raise InvalidOptionError(f"on_full must be 'block', 'skip' or 'replace', not {on_full!r}", object_id="on_full")
        self._enter()
        self.require_no_worker()
        called = time.monotonic()
        put = make()
        queued = QueuedPut(put, called, is_background=True)
        pending = PendingSnapshot(queued.status)
        try:
            admission = put.decide(lambda: self._admit(queued, on_full))
        except BaseException:
            self._release(queued)
            raise
        if admission.failed:
            put.skip()
            self._raise_error_of(admission.failed, put)
        if not admission.admitted:
            put.skip()
            self._end_dropped(queued, "skipped")
            return pending
        try:
            for number in admission.dropped:
                self._drop_before(number)
            if queued.slot is None:
                queued.slot = self._wait_for_memory(queued)
            self._report_stall(queued)
            with queued.status.meter.timed("capture", put.needed_bytes):
                put.capture_into(queued.slot)
            queued.captured = time.monotonic()
            queued.status.on_drop(lambda: self._release_if_waiting(queued))
            self._stores.put(queued)
        except BaseException as exc:
            self._release(queued)
            put.fail(exc)
            raise
        queued.status.reach(PutMilestone.CAPTURED)
        self._emit(
            queued.status,
            "captured",
            capture_seconds=queued.status.meter.snapshot().stage_seconds["capture"],
            stall_seconds=queued.stall_seconds,
            captured_bytes=put.needed_bytes,
            frozen_bytes=put.frozen_bytes,
            **self._in_use(),
        )
        return pending

    def run(self, make: Callable[[], Put]) -> Snapshot:
        """Puts in the caller's thread, after those under way; nothing is copied."""
        self._enter()
        self.wait_idle()
        called = time.monotonic()
        queued = QueuedPut(make(), called, is_background=False)
        unraised = self._first_unraised()
        if unraised is not None:
            error = pop_error(unraised)
            queued.put.fail(error)
            raise error
        self._store(queued)
        if not queued.status.has_ended:
            self._publish(queued)
        queued.status.wait(PutMilestone.PUBLISHED, None)
        assert queued.status.snapshot is not None
        return queued.status.snapshot

    def pending(self) -> list[PendingSnapshot]:
        """The puts under way, oldest first."""
        self._enter()
        return [PendingSnapshot(queued.status) for queued in self._queued()]

    def is_quiet(self) -> bool:
        """Whether nothing is under way, and nobody has to be told of an error."""
        return not self._queued() and self._first_unraised() is None

    def resume(self, put: StagedPut) -> None:
        """Goes on with what an earlier process staged."""
        self._enter()
        queued = QueuedPut(cast(Put, put), time.monotonic(), is_background=True)
        queued.status.is_raised = queued.is_resumed = True
        queued.status.reach(PutMilestone.STAGED)
        self._uploads.put(queued)

    def wait_idle(self, *, uploads: bool = True) -> None:
        """Waits until no put is under way; not for itself, in a callback of one."""
        self._enter()
        if not self._is_on_a_worker():
            with self._changed:
                self._changed.wait_for(self._is_idle if uploads else self._stores.is_idle)

    def require_no_worker(self) -> None:
        """Refuses what would wait for itself.

        Raises:
            InvalidOptionError: it is called in a callback of a put.
        """
        if self._is_on_a_worker():
            raise InvalidOptionError(
                "a callback of a put cannot put beside the training, or with group=: it might wait for itself; do that in another thread",
                object_id="put",
            )

    def wait_for_upload(self) -> bool:
        """Waits until one more staged put has ended; False if there is none."""
        with self._changed:
            items = self._uploads.items()
            if items:
                self._changed.wait_for(lambda: self._uploads.items()[:1] != items[:1])
            return bool(items)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, deadline_seconds: float | None = None, *, give_up_seconds: float = GIVE_UP_SECONDS) -> DrainReport:
        """Waits for the puts under way; those that are not published by the deadline are given up.

        Giving up is waited for, too, but no longer than `give_up_seconds`. A callback of a put gets a report at once.
        """
        self._enter()
        puts = self._queued()
        if not self._is_on_a_worker():
            with self._changed:
                done = self._changed.wait_for(self._is_done, deadline_seconds)
            if not done:
                for queued in puts:
                    queued.status.drop("abandoned")
            with self._changed:
                self._changed.wait_for(self._is_idle, give_up_seconds)
        return DrainReport.of([queued.status for queued in puts], self._safe)

    def leave_resumed(self) -> None:
        """What an earlier process staged is left on the disk, as far as it is not published yet."""
        for queued in self._uploads.items():
            if queued.is_resumed:
                queued.status.drop("abandoned")

    def close(self) -> None:
        """Finishes what is under way, and frees the memory; idempotent.

        Raises:
            StoreError: what a put failed with that nobody waited for.
        """
        self._enter()
        self.leave_resumed()
        report = self.drain(EXIT_SECONDS)
        if report.staged or report.under_way:
            _logger.error("the store is closed with puts under way: %s", report)
        self._memory.close()
        with self._changed:
            error = self._unraised.take_all()
        if error is not None:
            raise error

    # --- memory -------------------------------------------------------------------------------------------------------

    def _admit(self, queued: QueuedPut, on_full: OnFull) -> Admission:
        with self._changed:
            unraised = self._unraised.first()
            if unraised is not None:
                return Admission(admitted=False, failed=unraised.number)
            dropped: list[int] = []
            while (slot := self._memory.try_take(queued)) is None:
                oldest = next((each for each in self._stores.waiting() if not each.status.dropped), None)
                if on_full == "skip":
                    return Admission(admitted=False)
                if on_full == "replace" and oldest is not None:
                    oldest.status.drop("replaced")
                    dropped.append(oldest.number)
                else:
                    self._memory.wait(queued, len(self._queued()))
            queued.slot = slot
            return Admission(True, tuple(dropped))

    def _wait_for_memory(self, queued: QueuedPut) -> "Slot":
        """Memory for a put of which another rank said that it takes place."""
        with self._changed:
            while (slot := self._memory.try_take(queued)) is None:
                self._memory.wait(queued, len(self._queued()))
            return slot

    def _report_stall(self, queued: QueuedPut) -> None:
        if queued.waited_seconds:
            self._emit(queued.status, "stalled", stall_seconds=queued.waited_seconds, queue_depth=queued.waited_for)

    def _drop_before(self, number: int) -> None:
        """Another rank's put of that number waits, and is given up; here it may be under way already."""
        for queued in self._stores.items():
            if queued.number == number:
                queued.status.drop("replaced")

    def _release(self, queued: QueuedPut) -> None:
        queued.release()
        with self._changed:
            self._changed.notify_all()

    def _release_if_waiting(self, queued: QueuedPut) -> None:
        """The memory of a put that was dropped is free at once; when its turn comes, all ranks learn that it was."""
        with self._changed:
            if any(queued is each for each in self._stores.waiting()):
                self._release(queued)

    def _end_dropped(self, queued: QueuedPut, reason: str) -> None:
        queued.status.drop(reason)
        queued.status.is_ending = True
        error = SnapshotDroppedError(f"the put of {queued.status} was {reason}: host_memory_bytes is used up", object_id=queued.status.ref)
        queued.status.fail(error)
        self._emit(queued.status, "dropped", reason=reason, **self._in_use())

    # --- errors -------------------------------------------------------------------------------------------------------

    def _first_unraised(self) -> QueuedPut | None:
        with self._changed:
            return self._unraised.first()

    def _raise_error_of(self, number: int, put: Put) -> NoReturn:
        """Raises what rank 0 raises: the error of an earlier put, which this rank may not have met yet."""
        with self._changed:
            self._changed.wait_for(lambda: not any(each.number == number for each in self._queued()), RAISE_SECONDS)
            queued = self._unraised.numbered(number)
        if queued is not None:
            raise pop_error(queued)
        raise SnapshotAbortedError(
            f"the put to {put.ref!r} did not take place: rank 0 raised what an earlier one failed with; try again", object_id=put.ref
        )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _queued(self) -> list[QueuedPut]:
        with self._changed:
            return list(dict.fromkeys((*self._uploads.items(), *self._copies.items(), *self._stores.items())))

    def _is_idle(self) -> bool:
        return self._stores.is_idle() and self._copies.is_idle() and self._uploads.is_idle()

    def _is_done(self) -> bool:
        """Whether nothing is under way but what was given up."""
        return all(queued.status.dropped == "abandoned" for queued in self._queued())

    def _is_on_a_worker(self) -> bool:
        return self._stores.is_mine() or self._copies.is_mine() or self._uploads.is_mine()

    def _store(self, queued: QueuedPut) -> None:
        queued.begun = time.monotonic()
        try:
            info = queued.put.run(queued.status)
        except BaseException as exc:  # noqa: BLE001 - told to whoever waits, or to the next put
            self._release(queued)
            self._fail(queued, exc)
            return
        self._release(queued)
        if info is not None:
            self._succeed(queued, info)
            return
        progress = queued.status.meter.snapshot()
        self._emit(queued.status, "staged", write_seconds=progress.stage_seconds["write"], new_bytes=progress.stage_bytes["write"])
        queued.status.reach(PutMilestone.STAGED)
        if queued.is_background:
            self._hand_over(queued, self._copies, self._copy)

    @staticmethod
    def _broken(queued: QueuedPut, exc: BaseException) -> None:
        _logger.error("what is done after the put of %s failed", queued.status, exc_info=exc)
        if not queued.status.has_ended:
            queued.status.fail(exc)

    def _copy(self, queued: QueuedPut) -> None:
        try:
            queued.put.replicate(queued.status)
        finally:
            self._hand_over(queued, self._uploads, self._publish)

    @staticmethod
    def _hand_over(queued: QueuedPut, worker: Worker[QueuedPut], work: Callable[[QueuedPut], None]) -> None:
        try:
            worker.put(queued)
        except RuntimeError:  # no more threads, as while the interpreter ends
            work(queued)

    def _publish(self, queued: QueuedPut) -> None:
        try:
            self._succeed(queued, queued.put.publish(queued.status))
        except BaseException as exc:  # noqa: BLE001 - likewise
            self._fail(queued, exc)

    def _succeed(self, queued: QueuedPut, info: SnapshotInfo) -> None:
        snapshot = self._safe = Snapshot.from_info(info)
        queued.status.is_ending = True
        queued.forget_state()
        self._emit(queued.status, "published", root=snapshot.root, snapshot=snapshot.id, **self._totals(queued), **queued.sizes(snapshot))
        queued.status.succeed(snapshot)

    def _fail(self, queued: QueuedPut, exc: BaseException) -> None:
        status = queued.status
        status.is_ending = True
        queued.forget_state(exc)
        if status.dropped and isinstance(exc, SnapshotAbortedError):
            self._emit(status, "dropped", reason=status.dropped, **self._in_use())
            exc = exc if isinstance(exc, SnapshotDroppedError) else SnapshotDroppedError(str(exc), object_id=exc.object_id)
        else:
            kind = exc.kind if isinstance(exc, StoreError) else type(exc).__name__
            self._emit(
                status, "failed", error=str(exc), error_kind=kind, is_waited_for=int(not queued.is_background), **self._totals(queued)
            )
        status.fail(exc)
        with self._changed:
            if not status.is_raised and queued.is_background:
                self._unraised.add(queued)

    # --- events -------------------------------------------------------------------------------------------------------

    def _emit(self, status: PutStatus, kind: Kind, **fields: int | float | str) -> None:
        self._observers.emit(Event(kind, status.id, status.ref, status.step, status.rank, time.time_ns(), fields))

    def _in_use(self) -> dict[str, int]:
        return {"queue_depth": sum(not queued.status.is_ending for queued in self._queued()), "memory_bytes": self._memory.allocated_bytes}

    def _totals(self, queued: QueuedPut) -> dict[str, int | float]:
        total, waited = time.monotonic() - queued.called, queued.begun - queued.captured
        return {"total_seconds": total, "queued_seconds": waited, **queued.status.meter.snapshot().seconds_fields(), **self._in_use()}

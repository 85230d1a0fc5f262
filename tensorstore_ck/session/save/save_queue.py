"""The queue of puts of one store handle: what is captured waits here for the one thread that stores it, in order; and what was stored on
a staging disk, for the one that has it copied to other hosts, and the one that uploads and publishes it.

Memory is the only thing that can run out: whether a put waits for it, is skipped, or takes that of queued ones is decided before anything
is captured, for many ranks by rank 0 alone (`Put.agree`), so that ranks never drop different snapshots. An error is kept until somebody
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
from tensorstore_ck.session.save.put_status import PutStatus, Stage
from tensorstore_ck.session.save.queued_put import QueuedPut
from tensorstore_ck.session.save.unraised_errors import Untold, take_error
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
        self._untold = Untold()
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
        self.require_no_lane()
        called = time.monotonic()
        job = make()
        item = QueuedPut(job, called, is_beside=True)
        pending = PendingSnapshot(item.course)
        try:
            turn = job.agree(lambda: self._decide(item, on_full))
        except BaseException:
            self._let_go(item)
            raise
        if turn.failed:
            job.leave()
            self._raise_error_of(turn.failed, job)
        if not turn.goes:
            job.leave()
            self._end_dropped(item, "skipped")
            return pending
        try:
            for number in turn.drops:
                self._drop_before(number)
            if item.slot is None:
                item.slot = self._take(item)
            self._tell_of_stall(item)
            with item.course.meter.timed("capture", job.needed_bytes):
                job.hold(item.slot)
            item.captured = time.monotonic()
            item.course.on_drop(lambda: self._let_go_if_waiting(item))
            self._stores.put(item)
        except BaseException as exc:
            self._let_go(item)
            job.refuse(exc)
            raise
        item.course.reach(Stage.CAPTURED)
        self._emit(
            item.course,
            "captured",
            capture_seconds=item.course.meter.snapshot().stage_seconds["capture"],
            stall_seconds=item.stall_seconds,
            captured_bytes=job.needed_bytes,
            frozen_bytes=job.frozen_bytes,
            **self._in_use(),
        )
        return pending

    def run(self, make: Callable[[], Put]) -> Snapshot:
        """Puts in the caller's thread, after those under way; nothing is copied."""
        self._enter()
        self.settle()
        called = time.monotonic()
        item = QueuedPut(make(), called, is_beside=False)
        untold = self._first_untold()
        if untold is not None:
            error = take_error(untold)
            item.job.refuse(error)
            raise error
        self._store(item)
        if not item.course.has_ended:
            self._publish(item)
        item.course.wait(Stage.PUBLISHED, None)
        assert item.course.snapshot is not None
        return item.course.snapshot

    def pending(self) -> list[PendingSnapshot]:
        """The puts under way, oldest first."""
        self._enter()
        return [PendingSnapshot(item.course) for item in self._items()]

    def is_quiet(self) -> bool:
        """Whether nothing is under way, and nobody has to be told of an error."""
        return not self._items() and self._first_untold() is None

    def resume(self, job: StagedPut) -> None:
        """Goes on with what an earlier process staged."""
        self._enter()
        item = QueuedPut(cast(Put, job), time.monotonic(), is_beside=True)
        item.course.is_told = item.is_resumed = True
        item.course.reach(Stage.STAGED)
        self._uploads.put(item)

    def settle(self, *, uploads: bool = True) -> None:
        """Waits until no put is under way; not for itself, in a callback of one."""
        self._enter()
        if not self._is_on_a_lane():
            with self._changed:
                self._changed.wait_for(self._is_idle if uploads else self._stores.is_idle)

    def require_no_lane(self) -> None:
        """Refuses what would wait for itself.

        Raises:
            InvalidOptionError: it is called in a callback of a put.
        """
        if self._is_on_a_lane():
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
        items = self._items()
        if not self._is_on_a_lane():
            with self._changed:
                done = self._changed.wait_for(self._is_done, deadline_seconds)
            if not done:
                for item in items:
                    item.course.drop("abandoned")
            with self._changed:
                self._changed.wait_for(self._is_idle, give_up_seconds)
        return DrainReport.of([item.course for item in items], self._safe)

    def leave_resumed(self) -> None:
        """What an earlier process staged is left on the disk, as far as it is not published yet."""
        for item in self._uploads.items():
            if item.is_resumed:
                item.course.drop("abandoned")

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
            error = self._untold.take_all()
        if error is not None:
            raise error

    # --- memory -------------------------------------------------------------------------------------------------------

    def _decide(self, item: QueuedPut, on_full: OnFull) -> Admission:
        with self._changed:
            untold = self._untold.first()
            if untold is not None:
                return Admission(goes=False, failed=untold.number)
            drops: list[int] = []
            while (slot := self._memory.try_take(item)) is None:
                queued = next((each for each in self._stores.waiting() if not each.course.dropped), None)
                if on_full == "skip":
                    return Admission(goes=False)
                if on_full == "replace" and queued is not None:
                    queued.course.drop("replaced")
                    drops.append(queued.number)
                else:
                    self._memory.wait(item, len(self._items()))
            item.slot = slot
            return Admission(True, tuple(drops))

    def _take(self, item: QueuedPut) -> "Slot":
        """Memory for a put of which another rank said that it takes place."""
        with self._changed:
            while (slot := self._memory.try_take(item)) is None:
                self._memory.wait(item, len(self._items()))
            return slot

    def _tell_of_stall(self, item: QueuedPut) -> None:
        if item.waited_seconds:
            self._emit(item.course, "stalled", stall_seconds=item.waited_seconds, queue_depth=item.waited_for)

    def _drop_before(self, number: int) -> None:
        """Another rank's put of that number waits, and is given up; here it may be under way already."""
        for item in self._stores.items():
            if item.number == number:
                item.course.drop("replaced")

    def _let_go(self, item: QueuedPut) -> None:
        item.release()
        with self._changed:
            self._changed.notify_all()

    def _let_go_if_waiting(self, item: QueuedPut) -> None:
        """The memory of a put that was dropped is free at once; when its turn comes, all ranks learn that it was."""
        with self._changed:
            if any(item is each for each in self._stores.waiting()):
                self._let_go(item)

    def _end_dropped(self, item: QueuedPut, reason: str) -> None:
        item.course.drop(reason)
        item.course.is_ending = True
        error = SnapshotDroppedError(f"the put of {item.course} was {reason}: host_memory_bytes is used up", object_id=item.course.ref)
        item.course.fail(error)
        self._emit(item.course, "dropped", reason=reason, **self._in_use())

    # --- errors -------------------------------------------------------------------------------------------------------

    def _first_untold(self) -> QueuedPut | None:
        with self._changed:
            return self._untold.first()

    def _raise_error_of(self, number: int, job: Put) -> NoReturn:
        """Raises what rank 0 raises: the error of an earlier put, which this rank may not have met yet."""
        with self._changed:
            self._changed.wait_for(lambda: not any(each.number == number for each in self._items()), RAISE_SECONDS)
            item = self._untold.numbered(number)
        if item is not None:
            raise take_error(item)
        raise SnapshotAbortedError(
            f"the put to {job.ref!r} did not take place: rank 0 raised what an earlier one failed with; try again", object_id=job.ref
        )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _items(self) -> list[QueuedPut]:
        with self._changed:
            return list(dict.fromkeys((*self._uploads.items(), *self._copies.items(), *self._stores.items())))

    def _is_idle(self) -> bool:
        return self._stores.is_idle() and self._copies.is_idle() and self._uploads.is_idle()

    def _is_done(self) -> bool:
        """Whether nothing is under way but what was given up."""
        return all(item.course.dropped == "abandoned" for item in self._items())

    def _is_on_a_lane(self) -> bool:
        return self._stores.is_mine() or self._copies.is_mine() or self._uploads.is_mine()

    def _store(self, item: QueuedPut) -> None:
        item.begun = time.monotonic()
        try:
            info = item.job.run(item.course)
        except BaseException as exc:  # noqa: BLE001 - told to whoever waits, or to the next put
            self._let_go(item)
            self._fail(item, exc)
            return
        self._let_go(item)
        if info is not None:
            self._succeed(item, info)
            return
        progress = item.course.meter.snapshot()
        self._emit(item.course, "staged", write_seconds=progress.stage_seconds["write"], new_bytes=progress.stage_bytes["write"])
        item.course.reach(Stage.STAGED)
        if item.is_beside:
            self._hand_over(item, self._copies, self._copy)

    @staticmethod
    def _broken(item: QueuedPut, exc: BaseException) -> None:
        _logger.error("what is done after the put of %s failed", item.course, exc_info=exc)
        if not item.course.has_ended:
            item.course.fail(exc)

    def _copy(self, item: QueuedPut) -> None:
        try:
            item.job.replicate(item.course)
        finally:
            self._hand_over(item, self._uploads, self._publish)

    @staticmethod
    def _hand_over(item: QueuedPut, lane: Worker[QueuedPut], work: Callable[[QueuedPut], None]) -> None:
        try:
            lane.put(item)
        except RuntimeError:  # no more threads, as while the interpreter ends
            work(item)

    def _publish(self, item: QueuedPut) -> None:
        try:
            self._succeed(item, item.job.publish(item.course))
        except BaseException as exc:  # noqa: BLE001 - likewise
            self._fail(item, exc)

    def _succeed(self, item: QueuedPut, info: SnapshotInfo) -> None:
        snapshot = self._safe = Snapshot.from_info(info)
        item.course.is_ending = True
        item.forget_state()
        self._emit(item.course, "published", root=snapshot.root, snapshot=snapshot.id, **self._totals(item), **item.sizes(snapshot))
        item.course.succeed(snapshot)

    def _fail(self, item: QueuedPut, exc: BaseException) -> None:
        course = item.course
        course.is_ending = True
        item.forget_state(exc)
        if course.dropped and isinstance(exc, SnapshotAbortedError):
            self._emit(course, "dropped", reason=course.dropped, **self._in_use())
            exc = exc if isinstance(exc, SnapshotDroppedError) else SnapshotDroppedError(str(exc), object_id=exc.object_id)
        else:
            kind = exc.kind if isinstance(exc, StoreError) else type(exc).__name__
            self._emit(course, "failed", error=str(exc), error_kind=kind, is_waited_for=int(not item.is_beside), **self._totals(item))
        course.fail(exc)
        with self._changed:
            if not course.is_told and item.is_beside:
                self._untold.add(item)

    # --- events -------------------------------------------------------------------------------------------------------

    def _emit(self, course: PutStatus, kind: Kind, **fields: int | float | str) -> None:
        self._observers.emit(Event(kind, course.id, course.ref, course.step, course.rank, time.time_ns(), fields))

    def _in_use(self) -> dict[str, int]:
        return {"queue_depth": sum(not item.course.is_ending for item in self._items()), "memory_bytes": self._memory.allocated_bytes}

    def _totals(self, item: QueuedPut) -> dict[str, int | float]:
        total, queued = time.monotonic() - item.called, item.begun - item.captured
        return {"total_seconds": total, "queued_seconds": queued, **item.course.meter.snapshot().seconds_fields(), **self._in_use()}

"""A `Checkpointer`'s saves in progress, and the end of the training when saves keep failing: on all ranks after the same step.

With each snapshot a note is saved that says which run of a `Checkpointer` saved it.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import NotFoundError, SnapshotAbortedError, SnapshotDroppedError, StoreError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import NOTE
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import groups_of
from tensorstore_ck.training.checkpointing.step_flag import StepFlag
from tensorstore_ck.training.checkpointing.step_pace import StepPace
from tensorstore_ck.training.checkpointing.unsaved_time import UnsavedTime, will_repeat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.store import ReadOnlyStore


def note_finished(store: Store, ref: str) -> None:
    """Notes in the log that the training of `ref` has ended. Only warns on failure."""
    try:
        store.finish(ref)
    except NotFoundError:
        return  # the branch was deleted: nothing is late
    except StoreError as exc:
        warnings.warn(
            f"the end of the run on {ref!r} is not in the log, so its next save counts as late: {exc}", stacklevel=user_stacklevel()
        )


class PendingSaves:
    """One rank's saves in progress. All ranks of the group call `begin_round` and `end_if_failing` at the same points."""

    def __init__(
        self,
        store: Store,
        ref: str,
        group: "ProcessGroup | None",
        unsaved: UnsavedTime,
        flag: StepFlag | None,
        *,
        run_id: str,
        timeout_seconds: float,
        clock: Callable[[], float],
        pace: StepPace | None = None,
    ) -> None:
        """`pace` slows the writes down."""
        self._store, self._ref, self._group, self._unsaved, self._flag = store, ref, group, unsaved, flag
        self._run_id, self._timeout_seconds, self._clock = run_id, timeout_seconds, clock
        self._pace = pace
        self._pending: list[tuple[PendingSnapshot, float]] = []
        self.lag_seconds = 0.0
        """The time from the start of the newest published save to its publication; 0 if not measured yet."""
        self._ends_at: int | None = None
        """The step, announced by rank 0, after which all ranks check whether the training must end."""
        self._round = 0
        """Number of resumes and checks whether the training must end: equal on all ranks."""

    def begin_round(self) -> None:
        """The training begins, resumes, or goes on after a check."""
        self._round += 1
        self._ends_at = None

    # --- the steps ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The training continues."""
        if self._pace is not None:
            self._pace.begin_step(self._pending)

    def end_step(self) -> None:
        """The training has ended a step."""
        if self._pace is not None:
            self._pace.end_step(self._pending)
        self.check()

    def begin_save(self, now: float) -> None:
        """A save begins."""
        if self._pace is not None:
            self._pace.note_save(now)

    # --- the saves ---------------------------------------------------------------------------------------------------

    def add(self, pending: PendingSnapshot, began: float) -> None:
        """A save was begun at the time `began` of the clock."""
        self._pending.append((pending, began))

    def check(self) -> None:
        """Notes the outcome of the saves that have ended."""
        left = []
        for pending, began in self._pending:
            if not pending.done():
                left.append((pending, began))
            elif self._wait_for(pending):
                self.lag_seconds = self._clock() - began
        self._pending = left

    def wait(self) -> None:
        """Waits until all have ended; failures are warnings. Raises `StoreError` at a permanent failure."""
        if self._pace is not None:
            self._pace.release()
        pending, self._pending = self._pending, []
        for save, _ in pending:
            self._wait_for(save)
        if self._unsaved.refusal is not None:
            self.end()

    def _wait_for(self, pending: PendingSnapshot) -> bool:
        """Waits for a save; returns whether it was published. Handles its error."""
        try:
            pending.wait()
        except Exception as exc:  # noqa: BLE001 - also other errors, such as a device's
            self.fail(pending.step, exc)
            return False
        self._unsaved.note_published()
        return True

    # --- failures ----------------------------------------------------------------------------------------------------

    def fail(self, step: int | None, exc: BaseException) -> None:
        """A save failed: warns, unless later ones will fail the same way."""
        if not self._unsaved.fail(exc):
            warnings.warn(f"the snapshot of step {step} was not saved: {exc}; the training continues", stacklevel=user_stacklevel())

    def resolve_undecided(self) -> None:
        """See `UnsavedTime.resolve_undecided`. Only warns on failure, since ranks must begin the next save together."""
        try:
            self._unsaved.resolve_undecided(self._store)
        except StoreError as exc:
            warnings.warn(f"{exc}; the next save checks again", stacklevel=user_stacklevel())

    def end_if_failing(self, step: int) -> None:
        """Ends the training if saves keep failing; all ranks do so after the step that rank 0 announces."""
        if self._flag is None:
            self.end(unless_sound=True) if self._must_end() else None
            return
        if self._ends_at is None:
            try:
                self._ends_at = self._flag.poll(f"end/{self._round}", step, wants=self._must_end())
            except SnapshotAbortedError as exc:
                if self._unsaved.is_too_long and self._flag.away_seconds > self._unsaved.max_seconds:
                    self._unsaved.fail(exc)
                    self.end()  # the flag did not answer for too long: this rank decides for itself
        if self._ends_at is not None and step >= self._ends_at:
            self.end(unless_sound=True)

    def _must_end(self) -> bool:
        """Whether a save failed permanently on this rank, or, on the first rank, saves have failed or hung for too long."""
        is_first, unsaved = self._flag is None or self._flag.is_first, self._unsaved
        is_failing = unsaved.failure is not None or bool(self._pending)
        return unsaved.refusal is not None or (is_first and is_failing and unsaved.is_too_long)

    def _all_continue(self) -> bool:
        """Whether no rank has to end after the running saves have ended; equal on all ranks."""
        if self._group is None:
            return not self._must_end()
        title, must_end = f"whether saves to {self._ref!r} still fail ({self._run_id}, {self._round})", self._must_end()
        try:
            ending = groups_of(self._store).all_gather(self._group, title, lambda: bytes([must_end]), timeout_seconds=self._timeout_seconds)
        except StoreError as exc:
            self._unsaved.failure = self._unsaved.failure or exc
            return False
        return not any(map(any, ending))

    def end(self, *, is_over: bool = False, unless_sound: bool = False) -> None:
        """Waits for running saves, then raises why saves fail; on all ranks after the same step.

        `is_over`: the training is over. `unless_sound`: returns instead if the running saves succeeded.
        """
        unsaved = self._unsaved
        error, seconds = unsaved.refusal or unsaved.failure, unsaved.seconds
        if self._pace is not None:
            self._pace.release()
        report = self._store.drain(self._timeout_seconds)
        self.check()
        self.resolve_undecided()
        continues = unless_sound and self._all_continue()
        self.begin_round()
        if continues:
            return
        was_given_up = isinstance(unsaved.failure, SnapshotDroppedError)  # by the drain: a consequence, not the cause
        error = error or unsaved.refusal or (None if was_given_up else unsaved.failure)
        self._pending = []
        unsaved.begin()
        if error is not None and will_repeat(error):
            error.add_note(
                f"(each save to {self._ref!r} would fail the same way: the training must not continue without snapshots; {report})"
            )
            raise error
        kind = type(error) if isinstance(error, StoreError) else SnapshotAbortedError
        why = f"the newest save failed: {error}" if error is not None else "a save does not end, or failed on another rank"
        limit = f"was published in the last {seconds:.0f} s, and max_unsaved_seconds is {unsaved.max_seconds:.0f}"
        since = f"{self._ref!r} does not have the newest state" if is_over else f"no snapshot of {self._ref!r} {limit}"
        raise kind(f"{since}; {why}; {report}", object_id=self._ref) from error


def run_name(began_ns: object, resumes: object) -> str:
    """The name of the process that saves: see `Checkpointer.run`."""
    return f"{began_ns}-{resumes}"


def note_of(store: "ReadOnlyStore", snapshot: Snapshot) -> dict[str, Any]:
    """The note that a `Checkpointer` saved with a snapshot; empty if none did, or if the snapshot is gone."""
    try:
        note = store.metadata(snapshot.root).get(NOTE)
    except NotFoundError:
        return {}
    return note if isinstance(note, dict) else {}


def saved_by(store: "ReadOnlyStore", snapshot: Snapshot) -> str:
    """The `Checkpointer.run` that saved a snapshot."""
    note = note_of(store, snapshot)
    return run_name(note.get("began_ns"), note.get("resumes"))

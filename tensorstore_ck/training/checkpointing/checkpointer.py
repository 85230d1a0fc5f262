"""Saves a job's state when a trigger fires, and resumes from the newest intact snapshot."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.ids import Ulid, new_ulid, ulid_text
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.write.request import Unchanged, require_checks
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, SnapshotDroppedError, StoreError
from tensorstore_ck.format.record import MAX_TRIGGER_CHARS, MAX_TRIGGERS
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.log.retention import Policy
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import NOTE, note_costs
from tensorstore_ck.maintenance.optimal_interval import DEFAULT_MTBF_SECONDS, SaveCosts
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import groups_of, require_opened, write_limit_of
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.checkpointing.dropped_snapshots import DroppedSnapshots
from tensorstore_ck.training.checkpointing.exception_save import CAUSE, ExceptionSave
from tensorstore_ck.training.checkpointing.pending_saves import PendingSaves, note_finished, note_of, run_name
from tensorstore_ck.training.checkpointing.step_flag import StepFlag, poll_triggers
from tensorstore_ck.training.checkpointing.step_pace import StepPace
from tensorstore_ck.training.checkpointing.triggers import CLOCK, Trigger, TriggerContext, auto, on_preemption, require_count
from tensorstore_ck.training.checkpointing.unsaved_time import UnsavedTime
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.resume_candidates import OnDrift
from tensorstore_ck.training.resume_search import ResumeSearch, with_retries

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


LEAD_STEPS: Final = 10
ON_DRIFT: Final = 'call resume(drift="accept") to resume from {}, or resume(drift="skip") to go back to an earlier snapshot'


@short_errors
class Checkpointer:
    """For a training loop::

        with tsck.Checkpointer(store, training, ref="runs/gpt", when=tsck.every_steps(1000) | tsck.on_preemption()) as ckpt:
            resumed = ckpt.resume()
            for step in range(resumed.step + 1 if resumed else 1, total + 1):
                ...
                ckpt.step(step, {"val_loss": loss})
                if ckpt.preempted:
                    break

    A transient failure of a save (an unreachable backend) is a warning; `step` raises after `max_unsaved_seconds` without a snapshot, or at
    once for a permanent one (a rejected state). Ranks raise after the same step, up to `lead_steps` later. Not thread-safe.
    """

    def __init__(
        self,
        store: Store,
        state: object,
        *,
        ref: str,
        when: Trigger,
        keep: Mapping[str, object] | None = None,
        free_dropped: bool = False,
        asynchronous: bool = True,
        group: "ProcessGroup | DeviceMesh | None" = None,
        total_steps: int | None = None,
        lead_steps: int = LEAD_STEPS,
        adaptive: bool = False,
        unchanged: Unchanged = "warn",
        verify_capture: float = SAMPLE_SHARE,
        timeout_seconds: float = TIMEOUT_SECONDS,
        max_unsaved_seconds: float | None = None,
        on_exception: bool = True,
        clock: Callable[[], float] = CLOCK,
    ) -> None:
        """All ranks of `group` create one with the same arguments.

        Args:
            store: The store.
            state: A `TrainingState`; or any state that `Store.put_snapshot` takes, whose tensors are restored in place.
            ref: The branch.
            when: When to save: triggers, joined by ``|`` and ``&``.
            keep: The retention policy of this ref, as in `Store.set_policy`; None: leave it as it is.
            free_dropped: Free what the policy of this ref drops while the job runs, without the undo window: after every four saves, in
                a thread of the first rank. See `Store.free_dropped`. Else `Store.gc` frees it after the undo window.
            asynchronous: Save in the background.
            group: All its ranks save and resume together.
            total_steps: The length of the training, for `at_fraction` and `last`.
            lead_steps: How many steps ahead rank 0 announces its decisions: more than the ranks are ever apart.
            adaptive: Slow the writes of a save in the background down while they make steps more than 2 % slower than without a save; the
                save still ends before the next one usually begins (docs/guides/when-to-save.md).
            unchanged: See `Store.put_snapshot`.
            verify_capture: See `Store.put_snapshot`.
            timeout_seconds: With `group`: how long to wait for the other ranks.
            max_unsaved_seconds: How long the training continues while saves fail or hang, by the clock of rank 0, since the last published
                snapshot; by default an hour, or 10 of the usual intervals between saves if that is longer.
            on_exception: If an exception, Ctrl-C or ``SystemExit`` leaves the ``with`` block of one process, save the last completed
                step, unless the next one has changed a weight (docs/guides/when-to-save.md). A note on the exception says what was saved.
            clock: In seconds; for tests.

        Raises:
            InvalidOptionError: an argument is invalid.
            InvalidNameError: `ref` is no valid name.
        """
        require_opened(store)
        if not isinstance(when, Trigger):
            raise InvalidOptionError(f"when must be a trigger, such as tsck.every_steps(1000), not {when!r}", object_id="when")
        require_count(lead_steps, "lead_steps")
        group = process_group(group)
        validate_ref_name(ref)
        policy = None if keep is None else Policy.of_rules(keep)
        self._store, self._state, self._ref, self._when, self._group = store, state, ref, when, group
        self._asynchronous, self._total_steps, self._timeout_seconds, self._clock = asynchronous, total_steps, timeout_seconds, clock
        self._is_prepared, self._on_exception = False, on_exception
        self._checks = require_checks(unchanged, verify_capture)
        self._decided = list(when.decided())
        self.preempted = False
        """Whether `on_preemption` caused a save: true on all ranks after the same step, so that the loop can end there."""
        self._saves = self._resumes = 0
        self._before: TriggerContext | None = None
        self._metadata: Mapping[str, object] = {}
        self._exception_save: ExceptionSave | None = None
        self._stall = self._restart = 0.0
        self._run_mtbf: float | None = None
        self._unsaved = UnsavedTime(max_unsaved_seconds, clock)
        self._dropped = DroppedSnapshots(store, ref) if free_dropped and (group is None or group.rank() == 0) else None

        def begin() -> bytes:
            if policy is not None and store.policies().get(ref) != policy:
                store.set_policy(ref, **policy.encode())
            return new_ulid()

        drawn = Ulid(self._from_first("the id of a Checkpointer", begin))
        run_id = ulid_text(drawn)
        self._began_ns = int.from_bytes(drawn[:6], "big") * 1_000_000
        """The start of the run: equal on all ranks, since the metadata contains it."""
        self._flag: StepFlag | None = None
        if group is not None:
            own = groups_of(store).of(group)[0]
            self._flag = StepFlag(own.run, own.renew, rank=group.rank(), prefix=f"tsck/{run_id}/", lead_steps=lead_steps, clock=clock)
        self._pending = PendingSaves(
            store=store,
            ref=ref,
            group=group,
            unsaved=self._unsaved,
            flag=self._flag,
            run_id=run_id,
            timeout_seconds=timeout_seconds,
            clock=clock,
            pace=StepPace(*write_limit_of(store), clock) if adaptive else None,
        )

    def __enter__(self) -> Self:
        if self._on_exception:
            self._exception_save = ExceptionSave(self._state, self._ref, self._group)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        ending, self._exception_save = self._exception_save, None
        if ending is not None:
            ending.end(error, self._put_last)
        if kind is None:
            self.close(finished=self._is_complete())

    @property
    def costs(self) -> SaveCosts:
        """The costs that this rank has measured, for `Store.advise`; 0 if not measured yet."""
        return SaveCosts(self._stall, self._pending.lag_seconds, self._restart, self._run_mtbf or DEFAULT_MTBF_SECONDS)

    @property
    def run(self) -> str:
        """Names the process that saves, for `saved_by`: two processes that save the same step have different ones."""
        return run_name(self._began_ns, self._resumes)

    # --- resume -------------------------------------------------------------------------------------------------------

    def resume(self, *, drift: OnDrift | None = None) -> Snapshot | None:
        """Restores the newest snapshot that is not marked and whose blocks verify, as far as this job reads them.

        All ranks skip a snapshot that is marked ``bad`` or ``damaged``, or that any rank finds damaged; a warning names it. Transient
        failures, such as of a read, are retried a few times. All ranks restore the same snapshot, or raise the same error.
        `TrainingState.restore` does the same.

        Args:
            drift: How to treat a snapshot that is marked ``drift``, or that the same run saved after such a one: replicas differed, so a
                rank may be corrupted. ``"accept"`` restores it, ``"skip"`` skips it with a warning.

        Returns:
            The snapshot; None if there are none, so the training starts from the beginning.

        Raises:
            SnapshotMarkedBadError: replicas had drifted apart, and `drift` is None; names tensors, ranks and both copies.
            MismatchError: the newest intact snapshot does not fit the state.
            DamageError: none of the existing snapshots can be restored.
            RetryableError: it cannot be restored now.
        """
        began = self._clock()
        self._pending.begin_round()
        options: dict[str, Any] = {"advice": ON_DRIFT, "drift": drift, "timeout_seconds": self._timeout_seconds}
        snapshot = ResumeSearch(self._store, self._ref, self._group, **options).restore(self._restore)
        if snapshot is not None:
            self._restart = self._clock() - began
            self.note_resumed(snapshot)
        self._unsaved.begin()
        return snapshot

    def _restore(self, address: str) -> Snapshot:
        state, store, group, timeout_seconds = self._state, self._store, self._group, self._timeout_seconds
        if not isinstance(state, TrainingState):
            restored = store.restoring(address, lambda found: found.checkout(into=state), group=group, timeout_seconds=timeout_seconds)
            return restored[1]
        snapshot = state.restore(store, address, group=group, timeout_seconds=timeout_seconds)
        if snapshot is None:
            raise NotFoundError(f"{address} was deleted meanwhile", object_id=address)
        return snapshot

    def note_resumed(self, snapshot: Snapshot) -> None:
        """Tells the triggers that the job restored a snapshot by itself: they count from its step on. All ranks call it."""
        read = lambda: json.dumps(note_of(self._store, snapshot)).encode()  # noqa: E731
        note: dict[str, Any] = parse_json(self._from_first(f"the notes of {snapshot.root}", lambda: with_retries(read)))
        epoch, resumes, began_ns = note.get("epoch"), note.get("resumes"), note.get("began_ns")
        costs = note_costs(note)
        self._stall = self._stall or costs.get("stall", 0.0)
        self._pending.lag_seconds = self._pending.lag_seconds or costs.get("lag", 0.0)
        self._resumes = 1 + (resumes if isinstance(resumes, int) else 0)
        self._began_ns = began_ns if isinstance(began_ns, int) else snapshot.time_ns
        self._before = TriggerContext(snapshot.step or 0, epoch if isinstance(epoch, int | float) else None)
        self._run_mtbf = max(1.0, (snapshot.time_ns - self._began_ns) / 1e9) / self._resumes
        for trigger in self._decided:
            trigger.begin()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: float | None = None,
        last: bool = False,
        metadata: Mapping[str, object] | None = None,
    ) -> Snapshot | PendingSnapshot | None:
        """Saves if a trigger fires. All ranks call it after each step, with the same values.

        Args:
            step: The number of completed steps.
            metrics: Numbers of this step, stored with the snapshot.
            epoch: The number of completed epochs, such as ``2.5``; must not decrease.
            last: Whether this is the last step.
            metadata: Anything else to store with the snapshot.

        Returns:
            The snapshot, or the pending one; None if nothing was saved or the save failed.

        Raises:
            InvalidOptionError: the step went backwards, or a trigger needs an argument that is missing.
            StoreError: a save failed permanently, or there was no snapshot for too long: on all ranks after the same step.
        """
        if self._exception_save is not None:
            self._exception_save.begin_step()
        saved = self._step(step, metrics, epoch, metadata or {}, last=last)
        if self._exception_save is not None:
            self._exception_save.end_step(step, is_saved=saved is not None)
        self._pending.begin_step()
        return saved

    def _step(
        self, step: int, metrics: Mapping[str, float] | None, epoch: float | None, metadata: Mapping[str, object], *, last: bool
    ) -> Snapshot | PendingSnapshot | None:
        if self._before is not None and step < self._before.step:
            raise InvalidOptionError(f"step {step} came after step {self._before.step}: call resume() to go back", object_id="step")
        self._pending.end_step()
        moment = TriggerContext(step, epoch, self._total_steps, dict(metrics or {}), is_last=last).after(self._before)
        if self._asynchronous and not self._is_prepared:
            self._prepare()
        self._before, self._metadata = moment, metadata
        self._pending.end_if_failing(step)
        poll_triggers(self._flag, self._decided, self._saves, step)
        if not self._when.fires(moment):
            return None
        self._saves += 1
        self.preempted |= any(isinstance(trigger, on_preemption) and trigger.fires(moment) for trigger in self._decided)
        self._when.saved(moment)
        return self._put(moment)

    def _prepare(self) -> None:
        """After the first step, when all tensors exist. A value that cannot be saved is an error of the save."""
        self._is_prepared = True
        state, store, group, timeout_seconds = self._state, self._store, self._group, self._timeout_seconds
        with suppress(StoreError):
            if isinstance(state, TrainingState):
                state.prepare(store, group=group, timeout_seconds=timeout_seconds)
            else:
                store.prepare(state, group=group, timeout_seconds=timeout_seconds)

    def _options(self, moment: TriggerContext, causes: Iterable[str]) -> dict[str, Any]:
        return {
            "ref": self._ref,
            "step": moment.step,
            "metrics": {name: float(value) for name, value in moment.metrics.items()},
            "triggers": list(dict.fromkeys(name[:MAX_TRIGGER_CHARS] for name in causes))[:MAX_TRIGGERS],
            "epoch": None if moment.epoch is None else float(moment.epoch),
            "group": self._group,
            **self._checks._asdict(),
            "timeout_seconds": self._timeout_seconds,
        }

    def _put_last(self, state: object) -> None:
        """Saves the state after the last completed step, when the saves before it have ended."""
        assert self._before is not None
        self._pending.wait()
        options = self._options(self._before, [CAUSE])
        self._store.put_snapshot(state, metadata={**self._metadata, NOTE: self._note(self._before)}, **options)

    def _put(self, moment: TriggerContext) -> Snapshot | PendingSnapshot | None:
        options = self._options(moment, self._when.causes())
        self._pending.resolve_undecided()
        began = self._clock()
        self._unsaved.begin_save()
        self._pending.begin_save(began)
        state, store = self._state, self._store
        saved: Snapshot | PendingSnapshot
        try:
            options["metadata"] = {**self._metadata, NOTE: self._note(moment)}
            if self._asynchronous:
                pending = (
                    state.put_async(store, **options) if isinstance(state, TrainingState) else store.put_snapshot_async(state, **options)
                )
                self._pending.add(pending, began)
                saved = pending
            else:
                saved = state.put(store, **options) if isinstance(state, TrainingState) else store.put_snapshot(state, **options)
                self._unsaved.note_published()
        except StoreError as exc:
            self._pending.fail(moment.step, exc)
            if not self._asynchronous and self._unsaved.refusal is not None:
                self._pending.end()  # all ranks know that this save failed
            self._pending.end_if_failing(moment.step)
            return None
        self._measure(self._clock() - began)
        if self._dropped is not None:
            self._dropped.note_save()
        return saved

    def _note(self, moment: TriggerContext) -> dict[str, object]:
        """Notes about the run for the snapshot; equal on all ranks, so costs are those of the first."""
        noted = self._from_first(f"the notes of save {self._saves} of {self._ref!r}", lambda: json.dumps(self.costs[:3]).encode())
        costs = {name: seconds for name, seconds in zip(SaveCosts._fields, parse_json(noted), strict=False) if seconds > 0}
        return {"began_ns": self._began_ns, "resumes": self._resumes, "epoch": moment.epoch, "costs": costs}

    def _measure(self, stall: float) -> None:
        self._stall = stall if not self._stall else (self._stall + stall) / 2
        for trigger in self._decided:
            if isinstance(trigger, auto):
                trigger.measured(self._stall, self._pending.lag_seconds, self._restart, self._run_mtbf)

    def wait(self) -> None:
        """Waits until every begun save has ended; failures are warnings.

        Raises:
            StoreError: a permanent failure.
        """
        self._pending.wait()

    def close(self, *, finished: bool = False) -> None:
        """Waits for all begun saves. The store stays open.

        Args:
            finished: The training has reached its end: calls `Store.finish`. The end of a ``with`` block without an error passes true,
                unless the job was preempted, or a step before `total_steps` was the last one.

        Raises:
            StoreError: the newest save failed, and nothing will be saved after it.
        """
        self._pending.wait()
        self._pending.resolve_undecided()
        if self._dropped is not None:
            self._dropped.finish()
        if self._unsaved.failure is not None and not isinstance(self._unsaved.failure, SnapshotDroppedError):
            self._pending.end(is_over=True)
        if finished and self._saves > 0 and (self._group is None or self._group.rank() == 0):
            note_finished(self._store, self._ref)

    def _is_complete(self) -> bool:
        newest = self._before
        if newest is None or self.preempted:
            return False
        return newest.is_last or self._total_steps is None or newest.step >= self._total_steps

    def _from_first(self, title: str, value: Callable[[], bytes]) -> bytes:
        return ask_first_rank(self._store, self._group, title, value, timeout_seconds=self._timeout_seconds)

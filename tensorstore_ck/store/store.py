"""`Store`: what changes a store."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tensorstore_ck.common.deprecation import renamed_argument, renamed_method
from tensorstore_ck.common.user_frames import short_store_errors
from tensorstore_ck.engine.write.request import LAST_SEEN, AnyHead, LastSeen, Unchanged
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE
from tensorstore_ck.format.codec import CodecName, DeltaOption
from tensorstore_ck.log.quota import Quota
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance import change_refs
from tensorstore_ck.maintenance import forget as forgetting
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS
from tensorstore_ck.session.save import DrainReport, OnFull, PendingSnapshot, Preemption
from tensorstore_ck.store.read_only_store import ReadOnlyStore

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from tensorstore_ck.gc import FreedSnapshots, GcOptions, GcReport
    from tensorstore_ck.gc.recode import RecodeReport
    from tensorstore_ck.gc.report import Progress as GcProgress
    from tensorstore_ck.gc.tiering import TierReport
    from tensorstore_ck.log.retention import Policy
    from tensorstore_ck.maintenance.apply_policies import RetentionReport
    from tensorstore_ck.maintenance.bisect_history import Bisection, Tested
    from tensorstore_ck.maintenance.forget import Forgotten
    from tensorstore_ck.maintenance.fsck import RepairReport
    from tensorstore_ck.state import StateCheck

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def _changes(method: Method) -> Method:
    """Marks a method that changes the store: a store that was opened read-only refuses it, unless it is a dry run."""

    @wraps(method)
    def checked(self: "Store", *args: Any, **kwargs: Any) -> Any:
        if self._session.engine.read_only and not kwargs.get("dry_run"):
            self.engine.require_writable(f"{method.__name__}()")
        return method(self, *args, **kwargs)

    return cast(Method, checked)


@short_store_errors
class Store(ReadOnlyStore):
    """An open store. Thread-safe; a context manager. Make one with `tensorstore_ck.open`.

    It has the methods of `ReadOnlyStore`, such as `checkout`, and these, which change a store or wait for what does.
    """

    # --- save ----------------------------------------------------------------------------------------------------------

    @_changes
    def put_snapshot(
        self,
        state: object,
        *,
        ref: str,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
        triggers: Sequence[str] = (),
        epoch: float | None = None,
        attributes: Mapping[str, float | str] | None = None,
        expect: "str | Snapshot | AnyHead | LastSeen | None" = LAST_SEEN,
        parent: "str | Snapshot | LastSeen | None" = LAST_SEEN,
        group: "ProcessGroup | DeviceMesh | None" = None,
        rank_state: object = None,
        frozen: Sequence[str] = (),
        codec: CodecName | None = None,
        delta: DeltaOption = None,
        unchanged: Unchanged = "warn",
        verify_capture: float = SAMPLE_SHARE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Snapshot:
        """Stores `state` and moves branch `ref` to it. Durable and published when it returns; else it raises and nothing is visible.

        The ref moves only from the root that this handle last saved or restored there, so a job that was given up for dead
        cannot overwrite its successor's work. A ref that this handle has not seen must not exist yet. If this handle has only restored
        the newest snapshot of a ref, its first save there may not have a lower step, unless `expect` is given: a job may be running there.
        Waits first for the asynchronous saves of this handle.

        Args:
            state: Any nesting of dicts, lists and tuples with tensors, numpy arrays and plain values.
            ref: The branch to move; made if it does not exist.
            step: The training step, for ``ref@step``.
            metrics: Numbers to rank by.
            metadata: What the run knows: config, data set, author. At most 1 MiB; part of the root.
            triggers: Why it is saved, for retention (see `set_policy`): names of triggers. ``["at_steps"]`` makes it a milestone, which
                policies keep by default. `Checkpointer` passes those that fired.
            epoch: The number of completed epochs, for the policy `keep_epochs`.
            attributes: Numbers and short texts to search by (see `SnapshotLog.where`), at most 64 with those of `metadata`: its scalars can
                be searched, too. Not part of the root; with `group`, those of the first rank count.
            expect: A root, `ANY`, or None for "the ref must not exist", instead of what this handle last saw.
            parent: The address of the snapshot that this one continues; None: none. By default what this handle last saved or restored on
                the ref; for a ref that it has not seen, the head of its branch, if there is one. Part of the root.
            group: A process group, or a one-dimensional DeviceMesh, whose ranks save together. Each passes its own side of the state: its
                share of a DTensor, `FlatShard` or `Box`, and everything else whole.
            rank_state: With `group`: state that belongs to this rank alone, such as random number generators.
            frozen: Globs over names such as ``model.base.*``, of tensors that do not change while this store is open: they are read at
                the first save and each tenth one after it, where a change is a `FrozenChangedError`.
            codec: How to encode this save: see `open`.
            delta: See `open`.
            unchanged: What to do when the content contradicts `step`, which moved on: no floating tensor differs from the ref's save
                before, though some did in one of the last four; or the step counters of an optimizer disagree, or did not move on as
                the step did. ``warn`` with a `SuspiciousSaveWarning`; raise an ``error``; or ``ok``: nothing.
            verify_capture: Tensors must not change while they are captured. At the end, small tensors (up to 4 KiB) are read again and
                compared, and this share of the bytes of the others, from 0.0 to 1.0, at offsets that change with each save. 0: none.
                Larger tensors on CUDA devices are compared in full, by ids that the device computes.
            timeout_seconds: With `group`: how long to wait for the other ranks.

        Raises:
            UnsupportedValueError: `state` holds something that cannot be stored; the message has the path.
            CaptureChangedError: a tensor changed meanwhile; nothing was published. The message names it.
            SuspiciousSaveError: with ``unchanged="error"``; nothing was published.
            ConflictError: the ref is elsewhere; nothing was written.
            QuotaExceededError: the quota of the branch is used up: see `set_quota`.
            InvalidOptionError: an argument is invalid, or differs between ranks; or the step is lower than that of a head that this handle
                only restored.
            SnapshotAbortedError: with `group`: a rank failed in another way, or is gone; the message names it. If one rank meets an error
                above, or the states of the ranks cannot be one snapshot, all ranks raise it.
            UndecidedError: the store went away in the middle of the commit: see `retrying`.
        """
        return self.session.put(
            state,
            ref,
            group=group,
            rank_state=rank_state,
            frozen=frozen,
            timeout_seconds=timeout_seconds,
            step=step,
            metrics=metrics,
            metadata=metadata,
            triggers=triggers,
            epoch=epoch,
            attributes=attributes,
            expect=expect,
            parent=parent,
            codec=codec,
            delta=delta,
            unchanged=unchanged,
            verify_capture=verify_capture,
        )

    @_changes
    def put_snapshot_async(
        self,
        state: object,
        *,
        ref: str,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
        triggers: Sequence[str] = (),
        epoch: float | None = None,
        attributes: Mapping[str, float | str] | None = None,
        expect: "str | Snapshot | AnyHead | LastSeen | None" = LAST_SEEN,
        parent: "str | Snapshot | LastSeen | None" = LAST_SEEN,
        group: "ProcessGroup | DeviceMesh | None" = None,
        rank_state: object = None,
        frozen: Sequence[str] = (),
        codec: CodecName | None = None,
        delta: DeltaOption = None,
        unchanged: Unchanged = "warn",
        verify_capture: float = SAMPLE_SHARE,
        on_full: OnFull = "block",
        changed_by: "Optimizer | Sequence[Optimizer]" = (),
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> PendingSnapshot:
        """As `put_snapshot`, with its arguments, in the background: returns as soon as `state` may be mutated, and a thread does the rest.

        The state is copied into buffers that are reused; `host_memory_bytes` of `open` bounds them. Saves of one handle are published in
        the order of their calls. ``wait()`` raises the error of a failed save; if nobody waits, the handle's next save does.

        `frozen`: these tensors are not copied either. `unchanged`: checked on the thread that stores the state. `verify_capture`: compares
        the copies, before this returns; for larger tensors on CUDA devices, the ids are computed at the call, and compared with those of
        all bytes that are written. `timeout_seconds`: time in the queue does not count.

        `on_full`: what to do when the buffers of earlier saves leave no memory: ``block`` until there is; ``skip`` this save; or
        ``replace`` the oldest save of the same ranks that waits. ``newest``: as ``replace``; and even with memory left it replaces those
        earlier ``newest`` saves of `ref` that wait, so that the newest state is stored next. With `group`, rank 0 decides for all. The
        returned object, a warning in the log and an event report a dropped save.

        `changed_by`: optimizers that alone change their parameters and states, in ``step``. Then those on CUDA devices are copied while the
        next forward and backward passes run, and the next ``step`` comes after the copy. An optimizer that has not stepped since the last
        save, or whose tensors changed between that and its next step, waits as without this. If anything else changes such a tensor while
        it is copied, the save fails with `CaptureChangedError`.

        Raises:
            StoreError: as `put_snapshot`; or the error of an earlier save of this handle, if nobody waited for it: then this save did
                not take place.
            NoSpaceError: the state does not fit into `host_memory_bytes` at all.
        """
        return self.session.put_async(
            state,
            ref,
            on_full=on_full,
            group=group,
            rank_state=rank_state,
            frozen=frozen,
            optimizers=changed_by,
            timeout_seconds=timeout_seconds,
            step=step,
            metrics=metrics,
            metadata=metadata,
            triggers=triggers,
            epoch=epoch,
            attributes=attributes,
            expect=expect,
            parent=parent,
            codec=codec,
            delta=delta,
            unchanged=unchanged,
            verify_capture=verify_capture,
        )

    @_changes
    def prepare(
        self,
        state: object,
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        frozen: Sequence[str] = (),
        changed_by: "Optimizer | Sequence[Optimizer]" = (),
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Makes ready what the first `put_snapshot_async` of CUDA tensors needs: pins memory for two copies of the state, in a thread.

        Pinning takes a third of a second for each GiB, in the first save if not before. Without CUDA this does nothing. Call it when the
        tensors of the optimizer exist, after the first step; `Checkpointer.step` does. All ranks of `group` call it. The arguments are
        those of `put_snapshot_async`; of `state` only the sizes count.
        """
        self.session.prepare(state, group=group, frozen=frozen, changed_by=changed_by, timeout_seconds=timeout_seconds)

    def pending(self) -> list[PendingSnapshot]:
        """The saves in progress, oldest first."""
        return self.session.queue.pending()

    def drain(self, deadline_seconds: float | None = None) -> DrainReport:
        """Waits for the saves in progress, and cancels those that are not published by the deadline. Reports which snapshot is safe."""
        return self.session.queue.drain(deadline_seconds)

    def on_preemption(self, signal_number: int, *, deadline_seconds: float) -> Preemption:
        """Lets a signal such as ``signal.SIGTERM`` end the job in order: see `Preemption`. On the main thread only."""
        return Preemption(self.session.queue, signal_number, deadline_seconds=deadline_seconds)

    @_changes
    def check(
        self,
        state: object,
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        rank_state: object = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> "StateCheck":
        """Reports what `put_snapshot(state)` would do: what cannot be stored, sizes, free space, expected time. Publishes nothing.

        The arguments are those of `put_snapshot`. With `group` all ranks call this, and are compared as at the first save: if their states
        cannot be one snapshot, that is a problem on all.
        """
        return self.session.check(state, group=group, rank_state=rank_state, timeout_seconds=timeout_seconds)

    # --- refs ----------------------------------------------------------------------------------------------------------

    @_changes
    def branch(self, name: str, at: str) -> Snapshot:
        """Makes branch `name` at a snapshot."""
        return self.session.fence.note_moved(name, change_refs.branch(self.engine, name, at))

    @_changes
    def reset(self, name: str, to: str) -> Snapshot:
        """Moves an existing branch to any snapshot; its history keeps where it was."""
        return self.session.fence.note_moved(name, change_refs.reset(self.engine, name, to))

    @_changes
    def tag(self, name: str, at: str) -> Snapshot:
        """Names a snapshot permanently: a tag never moves."""
        return change_refs.tag(self.engine, name, at)

    @_changes
    def untag(self, name: str) -> None:
        """Removes a tag; a snapshot that nothing else holds is treated as forgotten."""
        change_refs.untag(self.engine, name)

    @_changes
    def annotate(self, address: str, metrics: Mapping[str, float]) -> Snapshot:
        """Adds metrics after the save; an existing name gets the new number."""
        return change_refs.annotate(self.engine, address, metrics)

    @_changes
    def mark(self, address: str, mark: str = "bad", *, reason: str = "") -> Snapshot:
        """Marks a snapshot ``bad``, so that `checkout` refuses it; the empty mark removes the mark."""
        return change_refs.mark(self.engine, address, mark, reason)

    # --- what stays, and what goes -------------------------------------------------------------------------------------

    @_changes
    def finish(self, ref: str) -> Snapshot:
        """Notes in the log that the training of `ref` ended with its newest snapshot: no page or alert reports its next save as late.

        A later save to `ref` ends that. `Checkpointer` and trainers call it when a run ends without an error. Returns the snapshot.

        Raises:
            NotFoundError: nothing was saved to `ref`.
        """
        return change_refs.finish(self.engine, ref)

    @_changes
    def sign(self, ref: str, root: str = "") -> Snapshot:
        """Signs where a branch or tag is, with the key of ``open(sign=)``, which signs only what this handle moves. Returns the snapshot.

        Args:
            ref: The branch or tag.
            root: The first digits of the root that it must have: somebody may move it before it is signed.

        Raises:
            ConflictError: the ref has another root; nothing was signed.
            InvalidOptionError: the store was opened without a key for this ref.
            NotFoundError: there is no such branch or tag.
        """
        return change_refs.sign(self.engine, ref, root)

    @_changes
    def pin(self, address: str, *, reason: str = "", owner: str | None = None, expires: "str | float | None" = None) -> Snapshot:
        """Holds a snapshot until it is unpinned or `expires` has passed. An owner's second pin replaces the first.

        Args:
            address: The snapshot.
            reason: Shown in the list of pins.
            owner: Who holds it; by default this user.
            expires: How long the pin lasts: ``"30d"``, or seconds.
        """
        return change_refs.pin(self.engine, address, reason=reason, owner=owner, expires=expires)

    @_changes
    def unpin(self, address: str, *, owner: str | None = None) -> None:
        """Removes this user's pin, or `owner`'s, from a snapshot, and from any other one that has the same root."""
        change_refs.unpin(self.engine, address, owner)

    def watch(
        self,
        ref: str,
        *,
        since_step: int | None = None,
        newest_only: bool = False,
        owner: str | None = None,
        pin_for: float | str | None = "1d",
        poll_seconds: float = 2.0,
        until: Callable[[], bool] = lambda: False,
    ) -> Generator[Snapshot]:
        """Yields each new snapshot of a branch, pinned until the next one is asked for: for evaluation jobs.

        Snapshots that expire before they are pinned are left out. The watch goes on while the store does not answer.

        Args:
            ref: The branch; it need not exist yet.
            since_step: Also existing snapshots, from that step on.
            newest_only: If several came in the meantime, only the newest.
            owner: Who holds the pins; by default a name of this watch alone.
            pin_for: How long a pin lasts at most: a watcher that is killed must not hold a snapshot permanently. None: no pins.
            poll_seconds: From one look at the log to the next.
            until: Its true result ends the watch.

        Raises:
            PermissionDeniedError: the store cannot be written to, and `pin_for` is not None.
        """
        from tensorstore_ck.maintenance.watch import watch  # noqa: PLC0415

        infos = watch(
            self.engine.of_store(),
            ref,
            since_step=since_step,
            newest_only=newest_only,
            owner=owner,
            pin_for=pin_for,
            poll_seconds=poll_seconds,
            until=until,
        )
        with closing(infos):
            for info in infos:
                yield Snapshot.from_info(info)

    @_changes
    def forget(self, *addresses: str) -> "tuple[Forgotten, ...]":
        """Takes snapshots out of their branches' histories, or whole branches and tags. `gc` frees them after the undo window.

        Args:
            addresses: ``ref@step``, ``ref~n`` or a root for one snapshot; a ref for all of it. Tags, pins and other branches keep
                what they hold.
        """
        forgotten = forgetting.forget(self.engine, addresses)
        self.session.fence.drop(removed.ref for removed in forgotten if removed.kind == "branch")
        return forgotten

    @_changes
    def undo(self, address: str | None = None, *, entry: int | None = None) -> "tuple[Forgotten, ...]":
        """Restores what was forgotten last, or last of a ref, or one snapshot: until gc ends the undo window.

        Args:
            address: The ref, or the snapshot.
            entry: Only what this log entry removed (see `forgotten`).

        Raises:
            NotFoundError: nothing can be undone.
            ConflictError: another log entry than `entry` is the last that removed something there.
        """
        return forgetting.undo(self.engine, address, entry=entry)

    @_changes
    def set_policy(self, glob: str, **rules: object) -> "Policy":
        """Sets retention rules for branches, in the store: applied by each save of any process, and by `apply_policies`.

        A rule may name something that no snapshot of a branch has, such as a mistyped metric. It then expires nothing that it could keep,
        and an `UnmatchedRuleWarning` lists what there is, here and at each save.

        A snapshot stays if any rule of any policy for its branch keeps it and the limits allow it. The newest snapshot, the newest other
        one that is not marked, and tagged and pinned snapshots always stay. `undo` can restore the others for a day.

        Args:
            glob: Which branches, e.g. ``runs/*``. Replaces a policy for the same glob.
            rules: ``keep_last=5``; ``keep_best=(3, "val_loss", "min")``, or several of these; ``keep_every=1000`` steps: the first at or
                after each multiple; ``keep_every_seconds="6h"``; ``keep_steps=[1000, 5000]``; ``keep_first=True``; ``keep_younger="7d"``;
                ``keep_epochs=5``, as `keep_every`; ``keep_triggers=["every_epochs"]``: what these triggers saved.
                Snapshots that `at_steps` and `at_fraction` saved are kept, too, without ``keep_milestones=False``.
                Limits: ``expire_after="30d"``; ``max_bytes="2TB"`` of the store, oldest first (by `apply_policies` only).
                Age, by `tier`: ``recode_after="7d"``; ``move_after=("30d", "s3://cold/ckpt")``, or several of these.
                Pace: ``max_write_rate="2GB"``: what all jobs that save to these branches may write a second, together; a save takes the
                rate divided by the branches that were saved to in the last 15 minutes (docs/guides/many-ranks.md).

        Raises:
            InvalidOptionError: a rule is unknown or invalid, or the rules contradict each other, or keep nothing.
        """
        from tensorstore_ck.maintenance.apply_policies import set_rules  # noqa: PLC0415

        return set_rules(self.engine, glob, rules)

    @_changes
    def remove_policy(self, glob: str) -> None:
        """Removes a policy: snapshots that it did not remove yet stay."""
        from tensorstore_ck.maintenance.apply_policies import set_policy  # noqa: PLC0415

        set_policy(self.engine, glob, None)

    @_changes
    def set_quota(self, glob: str, *, warn: int | str | None = None, refuse: int | str | None = None) -> Quota:
        """Limits what the snapshots of branches add to the store, in the store: saves of any process keep to it.

        A snapshot counts with its `Snapshot.new_bytes` for the branch that it was saved to, until no branch, tag, pin or undo window
        holds it.

        Args:
            glob: Which branches, all together, e.g. ``runs/*``. Replaces a quota for the same glob; several may apply to a branch.
            warn: Bytes, or ``"1TB"``: a save that reaches this size warns with a `QuotaWarning`, once per process and branch.
            refuse: Bytes: while the branches use this much, a save fails with a `QuotaExceededError`.

        Raises:
            InvalidOptionError: not a size, neither of the two, or `warn` is more than `refuse`.
        """
        from tensorstore_ck.maintenance.quotas import set_quota  # noqa: PLC0415

        return set_quota(self.engine, glob, warn=warn, refuse=refuse)

    @_changes
    def remove_quota(self, glob: str) -> None:
        """Removes a quota."""
        from tensorstore_ck.maintenance.quotas import remove_quota  # noqa: PLC0415

        remove_quota(self.engine, glob)

    @_changes
    def apply_policies(
        self, *refs: str, dry_run: bool = False, rules: Mapping[str, object] | None = None, glob: str | None = None
    ) -> "RetentionReport":
        """Applies the policies, in one log entry; reports for each snapshot why it stays or goes, and what that frees.

        Args:
            refs: These branches; none: all.
            dry_run: Only report.
            rules: Report what these rules would do, instead of the policies that are set; needs `dry_run`.
            glob: With `rules`: report what they would do as the policy for this glob, together with the other policies. `refs` are then
                the branches that it matches.
        """
        from tensorstore_ck.maintenance.apply_policies import retain  # noqa: PLC0415

        return retain(self.engine.of_store(), refs, dry_run=dry_run, rules=rules, glob=glob)

    # --- maintenance ---------------------------------------------------------------------------------------------------

    def bisect(
        self,
        ref: str,
        is_bad: Callable[[Snapshot], bool | None],
        *,
        good: str | None = None,
        bad: str | None = None,
        pin_for: float | str = "1d",
        unpinned_unsafe: bool = False,
        tested: "Callable[[Tested], object] | None" = None,
    ) -> "Bisection":
        """Finds the first bad snapshot of a branch by a binary search, as `git bisect` does. Tests both ends first.

        ::

            found = store.bisect("runs/gpt", lambda snapshot: store.find_nan(snapshot.root) is not None)

        The search is right only if all snapshots after the first bad one are bad. Otherwise it finds one of the bad snapshots that follow
        a good one. Snapshots from which training went back are left out. Snapshots that may still be the answer are pinned, under an
        owner of their own, until the search ends; one that is freed nevertheless counts as not testable.

        Args:
            ref: The branch.
            is_bad: Tests a snapshot; None: it cannot be tested. The search goes around it, and the answer may then be a range.
            good: The address of a snapshot before the bad one; by default the oldest one of the branch's history that can be tested.
            bad: The address of a bad snapshot; by default the newest one that can be tested.
            pin_for: About how long a test may take. The pins of a process that was killed last this long.
            unpinned_unsafe: Pin nothing: for a store that is opened read-only, or a test of metrics alone. Retention and gc may free
                snapshots during the search.
            tested: Called with the outcome of each test.

        Raises:
            InvalidOptionError: `good` is bad, `bad` is good, or one of them is not in the branch's history.
            NotFoundError: the newest snapshot is good, or the oldest one is bad; there is no such branch, or nothing to test in it.
            PermissionDeniedError: the store cannot be written to, and `unpinned_unsafe` is false.
        """
        from tensorstore_ck.maintenance.bisect_history import bisect  # noqa: PLC0415

        return bisect(
            self.engine.of_store(),
            ref,
            is_bad,
            good=good,
            bad=bad,
            pin_for=pin_for,
            unpinned_unsafe=unpinned_unsafe,
            tested=tested or (lambda test: None),
        )

    @_changes
    def repair(self, *, read_data: bool = False, other: "Store | None" = None) -> "RepairReport":
        """Repairs what `fsck` finds: rebuilds derived objects, and damaged objects from other copies, here or in another store.

        Snapshots that stay damaged are marked, so that `checkout` refuses them. Nothing is deleted.
        """
        from tensorstore_ck.maintenance.fsck import FsckOptions  # noqa: PLC0415
        from tensorstore_ck.maintenance.recorded_runs import recorded_repair  # noqa: PLC0415

        return recorded_repair(self.engine.of_store(), FsckOptions(read_data), other=None if other is None else other.engine.of_store())

    @_changes
    def gc(self, options: "GcOptions | None" = None, *, dry_run: bool = False, progress: "GcProgress | None" = None) -> "GcReport":
        """Frees objects that nothing holds any more; from any host, alongside writers and readers. With `dry_run` only reports them.

        An entry in the log says what it freed, or why it did not: see `last_runs`.

        Raises:
            UnreadableError: an object that is held cannot be read; nothing was freed.
            GcRefusedError: more than `options.max_delete` of all bytes would be deleted.
        """
        from tensorstore_ck.maintenance.recorded_runs import recorded_gc  # noqa: PLC0415

        return recorded_gc(self.engine.of_store(), options, dry_run=dry_run, progress=progress)

    @_changes
    def free_dropped(self, ref: str) -> "FreedSnapshots":
        """Frees what the policy of a branch dropped at its saves, without the undo window and without listing the store.

        For a job that keeps its own branch within its limits while it runs: see `Checkpointer`. Snapshots of other branches, and what
        `forget` removed, keep their undo windows; `gc` frees everything else.

        Raises:
            UnreadableError: a snapshot that is held cannot be read; nothing was freed.
            GcRefusedError: the log was changed, and this user has not accepted it.
            UnsafeBackendError: the backend does not create objects exclusively.
        """
        from tensorstore_ck.gc import free_dropped  # noqa: PLC0415

        return free_dropped(self.engine.of_store(), ref)

    @renamed_argument(max_bytes_per_second="rate_limit")
    @_changes
    def recode(
        self,
        *addresses: str,
        codec: str = "small",
        older_than: "str | float | None" = None,
        dry_run: bool = False,
        rate_limit: float | str | None = None,
        progress: "GcProgress | None" = None,
    ) -> "RecodeReport":
        """Re-encodes snapshots so that they use less space. For snapshots that are kept and seldom read. Roots do not change.

        The next `gc` frees the old packs; until then the store is larger.

        Args:
            addresses: A branch for all of its history, any other address for one snapshot; none: everything that is held.
            codec: ``small`` or ``fast``.
            older_than: Only snapshots that were saved longer ago, e.g. ``"7d"`` or seconds.
            dry_run: Only report what would be gained, judged by some blocks of each pack.
            rate_limit: Limits reads, and writes, to this rate.
            progress: Called with (step, done, total).
        """
        from tensorstore_ck.gc.recode import recode_snapshots  # noqa: PLC0415

        return recode_snapshots(
            self.engine.of_store().limited_to(rate_limit),
            addresses,
            codec=codec,
            older_than=older_than,
            dry_run=dry_run,
            progress=progress,
        )

    @renamed_argument(take_places="claim_locations", max_bytes_per_second="rate_limit")
    @_changes
    def migrate_tiers(
        self,
        *,
        dry_run: bool = False,
        claim_locations: bool = False,
        rate_limit: float | str | None = None,
        progress: "GcProgress | None" = None,
    ) -> "TierReport":
        """Applies the policies' rules of age: re-encodes packs that are old enough (``recode_after``), and moves them to colder locations
        (``move_after``), or back if a younger snapshot needs them. From any host, alongside jobs; may be killed and run again.

        Addresses and roots do not change, and moved packs are read from their new locations, through this store. The next `gc` frees the
        replaced packs; until then they use space at both locations.

        Args:
            dry_run: Only report what would be done.
            claim_locations: Claim the moved packs for this store, after the store itself was moved or restored. No other copy of it may
                be in use.
            rate_limit: Limits reads, and writes, to this rate.
            progress: Called with (step, done, total).

        Raises:
            GcRefusedError: another store, of which this may be a copy, moved the packs.
            PlaceUnavailableError: a location cannot be used, or is not mounted.
        """
        from tensorstore_ck.gc.tiering import run_tiering  # noqa: PLC0415

        engine = self.engine.of_store().limited_to(rate_limit)
        return run_tiering(engine, dry_run=dry_run, claim_locations=claim_locations, progress=progress)

    streams = renamed_method("streams", ReadOnlyStore.random_streams)
    kept_by = renamed_method("kept_by", ReadOnlyStore.explain_retention)
    retain = renamed_method("retain", apply_policies)
    tier = renamed_method("tier", migrate_tiers)

"""What users do to save: put and wait, put beside the training, and end in order. The restoring side is in `store`.

torch is loaded only by the methods that take tensors.
"""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from tensorstore_ck.common.host_memory import default_limit_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.publish import AnyHead
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE
from tensorstore_ck.engine.write.suspicious_save import Unchanged, require_checks
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.events import Callback
from tensorstore_ck.format.codec import CodecName, DeltaOption
from tensorstore_ck.log.address import is_staged_address, resolve
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, ProcessGroups, process_group
from tensorstore_ck.session.keeping import changes
from tensorstore_ck.session.manage import ManagedStore
from tensorstore_ck.session.ref_fence import LAST_SEEN, LastSeen, PutOptions, asked
from tensorstore_ck.session.save import DrainReport, OnFull, PendingSnapshot, Preemption, SaveQueue
from tensorstore_ck.session.save.at_exit import finish_at_exit
from tensorstore_ck.session.save.connect_peers import connect_peers
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.resume_staged import resume_alone, resume_ranks
from tensorstore_ck.session.save.retrying import retrying

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.session.save.put import SinglePut
    from tensorstore_ck.state.capture_copy import Arena


T = TypeVar("T")


def require_no_rank_state(rank_state: object) -> None:
    """Refuses what is a rank's alone where there are no ranks."""
    if rank_state is not None:
        raise InvalidOptionError("rank_state= needs group=: one process puts everything into the state", object_id="rank_state")


class SavingStore(ManagedStore):
    """An open store that can be put to: the base of `Store`."""

    def __init__(self, engine: Engine, *, host_memory_bytes: int | None = None, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        super().__init__(engine)
        if host_memory_bytes is not None and host_memory_bytes <= 0:
            raise InvalidOptionError(f"host_memory_bytes must be more than 0, not {host_memory_bytes}", object_id="host_memory_bytes")
        if not dead_after_seconds >= 1:
            raise InvalidOptionError(f"dead_after_seconds must be at least 1, not {dead_after_seconds}", object_id="dead_after_seconds")
        self._groups = ProcessGroups(engine, float(dead_after_seconds))
        self._host_memory_bytes = host_memory_bytes
        self._local_ranks = 1
        self._numbers = itertools.count(1)
        self._saver = SaveQueue(self._open_arena, engine.observers)
        self._handle = SaveContext(engine, self._seen, self._groups, self._saver.wait_for_upload)
        self._resumed_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        if engine.tier is not None:
            finish_at_exit(self._saver)
            for job in resume_alone(self._handle, engine.tier):
                self._saver.resume(job)

    @property
    def groups(self) -> ProcessGroups:
        """The process groups that this handle has met, for what is built on top of a store."""
        return self._groups

    @changes
    def put_snapshot(
        self,
        state: object,
        *,
        ref: str,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
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

        The ref moves only from the root that this handle last put or restored there, so a job that was given up for dead
        cannot overwrite its successor's work. A ref that this handle has not seen must not exist yet. Where it has only restored the
        newest snapshot of a ref, its first put there may not have a lower step, unless `expect` is given: a job may be running there.
        Puts of this handle that are under way (`put_snapshot_async`) are waited for first.

        Args:
            state: Any nesting of dicts, lists and tuples with tensors, numpy arrays and plain values.
            ref: The branch to move; made if it does not exist.
            step: The training step, for ``ref@step``.
            metrics: Numbers to rank by.
            metadata: What the run knows: config, learning rate, git commit. At most 1 MiB; part of the root.
            expect: A root, `ANY`, or None for "the ref must not exist", instead of what this handle last saw.
            parent: The snapshot that this one continues, by its address; None: none. By default what this handle last put or restored on
                the ref; on one that it has not seen, what its branch is at; and none where there is no branch. Part of the root.
            group: All ranks of it put together, each its own side of the state: its share of a DTensor, `FlatShard` or `Box`, others whole.
                A process group, or a one-dimensional DeviceMesh.
            rank_state: With `group`: what is this rank's alone, such as random number generators.
            frozen: Globs over names such as ``model.base.*``, of tensors that do not change while this store is open: they are read at
                the first put and each tenth one after it, where a change is a `FrozenChangedError`.
            codec: How to encode, for this put: see `open`.
            delta: Likewise.
            unchanged: What to do when the content contradicts `step`, which moved on: no floating tensor differs from the ref's save
                before, though some did in one of the last four; or the step counters of an optimizer disagree, or did not move on as
                the step did. ``warn`` with a `SuspiciousSaveWarning`; raise an ``error``; or ``ok``: nothing.
            verify_capture: Tensors must not change while they are captured. In the end small ones (up to 4 KiB) are read again and
                compared, and so much of the bytes of others, from 0.0 to 1.0, at places that change from put to put. 0: nothing is.
            timeout_seconds: With `group`: when to give up on ranks that do not come.

        Raises:
            UnsupportedValueError: `state` holds something that cannot be stored; the message has the path.
            CaptureChangedError: a tensor changed meanwhile; nothing was published. The message names it.
            SuspiciousSaveError: with ``unchanged="error"``; nothing was published.
            ConflictError: the ref is elsewhere; nothing was written.
            InvalidOptionError: an argument is not what it must be, or not the same on all ranks; or the step is lower than that of the head
                which was only restored.
            SnapshotAbortedError: with `group`: a rank failed in another way, or is gone; the message names it. Each of the errors above is
                raised by all ranks where one of them meets it, or where their states cannot be one snapshot.
            UndecidedError: the store went away in the middle of the commit: see `retrying`.
        """

        def ask() -> PutOptions:
            return asked(
                self._engine,
                ref,
                step=step,
                metrics=metrics,
                metadata=metadata,
                expect=expect,
                parent=parent,
                codec=codec,
                delta=delta,
                checks=require_checks(unchanged, verify_capture),
            )

        group = process_group(group)
        if group is not None:
            self._saver.require_no_lane()
        return self._saver.run(
            lambda: self._job(ask, state, rank_state, ref=ref, step=step, group=group, frozen=frozen, timeout_seconds=timeout_seconds)
        )

    @changes
    def put_snapshot_async(
        self,
        state: object,
        *,
        ref: str,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
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
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> PendingSnapshot:
        """As `put_snapshot`, beside the training: it returns as soon as `state` may be mutated, and a thread does the rest.

        The state is copied into buffers that are reused; `host_memory_bytes` of `open` bounds them. Puts of one handle are published in
        the order of their calls. What fails is raised by ``wait()``, or else by the handle's next put.

        Args:
            state: See `put_snapshot`.
            ref: Likewise.
            step: Likewise.
            metrics: Likewise.
            metadata: Likewise.
            expect: Likewise.
            parent: Likewise.
            group: Likewise.
            rank_state: Likewise.
            frozen: Likewise; these tensors are not copied either.
            codec: Likewise.
            delta: Likewise.
            unchanged: Likewise; on the thread that stores it.
            verify_capture: As in `put_snapshot`; what is compared are the copies, before this returns. Nothing of tensors on CUDA devices,
                whose copies are made in the order of their stream.
            on_full: What to do when the buffers of earlier puts leave no room: ``block`` until there is; ``skip`` this put; or
                ``replace``: give up the oldest put that waits for its turn. With `group`, rank 0 decides for all. What was dropped
                is told by the returned object, a warning in the log, and an event.
            timeout_seconds: As in `put_snapshot`; the waiting in the queue does not count.

        Raises:
            StoreError: as `put_snapshot`; or what an earlier put of this handle failed with, if nobody waited for it: then this one did
                not take place.
            NoSpaceError: the state does not fit into `host_memory_bytes` at all.
        """

        def ask() -> PutOptions:
            return asked(
                self._engine,
                ref,
                step=step,
                metrics=metrics,
                metadata=metadata,
                expect=expect,
                parent=parent,
                codec=codec,
                delta=delta,
                checks=require_checks(unchanged, verify_capture),
            )

        from tensorstore_ck.session.save.group_put import UnpreparedState  # noqa: PLC0415 - loads torch

        group = process_group(group)

        def make() -> "SinglePut":
            captured = state
            if group is not None:  # also where host_memory_bytes is given: other ranks may not have it, and all must ask
                try:
                    self._local_ranks = self._groups.local_ranks(group, timeout_seconds=timeout_seconds)
                except StoreError as exc:  # the others may know, and begin the put
                    captured = UnpreparedState(exc)
            job = self._job(ask, captured, rank_state, ref=ref, step=step, group=group, frozen=frozen, timeout_seconds=timeout_seconds)
            if group is not None:
                job.prepare()
            elif self._saver.is_quiet():
                job.check_known()
            return job

        return self._saver.submit(make, on_full)

    def retrying(self, call: Callable[[], T], *, attempts: int = 3, pause_seconds: float = 1.0) -> T:
        """What `call` returns; it is called again as often as that helps: see `errors`, "retry".

        ::

            snapshot = store.retrying(lambda: store.put_snapshot(state, ref="runs/gpt", step=step, group=group))

        What may pass is tried again. Of a put that may or may not have happened the log is asked first, which decides it: what was put is
        returned, and not put again. All else is raised at once, as a put to a ref that another process moved. With ``group=`` all
        ranks call it: they raise the same, and so try again together.

        Args:
            call: A put, a restore or anything else with this store; a put beside the training with its ``wait()``.
            attempts: How often it is called, at most.
            pause_seconds: Before the second call; twice as long before each further one.

        Raises:
            StoreError: what the last call raised.
        """
        return retrying(self._handle, call, attempts=attempts, pause_seconds=pause_seconds)

    def pending(self) -> list[PendingSnapshot]:
        """The puts under way, oldest first."""
        return self._saver.pending()

    def drain(self, deadline_seconds: float | None = None) -> DrainReport:
        """Waits for the puts under way; those that are not published by the deadline are given up cleanly. Says which snapshot is safe."""
        return self._saver.drain(deadline_seconds)

    def finish_staged(
        self, address: str, group: "ProcessGroup | DeviceMesh | None" = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Waits for the puts of this handle, and for what this host, or those of `group`, staged before; a restore does that first.

        An `address` like ``runs/gpt^staged`` means what is staged: then no upload is waited for.
        """
        self._resume(process_group(group), timeout_seconds)
        self._saver.settle(uploads=not self._is_staged(address))

    def on_preemption(self, signal_number: int, *, deadline_seconds: float) -> Preemption:
        """Makes a signal such as ``signal.SIGTERM`` end the job in order: see `Preemption`. On the main thread only."""
        return Preemption(self._saver, signal_number, deadline_seconds=deadline_seconds)

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Calls ``callback(event)`` at each `Event` of this handle's puts, on their thread; returns what ends that."""
        return self._engine.observers.subscribe(callback)

    def close(self) -> None:
        """Finishes the puts under way, and releases connections, memory and the cache; idempotent.

        Raises:
            StoreError: what a put failed with that nobody waited for.
        """
        try:
            self._saver.close()
        finally:
            self._groups.close()
            super().close()

    def _is_staged(self, address: str) -> bool:
        """Whether it means a snapshot that is staged, and not what is published by now."""
        if is_staged_address(address):
            return True
        try:
            return self._engine.log.view().staged(resolve(self._engine.log.view(), address).info.ulid) is not None
        except StoreError:
            return False

    def _resume(self, group: "ProcessGroup | None", timeout_seconds: float) -> None:
        """At the first meeting of the ranks of a group: goes on with what ranks have staged before."""
        if group is not None and self._engine.tier is not None and group not in self._resumed_groups:
            for job in resume_ranks(self._handle, self._engine.tier, group, timeout_seconds):
                self._saver.resume(job)
            if self._engine.tier.options.replicate_to_peers:
                connect_peers(self._handle, self._engine.tier, group, timeout_seconds)
            self._resumed_groups.add(group)

    def _job(
        self,
        ask: Callable[[], PutOptions],
        state: object,
        rank_state: object,
        *,
        ref: str,
        step: int | None,
        group: "ProcessGroup | None",
        frozen: Sequence[str],
        timeout_seconds: float,
    ) -> "SinglePut":
        from tensorstore_ck.session.group.rank_put import RankStates  # noqa: PLC0415 - loads torch
        from tensorstore_ck.session.save.group_put import GroupPut, UnpreparedState  # noqa: PLC0415 - likewise
        from tensorstore_ck.session.save.put import SinglePut  # noqa: PLC0415 - likewise
        from tensorstore_ck.state.capture import capture  # noqa: PLC0415 - likewise
        from tensorstore_ck.state.rank_shares import describer_of  # noqa: PLC0415 - likewise

        if group is None:
            require_no_rank_state(rank_state)
        if self._engine.limit is not None and group is not None:
            self._engine.limit.share(group.size())
        self._resume(group, timeout_seconds)
        if group is None:
            number = next(self._numbers)
            job = SinglePut(
                self._handle, number, ask, lambda: RankStates(self._handle.frozen.mark(capture(state), frozen), None), ref=ref, step=step
            )
            job.prepare()
            return job

        def take_apart() -> RankStates:
            if isinstance(state, UnpreparedState):
                raise state.error
            nonce = self._handle.groups.of(group)[0].nonce
            shared = self._handle.frozen.mark(capture(state, describer_of(group)), frozen, nonce)
            return RankStates(shared, None if rank_state is None else capture(rank_state))

        return GroupPut(self._handle, group, ask, take_apart, ref=ref, step=step, timeout_seconds=timeout_seconds)

    def _open_arena(self) -> "Arena":
        import torch  # noqa: PLC0415 - takes a second

        from tensorstore_ck.state.capture_copy import Arena  # noqa: PLC0415 - loads torch

        if self._engine.tier is None:
            finish_at_exit(self._saver)
        limit_bytes = self._host_memory_bytes or default_limit_bytes(self._local_ranks)
        return Arena(limit_bytes, pinned=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

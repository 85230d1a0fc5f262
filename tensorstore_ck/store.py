"""`Store`, what users hold: public names, signatures and docstrings. Each method is one call into `session`, `maintenance` or gc.

What takes long to import, such as torch, is imported only by the methods that need it, so that a command starts fast.
"""

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast, overload

from tensorstore_ck.backend.staging import Staging
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.engine.write.put import ANY, AnyHead
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE
from tensorstore_ck.engine.write.suspicious_save import Unchanged
from tensorstore_ck.events import Callback
from tensorstore_ck.format.codec import CodecName, CodecOption, DeltaOption
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.log import Rollback
from tensorstore_ck.log.snapshot import PinnedSnapshot, Snapshot, SnapshotDetails
from tensorstore_ck.maintenance import forget as forgetting
from tensorstore_ck.maintenance import refs
from tensorstore_ck.session import restore
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.session.ref_fence import LAST_SEEN, LastSeen
from tensorstore_ck.session.restore import Restoring
from tensorstore_ck.session.save import DrainReport, OnFull, PendingSnapshot, Preemption
from tensorstore_ck.session.save.retrying import retrying
from tensorstore_ck.session.session import Session

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.gc import GcOptions, GcReport
    from tensorstore_ck.gc.recode import RecodeReport
    from tensorstore_ck.gc.report import Progress as GcProgress
    from tensorstore_ck.gc.tiering import TierReport
    from tensorstore_ck.gc.usage import Usage
    from tensorstore_ck.log.retention import Policy
    from tensorstore_ck.maintenance.advise import Advice
    from tensorstore_ck.maintenance.apply_policies import RetentionReport
    from tensorstore_ck.maintenance.describe import SnapshotDiff
    from tensorstore_ck.maintenance.forget import Forgotten
    from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport, RepairReport
    from tensorstore_ck.state import LazySnapshot, LoadReport, StateCheck

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def _changes(method: Method) -> Method:
    """Marks a method that changes the store: a store that was opened read-only refuses it, unless it is a dry run."""

    @wraps(method)
    def checked(self: "Store", *args: Any, **kwargs: Any) -> Any:
        if self.engine.read_only and not kwargs.get("dry_run"):
            self.engine.require_writable(f"{method.__name__}()")
        return method(self, *args, **kwargs)

    return cast(Method, checked)


class Store:
    """An open store. Thread-safe; a context manager. Make one with `tensorstore_ck.open`."""

    def __init__(self, engine: Engine, *, host_memory_bytes: int | None = None, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        self._session = Session(engine, host_memory_bytes=host_memory_bytes, dead_after_seconds=dead_after_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self.engine.backend.url

    @property
    def engine(self) -> Engine:
        """For what is built on top of a store: see `integrations`."""
        return self.session.engine

    @property
    def session(self) -> Session:
        """What this handle has seen of refs, its process groups and its queue of saves: for what is built on top of a store."""
        return self._session

    def close(self) -> None:
        """Finishes the puts under way, and releases connections, memory and the cache; idempotent.

        Raises:
            StoreError: what a put failed with that nobody waited for.
        """
        self.session.close()

    # --- save -------------------------------------------------------------------------------------------------------------

    @_changes
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
        return self.session.put_async(
            state,
            ref,
            on_full=on_full,
            group=group,
            rank_state=rank_state,
            frozen=frozen,
            timeout_seconds=timeout_seconds,
            step=step,
            metrics=metrics,
            metadata=metadata,
            expect=expect,
            parent=parent,
            codec=codec,
            delta=delta,
            unchanged=unchanged,
            verify_capture=verify_capture,
        )

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
        return retrying(self.session.context, call, attempts=attempts, pause_seconds=pause_seconds)

    def pending(self) -> list[PendingSnapshot]:
        """The puts under way, oldest first."""
        return self.session.queue.pending()

    def drain(self, deadline_seconds: float | None = None) -> DrainReport:
        """Waits for the puts under way; those that are not published by the deadline are given up cleanly. Says which snapshot is safe."""
        return self.session.queue.drain(deadline_seconds)

    def finish_staged(
        self, address: str, group: "ProcessGroup | DeviceMesh | None" = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Waits for the puts of this handle, and for what this host, or those of `group`, staged before; a restore does that first.

        An `address` like ``runs/gpt^staged`` means what is staged: then no upload is waited for.
        """
        self.session.finish_staged(address, process_group(group), timeout_seconds)

    def on_preemption(self, signal_number: int, *, deadline_seconds: float) -> Preemption:
        """Makes a signal such as ``signal.SIGTERM`` end the job in order: see `Preemption`. On the main thread only."""
        return Preemption(self.session.queue, signal_number, deadline_seconds=deadline_seconds)

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Calls ``callback(event)`` at each `Event` of this handle's puts, on their thread; returns what ends that."""
        return self.engine.observers.subscribe(callback)

    @_changes
    def check(
        self,
        state: object,
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        rank_state: object = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> "StateCheck":
        """What `put_snapshot(state)` would do: what cannot be stored, sizes, free space, expected time. Publishes nothing.

        Args:
            state: See `put_snapshot`.
            group: Likewise. All ranks call it, and are compared as at the first put: what cannot be one snapshot is a problem on all.
            rank_state: Likewise.
            timeout_seconds: With `group`: when to give up on ranks that do not come.
        """
        return self.session.check(state, group=group, rank_state=rank_state, timeout_seconds=timeout_seconds)

    # --- restore ----------------------------------------------------------------------------------------------------------

    def checkout(
        self,
        address: str,
        *,
        into: object = None,
        select: Sequence[str] | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        device: "str | torch.device" = "cpu",
        report: "LoadReport | None" = None,
        allow_bad: bool = False,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Any:
        """Restores the snapshot at `address`, every block verified. Puts of this handle that are under way are waited for first.

        Args:
            address: A branch, tag, root, root prefix, ``ref@step``, ``ref~n``; or ``ref^staged``, for what these hosts have staged.
            into: A state of the same form, whose tensors are filled in place without a second copy. Everything is checked
                before anything is read; if reading then fails, its tensors are undefined.
            select: Globs over names such as ``model.*``; what fits none is left out (None inside lists and tuples).
            strict: Whether names that are missing, unexpected or of another shape or dtype are an error; if false,
                what fits is loaded and the rest is told in `report`, or as a warning. With `group`, unexpected is what no rank has.
            rename: Prefixes of stored names -> prefixes of names in `into`; or a function of the name (None: leave it out).
            dtype: Floating-point tensors are converted to it.
            device: Where new tensors are made.
            report: Filled with the differences when `strict` is false.
            group: All ranks of it restore the snapshot that the first of them finds, each its own side of `into`; all, or none. A
                process group, or a one-dimensional DeviceMesh.
            broadcast: With `group`: tensors that all ranks restore in full, as under DDP, are read by one rank each, and go to the
                others by a broadcast: where the network between hosts is faster than the store.
            timeout_seconds: With `group`: when to give up on ranks that do not come.
            allow_bad: Restore a snapshot that was marked, too: ``bad`` by a user, or ``damaged`` by `tsck fsck --repair`.

        Raises:
            NotFoundError: nothing at that address.
            SnapshotMarkedBadError: it was marked ``bad`` or ``damaged``.
            MismatchError: it does not fit `into` or `select`.
            DamageError: stored data is damaged; nothing wrong is returned. With `group` all ranks raise these where one meets them.
            SnapshotAbortedError: with `group`: a rank failed in another way, or did not come.
        """
        return restore.checkout(
            self.session,
            address,
            group=group,
            allow_bad=allow_bad,
            timeout_seconds=timeout_seconds,
            into=into,
            select=select,
            strict=strict,
            rename=rename,
            dtype=dtype,
            device=device,
            report=report,
            broadcast=broadcast,
        )

    def restoring(
        self,
        address: str,
        read: Callable[[Restoring], T],
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        allow_bad: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> tuple[T, Snapshot]:
        """What `read` makes of the snapshot at `address`, on all ranks of `group` or on none; for what is built on top of a store.

        Whatever `read` raises on one rank ends the restore on all of them at once. All else is as in `checkout`.

        Returns:
            What `read` returned, and the snapshot.
        """
        return restore.restoring(
            self.session,
            address,
            read,
            group=group,
            broadcast=broadcast,
            allow_bad=allow_bad,
            timeout_seconds=timeout_seconds,
        )

    def rank_state(
        self,
        address: str,
        rank: int | None = None,
        *,
        rank_state_map: Callable[[int, int], int | Iterable[int]] | None = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Any:
        """What a rank put as ``rank_state=``: this rank's own, if as many ranks put it.

        Args:
            address: As in `checkout`.
            rank: Whose to take instead, whatever the number of ranks.
            rank_state_map: With another number of ranks, whose to take: called with this rank and the number of ranks that put,
                such as ``lambda rank, ranks: rank % ranks``. When it returns several, their states come as a list.
            group: All ranks of it restore theirs, or none; without it there is one rank.
            timeout_seconds: With `group`: when to give up on ranks that do not come.

        Raises:
            NotFoundError: no rank states were put, or there is no such rank.
            MismatchError: another number of ranks put them, and nothing says whose to take.
        """
        return restore.rank_state(
            self.session,
            address,
            rank,
            rank_state_map=rank_state_map,
            group=group,
            timeout_seconds=timeout_seconds,
        )

    def streams(
        self, address: str, *, group: "ProcessGroup | DeviceMesh | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Streams:
        """Seeds of new random streams for this rank, derived from a snapshot that another number of ranks put.

        Raises:
            FormatVersionError: the snapshot names a rule that this build does not know.
        """
        return restore.streams(self.session, address, group=group, timeout_seconds=timeout_seconds)

    def open_snapshot(self, address: str) -> "AbstractContextManager[LazySnapshot]":
        """A lazy mapping from tensor names to tensors: ``s["model.weight"][0:128]`` reads only the blocks that it needs."""
        return restore.open_lazily(self.session, address)

    # --- look -------------------------------------------------------------------------------------------------------------

    def resolve(self, address: str) -> Snapshot:
        """The snapshot at an address."""
        return Snapshot.from_info(self.session.resolve(address).info)

    def log(self, ref: str | None = None, *, limit: int | None = None) -> list[Snapshot]:
        """The history of a branch (a tag: its one snapshot), newest first; of all branches together without `ref`."""
        return refs.history(self.engine, ref, limit)

    def show(self, address: str) -> SnapshotDetails:
        """Metadata, tensors and values of a snapshot."""
        from tensorstore_ck.maintenance.describe import describe  # noqa: PLC0415

        return describe(self.engine, self.session.resolve(address).info)

    def diff(self, old: str, new: str) -> "SnapshotDiff":
        """Which tensors and values differ between two snapshots, and how many of their bytes.

        Reads no tensor data, but where other ranks or placements cut a tensor at other borders.
        """
        from tensorstore_ck.maintenance.describe import diff_snapshots  # noqa: PLC0415

        return diff_snapshots(self.engine, self.session.resolve(old).info, self.session.resolve(new).info)

    def usage(self, *, per_snapshot: bool = False) -> "Usage":
        """Logical, unique, stored, shared and exclusive bytes, per ref, job and pack, and in all; reads no tensor data.

        Args:
            per_snapshot: Also what each snapshot takes, and what forgetting it would free.
        """
        from tensorstore_ck.gc.usage import measure_usage  # noqa: PLC0415

        return measure_usage(self.engine.of_store(), per_snapshot=per_snapshot)

    def advise(
        self,
        ref: str,
        *,
        stall: float | None = None,
        lag: float | None = None,
        restart: float | None = None,
        mtbf: float | None = None,
        bytes_per_second: float | None = None,
        bytes_per_day: float | None = None,
    ) -> "Advice":
        """How often the job of a branch should save, so that it loses least time: by its history, and what was measured of it.

        Args:
            ref: The branch.
            stall: Seconds that a save holds the training up for; None: as `Checkpointer` measured and noted it with the newest snapshot.
            lag: From then until the snapshot is published; None: likewise, or none.
            restart: From a failure until training goes on; None: likewise, of the restore alone, or five minutes.
            mtbf: Mean time between failures; None: by how often the run was resumed, or else four hours.
            bytes_per_second: What the store can take: then it is told whether that is enough.
            bytes_per_day: What the store may grow by.
        """
        from tensorstore_ck.maintenance.advise import advise  # noqa: PLC0415

        return advise(
            self.engine,
            ref,
            stall=stall,
            lag=lag,
            restart=restart,
            mtbf=mtbf,
            bytes_per_second=bytes_per_second,
            bytes_per_day=bytes_per_day,
        )

    def fsck(self, options: "FsckOptions | None" = None, *, read_data: bool = False, progress: Progress | None = None) -> "FsckReport":
        """Checks the whole store's structure, and as much data as asked for: `read_data`, or more in `options`. Changes nothing."""
        from tensorstore_ck.maintenance.fsck import run_fsck  # noqa: PLC0415

        return run_fsck(self.engine.of_store(), options, read_data=read_data, progress=progress)

    @_changes
    def repair(self, *, read_data: bool = False, other: "Store | None" = None) -> "RepairReport":
        """Mends what `fsck` finds: makes anew what is derived, and damaged objects from other copies, here or in another store.

        Snapshots that stay damaged are marked, so that `checkout` refuses them. Nothing is deleted.
        """
        from tensorstore_ck.maintenance.fsck import FsckOptions, run_repair  # noqa: PLC0415

        return run_repair(self.engine.of_store(), FsckOptions(read_data), other=None if other is None else other.engine.of_store())

    # --- refs -------------------------------------------------------------------------------------------------------------

    @_changes
    def branch(self, name: str, at: str) -> Snapshot:
        """Makes branch `name` at a snapshot."""
        return self.session.fence.note_moved(name, refs.branch(self.engine, name, at))

    @_changes
    def reset(self, name: str, to: str) -> Snapshot:
        """Moves an existing branch to any snapshot, from wherever it is; its history keeps where it was."""
        return self.session.fence.note_moved(name, refs.reset(self.engine, name, to))

    @_changes
    def tag(self, name: str, at: str) -> Snapshot:
        """Names a snapshot for good: a tag never moves."""
        return refs.tag(self.engine, name, at)

    @_changes
    def untag(self, name: str) -> None:
        """Removes a tag; what nothing else holds goes like what is forgotten."""
        refs.untag(self.engine, name)

    def branches(self) -> dict[str, Snapshot]:
        """Every branch, and where it is."""
        return refs.branches(self.engine)

    def tags(self) -> dict[str, Snapshot]:
        """Every tag, and where it is."""
        return refs.tags(self.engine)

    @_changes
    def annotate(self, address: str, metrics: Mapping[str, float]) -> Snapshot:
        """Adds metrics that came later than the put; a name that is there already gets the new number."""
        return refs.annotate(self.engine, address, metrics)

    @_changes
    def mark(self, address: str, mark: str = "bad", *, reason: str = "") -> Snapshot:
        """Marks a snapshot ``bad``, so that `checkout` refuses it; the empty mark takes that back."""
        return refs.mark(self.engine, address, mark, reason)

    # --- what stays, and what goes ----------------------------------------------------------------------------------------

    @_changes
    def pin(self, address: str, *, reason: str = "", owner: str | None = None, expires: "str | float | None" = None) -> Snapshot:
        """Holds a snapshot until it is unpinned or `expires` has passed. An owner's second pin replaces the first.

        Args:
            address: The snapshot.
            reason: For those who wonder later.
            owner: Who holds it; by default this user.
            expires: For how long: ``"30d"``, or seconds.
        """
        return refs.pin(self.engine, address, reason=reason, owner=owner, expires=expires)

    @_changes
    def unpin(self, address: str, *, owner: str | None = None) -> None:
        """Takes this user's pin, or `owner`'s, from a snapshot, and from any other one that has the same root."""
        refs.unpin(self.engine, address, owner)

    def pins(self) -> tuple[PinnedSnapshot, ...]:
        """Every pin."""
        return refs.pins(self.engine)

    def watch(self, ref: str, **options: Any) -> Generator[Snapshot]:
        """The snapshots that are put to a branch from now on, each pinned until the next one is asked for: for evaluation jobs.

        Args:
            ref: The branch; it need not be there yet.
            options: ``since_step=0``: also those that are there already, from that step on; ``newest_only=True``: of several that came
                meanwhile only the newest; ``pin_for="1d"``: how long a pin holds at most, None: nothing is pinned; ``poll_seconds=2.0``;
                ``until=``: a function that ends it.
        """
        from tensorstore_ck.maintenance.watch import watch  # noqa: PLC0415

        with closing(watch(self.engine.of_store(), ref, **options)) as found:
            for info in found:
                yield Snapshot.from_info(info)

    @_changes
    def forget(self, *addresses: str) -> "tuple[Forgotten, ...]":
        """Takes snapshots out of their branches' histories, or whole branches and tags. `gc` frees them after the undo window.

        Args:
            addresses: ``ref@step``, ``ref~n`` or a root for one snapshot; a ref for all of it. Tags, pins and other branches go on
                holding what they hold.
        """
        found = forgetting.forget(self.engine, addresses)
        self.session.fence.drop(each.ref for each in found if each.kind == "branch")
        return found

    @_changes
    def undo(self, address: str | None = None) -> "tuple[Forgotten, ...]":
        """Brings back what was forgotten last, or last of a ref, or one snapshot: until gc ends the undo window."""
        return forgetting.undo(self.engine, address)

    def forgotten(self) -> "tuple[Forgotten, ...]":
        """What `undo` can bring back, newest first."""
        return forgetting.forgotten(self.engine)

    @_changes
    def set_policy(self, glob: str, **rules: object) -> "Policy":
        """Says what stays of the histories of branches, in the store: applied with each put, by whomever, and by `retain`.

        What any rule keeps stays, of any policy that is for a branch, as far as the limits let it; besides, always: the newest snapshot,
        the newest other one that is not marked, and all that is tagged or pinned. What goes can be brought back for a day (`undo`).

        Args:
            glob: Which branches, e.g. ``runs/*``. A policy for the same glob is replaced.
            rules: ``keep_last=5``; ``keep_best=(3, "val_loss", "min")``, or several of these; ``keep_every=1000`` steps: the first at or
                after each multiple; ``keep_every_seconds="6h"``; ``keep_steps=[1000, 5000]``; ``keep_first=True``; ``keep_younger="7d"``.
                Limits: ``expire_after="30d"``; ``max_bytes="2TB"`` of the store, of which the oldest go first (by `retain` only).
                Ageing, by `tier`: ``recode_after="7d"``; ``move_after=("30d", "s3://cold/ckpt")``, or several of these.

        Raises:
            InvalidOptionError: an unknown rule, one that makes no sense, rules that contradict each other, or that keep nothing.
        """
        from tensorstore_ck.maintenance.apply_policies import set_rules  # noqa: PLC0415

        return set_rules(self.engine, glob, rules)

    @_changes
    def remove_policy(self, glob: str) -> None:
        """Takes a policy back: what it did not let go stays."""
        from tensorstore_ck.maintenance.apply_policies import set_policy  # noqa: PLC0415

        set_policy(self.engine, glob, None)

    def policies(self) -> "dict[str, Policy]":
        """Glob -> policy."""
        from tensorstore_ck.maintenance.apply_policies import policies  # noqa: PLC0415

        return policies(self.engine)

    def kept_by(self, ref: str) -> dict[str, tuple[str, ...]]:
        """Id of each snapshot of a branch -> the tags, pins and rules that keep it. Limits of bytes are not looked at."""
        from tensorstore_ck.maintenance.apply_policies import kept_by  # noqa: PLC0415

        return kept_by(self.engine, ref)

    @_changes
    def retain(self, *refs: str, dry_run: bool = False, rules: Mapping[str, object] | None = None) -> "RetentionReport":
        """Lets go what the policies let go, in one log entry; says of each snapshot why it stays or goes, and what that frees.

        Args:
            refs: These branches; none: all.
            dry_run: Only look.
            rules: Look what these would do, instead of the policies that are set; needs `dry_run`.
        """
        from tensorstore_ck.maintenance.apply_policies import retain  # noqa: PLC0415

        return retain(self.engine.of_store(), refs, dry_run=dry_run, rules=rules)

    @_changes
    def gc(self, options: "GcOptions | None" = None, *, dry_run: bool = False, progress: "GcProgress | None" = None) -> "GcReport":
        """Frees what nothing holds any more; from any host, beside writers and readers. With `dry_run` tells what would go.

        Raises:
            UnreadableError: something that is held cannot be read; nothing was freed.
            GcRefusedError: more than `options.max_delete` of all bytes would go.
        """
        from tensorstore_ck.gc import run_gc  # noqa: PLC0415

        return run_gc(self.engine.of_store(), options, dry_run=dry_run, progress=progress)

    @_changes
    def recode(
        self,
        *addresses: str,
        codec: str = "small",
        older_than: "str | float | None" = None,
        dry_run: bool = False,
        max_bytes_per_second: float | None = None,
        progress: "GcProgress | None" = None,
    ) -> "RecodeReport":
        """Encodes snapshots anew so that they take less room: those that are kept and seldom read. Roots stay as they are.

        What they took is condemned, and freed by the next `gc`; until then the store takes more.

        Args:
            addresses: A branch for all of its history, any other address for one snapshot; none: everything that is held.
            codec: ``small`` or ``fast``.
            older_than: Only snapshots that were put longer ago, e.g. ``"7d"`` or seconds.
            dry_run: Only tell what would be gained, by some blocks of each pack.
            max_bytes_per_second: Reads no more than that, and writes no more.
            progress: Called with (what is being done, done, of how many).
        """
        from tensorstore_ck.gc.recode import recode_snapshots  # noqa: PLC0415

        return recode_snapshots(
            self.engine.of_store().limited_to(max_bytes_per_second),
            addresses,
            codec=codec,
            older_than=older_than,
            dry_run=dry_run,
            progress=progress,
        )

    @_changes
    def tier(
        self,
        *,
        dry_run: bool = False,
        take_places: bool = False,
        max_bytes_per_second: float | None = None,
        progress: "GcProgress | None" = None,
    ) -> "TierReport":
        """Does what policies say of age: encodes what is old enough smaller (``recode_after``), and moves it to colder places
        (``move_after``), or back where something younger needs it. From any host, beside jobs; may be killed and run again.

        Addresses and roots stay as they are, and what was moved is read where it lies, through this store. What was replaced is freed by
        the next `gc`; until then it takes room at both places.

        Args:
            dry_run: Only tell what would be done.
            take_places: The packs that were moved belong to the store here from now on: it was itself moved, or restored, and no other
                copy of its files is in use.
            max_bytes_per_second: Reads no more than that, and writes no more.
            progress: Called with (what is being done, done, of how many).

        Raises:
            GcRefusedError: a store elsewhere, of which this may be a copy, moved the packs.
            PlaceUnavailableError: a place cannot be used, or is not mounted.
        """
        from tensorstore_ck.gc.tiering import run_tiering  # noqa: PLC0415

        engine = self.engine.of_store().limited_to(max_bytes_per_second)
        return run_tiering(engine, dry_run=dry_run, take_places=take_places, progress=progress)


class ReadOnlyStore(Protocol):
    """An open store to look at. At run time it is a `Store` that refuses all other methods with a `PermissionDeniedError`."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None: ...
    @property
    def url(self) -> str: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def session(self) -> Session: ...

    # --- restore ------------------------------------------------------------------------------------------------------

    def checkout(
        self,
        address: str,
        *,
        into: object = None,
        select: Sequence[str] | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        device: "str | torch.device" = "cpu",
        report: "LoadReport | None" = None,
        allow_bad: bool = False,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Any: ...
    def restoring(
        self,
        address: str,
        read: Callable[[Restoring], T],
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        allow_bad: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> tuple[T, Snapshot]: ...
    def rank_state(
        self,
        address: str,
        rank: int | None = None,
        *,
        rank_state_map: Callable[[int, int], int | Iterable[int]] | None = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Any: ...
    def streams(
        self, address: str, *, group: "ProcessGroup | DeviceMesh | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Streams: ...
    def retrying(self, call: Callable[[], T], *, attempts: int = 3, pause_seconds: float = 1.0) -> T: ...
    def open_snapshot(self, address: str) -> "AbstractContextManager[LazySnapshot]": ...
    def finish_staged(
        self, address: str, group: "ProcessGroup | DeviceMesh | None" = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None: ...

    # --- look ---------------------------------------------------------------------------------------------------------

    def resolve(self, address: str) -> Snapshot: ...
    def log(self, ref: str | None = None, *, limit: int | None = None) -> list[Snapshot]: ...
    def show(self, address: str) -> SnapshotDetails: ...
    def diff(self, old: str, new: str) -> "SnapshotDiff": ...
    def usage(self, *, per_snapshot: bool = False) -> "Usage": ...
    def advise(
        self,
        ref: str,
        *,
        stall: float | None = None,
        lag: float | None = None,
        restart: float | None = None,
        mtbf: float | None = None,
        bytes_per_second: float | None = None,
        bytes_per_day: float | None = None,
    ) -> "Advice": ...
    def fsck(self, options: "FsckOptions | None" = None, *, read_data: bool = False, progress: Progress | None = None) -> "FsckReport": ...
    def branches(self) -> dict[str, Snapshot]: ...
    def tags(self) -> dict[str, Snapshot]: ...
    def pins(self) -> tuple[PinnedSnapshot, ...]: ...
    def policies(self) -> "dict[str, Policy]": ...
    def kept_by(self, ref: str) -> dict[str, tuple[str, ...]]: ...
    def forgotten(self) -> "tuple[Forgotten, ...]": ...
    def watch(self, ref: str, *, pin_for: None, **options: Any) -> Generator[Snapshot]: ...

    # --- what would be done -------------------------------------------------------------------------------------------

    def retain(self, *refs: str, dry_run: Literal[True], rules: Mapping[str, object] | None = None) -> "RetentionReport": ...
    def gc(self, options: "GcOptions | None" = None, *, dry_run: Literal[True], progress: "GcProgress | None" = None) -> "GcReport": ...
    def recode(
        self,
        *addresses: str,
        codec: str = "small",
        older_than: "str | float | None" = None,
        dry_run: Literal[True],
        max_bytes_per_second: float | None = None,
        progress: "GcProgress | None" = None,
    ) -> "RecodeReport": ...
    def tier(
        self, *, dry_run: Literal[True], max_bytes_per_second: float | None = None, progress: "GcProgress | None" = None
    ) -> "TierReport": ...


@overload
def open_store(
    url: str | os.PathLike[str],
    *,
    read_only: Literal[True],
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    rollback: Rollback = "warn",
    state_dir: str | os.PathLike[str] | None = None,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    places: Sequence[str | os.PathLike[str]] = (),
) -> ReadOnlyStore: ...
@overload
def open_store(
    url: str | os.PathLike[str],
    *,
    create: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    single_writer_unsafe: bool = False,
    no_sync: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    rollback: Rollback = "warn",
    state_dir: str | os.PathLike[str] | None = None,
    host_memory_bytes: int | None = None,
    staging: str | os.PathLike[str] | Staging | None = None,
    min_free: str | int = 0,
    max_bytes_per_second: float | None = None,
    codec: CodecOption = "auto",
    delta: DeltaOption = None,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    read_only: Literal[False] = False,
    places: Sequence[str | os.PathLike[str]] = (),
) -> Store: ...
def open_store(
    url: str | os.PathLike[str],
    *,
    create: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    single_writer_unsafe: bool = False,
    no_sync: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    rollback: Rollback = "warn",
    state_dir: str | os.PathLike[str] | None = None,
    host_memory_bytes: int | None = None,
    staging: str | os.PathLike[str] | Staging | None = None,
    min_free: str | int = 0,
    max_bytes_per_second: float | None = None,
    codec: CodecOption = "auto",
    delta: DeltaOption = None,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    read_only: bool = False,
    places: Sequence[str | os.PathLike[str]] = (),
) -> Store:
    """Opens the store at a path or URL (``file://``, ``s3://bucket/prefix``, ``memory://``, any fsspec URL).

    Args:
        url: Where the store is.
        create: Make the store if there is none.
        storage_options: For fsspec: credentials, endpoint and the like.
        single_writer_unsafe: Write to a backend that does not create exclusively. The caller vouches that no other process
            writes: a second writer can silently lose commits.
        no_sync: Skip fsync on local files: a power failure may lose acknowledged snapshots.
        cache_dir: Where this host keeps its cache; by default the user's cache directory.
        rollback: What to do where the log has gone back, or holds another entry than this user has seen: ``"warn"`` tells it with a
            `LogChangedWarning`, each time that the store is opened, until somebody runs `tsck accept-log`; ``"error"`` refuses to read and
            to write until then.
        state_dir: Where this user notes the highest entry of the log that was seen; by default the user's state directory.
        host_memory_bytes: What captures of `Store.put_snapshot_async` may take in this process, all together; by default three quarters
            of what the container and the host have free at the first one, shared by the ranks of the host.
        staging: A disk of this host, where puts are durable first and restores find what they read before: a path, or `Staging`.
        min_free: What must stay free where the store is: ``"5%"``, ``"50GB"`` or bytes; checked here, at each put and while it writes.
        max_bytes_per_second: How fast a job may write to the store: its ranks share it evenly.
        codec: How blocks are encoded, always without loss: ``"raw"`` not at all; ``"fast"`` at about a gigabyte a second and core;
            ``"small"`` as small as they get; ``"auto"`` not at all, unless earlier puts of this handle have shown that an object store
            is so slow that puts and restores gain from ``"fast"``. Or a dict of globs over refs, of which the first that fits
            counts: ``{"runs/*": "small"}``.
        delta: Whether blocks may be stored as differences to those of the snapshot before, which must then be read: by default with
            ``"small"``; if so, ``"auto"`` means ``"fast"``. A number says after how many snapshots a block that changes all over
            is stored in full again, else 8.
        dead_after_seconds: With `group=`: when a rank is given up that is not heard of, instead of at the call's `timeout_seconds`. Each
            rank says every 10 s that it lives, from the first call with a group on and however slow it is: on a thread that needs the
            GIL, so more than the longest time for which one C call holds it. What rank 0 says counts for all.
        read_only: Open it to look: nothing in the store is ever changed, and no right to write there is needed. Whatever would change
            something is refused; for a type checker, what is returned has no such methods.
        places: Where packs may lie that `tier` moved, as URLs or absolute paths, with all that is inside of them. Other buckets at the
            store's endpoint, and what is in the folder around a local store, need not be said. What the log names besides is refused.

    Raises:
        NotAStoreError: nothing there, and `create` is false.
        InvalidUrlError: the URL cannot be understood.
        LogChangedError: with ``rollback="error"``, not here, but from every method that reads the log.
        UnsafeBackendError: the backend lets two writers create the same object.
        NoSpaceError: less than `min_free` is free, or the staging disk is too small.
    """
    return Store(
        open_engine(
            url,
            create=create,
            storage_options=storage_options,
            single_writer_unsafe=single_writer_unsafe,
            no_sync=no_sync,
            cache_dir=cache_dir,
            rollback=rollback,
            state_dir=state_dir,
            staging=staging,
            min_free=min_free,
            max_bytes_per_second=max_bytes_per_second,
            codec=codec,
            delta=delta,
            read_only=read_only,
            places=places,
        ),
        host_memory_bytes=host_memory_bytes,
        dead_after_seconds=dead_after_seconds,
    )


__all__ = ["ANY", "LAST_SEEN", "Store", "open_store"]

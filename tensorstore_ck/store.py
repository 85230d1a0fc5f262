"""`Store`, what users hold: public names, signatures and docstrings. Each method is one call into `session`, `maintenance` or gc.

What takes long to import, such as torch, is imported only by the methods that need it, so that a command starts fast.
"""

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast, overload

from tensorstore_ck.backend.staging import Staging
from tensorstore_ck.common.deprecation import renamed_argument, renamed_method
from tensorstore_ck.common.units import parse_rate
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.engine.write.publish import ANY, AnyHead
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE
from tensorstore_ck.engine.write.suspicious_save import Unchanged
from tensorstore_ck.events import Callback
from tensorstore_ck.format.codec import CodecName, CodecOption, DeltaOption
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.log import Rollback
from tensorstore_ck.log.quota import Quota
from tensorstore_ck.log.run_outcome import RunOutcome, last_runs
from tensorstore_ck.log.snapshot import PinnedSnapshot, Snapshot, SnapshotDetails
from tensorstore_ck.log.snapshot_log import SnapshotLog
from tensorstore_ck.maintenance import forget as forgetting
from tensorstore_ck.maintenance import refs
from tensorstore_ck.session import restoring
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.session.restoring import Restoring
from tensorstore_ck.session.save import DrainReport, OnFull, PendingSnapshot, Preemption
from tensorstore_ck.session.save.retrying import retrying
from tensorstore_ck.session.save_options import LAST_SEEN, LastSeen
from tensorstore_ck.session.session import Session

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.gc import FreedSnapshots, GcOptions, GcReport
    from tensorstore_ck.gc.recode import RecodeReport
    from tensorstore_ck.gc.report import Progress as GcProgress
    from tensorstore_ck.gc.tiering import TierReport
    from tensorstore_ck.gc.usage import Usage
    from tensorstore_ck.log.retention import Policy
    from tensorstore_ck.maintenance.advise import Advice
    from tensorstore_ck.maintenance.apply_policies import RetentionReport
    from tensorstore_ck.maintenance.bisect_history import Bisection, Tested
    from tensorstore_ck.maintenance.describe import SnapshotDiff
    from tensorstore_ck.maintenance.forget import Forgotten
    from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport, RepairReport
    from tensorstore_ck.state import LazySnapshot, LoadReport, StateCheck
    from tensorstore_ck.state.statistics import ChangeStatistics, TensorStatistics

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

    def __dir__(self) -> list[str]:
        """The public names, without earlier spellings, which are functions of another name."""
        return sorted(name for name, what in vars(Store).items() if not name.startswith("_") and getattr(what, "__name__", name) == name)

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
        """Finishes the saves in progress, and releases connections, memory and the cache; idempotent.

        Raises:
            StoreError: what a save failed with that nobody waited for.
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
        triggers: Sequence[str] = (),
        epoch: float | None = None,
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
            metadata: What the run knows: config, learning rate, git commit. At most 1 MiB; part of the root.
            triggers: Why it is saved, for retention (see `set_policy`): names of triggers. ``["at_steps"]`` makes it a milestone, which
                policies keep by default. `Checkpointer` passes those that fired.
            epoch: The number of completed epochs, for the policy `keep_epochs`.
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
        """As `put_snapshot`, in the background: returns as soon as `state` may be mutated, and a thread does the rest.

        The state is copied into buffers that are reused; `host_memory_bytes` of `open` bounds them. Saves of one handle are published in
        the order of their calls. ``wait()`` raises the error of a failed save; if nobody waits, the handle's next save does.

        Args:
            state: See `put_snapshot`.
            ref: See `put_snapshot`.
            step: See `put_snapshot`.
            metrics: See `put_snapshot`.
            metadata: See `put_snapshot`.
            triggers: See `put_snapshot`.
            epoch: See `put_snapshot`.
            expect: See `put_snapshot`.
            parent: See `put_snapshot`.
            group: See `put_snapshot`.
            rank_state: See `put_snapshot`.
            frozen: See `put_snapshot`; these tensors are not copied either.
            codec: See `put_snapshot`.
            delta: See `put_snapshot`.
            unchanged: See `put_snapshot`; checked on the thread that stores the state.
            verify_capture: As in `put_snapshot`, but compares the copies, before this returns. Tensors on CUDA devices are not compared:
                their copies are made in the order of their stream.
            on_full: What to do when the buffers of earlier saves leave no memory: ``block`` until there is; ``skip`` this save; or
                ``replace`` the oldest save that waits in the queue. With `group`, rank 0 decides for all. The returned object, a
                warning in the log and an event report a dropped save.
            timeout_seconds: As in `put_snapshot`; time in the queue does not count.

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
            timeout_seconds=timeout_seconds,
            step=step,
            metrics=metrics,
            metadata=metadata,
            triggers=triggers,
            epoch=epoch,
            expect=expect,
            parent=parent,
            codec=codec,
            delta=delta,
            unchanged=unchanged,
            verify_capture=verify_capture,
        )

    def retrying(self, call: Callable[[], T], *, attempts: int = 3, pause_seconds: float = 1.0) -> T:
        """Calls `call` until it succeeds, while trying again can help (see `errors`, "retry"), and returns its result.

        ::

            snapshot = store.retrying(lambda: store.put_snapshot(state, ref="runs/gpt", step=step, group=group))

        Transient errors are tried again. If a save may or may not have happened, the log is read first: a snapshot that was published is
        returned, and not saved again. Any other error is raised at once, such as that of a save to a ref that another process moved.
        With ``group=`` all ranks call this: they raise the same errors, and so try again together.

        Args:
            call: A save, a restore or any other use of this store; an asynchronous save with its ``wait()``.
            attempts: How often it is called, at most.
            pause_seconds: Before the second call; twice as long before each further one.

        Raises:
            StoreError: what the last call raised.
        """
        return retrying(self.session.context, call, attempts=attempts, pause_seconds=pause_seconds)

    def pending(self) -> list[PendingSnapshot]:
        """The saves in progress, oldest first."""
        return self.session.queue.pending()

    def drain(self, deadline_seconds: float | None = None) -> DrainReport:
        """Waits for the saves in progress, and cancels those that are not published by the deadline. Reports which snapshot is safe."""
        return self.session.queue.drain(deadline_seconds)

    def finish_staged(
        self, address: str, group: "ProcessGroup | DeviceMesh | None" = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Waits for the saves of this handle, and for earlier staged saves of this host, or of the hosts of `group`. Restores call it.

        Does not wait for uploads if `address` means a staged snapshot, such as ``runs/gpt^staged``.
        """
        self.session.finish_staged(address, process_group(group), timeout_seconds)

    def on_preemption(self, signal_number: int, *, deadline_seconds: float) -> Preemption:
        """Lets a signal such as ``signal.SIGTERM`` end the job in order: see `Preemption`. On the main thread only."""
        return Preemption(self.session.queue, signal_number, deadline_seconds=deadline_seconds)

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Calls ``callback(event)`` at each `Event` of this handle's saves; returns a function that unsubscribes.

        An asynchronous save is ``captured`` on the caller's thread, and has its other events on threads of its own: if it is quick, these
        may come first.
        """
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
        """Reports what `put_snapshot(state)` would do: what cannot be stored, sizes, free space, expected time. Publishes nothing.

        Args:
            state: See `put_snapshot`.
            group: See `put_snapshot`. All ranks call this, and are compared as at the first save: if their states cannot be one snapshot,
                that is a problem on all.
            rank_state: See `put_snapshot`.
            timeout_seconds: With `group`: how long to wait for the other ranks.
        """
        return self.session.check(state, group=group, rank_state=rank_state, timeout_seconds=timeout_seconds)

    # --- restore ----------------------------------------------------------------------------------------------------------

    @renamed_argument(allow_bad="allow_marked")
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
        allow_marked: bool = False,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Any:
        """Restores the snapshot at `address`, every block verified. Waits first for the asynchronous saves of this handle.

        Args:
            address: A branch, tag, root, root prefix, ``ref@step``, ``ref~n``; or ``ref^staged``, for what these hosts have staged.
            into: A state of the same form, whose tensors are filled in place without a second copy. Everything is checked
                before anything is read; if reading then fails, its tensors are undefined.
            select: Globs over names such as ``model.*``; what matches none is left out (None inside lists and tuples).
            strict: Whether names that are missing, unexpected or of another shape or dtype are an error; if false,
                what fits is loaded and `report`, or a warning, lists the rest. With `group`, a name is unexpected if no rank has it.
            rename: Prefixes of stored names -> prefixes of names in `into`; or a function of the name (None: leave it out).
            dtype: Floating-point tensors are converted to it, except those of one element in an optimizer's state, such as step counters.
            device: Where new tensors are made.
            report: Filled with the differences when `strict` is false.
            group: A process group, or a one-dimensional DeviceMesh, whose ranks all restore the snapshot that rank 0 finds, or none does.
                Each passes its own side of `into`.
            broadcast: With `group`: tensors that all ranks restore in full, as under DDP, are read by one rank each, and go to the
                others by a broadcast: for networks that are faster than the store.
            timeout_seconds: With `group`: how long to wait for the other ranks.
            allow_marked: Also restore a snapshot that was marked ``bad`` by a user, or ``damaged`` by `tsck fsck --repair`.

        Raises:
            NotFoundError: nothing at that address.
            SnapshotMarkedBadError: it was marked ``bad`` or ``damaged``.
            MismatchError: it does not fit `into` or `select`.
            DamageError: stored data is damaged; nothing wrong is returned. With `group` all ranks raise these errors if one meets them.
            SnapshotAbortedError: with `group`: a rank failed in another way, or was not there in time.
        """
        return restoring.checkout(
            self.session,
            address,
            group=group,
            allow_marked=allow_marked,
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

    @renamed_argument(allow_bad="allow_marked")
    def restoring(
        self,
        address: str,
        read: Callable[[Restoring], T],
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        broadcast: bool = False,
        allow_marked: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> tuple[T, Snapshot]:
        """Calls `read` on the snapshot at `address`, on all ranks of `group` or on none; for what is built on top of a store.

        An error that `read` raises on one rank ends the restore on all of them at once. Otherwise as `checkout`.

        Returns:
            What `read` returned, and the snapshot.
        """
        return restoring.restoring(
            self.session,
            address,
            read,
            group=group,
            broadcast=broadcast,
            allow_marked=allow_marked,
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
        """What a rank saved as ``rank_state=``: this rank's own, if the number of ranks is the same.

        Args:
            address: As in `checkout`.
            rank: The rank whose state to take, whatever the number of ranks.
            rank_state_map: If the number of ranks differs, maps this rank and the number of ranks that saved to the rank whose state to
                take, such as ``lambda rank, ranks: rank % ranks``. If it returns several ranks, their states come as a list.
            group: All its ranks restore their states, or none; without it there is one rank.
            timeout_seconds: With `group`: how long to wait for the other ranks.

        Raises:
            NotFoundError: no rank states were saved, or there is no such rank.
            MismatchError: another number of ranks saved them, and neither `rank` nor `rank_state_map` is given.
        """
        return restoring.rank_state(
            self.session,
            address,
            rank,
            rank_state_map=rank_state_map,
            group=group,
            timeout_seconds=timeout_seconds,
        )

    def random_streams(
        self, address: str, *, group: "ProcessGroup | DeviceMesh | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Streams:
        """Seeds of new random streams for this rank, derived from a snapshot that another number of ranks saved.

        Raises:
            FormatVersionError: the snapshot names a rule that this build does not know.
        """
        return restoring.streams(self.session, address, group=group, timeout_seconds=timeout_seconds)

    def open_snapshot(self, address: str) -> "AbstractContextManager[LazySnapshot]":
        """A lazy mapping from tensor names to tensors: ``s["model.weight"][0:128]`` reads only the blocks that it needs."""
        return restoring.open_lazily(self.session, address)

    # --- look -------------------------------------------------------------------------------------------------------------

    def resolve(self, address: str) -> Snapshot:
        """The snapshot at an address."""
        return Snapshot.from_info(self.session.resolve(address).info)

    def log(self, ref: str | None = None, *, limit: int | None = None) -> SnapshotLog:
        """The history of a branch (a tag: its one snapshot), newest first; of all branches together without `ref`.

        The list has `to_pandas`, and notebooks show it as a table.
        """
        return refs.history(self.engine, ref, limit)

    def plot(self, metric: str, ref: str | None = None, *, axes: "Axes | None" = None) -> "Axes":
        """Draws a metric over the steps of a branch (of all branches without `ref`) with matplotlib, the extra ``plot``.

        Where the metric is NaN or infinite, the line has a gap, and a red line from top to bottom.

        Args:
            metric: Its name, such as ``"loss"``.
            ref: The branch.
            axes: Draw into these; by default into a new figure of pyplot, which notebooks show.

        Raises:
            NotFoundError: no snapshot has that metric.
            MissingExtraError: matplotlib is not installed.

        Returns:
            The axes, to which more can be added.
        """
        from tensorstore_ck.maintenance.metric_plot import draw_points, metric_points, shown_axes  # noqa: PLC0415

        points = metric_points(self.log(ref), metric)
        axes = shown_axes() if axes is None else axes
        draw_points(axes, points, metric)
        return axes

    def metadata(self, address: str) -> dict[str, Any]:
        """The metadata that a snapshot was saved with. Reads one small object, where `show` reads the tables of all ranks."""
        return self.engine.read_metadata(self.session.resolve(address).info)

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

    def statistics(self, address: str, select: Sequence[str] | None = None, bins: int = 0) -> "list[TensorStatistics]":
        """Minimum, maximum, mean, standard deviation, norm, and counts of NaN, infinity and zero of each tensor, in the state's order.

        Reads and verifies the tensors' data, piece by piece: some 200 MiB are in memory, whatever the size of the snapshot; but a strided
        view of another tensor, such as a transposed one, is read whole. All numbers are float64: see `TensorStatistics`. States of single
        ranks (``rank_state=``) are left out.

        Args:
            address: The snapshot; also one that is marked.
            select: Globs over names such as ``model.*``, as in `checkout`.
            bins: Also a histogram with so many bins of each tensor; the data is then read twice.

        Raises:
            MismatchError: a glob fits nothing.
            DamageError: stored data is damaged.
        """
        from tensorstore_ck.maintenance.describe import statistics  # noqa: PLC0415

        return statistics(self.engine, self.session.resolve(address).info, select, bins)

    def change_statistics(self, old: str, new: str, select: Sequence[str] | None = None) -> "list[ChangeStatistics]":
        """By how much each tensor that differs changed between two snapshots; the largest relative change comes first, and tensors that
        were reshaped, added or removed come last.

        Only tensors with a block that differs are read, in both snapshots, piece by piece as in `statistics`. How the change is measured:
        see `ChangeStatistics`.

        Args:
            old: The address of the snapshot to compare with.
            new: The address of the other one.
            select: See `statistics`; a glob may fit names of either snapshot.

        Raises:
            MismatchError: a glob fits nothing.
            DamageError: stored data is damaged.
        """
        from tensorstore_ck.maintenance.describe import change_statistics  # noqa: PLC0415

        return change_statistics(self.engine, self.session.resolve(old).info, self.session.resolve(new).info, select)

    def find_nan(self, address: str, select: Sequence[str] | None = None) -> str | None:
        """The name of a snapshot's first tensor that has a NaN or an infinity; None if no tensor has one. Reads no tensor after it.

        Args:
            address: See `statistics`.
            select: See `statistics`.

        Raises:
            MismatchError: a glob fits nothing.
            DamageError: stored data is damaged.
        """
        from tensorstore_ck.maintenance.describe import find_nan  # noqa: PLC0415

        return find_nan(self.engine, self.session.resolve(address).info, select)

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

        The search is right only if all snapshots after the first bad one are bad; else it finds one of the places where a bad one follows
        a good one. Snapshots that training was taken back from are left out. What may still be the answer is pinned, under an owner of
        its own, until the search ends; what is freed nevertheless counts as not testable.

        Args:
            ref: The branch.
            is_bad: Tests a snapshot; None: it cannot be tested. The search goes around it, and the answer may then be a range.
            good: The address of a snapshot before the bad one; by default the oldest one of the branch's history that can be tested.
            bad: The address of a bad snapshot; by default the newest one that can be tested.
            pin_for: How long a test may take, about. The pins of a process that was killed last as long.
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
            tested=tested or (lambda each: None),
        )

    def usage(self, *, per_snapshot: bool = False) -> "Usage":
        """Logical, unique, stored, shared and exclusive bytes, per ref, job and pack, and in all; reads no tensor data.

        Args:
            per_snapshot: Also the size of each snapshot, and what forgetting it would free.
        """
        from tensorstore_ck.gc.usage import measure_usage  # noqa: PLC0415

        return measure_usage(self.engine.of_store(), per_snapshot=per_snapshot)

    def last_runs(self) -> dict[str, RunOutcome]:
        """``gc``, ``fsck`` -> the last run of each, by any host: when it ended, its outcome, and what it freed or found.

        A run whose process could not write to the log is not among them; neither are dry runs, nor `free_dropped`.
        """
        return last_runs(self.engine.log.newest_view())

    @renamed_argument(
        stall="stall_seconds", lag="lag_seconds", restart="restart_seconds", mtbf="mtbf_seconds", bytes_per_second="bandwidth"
    )
    def advise(
        self,
        ref: str,
        *,
        stall_seconds: float | None = None,
        lag_seconds: float | None = None,
        restart_seconds: float | None = None,
        mtbf_seconds: float | None = None,
        bandwidth: float | str | None = None,
        bytes_per_day: float | None = None,
    ) -> "Advice":
        """How often the job of a branch should save to lose the least time, by its history and measured costs.

        Args:
            ref: The branch.
            stall_seconds: How long a save blocks the training; None: as `Checkpointer` noted with the newest snapshot.
            lag_seconds: From then until the snapshot is published; None: as `Checkpointer` noted, or 0.
            restart_seconds: From a failure until training continues; None: the restore time that `Checkpointer` noted, or five minutes.
            mtbf_seconds: Mean time between failures; None: by how often the run was resumed, or four hours.
            bandwidth: Of the store, such as ``"1GB"`` a second, or bytes per second: the advice then says whether it is enough.
            bytes_per_day: How much the store may grow.
        """
        from tensorstore_ck.maintenance.advise import advise  # noqa: PLC0415

        return advise(
            self.engine,
            ref,
            stall=stall_seconds,
            lag=lag_seconds,
            restart=restart_seconds,
            mtbf=mtbf_seconds,
            bytes_per_second=None if bandwidth is None else parse_rate(bandwidth),
            bytes_per_day=bytes_per_day,
        )

    def fsck(
        self, options: "FsckOptions | None" = None, *, read_data: bool = False, progress: Progress | None = None, record: bool = True
    ) -> "FsckReport":
        """Checks the whole store's structure, and as much data as asked for: `read_data`, or more in `options`. Repairs nothing.

        An entry in the log says what it found: see `last_runs`. There is none if this process may not write, if the log is damaged, or with
        ``record=False``: then nothing in the store changes.
        """
        from tensorstore_ck.maintenance.fsck import FsckOptions, run_fsck  # noqa: PLC0415
        from tensorstore_ck.maintenance.recorded_runs import recorded_fsck  # noqa: PLC0415

        options = options or FsckOptions(read_data=read_data, progress=progress)
        return (recorded_fsck if record else run_fsck)(self.engine.of_store(), options)

    @_changes
    def repair(self, *, read_data: bool = False, other: "Store | None" = None) -> "RepairReport":
        """Repairs what `fsck` finds: rebuilds derived objects, and damaged objects from other copies, here or in another store.

        Snapshots that stay damaged are marked, so that `checkout` refuses them. Nothing is deleted.
        """
        from tensorstore_ck.maintenance.fsck import FsckOptions  # noqa: PLC0415
        from tensorstore_ck.maintenance.recorded_runs import recorded_repair  # noqa: PLC0415

        return recorded_repair(self.engine.of_store(), FsckOptions(read_data), other=None if other is None else other.engine.of_store())

    # --- refs -------------------------------------------------------------------------------------------------------------

    @_changes
    def branch(self, name: str, at: str) -> Snapshot:
        """Makes branch `name` at a snapshot."""
        return self.session.fence.note_moved(name, refs.branch(self.engine, name, at))

    @_changes
    def reset(self, name: str, to: str) -> Snapshot:
        """Moves an existing branch to any snapshot; its history keeps where it was."""
        return self.session.fence.note_moved(name, refs.reset(self.engine, name, to))

    @_changes
    def tag(self, name: str, at: str) -> Snapshot:
        """Names a snapshot permanently: a tag never moves."""
        return refs.tag(self.engine, name, at)

    @_changes
    def untag(self, name: str) -> None:
        """Removes a tag; a snapshot that nothing else holds is treated as forgotten."""
        refs.untag(self.engine, name)

    def branches(self) -> dict[str, Snapshot]:
        """Every branch, and where it is."""
        return refs.branches(self.engine)

    def tags(self) -> dict[str, Snapshot]:
        """Every tag, and where it is."""
        return refs.tags(self.engine)

    @_changes
    def annotate(self, address: str, metrics: Mapping[str, float]) -> Snapshot:
        """Adds metrics after the save; an existing name gets the new number."""
        return refs.annotate(self.engine, address, metrics)

    @_changes
    def mark(self, address: str, mark: str = "bad", *, reason: str = "") -> Snapshot:
        """Marks a snapshot ``bad``, so that `checkout` refuses it; the empty mark removes the mark."""
        return refs.mark(self.engine, address, mark, reason)

    # --- what stays, and what goes ----------------------------------------------------------------------------------------

    @_changes
    def pin(self, address: str, *, reason: str = "", owner: str | None = None, expires: "str | float | None" = None) -> Snapshot:
        """Holds a snapshot until it is unpinned or `expires` has passed. An owner's second pin replaces the first.

        Args:
            address: The snapshot.
            reason: Shown in the list of pins.
            owner: Who holds it; by default this user.
            expires: How long the pin lasts: ``"30d"``, or seconds.
        """
        return refs.pin(self.engine, address, reason=reason, owner=owner, expires=expires)

    @_changes
    def unpin(self, address: str, *, owner: str | None = None) -> None:
        """Removes this user's pin, or `owner`'s, from a snapshot, and from any other one that has the same root."""
        refs.unpin(self.engine, address, owner)

    def pins(self) -> tuple[PinnedSnapshot, ...]:
        """Every pin."""
        return refs.pins(self.engine)

    def watch(self, ref: str, **options: Any) -> Generator[Snapshot]:
        """Yields each new snapshot of a branch, pinned until the next one is asked for: for evaluation jobs.

        Args:
            ref: The branch; it need not exist yet.
            options: ``since_step=0``: also existing snapshots, from that step on; ``newest_only=True``: if several came in the meantime,
                only the newest; ``pin_for="1d"``: how long a pin lasts at most, None: no pins; ``poll_seconds=2.0``; ``until=``: a
                function whose true result ends the watch.
        """
        from tensorstore_ck.maintenance.watch import watch  # noqa: PLC0415

        with closing(watch(self.engine.of_store(), ref, **options)) as found:
            for info in found:
                yield Snapshot.from_info(info)

    @_changes
    def forget(self, *addresses: str) -> "tuple[Forgotten, ...]":
        """Takes snapshots out of their branches' histories, or whole branches and tags. `gc` frees them after the undo window.

        Args:
            addresses: ``ref@step``, ``ref~n`` or a root for one snapshot; a ref for all of it. Tags, pins and other branches keep
                what they hold.
        """
        found = forgetting.forget(self.engine, addresses)
        self.session.fence.drop(each.ref for each in found if each.kind == "branch")
        return found

    @_changes
    def undo(self, address: str | None = None) -> "tuple[Forgotten, ...]":
        """Restores what was forgotten last, or last of a ref, or one snapshot: until gc ends the undo window."""
        return forgetting.undo(self.engine, address)

    def forgotten(self) -> "tuple[Forgotten, ...]":
        """What `undo` can restore, newest first."""
        return forgetting.forgotten(self.engine)

    @_changes
    def set_policy(self, glob: str, **rules: object) -> "Policy":
        """Sets retention rules for branches, in the store: applied by each save of any process, and by `retain`.

        A rule that names what no snapshot of a branch has, such as a mistyped metric, expires nothing that it could keep: an
        `UnmatchedRuleWarning` lists what there is, here and at each save.

        A snapshot stays if any rule of any policy for its branch keeps it and the limits allow it. The newest snapshot, the newest other
        one that is not marked, and tagged and pinned snapshots always stay. `undo` can restore the others for a day.

        Args:
            glob: Which branches, e.g. ``runs/*``. Replaces a policy for the same glob.
            rules: ``keep_last=5``; ``keep_best=(3, "val_loss", "min")``, or several of these; ``keep_every=1000`` steps: the first at or
                after each multiple; ``keep_every_seconds="6h"``; ``keep_steps=[1000, 5000]``; ``keep_first=True``; ``keep_younger="7d"``;
                ``keep_epochs=5``, as `keep_every`; ``keep_triggers=["every_epochs"]``: what these triggers saved.
                What `at_steps` and `at_fraction` saved is kept, too, without ``keep_milestones=False``.
                Limits: ``expire_after="30d"``; ``max_bytes="2TB"`` of the store, oldest first (by `retain` only).
                Age, by `tier`: ``recode_after="7d"``; ``move_after=("30d", "s3://cold/ckpt")``, or several of these.

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

    def policies(self) -> "dict[str, Policy]":
        """Glob -> policy."""
        from tensorstore_ck.maintenance.apply_policies import policies  # noqa: PLC0415

        return policies(self.engine)

    @_changes
    def set_quota(self, glob: str, *, warn: int | str | None = None, refuse: int | str | None = None) -> Quota:
        """Limits what the snapshots of branches add to the store, in the store: saves of any process keep to it.

        A snapshot counts with its `Snapshot.new_bytes`, for the branch of its put, until no branch, tag, pin or undo window holds it.

        Args:
            glob: Which branches, all together, e.g. ``runs/*``. Replaces a quota for the same glob; several may apply to a branch.
            warn: Bytes, or ``"1TB"``: a save that brings them there, or beyond, warns with a `QuotaWarning`, once a process and branch.
            refuse: If they use so much already, a save fails with a `QuotaExceededError`.

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

    def quotas(self) -> dict[str, Quota]:
        """Glob -> quota, with what is used of it."""
        from tensorstore_ck.maintenance.quotas import quotas  # noqa: PLC0415

        return quotas(self.engine)

    def explain_retention(self, ref: str) -> dict[str, tuple[str, ...]]:
        """Id of each snapshot of a branch -> the tags, pins and rules that keep it. Ignores limits of bytes.

        Warns of rules that match nothing.
        """
        from tensorstore_ck.maintenance.apply_policies import kept_by  # noqa: PLC0415

        return kept_by(self.engine, ref)

    @_changes
    def apply_policies(self, *refs: str, dry_run: bool = False, rules: Mapping[str, object] | None = None) -> "RetentionReport":
        """Applies the policies, in one log entry; reports for each snapshot why it stays or goes, and what that frees.

        Args:
            refs: These branches; none: all.
            dry_run: Only report.
            rules: Report what these rules would do, instead of the policies that are set; needs `dry_run`.
        """
        from tensorstore_ck.maintenance.apply_policies import retain  # noqa: PLC0415

        return retain(self.engine.of_store(), refs, dry_run=dry_run, rules=rules)

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
        """Re-encodes snapshots so that they use less space, for those that are kept and seldom read. Roots do not change.

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
            claim_locations: Claim the moved packs for this store: it was moved or restored itself, and no other copy of it is in use.
            rate_limit: Limits reads, and writes, to this rate.
            progress: Called with (step, done, total).

        Raises:
            GcRefusedError: another store, of which this may be a copy, moved the packs.
            PlaceUnavailableError: a location cannot be used, or is not mounted.
        """
        from tensorstore_ck.gc.tiering import run_tiering  # noqa: PLC0415

        engine = self.engine.of_store().limited_to(rate_limit)
        return run_tiering(engine, dry_run=dry_run, claim_locations=claim_locations, progress=progress)

    streams = renamed_method("streams", random_streams)
    kept_by = renamed_method("kept_by", explain_retention)
    retain = renamed_method("retain", apply_policies)
    tier = renamed_method("tier", migrate_tiers)


class ReadOnlyStore(Protocol):
    """The type of a store that was opened read-only. At run time it is a `Store` whose other methods raise a `PermissionDeniedError`."""

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
        allow_marked: bool = False,
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
        allow_marked: bool = False,
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
    def random_streams(
        self, address: str, *, group: "ProcessGroup | DeviceMesh | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Streams: ...
    def retrying(self, call: Callable[[], T], *, attempts: int = 3, pause_seconds: float = 1.0) -> T: ...
    def open_snapshot(self, address: str) -> "AbstractContextManager[LazySnapshot]": ...
    def finish_staged(
        self, address: str, group: "ProcessGroup | DeviceMesh | None" = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None: ...

    # --- look ---------------------------------------------------------------------------------------------------------

    def resolve(self, address: str) -> Snapshot: ...
    def log(self, ref: str | None = None, *, limit: int | None = None) -> SnapshotLog: ...
    def plot(self, metric: str, ref: str | None = None, *, axes: "Axes | None" = None) -> "Axes": ...
    def metadata(self, address: str) -> dict[str, Any]: ...
    def show(self, address: str) -> SnapshotDetails: ...
    def diff(self, old: str, new: str) -> "SnapshotDiff": ...
    def statistics(self, address: str, select: Sequence[str] | None = None, bins: int = 0) -> "list[TensorStatistics]": ...
    def change_statistics(self, old: str, new: str, select: Sequence[str] | None = None) -> "list[ChangeStatistics]": ...
    def find_nan(self, address: str, select: Sequence[str] | None = None) -> str | None: ...
    def bisect(
        self,
        ref: str,
        is_bad: Callable[[Snapshot], bool | None],
        *,
        good: str | None = None,
        bad: str | None = None,
        unpinned_unsafe: Literal[True],
        tested: "Callable[[Tested], object] | None" = None,
    ) -> "Bisection": ...
    def usage(self, *, per_snapshot: bool = False) -> "Usage": ...
    def last_runs(self) -> dict[str, RunOutcome]: ...
    def advise(
        self,
        ref: str,
        *,
        stall_seconds: float | None = None,
        lag_seconds: float | None = None,
        restart_seconds: float | None = None,
        mtbf_seconds: float | None = None,
        bandwidth: float | str | None = None,
        bytes_per_day: float | None = None,
    ) -> "Advice": ...
    def fsck(self, options: "FsckOptions | None" = None, *, read_data: bool = False, progress: Progress | None = None) -> "FsckReport": ...
    def branches(self) -> dict[str, Snapshot]: ...
    def tags(self) -> dict[str, Snapshot]: ...
    def pins(self) -> tuple[PinnedSnapshot, ...]: ...
    def policies(self) -> "dict[str, Policy]": ...
    def quotas(self) -> dict[str, Quota]: ...
    def explain_retention(self, ref: str) -> dict[str, tuple[str, ...]]: ...
    def forgotten(self) -> "tuple[Forgotten, ...]": ...
    def watch(self, ref: str, *, pin_for: None, **options: Any) -> Generator[Snapshot]: ...

    # --- what would be done -------------------------------------------------------------------------------------------

    def apply_policies(self, *refs: str, dry_run: Literal[True], rules: Mapping[str, object] | None = None) -> "RetentionReport": ...
    def gc(self, options: "GcOptions | None" = None, *, dry_run: Literal[True], progress: "GcProgress | None" = None) -> "GcReport": ...
    def recode(
        self,
        *addresses: str,
        codec: str = "small",
        older_than: "str | float | None" = None,
        dry_run: Literal[True],
        rate_limit: float | str | None = None,
        progress: "GcProgress | None" = None,
    ) -> "RecodeReport": ...
    def migrate_tiers(
        self, *, dry_run: Literal[True], rate_limit: float | str | None = None, progress: "GcProgress | None" = None
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
    rate_limit: float | str | None = None,
    codec: CodecOption = "auto",
    delta: DeltaOption = None,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    read_only: Literal[False] = False,
    places: Sequence[str | os.PathLike[str]] = (),
) -> Store: ...
@renamed_argument(max_bytes_per_second="rate_limit")
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
    rate_limit: float | str | None = None,
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
        rollback: What to do if the log went back, or has another entry than this user has seen: ``"warn"`` with a `LogChangedWarning`,
            each time that the store is opened, until somebody runs `tsck accept-log`; ``"error"`` refuses to read and to write until then.
        state_dir: Where this user notes the highest entry of the log that was seen; by default the user's state directory.
        host_memory_bytes: Memory for all captures of `Store.put_snapshot_async` in this process; by default three quarters of what the
            container and the host have free at the first one, shared by the ranks of the host.
        staging: A disk of this host, where saves are durable first, and which caches what restores read: a path, or `Staging`.
        min_free: Space that must stay free in the store: ``"5%"``, ``"50GB"`` or bytes; checked here, at each save and while it writes.
        rate_limit: How fast a job may write to the store: its ranks share it evenly.
        codec: How blocks are encoded, always without loss: ``"raw"`` not at all; ``"fast"`` at about a gigabyte a second and core;
            ``"small"`` as small as possible; ``"auto"`` not at all, unless earlier saves of this handle have shown that an object store
            is so slow that saves and restores gain from ``"fast"``. Or a dict of globs over refs, whose first match counts:
            ``{"runs/*": "small"}``.
        delta: Whether blocks may be stored as differences to those of the snapshot before, which must then be read: by default with
            ``"small"``; if so, ``"auto"`` means ``"fast"``. A number: after this many snapshots, instead of 8, a block that changes
            everywhere is stored in full again.
        dead_after_seconds: With `group=`: how long a rank may be silent before it counts as dead, instead of the call's
            `timeout_seconds`. Each rank sends a sign of life every 10 s from the first call with a group, on a thread that needs the GIL:
            so this must be longer than one C call holds it. The value of rank 0 counts for all.
        read_only: Nothing in the store is ever changed, and no right to write there is needed. Methods that would change something are
            refused; for a type checker, the returned object does not have them.
        places: Locations of packs that `tier` moved, as URLs or absolute paths, with everything inside them. Other buckets at the store's
            endpoint, and the folder around a local store, are always allowed. Other locations that the log names are refused.

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
            rate_limit=rate_limit,
            codec=codec,
            delta=delta,
            read_only=read_only,
            places=places,
        ),
        host_memory_bytes=host_memory_bytes,
        dead_after_seconds=dead_after_seconds,
    )


open = open_store  # noqa: A001 - `tsck.open` reads as `gzip.open` does

__all__ = ["ANY", "LAST_SEEN", "Store", "open", "open_store"]

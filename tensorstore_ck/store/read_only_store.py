"""`ReadOnlyStore`: what restores from a store, or looks at it, and changes nothing."""

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.common.units import parse_rate
from tensorstore_ck.common.user_frames import short_store_errors
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.snapshot_reader import open_snapshot
from tensorstore_ck.errors import InputError, StoreError
from tensorstore_ck.events import Callback
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.log.maintenance_outcome import RunOutcome, last_runs
from tensorstore_ck.log.quota import Quota, all_quotas
from tensorstore_ck.log.snapshot import PinnedSnapshot, Snapshot, SnapshotDetails, pinned_snapshots
from tensorstore_ck.log.snapshot_log import SnapshotLog, SnapshotsByName
from tensorstore_ck.maintenance import forget as forgetting
from tensorstore_ck.maintenance import list_refs
from tensorstore_ck.session import restoring
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.session.restoring import Restoring
from tensorstore_ck.session.save.retrying import retrying
from tensorstore_ck.session.session import Session

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.feed import Feed
    from tensorstore_ck.gc import GcOptions, GcReport
    from tensorstore_ck.gc.recode import RecodeReport
    from tensorstore_ck.gc.report import Progress as GcProgress
    from tensorstore_ck.gc.tiering import TierReport
    from tensorstore_ck.gc.usage import Usage
    from tensorstore_ck.log.ref_verifier import RefSignature
    from tensorstore_ck.log.retention import Policy
    from tensorstore_ck.maintenance.advise import Advice
    from tensorstore_ck.maintenance.apply_policies import RetentionReport
    from tensorstore_ck.maintenance.bisect_history import Bisection, Tested
    from tensorstore_ck.maintenance.describe import SnapshotDiff
    from tensorstore_ck.maintenance.describe.contained import Containment
    from tensorstore_ck.maintenance.forget import Forgotten
    from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport
    from tensorstore_ck.state import LazySnapshot, LoadReport
    from tensorstore_ck.state.statistics import ChangeStatistics, TensorStatistics

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
_HINTS: Final = {
    "save": "put_snapshot(STATE, ref=REF)",
    "put": "put_snapshot(STATE, ref=REF)",
    "commit": "put_snapshot(STATE, ref=REF)",
    "load": "checkout(ADDRESS)",
    "restore": "checkout(ADDRESS)",
    "get": "checkout(ADDRESS)",
    "delete": "forget(ADDRESS)",
    "remove": "forget(ADDRESS)",
    "list": "log(REF) or branches()",
    "refs": "branches() or tags()",
}
"""Names that users of other libraries type -> what they mean."""


@short_store_errors
class ReadOnlyStore:
    """The methods of a store that was opened read-only; `Store` adds those that change a store.

    ``tsck.open(url, read_only=True)`` returns a `Store` whose changing methods raise a `PermissionDeniedError`. For a type checker it is
    this class, which has none of them.
    """

    def __init__(self, engine: Engine, *, host_memory_bytes: int | None = None, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        self._session = Session(engine, host_memory_bytes=host_memory_bytes, dead_after_seconds=dead_after_seconds)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def _repr_html_(self) -> str:
        try:
            return self.branches().table(repr(self))
        except StoreError as exc:  # a notebook shows a closed store, too
            return html_table(repr(self), ("cannot be read now",), [(str(exc),)])

    if not TYPE_CHECKING:  # for a type checker, any name would exist

        def __getattr__(self, name: str) -> object:
            missing = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _HINTS:
                raise AttributeError(f"{missing}: you may want {_HINTS[name]}", name="", obj=self)  # else Python guesses, too
            raise AttributeError(missing, name=name, obj=self)  # Python adds the name that is most like it

    def __dir__(self) -> list[str]:
        """The public names, without earlier spellings, which are functions of another name."""
        names = (name for name in dir(type(self)) if not name.startswith("_"))
        return [name for name in names if getattr(getattr(type(self), name), "__name__", name) == name]

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self._session.engine.backend.url

    @property
    def engine(self) -> Engine:
        """Internal: what is built on top of a store uses `store/internals.py`."""
        return self.session.engine

    @property
    def session(self) -> Session:
        """Internal: what this handle has seen of refs, its process groups and its queue of saves."""
        if self._is_closed:
            error = InputError(f"the store at {self.url} was closed: open it again with tsck.open", object_id=self.url)
            error.retry = "after_reopen"
            raise error
        return self._session

    def close(self) -> None:
        """Finishes the saves in progress, and releases connections, memory and the cache; idempotent.

        Raises:
            StoreError: what a save failed with that nobody waited for.
        """
        try:
            self._session.close()
        except Exception:
            self._is_closed = True
            raise
        self._is_closed = True  # after Ctrl-C it stays open, as its saves go on

    # --- restore -------------------------------------------------------------------------------------------------------

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
            address: A branch, tag, root, root prefix, ``ref@step``, ``ref~n``, ``ref^best:val_loss`` (lowest; with ``:max``
                highest); or ``ref^staged``, for what these hosts have staged.
            into: A state of the same form, whose tensors are filled in place without a second copy. Everything is checked
                before anything is read; if reading then fails, its tensors are undefined.
            select: Globs over names such as ``model.*``; what matches none is left out (None inside lists and tuples).
                An object of a dataclass or registered type is restored whole.
            strict: Whether names that are missing, unexpected, of several values or of another shape or dtype are an error; if false,
                what fits is loaded and `report`, or a warning, lists the rest. With `group`, a name is unexpected if no rank has it.
            rename: Prefixes of stored names -> prefixes of names in `into`; or a function of the name (None: leave it out). With a function
                and `select`, only names that the snapshot has count as left out: any other name of `into` is missing. A changed name of
                several values, whose keys are spelled alike as ``0`` and ``"0"`` are, does not match.
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
            MismatchError: it does not fit `into` or `select`, or `into` has a name of several values.
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
        """Calls `read` on the snapshot at `address`, on all ranks of `group` or on none. For code that is built on top of a store.

        An error that `read` raises on one rank ends the restore on all of them at once. Otherwise as `checkout`.

        Returns:
            What `read` returned, and the snapshot.
        """
        result, info = restoring.restoring(
            self.session,
            address,
            read,
            group=group,
            broadcast=broadcast,
            allow_marked=allow_marked,
            timeout_seconds=timeout_seconds,
        )
        return result, Snapshot.from_info(info)

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

    def open_snapshot(self, address: str) -> "LazySnapshot":
        """A lazy mapping from tensor names to tensors: ``s["model.weight"][0:128]`` reads only the blocks that it needs.

        It can be used with or without ``with``, until the store is closed.
        """
        engine = self.session.engine
        return restoring.Restoring(engine, engine.resolve(address).info).lazy(lambda: self.session)

    def finish_staged(
        self, address: str, group: "ProcessGroup | DeviceMesh | None" = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Waits for the saves of this handle, and for earlier staged saves of this host, or of the hosts of `group`. Restores call it.

        Does not wait for uploads if `address` means a staged snapshot, such as ``runs/gpt^staged``.
        """
        restoring.finish_staged(self.session, address, process_group(group), timeout_seconds)

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

    def follow(
        self,
        ref: str,
        *,
        into: object,
        select: Sequence[str] | str | None = None,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        poll_seconds: float = 1.0,
        host_cache: str | os.PathLike[str] | None = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> "Feed":
        """Keeps tensors at the newest snapshot of a branch, for inference; writes nothing, and needs no right to write.

        ::

            with store.follow("runs/rl", into=model, select="model.*") as feed:
                while feed.wait() is not None:  # reads, verifies and stages the newest version
                    feed.swap()  # between two generations; feed.version says which root the tensors are

        Reads what differs from the tensors: nothing of equal blocks, and of a block that is stored as a difference (``delta=`` of the
        saves) to one that the tensors hold, that difference. Versions in between are skipped.

        Args:
            ref: The branch; any other address of `checkout` works, too.
            into: A module, or a dict of tensors, such as a state dict. Tensors alone are followed.
            select: As in `checkout`.
            rename: As in `checkout`. For a module the part that all selected names begin with, such as ``model.``, is removed by default.
            dtype: As in `checkout`. Blocks of converted tensors are read whole when they change.
            poll_seconds: How often `Feed.wait` looks.
            host_cache: A folder of this host, such as ``/dev/shm/feed``. Followers with the same folder read each version from the store
                once, unless the store is local. Takes up to an eighth of the space that is free there.
            group: A process group, or a one-dimensional DeviceMesh, whose ranks are one model: each passes its share as `into`, and all
                call `poll` or `wait`, and `swap`, equally often. They take the version that rank 0 finds, all or none. Of ranks that read
                the same, each reads a part of it from the store, and sends that to the others over the CPU's network (gloo).
            timeout_seconds: With `group`: how long to wait for the other ranks.
        """
        from tensorstore_ck.feed import Feed, FeedRanks  # noqa: PLC0415 - loads torch
        from tensorstore_ck.feed.match_tensors import Wanted  # noqa: PLC0415 - loads torch

        folder = None if host_cache is None else os.fspath(host_cache)
        forget = self.session.context.forget_frozen  # the next save reads what a swap may have changed
        ranks, torch_group = None, process_group(group)
        if torch_group is not None:
            polls, swaps = self.session.groups.following(torch_group, ref, timeout_seconds=timeout_seconds)
            ranks = FeedRanks(polls, swaps, torch_group.get_group_store(), ref, timeout_seconds=timeout_seconds)
        return Feed(
            self.engine,
            ref,
            Wanted(into, select, rename, dtype),
            on_change=forget,
            poll_seconds=poll_seconds,
            host_cache=folder,
            ranks=ranks,
        )

    def on_event(self, callback: Callback) -> Callable[[], None]:
        """Calls ``callback(event)`` at each `Event` of this handle's saves and feeds; returns a function that unsubscribes.

        An asynchronous save is ``captured`` on the caller's thread, and has its other events on threads of its own: if it is quick, these
        may come first.
        """
        return self.engine.observers.subscribe(callback)

    # --- look ----------------------------------------------------------------------------------------------------------

    def resolve(self, address: str) -> Snapshot:
        """The snapshot at an address."""
        return Snapshot.from_info(self.engine.resolve(address).info)

    def signature(self, address: str) -> "RefSignature | None":
        """Who signed the snapshot at an address; None if it goes through no branch or tag that the trust file names: see `open`.

        Raises:
            UntrustedError: the trust file demands a signature, and there is no valid one.
            LogChangedError: it does, and the log lacks entries that this user has seen.
        """
        return self.engine.signature(address)

    def log(self, ref: str | None = None, *, limit: int | None = None) -> SnapshotLog:
        """The history of a branch (a tag: its one snapshot), newest first; of all branches together without `ref`.

        The list has `where` and `sorted_by` (``store.log("runs/gpt").where("lr < 1e-4").sorted_by("val_loss")``) and `to_pandas`, and
        notebooks show it as a table.
        """
        return list_refs.history(self.engine, ref, limit)

    def branches(self) -> SnapshotsByName:
        """Every branch, and where it is."""
        return list_refs.branches(self.engine)

    def tags(self) -> SnapshotsByName:
        """Every tag, and where it is."""
        return list_refs.tags(self.engine)

    def plot(self, metric: str, ref: str | None = None, *, axes: "Axes | None" = None) -> "Axes":
        """Draws a metric over the steps of a branch (of all branches without `ref`) with matplotlib, the extra ``plot``.

        At a NaN or infinite value, the line has a gap, and a red line goes from top to bottom.

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
        return self.engine.read_metadata(self.engine.resolve(address).info)

    def show(self, address: str) -> SnapshotDetails:
        """Metadata, tensors and values of a snapshot."""
        from tensorstore_ck.maintenance.describe import describe  # noqa: PLC0415

        return describe(self.engine, self.engine.resolve(address).info)

    def diff(self, old: str, new: str) -> "SnapshotDiff":
        """Which tensors and values differ between two snapshots, and how many of their bytes.

        Reads no tensor data, unless other ranks or placements cut a tensor at other borders.
        """
        from tensorstore_ck.maintenance.describe import diff_snapshots  # noqa: PLC0415

        return diff_snapshots(self.engine, self.engine.resolve(old).info, self.engine.resolve(new).info)

    def prove(self, address: str, tensor: str) -> bytes:
        """A proof that a tensor belongs to a snapshot, without the other tensors: see `check_proof`, which needs no store.

        It shows the tensor's name, dtype, shape and block ids, and the signature of the branch or tag that the address goes through, if
        there is one: with a trust file one by its keys, otherwise the newest one by any key. Reads records, parts and layouts, and no
        tensor data. A proof has the whole layout: names, dtypes and shapes of all tensors, and paths of all values. Of each part of the
        tensor it may show some KiB: block ids of other tensors, metadata, values, tensors of up to 4 KiB. ``rank_state[3].name`` names a
        tensor of a rank's own state, unless the shared state has a tensor of that name.

        Raises:
            NotFoundError: no such tensor, or nothing at that address.
            UntrustedError: the trust file demands a signature, and there is no valid one.
        """
        from tensorstore_ck.maintenance.prove import prove  # noqa: PLC0415

        return prove(self.engine, address, tensor)

    def contains(self, address: str, base: str) -> "Containment":
        """Which part of a snapshot, such as a fine-tune, is another one, its base; and who signed the base.

        Compares block ids, and reads no tensor data: where the two cut a tensor differently, as with other ranks, its blocks count as
        different.

        Args:
            address: The snapshot.
            base: The address of the base.

        Raises:
            UntrustedError: the trust file demands a signature, and there is no valid one.
        """
        from tensorstore_ck.maintenance.prove import contains  # noqa: PLC0415

        return contains(self.engine, address, base)

    def statistics(self, address: str, select: Sequence[str] | None = None, bins: int = 0) -> "list[TensorStatistics]":
        """Minimum, maximum, mean, standard deviation, norm, and counts of NaN, infinity and zero of each tensor, in the state's order.

        Reads and verifies the tensors' data, piece by piece: some 200 MiB are in memory, whatever the size of the snapshot; but a strided
        view of another tensor, such as a transposed one, is read whole. All numbers are float64: see `TensorStatistics`. States of single
        ranks (``rank_state=``) are left out.

        Args:
            address: The snapshot; also one that is marked.
            select: Globs over names such as ``model.*``, as in `checkout`.
            bins: Also a histogram of each tensor with this many bins; the data is then read twice.

        Raises:
            MismatchError: a glob fits nothing.
            DamageError: stored data is damaged.
        """
        snapshot = open_snapshot(self.engine, self.engine.resolve(address).info)
        from tensorstore_ck.state.statistics import tensor_statistics  # noqa: PLC0415 - torch, once it is known that the snapshot is there

        return tensor_statistics(snapshot, select, bins)

    def change_statistics(self, old: str, new: str, select: Sequence[str] | None = None) -> "list[ChangeStatistics]":
        """How much each differing tensor changed between two snapshots. The largest relative change comes first; tensors that were
        reshaped, added or removed come last.

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
        from tensorstore_ck.maintenance.describe import diff_snapshots  # noqa: PLC0415

        one, two = self.engine.resolve(old).info, self.engine.resolve(new).info
        changed = [change.name for change in diff_snapshots(self.engine, one, two).tensors]
        from tensorstore_ck.state.statistics import change_statistics  # noqa: PLC0415 - torch, as in `statistics`

        return change_statistics(open_snapshot(self.engine, one), open_snapshot(self.engine, two), changed, select)

    def find_nan(self, address: str, select: Sequence[str] | None = None) -> str | None:
        """The name of a snapshot's first tensor that has a NaN or an infinity; None if no tensor has one. Reads no tensor after it.

        Args:
            address: See `statistics`.
            select: See `statistics`.

        Raises:
            MismatchError: a glob fits nothing.
            DamageError: stored data is damaged.
        """
        snapshot = open_snapshot(self.engine, self.engine.resolve(address).info)
        from tensorstore_ck.state.statistics import first_not_finite  # noqa: PLC0415 - torch, as in `statistics`

        return first_not_finite(snapshot, select)

    def usage(self, *, per_snapshot: bool = False, progress: "GcProgress | None" = None) -> "Usage":
        """Logical, unique, stored, shared and exclusive bytes, per ref, job and pack, and in all; reads no tensor data.

        Args:
            per_snapshot: Also the size of each snapshot, and what forgetting it would free.
            progress: See `Store.gc`. An error that it raises ends the measurement.
        """
        from tensorstore_ck.gc.report import ignore_progress  # noqa: PLC0415
        from tensorstore_ck.gc.usage import measure_usage  # noqa: PLC0415

        return measure_usage(self.engine.of_store(), per_snapshot=per_snapshot, progress=progress or ignore_progress)

    def last_runs(self) -> dict[str, RunOutcome]:
        """``gc``, ``fsck`` -> the last run of each, by any host: when it ended, its outcome, and what it freed or found.

        A run whose process could not write to the log is not among them; neither are dry runs, nor `free_dropped`.
        """
        return last_runs(self.engine.log.readable_view())

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
            bandwidth: The store's bandwidth, such as ``"1GB"`` a second, or bytes per second: the advice then says whether it is enough.
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

    # --- what stays ----------------------------------------------------------------------------------------------------

    def pins(self) -> tuple[PinnedSnapshot, ...]:
        """Every pin."""
        return pinned_snapshots(self.engine.log.readable_view())

    def policies(self) -> "dict[str, Policy]":
        """Glob -> policy."""
        from tensorstore_ck.maintenance.apply_policies import policies  # noqa: PLC0415

        return policies(self.engine)

    def quotas(self) -> dict[str, Quota]:
        """Glob -> quota, with what is used of it."""
        return all_quotas(self.engine.log.newest_view())

    def explain_retention(self, ref: str) -> dict[str, tuple[str, ...]]:
        """Id of each snapshot of a branch -> the tags, pins and rules that keep it. Ignores limits of bytes.

        Warns of rules that match nothing.
        """
        from tensorstore_ck.maintenance.apply_policies import kept_by  # noqa: PLC0415

        return kept_by(self.engine, ref)

    def forgotten(self) -> "tuple[Forgotten, ...]":
        """What `undo` can restore, newest first."""
        return forgetting.forgotten(self.engine)

    if TYPE_CHECKING:
        # Narrower forms of methods of `Store`.

        def bisect(
            self,
            ref: str,
            is_bad: Callable[[Snapshot], bool | None],
            *,
            good: str | None = None,
            bad: str | None = None,
            unpinned_unsafe: Literal[True],
            tested: "Callable[[Tested], object] | None" = None,
        ) -> "Bisection":
            """`Store.bisect`, where it changes nothing."""

        def watch(
            self,
            ref: str,
            *,
            since_step: int | None = None,
            newest_only: bool = False,
            pin_for: None,
            poll_seconds: float = 2.0,
            until: Callable[[], bool] = lambda: False,
        ) -> Generator[Snapshot]:
            """`Store.watch`, where it changes nothing."""

        def apply_policies(
            self, *refs: str, dry_run: Literal[True], rules: Mapping[str, object] | None = None, glob: str | None = None
        ) -> "RetentionReport":
            """`Store.apply_policies`, where it changes nothing."""

        def gc(self, options: "GcOptions | None" = None, *, dry_run: Literal[True], progress: "GcProgress | None" = None) -> "GcReport":
            """`Store.gc`, where it changes nothing."""

        def recode(
            self,
            *addresses: str,
            codec: str = "small",
            older_than: "str | float | None" = None,
            dry_run: Literal[True],
            rate_limit: float | str | None = None,
            progress: "GcProgress | None" = None,
        ) -> "RecodeReport":
            """`Store.recode`, where it changes nothing."""

        def migrate_tiers(
            self, *, dry_run: Literal[True], rate_limit: float | str | None = None, progress: "GcProgress | None" = None
        ) -> "TierReport":
            """`Store.migrate_tiers`, where it changes nothing."""

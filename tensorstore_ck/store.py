"""`Store`: the facade that users hold. It resolves addresses, remembers what this handle has seen, and delegates.

Here is what restores; what saves is in `puts`, all else in `manage`. torch is loaded only by the methods that take or return tensors, so
that a command starts fast.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from tensorstore_ck.backend.staging import Staging
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.engine.read.merged_snapshot import count_rank_states, open_rank_state, open_snapshot
from tensorstore_ck.engine.write.publish import ANY
from tensorstore_ck.format.codec import CodecOption, DeltaOption
from tensorstore_ck.format.random_streams import RULE, Streams
from tensorstore_ck.log import Rollback, SnapshotInfo
from tensorstore_ck.log.address import Resolved
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked
from tensorstore_ck.read_only_store import ReadOnlyStore
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.session.keeping import changes
from tensorstore_ck.session.puts import SavingStore, require_no_rank_state
from tensorstore_ck.session.ref_fence import LAST_SEEN
from tensorstore_ck.session.restoring import Restoring

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.state import LazySnapshot, LoadReport, StateCheck

T = TypeVar("T")


class Store(SavingStore):
    """An open store. Thread-safe; a context manager. Make one with `tensorstore_ck.open`."""

    # Putting is in `puts`, all that needs no tensors in `manage`.

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

        def read(found: Restoring) -> Any:
            return found.checkout(
                into=into, select=select, strict=strict, rename=rename, dtype=dtype, device=device, report=report, broadcast=broadcast
            )

        return self.restoring(address, read, group=group, broadcast=broadcast, allow_bad=allow_bad, timeout_seconds=timeout_seconds)[0]

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
        group = process_group(group)
        self.finish_staged(address, group, timeout_seconds=timeout_seconds)
        self._handle.frozen.forget()

        def find(address: str) -> Resolved:
            found = self._resolve(address)
            if not allow_bad:
                refuse_marked(Snapshot.from_info(found.info), address, "pass allow_bad=True")
            return found

        if group is not None:
            result, found = self._groups.restore(
                group,
                address,
                find,
                lambda info, reading: read(Restoring(self._engine, info, group, reading)),
                agrees=broadcast,
                timeout_seconds=timeout_seconds,
            )
        else:
            found = find(address)
            result = read(Restoring(self._engine, found.info))
        self._seen.note_restored(found)
        return result, Snapshot.from_info(found.info)

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
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        group = process_group(group)
        own, size = (0, 1) if group is None else (group.rank(), group.size())

        def read(info: SnapshotInfo, *_: object) -> Any:
            ranks = count_rank_states(self._engine, info, size if rank is None and rank_state_map is None else None)
            if rank is not None:
                whose: int | Iterable[int] = rank
            else:
                whose = own if rank_state_map is None or ranks == size else rank_state_map(own, ranks)
            if isinstance(whose, Iterable):
                return [restore(open_rank_state(self._engine, info, each)) for each in whose]
            return restore(open_rank_state(self._engine, info, whose))

        return self._agreed(address, read, group, timeout_seconds)

    def streams(
        self, address: str, *, group: "ProcessGroup | DeviceMesh | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Streams:
        """Seeds of new random streams for this rank, derived from a snapshot that another number of ranks put.

        Raises:
            FormatVersionError: the snapshot names a rule that this build does not know.
        """
        group = process_group(group)
        root, rule = self._agreed(
            address, lambda info, *_: (info.root.hex(), self._engine.read_record(info).streams), group, timeout_seconds
        )
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
        return Streams(root, rank, world_size, rule or RULE)

    @contextmanager
    def open_snapshot(self, address: str) -> "Iterator[LazySnapshot]":
        """A lazy mapping from tensor names to tensors: ``s["model.weight"][0:128]`` reads only the blocks that it needs."""
        from tensorstore_ck.state import LazySnapshot  # noqa: PLC0415 - loads torch

        yield LazySnapshot(open_snapshot(self._engine, self._resolve(address).info))

    @changes
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
        from tensorstore_ck.state import check_state  # noqa: PLC0415 - loads torch

        group = process_group(group)
        if group is None:
            require_no_rank_state(rank_state)
            return check_state(state, self._engine.backend)
        from tensorstore_ck.session.save.check import check_ranks  # noqa: PLC0415 - loads torch

        return check_ranks(self._engine, self._groups, group, state, rank_state, timeout_seconds=timeout_seconds)

    def _agreed(self, address: str, read: Callable[..., Any], group: "ProcessGroup | None", timeout_seconds: float) -> Any:
        """What `read` makes of the snapshot at `address`: with `group` of the same one on all ranks, and on all or on none."""
        if group is None:
            return read(self._resolve(address).info)
        return self._groups.restore(group, address, self._resolve, read, timeout_seconds=timeout_seconds)[0]


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

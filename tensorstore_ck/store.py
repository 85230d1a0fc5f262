"""`Store`: the facade that users hold. It resolves addresses, remembers what this handle has seen, and delegates.

torch is loaded only by the methods that take or return tensors, and what looks at a store only by the methods that look, so
that a command starts fast.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from tensorstore_ck import forgetting
from tensorstore_ck.address import Resolved, resolve
from tensorstore_ck.closure import revive
from tensorstore_ck.durations import parse_seconds
from tensorstore_ck.engine import Engine, current_user
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.ids import Digest
from tensorstore_ck.log import Op, RefTable, SnapshotInfo, validate_ref_name
from tensorstore_ck.opening import open_engine
from tensorstore_ck.reader import SnapshotReader
from tensorstore_ck.record import check_metrics, encode_metadata
from tensorstore_ck.seen import LAST_SEEN, LastSeen, Seen
from tensorstore_ck.snapshot import PinnedSnapshot, Snapshot, SnapshotDetails, pinned_snapshots, pinned_with_root, refuse_marked
from tensorstore_ck.writer import ANY, Anything, PutRequest, check_expected, put

if TYPE_CHECKING:
    import torch

    from tensorstore_ck.forgetting import Forgotten
    from tensorstore_ck.fsck import FsckOptions, FsckReport, RepairReport
    from tensorstore_ck.gc import GcOptions, GcReport
    from tensorstore_ck.gc.report import Progress as GcProgress
    from tensorstore_ck.gc.usage import Usage
    from tensorstore_ck.inspection import SnapshotDiff
    from tensorstore_ck.state import LazySnapshot, LoadReport, StateCheck

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Store:
    """An open store. Thread-safe; a context manager. Make one with `tensorstore_ck.open`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = Seen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self._engine.backend.url

    def close(self) -> None:
        """Releases connections and the cache; idempotent."""
        self._engine.close()

    # --- put and restore ----------------------------------------------------------------------------------------------

    def put_snapshot(
        self,
        state: object,
        *,
        ref: str,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
        expect: "str | Snapshot | Anything | LastSeen | None" = LAST_SEEN,
    ) -> Snapshot:
        """Stores `state` and moves branch `ref` to it. Durable and published when it returns; else it raises and nothing is visible.

        The ref moves only from the root that this handle last put or restored there, so a job that was given up for dead
        cannot overwrite its successor's work. A ref that this handle has not seen must not exist yet.

        Args:
            state: Any nesting of dicts, lists and tuples with tensors, numpy arrays and plain values.
            ref: The branch to move; made if it does not exist.
            step: The training step, for ``ref@step``.
            metrics: Numbers to rank by.
            metadata: What the run knows: config, learning rate, git commit. At most 1 MiB; part of the root.
            expect: A root, `ANY`, or None for "the ref must not exist", instead of what this handle last saw.

        Raises:
            UnsupportedValueError: `state` holds something that cannot be stored; the message has the path.
            ConflictError: the ref is elsewhere; nothing was written.
        """
        from tensorstore_ck.state import capture  # noqa: PLC0415 - loads torch

        validate_ref_name(ref)
        packed_metadata, checked_metrics = encode_metadata(metadata), check_metrics(metrics)
        if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
            raise InvalidOptionError(f"step must be an integer, not {step!r}", object_id="step")
        self._engine.require_writable()
        self._engine.log.sync()
        view = self._engine.log.view()
        expected = self._seen.expected(view, ref, expect)
        check_expected(view, ref, expected)
        request = PutRequest(
            ref, None if step is None else step.__index__(), self._seen.parent(view, ref), expected, packed_metadata, checked_metrics
        )
        info = put(self._engine, capture(state), request)
        self._seen.note(ref, info.root, info.root)
        return Snapshot.from_info(info)

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
    ) -> Any:
        """Restores the snapshot at `address`, every block verified.

        Args:
            address: A branch, tag, root, root prefix, ``ref@step`` or ``ref~n``.
            into: A state of the same form, whose tensors are filled in place without a second copy. Everything is checked
                before anything is read; if reading then fails, its tensors are undefined.
            select: Globs over names such as ``model.*``; what fits none is left out (None inside lists and tuples).
            strict: Whether names that are missing, unexpected or of another shape or dtype are an error; if false,
                what fits is loaded and the rest is told in `report`, or as a warning.
            rename: Prefixes of stored names -> prefixes of names in `into`; or a function of the name (None: leave it out).
            dtype: Floating-point tensors are converted to it.
            device: Where new tensors are made.
            report: Filled with the differences when `strict` is false.
            allow_bad: Restore a snapshot that was marked, too: ``bad`` by a user, or ``damaged`` by `tsck fsck --repair`.

        Raises:
            NotFoundError: nothing at that address.
            SnapshotMarkedBadError: it was marked ``bad`` or ``damaged``.
            MismatchError: it does not fit `into` or `select`.
            DamageError: stored data is damaged; nothing wrong is returned.
        """
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        found = self._resolve(address)
        if not allow_bad:
            refuse_marked(Snapshot.from_info(found.info), address, "pass allow_bad=True")
        content = SnapshotReader(self._engine, found.info)
        state = restore(content, into=into, select=select, strict=strict, rename=rename, dtype=dtype, device=device, report=report)
        self._seen.note_restored(found.info.root)
        if found.branch is not None and found.branch_root is not None:
            self._seen.note(found.branch, found.branch_root, found.info.root)
        return state

    @contextmanager
    def open_snapshot(self, address: str) -> "Iterator[LazySnapshot]":
        """A lazy mapping from tensor names to tensors: ``s["model.weight"][0:128]`` reads only the blocks that it needs."""
        from tensorstore_ck.state import LazySnapshot  # noqa: PLC0415 - loads torch

        yield LazySnapshot(SnapshotReader(self._engine, self._resolve(address).info))

    def check(self, state: object) -> "StateCheck":
        """What `put_snapshot(state)` would do: what cannot be stored, sizes, free space, expected time. Publishes nothing."""
        from tensorstore_ck.state import check_state  # noqa: PLC0415 - loads torch

        return check_state(state, self._engine.backend)

    # --- refs ---------------------------------------------------------------------------------------------------------

    def branch(self, name: str, at: str) -> Snapshot:
        """Makes branch `name` at a snapshot."""
        validate_ref_name(name)
        return self._move(lambda root: Op.branch(name, root), at, name)

    def reset(self, name: str, to: str) -> Snapshot:
        """Moves an existing branch to any snapshot, from wherever it is; its history keeps where it was."""
        validate_ref_name(name)
        return self._move(lambda root: Op.reset(name, root), to, name)

    def tag(self, name: str, at: str) -> Snapshot:
        """Names a snapshot for good: a tag never moves."""
        validate_ref_name(name)
        return self._move(lambda root: Op.tag(name, root), at, None)

    def untag(self, name: str) -> None:
        """Removes a tag; what nothing else holds goes like what is forgotten."""
        self._engine.require_writable()
        self._engine.log.append(lambda view: [Op.untag(name, view)])

    def branches(self) -> dict[str, Snapshot]:
        """Every branch, and where it is."""
        view = self._synced()
        return {name: Snapshot.from_info(resolve(view, name).info) for name in view.branches()}

    def tags(self) -> dict[str, Snapshot]:
        """Every tag, and where it is."""
        view = self._synced()
        return {name: Snapshot.from_info(resolve(view, name).info) for name in view.tags()}

    def annotate(self, address: str, metrics: Mapping[str, float]) -> Snapshot:
        """Adds metrics that came later than the put; a name that is there already gets the new number."""
        checked = check_metrics(metrics)
        return self._move(lambda root: Op.annotate(root, checked), address, None)

    def mark(self, address: str, mark: str = "bad", *, reason: str = "") -> Snapshot:
        """Marks a snapshot ``bad``, so that `checkout` refuses it; the empty mark takes that back."""
        if mark not in ("bad", ""):
            raise InvalidOptionError(f"mark must be 'bad' or '', not {mark!r}", object_id="mark")
        return self._move(lambda root: Op.mark(root, mark, reason), address, None)

    # --- what stays, and what goes ------------------------------------------------------------------------------------

    def pin(self, address: str, *, reason: str = "", owner: str | None = None, expires: "str | float | None" = None) -> Snapshot:
        """Holds a snapshot until it is unpinned or `expires` has passed. An owner's second pin replaces the first.

        Args:
            address: The snapshot.
            reason: For those who wonder later.
            owner: Who holds it; by default this user.
            expires: For how long: ``"30d"``, or seconds.
        """
        seconds = None if expires is None else parse_seconds(expires, "expires")
        expires_ns = None if seconds is None else self._engine.clock() + int(seconds * 1e9)
        return self._move(lambda root: Op.pin(root, owner or current_user(), reason, expires_ns), address, None)

    def unpin(self, address: str, *, owner: str | None = None) -> None:
        """Takes this user's pin, or `owner`'s, from a snapshot, and from any other one that has the same root."""
        self._engine.require_writable()
        who = owner or current_user()
        self._engine.log.append(
            lambda view: [Op.unpin(ulid, who, view) for ulid in pinned_with_root(view, resolve(view, address).info, who)]
        )

    def pins(self) -> tuple[PinnedSnapshot, ...]:
        """Every pin."""
        return pinned_snapshots(self._synced())

    def forget(self, *addresses: str) -> "tuple[Forgotten, ...]":
        """Takes snapshots out of their branches' histories, or whole branches and tags. `gc` frees them after the undo window.

        Args:
            addresses: ``ref@step``, ``ref~n`` or a root for one snapshot; a ref for all of it. Tags, pins and other branches go on
                holding what they hold.
        """
        found = forgetting.forget(self._engine, addresses)
        for one in found:
            if one.kind == "branch":
                self._seen.drop(one.ref)
        return found

    def undo(self, address: str | None = None) -> "tuple[Forgotten, ...]":
        """Brings back what was forgotten last, or last of a ref, or one snapshot: until gc ends the undo window."""
        return forgetting.undo(self._engine, address)

    def forgotten(self) -> "tuple[Forgotten, ...]":
        """What `undo` can bring back, newest first."""
        self._engine.log.sync()
        return forgetting.forgotten(self._engine)

    def gc(self, options: "GcOptions | None" = None, *, dry_run: bool = False, progress: "GcProgress | None" = None) -> "GcReport":
        """Frees what nothing holds any more; from any host, beside writers and readers. With `dry_run` tells what would go.

        Raises:
            UnreadableError: something that is held cannot be read; nothing was freed.
            GcRefusedError: more than `options.max_delete` of all bytes would go.
        """
        from tensorstore_ck.gc import run_gc  # noqa: PLC0415

        return run_gc(self._engine, options, dry_run=dry_run, **({"progress": progress} if progress else {}))

    # --- what is there ------------------------------------------------------------------------------------------------

    def resolve(self, address: str) -> Snapshot:
        """The snapshot at an address."""
        return Snapshot.from_info(self._resolve(address).info)

    def log(self, ref: str | None = None, *, limit: int | None = None) -> list[Snapshot]:
        """The history of a branch (a tag: its one snapshot), newest first; of all branches together without `ref`."""
        view = self._synced()
        if ref is None:
            infos = [info for name in view.branches() for info in view.history(name, limit=limit)]
            infos = sorted({info.ulid: info for info in infos}.values(), key=lambda info: -info.n)
        elif view.branch(ref) is not None:
            infos = list(view.history(ref, limit=limit))
        else:
            infos = [resolve(view, ref).info]
        return [Snapshot.from_info(info) for info in infos[:limit]]

    def show(self, address: str) -> SnapshotDetails:
        """Metadata, tensors and values of a snapshot."""
        from tensorstore_ck.inspection import describe  # noqa: PLC0415

        return describe(SnapshotReader(self._engine, self._resolve(address).info))

    def diff(self, old: str, new: str) -> "SnapshotDiff":
        """Which tensors and values differ between two snapshots, and how many of their bytes; reads no tensor data."""
        from tensorstore_ck.inspection import diff_snapshots  # noqa: PLC0415

        readers = [SnapshotReader(self._engine, self._resolve(address).info) for address in (old, new)]
        return diff_snapshots(*readers)

    def usage(self, *, per_snapshot: bool = False) -> "Usage":
        """Logical, unique, stored, shared and exclusive bytes, per ref, job and pack, and in all; reads no tensor data.

        Args:
            per_snapshot: Also what each snapshot takes, and what forgetting it would free.
        """
        from tensorstore_ck.gc.usage import measure_usage  # noqa: PLC0415

        self._engine.log.sync()
        return measure_usage(self._engine, per_snapshot=per_snapshot)

    def fsck(self, options: "FsckOptions | None" = None, *, read_data: bool = False, progress: Progress | None = None) -> "FsckReport":
        """Checks the whole store's structure, and as much data as asked for: `read_data`, or more in `options`. Changes nothing."""
        from tensorstore_ck.fsck import run_fsck  # noqa: PLC0415

        return run_fsck(self._engine, options, read_data=read_data, progress=progress)

    def repair(self, *, read_data: bool = False, other: "Store | None" = None) -> "RepairReport":
        """Mends what `fsck` finds: makes anew what is derived, and damaged objects from other copies, here or in another store.

        Snapshots that stay damaged are marked, so that `checkout` refuses them. Nothing is deleted.
        """
        from tensorstore_ck.fsck import FsckOptions, run_repair  # noqa: PLC0415

        return run_repair(self._engine, FsckOptions(read_data), other=other._engine if other is not None else None)

    # --- inner --------------------------------------------------------------------------------------------------------

    def _synced(self) -> RefTable:
        self._engine.log.sync()
        return self._engine.log.view()

    def _resolve(self, address: str) -> Resolved:
        return resolve(self._synced(), address)

    def _move(self, make: Callable[[Digest], Op], address: str, branch: str | None) -> Snapshot:
        """Appends one operation on the snapshot at `address`, and notes where `branch` is now."""
        self._engine.require_writable()
        found: list[SnapshotInfo] = []

        def build(view: RefTable) -> list[Op]:
            found[:] = [resolve(view, address).info]
            operation = make(found[0].root)
            operation.check(view)
            return [operation, *revive(self._engine, view, found[0])]

        self._engine.log.append(build)
        if branch is not None:
            self._seen.note(branch, found[0].root, found[0].root)
        info = self._engine.log.view().snapshot(found[0].ulid)
        return Snapshot.from_info(info or found[0])


def open_store(
    url: str | os.PathLike[str],
    *,
    create: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    single_writer_unsafe: bool = False,
    no_sync: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
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

    Raises:
        NotAStoreError: nothing there, and `create` is false.
        InvalidUrlError: the URL cannot be understood.
        UnsafeBackendError: the backend lets two writers create the same object.
    """
    return Store(
        open_engine(
            url,
            create=create,
            storage_options=storage_options,
            single_writer_unsafe=single_writer_unsafe,
            no_sync=no_sync,
            cache_dir=cache_dir,
        )
    )


__all__ = ["ANY", "LAST_SEEN", "Store", "open_store"]

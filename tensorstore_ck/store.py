"""`Store`: the facade that users hold. It resolves addresses, remembers what this handle has seen, and delegates.

torch is loaded only by the methods that take or return tensors, and what looks at a store only by the methods that look, so
that a command starts fast.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tensorstore_ck.address import Resolved, resolve
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import InvalidOptionError, SnapshotMarkedBadError
from tensorstore_ck.ids import Digest
from tensorstore_ck.log import Op, RefTable, SnapshotInfo, validate_ref_name
from tensorstore_ck.opening import open_engine
from tensorstore_ck.reader import SnapshotReader
from tensorstore_ck.record import check_metrics, encode_metadata
from tensorstore_ck.snapshot import Snapshot, SnapshotDetails
from tensorstore_ck.writer import ANY, Anything, Expected, PutRequest, check_expected, put

if TYPE_CHECKING:
    import torch

    from tensorstore_ck.fsck import FsckReport
    from tensorstore_ck.gc.usage import Usage
    from tensorstore_ck.inspection import SnapshotDiff
    from tensorstore_ck.state import LazySnapshot, LoadReport, StateCheck

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class LastSeen:
    """The type of `LAST_SEEN`."""

    def __repr__(self) -> str:
        return "tsck.LAST_SEEN"


LAST_SEEN: Final = LastSeen()
"""As ``expect=``, the default: move the ref from where this handle last put or restored it."""


class _Seen(NamedTuple):
    """What this handle knows of a ref: where it was, and which of its snapshots the training state comes from."""

    head: Digest
    current: Digest


class Store:
    """An open store. Thread-safe; a context manager. Make one with `tensorstore_ck.open`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[str, _Seen] = {}
        self._restored: Digest | None = None

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
        expected = self._expected(view, ref, expect)
        check_expected(view, ref, expected)
        request = PutRequest(
            ref, None if step is None else step.__index__(), self._parent(view, ref), expected, packed_metadata, checked_metrics
        )
        info = put(self._engine, capture(state), request)
        self._seen[ref] = _Seen(info.root, info.root)
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
            allow_bad: Restore a snapshot that was marked bad, too.

        Raises:
            NotFoundError: nothing at that address.
            SnapshotMarkedBadError: it was marked bad.
            MismatchError: it does not fit `into` or `select`.
            DamageError: stored data is damaged; nothing wrong is returned.
        """
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        found = self._resolve(address)
        if found.info.mark == "bad" and not allow_bad:
            raise SnapshotMarkedBadError(
                f"{address!r} ({found.info.root.hex()[:16]}, step {found.info.step}) is marked bad: "
                f"{found.info.reason or 'no reason given'}. "
                f"Take an earlier one (see `tsck log`), or pass allow_bad=True",
                object_id=address,
            )
        content = SnapshotReader(self._engine, found.info)
        state = restore(content, into=into, select=select, strict=strict, rename=rename, dtype=dtype, device=device, report=report)
        self._restored = found.info.root
        if found.branch is not None and found.branch_root is not None:
            self._seen[found.branch] = _Seen(found.branch_root, found.info.root)
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
        """Removes a tag; the snapshot stays."""
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

    def usage(self) -> "Usage":
        """Logical, unique, shared and stored bytes, per ref and in all; reads no tensor data."""
        from tensorstore_ck.gc.usage import measure_usage  # noqa: PLC0415

        self._engine.log.sync()
        return measure_usage(self._engine)

    def fsck(self, *, read_data: bool = False, progress: Progress | None = None) -> "FsckReport":
        """Checks the whole store's structure; with `read_data` every stored byte. Changes nothing."""
        from tensorstore_ck.fsck import run_fsck  # noqa: PLC0415

        return run_fsck(self._engine, read_data=read_data, progress=progress)

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
            return [operation]

        self._engine.log.append(build)
        if branch is not None:
            self._seen[branch] = _Seen(found[0].root, found[0].root)
        info = self._engine.log.view().snapshot(found[0].ulid)
        return Snapshot.from_info(info or found[0])

    def _expected(self, view: RefTable, ref: str, expect: object) -> Expected:
        if isinstance(expect, LastSeen):
            seen = self._seen.get(ref)
            return seen.head if seen else None
        if expect is None or isinstance(expect, Anything):
            return expect
        if isinstance(expect, Snapshot):
            return Digest(bytes.fromhex(expect.root))
        if isinstance(expect, str):
            return resolve(view, expect).info.root
        raise InvalidOptionError(f"expect must be a root, tsck.ANY or None, not {type(expect).__name__}", object_id="expect")

    def _parent(self, view: RefTable, ref: str) -> Digest | None:
        """What the new snapshot continues: what this handle last put or restored on the ref; for others, the ref's head."""
        if ref in self._seen:
            return self._seen[ref].current
        branch = view.branch(ref)
        return branch.root if branch else self._restored


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

"""`open`: from a URL and options to a `Store`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, overload

from tensorstore_ck.backend.staging import Staging
from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.format.codec import CodecOption, DeltaRules
from tensorstore_ck.log import Rollback
from tensorstore_ck.log.ref_signer import SignOption
from tensorstore_ck.session.group import DEAD_AFTER_SECONDS
from tensorstore_ck.store.read_only_store import ReadOnlyStore
from tensorstore_ck.store.store import Store


class OpenOptions(TypedDict, total=False):
    """The options of `open`, for what passes them on."""

    create: bool
    storage_options: Mapping[str, Any] | None
    single_writer_unsafe: bool
    no_sync: bool
    cache_dir: str | os.PathLike[str] | None
    rollback: Rollback
    state_dir: str | os.PathLike[str] | None
    host_memory_bytes: int | None
    staging: str | os.PathLike[str] | Staging | None
    min_free: str | int | None
    rate_limit: float | str | None
    read_rate_limit: float | str | None
    stagger_seconds: float
    codec: CodecOption
    delta: DeltaRules
    dead_after_seconds: float
    read_only: bool
    places: Sequence[str | os.PathLike[str]]
    sign: SignOption
    trust: str | os.PathLike[str] | None


@overload
def open(  # noqa: A001 - `tsck.open` reads as `gzip.open` does, and a TypeError names it as it was called
    url: str | os.PathLike[str],
    *,
    read_only: Literal[True],
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    rollback: Rollback = "warn",
    state_dir: str | os.PathLike[str] | None = None,
    read_rate_limit: float | str | None = None,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    places: Sequence[str | os.PathLike[str]] = (),
    trust: str | os.PathLike[str] | None = None,
) -> ReadOnlyStore: ...
@overload
def open(  # noqa: A001 - as above
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
    min_free: str | int | None = None,
    rate_limit: float | str | None = None,
    read_rate_limit: float | str | None = None,
    stagger_seconds: float = 0.0,
    codec: CodecOption = "auto",
    delta: DeltaRules = None,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    read_only: Literal[False] = False,
    places: Sequence[str | os.PathLike[str]] = (),
    sign: SignOption = None,
    trust: str | os.PathLike[str] | None = None,
) -> Store: ...
@short_errors
@renamed_argument(max_bytes_per_second="rate_limit")
def open(  # noqa: A001 - as above
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
    min_free: str | int | None = None,
    rate_limit: float | str | None = None,
    read_rate_limit: float | str | None = None,
    stagger_seconds: float = 0.0,
    codec: CodecOption = "auto",
    delta: DeltaRules = None,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    read_only: bool = False,
    places: Sequence[str | os.PathLike[str]] = (),
    sign: SignOption = None,
    trust: str | os.PathLike[str] | None = None,
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
        min_free: Space that saves must leave free in the store: ``"5%"``, ``"50GB"`` or bytes; checked here, at each save and while it
            writes. By default 1 %, at most 1 GiB, of the disk of a store in a folder, which is checked by saves alone.
        rate_limit: How fast a job may write to the store: its ranks share it evenly.
        read_rate_limit: How fast a job may read from the store: the ranks of its newest restore share it evenly. What a staging disk or
            another rank of the host has is not limited, nor is the log.
        stagger_seconds: The ranks and jobs that save in the background begin to write at moments within this time, which holds the memory
            of a save for longer; at once if a thread waits for the save. With a staging disk: ``tsck.Staging(stagger_seconds=...)``.
        codec: How blocks are encoded, always without loss: ``"raw"`` not at all; ``"fast"`` at about a gigabyte a second and core;
            ``"small"`` as small as possible; ``"auto"`` not at all, unless earlier saves of this handle have shown that an object store
            is so slow that saves and restores gain from ``"fast"``. Or a dict of globs over refs, whose first match counts:
            ``{"runs/*": "small"}``.
        delta: Whether blocks may be stored as differences to those of the snapshot before, which must then be read: by default with
            ``"small"``; if so, ``"auto"`` means ``"fast"``. A number: after this many snapshots, instead of 8, a block that changes
            everywhere is stored in full again. Or a dict of globs over refs, as for `codec`: ``{"runs/rl": True}``.
        dead_after_seconds: With `group=`: how long a rank may be silent before it counts as dead, instead of the call's
            `timeout_seconds`. Each rank sends a sign of life every 10 s from the first call with a group, on a thread that needs the GIL:
            so this must be longer than one C call holds it. The value of rank 0 counts for all.
        read_only: Nothing in the store is ever changed, and no right to write there is needed. Methods that would change something are
            refused; for a type checker, the returned object does not have them.
        places: Locations of packs that `tier` moved, as URLs or absolute paths, with everything inside them. Other buckets at the store's
            endpoint, and the folder around a local store, are always allowed. Other locations that the log names are refused.
        sign: Signs each ref that this handle moves: the file of a key, as `tsck keygen` makes it, or a `SigningKey`; or a dict of globs
            over refs, as for `codec`: ``{"models/*": "release.key"}``. With `group=`, rank 0 signs.
        trust: The file that says which keys must have signed which refs; by default ``trust.toml`` in the user's configuration folder, if
            there is one. A ref that it names is only read if its signature is valid.

    Raises:
        NotAStoreError: nothing there, and `create` is false; or the path is a file.
        InvalidUrlError: the URL cannot be understood.
        LogChangedError: with ``rollback="error"``, not here, but from every method that reads the log.
        UnsafeBackendError: the backend lets two writers create the same object.
        PermissionDeniedError: the trust file can be changed by other users.
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
            read_rate_limit=read_rate_limit,
            stagger_seconds=stagger_seconds,
            codec=codec,
            delta=delta,
            read_only=read_only,
            places=places,
            sign=sign,
            trust=trust,
        ),
        host_memory_bytes=host_memory_bytes,
        dead_after_seconds=dead_after_seconds,
    )

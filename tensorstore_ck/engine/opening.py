"""Opens or creates a store: from a URL to an `Engine`."""

import logging
import os
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import platformdirs

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.cold.allowed_locations import parse_allowed
from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.cold.locations import LocationOpener
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.probe import create_problem
from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.backend.reserve import fill_reserve
from tensorstore_ck.backend.staging import ReadThroughBackend, Staging, StagingTier, Uploader
from tensorstore_ck.backend.store_backend import StoreBackend
from tensorstore_ck.common.folder_identity import folder_identity
from tensorstore_ck.common.free_space import FOLDER_MIN_FREE, MinFree, require_free_space
from tensorstore_ck.common.ids import Clock, IdSource, new_ulid
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.common.printed_commands import name_store
from tensorstore_ck.common.processes import Process, this_process
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.stagger import require_stagger
from tensorstore_ck.engine.engine import Engine, current_actor
from tensorstore_ck.engine.object_ids import ObjectIds
from tensorstore_ck.engine.range_verifier import open_verifier
from tensorstore_ck.errors import (
    AlreadyExistsError,
    BackendUnavailableError,
    CorruptObjectError,
    InvalidOptionError,
    MissingObjectError,
    NotAStoreError,
    UnsafeBackendError,
)
from tensorstore_ck.events import logged_observers
from tensorstore_ck.format.codec import CodecOption, CodecPolicy, DeltaRules
from tensorstore_ck.format.ref_statement import LogName
from tensorstore_ck.format.sealed import FOLDERS
from tensorstore_ck.format.store_config import CONFIG_NAME, MAX_CONFIG_BYTES, StoreConfig, decode_config, new_config
from tensorstore_ck.format.writer_record import WRITERS
from tensorstore_ck.log import HeadFile, Log, RefTable, Rollback, Watermark, foreign_object, holds_snapshots, seen_at
from tensorstore_ck.log.block_index import BlockIndex, forget_packs
from tensorstore_ck.log.cache import MemoryTable, Table, open_table
from tensorstore_ck.log.ref_signer import RefSigner, SignOption
from tensorstore_ck.log.ref_verifier import RefVerifier
from tensorstore_ck.log.trust_file import read_trust

_logger: Final = logging.getLogger("tensorstore_ck")
_FIRST_FOLDERS: Final = ("log", FOLDERS["pack"], FOLDERS["part"], FOLDERS["snapshot"], WRITERS.removesuffix("/"))
"""The folders of the objects that every save writes."""


def open_engine(
    url: str | os.PathLike[str],
    *,
    create: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    single_writer_unsafe: bool = False,
    no_sync: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    staging: str | os.PathLike[str] | Staging | None = None,
    min_free: str | int | None = None,
    rate_limit: float | str | None = None,
    read_rate_limit: float | str | None = None,
    stagger_seconds: float = 0.0,
    codec: CodecOption = "auto",
    delta: DeltaRules = None,
    read_only: bool = False,
    places: Sequence[str | os.PathLike[str]] = (),
    rollback: Rollback = "warn",
    state_dir: str | os.PathLike[str] | None = None,
    sign: SignOption = None,
    trust: str | os.PathLike[str] | None = None,
    config: StoreConfig | None = None,
) -> Engine:
    """The engine of the store at `url`. `create` makes the store if there is none; `read_only` changes nothing in it.

    `config` stands in for store.json, to repair that.
    """
    if read_only and (create or staging is not None):
        name = "create" if create else "staging"
        raise InvalidOptionError(f"{name}= is for stores that are written to: leave it out with read_only=True", object_id=name)
    asked, codecs, allowed = MinFree.parse(min_free or 0), CodecPolicy(codec, delta), parse_allowed(places)
    writes, reads = RateLimit(rate_limit), RateLimit(read_rate_limit)
    require_stagger(stagger_seconds, is_staged=staging is not None)
    trusted = read_trust(trust)
    observers = logged_observers()
    backend = open_backend(url, storage_options, no_sync=no_sync, on_wait=observers.emit)
    if read_only:
        backend = ReadOnlyBackend(backend)
    try:
        is_given = config is not None
        config = config or read_config(backend)
        if config is None:
            _require_folder(backend)
        if config is None and create:
            config = init_store(backend, single_writer_unsafe=single_writer_unsafe)
            _logger.warning("made a new store at %s%s", backend.url, _seen_before(backend, state_dir))
        if config is None:
            none = f"there is no store at {backend.url}: create one with `tsck init`, or open(..., create=True)"
            raise NotAStoreError(f"{none}{_seen_before(backend, state_dir)}", object_id=backend.url)
        if not read_only:
            require_free_space(backend, asked, 0, "the store")
        kept = (
            FOLDER_MIN_FREE if min_free is None and backend.is_local else asked
        )  # a store opens even on a full disk, so that it can be freed
        options = staging if staging is None or isinstance(staging, Staging) else Staging(staging)
        folder = options.open(config.uuid, open_verifier) if options is not None else None
        watermark = Watermark(
            None if backend.url.startswith("memory://") else HeadFile(_state_folder(state_dir), config.uuid),
            log=config.log,
            rollback=rollback,
            url=backend.url,
            identity=folder_identity(backend.url) if backend.is_local else 0,
        )
        table = open_table(None if cache_dir is None else Path(local_path(cache_dir, "cache_dir")), f"{config.uuid}-{config.log}")
        opener = LocationOpener(
            store_url=backend.url,
            storage_options=dict(storage_options or {}),
            no_sync=no_sync,
            read_only=read_only,
            on_wait=observers.emit,
            allowed=allowed,
        )
        names = LogName(store=uuid.UUID(config.uuid).bytes, log=config.log)
        signer = None if sign is None else RefSigner(sign, names, time.time_ns)
        same_store = partial(require_same_store, backend, config, config.encode())
        engine = make_engine(
            backend,
            config,
            table,
            watermark=watermark,
            single_writer=single_writer_unsafe,
            open_place=opener,
            read_only=read_only,
            find_process=this_process,
            signer=signer,
            require_store=same_store if backend.is_local and not is_given else lambda: None,
        )
        verifier = None if trusted is None else RefVerifier(trusted, names)
        engine = replace(engine, observers=observers, writes=writes, reads=reads, stagger_seconds=stagger_seconds)
        engine = replace(engine, min_free=kept, codecs=codecs, trust=verifier)
        guard = kept if kept != MinFree() else None
        if folder is None or options is None:
            return replace(engine, backend=StoreBackend(backend, cold=engine.placed, writes=writes, reads=reads, min_free=guard))
        tiered = ReadThroughBackend(folder, StoreBackend(backend, cold=engine.placed, reads=reads, min_free=guard))
        uploader = Uploader(folder, tiered.store, max_parallel_requests=options.max_parallel_requests, limit=writes)
        return replace(engine, backend=tiered, tier=StagingTier(folder, uploader, tiered, options))
    except BaseException as exc:
        backend.close()
        name_store(exc, backend.url)
        raise


def make_engine(
    backend: Backend,
    config: StoreConfig,
    table: Table,
    *,
    watermark: Watermark | None = None,
    single_writer: bool = False,
    clock: Clock = time.time_ns,
    new_id: IdSource = new_ulid,
    sleep: Callable[[float], object] = time.sleep,
    open_place: Callable[[str], Backend] | None = None,
    read_only: bool = False,
    find_process: Callable[[], Process | None] | None = None,
    signer: RefSigner | None = None,
    require_store: Callable[[], object] = lambda: None,
) -> Engine:
    """An engine from its components; tests pass their own clock, ids and delays. `open_place` opens the locations of moved packs.

    `find_process` returns this process, for the writer record; without it no save writes one.
    """
    options: dict[str, Any] = {"uuid": uuid.UUID(config.uuid).bytes, "prefix": config.log, "clock": clock, "new_id": new_id, "sleep": sleep}
    options |= {"actor": current_actor(), "read_only": read_only, "require_store": require_store}
    sign = None if signer is None else signer.moves
    log = Log(backend, table, **options, watermark=watermark, on_swept=forget_packs, shared=not single_writer, sign=sign)
    apart = Log(backend, MemoryTable(), **options)

    def newest_view() -> RefTable:
        if log.view().head() is not None:
            return log.newest_view()
        return apart.newest_view()  # a table that holds only notes must not be filled by a fold: a later sync would clear the notes

    placed = ColdLocations(backend, open_place or LocationOpener(backend.url), log.view, newest_view, store=config.uuid)
    return Engine(
        backend=StoreBackend(backend, cold=placed),
        config=config,
        table=log.table,
        log=log,
        index=BlockIndex(log.table),
        clock=clock,
        new_id=new_id,
        placed=placed,
        single_writer=single_writer,
        read_only=read_only,
        signer=signer,
        put_ids=ObjectIds(backend, new_id, clock, find_process) if find_process is not None and not read_only else None,
        find_process=find_process or (lambda: None),
    )


def _state_folder(state_dir: str | os.PathLike[str] | None) -> Path:
    if state_dir is None:
        return platformdirs.user_state_path("tensorstore_ck", appauthor=False)
    return Path(local_path(state_dir, "state_dir")).absolute()


def _seen_before(backend: Backend, state_dir: str | os.PathLike[str] | None) -> str:
    """For the notice of a new store, or of none: which one this user has seen at the same URL, as before its disk was unmounted."""
    seen = None if backend.url.startswith("memory://") else seen_at(_state_folder(state_dir), backend.url)
    if seen is None:
        return ""
    return f"; this user has seen the store {seen} there: if nobody deleted or moved that one, its disk may not be mounted now"


def read_config(backend: Backend) -> StoreConfig | None:
    """The store's configuration; None if there is no store.

    Raises:
        CorruptObjectError: store.json is damaged, or missing although there is a log or snapshots.
    """
    try:
        data = backend.get(CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)
    except MissingObjectError:
        if holds_snapshots(backend):
            raise CorruptObjectError(
                f"{backend.url} holds snapshots but no {CONFIG_NAME}: `tsck fsck` tells whether `tsck salvage` can make it again",
                object_id=CONFIG_NAME,
            ) from None
        return None
    return decode_config(data, backend.url)


def _require_folder(backend: Backend) -> None:
    """Raises `NotAStoreError` where a file is in the place of a local store's folder, or of a folder above it."""
    path = Path(backend.url)
    file = next((each for each in (path, *path.parents) if backend.is_local and os.path.isfile(each)), None)
    if file is not None:
        raise NotAStoreError(
            f"{file} is a file, and a store is a folder: give a folder. A checkpoint in a file is imported into a store: "
            f"`tsck import {shlex.quote(str(file))} -s STORE --ref REF`, or tsck.import_checkpoint(store, path, ref=...)",
            object_id=backend.url,
        )


def require_same_store(backend: Backend, config: StoreConfig, encoded: bytes) -> None:
    """Checks that a folder still holds the store that was opened there, with the same log: a disk may have been unmounted.

    `encoded`: the bytes of `config`.

    Raises:
        NotAStoreError: it does not.
    """
    if backend.get_if_there(CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES) == encoded:
        return
    try:
        present: StoreConfig | None = read_config(backend)
    except CorruptObjectError:
        present = None
    if present is None or (present.uuid, present.log) != (config.uuid, config.log):
        what = "it has no store.json now" if present is None else f"the store there is {present.uuid} now, with the log {present.log}"
        raise NotAStoreError(
            f"{backend.url} does not hold the store {config.uuid} any more that this process opened there: {what}. Its disk may not be "
            "mounted, or the folder was moved, deleted or replaced. Nothing was published; open the store again where it is",
            object_id=backend.url,
        )


def init_store(backend: Backend, *, single_writer_unsafe: bool = False, exist_ok: bool = True) -> StoreConfig:
    """Probes the backend and writes store.json; one of several concurrent processes wins, and all agree.

    Raises:
        AlreadyExistsError: there is a store, and `exist_ok` is false; or another program's files are where the store's would be.
        CorruptObjectError: there is a store that lost its store.json, which must not get a new identity.
        NotAStoreError: the URL is a file.
        UnsafeBackendError: the backend does not create exclusively, and `single_writer_unsafe` is false.
    """
    _require_folder(backend)
    if read_config(backend) is None and (foreign := foreign_object(backend)) is not None:
        raise AlreadyExistsError(
            f"{backend.url} holds {foreign}, which is not an object of a store: another program keeps its files in that folder. "
            f"Give the store a folder of its own, for example {backend.url}/store",
            object_id=backend.url,
        )
    transient: Backend = backend  # for what is deleted again, or is only a reserve
    if isinstance(backend, LocalBackend):
        backend.make_folders(_FIRST_FOLDERS)  # one fsync, that for store.json, makes all of them durable
        transient = LocalBackend(backend.url, sync=False)
    problem = create_problem(transient)
    if problem and not single_writer_unsafe:
        raise UnsafeBackendError(
            f"commits to {backend.url} could be lost: {problem} (`tsck probe` tries more). Use another backend; or, if this one ignores "
            "the condition and only one process ever writes, without gc, single_writer_unsafe=True",
            object_id=backend.url,
        )
    mine = new_config(exclusive_create=not problem)
    outcome = backend.create(CONFIG_NAME, mine.encode())
    config = read_config(backend)
    if config is None:
        raise BackendUnavailableError(f"{CONFIG_NAME} could not be written to {backend.url}: try again", object_id=CONFIG_NAME)
    if config.uuid == mine.uuid and outcome is Created.UNKNOWN:
        backend.sync_folders(CONFIG_NAME)
    if config.uuid != mine.uuid and outcome is not Created.CREATED and not exist_ok:
        raise AlreadyExistsError(f"there is already a store at {backend.url}", object_id=backend.url)
    fill_reserve(transient)
    return config

"""`Engine`: backend, configuration, log and block index of one open store.

Operations (writer, reader, fsck, gc) take an `Engine`, never a `Store`. Tests inject the backend, the clock and the source of ids.
"""

import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self, TypeVar

from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.read_only import read_only_error
from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.backend.store_backend import throttled_to, without_min_free
from tensorstore_ck.common.byte_cache import ByteCache
from tensorstore_ck.common.free_space import MinFree
from tensorstore_ck.common.host_memory import free_bytes
from tensorstore_ck.common.ids import Clock, Digest, IdSource, Ulid
from tensorstore_ck.common.processes import Process
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.object_ids import ObjectIds
from tensorstore_ck.errors import CorruptObjectError, DamageError, UnsafeBackendError
from tensorstore_ck.events import Observers, logged_observers
from tensorstore_ck.format.codec import CodecPolicy
from tensorstore_ck.format.part import Part, decode_part, part_name
from tensorstore_ck.format.record import Record, decode_metadata, decode_record, record_name
from tensorstore_ck.format.relocation import RelocationMap, decode_relocation
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.format.store_config import StoreConfig
from tensorstore_ck.log import Log, ObjectKey, RefTable, Relocation, SnapshotRow
from tensorstore_ck.log.address import Resolved, resolve
from tensorstore_ck.log.block_index import BlockIndex
from tensorstore_ck.log.cache import Table
from tensorstore_ck.log.ref_signer import RefSigner
from tensorstore_ck.log.ref_verifier import RefSignature, RefVerifier
from tensorstore_ck.log.retention import job_rate

T = TypeVar("T")

MAX_CACHED_PARTS: Final = 4
MAX_CACHED_RECORDS: Final = 8
MAX_MOVED_BYTES: Final = 64 << 20
"""The memory for relocation maps: enough for thousands, unless blocks are tiny. All parts of all snapshots need the same maps."""
KEPT_SHARE: Final = 1 / 8
"""Of the host memory that is free when a save first keeps a block, and again after each save: for blocks of the last saves. Ranks of a host
that each keep as much share what is free: eight of them keep about half of it together."""
SAMPLES_SHARE: Final = 1 / 128
"""Of that memory, for samples of blocks of the last saves."""
KEPT_OVERHEAD_BYTES: Final = 512
"""The memory of a kept block or sample without its bytes."""
MOVED_OVERHEAD_BYTES: Final = 1 << 10
"""The memory of a relocation map without its rows."""


class KeptBlock(NamedTuple):
    """A block in memory."""

    raw: memoryview
    sum: bytes
    """What it summed up to when it was kept: see `Changes`."""


@dataclass(slots=True)
class Engine:
    """One open store."""

    backend: Backend
    config: StoreConfig
    table: Table
    log: Log
    index: BlockIndex
    clock: Clock
    new_id: IdSource
    placed: ColdLocations
    """Knows which packs are at other locations; `backend` reads through it."""
    single_writer: bool = False
    """The caller guarantees that no other process writes."""
    read_only: bool = False
    """The backends refuse every change."""
    observers: Observers = field(default_factory=logged_observers)
    """Receive events."""
    tier: StagingTier | None = None
    """The staging disk, if any; `backend` then reads through it."""
    writes: RateLimit = field(default_factory=RateLimit)
    """Of this process's writes to the store."""
    reads: RateLimit = field(default_factory=RateLimit)
    """Of its reads from the store."""
    stagger_seconds: float = 0.0
    """Saves in the background begin to write to the store at moments within this time; see `common.stagger`."""
    min_free: MinFree = field(default_factory=MinFree)
    """Free space to leave at the store's location."""
    codecs: CodecPolicy = field(default_factory=CodecPolicy)
    """How blocks are encoded."""
    put_ids: ObjectIds | None = None
    """Names of this process's objects, by which gc knows the process; None: plain ids."""
    on_read: Callable[[int], object] | None = None
    """Receives the raw bytes of each verified read of a snapshot's blocks, on the thread that read them."""
    forget_copies: Callable[[str], bool] = lambda name: False
    """Removes copies of an object on this host, other than a staging disk's, whose bytes were wrong; returns whether there were any."""
    unpublished: list[Ulid] | None = None
    """In the engine of one save: the names that it drew; see `StoreDestination`."""
    signer: RefSigner | None = None
    """Signs the refs that this handle moves."""
    trust: RefVerifier | None = None
    """The user's trust file, for the refs of this store."""
    find_process: Callable[[], Process | None] = lambda: None
    """Identifies this process; returns None where that is impossible."""
    warned_quotas: set[tuple[str, str]] = field(default_factory=set)
    """(branch, glob) of each quota about which a save of this process has warned."""
    kept_blocks: ByteCache[Digest, KeptBlock] = field(
        default_factory=lambda: ByteCache(lambda: int(free_bytes() * KEPT_SHARE), lambda kept: len(kept.raw) + KEPT_OVERHEAD_BYTES)
    )
    """The bases of the last saves' differences, and blocks that changed little, which are the bases of the next ones: else each is read
    from the store, and decoded."""
    base_samples: ByteCache[Digest, bytes] = field(
        default_factory=lambda: ByteCache(lambda: int(free_bytes() * SAMPLES_SHARE), lambda sampled: len(sampled) + KEPT_OVERHEAD_BYTES)
    )
    """Samples of blocks that the last saves stored in full: by them the next one knows whether a difference is worth reading them."""
    _parts: "OrderedDict[Ulid, Part]" = field(default_factory=OrderedDict)
    _records: "OrderedDict[Ulid, Record]" = field(default_factory=OrderedDict)
    _moved: ByteCache[Ulid, RelocationMap] = field(
        default_factory=lambda: ByteCache(lambda: MAX_MOVED_BYTES, lambda moved: moved.rows.nbytes + MOVED_OVERHEAD_BYTES)
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def require_writable(self, what: str = "this") -> None:
        """Raises if the store is read-only, or if two writers could overwrite each other's commits."""
        if self.read_only:
            raise read_only_error(what, self.backend.url)
        if not self.config.exclusive_create and not self.single_writer:
            raise UnsafeBackendError(
                f"{self.backend.url} does not create objects exclusively, so two writers could lose each other's commits: "
                "open it with single_writer_unsafe=True if this is the only process that writes",
                object_id=self.backend.url,
            )

    def resolve(self, address: str, view: RefTable | None = None) -> Resolved:
        """The snapshot that an address means, in `view` or at the newest entry of the log, and that the user's trust file admits.

        Raises:
            NotFoundError: nothing is at this address.
            UntrustedError: the trust file names its ref, and it has no valid signature.
        """
        view = self.log.readable_view() if view is None else view
        resolved = resolve(view, address)
        if self.trust is not None:
            self.trust.check(self.log, view, resolved)
        return resolved

    def signature(self, address: str) -> RefSignature | None:
        """The signature of the snapshot at an address; None if no trust file demands one. Raises as `resolve`."""
        view = self.log.readable_view()
        resolved = resolve(view, address)
        return None if self.trust is None else self.trust.check(self.log, view, resolved)

    def limit_writes(self, view: RefTable, ref: str) -> None:
        """Takes the share of the store's write rate that policies leave to a job, as of the log that it knows."""
        rate = job_rate(view, ref, self.clock()) if view.policies() else None
        if rate != self.writes.job_rate:
            self.writes.limit_job(rate)

    def put_id(self) -> Ulid:
        """A name for an object that a save writes to the store itself."""
        name = self.new_id() if self.put_ids is None else self.put_ids()
        if self.unpublished is not None:
            self.unpublished.append(name)
        return name

    def note_published(self) -> None:
        """All objects that this process has written are published."""
        if self.unpublished is not None:
            self.unpublished.clear()
        if self.put_ids is not None:
            self.put_ids.published()

    def read_record(self, info: SnapshotRow) -> Record:
        """The record of a snapshot, or of another snapshot with the same root, and so the same content.

        Raises:
            DamageError: it is damaged, or missing though the snapshot is held.
            SnapshotExpiredError: nothing holds the snapshot any more.
        """
        try:
            return self.read_own_record(info)
        except DamageError:
            for other in self._with_root(info.root):
                with suppress(DamageError):
                    return self.read_own_record(other)
            raise

    def read_own_record(self, info: SnapshotRow) -> Record:
        """The record of exactly this snapshot, checked against the root in the log.

        Raises:
            DamageError: it is damaged, or missing though the snapshot is held.
            SnapshotExpiredError: nothing holds the snapshot any more.
        """
        name = record_name(info.ulid)
        try:
            record = self._read(name, decode_record)
        except DamageError as exc:
            raise_if_expired(self.log, info, exc)
            raise
        if record.root() != info.root:
            raise CorruptObjectError(f"{name} is not the snapshot that the log names", object_id=name)
        return record

    def read_metadata(self, info: SnapshotRow) -> dict[str, Any]:
        """The metadata of a snapshot, from its record alone."""
        return decode_metadata(self.read_record(info), record_name(info.ulid))

    def recent_record(self, info: SnapshotRow) -> Record:
        """As `read_record`, with a small cache: saves read the records of earlier snapshots again."""
        with self._lock:
            record = self._records.get(info.ulid)
        if record is None:
            record = self.read_record(info)
            self.keep_record(info.ulid, record)
        return record

    def keep_record(self, ulid: Ulid, record: Record) -> None:
        """Caches a record that the next save is likely to need."""
        with self._lock:
            self._records[ulid] = record
            if len(self._records) > MAX_CACHED_RECORDS:
                self._records.popitem(last=False)

    def read_part(self, record: Record, rank: int) -> Part:
        """A part of a snapshot, checked against its id, with a small cache."""
        ulid = record.parts[rank]
        with self._lock:
            part = self._parts.get(ulid)
        if part is None:
            part = self._read_part(record, rank)
            self.keep_part(ulid, part)
        return part

    def _read_part(self, record: Record, rank: int) -> Part:
        def read(record: Record) -> Part:
            return self._read(part_name(record.parts[rank]), lambda data, _: decode_named_part(data, record, rank))

        try:
            return read(record)
        except DamageError:
            for info in self._with_root(record.root()):
                with suppress(DamageError):
                    other = self.read_own_record(info)
                    if other.parts[rank] != record.parts[rank]:
                        return read(other)
            raise

    def _with_root(self, root: Digest) -> list[SnapshotRow]:
        view = self.log.view()
        return [info for ulid in view.with_root(root) if (info := view.snapshot(ulid)) is not None]

    def keep_part(self, ulid: Ulid, part: Part) -> None:
        """Caches a part that the next save is likely to need."""
        with self._lock:
            self._parts[ulid] = part
            self._parts.move_to_end(ulid)
            if len(self._parts) > MAX_CACHED_PARTS:
                self._parts.popitem(last=False)

    def read_moved(self, relocation: Relocation) -> RelocationMap:
        """The map of a relocation, checked against the log, with a cache."""
        moved = self._moved.get(relocation.moved)
        if moved is None:
            name = ObjectKey("moved", relocation.moved).name
            moved = decode_relocation(self.backend.get(name, max_bytes=MAX_OBJECT_BYTES), name, relocation.hash)
            if moved.pack != relocation.pack or tuple(moved.targets) != relocation.targets:
                raise CorruptObjectError(f"{name} is not the relocation map that the log names", object_id=name)
            self._moved.put(relocation.moved, moved)
        return moved

    def limited_to(self, rate: float | str | None) -> Self:
        """The same open store with a limit on its backend's reads and writes, not on the log; None: no limit.

        Raises:
            InvalidOptionError: not a rate.
        """
        return self if rate is None else replace(self, backend=throttled_to(self.backend, rate))

    def freeing(self) -> Self:
        """The same open store for operations that free space: they may use the space that saves leave free."""
        return replace(self, backend=without_min_free(self.backend), min_free=MinFree())

    def of_store(self) -> "Self":
        """The same without the staging disk, for maintenance: a staged copy must not hide damage in the store."""
        return self if self.tier is None else replace(self, backend=self.tier.backend.store, tier=None)

    def distrust(self, name: str) -> bool:
        """Reports that an object's bytes are wrong; returns whether they came from a disk of this host, so that reading again may help."""
        is_copied = self.forget_copies(name)
        return (self.tier is not None and self.tier.backend.distrust(name)) or is_copied

    def _read(self, name: str, decode: Callable[[bytes, str], T]) -> T:
        try:
            return decode(self.backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
        except CorruptObjectError:
            if not self.distrust(name):
                raise
        return decode(self.backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)

    def close(self) -> None:
        """Releases the backend and the cache."""
        if self.put_ids is not None:
            self.put_ids.close()
        self.log.close()
        self.index.close()
        self.table.close()
        self.backend.close()


def decode_named_part(data: bytes, record: Record, rank: int) -> Part:
    """Decodes the part that a record names for a rank.

    Raises:
        CorruptObjectError: damaged, or another part.
    """
    name = part_name(record.parts[rank])
    part = decode_part(data, name)
    if part.part_id() != record.part_id(rank) or part.rank != rank:
        raise CorruptObjectError(f"{name} is not the part that its snapshot names; run `tsck fsck`", object_id=name)
    return part


def current_actor() -> str:
    """``user@host:pid``, for the log."""
    return f"{current_user()}@{socket.gethostname()}:{os.getpid()}"


def current_user() -> str:
    """The name of the user that this process runs as."""
    import pwd  # noqa: PLC0415 - not there on every platform

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())

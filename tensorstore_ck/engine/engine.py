"""What every operation works on: backend, configuration, log and block index of one open store.

Operations (writer, reader, fsck, gc) take an `Engine`, never a `Store`. Injected for tests: the backend, the clock and the
source of ids.
"""

import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeVar

from tensorstore_ck.backend.cold.cold_backend import ColdTierBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.read_only import read_only_error
from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.backend.throttled import limited_to
from tensorstore_ck.common.free_space import MinFree
from tensorstore_ck.common.ids import DIGEST_BYTES, Clock, IdSource, Ulid
from tensorstore_ck.common.processes import Process
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.engine.object_ids import ObjectIds
from tensorstore_ck.errors import CorruptObjectError, UnsafeBackendError
from tensorstore_ck.events import Observers, logged_observers
from tensorstore_ck.format.codec import CodecChoice
from tensorstore_ck.format.part import Part, decode_part, part_name
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.format.relocation import RelocationMap, decode_moved
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.format.store_config import StoreConfig
from tensorstore_ck.log import Log, ObjectKey, Relocation, SnapshotInfo
from tensorstore_ck.log.block_index import BlockIndex
from tensorstore_ck.log.cache import Table

T = TypeVar("T")

MAX_CACHED_PARTS: Final = 4
MAX_CACHED_RECORDS: Final = 8
MAX_CACHED_MOVED: Final = 64


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
    placed: ColdTierBackend
    """Knows which packs lie elsewhere; `backend` reads through it."""
    single_writer: bool = False
    """Opened by a caller who vouches that no other process writes."""
    read_only: bool = False
    """Opened to look at: its backends refuse every change."""
    observers: Observers = field(default_factory=logged_observers)
    """Who is told what happens."""
    tier: StagingTier | None = None
    """The staging disk, where there is one; `backend` then reads through it."""
    limit: RateLimit | None = None
    """How fast the job may write to the store: this process's share of it."""
    min_free: MinFree = field(default_factory=MinFree)
    """What must stay free of the store's place."""
    codecs: CodecChoice = field(default_factory=CodecChoice)
    """How blocks are encoded."""
    put_ids: ObjectIds | None = None
    """Names what this process puts, so that gc can tell whose it was; None: nobody can tell."""
    find_process: Callable[[], Process | None] = lambda: None
    """Which process this is, where that can be told."""
    _parts: "OrderedDict[Ulid, Part]" = field(default_factory=OrderedDict)
    _records: "OrderedDict[Ulid, Record]" = field(default_factory=OrderedDict)
    _moved: "OrderedDict[Ulid, RelocationMap]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def require_writable(self, what: str = "this") -> None:
        """Refuses to write to a store that was opened to look at, and where two writers could overwrite each other's commits."""
        if self.read_only:
            raise read_only_error(what, self.backend.url)
        if not self.config.exclusive_create and not self.single_writer:
            raise UnsafeBackendError(
                f"{self.backend.url} does not create objects exclusively, so two writers could lose each other's commits: "
                "open it with single_writer_unsafe=True if this is the only process that writes",
                object_id=self.backend.url,
            )

    def put_id(self) -> Ulid:
        """A name for what a put writes to the store itself."""
        return self.new_id() if self.put_ids is None else self.put_ids()

    def note_published(self) -> None:
        """What this process has put until now is published."""
        if self.put_ids is not None:
            self.put_ids.published()

    def read_record(self, info: SnapshotInfo) -> Record:
        """The record of a snapshot, checked against what the log says of it."""
        name = record_name(info.ulid)
        record = self._read(name, decode_record)
        if record.root() != info.root:
            raise CorruptObjectError(f"{name} is not the snapshot that the log names", object_id=name)
        return record

    def recent_record(self, info: SnapshotInfo) -> Record:
        """As `read_record`; the last few are kept, for puts, which look back at the ones before."""
        with self._lock:
            record = self._records.get(info.ulid)
        if record is None:
            record = self.read_record(info)
            with self._lock:
                self._records[info.ulid] = record
                while len(self._records) > MAX_CACHED_RECORDS:
                    self._records.popitem(last=False)
        return record

    def read_part(self, record: Record, rank: int) -> Part:
        """A part of a snapshot, checked against its id; the last few are kept."""
        ulid = record.parts[rank]
        with self._lock:
            part = self._parts.get(ulid)
        if part is None:
            name = part_name(ulid)
            part = self._read(name, decode_part)
            if part.part_id() != record.part_ids[rank * DIGEST_BYTES : (rank + 1) * DIGEST_BYTES] or part.rank != rank:
                raise CorruptObjectError(f"{name} is not the part that its snapshot names", object_id=name)
            self.keep_part(ulid, part)
        return part

    def keep_part(self, ulid: Ulid, part: Part) -> None:
        """Remembers a part that the next put is likely to need."""
        with self._lock:
            self._parts[ulid] = part
            self._parts.move_to_end(ulid)
            while len(self._parts) > MAX_CACHED_PARTS:
                self._parts.popitem(last=False)

    def read_moved(self, relocation: Relocation) -> RelocationMap:
        """The moved object of a relocation, checked against the log; the last few are kept."""
        with self._lock:
            moved = self._moved.get(relocation.moved)
        if moved is None:
            name = ObjectKey("moved", relocation.moved).name
            moved = decode_moved(self.backend.get(name, max_bytes=MAX_OBJECT_BYTES), name, relocation.hash)
            if moved.pack != relocation.pack or tuple(moved.targets) != relocation.targets:
                raise CorruptObjectError(f"{name} is not the moved object that the log names", object_id=name)
            with self._lock:
                self._moved[relocation.moved] = moved
                while len(self._moved) > MAX_CACHED_MOVED:
                    self._moved.popitem(last=False)
        return moved

    def limited_to(self, rate: float | str | None) -> Self:
        """The same open store, whose backend reads no faster, and writes no faster; None: itself. The log is not slowed down.

        Raises:
            InvalidOptionError: not a rate.
        """
        return self if rate is None else replace(self, backend=limited_to(self.backend, rate))

    def of_store(self) -> "Self":
        """The same without the staging disk, for whoever looks after the store: a copy here must not hide damage there."""
        return self if self.tier is None else replace(self, backend=self.tier.backend.store, tier=None)

    def distrust(self, name: str) -> bool:
        """Told that the bytes of an object are wrong: whether they came from the staging disk, and it is worth to read them again."""
        return self.tier is not None and self.tier.backend.distrust(name)

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

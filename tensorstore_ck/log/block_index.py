"""The block index: where a block with a given id lies, as far as this host knows. A cache in a `Table`.

It only makes saves smaller: a lost or empty index costs dedup against other jobs, never correctness. It is kept in the same
table as the ref table, at the same log entry, so that an item never outlives the fold on which it depends. Only blocks
without a delta base are kept.
"""

import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid
from tensorstore_ck.common.threads import Helper, ProcessLock, shielded
from tensorstore_ck.errors import StoreError
from tensorstore_ck.log import ObjectKey, RefTable
from tensorstore_ck.log.cache import Batch, Table, TableBusyError

_KEY: Final = b"b/"
_PACK_KEY: Final = b"p/"
"""Pack -> its blocks, so that they can be dropped together."""
_VALUE: Final = struct.Struct("<16sIQIIH")
_FIELDS: Final = 6
_MAX_WAITING: Final = 1000
"""Packs."""
_TRIES: Final = 3
_CLOSE_SECONDS: Final = 1.0


class Location(NamedTuple):
    """Where an encoded block lies."""

    pack: Ulid
    entry: int
    offset: int
    stored: int
    raw: int
    codec: int
    bases: tuple["Base", ...] = ()
    """The blocks that are needed to decode it."""
    flags: int = 0
    """As in its extent: how many snapshots lie between it and its base, or how many bases it has."""


class Base(NamedTuple):
    """A block that another one is encoded against."""

    block: Digest
    location: Location | None
    """Its location; None for a block that the same save writes."""


class BlockIndex:
    """Block id -> location."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lock = ProcessLock()
        self._waiting: deque[BlockNote] = deque(maxlen=_MAX_WAITING)
        """Not yet written, because another process had the table's lock."""
        self._thread: threading.Thread | None = None

    def find(self, blocks: Sequence[Digest]) -> dict[Digest, Location]:
        """The locations of those `blocks` that the index knows."""
        values = self._table.get_many([_KEY + block for block in blocks])
        return {Digest(key[len(_KEY) :]): Location(*_VALUE.unpack(value)) for key, value in values.items() if len(value) == _VALUE.size}

    def add(self, blocks: Iterable[tuple[Digest, Location]], *, published_at: int) -> None:
        """Adds blocks of a snapshot that log entry `published_at` published, or that is not published yet and had durable packs at that
        entry.

        Other processes of this host may have folded further entries since. Skips packs that these entries swept, even if the tombstones are
        dropped by now.
        """

        def write() -> None:
            with self._lock.here:
                self._waiting.extend(notes_of(blocks, published_at))
            if not self._write_waiting(wait=False):  # no save waits for the cache
                self._write_later()

        shielded(write)

    def close(self) -> None:
        """Waits a moment for the blocks not yet written."""
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _write_later(self) -> None:
        with self._lock.here:
            if self._thread is None or not self._thread.is_alive():
                thread = Helper(self._write_patiently, "tsck block index")
                with suppress(RuntimeError, MemoryError):  # no more threads: the next save tries again
                    thread.start()
                    self._thread = thread

    def _write_patiently(self) -> None:
        for _ in range(_TRIES):  # after a failed wait for the lock, the next try writes into memory
            if self._write_waiting(wait=True):
                return

    def _write_waiting(self, *, wait: bool) -> bool:
        """Writes the waiting blocks; False, and they keep waiting, if another process has the table's lock."""
        with self._lock.here:
            notes = list(self._waiting)
            self._waiting.clear()
        try:
            with self._table.batch(wait=wait) as batch:
                write_notes(batch, notes)
        except TableBusyError:
            with self._lock.here:
                self._waiting.extend(notes)
            return False
        except StoreError:  # the cache must not fail a save, which may be published, even if the log cannot be read to fill another one
            pass
        return True


class BlockNote(NamedTuple):
    """Blocks of one pack."""

    published_at: int
    pack: Ulid
    blocks: list[tuple[Digest, Location]]


def notes_of(blocks: Iterable[tuple[Digest, Location]], published_at: int) -> Iterable[BlockNote]:
    """The blocks that the index keeps, by their packs: see `BlockIndex.add`."""
    by_pack: dict[Ulid, BlockNote] = {}
    for block, location in blocks:
        if not location.bases:
            by_pack.setdefault(location.pack, BlockNote(published_at, location.pack, [])).blocks.append((block, location))
    return by_pack.values()


def write_notes(batch: Batch, notes: Iterable[BlockNote]) -> None:
    """Adds blocks to the index, in a batch of its table: see `BlockIndex.add`."""
    view = RefTable(batch)
    head, horizon = view.head(), view.horizon()
    for note in notes:
        state = view.object_state(ObjectKey("pack", note.pack))
        if head is None or not horizon <= note.published_at <= head.n or (state is not None and state.swept):
            continue
        for block, location in note.blocks:
            batch.put(_KEY + block, _VALUE.pack(*location[:_FIELDS]))
        batch.put(_PACK_KEY + note.pack + note.blocks[0][0], b"".join([block for block, _ in note.blocks]))


def forget_packs(batch: Batch, packs: Sequence[Ulid]) -> None:
    """Drops the blocks of swept packs, in the batch that folds the sweep."""
    for pack in packs:
        for key, blocks in list(batch.scan(_PACK_KEY + pack)):
            for at in range(0, len(blocks), DIGEST_BYTES):
                block = blocks[at : at + DIGEST_BYTES]
                value = batch.get(_KEY + block)
                if value is not None and value.startswith(pack):
                    batch.delete(_KEY + block)
            batch.delete(key)

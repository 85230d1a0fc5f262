"""Brings a table to the head of the log, from its own head or from the newest checkpoint; and writes checkpoints.

The table is a cache of the fold. A table that is empty or does not continue this log is filled again in one batch, so that every reader
sees the fold at some head.
"""

import itertools
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.errors import BrokenLogError, DamageError, FormatVersionError, StoreError
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.log import checkpoint
from tensorstore_ck.log.cache import Batch, MemoryTable, Reader, Table
from tensorstore_ck.log.checkpoint import Checkpoint
from tensorstore_ck.log.entry import Entry, EntryReader, chain_break
from tensorstore_ck.log.fold import fold
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.log.store_folders import logs_in
from tensorstore_ck.log.table_rows import Head
from tensorstore_ck.log.watermark import Watermark

_logger: Final = logging.getLogger("tensorstore_ck.log")
MIN_TAIL_ENTRIES: Final = 64
MAX_TAIL_ENTRIES: Final = 2000
_CHECKPOINT_TRIES: Final = 4
_ORIGIN_KEY: Final = b"l/origin"
"""The number of the checkpoint from which the table was filled, until `verify` has compared it with the log."""
_TAIL_KEY: Final = b"l/tail"
_TAIL: Final = struct.Struct("<4Q")

Also = Callable[[Batch, int], object]
"""Writes rows that belong to the entry of that number into this host's cache."""


class EmptiedError(Exception):
    """Another process of this host emptied the table."""


class Tail(NamedTuple):
    """The entries since the newest checkpoint that this host knows; kept in its table."""

    checkpoint_n: int
    checkpoint_bytes: int
    entries: int
    entry_bytes: int

    def is_due(self) -> bool:
        """Whether reading the tail costs more than reading the checkpoint."""
        return self.entries >= MIN_TAIL_ENTRIES and (self.entry_bytes > self.checkpoint_bytes or self.entries >= MAX_TAIL_ENTRIES)

    @classmethod
    def read(cls, reader: Reader) -> "Tail":
        """From a table or batch."""
        value = reader.get(_TAIL_KEY)
        return cls(*_TAIL.unpack(value)) if value is not None else cls(0, 0, 0, 0)

    def write(self, batch: Batch) -> None:
        """Into a batch."""
        batch.put(_TAIL_KEY, _TAIL.pack(*self))


@dataclass(eq=False, repr=False)
class Follower:
    """Reads one log for any number of tables. See `Log` for the arguments."""

    backend: Backend
    chain: EntryReader
    watermark: Watermark
    prefix: str
    on_swept: Callable[[Batch, Sequence[Ulid]], None]
    may_begin: bool
    require_store: Callable[[], object]
    _next_checkpoint_try = 0
    _unusable: set[int] = field(default_factory=set, init=False)
    """Checkpoints that this build cannot use, such as those of a build with another fold."""

    def follow(self, table: Table, cached: Head | None = None, *, next_first: bool = False) -> Head:
        """Folds every entry that was acknowledged before this call, and returns the head.

        `cached`: a head that the table has had; by default it is read. `next_first`: see `Log.readable_view`.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
            LogChangedError: the log went back or was forked, with ``rollback="error"``.
            EmptiedError, TableError: try again.
        """
        head = cached = cached or RefTable(table).head()
        seen = [] if (known := self.watermark.last_seen()) is None else [known]
        try:
            while True:
                newer = None if head is None else self._behind(head, next_first)
                if head is not None and newer is not None:
                    head, met = self._fold_all(table, head, newer, known)
                    break
                if head is not None and self.watermark.is_news(head, self.chain.name(head.n)):
                    seen.append(head)
                filled, apart, met = self._fold_apart(known)
                if _replace(table, head, apart):
                    head = filled
                    break
                head = RefTable(table).head()  # another process of this host was faster
        except BrokenLogError:
            self.require_store()  # it may be the log of another store, which is at the same path now
            raise
        if head.n == 0:
            self._require_only_log()
        _logger.debug("followed the log from %s to entry %d", f"entry {cached.n}" if cached else "its start or a checkpoint", head.n)
        lost = [entry for entry in seen if entry.n and (met.get(entry.n) or self._hash_of(entry.n, head)) != entry.hash]
        self.watermark.check(max(lost, default=None), head, self.chain.name)
        return head

    def fill(self, table: Table) -> None:
        """Fills a table again whose rows are damaged.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
            TableError: try again.
        """
        _, filled, _ = self._fold_apart(None)
        with table.batch() as batch:
            _write_all(batch, filled)

    def fold_readable(self, table: Table) -> RefTable | None:
        """Folds the entries of a broken log up to the first one that cannot be read, or takes what a checkpoint has.

        Returns None if it is in `table`, which was at an entry of this log before.
        """
        cached = RefTable(table).head()
        if cached is not None and self.is_entry(cached):
            with suppress(EmptiedError):
                self._fold_while_readable(table, cached)
            return None
        apart = MemoryTable()
        self._fold_while_readable(apart, self._start_readable(apart))
        return RefTable(apart)

    def is_entry(self, head: Head) -> bool:
        """Whether the log has this entry."""
        with suppress(BrokenLogError):
            entry = self.chain.read(head.n)
            return entry is not None and entry.hash == head.hash
        return False

    def _fold_while_readable(self, table: Table, head: Head) -> None:
        with suppress(BrokenLogError):
            while (entry := self.chain.read(head.n + 1)) is not None and entry.prev == head.hash:
                self.fold(table, [entry])
                head = Head(entry.n, entry.hash)

    def _start_readable(self, table: Table) -> Head:
        """Begins with the newest checkpoint, even if its entry is gone."""
        with suppress(BrokenLogError):
            return self._start_from_checkpoint(table)
        with suppress(BrokenLogError):
            if (first := self.chain.read(1)) is not None and first.prev != self.chain.genesis:
                return Head(0, self.chain.genesis)  # another store's
        for n, _ in self._listed_checkpoints():
            name = checkpoint.checkpoint_name(self.prefix, n)
            with suppress(DamageError, FormatVersionError), table.batch() as batch:
                found = checkpoint.decode_checkpoint(self.backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
                checkpoint.load(batch, found)
                batch.put(_ORIGIN_KEY, b"%d" % found.n)
                return Head(found.n, found.entry_hash)
        return Head(0, self.chain.genesis)

    def fold_until(self, head: Head | None) -> MemoryTable:
        """The fold of the log's entries up to `head`, without checkpoints.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
        """
        apart = MemoryTable()
        if head is None:
            return apart
        for entries in self.chain.entries(0, self.chain.genesis, at_least=head.n):
            self.fold(apart, [entry for entry in entries if entry.n <= head.n])
            if entries[-1].n >= head.n:
                break
        return apart

    def fold(self, table: Table, entries: Sequence[Entry], also: Also | None = None) -> None:
        """Folds entries that follow the table's head, skipping those that it has. `also` writes the rows of the last one in the same batch.

        Raises:
            EmptiedError, TableError: try again.
        """
        with table.batch() as batch:
            head = RefTable(batch).head() or Head(0, self.chain.genesis)
            tail = Tail.read(batch)
            for entry in entries:
                if entry.n <= head.n:
                    continue  # another process of this host was faster
                if entry.n != head.n + 1 or entry.prev != head.hash:
                    raise EmptiedError
                swept = fold(entry, batch)
                if swept:
                    self.on_swept(batch, swept)
                head = Head(entry.n, entry.hash)
                tail = tail._replace(entries=tail.entries + 1, entry_bytes=tail.entry_bytes + entry.size_bytes)
            tail.write(batch)
            if also is not None:
                also(batch, entries[-1].n)

    def _fold_apart(self, known: Head | None) -> tuple[Head, MemoryTable, dict[int, Digest]]:
        """The log's head, its fold, and hashes as in `_fold_all`. Fills a separate table, so that no reader sees a partial one."""
        apart = MemoryTable()
        start = self._start_from_checkpoint(apart)
        newer = self.chain.entries(start.n, start.hash, at_least=self.chain.last_listed(start.n))
        head, met = self._fold_all(apart, start, newer, known)
        return head, apart, met

    def _fold_all(self, table: Table, head: Head, newer: Iterator[list[Entry]], known: Head | None) -> tuple[Head, dict[int, Digest]]:
        """Folds the `newer` entries; returns the new head, and the hashes of both heads and, if it was read, of entry `known`."""
        met = {head.n: head.hash}
        for entries in newer:
            self.fold(table, entries)
            head = Head(entries[-1].n, entries[-1].hash)
            met.update((entry.n, entry.hash) for entry in entries if known is not None and entry.n == known.n)
        return head, {**met, head.n: head.hash}

    def _behind(self, head: Head, next_first: bool) -> Iterator[list[Entry]] | None:
        """The entries after the table's head; None if that is not an entry of this log."""
        if next_first and (entry := self.chain.read(head.n + 1)) is not None:
            return itertools.chain([[entry]], self.chain.entries(entry.n, entry.hash)) if entry.prev == head.hash else None
        if next_first:
            return iter(()) if self.is_entry(head) else None
        batches = self.chain.entries(head.n - 1, None, window=2)
        first = next(batches, [])
        if not first or first[0].hash != head.hash:
            return None
        return itertools.chain([first[1:]] if first[1:] else [], batches)

    def _hash_of(self, n: int, head: Head) -> Digest | None:
        """The hash of entry `n`, which was there before the log was followed to `head`; None if it is gone."""
        entry = self.chain.read(n)
        if entry is not None and n > head.n:
            raise self.chain.broken(head.n + 1, f"is missing, though entry {n} is there")
        return entry.hash if entry is not None else None

    def _require_first(self) -> None:
        """Checks entry 1, which identifies the store. A checkpoint does not, and the entries before it are not read."""
        first = self.chain.read(1)
        if first is None:
            raise self.chain.broken(1, "is missing")
        if first.prev != self.chain.genesis:
            raise chain_break(self.chain.name(1))

    def _require_only_log(self) -> None:
        """Checks that an empty log is the only one: if store.json names a wrong log, gc must not free everything."""
        self.require_store()
        others = [] if self.may_begin else [log for log in logs_in(self.backend) if log != self.prefix]
        if others:
            raise self.chain.broken(1, f"is missing, though the store has another log ({', '.join(others)}); store.json may be wrong")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _start_from_checkpoint(self, table: Table) -> Head:
        """Fills an empty table from the newest checkpoint that matches the log."""
        for n, size_bytes in itertools.islice(self._listed_checkpoints(), _CHECKPOINT_TRIES):
            usable = self._read_checkpoint(n)
            if usable is not None:
                self._require_first()
                with table.batch() as batch:
                    checkpoint.load(batch, usable)
                    batch.put(_ORIGIN_KEY, b"%d" % n)
                    Tail(n, size_bytes, 0, 0).write(batch)
                return Head(n, usable.entry_hash)
        return Head(0, self.chain.genesis)

    def _read_checkpoint(self, n: int) -> Checkpoint | None:
        """The checkpoint at `n`, if it is usable and was made from this log."""
        name = checkpoint.checkpoint_name(self.prefix, n)
        try:
            decoded = checkpoint.decode_checkpoint(self.backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
        except (DamageError, FormatVersionError):
            self._unusable.add(n)
            return None
        entry = self.chain.read(n)
        if entry is None:
            raise self.chain.broken(n, f"is missing, though {name} was made from it")
        return decoded if decoded.n == n and decoded.entry_hash == entry.hash else None

    def verify(self, table: Table) -> None:
        """If the table was filled from a checkpoint, folds the whole log and compares: the checkpoint may contain any rows.

        Raises:
            BrokenLogError: it was not made from this log.
            TableError: try again.
        """
        with table.batch() as batch:
            origin, head, rows = batch.get(_ORIGIN_KEY), RefTable(batch).head(), list(RefTable(batch).items())
        if origin is None or head is None:
            return
        if list(RefTable(self.fold_until(head)).items()) != rows:
            name = checkpoint.checkpoint_name(self.prefix, int(origin))
            raise BrokenLogError(f"{name} does not match the log: it was damaged or forged; run `tsck fsck --repair`", object_id=name)
        with table.batch() as batch:
            if batch.get(_ORIGIN_KEY) == origin:
                batch.delete(_ORIGIN_KEY)

    def is_unverified(self, table: Table) -> bool:
        """Whether the table was filled from a checkpoint that `verify` has not compared with the log."""
        return table.get(_ORIGIN_KEY) is not None

    def write_checkpoint_if_due(self, table: Table, n: int, make_durable: Callable[[int], None] | None) -> None:
        """Writes a checkpoint if reading the entries since the last one costs more. Calls `make_durable` with the number of its entry.

        None: this process writes none.
        """
        if make_durable is None or n < self._next_checkpoint_try:
            return
        with suppress(StoreError):  # a checkpoint only saves time
            tail = Tail.read(table)
            self._next_checkpoint_try = n + max(1, MIN_TAIL_ENTRIES - tail.entries)  # a shorter tail is never due
            if tail.is_due():
                self._next_checkpoint_try = n + MIN_TAIL_ENTRIES
                tail = self._written_by_others(tail, n)
                if tail.is_due():
                    tail = self._write_checkpoint(table, make_durable) or tail
                with table.batch() as batch:
                    tail.write(batch)

    def _written_by_others(self, tail: Tail, n: int) -> Tail:
        """The tail since the newest checkpoint in the store that is not known to be unusable."""
        for other, size_bytes in self._listed_checkpoints():
            if tail.checkpoint_n < other <= n and other not in self._unusable:
                entries = n - other
                return Tail(other, size_bytes, entries, tail.entry_bytes * entries // max(tail.entries, 1))
        return tail

    def _write_checkpoint(self, table: Table, make_durable: Callable[[int], None]) -> Tail | None:
        with table.batch() as batch:  # so that nobody folds further entries meanwhile
            head = RefTable(batch).head()
            sealed = checkpoint.dump(batch, head.n, head.hash) if head is not None else None
        if head is None or sealed is None:
            return None
        make_durable(head.n)  # a checkpoint must not outlive its entry
        self.backend.create(checkpoint.checkpoint_name(self.prefix, head.n), sealed)
        return Tail(head.n, len(sealed), 0, 0)

    def spare_checkpoints(self, head: Head) -> list[str]:
        """The names of checkpoints that are older than the newest usable ones of entries up to `head`.

        To follow the log takes no others. fsck and salvage have them in place of lost entries, which is why unusable ones do not count.
        """
        made, usable = [n for n, _ in self._listed_checkpoints() if n <= head.n], 0
        for number, n in enumerate(made[:-1], 1):
            usable += self._read_checkpoint(n) is not None
            if usable == _CHECKPOINT_TRIES:
                return [checkpoint.checkpoint_name(self.prefix, spare) for spare in made[number:]]
        return []

    def _listed_checkpoints(self) -> Iterator[tuple[int, int]]:
        """(entry number, bytes), newest first."""
        listed = self.backend.list(checkpoint.checkpoint_folder(self.prefix))
        numbered = [(checkpoint.checkpoint_number(info.name), info.size_bytes) for info in listed]
        yield from sorted(((n, size) for n, size in numbered if n), reverse=True)


def _replace(table: Table, head: Head | None, filled: MemoryTable) -> bool:
    """Replaces the whole table, with the block index, which depends on the fold; returns whether it did.

    Does nothing if its head is no longer the unusable `head`: then another process has filled it already.
    """
    with table.batch() as batch:
        if RefTable(batch).head() != head:
            return False
        _write_all(batch, filled)
    return True


def _write_all(batch: Batch, filled: MemoryTable) -> None:
    """Replaces every row in one batch: no reader meets an empty table."""
    empty(batch)
    for key, value in filled.scan(b""):
        batch.put(key, value)


def empty(batch: Batch) -> None:
    """Removes every row."""
    batch.clear(b"")
    Tail(0, 0, 0, 0).write(batch)

"""Log entries: sealed, numbered, hash-chained; `EntryReader`, which reads them in order, and `EntryWriter`, which creates the
next one, and finds out whether it is there when the backend did not say. Format: FORMAT.md, "Log entries".

A writer decodes an entry before it writes it, so that no reader rejects it. Entries are created in order, so the log ends at the first
number that is not there; an entry missing before another one is damage. Knows no ref table.
"""

import logging
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.backend.reserve import within_reserve
from tensorstore_ck.common.ids import Clock, Digest, derived_hash
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.errors import (
    BackendUnavailableError,
    BrokenLogError,
    CorruptObjectError,
    DamageError,
    FormatVersionError,
    InvalidOptionError,
    NoSpaceError,
    StoreError,
    UndecidedError,
)
from tensorstore_ck.format.sealed import object_hash, seal, unseal
from tensorstore_ck.log.field_checks import COUNT, DIGEST, MAX_ACTOR_CHARS, ULID, first_invalid
from tensorstore_ck.log.operations import Op, op_problem

MAX_ENTRY_BYTES: Final = 1 << 20
ENTRIES_A_FOLDER: Final = 1000
MAX_BATCH_ENTRIES: Final = 500
_READERS: Final = 16
_GENEROUS: Final = MAX_ENTRY_BYTES + 1  # so that the decoder reports an entry that is too long, as damage of that entry

_logger: Final = logging.getLogger("tensorstore_ck.log")
_LONGEST_DELAY_TRIES: Final = 3
"""The first pause after a lost race, in multiples of a try. Pauses must not grow: a winner never pauses, so losers would starve."""
_LEAST_TRY_SECONDS: Final = 0.001
_MOST_TRY_SECONDS: Final = 1.0
_REMEMBERED_WRITES: Final = 1000
RESEND_DELAYS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 10, 10, 10, 10, 10, 10, 10, 10)
"""Seconds between tries to find out whether an entry was written: about 100 in all."""
_RESEND_SECONDS: Final = 120.0
"""No try begins after this time. A single try may wait long for a server that hangs."""
_FREEING: Final = frozenset(
    {"expire", "untag", "unpin", "purge", "policy", "reset", "abort", "condemn", "sweep", "relocate", "place", "rescue", "settle"}
)
"""Operations of which an entry can consist that lets gc free something, or ends a save that failed for space."""

_ADVICE: Final = (
    "see what is affected with `tsck fsck`. `tsck fsck --repair --from OTHER_STORE` takes the entry from a copy of this store; "
    "without one, `tsck salvage` makes a new log of what is left"
)


class Entry(NamedTuple):
    """One decoded entry."""

    n: int
    prev: Digest
    """The hash of entry n - 1."""
    write_id: bytes
    """16 bytes that identify this exact entry, so that a writer recognizes its own."""
    time_ns: int
    actor: str
    ops: tuple[Op, ...]
    hash: Digest
    size_bytes: int


def genesis_hash(uuid: bytes) -> Digest:
    """The `prev` of entry 1."""
    return derived_hash("genesis", uuid)


def folder_name(prefix: str, n: int) -> str:
    """The folder of entry `n`, with the slash."""
    return f"{prefix}/{n // ENTRIES_A_FOLDER:017d}/"


def entry_name(prefix: str, n: int) -> str:
    """The name of entry `n` in the store."""
    return f"{prefix}/{n // ENTRIES_A_FOLDER:017d}/{n:020d}"


def seal_entry(n: int, prev: Digest, ops: Sequence[Op], *, write_id: bytes, time_ns: int, actor: str) -> tuple[bytes, Entry]:
    """The bytes of an entry, and the decoded entry.

    Raises:
        InvalidOptionError: an operation that readers would refuse, or more than 1 MiB.
    """
    at = {"n": n, "prev": prev, "write_id": write_id, "time_ns": time_ns, "actor": actor[:MAX_ACTOR_CHARS]}
    sealed = seal("log", {**at, "ops": [op.fields for op in ops], "signatures": []})
    try:
        return sealed, decode_entry(sealed, f"the new log entry {n}", n)
    except CorruptObjectError as exc:
        raise InvalidOptionError(f"this operation cannot be stored: {exc}", object_id="ops") from exc


def decode_entry(data: bytes, name: str, n: int) -> Entry:
    """Decodes entry `n`. Raises `CorruptObjectError`: not that entry, or not valid; `FormatVersionError`: written by a newer format."""
    if len(data) > MAX_ENTRY_BYTES:
        raise CorruptObjectError(f"{name} has {len(data)} bytes, more than the {MAX_ENTRY_BYTES} of an entry", object_id=name)
    body = unseal("log", data, name)
    problem = None
    if body.get("n") != n or type(body["n"]) is not int:
        problem = f"its number is {body.get('n')!r:.40}"
    elif first_invalid((DIGEST, ULID, COUNT), (body.get("prev"), body.get("write_id"), body.get("time_ns"))) is not None:
        problem = "no valid hash of the entry before, write id or time"
    elif type(body.get("actor")) is not str or len(body["actor"]) > MAX_ACTOR_CHARS or type(body.get("signatures")) is not list:
        problem = "no valid actor or signatures"
    elif type(body.get("ops")) is not list:
        problem = "no operations"
    else:
        problem = next(filter(None, map(op_problem, body["ops"])), None)
    if problem is not None:
        raise CorruptObjectError(f"{name} is not a valid log entry: {problem}", object_id=name)
    ops, digest = tuple(map(Op, body["ops"])), object_hash(data)
    return Entry(n, body["prev"], body["write_id"], body["time_ns"], actor=body["actor"], ops=ops, hash=digest, size_bytes=len(data))


class EntryReader:
    """The entries of one log."""

    def __init__(self, backend: Backend, *, uuid: bytes, prefix: str) -> None:
        self._backend = backend
        self._prefix = prefix
        self.name: Callable[[int], str] = partial(entry_name, prefix)
        """The name of entry `n`."""
        self.genesis: Digest = genesis_hash(uuid)
        self.last: Entry | None = None
        """What was read or created last: each refresh reads the head again, and need not decode it again."""

    def read(self, n: int) -> Entry | None:
        """Entry `n`; None if it is not there. Raises `BrokenLogError` if it is damaged."""
        name, last = self.name(n), self.last
        try:
            data = self._backend.get_if_there(name, max_bytes=_GENEROUS)
            if data is None:
                return None
            if last is None or last.n != n or last.hash != object_hash(data):
                self.last = last = decode_entry(data, name, n)
            return last
        except CorruptObjectError as exc:
            raise self.broken(n, f"is damaged ({exc})") from exc

    def entries(self, after: int, prev: Digest | None, *, at_least: int = 0, window: int = 1) -> Iterator[list[Entry]]:
        """The entries from ``after + 1`` on, in batches, until the first that is not there.

        Args:
            after: The number of the entry to begin after.
            prev: Its hash; None: the first entry is not checked.
            at_least: An entry that is known to be there; a log that ends before it is broken.
            window: How many to read first, in parallel if requests are slow. Then two, four and so on, to notice a missing one.

        Raises:
            BrokenLogError: an entry is damaged, off the hash chain, or missing before others.
        """
        next_window = 2
        while True:
            window = min(MAX_BATCH_ENTRIES, max(window, at_least - after))
            batch = self._read_window(after + 1, window)
            for entry in batch:
                if prev is not None and entry.prev != prev:
                    raise chain_break(self.name(entry.n))
                prev = entry.hash
            if batch:
                yield batch
            after += len(batch)
            if len(batch) < window and after < at_least:
                raise self.broken(after + 1, f"is missing, though entry {at_least} was written")
            if len(batch) < window:
                return
            window, next_window = next_window, min(2 * next_window, _READERS)

    def entries_from(self, start: int) -> Iterator[Entry]:
        """The entries from `start` on, each checked against the one before. Raises the errors of `entries`."""
        before = self.read(start - 1) if start > 1 else None
        if start > 1 and before is None:
            return
        for batch in self.entries(start - 1, self.genesis if before is None else before.hash):
            yield from batch

    def last_listed(self, start: int) -> int:
        """The highest listed number from `start` on: folder by folder, up to the second one without an entry."""
        highest, number, missing = start, start, 0
        while missing < 2:
            inside = max(self.listed(folder_name(self._prefix, number)), default=0)
            missing = 0 if inside else missing + 1
            highest = max(highest, inside)
            number += ENTRIES_A_FOLDER
        return highest

    def listed(self, prefix: str) -> Iterator[int]:
        """The numbers of the entries whose names begin with `prefix`, in no order; other objects are skipped."""
        pattern = re.compile(rf"{re.escape(self._prefix)}/([0-9]{{17}})/(\1[0-9]{{3}})")
        for info in self._backend.list(prefix):
            match = pattern.fullmatch(info.name)
            if match:
                yield int(match[2])

    def broken(self, n: int, what: str) -> BrokenLogError:
        """The error for a damaged entry."""
        name = self.name(n)
        return BrokenLogError(f"log entry {name} {what}: {_ADVICE}", object_id=name)

    def unknown_operation(self, n: int, op: str) -> FormatVersionError:
        """The error for writing after entry `n`, which has a critical operation that this build does not know."""
        name, entry = self.name(n), self.read(n)
        return FormatVersionError(
            f"log entry {name}{'' if entry is None else f' by {entry.actor}'} has the operation {op!r}, which this build does not know: "
            "from that entry on it may read this store, not write to it. Upgrade tensorstore_ck; or, if no build knows it, make a new log "
            "without it with `tsck salvage --leave-out-unknown`",
            object_id=name,
        )

    def _read_window(self, first: int, count: int) -> list[Entry]:
        """Entries from `first` on, until one is not there; in parallel if requests are slow."""
        entries: list[Entry] = []
        if self._backend.is_local or count == 1:
            while len(entries) < count and (entry := self.read(first + len(entries))) is not None:
                entries.append(entry)
            return entries
        found: dict[int, Entry | None] = {}

        def read(n: int) -> None:
            found[n] = self.read(n)

        for_each(range(first, first + count), read, min(_READERS, count))
        for n, entry in sorted(found.items()):
            if entry is not None and n == first + len(entries):
                entries.append(entry)
            elif entry is not None:
                # Read while others were appending: an entry that was missing before its successors came may be there now.
                between = self.read(first + len(entries))
                if between is None:
                    raise self.broken(first + len(entries), f"is missing, though entry {n} is there")
                return [*entries, between]
        return entries


def chain_break(name: str) -> BrokenLogError:
    """The error for an entry that does not follow the one before it."""
    return BrokenLogError(
        f"log entry {name} does not follow the entry before it, so that one of them was replaced: {_ADVICE}", object_id=name
    )


class Appended(NamedTuple):
    """The outcome of an `append`."""

    n: int
    """The entry's number; the head's if nothing was appended."""
    ops: tuple[Op, ...]
    time_ns: int = 0
    """The entry's time; 0 if nothing was appended."""


@dataclass(eq=False, repr=False)
class EntryWriter:
    """Creates the entries of one open log. The caller holds the lock of the `Log`.

    On a full disk, an entry that frees space uses the reserve, which other entries leave alone.
    """

    backend: Backend
    chain: EntryReader
    clock: Clock
    sleep: Callable[[float], object]
    require_store: Callable[[], object]
    shared: bool
    _durable_n = 0
    _undecided: UndecidedError | None = field(default=None, init=False)
    _written: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_WRITES), init=False)
    """The numbers and write ids of the entries that this object tried to create."""
    created: set[int] = field(default_factory=set, init=False)
    """The numbers of those that it knows it has created."""

    def require_decided(self) -> None:
        """Checks that no earlier entry can arrive late and overwrite a later one, which only a backend for a single writer allows.

        Raises:
            UndecidedError: one can.
        """
        if self._undecided is not None and not self.shared:
            raise self._undecided

    def create(self, sealed: bytes, entry: Entry) -> bool:
        """Creates the entry; returns whether the number is ours. Sends the same bytes until the number is taken.

        Once the bytes were sent, an absent entry proves nothing: the request may still be in progress.

        Raises:
            UndecidedError: the backend did not say whether the entry is there.
        """
        name = self.chain.name(entry.n)
        self.require_store()
        self.make_durable(entry.n - 1)
        self._written.append((entry.n, entry.write_id))
        sent, trouble, began_ns = False, "the backend did not report the outcome", self.clock()
        for delay in RESEND_DELAYS:
            if self.clock() - began_ns > _RESEND_SECONDS * 1e9:
                break
            try:
                outcome = _create_entry(self.backend, name, sealed, entry.ops)
            except BackendUnavailableError as exc:
                outcome, trouble = Created.UNKNOWN, str(exc)
            except StoreError as exc:
                if not sent:
                    raise  # refused, and nothing was sent before
                outcome, trouble = Created.UNKNOWN, str(exc)
            if _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("entry %d (%s): %s", entry.n, ", ".join(op.name for op in entry.ops), outcome.value)
            if outcome is Created.CREATED:
                self._durable_n = entry.n
                self.created.add(entry.n)
                self.chain.last = entry
                return True
            sent = True
            try:
                winner = self.chain.read(entry.n)
                if winner is not None and winner.write_id != entry.write_id:
                    return False
                if winner is not None:
                    self.make_durable(entry.n)
                    self.created.add(entry.n)
                    return True
            except DamageError:
                raise
            except StoreError as exc:
                trouble = str(exc)
            self.sleep(delay)
        next_step = "`Store.retrying` or `Store.checkout` reads the log" if self.shared else "open the store again"
        self._undecided = UndecidedError(
            f"log entry {name} may or may not have been written ({trouble}): {next_step} when the backend answers; "
            f"the operation happened if that entry has the write id {entry.write_id.hex()}",
            object_id=entry.write_id.hex(),
        )
        if not self.shared:
            self._undecided.retry = "after_reopen"
        raise self._undecided

    def make_durable(self, n: int) -> None:
        """An entry found by reading may not be durable yet; later entries must not become durable before it."""
        if n > self._durable_n:
            self.backend.sync_folders(self.chain.name(n))
            self._durable_n = n

    def wrote(self, n: int) -> bool:
        """Whether this object created entry `n`, even if an interrupt or a lost reply hid the success.

        Raises:
            StoreError: the entry cannot be read.
        """
        tried = [write_id for number, write_id in list(self._written) if number == n]
        entry = self.chain.read(n) if tried else None
        return entry is not None and entry.write_id in tried


def race_delay(lost: int, try_ns: int) -> float:
    """Seconds until the next try, after `lost` lost races before this one: shorter for those that have waited longer."""
    return min(max(try_ns * 1e-9, _LEAST_TRY_SECONDS), _MOST_TRY_SECONDS) * max(_LONGEST_DELAY_TRIES - lost, 1)


def _create_entry(backend: Backend, name: str, sealed: bytes, ops: Sequence[Op]) -> Created:
    """See `Backend.create`. Raises `NoSpaceError` if the disk is full."""
    create, kinds = partial(backend.create, name, sealed), {op.name for op in ops} - {"sign"}
    try:
        return within_reserve(backend, create) if kinds and kinds <= _FREEING else create()
    except NoSpaceError as exc:
        if not backend.is_local:
            raise
        command = shlex.join(["tsck", "usage", "-s", backend.url])
        raise NoSpaceError(f"{exc}. `{command}` shows what gc can free, and how", object_id=exc.object_id) from exc

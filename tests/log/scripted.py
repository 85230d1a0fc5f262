"""A log to test with, and a backend around another one that plays tricks on `create` and counts calls."""

import itertools
from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from typing import Any

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Digest, Ulid, block_id
from tensorstore_ck.errors import BackendUnavailableError, NoSpaceError
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.sealed import object_hash
from tensorstore_ck.log import Entry, Log, Op, RefTable
from tensorstore_ck.log.cache import MemoryTable, Table
from tensorstore_ck.log.entry import decode_entry, genesis_hash, seal_entry
from tensorstore_ck.log.fold import fold

Trick = Callable[[str, bytes], Created]
UUID = bytes(range(16))
_numbers = itertools.count(1)


def new_id() -> Ulid:
    """Never the same twice in this process."""
    return Ulid(next(_numbers).to_bytes(16, "big"))


def open_log(backend: Backend, table: Table | None = None, **options: Any) -> Log:
    """A log that never really sleeps."""
    numbers = itertools.count(1000)
    settings: dict[str, Any] = {"clock": lambda: next(numbers), "sleep": lambda _seconds: None, "jitter": lambda: 0.0, "actor": "me@host:1"}
    return Log(backend, MemoryTable() if table is None else table, uuid=UUID, new_id=new_id, **settings | options)


def put_op(
    ref: str, number: int, *, step: int | None = None, parent: Digest | None = None, txn: bytes | None = None, **metrics: float
) -> Op:
    """A save of a snapshot with the content `number`; the same content on two refs is two snapshots with one root."""
    ids = block_id(b"part %d" % number)
    record = Record(ref, step, parent, b"\x80", metrics, 1, [new_id()], ids, 100 * number, number)
    ulid = Ulid(block_id(record.root() + ref.encode())[:16])
    return Op.put(ref, ulid, record, record.encode(), anchor=0, txn=txn or ulid)


def mark_op(name: str) -> Op:
    """An operation that `name` distinguishes, that has no preconditions and changes nothing."""
    return Op({"op": "test", "critical": False, "name": name})


def names_in(backend: Backend) -> list[str]:
    """The names of the `mark_op`s in the log, in order, by a reader who knows nothing yet."""
    log = open_log(backend)
    log.sync()
    return [str(op.fields["name"]) for entry in log.entries() for op in entry.ops]


def append_puts(log: Log, count: int, ref: str = "runs/gpt", first: int = 0) -> None:
    for number in range(first, first + count):
        log.append(lambda view, number=number: [put_op(ref, number, step=number)])  # type: ignore[misc]


def dump_of(log: Log) -> dict[bytes, bytes]:
    return dict(log.view()._reader.scan(b"r/"))


def sealed_by_hand(n: int, prev: Digest, *ops: Op) -> tuple[bytes, Digest]:
    sealed, _ = seal_entry(n, prev, ops, write_id=new_id(), time_ns=1, actor="by hand")
    return sealed, object_hash(sealed)


def entries_of(log: Sequence[Sequence[Op]]) -> list[Entry]:
    """An entry for each list of operations, as a reader decodes it."""
    prev, entries = genesis_hash(UUID), []
    for n, operations in enumerate(log, start=1):
        sealed, entry = seal_entry(n, prev, operations, write_id=new_id(), time_ns=n, actor="me")
        assert decode_entry(sealed, "entry", n) == entry
        entries.append(entry)
        prev = entry.hash
    return entries


def folded(entries: Sequence[Entry], table: MemoryTable | None = None) -> MemoryTable:
    """The table of these entries, or `table` after them."""
    table = table or MemoryTable()
    for entry in entries:
        with table.batch() as batch:
            fold(entry, batch)
    return table


class Tricky(MemoryBackend):
    """A backend whose calls go through `before`, and whose creates of log entries go through `on_create`."""

    def __init__(self, inner: Backend | None = None, *, is_local: bool = True) -> None:
        super().__init__()
        self.inner = MemoryBackend() if inner is None else inner
        self.is_local = is_local
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda _what, _name: None
        self.on_create: MutableSequence[Trick] = []
        """What the next creates of entries do instead; each is used once."""
        self.sent: list[tuple[str, bytes]] = []

    def _call(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        self.before(what, name)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self._call("get", name)
        return self.inner.get(name, max_bytes=max_bytes)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._call("list", prefix)
        return self.inner.list(prefix)

    def folders(self, start: str) -> Collection[str]:
        self._call("folders", start)
        return self.inner.folders(start)

    def sync_folders(self, name: str) -> None:
        self._call("sync_folders", name)
        self.inner.sync_folders(name)

    def create(self, name: str, data: Buffer) -> Created:
        self._call("create", name)
        if name.startswith("log/"):
            self.sent.append((name, bytes(data)))
            if self.on_create:
                return self.on_create.pop(0)(name, bytes(data))
        return self.inner.create(name, data)

    # --- tricks for `on_create` -------------------------------------------------------------------------------------------

    def lands_unknown(self, name: str, data: bytes) -> Created:
        self.inner.create(name, data)
        return Created.UNKNOWN

    def lands_exists(self, name: str, data: bytes) -> Created:
        """A client that sent it twice, and lost the first reply."""
        self.inner.create(name, data)
        return Created.EXISTS

    def lands_lost(self, name: str, data: bytes) -> Created:
        self.inner.create(name, data)
        raise BackendUnavailableError("injected: reply lost")

    def absent_unknown(self, _name: str, _data: bytes) -> Created:
        return Created.UNKNOWN

    def absent_down(self, _name: str, _data: bytes) -> Created:
        raise BackendUnavailableError("injected: down")

    def refused(self, _name: str, _data: bytes) -> Created:
        raise NoSpaceError("injected: full")

    def loses_to(self, other: Callable[[], object]) -> Callable[[str, bytes], Created]:
        """Somebody else is faster."""

        def create(name: str, data: bytes) -> Created:
            other()
            return self.inner.create(name, data)

        return create

    def delayed(self, until: int, then: Callable[[Created], object] = lambda _outcome: None) -> Callable[[str, bytes], Created]:
        """Absent and unknown now; lands at the `until`-th call from here."""

        def create(name: str, data: bytes) -> Created:
            left, before = until, self.before

            def tick(what: str, called: str) -> None:
                nonlocal left
                before(what, called)
                left -= 1
                if left == 0:
                    self.before = before
                    then(self.inner.create(name, data))

            self.before = tick
            return Created.UNKNOWN

        return create


def follow(view: RefTable, ref: str) -> list[int]:
    """The steps in a branch's history, oldest first."""
    return [info.step or 0 for info in view.history(ref, newest_first=False)]


def numbers(entries: Iterator[Entry]) -> list[int]:
    return [entry.n for entry in entries]

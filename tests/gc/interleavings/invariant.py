"""What must be true in every state, derived from the backend's bytes alone.

The log is folded here once more, entry by entry, for every log that an exploration meets; no engine under test has a say.
Checked are the closure of all roots (it is there, unchanged), and that what was saved can be read back by a fresh reader.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import msgpack

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.format.part import decode_part, part_name
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.relocation import decode_relocation
from tensorstore_ck.format.store_config import StoreConfig
from tensorstore_ck.log import Entry, ObjectKey, Objects, RefTable, SnapshotRow
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.entry import decode_entry, genesis_hash
from tensorstore_ck.log.fold import fold
from tests.gc.interleavings.actor import copy_table, make_process
from tests.gc.interleavings.contents import Contents, log_name
from tests.gc.interleavings.schedule import Violation

BLOCK_BYTES: Final = 5000
"""More than what lies inside a part."""
READER: Final = 0xFFFF
CONFIG: Final = StoreConfig(1, "00000000-0000-4000-8000-000000000001", 4 << 20, "blake3", (), "log", True)
RELEASING: Final = frozenset(("purge", "unpin"))
"""Operations that may end what holds a snapshot."""


class Folded(NamedTuple):
    """What a log says."""

    table: MemoryTable
    closure: Mapping[str, bytes] = {}
    """The objects that reading its roots needs, as they were when the log first said so."""
    puts: frozenset[Ulid] = frozenset()
    """Snapshots that were published."""
    roots: frozenset[Ulid] = frozenset()
    condemned: frozenset[ObjectKey] = frozenset()
    swept: frozenset[ObjectKey] = frozenset()
    """Ever: no tombstone is forgotten here."""


class Invariant:
    """Checks contents of one store."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._uuid = uuid.UUID(config.uuid).bytes
        self._folded: dict[bytes, Folded] = {}
        self._parts: dict[bytes, frozenset[tuple[Ulid, int]]] = {}

    def check(self, contents: Contents) -> None:
        """Raises `Violation` when something is lost."""
        folded = self.folded(contents)
        for name, data in folded.closure.items():
            held = contents.objects.get(name)
            if held == data:
                continue
            if held is None or not name.startswith("parts/"):
                raise Violation(f"{name} is needed, and {'gone' if held is None else 'another object has its name'}")
            # Where a rank's blocks lie is not in the log: by another schedule they lie elsewhere, and the log is the same.
            closure = dict(self._closure(RefTable(folded.table), contents))
            return self._check_lists(folded._replace(closure=closure))
        return None

    def read_all(self, contents: Contents) -> None:
        """Reads every root as a user on another host would."""
        try:
            engine = make_process(contents.backend(), self._config, READER, self.folded(contents).table).engine()
            engine.log.sync()
            for info in roots(engine.log.view()):
                if info.ref != "ranks":  # many ranks: nothing reads such a snapshot yet
                    read_back(engine, info)
        except Exception as exc:
            raise Violation(f"a new reader fails: {exc!r}") from exc

    def folded(self, contents: Contents) -> Folded:
        """What the log in `contents` says."""
        n = contents.log_end
        known = self._folded.get(contents.entry(n))
        if known is not None:
            return known
        start = n
        while start and contents.entry(start) not in self._folded:
            start -= 1
        folded = self._folded[contents.entry(start)] if start else Folded(MemoryTable())
        for number in range(start + 1, n + 1):
            folded = self._folded[contents.entry(number)] = self._with_entry(folded, contents, number)
        folded = self._folded[contents.entry(n)] = folded._replace(closure=dict(self._closure(RefTable(folded.table), contents)))
        self._check_lists(folded)
        return folded

    def _with_entry(self, before: Folded, contents: Contents, n: int) -> Folded:
        entry = decode_entry(contents.entry(n), log_name(n), n)
        table = copy_table(before.table)
        head = RefTable(table).head()
        if entry.prev != (head.hash if head else genesis_hash(self._uuid)):
            raise Violation(f"log entry {n} does not follow the one before")
        with table.batch() as batch:
            fold(entry, batch)
        view = RefTable(table)
        condemned, swept = _lists(before, entry)
        puts = {Ulid(op.fields["snapshot"]): op.fields["txn"] for op in entry.ops if op.name == "put"}
        published = frozenset(ulid for ulid, txn in puts.items() if view.outcome(txn) is not None and view.snapshot(ulid) is not None)
        reached = frozenset(info.ulid for info in roots(view))
        names = {op.name for op in entry.ops}
        lost = before.roots - reached
        if lost and not names & RELEASING:
            raise Violation(f"log entry {n} ({names}) lets go of {len(lost)} snapshots, and has no operation that may")
        for ulid in reached | before.roots:
            if view.is_live(ulid) is not (ulid in reached):
                raise Violation(
                    f"log entry {n}: snapshot {ulid.hex()} is {'' if ulid in reached else 'not '}held, and the fold says otherwise"
                )
        return Folded(table, {}, before.puts | published, reached, condemned, swept)

    def _check_lists(self, folded: Folded) -> None:
        for objects, listed in ((folded.condemned, "condemned"), (folded.swept, "swept")):
            for key in objects:
                if key.name in folded.closure:
                    raise Violation(f"{key.name} is needed, and {listed}")

    def _closure(self, view: RefTable, contents: Contents) -> Iterator[tuple[str, bytes]]:
        """The objects that reading all roots needs."""

        def held(name: str) -> tuple[str, bytes]:
            data = contents.objects.get(name)
            if data is None:
                raise Violation(f"{name} is needed from log entry {contents.log_end} on, and not there")
            return name, data

        for info in roots(view):
            yield held(record_name(info.ulid))
            for ulid in decode_record(held(record_name(info.ulid))[1], "").parts:
                yield held(part_name(ulid))
                for pack, entry in self._extents(held(part_name(ulid))[1]):
                    for key in _way(view, pack, entry, lambda name: held(name)[1]):
                        yield held(key.name)

    def _extents(self, part_data: bytes) -> frozenset[tuple[Ulid, int]]:
        found = self._parts.get(part_data)
        if found is None:
            part = decode_part(part_data, "")
            found = self._parts[part_data] = frozenset((part.packs[row[0]], row[1]) for row in part.extents.tolist())
        return found


def _lists(before: Folded, entry: Entry) -> tuple[frozenset[ObjectKey], frozenset[ObjectKey]]:
    condemned, swept = set(before.condemned), set(before.swept)
    for op in entry.ops:
        objects = Objects.of_fields(op.fields) if op.name in ("condemn", "rescue", "sweep") else Objects()
        if op.name == "condemn":
            condemned |= objects
        elif op.name == "rescue":
            condemned -= objects
        else:
            swept |= condemned & objects
            condemned -= objects
    return frozenset(condemned), frozenset(swept)


def _way(view: RefTable, pack: Ulid, entry: int, read: Callable[[str], bytes]) -> Iterator[ObjectKey]:
    """The moved objects from an entry of a pack to where it is now, and the pack where it is."""
    for relocation in view.relocations(pack):
        key = ObjectKey("moved", relocation.moved)
        moved = decode_relocation(read(key.name), key.name, relocation.hash)
        for row in moved.rows.tolist():
            if row[0] == entry:
                yield key
                yield from _way(view, moved.targets[row[1]], row[2], read)
                return
    yield ObjectKey("pack", pack)


def roots(view: RefTable) -> list[SnapshotRow]:
    """The snapshots that are kept: by histories, tags, pins and undo windows."""
    infos = [view.snapshot(move.ulid) for branch in view.branches() for move in view.moves(branch)]
    infos += [view.snapshot(tag.ulid) for name in view.tags() if (tag := view.tag_row(name)) is not None]
    infos += [view.snapshot(pin.ulid) for pin in view.pins()]
    infos += [view.snapshot(move.ulid) for window in view.windows() for move in window.moves]
    found = {}
    for info in infos:
        if info is None:
            raise Violation("the log names a snapshot that it does not have")
        found[info.ulid] = info
    return list(found.values())


def root_names(contents: Contents) -> list[str]:
    """The branches and tags of a store."""
    engine = make_process(contents.backend(), CONFIG, READER, None).engine()
    engine.log.sync()
    return [*engine.log.view().branches(), *engine.log.view().tags()]


def block(label: str) -> bytes:
    """The bytes of a tensor called `label`."""
    return (label.encode() * BLOCK_BYTES)[:BLOCK_BYTES]


def read_back(engine: Engine, info: SnapshotRow) -> list[str]:
    """Reads a whole snapshot, compares it with what its metadata says was saved, and returns the labels of its tensors."""
    reader = SnapshotReader(engine, info)
    labels: list[str] = msgpack.unpackb(reader.record.metadata)["labels"]
    for number, label in enumerate(labels):
        if bytes(reader.read_range(number, 0, BLOCK_BYTES)) != block(label):
            raise Violation(f"tensor {number} of snapshot {info.root.hex()[:16]} has wrong bytes")
    if len(reader.layout.tensors) != len(labels):
        raise Violation(f"snapshot {info.root.hex()[:16]} has {len(reader.layout.tensors)} tensors, not {len(labels)}")
    return labels

"""Copy, salvage, usage and gc on snapshots of many ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import SnapshotAbortedError
from tensorstore_ck.format.part import decode_part
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.gc import run_gc
from tensorstore_ck.log import Op, SnapshotRow
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.maintenance.copy_store import copy as copy_snapshots
from tensorstore_ck.maintenance.fsck.repair import run_repair
from tensorstore_ck.maintenance.salvage import salvage
from tests.format.samples import decode_pack
from tests.gc.stores import open_store
from tests.session.group.built import (
    EVERYTHING,
    INFOS,
    OBJECTS,
    PARTS,
    RANKS,
    Reads,
    assert_whole,
    copy,
    failing,
    hits,
    objects,
    shared,
    stage,
    tensors,
    without,
    without_log,
)
from tests.session.group.stores import put_all, rank_state, read_all

# --- copy, usage, gc ----------------------------------------------------------------------------------------------------


def test_copy() -> None:
    target = MemoryBackend()
    open_store(target)
    source = open_store(copy(OBJECTS))
    report = copy_snapshots(source, open_store(target))
    assert report.snapshots == 2
    assert_whole(target)
    copied = open_store(target).log("job")
    assert [snapshot.root for snapshot in copied] == [snapshot.root for snapshot in source.log("job")]
    packs = sum(info.size_bytes for info in target.list("packs/"))
    assert packs <= sum(len(data) for name, data in OBJECTS.items() if name.startswith("packs/"))  # nothing twice
    assert copy_snapshots(source, open_store(target)).snapshots == 0


def test_copy_takes_only_what_is_new() -> None:
    source, target = copy(OBJECTS), MemoryBackend()
    open_store(target)
    copy_snapshots(open_store(source), open_store(target))
    before = set(objects(target))
    third = put_all(source, RANKS, shared(3), partial(rank_state, step=2), step=3)
    report = copy_snapshots(open_store(source), open_store(target))
    assert report.snapshots == 1
    new = sum(tensors(3)[name].whole.nbytes for name in ("tp", "hsdp", "one")) + len(layout_of(source, third))
    store = open_store(target)
    store.engine.log.sync()
    info = store.engine.log.view().by_root(third.root)
    assert info is not None
    packs = [data for name, data in objects(target).items() if name.startswith("packs/") and name not in before]
    assert new <= sum(map(len, packs)) < new + 512 * len(packs)  # header, footer
    assert read_all(open_store(target), info) == {name: each.whole.tobytes() for name, each in tensors(3).items()}


def layout_of(backend: Backend, info: SnapshotRow) -> bytes:
    store = open_store(backend)
    store.engine.log.sync()
    return SnapshotReader(store.engine, info).layout.encoded


class Killed(Exception):
    pass


@pytest.mark.race
@pytest.mark.parametrize("at", [1, 7])
def test_copy_goes_on_where_it_was_killed(at: int) -> None:
    """In the middle of the parts of one snapshot."""
    table, target, parts = MemoryTable(), MemoryBackend(), 0
    open_store(target)

    def kill(name: str) -> None:
        nonlocal parts
        parts += name.startswith("parts/")
        if parts == at:
            raise Killed

    with pytest.raises(Killed):
        copy_snapshots(open_store(copy(OBJECTS)), open_store(Notified(target, kill), table=table))
    assert open_store(target).log() == []
    report = copy_snapshots(open_store(copy(OBJECTS)), open_store(target, table=table))
    assert_whole(target)
    parts_read = [decode_part(data, name) for name, data in OBJECTS.items() if name.startswith("parts/")]
    distinct = {part.block_id(row) for part in parts_read for row in range(part.block_count)}
    assert report.blocks < len(distinct)
    written = [len(decode_pack(data).entries) for name, data in objects(target).items() if name.startswith("packs/")]
    assert sum(written) == len(distinct)  # none twice


def test_several_layouts_are_copied_and_salvaged() -> None:
    backend, target = MemoryBackend(), MemoryBackend()
    open_store(backend)
    open_store(target)
    info = put_all(backend, RANKS, stage, rank_state)
    copy_snapshots(open_store(backend), open_store(target))
    for found in (backend, target):
        lost = copy(without_log(objects(found)))
        assert salvage(lost).kept == 1
        assert [snapshot.root for snapshot in open_store(lost).log("job")] == [info.root.hex()]
        assert open_store(lost).fsck(read_data=True).ok


def test_gc_frees_all_parts_of_what_is_forgotten_and_nothing_else() -> None:
    backend = copy(OBJECTS)
    store = open_store(backend)
    store.forget("job@1")
    run_gc(store.engine, EVERYTHING)
    assert_whole(backend, INFOS[1:])
    assert not set(PARTS) & set(objects(backend))
    assert len([name for name in objects(backend) if name.startswith("parts/")]) == 2 * RANKS
    store.forget("job")
    run_gc(store.engine, EVERYTHING)
    assert not [name for name in objects(backend) if name.startswith(("parts/", "packs/", "snapshots/", "moved/"))]


def test_gc_uses_the_summaries_of_parts() -> None:
    """The second run on a host reads no part again."""
    watched = Reads(copy(OBJECTS))
    store = open_store(watched)
    store.gc()
    assert set(PARTS) <= watched.reads.keys()
    watched.reads.clear()
    store.gc()
    assert not set(PARTS) & watched.reads.keys()


def test_usage_counts_once() -> None:
    store = open_store(copy(OBJECTS))
    usage = store.usage(per_snapshot=True)
    logical = [sum(each.whole.nbytes for each in tensors(step).values()) + RANKS * 8000 for step in (1, 2)]
    assert usage.by_snapshot is not None
    assert [snapshot.logical_bytes for snapshot in usage.by_snapshot] == logical
    assert usage.logical_bytes == sum(logical)
    same = sum(tensors()[name].whole.nbytes for name in ("fsdp", "same", "small"))
    layouts = usage.unique_bytes - (sum(logical) - same)
    assert 0 < layouts < 2000
    assert usage.unreferenced_bytes == 0
    places = {
        (part.packs[pack], entry): stored
        for name in OBJECTS
        if name.startswith("parts/")
        for part in [decode_part(OBJECTS[name], name)]
        for pack, entry, stored in part.extents[["pack", "entry", "stored"]].tolist()
    }
    small = sum(len(data) for name, data in OBJECTS.items() if name.startswith(("parts/", "snapshots/")))
    assert usage.stored_bytes == sum(places.values()) + small


def test_compaction() -> None:
    """What gc moved is read from where it is, by every tool."""
    backend = copy(OBJECTS)
    store = open_store(backend)
    third = put_all(backend, RANKS, shared(3), lambda rank: rank_state(rank, 3), step=3)
    store.forget("job@1", "job@2")
    report = run_gc(store.engine, EVERYTHING)
    assert report.rewritten
    assert_whole(backend, [third])
    assert read_all(open_store(backend), third) == {name: each.whole.tobytes() for name, each in tensors(3).items()}
    target = MemoryBackend()
    open_store(target)
    copy_snapshots(open_store(backend), open_store(target))
    assert_whole(target, [third])
    details = open_store(backend).show("job")
    listed = {info.name[-26:] for info in backend.list("packs/")}
    assert set(details.packs) <= listed
    for name in [info.name for info in backend.list("moved/")]:
        damaged = without(name, objects(backend))
        found = open_store(damaged).fsck(read_data=True)
        assert hits(found, third) == set(failing(damaged, third)), name
        assert run_repair(open_store(damaged).engine).ok
        assert_whole(damaged, [third])


# --- salvage ------------------------------------------------------------------------------------------------------------


def test_salvage_finds_snapshots_by_all_their_parts() -> None:
    backend = copy(without_log(OBJECTS))
    report = salvage(backend)
    assert report.kept == 2
    assert [snapshot.step for snapshot in open_store(backend).log("job")] == [2, 1]
    assert_whole(backend)


def test_salvage_leaves_out_what_lacks_a_part() -> None:
    for name in PARTS[::3]:
        backend = copy(without_log(objects(without(name))))
        report = salvage(backend)
        assert (report.kept, [lost.step for lost in report.lost]) == (1, [1])
        assert [snapshot.step for snapshot in open_store(backend).log("job")] == [2]


def test_salvage_does_not_publish_what_was_aborted() -> None:
    """Rank 0 wrote the record, and another rank gave the attempt up: a damaged log must not bring it back."""
    backend = copy(OBJECTS)
    store = open_store(backend)
    store.engine.log.sync()

    def abort(name: str) -> None:
        if name.startswith("snapshots/"):
            txn = parse_ulid(name[-26:])
            assert txn is not None
            store.engine.log.append(lambda view: [Op.abort(txn)])

    with pytest.raises(SnapshotAbortedError):
        put_all(Notified(backend, abort), RANKS, shared(3), rank_state, step=3)
    backend.replace(CONFIG_NAME, b"damaged")
    salvage(backend)
    assert [snapshot.step for snapshot in open_store(backend).log("job")] == [2, 1]


class Notified:
    """A backend that reports every save, after it."""

    def __init__(self, inner: Backend, tell: Callable[[str], None]) -> None:
        self._inner = inner
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, name: str, data: Any) -> None:
        self._inner.put(name, data)
        self._tell(name)

"""fsck and repair on snapshots of many ranks: what they find, what it hits, and what they repair."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.format.part import decode_part, part_name
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.format.sharding import Mesh, Shard
from tensorstore_ck.gc import run_gc
from tensorstore_ck.log import Op
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.maintenance.copy_store import copy as copy_snapshots
from tensorstore_ck.maintenance.fsck import run_fsck
from tensorstore_ck.maintenance.fsck.findings import FsckOptions
from tensorstore_ck.maintenance.fsck.repair import run_repair
from tests.effort import effort
from tests.gc.stores import open_store
from tests.session.group.built import (
    EVERYTHING,
    FIRST,
    INFOS,
    OBJECTS,
    PARTS,
    RANKS,
    Reads,
    assert_found,
    assert_whole,
    copy,
    hits,
    objects,
    on_disk,
    shared,
    stage,
    without,
)
from tests.session.group.states import Spreading, captured, sharded, whole
from tests.session.group.stores import put_all, rank_state, read_all

PACKS = [name for name in OBJECTS if name.startswith("packs/")]


def test_what_was_built() -> None:
    assert len(PARTS) == 2 * RANKS
    blocks = [decode_part(OBJECTS[name], name) for name in PARTS]
    assert [int(part.blobs["blocks"][0]) for part in blocks[:RANKS]] == [1, 0, 0, 0]
    assert all(part.block_count for part in blocks)
    report = open_store(copy(OBJECTS)).fsck(read_data=True)
    assert report.findings == ()


# --- fsck ---------------------------------------------------------------------------------------------------------------


def test_a_part_is_missing() -> None:
    for name in PARTS:
        report = assert_found(without(name), name)
        assert [finding.kind for finding in report.findings if finding.severity == "error"] == ["missing_object"]
        if name == PARTS[6]:
            assert hits(report, INFOS[0]) == {"rank_state[2]"}


def test_a_part_is_damaged() -> None:
    for number, name in enumerate(PARTS):
        data = bytearray(OBJECTS[name])
        data[(0, len(data) // 2, len(data) - 1)[number % 3]] ^= 1
        assert_found(copy({**OBJECTS, name: bytes(data)}), name)


def test_the_part_of_another_rank_or_snapshot() -> None:
    second = decode_record(OBJECTS[record_name(INFOS[1].ulid)], "second")
    for rank in (1, 6):
        name, other = PARTS[rank], PARTS[rank + 1]
        assert_found(copy({**OBJECTS, name: OBJECTS[part_name(second.parts[rank])]}), name)
        assert_found(copy({**OBJECTS, name: OBJECTS[other], other: OBJECTS[name]}), name, other)


def test_every_block() -> None:
    """A flipped byte in the middle of any block is found, and hits exactly what cannot be read."""
    places = {
        (part.packs[row["pack"]], int(row["offset"]) + int(row["stored"]) // 2)
        for name in PARTS
        for part in [decode_part(OBJECTS[name], name)]
        for row in part.extents
    }
    for pack, at in effort(sorted(places)[::2], sorted(places)):
        name = next(name for name in OBJECTS if name.startswith("packs/") and name.endswith(ulid_text(pack)))
        data = bytearray(OBJECTS[name])
        data[at] ^= 0x10
        assert_found(copy({**OBJECTS, name: bytes(data)}), name)


def test_every_pack_is_lost_once() -> None:
    for name in PACKS:
        assert_found(without(name), name, read_data=False)


def test_a_sample_covers_all_packs_in_turn() -> None:
    """On a host that keeps its cache."""
    table, backend = MemoryTable(), copy(OBJECTS)
    read = 0
    for _ in range(10 * len(PACKS)):
        report = run_fsck(open_store(backend, table=table).engine, FsckOptions(sample_fraction=0.05))
        assert report.ok
        read += report.read_packs
        if not report.never_verified:
            break
    assert read >= len(PACKS)
    assert not report.never_verified


def test_fsck_reads_every_part_and_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one thread: several share the few parts that are kept, and may push one out that another needs again."""
    monkeypatch.setattr("tensorstore_ck.maintenance.fsck.check_store.cpu_threads", lambda: 1)
    watched = Reads(copy(OBJECTS))
    assert open_store(watched).fsck().ok
    parts = [name for name in OBJECTS if name.startswith("parts/")]
    assert max(watched.reads[name] for name in parts) == 1
    assert max(watched.reads[name] for name in OBJECTS if name.startswith("snapshots/")) == 1


def test_on_the_command_line(tmp_path: Path) -> None:
    """Check, repair from a copy, lose the log, salvage it."""
    tsck = on_disk(tmp_path)
    copied = str(tmp_path / "copy")
    assert CliRunner().invoke(main, ["init", copied]).exit_code == 0
    tsck("copy", str(tmp_path / "ck"), copied, store=None)
    assert "no errors" in tsck("fsck", "--read-data")
    assert "no errors" in tsck("fsck", "--read-data", store="copy")
    (tmp_path / "ck" / PARTS[3]).unlink()
    told = tsck("fsck", code=40)
    assert PARTS[3] in told
    assert re.search(r"hits job@1 \(root [0-9a-f]{12}\): fsdp, tp, small$", told, re.MULTILINE)
    assert "repaired" in tsck("fsck", "--repair", "--from", copied)
    for folder in ("log", "checkpoint"):
        shutil.rmtree(tmp_path / "ck" / folder, ignore_errors=True)
    tsck("salvage")
    assert [row["step"] for row in json.loads(tsck("log", "job", "--json"))] == [2, 1]
    assert "no errors" in tsck("fsck", "--read-data")


# --- repair -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other() -> Engine:
    """Of a store that has the same content under other names."""
    backend = MemoryBackend()
    open_store(backend)
    copy_snapshots(open_store(copy(OBJECTS)), open_store(backend))
    return open_store(backend).engine


def test_parts_packs_and_records_from_another_store(other: Engine) -> None:
    """A pack has the blocks of one part, or of several that share them."""
    for name in (*PARTS[::3], *PACKS[::2], record_name(INFOS[0].ulid)):
        backend = without(name)
        report = run_repair(open_store(backend).engine, other=other)
        assert [mended.object for mended in report.mended] == [name]
        assert report.ok
        assert_whole(backend)


def test_parts_of_the_same_content_in_this_store() -> None:
    """The layouts and most of the tensors are the same; what a part says is rebuilt from another save of the same."""
    backend = copy(OBJECTS)
    put_all(backend, RANKS, shared(1), rank_state, ref="again", step=1)
    for name in PARTS[::3]:
        damaged = without(name, objects(backend))
        report = run_repair(open_store(damaged).engine)
        assert [mended.object for mended in report.mended] == [name]
        assert report.ok
        run_gc(open_store(damaged).engine, EVERYTHING)
        assert_whole(damaged)


def test_a_part_without_content_is_rebuilt_from_the_other_parts() -> None:
    backend = MemoryBackend()
    open_store(backend)
    tensors = {"same": Spreading(whole((10, 1000)), None)}
    info = put_all(backend, 3, lambda rank: captured(tensors, [], rank, 3, ["text"]))
    record = decode_record(objects(backend)[record_name(info.ulid)], "record")
    name = part_name(record.parts[2])
    assert not decode_part(objects(backend)[name], name).block_count
    backend.delete([name])
    report = open_store(backend).fsck()
    assert next(hit for finding in report.findings for hit in finding.hits).endswith("no tensor: it restores, but is not whole")
    assert read_all(open_store(backend), info) == {"same": tensors["same"].whole.tobytes()}
    assert run_repair(open_store(backend).engine).ok
    store = open_store(backend)
    assert store.fsck(read_data=True).findings == ()
    run_gc(store.engine, EVERYTHING)
    assert read_all(store, info) == {"same": tensors["same"].whole.tobytes()}


def test_a_block_from_another_store() -> None:
    part = decode_part(OBJECTS[PARTS[1]], PARTS[1])
    row = part.extents[-1]
    pack = next(each for each in PACKS if each.endswith(ulid_text(part.packs[row["pack"]])))
    data = bytearray(OBJECTS[pack])
    data[int(row["offset"])] ^= 1
    backend = copy({**OBJECTS, pack: bytes(data)})
    report = run_repair(open_store(backend).engine, FsckOptions(read_data=True), other=open_store(copy(OBJECTS)).engine)
    assert [mended.object for mended in report.mended] == [pack]
    assert_whole(backend)


def test_all_parts_and_the_record_at_once(other: Engine) -> None:
    """As when a folder is lost."""
    backend = copy({name: data for name, data in OBJECTS.items() if not name.startswith(("parts/", "snapshots/"))})
    assert run_repair(open_store(backend).engine, other=other).ok
    assert_whole(backend)


@pytest.mark.parametrize("drifted", [False, True])
def test_what_cannot_be_repaired_is_marked(drifted: bool) -> None:
    """Also what drifted, from which one may resume, unlike from what is damaged."""
    backend = without(PARTS[2])
    if drifted:
        open_store(backend).engine.log.append(lambda view: [Op.mark(INFOS[0].root, "drift", "rank 1")])
    report = run_repair(open_store(backend).engine)
    assert report.marked == (INFOS[0].root.hex(),)
    assert open_store(backend).log("job")[-1].mark == "damaged"


# --- several layouts ----------------------------------------------------------------------------------------------------


def test_several_layouts() -> None:
    built = MemoryBackend()
    open_store(built)
    info = put_all(built, RANKS, stage)
    found = objects(built)
    names = [part_name(ulid) for ulid in decode_record(found[record_name(info.ulid)], "record").parts]
    assert open_store(built).fsck(read_data=True).findings == ()
    assert {name for name, *_ in open_store(built).show("job").tensors} == {"first", "tied", "second", "told"}
    for rank, expected in enumerate(({"all of it"}, {"first", "tied", "told"}, {"all of it"}, {"second", "tied", "told"})):
        damaged = without(names[rank], found)
        assert hits(open_store(damaged).fsck(), info) == expected, rank
        report = run_repair(open_store(damaged).engine, other=open_store(built).engine)
        assert report.ok
        assert open_store(damaged).fsck(read_data=True).findings == ()
    target = MemoryBackend()
    open_store(target)
    copy_snapshots(open_store(built), open_store(target))
    assert open_store(target).fsck(read_data=True).ok
    view = open_store(target).log("job")
    assert [snapshot.root for snapshot in view] == [info.root.hex()]
    diff = open_store(target).diff("job", "job")
    assert (diff.tensors, diff.unchanged_tensors) == ((), 4)


def test_a_record_with_its_parts_in_another_order() -> None:
    """As a writer with a bug would leave it: all ids are right, and so is the root."""
    backend = copy(OBJECTS)
    store = open_store(backend)
    wrong = FIRST._replace(parts=FIRST.parts[::-1], part_ids=b"".join(reversed(ids_of(FIRST))), step=9)
    snapshot = store.engine.new_id()
    backend.put(record_name(snapshot), wrong.encode())
    store.engine.log.append(lambda view: [Op.put("wrong", snapshot, wrong, wrong.encode(), anchor=0, txn=snapshot)])
    report = open_store(backend).fsck()
    assert {finding.object for finding in report.findings if finding.severity == "error"} == set(PARTS)
    assert all(hit.startswith("wrong@9 ") for finding in report.findings for hit in finding.hits)


def ids_of(record: Record) -> list[bytes]:
    return [record.part_ids[at : at + 32] for at in range(0, len(record.part_ids), 32)]


def test_a_part_that_does_not_fit_its_layout() -> None:
    """As a writer with a bug would leave it: ids and root are right."""
    backend = MemoryBackend()
    open_store(backend)

    spread = {"a": Spreading(whole((4000,)), sharded(0, Shard(0)))}
    info = put_all(backend, 2, lambda rank: captured(spread, [Mesh((2,), (0, 1))], rank, 2, []))
    store = open_store(backend)
    store.engine.log.sync()
    record = decode_record(objects(backend)[record_name(info.ulid)], "record")
    parts = [decode_part(objects(backend)[part_name(ulid)], "part") for ulid in record.parts]
    short = parts[1]._replace(ids=b"", extents=parts[1].extents[:0], packs=[])
    ulid = store.engine.new_id()
    backend.put(part_name(ulid), short.encode())
    wrong = record._replace(parts=[record.parts[0], ulid], part_ids=parts[0].part_id() + short.part_id(), step=9)
    snapshot = store.engine.new_id()
    backend.put(record_name(snapshot), wrong.encode())
    store.engine.log.append(lambda view: [Op.put("wrong", snapshot, wrong, wrong.encode(), anchor=0, txn=snapshot)])
    report = open_store(backend).fsck(read_data=True)
    (finding,) = (finding for finding in report.findings if finding.severity == "error")
    assert finding.object == part_name(ulid)
    assert [hit.rpartition(": ")[2] for hit in finding.hits] == ["a"]

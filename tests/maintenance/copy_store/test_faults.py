"""Damage, faults at every call, gc of either store at work meanwhile, and snapshots of several ranks."""

from pathlib import Path

import pytest
import torch

from tensorstore_ck import CorruptObjectError, DamageError, Store, StoreError
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import block_id
from tensorstore_ck.engine.opening import init_store
from tensorstore_ck.format.codec import decode
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.record import record_name
from tensorstore_ck.log import Op
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.maintenance.copy_store import blocks, copy, copy_refs
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.maintenance.copy_store.places import EVERYTHING, Watched, assert_same, contents, empty, open_over
from tests.maintenance.fsck.stores import build, is_exact, reopen, state

# --- damage ---------------------------------------------------------------------------------------------------------------


def damage(backend: Backend, store: Store, address: str) -> str:
    """Flips a bit of a block that only the snapshot at `address` has."""
    engine = store.engine
    info = engine.log.view().by_root(bytes.fromhex(store.resolve(address).root))
    assert info is not None
    part = engine.read_part(engine.read_record(info), 0)
    row = max((row for row in part.extents if row["codec"] == 0 and row["raw"] == 6000), key=lambda row: int(row["offset"]))
    name = pack_name(part.packs[row["pack"]])
    data = bytearray(backend.get(name, max_bytes=1 << 30))
    data[int(row["offset"]) + 100] ^= 1
    backend.replace(name, data)
    return name


def test_a_damaged_block() -> None:
    source_backend, target_backend = build(codec="raw"), empty()
    source, target = reopen(source_backend), open_over(target_backend)
    name = damage(source_backend, source, "runs/a@2")
    with pytest.raises(
        CorruptObjectError, match=rf"\(step 2\) of 'runs/a' cannot be copied: {name}: the block [0-9a-f]* at offset"
    ) as caught:
        copy(source, target)
    assert caught.value.object_id == name
    assert [snap.step for snap in target.log()] == [4, 1]  # what came before, and the other branch
    assert list(target.tags()) == []
    assert target.fsck(read_data=True).ok


def test_a_missing_pack() -> None:
    source_backend, target = build(codec="raw"), open_over(empty())
    source = reopen(source_backend)
    name = damage(source_backend, source, "runs/b")
    source_backend.delete([name])
    with pytest.raises(DamageError, match=f"cannot be copied: {name} is not in the store"):
        copy(source, target)
    assert [snap.step for snap in target.log("runs/a")] == [3, 2, 1]


def test_a_snapshot_that_is_marked_damaged() -> None:
    source, target = reopen(build()), open_over(empty())
    root = source.resolve("runs/a@2").root
    source.engine.log.append(lambda view: [Op.mark(bytes.fromhex(root), "damaged", "by fsck")])  # type: ignore[arg-type]
    report = copy(source, target, refs="runs/a")
    assert [snap.step for snap in target.log("runs/a")] == [3, 1]
    assert report.warnings == (f"snapshot {root[:16]} (step 2) of 'runs/a' was left out: it is marked damaged in the source",)


@pytest.mark.parametrize(("name", "advice"), [("runs/a", "tsck reset runs/a runs/a~1"), ("paper", "tsck untag paper")])
def test_a_ref_at_a_snapshot_that_is_marked_damaged(name: str, advice: str) -> None:
    source, target = reopen(build()), open_over(empty())
    root = source.resolve(name).root
    source.engine.log.append(lambda view: [Op.mark(bytes.fromhex(root), "damaged", "by fsck")])  # type: ignore[arg-type]
    with pytest.raises(DamageError, match=f"marked damaged and was left out.*{advice}"):
        copy(source, target)
    assert is_exact(target.checkout("runs/b"), 4), "the others were copied"
    report = copy_refs(source.engine, target.engine, refs=[name])
    assert [(ref.outcome, report.ok) for ref in report.refs] == [("behind", False)]
    if name == "runs/a":
        assert [snap.step for snap in target.log(name)] == [2, 1]
        assert report.refs[0].root == target.resolve("runs/a").root
    source.engine.log.append(lambda view: [Op.mark(bytes.fromhex(root), "", "")])  # type: ignore[arg-type]
    assert copy(source, target).ok
    assert target.resolve(name).root == root


# --- faults ---------------------------------------------------------------------------------------------------------------


def small(backend: Backend) -> Backend:
    init_store(backend)
    with reopen(backend) as store:
        for number in (1, 2):
            store.put_snapshot(state(number), ref="job", step=number)
        store.tag("best", "job@1")
    return backend


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("mode", ["die-before", "die-after", "tear", "unavailable", "lost-reply"])
@pytest.mark.parametrize("place", ["memory", pytest.param("local", marks=pytest.mark.slow)])
def test_a_fault_at_every_call(side: str, mode: str, place: str, tmp_path: Path) -> None:
    source_backend = small(MemoryBackend())
    expected = contents(reopen(source_backend))
    for at in range(1, 1000):
        target_backend: Backend = MemoryBackend() if place == "memory" else LocalBackend(str(tmp_path / str(at)))
        init_store(target_backend)
        faults = Faults(mode, at)
        sides = {"source": source_backend, "target": target_backend}
        sides[side] = FaultyBackend(sides[side], faults, atomic_put=place == "memory")
        table = MemoryTable()
        failed = False
        try:
            copy(open_over(sides["source"]), open_over(sides["target"], table))
        except (Death, StoreError):
            failed = True
        half = reopen(target_backend)
        for snapshot in half.log():
            assert is_exact(half.checkout(snapshot.root), snapshot.step or 0)
        fresh = open_over(target_backend, table)
        assert copy(reopen(source_backend), fresh).ok
        assert contents(fresh) == expected
        report = fresh.fsck(read_data=True)
        assert report.ok, (faults.struck, report.findings)
        if not faults.struck:
            assert not failed
            break
    assert at > 10


def test_it_goes_on_within_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PIECE_BYTES", 10_000)
    source_backend, target_backend, table = empty(), empty(), MemoryTable()
    with open_over(source_backend) as store:
        store.put_snapshot({str(number): torch.full((2000,), float(number)) for number in range(10)}, ref="job", codec="raw")
    packs = []

    def die(call: str, name: str) -> None:
        packs.extend([name] if call == "open_writer" else [])
        if len(packs) == 6:
            raise Death

    with pytest.raises(Death):
        copy(open_over(source_backend), open_over(Watched(target_backend, die), table))
    source = Watched(source_backend)
    report = copy(open_over(source), open_over(target_backend, table))
    assert report.ok
    assert report.blocks < 8
    assert source.bytes_read == report.read_bytes < 8 * 8000
    assert torch.equal(reopen(target_backend).checkout("job")["7"], torch.full((2000,), 7.0))


# --- during gc ------------------------------------------------------------------------------------------------------------


def test_the_source_compacts_meanwhile() -> None:
    backend = empty()
    with open_over(backend) as store:
        store.put_snapshot({str(number): torch.full((2000,), float(number)) for number in range(8)}, ref="job", step=1)
        store.put_snapshot({str(number): torch.full((2000,), float(number)) for number in range(3)}, ref="job", step=2)
        store.forget("job@1")
    gc_runs: list[object] = []

    def compact(call: str, name: str) -> None:
        if call == "read_into" and name.startswith("packs/") and not gc_runs:
            gc_runs.append(None)
            with reopen(backend) as other:
                report = other.gc(EVERYTHING)
                assert report.rewritten
                assert report.deleted["pack"]

    target_backend = empty()
    report = copy(open_over(Watched(backend, compact)), open_over(target_backend), refs="job")
    assert gc_runs
    assert report.ok
    assert torch.equal(reopen(target_backend).checkout("job")["2"], torch.full((2000,), 2.0))


def test_the_source_forgets_meanwhile() -> None:
    backend = build()
    done: list[object] = []

    def forget(call: str, name: str) -> None:
        if call == "get" and name.startswith("snapshots/") and not done:
            done.append(None)
            with reopen(backend) as other:
                other.untag("paper")
                other.forget("runs/a@2")
                other.gc(EVERYTHING)
                other.gc(EVERYTHING)

    target = open_over(empty())
    report = copy(open_over(Watched(backend, forget)), target)
    assert done
    assert {ref.name: ref.outcome for ref in report.refs} == {"runs/a": "copied", "runs/b": "copied", "paper": "behind"}
    assert not report.ok
    assert [snap.step for snap in target.log("runs/a")] == [3, 1]
    assert len(report.warnings) >= 1
    assert all("was forgotten in the source" in warning for warning in report.warnings)


def test_the_target_frees_what_it_relies_on() -> None:
    """The copy would reuse blocks of a snapshot that is forgotten and freed before the commit: it starts over."""
    source, target_backend = reopen(build()), empty()
    table = MemoryTable()
    with open_over(target_backend, table) as store:
        store.put_snapshot({**state(1), "other": torch.ones(5000)}, ref="old", step=0)
    done: list[object] = []

    def free(call: str, name: str) -> None:
        if call == "put" and name.startswith("parts/") and not done:
            done.append(None)
            with reopen(target_backend) as other:
                other.forget("old")
                other.gc(EVERYTHING)
                other.gc(EVERYTHING)

    report = copy(source, open_over(Watched(target_backend, free), table))
    assert done
    assert report.ok
    assert_same(source, reopen(target_backend))


# --- many ranks -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_two_ranks() -> None:
    source_backend, target_backend = build(), empty()
    source = reopen(source_backend)
    engine = source.engine
    infos = [engine.log.view().by_root(bytes.fromhex(source.resolve(address).root)) for address in ("runs/a@1", "runs/b")]
    ulids, part_ids = [], b""
    for rank, info in enumerate(infos):
        assert info is not None
        part = engine.read_part(engine.read_record(info), 0)._replace(rank=rank, world_size=2, layout_of=b"\0\0\1\0")
        ulids.append(engine.new_id())
        part_ids += part.part_id()
        source_backend.put(part_name(ulids[-1]), part.encode())
    assert infos[0] is not None
    record = engine.read_record(infos[0])._replace(ref="many", parts=ulids, part_ids=part_ids)
    snapshot, encoded = engine.new_id(), record.encode()
    source_backend.put(record_name(snapshot), encoded)
    anchor = engine.log.sync().n
    engine.log.append(lambda view: [Op.put("many", snapshot, record, encoded, anchor=anchor, txn=snapshot)])
    target = reopen(target_backend)
    assert copy(source, target, refs="many").snapshots == 1
    info = target.engine.log.view().by_root(record.root())
    assert info is not None
    copied = target.engine.read_record(info)
    assert copied.part_ids == part_ids
    for rank in range(2):
        assert target.engine.read_part(copied, rank).ids == engine.read_part(record, rank).ids
        part = target.engine.read_part(copied, rank)
        for row, extent in enumerate(part.extents):
            stored = memoryview(bytearray(int(extent["stored"])))
            target_backend.read_into(pack_name(part.packs[extent["pack"]]), int(extent["offset"]), stored)
            assert block_id(decode(int(extent["codec"]), stored, int(extent["raw"]), "")) == part.block_id(row)

"""Damage, faults at every call, gc of either store at work meanwhile, and snapshots of several ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tensorstore_ck import DamageError, Store, StoreError
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.opening import init_store
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.log import Op
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.maintenance.copy_store import blocks, copy, copy_refs
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import interrupted, open_store
from tests.maintenance.copy_store.places import EVERYTHING, Watched, assert_same, contents, empty
from tests.maintenance.fsck.stores import build, flip, is_exact, reopen, state
from tests.session.group.built import RANKS, stage
from tests.session.group.stores import put_all


def damage(backend: Backend, store: Store, address: str) -> str:
    """Flips a bit of a block that only the snapshot at `address` has."""
    engine, root = store.engine, bytes.fromhex(store.resolve(address).root)
    info = engine.log.view().by_root(root)
    assert info is not None
    part = engine.read_part(engine.read_record(info), 0)
    row = max((row for row in part.extents if row["codec"] == 0 and row["raw"] == 6000), key=lambda row: int(row["offset"]))
    name = pack_name(part.packs[row["pack"]])
    flip(backend, name, int(row["offset"]) + 100)
    return name


@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_block_or_a_missing_pack(is_there: bool) -> None:
    source_backend, target = build(codec="raw"), reopen(empty())
    source = reopen(source_backend)
    name = damage(source_backend, source, "runs/a@2")
    if not is_there:
        source_backend.delete([name])
    said = ": the block [0-9a-f]* at offset" if is_there else " is not in the store"
    with pytest.raises(DamageError, match=rf"\(step 2\) of 'runs/a' cannot be copied: {name}{said}") as caught:
        copy(source, target)
    assert caught.value.object_id == name
    assert [snap.step for snap in target.log()] == [4, 1]  # what came before, and the other branch
    assert list(target.tags()) == []
    assert target.fsck(read_data=True).ok


def test_a_snapshot_that_is_marked_damaged() -> None:
    source, target = reopen(build()), reopen(empty())
    root = source.resolve("runs/a@2").root
    source.engine.log.append(lambda view: [Op.mark(bytes.fromhex(root), "damaged", "by fsck")])  # type: ignore[arg-type]
    report = copy(source, target, refs="runs/a")
    assert [snap.step for snap in target.log("runs/a")] == [3, 1]
    assert report.warnings == (f"snapshot {root[:16]} (step 2) of 'runs/a' was left out: it is marked damaged in the source",)


@pytest.mark.parametrize(("name", "advice"), [("runs/a", "tsck reset runs/a runs/a~1"), ("paper", "tsck untag paper")])
def test_a_ref_at_a_snapshot_that_is_marked_damaged(name: str, advice: str) -> None:
    source, target = reopen(build()), reopen(empty())
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


def small(backend: Backend) -> Backend:
    init_store(backend)
    with reopen(backend) as store:
        for number in (1, 2):
            store.put_snapshot(state(number), ref="job", step=number)
        store.tag("best", "job@1")
    return backend


@pytest.mark.race
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("place", ["memory", pytest.param("local", marks=pytest.mark.slow)])
def test_a_fault_at_every_call(side: str, place: str, tmp_path: Path) -> None:
    """The faults take turns."""
    source_backend = small(MemoryBackend())
    expected = contents(reopen(source_backend))
    for at, mode in in_turns(range(1, 1000), ("die-before", "die-after", "tear", "unavailable", "lost-reply")):
        target_backend: Backend = MemoryBackend() if place == "memory" else LocalBackend(str(tmp_path / f"{at}-{mode}"))
        init_store(target_backend)
        faults = Faults(mode, at)
        sides = {"source": source_backend, "target": target_backend}
        sides[side] = FaultyBackend(sides[side], faults, atomic_put=place == "memory")
        table = MemoryTable()
        failed = False
        try:
            copy(reopen(sides["source"]), reopen(sides["target"], table))
        except (Death, StoreError):
            failed = True
        half = reopen(target_backend)
        for snapshot in half.log():
            assert is_exact(half.checkout(snapshot.root), snapshot.step or 0)
        fresh = reopen(target_backend, table)
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
    with reopen(source_backend) as store:
        store.put_snapshot({str(number): torch.full((2000,), float(number)) for number in range(10)}, ref="job", codec="raw")
    packs = []

    def die(call: str, name: str) -> None:
        packs.extend([name] if call == "open_writer" else [])
        if len(packs) == 6:
            raise Death

    with pytest.raises(Death):
        copy(reopen(source_backend), reopen(Watched(target_backend, die), table))
    source = Watched(source_backend)
    report = copy(reopen(source), reopen(target_backend, table))
    assert report.ok
    assert report.blocks < 8
    assert source.bytes_read == report.read_bytes < 8 * 8000
    assert torch.equal(reopen(target_backend).checkout("job")["7"], torch.full((2000,), 7.0))


@pytest.mark.race
def test_the_source_compacts_meanwhile() -> None:
    backend = empty()
    with reopen(backend) as store:
        store.put_snapshot({str(number): torch.full((2000,), float(number)) for number in range(8)}, ref="job", step=1)
        store.put_snapshot({str(number): torch.full((2000,), float(number)) for number in range(3)}, ref="job", step=2)
        store.forget("job@1")

    def compact() -> None:
        report = reopen(backend).gc(EVERYTHING)
        assert report.rewritten
        assert report.deleted["pack"]

    (source, compaction), target = interrupted(backend, "read packs/", compact), reopen(empty())
    assert copy(source, target, refs="job").ok
    assert compaction.struck
    assert torch.equal(target.checkout("job")["2"], torch.full((2000,), 2.0))


@pytest.mark.race
def test_the_source_forgets_meanwhile() -> None:
    backend = build()

    def forget() -> None:
        with reopen(backend) as other:
            other.untag("paper")
            other.forget("runs/a@2")
            other.gc(EVERYTHING)
            other.gc(EVERYTHING)

    (source, forgetting), target = interrupted(backend, "get snapshots/", forget), reopen(empty())
    report = copy(source, target)
    assert forgetting.struck
    assert {ref.name: ref.outcome for ref in report.refs} == {"runs/a": "copied", "runs/b": "copied", "paper": "behind"}
    assert not report.ok
    assert [snap.step for snap in target.log("runs/a")] == [3, 1]
    assert len(report.warnings) >= 1
    assert all("was forgotten in the source" in warning for warning in report.warnings)


@pytest.mark.race
def test_the_target_frees_what_it_relies_on() -> None:
    """The copy would reuse blocks of a snapshot that is forgotten and freed before the commit: it starts over."""
    source, target_backend, table = reopen(build()), empty(), MemoryTable()
    with reopen(target_backend, table) as store:
        store.put_snapshot({**state(1), "other": torch.ones(5000)}, ref="old", step=0)

    def free() -> None:
        with reopen(target_backend) as other:
            other.forget("old")
            other.gc(EVERYTHING)
            other.gc(EVERYTHING)

    target, freeing = interrupted(target_backend, "put parts/", free, table=table)
    assert copy(source, target).ok
    assert freeing.struck
    assert_same(source, reopen(target_backend))


def test_a_snapshot_of_many_ranks() -> None:
    backend = MemoryBackend()
    source, target = open_store(backend), reopen(empty())
    put_all(backend, RANKS, stage)
    assert copy(source, target, refs="job").snapshots == 1
    assert target.resolve("job").root == source.resolve("job").root
    np.testing.assert_equal(target.checkout("job"), source.checkout("job"))
    assert target.fsck(read_data=True).ok

"""`fsck --repair` repairs from the store itself, a copy of it, or another store with the same snapshots, and marks the rest."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import make_engine
from tensorstore_ck.errors import SnapshotMarkedBadError, StoreError, UnreadableError
from tensorstore_ck.format.store_config import decode_config
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log import ObjectKey, table_rows
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.entry import decode_entry, seal_entry
from tensorstore_ck.maintenance.fsck import FsckOptions, RepairReport, run_fsck, run_repair
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.end_to_end.crash.faulty import Death
from tests.maintenance.copy_store.places import at_write
from tests.maintenance.fsck.stores import ADDRESSES, backend_of, begun, build, contents, failing_roots, is_exact, names, read, reopen

AT_ONCE = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=1)
Objects = dict[str, bytes]


OBJECTS = contents(build())
TWIN = contents(build())
"""Another store of the same snapshots: the same roots, and not one name in common."""
CONFIG = decode_config(OBJECTS["store.json"], "memory:")


def engine_of(backend: Backend) -> Engine:
    return make_engine(backend, CONFIG, MemoryTable(), sleep=lambda _: None)


def other_engine(objects: Objects) -> Engine:
    return reopen(backend_of(objects)).engine


def repair(backend: Backend, other: Objects | None = None, *, read_data: bool = True) -> RepairReport:
    return run_repair(engine_of(backend), FsckOptions(read_data=read_data), other=None if other is None else other_engine(other))


def flipped(data: bytes, position: int = -5) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def of_kind(kind: str) -> list[str]:
    return [name for name in OBJECTS if name.startswith(kind)]


def assert_whole(backend: Backend) -> None:
    """Everything can be read, fsck is content, and gc agrees that nothing is missing."""
    assert run_fsck(engine_of(backend), read_data=True).ok
    store = reopen(backend)
    for address, number in ADDRESSES.items():
        assert is_exact(store.checkout(address, allow_marked=True), number)
    assert [snapshot.mark for snapshot in store.log("runs/a")] == ["bad", "", ""]
    reopen(backend).gc(AT_ONCE)
    assert list(failing_roots(backend)) == []


def breakages(name: str, number: int) -> Iterator[MemoryBackend]:
    """The store with that object deleted, cut short, or with a byte flipped at either end; of these the one of that number."""
    data = OBJECTS[name]
    found = [None, data[: len(data) // 2], flipped(data), flipped(data, 70)]
    return (backend_of({**OBJECTS, name: each}) for each in effort([found[number % 4]], found))


def repair_whole(backend: Backend, other: Objects | None = None) -> list[str]:
    """Repairs it so that nothing is left to mark; the objects that were repaired."""
    report = repair(backend, other)
    assert not report.before.ok
    assert (report.ok, report.marked) == (True, ()), report.after.findings
    assert_whole(backend)
    return [mended.object for mended in report.mended]


@pytest.mark.parametrize("kind", ["snapshots/", "parts/", "packs/"])
def test_a_copy_or_a_twin_repairs_it(kind: str) -> None:
    for number, (name, other) in enumerate(itertools.product(of_kind(kind), (OBJECTS, TWIN))):
        for backend in breakages(name, number):
            assert repair_whole(backend, other) == [name]


def test_everything_but_the_log_is_repaired_at_once() -> None:
    every = ("snapshots/", "parts/", "packs/")
    for lost, other in ((every[:1], OBJECTS), (every[1:2], TWIN), (every[2:], OBJECTS), (every, TWIN), (every, OBJECTS)):
        repair_whole(backend_of({name: data for name, data in OBJECTS.items() if not name.startswith(lost)}), other)


def test_a_copy_repairs_the_log_and_the_configuration() -> None:
    for number, name in enumerate([*of_kind("log/")[:-1], "store.json"]):
        for backend in breakages(name, number):
            assert repair_whole(backend, OBJECTS) == [name]
            assert contents(backend)[name] == OBJECTS[name]
    repair_whole(backend_of({**OBJECTS, **dict.fromkeys(of_kind("log/")[1:5])}), OBJECTS)


def test_the_last_entry_comes_back_only_where_the_host_remembers_it_and_nothing_is_written_to_a_log_that_stays_broken() -> None:
    last = of_kind("log/")[-1]
    backend = backend_of(OBJECTS)
    engine = engine_of(backend)
    engine.log.sync()
    backend.delete([last])
    assert run_repair(engine, other=other_engine(OBJECTS)).ok
    assert contents(backend)[last] == OBJECTS[last]
    for other in (None, TWIN):
        backend = backend_of({**OBJECTS, of_kind("log/")[-2]: None, of_kind("packs/")[0]: None})
        before = contents(backend)
        assert not repair(backend, other).ok
        assert contents(backend) == before


def test_an_entry_that_the_log_does_not_vouch_for_is_not_taken() -> None:
    """A copy that went its own way has another entry of that number."""
    lost = of_kind("log/")[3]
    entry = decode_entry(OBJECTS[lost], lost, 4)
    forked, _ = seal_entry(4, entry.prev, entry.ops, write_id=entry.write_id, time_ns=entry.time_ns, actor="somebody else")
    backend = backend_of({**OBJECTS, lost: None})
    report = repair(backend, {**{name: data for name, data in OBJECTS.items() if name < lost or not name.startswith("log/")}, lost: forked})
    assert (report.ok, report.mended) == (False, ())
    assert lost not in names(backend)


def test_what_cannot_be_repaired_is_marked_and_unmarked_again() -> None:
    pack = newest_pack("runs/a@2")
    backend = backend_of({**OBJECTS, pack: None})
    report = repair(backend)
    root = reopen(backend).resolve("runs/a@2").root
    assert (report.ok, report.marked) == (False, (root,))
    assert set(names(backend)) - (set(OBJECTS) - {pack}) == {of_kind("log/")[-1][:-1] + "9"}  # one more entry, and nothing gone
    store = reopen(backend)
    shown = {snapshot.step: snapshot for snapshot in store.log("runs/a")}
    assert [shown[step].mark for step in (1, 2, 3)] == ["", "damaged", "bad"]
    assert pack in shown[2].reason
    with pytest.raises(SnapshotMarkedBadError, match="damaged"):
        store.checkout("runs/a@2")
    assert repair(backend).marked == ()
    with pytest.raises(StoreError):
        store.checkout("runs/a@2", allow_marked=True)
    backend.put(pack, flipped(OBJECTS[pack], 100))
    report = repair(backend, read_data=False)
    assert (report.unmarked, report.marked) == ((), ()), "a mark is taken back only when the data was read"
    assert reopen(backend).resolve(root).mark == "damaged"
    report = repair(backend, TWIN)
    assert (report.ok, report.unmarked) == (True, (root,))
    assert_whole(backend)
    report, before = repair(backend, TWIN), contents(backend)
    assert (report.ok, report.mended, report.marked, report.unmarked, contents(backend)) == (True, (), (), (), before)


def test_blocks_that_are_in_another_pack_are_taken_from_there() -> None:
    for has_own in (True, False):
        backend, _ = begun()
        for branch in ("one", "two"):  # neither knows of the other's blocks; with a value of their own, the layouts differ
            reopen(backend).put_snapshot({"same": torch.arange(9000.0)} | ({branch: 1} if has_own else {}), ref=branch, step=1)
        before, config = contents(backend), decode_config(read(backend, "store.json"), "memory:")
        first, second = names(backend, "packs/")
        for pack, data in (
            (first, None),
            (first, flipped(before[first], 100)),
            (second, flipped(before[second], -70)),
            (second, before[second][:5000]),
        ):
            damaged = backend_of({**before, pack: data})
            engine = make_engine(damaged, config, MemoryTable())
            (finding,) = [each for each in run_fsck(engine, read_data=True).findings if each.severity == "error"]
            assert (finding.object, finding.repairable) == (pack, not has_own)
            if has_own:
                assert "1 of 2 damaged blocks" in finding.message
                assert "--from" in finding.message
                break
            assert run_repair(engine, FsckOptions(read_data=True)).ok
            for branch in ("one", "two"):
                assert torch.equal(reopen(damaged).checkout(branch)["same"], torch.arange(9000.0))


def newest_pack(address: str) -> str:
    pack = max(reopen(backend_of(OBJECTS)).show(address).packs)
    return f"packs/{pack[-2:]}/{pack}"


def test_what_can_be_saved_of_a_pack_is_saved() -> None:
    """Two damaged blocks, of which the other store has one."""
    backend, store = begun()
    for step in (1, 2):
        store.put_snapshot({"a": torch.arange(2000.0), **({"b": torch.ones(3000)} if step == 2 else {})}, ref="runs/a", step=step)
    half, other = begun()
    other.put_snapshot({"a": torch.arange(2000.0)}, ref="runs/a", step=1)
    first = names(backend, "packs/")[0]
    lost = [first, names(backend, "packs/")[1]]
    engine = make_engine(backend, decode_config(read(backend, "store.json"), "memory:"), MemoryTable())
    backend.delete(lost)
    report = run_repair(engine, other=other_engine(contents(half)))
    assert len(report.marked) == 1
    assert torch.equal(reopen(backend).checkout("runs/a@1")["a"], torch.arange(2000.0))
    with pytest.raises(SnapshotMarkedBadError):
        reopen(backend).checkout("runs/a@2")


@pytest.mark.parametrize("kind", ["snapshots/", "parts/", "packs/"])
def test_swapped_objects_and_damaged_footers_are_repaired_without_another_store(kind: str) -> None:
    """Neither is overwritten before it lies somewhere else."""
    first, second, third, *_ = of_kind(kind)
    repair_whole(backend_of({**OBJECTS, first: OBJECTS[second], second: OBJECTS[first]}))
    repair_whole(backend_of({**OBJECTS, first: OBJECTS[second], second: OBJECTS[third], third: OBJECTS[first]}))
    if kind == "packs/":
        for pack in of_kind(kind):
            assert repair_whole(backend_of({**OBJECTS, pack: flipped(OBJECTS[pack], -20)})) == [pack]


def with_moved(*, chain: bool) -> Objects:
    """A store with relocations in force, whose sources are gone; with `chain`, packs were moved twice."""
    backend = backend_of(OBJECTS)
    store = reopen(backend)
    store.forget("runs/a@1")
    store.forget("runs/b")
    store.gc(AT_ONCE)
    if chain:
        store.gc(AT_ONCE)
    objects = contents(backend)
    assert any(name.startswith("moved/") for name in objects)
    return objects


@pytest.mark.parametrize("chain", [False, True])
def test_moved_objects_are_made_again(chain: bool) -> None:
    """Exactly as they were, from the footers of both sides; if those are gone too, the parts get the locations of their blocks."""
    objects = with_moved(chain=chain)
    exact = 0
    for moved in [name for name in objects if name.startswith("moved/")]:
        for data in (None, flipped(objects[moved]), objects[moved][:50]):
            backend = backend_of({**objects, moved: data})
            (finding,) = [each for each in run_fsck(engine_of(backend)).findings if each.severity == "error"]
            assert (finding.object, finding.repairable) == (moved, True)
            report = repair(backend)
            assert (report.ok, report.marked) == (True, ())
            exact += contents(backend).get(moved) == objects[moved]
            assert list(failing_roots(backend)) == []
            reopen(backend).gc(AT_ONCE)
            assert run_fsck(engine_of(backend), read_data=True).ok
    assert chain or exact >= 3


def test_checkpoints_are_made_again() -> None:
    backend = backend_of(OBJECTS)
    store = reopen(backend)
    while not names(backend, "checkpoint/"):
        store.annotate("runs/a@1", {"metric": 1.0})
    (checkpoint,) = names(backend, "checkpoint/")
    before = read(backend, checkpoint)
    for damaged in (flipped(before), before[:100], flipped(before, 30)):
        backend.replace(checkpoint, damaged)
        report = repair(backend, read_data=False)
        assert (report.before.ok, report.ok) == (False, True)
        assert read(backend, checkpoint) == before


def test_the_cache_of_this_host_is_rebuilt() -> None:
    backend = backend_of(OBJECTS)
    engine = engine_of(backend)
    engine.log.sync()
    with engine.table.batch() as batch:
        batch.delete(table_rows.TAGS.prefix + b"paper")
    (finding,) = run_fsck(engine).findings
    assert (finding.kind, finding.repairable) == ("damaged_cache", True)
    report = run_repair(engine)
    assert (report.ok, [mended.object for mended in report.mended]) == (True, [finding.object])
    assert Store(engine).resolve("paper").step == 2


@pytest.mark.race
@pytest.mark.parametrize(
    ("kind", "crash"),
    [("parts/", True), ("packs/", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("parts/", False), ("packs/", True)])],
)
def test_at_every_write(kind: str, crash: bool) -> None:
    """A gc runs before the k-th call that writes, or the repair dies there: afterwards everything can be read, or be repaired again."""
    for at in range(1, 60):
        backend = backend_of({**OBJECTS, of_kind(kind)[0]: None})

        def happens(backend: Backend = backend) -> None:
            if crash:
                raise Death
            with contextlib.suppress(UnreadableError):
                reopen(backend).gc(AT_ONCE)

        watched: Any = at_write(backend, at, happens)
        with contextlib.suppress(Death):
            repair(watched, TWIN)
        if crash:
            repair(backend, TWIN)
        assert run_fsck(engine_of(backend), read_data=True).ok, at
        assert list(failing_roots(backend)) == []
        reopen(backend).gc(AT_ONCE)
        assert list(failing_roots(backend)) == []
        if len(watched.writes()) < at:
            return
    pytest.fail("more writes than expected")


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_host_that_knew_the_part_before_it_was_made_again_frees_nothing_of_it(meanwhile: bool) -> None:
    backend = backend_of(OBJECTS)
    host = Store(engine_of(backend))
    host.gc(AT_ONCE)  # remembers what each part needs
    (name,) = parts_of(backend, "runs/a")
    backend.replace(name, flipped(read(backend, name)))
    replace, calls = backend.replace, list[str]()

    def replace_after_gc(name: str, data: bytes) -> None:
        if not calls and meanwhile:
            host.gc(AT_ONCE)
        calls.append(name)
        replace(name, data)

    backend.replace = replace_after_gc  # type: ignore[assignment, method-assign]
    assert repair(backend, TWIN).ok
    assert calls
    for _ in range(2):
        host.gc(AT_ONCE)
    assert_whole(backend)


def test_a_save_writes_again_what_is_known_to_be_damaged() -> None:
    store = Store(engine_of(backend := backend_of({"store.json": OBJECTS["store.json"]})))
    frozen = torch.arange(100_000, dtype=torch.int32)
    store.put_snapshot({"frozen": frozen, "w": torch.ones(5000)}, ref="job", step=1, codec="raw")
    pack = next(name for name in names(backend) if name.startswith("packs"))
    at = read(backend, pack).index(frozen.numpy().tobytes()[:64])
    backend.replace(pack, flipped(read(backend, pack), at))
    assert not store.repair(read_data=True).ok
    store.put_snapshot({"frozen": frozen, "w": torch.zeros(5000)}, ref="job", step=2, codec="raw")
    assert torch.equal(store.checkout("job")["frozen"], frozen)
    again = store.put_snapshot({"frozen": frozen, "w": torch.zeros(5000)}, ref="job", step=3, codec="raw", unchanged="ok")
    assert again.new_bytes < 10_000
    report = store.repair(read_data=True)
    assert report.ok, "the good copy mends the older snapshot"
    assert torch.equal(store.checkout("job@1")["frozen"], frozen)


def test_a_save_does_not_rely_on_what_was_moved_by_an_object_that_is_lost() -> None:
    store = Store(engine_of(backend := backend_of({"store.json": OBJECTS["store.json"]})))
    state = {"frozen": torch.arange(100_000, dtype=torch.int32)}
    store.put_snapshot(state, ref="job", step=1)
    other = contents(backend)
    pack = next(name for name in names(backend) if name.startswith("packs"))
    backend.replace(pack, flipped(read(backend, pack), 1000))
    assert repair(backend, other).ok
    backend.delete([name for name in names(backend) if name.startswith("moved")])
    store.put_snapshot(state, ref="new", step=1)
    assert torch.equal(store.checkout("new")["frozen"], state["frozen"])


def parts_of(backend: Backend, ref: str) -> list[str]:
    """The names of the parts of a branch's head."""
    engine = engine_of(backend)
    engine.log.sync()
    view = engine.log.view()
    branch = view.branch(ref)
    assert branch is not None
    info = view.by_root(branch.root)
    assert info is not None
    return [ObjectKey("part", ulid).name for ulid in engine.read_record(info).parts]

"""Whatever happens to log and store.json: salvage brings every intact snapshot back, and a crash during it changes nothing."""

from typing import Any

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import NotAStoreError, StoreError
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.store_config import decode_config
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.maintenance.salvage import salvage
from tensorstore_ck.store import Store
from tests.end_to_end.crash.faulty import Death
from tests.gc.stores import interrupted
from tests.maintenance.copy_store.places import at_write
from tests.maintenance.fsck.stores import ADDRESSES, backend_of, build, contents, is_exact, names, read, reopen, state

OBJECTS = contents(build())
LOG = [name for name in OBJECTS if name.startswith("log/")]
PUTS = {0: 1, 1: 2, 2: 3, 4: 4}
"""Position in the log -> number of the snapshot that it published."""


def copy_with(changed: dict[str, bytes | None]) -> MemoryBackend:
    return backend_of({**OBJECTS, **changed})


def assert_whole(store: Store) -> None:
    """Everything that was published is in the history of its ref, in order, and exact."""
    assert [snapshot.step for snapshot in store.log("runs/a")] == [3, 2, 1]
    for snapshot in store.log():
        assert is_exact(store.checkout(snapshot.root, allow_marked=True), snapshot.step or 0)
    assert {snapshot.step for snapshot in store.log()} == {1, 2, 3, 4}
    assert store.fsck(read_data=True).ok


def logical(store: Store) -> tuple[dict[str, str], dict[str, list[SnapshotRow]]]:
    """What must not change: all but entry numbers; and times, since a record is a little older than its entry."""
    refs = {**store.branches(), **store.tags()}
    histories = {
        ref: [info._replace(n=0, time_ns=0, arrived_ns=0, duration_ns=None) for info in store.engine.log.view().history(ref)]
        for ref in store.branches()
    }
    return {ref: snapshot.root for ref, snapshot in refs.items()}, histories


def test_an_intact_store_is_left_alone_a_dry_run_changes_nothing_and_what_is_no_store_is_refused() -> None:
    backend = copy_with({})
    report = salvage(backend)
    assert report.log == ""
    assert (report.kept, report.problems, report.lost, report.left_out) == (4, (), (), ())
    assert contents(backend) == OBJECTS
    backend = copy_with({LOG[1]: None})
    before = contents(backend)
    report = salvage(backend, dry_run=True)
    assert report.log
    assert [found.step for found in report.recovered] == [2]
    assert contents(backend) == before
    with pytest.raises(NotAStoreError):
        salvage(MemoryBackend())


@pytest.mark.parametrize(
    ("position", "how"), [*((position, ("deleted", "damaged")[position % 2]) for position in range(len(LOG))), (len(LOG) - 1, "deleted")]
)
def test_one_entry(position: int, how: str) -> None:
    data = OBJECTS[LOG[position]]
    backend = copy_with({LOG[position]: None if how == "deleted" else data[:40] + bytes([data[40] ^ 1]) + data[41:]})
    report = salvage(backend)
    if position == len(LOG) - 1 and how == "deleted":
        assert report.log == ""  # only the mark is lost, without a trace
    else:
        assert report.log
        assert report.problems
    assert (report.kept, report.lost) == (4, ())
    assert [found.step for found in report.recovered] == ([PUTS[position]] if position in PUTS else [])
    store = reopen(backend)
    assert_whole(store)
    if position == 2:
        for address, number in ADDRESSES.items():
            assert is_exact(store.checkout(address, allow_marked=True), number)
    if position not in {3, 4}:  # the branch and the first save to it
        assert [snapshot.step for snapshot in store.log("runs/b")] == [4, 1]
    if position not in {5}:
        assert store.tags()["paper"].step == 2
    if position in {1, 2}:
        assert logical(store) == logical(reopen(copy_with({})))


def test_several_entries_and_the_newest_and_one_of_the_new_log() -> None:
    backend = copy_with({LOG[1]: None, LOG[2]: b"", LOG[4]: None, LOG[7]: b"x"})
    report = salvage(backend)
    assert {found.step for found in report.recovered} == {2, 3, 4}
    assert_whole(reopen(backend))
    backend = copy_with(dict.fromkeys(LOG[1:3]))
    first = salvage(backend)
    backend.delete([names(backend, f"{first.log}/")[1]])
    second = salvage(backend)
    assert second.log != first.log
    assert_whole(reopen(backend))


@pytest.mark.parametrize("config", ["kept", "damaged", "lost"])
def test_all_of_the_log(config: str) -> None:
    changed: dict[str, bytes | None] = dict.fromkeys(LOG)
    if config != "kept":
        changed["store.json"] = None if config == "lost" else OBJECTS["store.json"].replace(b'"log": "log"', b'"log": "lag"')
    backend = copy_with(changed)
    report = salvage(backend)
    assert report.branches == ("runs/a", "runs/b")
    assert {found.step for found in report.recovered} == {1, 2, 3, 4}
    assert_whole(reopen(backend))


@pytest.mark.parametrize(
    "data", [None, b"", OBJECTS["store.json"].replace(b'"log": "log"', b'"log": "lag"')], ids=["lost", "empty", "damaged"]
)
def test_store_json(data: bytes | None) -> None:
    backend = copy_with({"store.json": data})
    report = salvage(backend)
    assert report.recovered == ()
    assert logical(reopen(backend)) == logical(reopen(copy_with({})))
    before, after = (reopen(store).resolve("runs/a@3") for store in (copy_with({}), backend))
    assert (after.metrics, after.mark, after.reason, after.time_ns) == (before.metrics, "bad", "spike", before.time_ns)
    old, new = (decode_config(each, "memory:") for each in (OBJECTS["store.json"], read(backend, "store.json")))
    assert new.log.startswith("log-")
    assert (new.uuid == old.uuid) == bool(data), "the log confirms the uuid of a damaged one"


def test_a_damaged_snapshot_is_left_out_and_listed() -> None:
    engine = reopen(copy_with({})).engine
    engine.log.sync()
    info = next(info for info in engine.log.view().snapshots() if info.step == 2)
    part = engine.read_record(info).parts[0]
    backend = copy_with({LOG[7]: None, LOG[6]: b"", part_name(part): b"gone"})
    report = salvage(backend)
    assert [(lost.ref, lost.step) for lost in report.lost] == [("runs/a", 2)]
    assert report.kept == 3
    assert report.tags == ()
    store = reopen(backend)
    assert [snapshot.step for snapshot in store.log("runs/a")] == [3, 1]
    assert is_exact(store.checkout("runs/a", allow_marked=True), 3)


def test_an_unpublished_snapshot_is_left_out() -> None:
    """Its save began before entries that are all there, and its branch went on without it."""
    backend = copy_with({})
    store = reopen(backend)
    store.checkout("runs/a", allow_marked=True)
    late, _ = interrupted(backend, "create log", lambda: store.put_snapshot(state(5), ref="runs/a", step=5))
    late.checkout("runs/a", allow_marked=True)
    with pytest.raises(StoreError):
        late.put_snapshot(state(6), ref="runs/a", step=6)
    backend.delete([LOG[1]])
    report = salvage(backend)
    assert [(found.ref, found.step) for found in report.left_out] == [("runs/a", 6)]
    assert [snapshot.step for snapshot in reopen(backend).log("runs/a")] == [5, 3, 2, 1]


@pytest.mark.parametrize("lost", [[1, 3, 4, 5], [63], [3, 63], [3, 63, 64]])
def test_a_checkpoint_holds_what_lost_entries_did(lost: list[int]) -> None:
    """Its own entry, number 64, may be among the lost ones: the next entry, or nothing, confirms it."""
    backend = copy_with({})
    store = reopen(backend)
    while not names(backend, "checkpoint/"):
        store.annotate("runs/a@1", {"metric": 1.0})
    store.tag("later", "runs/b")
    expected = logical(store)
    assert names(backend, "checkpoint/") == [f"checkpoint/{64:020d}"]
    backend.delete([name for name in names(backend, "log/") if int(name[-20:]) - 1 in lost])
    if 64 in lost:
        expected = ({ref: root for ref, root in expected[0].items() if ref != "later"}, expected[1])
    salvage(backend)
    assert logical(reopen(backend)) == expected


@pytest.mark.race
def test_a_crash_at_any_write_leaves_the_old_state_and_salvage_can_be_repeated() -> None:
    def die() -> None:
        raise Death

    for at in range(1, 100):
        backend = copy_with({LOG[1]: None})
        watched: Any = at_write(backend, at, die)
        try:
            salvage(watched)
        except Death:
            assert read(backend, "store.json") == OBJECTS["store.json"]
            salvage(backend)
            assert_whole(reopen(backend))
        else:
            return
    raise AssertionError("never came to an end")

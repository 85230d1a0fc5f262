"""Whatever happens to log and store.json: salvage brings every intact snapshot back, and a crash during it changes nothing."""

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.errors import BackendUnavailableError, NotAStoreError, StoreError
from tensorstore_ck.format.store_config import decode_config
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.maintenance.salvage import SalvageReport, salvage
from tensorstore_ck.store import Store
from tests.maintenance.fsck.stores import ADDRESSES, build, is_exact, names, read, reopen, state

OBJECTS = {name: read(build_backend, name) for build_backend in [build()] for name in names(build_backend)}
LOG = [name for name in OBJECTS if name.startswith("log/")]
PUTS = {0: 1, 1: 2, 2: 3, 4: 4}
"""Position in the log -> number of the snapshot that it published."""


def copy(**changed: bytes | None) -> MemoryBackend:
    return copy_with(changed)


def copy_with(changed: dict[str, bytes | None]) -> MemoryBackend:
    backend = MemoryBackend()
    for name, data in {**OBJECTS, **changed}.items():
        if data is not None:
            backend.put(name, data)
    return backend


def assert_whole(store: Store) -> None:
    """Everything that was published is in the history of its ref, in order, and exact."""
    assert [snapshot.step for snapshot in store.log("runs/a")] == [3, 2, 1]
    for snapshot in store.log():
        assert is_exact(store.checkout(snapshot.root, allow_marked=True), snapshot.step or 0)
    assert {snapshot.step for snapshot in store.log()} == {1, 2, 3, 4}
    assert store.fsck(read_data=True).ok


def logical(store: Store) -> tuple[dict[str, str], dict[str, list[SnapshotInfo]]]:
    """What must not change: all but entry numbers; and times, since a record is a little older than its entry."""
    refs = {**store.branches(), **store.tags()}
    histories = {ref: [info._replace(n=0, time_ns=0) for info in store.engine.log.view().history(ref)] for ref in store.branches()}
    return {ref: snapshot.root for ref, snapshot in refs.items()}, histories


def test_an_intact_store_is_left_alone() -> None:
    backend = copy()
    report = salvage(backend)
    assert report.log == ""
    assert (report.kept, report.problems, report.lost, report.left_out) == (4, (), (), ())
    assert {name: read(backend, name) for name in names(backend)} == OBJECTS


@pytest.mark.parametrize("position", range(len(LOG)))
@pytest.mark.parametrize("how", ["deleted", "damaged"])
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
    if position not in {3, 4}:  # the branch and the first save to it
        assert [snapshot.step for snapshot in store.log("runs/b")] == [4, 1]
    if position not in {5}:
        assert store.tags()["paper"].step == 2
    if position in {1, 2}:
        assert logical(store) == logical(reopen(copy()))


def test_several_entries_and_the_newest() -> None:
    backend = copy_with({LOG[1]: None, LOG[2]: b"", LOG[4]: None, LOG[7]: b"x"})
    report = salvage(backend)
    assert {found.step for found in report.recovered} == {2, 3, 4}
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
    "data",
    [None, b"", OBJECTS["store.json"][:50], OBJECTS["store.json"].replace(b"blake", b"blakf")],
    ids=["lost", "empty", "cut", "flipped"],
)
def test_store_json(data: bytes | None) -> None:
    backend = copy_with({"store.json": data})
    report = salvage(backend)
    assert report.recovered == ()
    assert logical(reopen(backend)) == logical(reopen(copy()))


def test_a_damaged_store_json_keeps_the_uuid_that_the_log_confirms() -> None:
    backend = copy_with({"store.json": OBJECTS["store.json"].replace(b'"log": "log"', b'"log": "lag"')})
    salvage(backend)
    old, new = (decode_config(data, "memory:") for data in (OBJECTS["store.json"], read(backend, "store.json")))
    assert new.uuid == old.uuid
    assert new.log.startswith("log-")


def test_notes_and_times_stay() -> None:
    backend = copy_with({"store.json": None})
    salvage(backend)
    before, after = (reopen(store).resolve("runs/a@3") for store in (copy(), backend))
    assert (after.metrics, after.mark, after.reason, after.time_ns) == (before.metrics, "bad", "spike", before.time_ns)


def test_a_damaged_snapshot_is_left_out_and_listed() -> None:
    part = reopen(copy()).engine.read_record(info_of(2)).parts[0]
    from tensorstore_ck.format.part import part_name

    backend = copy_with({LOG[7]: None, LOG[6]: b"", part_name(part): b"gone"})
    report = salvage(backend)
    assert [(lost.ref, lost.step) for lost in report.lost] == [("runs/a", 2)]
    assert report.kept == 3
    assert report.tags == ()
    store = reopen(backend)
    assert [snapshot.step for snapshot in store.log("runs/a")] == [3, 1]
    assert is_exact(store.checkout("runs/a", allow_marked=True), 3)


def info_of(number: int) -> SnapshotInfo:
    view = reopen(copy()).engine.log
    view.sync()
    return next(info for info in view.view().snapshots() if info.step == number)


def test_an_unpublished_snapshot_is_left_out() -> None:
    """Its save began before entries that are all there, and its branch went on without it."""
    backend = copy()
    store = reopen(backend)
    store.checkout("runs/a", allow_marked=True)
    late = reopen(backend)
    late.checkout("runs/a", allow_marked=True)
    original = late.engine.log.append

    def overtaken(build: object, **_: object) -> object:
        store.put_snapshot(state(5), ref="runs/a", step=5)
        return original(build)  # type: ignore[arg-type]

    late.engine.log.append = overtaken  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError):
        late.put_snapshot(state(6), ref="runs/a", step=6)
    backend.delete([LOG[1]])
    report = salvage(backend)
    assert [(found.ref, found.step) for found in report.left_out] == [("runs/a", 6)]
    assert [snapshot.step for snapshot in reopen(backend).log("runs/a")] == [5, 3, 2, 1]


@pytest.mark.parametrize("lost", [[1, 3, 4, 5], [63], [3, 63], [3, 63, 64]])
def test_a_checkpoint_holds_what_lost_entries_did(lost: list[int]) -> None:
    """Its own entry, number 64, may be among the lost ones: the next entry, or nothing, confirms it."""
    backend = copy()
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


def test_dry_run_changes_nothing() -> None:
    backend = copy_with({LOG[1]: None})
    before = {name: read(backend, name) for name in names(backend)}
    report = salvage(backend, dry_run=True)
    assert report.log
    assert [found.step for found in report.recovered] == [2]
    assert {name: read(backend, name) for name in names(backend)} == before


def test_salvage_again_after_a_loss_in_the_new_log() -> None:
    backend = copy_with(dict.fromkeys(LOG[1:3]))
    first = salvage(backend)
    backend.delete([names(backend, f"{first.log}/")[1]])
    second = salvage(backend)
    assert second.log != first.log
    assert_whole(reopen(backend))


class Dying(MemoryBackend):
    """Fails every write from the k-th on."""

    left = 1 << 30

    def create(self, name: str, data: Buffer) -> Created:
        self._spend()
        return super().create(name, data)

    def replace(self, name: str, data: Buffer) -> None:
        self._spend()
        super().replace(name, data)

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise BackendUnavailableError("dead")


def test_a_crash_at_any_write_leaves_the_old_state_and_salvage_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.log.log.RESEND_DELAYS", (0,))
    for writes in range(100):
        backend = Dying()
        for name, data in OBJECTS.items():
            if name != LOG[1]:
                backend.put(name, data)
        backend.left = writes
        try:
            salvage(backend)
        except StoreError:
            assert read(backend, "store.json") == OBJECTS["store.json"]
            backend.left = 1 << 30
            salvage(backend)
            assert_whole(reopen(backend))
        else:
            return
    raise AssertionError("never came to an end")


def test_nothing_of_a_store() -> None:
    with pytest.raises(NotAStoreError):
        salvage(MemoryBackend())


def test_local_files(tmp_path: object) -> None:
    backend: Backend = LocalBackend(f"{tmp_path}/store")
    build(backend)
    backend.delete(names(backend, "log/")[1:3])
    report: SalvageReport = salvage(backend)
    assert {found.step for found in report.recovered} == {2, 3}
    assert_whole(reopen(backend))


def test_every_address_after_salvage() -> None:
    backend = copy_with({LOG[2]: None})
    salvage(backend)
    store = reopen(backend)
    for address, number in ADDRESSES.items():
        assert is_exact(store.checkout(address, allow_marked=True), number)

"""What only looks at the store, while gc of another host, with a cache of its own, frees some of it: it is not called damaged."""

from collections.abc import Callable

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import NotFoundError, SnapshotExpiredError
from tensorstore_ck.log import ObjectKey, Objects, Op
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.maintenance.copy_store.copy_histories import copy_refs
from tensorstore_ck.store import Store
from tests.gc.interleavings.actor import copy_table
from tests.gc.relocated import copy_pack, packs_of
from tests.gc.stores import AT_ONCE, copied, each_call, interrupted, open_store, put_all, state, stay_in_one_thread

SNAPSHOTS = 8


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


def copy(engine: Engine) -> None:
    report = copy_refs(engine, open_store().engine)
    assert [ref.error for ref in report.refs] == [None]


def check(store: Store) -> None:
    assert store.fsck(read_data=True).ok


def by_address(read: Callable[[Store], object]) -> Callable[[Store], object]:
    """A read of one snapshot, which says that it has expired, or that it is not there."""

    def look(store: Store) -> None:
        try:
            read(store)
        except (SnapshotExpiredError, NotFoundError):
            assert "job@1" not in [f"job@{each.step}" for each in store.log("job")]

    return look


REPORTS: dict[str, Callable[[Store], object]] = {
    "usage": lambda store: store.usage(per_snapshot=True),
    "gc": lambda store: store.gc(AT_ONCE, dry_run=True),
    "fsck": check,
    "policies": lambda store: store.apply_policies("job", dry_run=True, rules={"keep_last": 1, "max_bytes": 1}),
    "recode": lambda store: store.recode(dry_run=True),
    "copy": lambda store: copy(store.engine),
    "metadata": by_address(lambda store: store.metadata("job@1")),
    "show": by_address(lambda store: store.show("job@1")),
    "checkout": by_address(lambda store: store.checkout("job@1")),
}


def made() -> tuple[MemoryBackend, MemoryTable]:
    """Snapshots that share a block, and have one each."""
    backend, known = MemoryBackend(), MemoryTable()
    put_all(open_store(backend, table=known), "job", [state(1, number) for number in range(2, 2 + SNAPSHOTS)])
    return backend, known


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("name", REPORTS)
def test_one_snapshot_is_freed_at_any_call(name: str) -> None:
    """The rest of its pack is moved."""
    template, known = made()

    def run(at: int, _: None) -> str:
        backend = copied(template)
        other = open_store(backend)

        def free() -> None:
            other.forget("job@1")
            other.gc(AT_ONCE)

        store, faults = interrupted(backend, at, free, table=copy_table(known))
        REPORTS[name](store)
        return faults.struck

    assert "get" in each_call(run, [None])


@pytest.mark.parametrize("name", ["usage", "gc", "fsck", "policies"])
def test_a_snapshot_is_freed_at_each_look(name: str) -> None:
    """However often something is freed meanwhile, the report is made in the end."""
    template, known = made()
    backend, freed = copied(template), list[int]()
    other = open_store(backend)

    def free() -> None:
        freed.append(len(freed) + 1)
        other.forget(f"job@{freed[-1]}")
        other.gc(AT_ONCE)
        if len(freed) < SNAPSHOTS - 2:
            faults.struck = ""

    store, faults = interrupted(backend, "get snapshots", free, table=copy_table(known))
    REPORTS[name](store)
    assert len(freed) == SNAPSHOTS - 2


class Deleting(MemoryBackend):
    """Another gc deletes an object as soon as it was read so often."""

    name = ""
    reads_left = 0

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data = super().get(name, max_bytes=max_bytes)
        if name == self.name:
            self.reads_left -= 1
            if not self.reads_left:
                self.delete([name])
        return data


@pytest.mark.parametrize("reads", range(1, 5))
def test_a_map_that_another_gc_has_swept_is_deleted_while_gc_marks(reads: int) -> None:
    backend = Deleting()
    store = open_store(backend)
    store.put_snapshot(state(1, 2), ref="job")
    (pack,) = packs_of(store.engine)
    copy_pack(store.engine, pack)
    copy_pack(store.engine, pack)
    swept = ObjectKey("moved", store.engine.log.view().relocations(pack)[-1].moved)
    store.engine.log.append(lambda _: [Op.condemn(Objects([swept]))])
    store.engine.log.append(lambda _: [Op.sweep(Objects([swept]))])
    backend.name, backend.reads_left = swept.name, reads
    assert open_store(backend).gc(dry_run=True).snapshots == ()


def test_what_is_missing_and_was_not_freed_is_damage_at_once() -> None:
    """However much others write meanwhile."""
    template, known = made()
    backend = copied(template)
    name = next(info.name for info in backend.list("snapshots/"))
    backend.delete([name])
    other = open_store(backend)

    def write() -> None:
        other.engine.log.append(lambda view: [Op.annotate(next(view.snapshots()).root, {"loss": float(view.horizon())})])
        faults.struck = ""

    store, faults = interrupted(backend, "get snapshots", write, table=copy_table(known))
    with pytest.raises(Exception, match=name):
        store.usage()

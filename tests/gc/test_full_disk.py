"""gc on a full disk: it frees before it writes, and one entry of the log is all that it needs for that."""

import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.reserve import NAMES, STEP_BYTES, fill_reserve
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.format.ref_statement import LogName
from tensorstore_ck.log.ref_signer import RefSigner
from tensorstore_ck.store import ANY, Store
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import AT_ONCE, each_call, leave_orphans, open_store, put_all, require_sound, sizes, state, stay_in_one_thread

PAGE_BYTES = 4096
big = partial(state, size=200_000)
KEPT = {**state(1), **big(6)}


class Disk(MemoryBackend):
    """A disk that fills up: each object uses whole pages."""

    free_pages: int | None = None

    def space(self) -> Space | None:
        return None if self.free_pages is None else Space(self.free_pages * PAGE_BYTES, 1 << 30)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if self.free_pages is not None and name in self._objects:
                self.free_pages += pages(len(self._objects[name][0]))
            super().delete([name])

    def _insert(self, name: str, data: Buffer) -> bool:
        if self.free_pages is not None and name not in self._objects:
            if pages(len(data)) > self.free_pages:
                raise NoSpaceError(f"{name}: no space left", object_id=name)
            self.free_pages -= pages(len(data))
        return super()._insert(name, data)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


def pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES)


def full_disk(free_pages: int) -> tuple[Disk, Store]:
    """Five snapshots that an undo window holds, a pin that has run out, orphans, and a pack of which a third is needed."""
    disk = Disk()
    store = open_store(disk)
    put_all(store, "job", [{**state(1), **big(number)} for number in range(2, 7)])
    put_all(store, "other", [big(7), big(8)])
    store.pin("other@1", expires=0)
    store.forget("other", *[f"job@{step}" for step in range(1, 5)])
    leave_orphans(disk, big(9))
    disk.free_pages = free_pages
    return disk, store


@pytest.mark.parametrize("free_pages", [1, 2, 3, 1000])
def test_it_frees_with_space_for_one_entry(free_pages: int) -> None:
    disk, store = full_disk(free_pages)
    planned = store.gc(AT_ONCE, dry_run=True)
    report = store.gc(AT_ONCE)
    assert (report.freed_bytes, report.notes, len(report.rewritten)) == (planned.freed_bytes, (), 1)
    assert report.not_recorded == ""
    require_sound(open_store(disk), {"job": KEPT})
    assert store.gc(AT_ONCE, dry_run=True).freed_bytes == 0


def test_without_space_for_an_entry_nothing_has_changed() -> None:
    disk, store = full_disk(0)
    before = sizes(disk)
    with pytest.raises(NoSpaceError):
        store.gc(AT_ONCE)
    assert sizes(disk) == before
    disk.free_pages = 1
    store.undo("other")


def test_the_reserve_is_space_for_a_signed_reset() -> None:
    """That of a user who then lets gc free what is newer."""
    disk, store = full_disk(10_000)
    store.engine.log._sign = RefSigner(SigningKey.generate(), LogName(bytes(16), "log"), time.time_ns).moves
    fill_reserve(disk)
    disk.free_pages = 0
    with pytest.raises(NoSpaceError):
        store.tag("new", "job")
    store.reset("job", "job@5")
    assert len([*disk.list("gc/")]) == len(NAMES) - 1


@pytest.mark.parametrize("left", [1, len(NAMES)])
def test_the_reserve_is_space_for_what_frees_space_and_for_nothing_else(left: int) -> None:
    """With little of it left, too; forgetting something needs it as well."""
    disk, store = full_disk(10_000)
    fill_reserve(disk)
    assert [info.size_bytes for info in disk.list("gc/")] == [STEP_BYTES] * len(NAMES)
    disk.delete(NAMES[left:])
    disk.free_pages = 0
    with pytest.raises(NoSpaceError):
        store.tag("new", "job")
    with pytest.raises(NoSpaceError):
        store.put_snapshot(big(10), ref="job", expect=ANY)
    assert len([*disk.list("gc/")]) == left
    store.set_policy("other", keep_last=1)
    assert len([*disk.list("gc/")]) == left - 1
    report = store.gc(AT_ONCE)
    assert (report.freed_bytes > 0, report.not_recorded) == (True, "")
    require_sound(open_store(disk), {"job": KEPT})
    disk.free_pages = 10_000
    store.gc(AT_ONCE)
    assert len([*disk.list("gc/")]) == len(NAMES), "gc makes it whole again"


def test_a_reserve_that_a_crash_tore_is_made_again_and_leaves_space_for_an_entry() -> None:
    disk = Disk()
    disk.free_pages = 3 * STEP_BYTES // PAGE_BYTES
    disk.put(NAMES[1], b"torn")
    fill_reserve(disk)
    assert {info.name: info.size_bytes for info in disk.list("")} == {NAMES[0]: STEP_BYTES, NAMES[1]: 4}
    disk.free_pages = 6 * STEP_BYTES // PAGE_BYTES
    fill_reserve(disk)
    assert [info.size_bytes for info in disk.list("gc/")] == [STEP_BYTES] * len(NAMES)


def test_what_an_earlier_run_swept_is_deleted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, store = full_disk(1000)

    def die(_: Disk, names: Iterable[str]) -> None:
        if any(name.startswith("packs/") for name in names):
            raise Death

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "delete", die)
        with pytest.raises(Death):
            store.gc(AT_ONCE)
    disk.free_pages = 0
    store = open_store(disk)
    assert store.gc(AT_ONCE).freed_bytes > 0
    require_sound(store, {"job": KEPT})


def test_packs_for_whose_copies_there_is_no_space_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = full_disk(1)
    with monkeypatch.context() as patch:
        patch.setattr("tensorstore_ck.gc.collect.SPARE_BYTES", 1 << 40)
        report = store.gc(AT_ONCE)
    assert (report.rewritten, report.notes) == (
        (),
        ("1 sparse packs were not rewritten: there is no space for copies of their live blocks",),
    )
    assert report.freed_bytes > 0
    require_sound(store, {"job": KEPT})
    assert len(store.gc(AT_ONCE).rewritten) == 1


@pytest.mark.slow
@pytest.mark.race
def test_a_run_that_dies_is_continued() -> None:
    def run(at: int, mode: str) -> str:
        disk, _ = full_disk(1)
        faults = Faults()
        store = open_store(FaultyBackend(disk, faults, atomic_put=True))
        faults.mode, faults.at, faults.calls = mode, at, 0
        with suppress(Death):
            store.gc(AT_ONCE)
        fresh = open_store(disk)
        fresh.gc(AT_ONCE)
        require_sound(fresh, {"job": KEPT})
        return faults.struck

    assert {"create", "delete", "append", "put"} <= each_call(run, ["die-before", "die-after"])

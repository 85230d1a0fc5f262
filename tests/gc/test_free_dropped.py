"""`Store.free_dropped`: a branch with a limit stays within it, without a list of the store, and nothing else is touched."""

from contextlib import suppress
from dataclasses import replace

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import GcRefusedError, StoreError, UnreadableError, UnsafeBackendError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log import Op
from tensorstore_ck.store import Store
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import (
    AT_ONCE,
    Clock,
    Noted,
    State,
    contents,
    copied,
    counts,
    each_call,
    open_store,
    require_readable,
    require_sound,
    sizes,
    state,
    stay_in_one_thread,
)

MODES = ("die-before", "die-after", "tear", "lost-reply", "unknown", "unknown-lands-later", "unavailable")
HELD: dict[str, State] = {"job": state(9, 3), "job@8": state(8, 3), "other": state(1, 11), "kept": state(2, 3)}


def save_all(store: Store, steps: range) -> None:
    for step in steps:
        store.put_snapshot(state(step, 3), ref="job", step=step)


def test_many_saves_take_bounded_space() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    store.set_policy("job", keep_last=2)
    peak = rewritten = 0
    for step in range(40):
        store.put_snapshot(state(3, 100 + step, 1000 + step), ref="job", step=step)
        if step % 4 == 3:
            rewritten += store.free_dropped("job").rewritten_packs
        peak = max(peak, sum(sizes(backend).values()))
    one = sum(sizes(backend).values()) / 2
    assert peak < 8 * one
    assert counts(backend) == {"packs": 3, "parts": 2, "snapshots": 2, "moved": 0}  # the shared block is in a pack of its own
    assert rewritten == 1
    require_sound(store, {"job": state(3, 139, 1039), "job@38": state(3, 138, 1038)})
    assert store.gc(AT_ONCE, dry_run=True).deleted_bytes == 0


def test_damage_ends_it_where_a_released_snapshot_has_a_metric_that_is_nan() -> None:
    """NaN is not equal to itself: what others released would seem to change at each look."""
    backend = MemoryBackend()
    other = open_store(backend)
    other.set_policy("*", keep_last=1)
    for step in range(3):
        other.put_snapshot(state(step), ref="diverged", step=step, metrics={"loss": float("nan")})
    other.gc(GcOptions(undo_window_seconds=0))  # releases what the policy dropped; its objects are too young to be freed
    before = contents(backend, "parts/")
    other.put_snapshot(state(70), ref="damaged", step=1)
    (part,) = contents(backend, "parts/").keys() - before.keys()
    store = open_store(backend)
    for step in range(3):
        store.put_snapshot(state(20 + step), ref="job", step=step)
    backend.delete([part])
    with pytest.raises(UnreadableError):
        store.free_dropped("job")


def test_it_leaves_everything_else() -> None:
    """Other branches and their undo windows, what a user forgot on the same branch, and what others hold."""
    store = open_store()
    store.set_policy("*", keep_last=2)
    for step in range(5):
        store.put_snapshot(state(20 + step), ref="other", step=step)
    save_all(store, range(5))
    store.tag("tagged", "job@3")
    store.branch("branched", "job@4")
    save_all(store, range(5, 8))
    store.forget("job@6")
    found = store.free_dropped("job")
    assert (found.snapshots, found.rewritten_packs) == (4, 1)  # 0, 1, 2 and 5
    assert {window.name for window in store.engine.log.view().windows()} == {"job", "other"}
    store.undo("job@6")
    store.undo("other")
    require_sound(store, {"job@6": state(6, 3), "tagged": state(3, 3), "branched": state(4, 3), "other@2": state(22)})
    with pytest.raises(StoreError):
        store.checkout("job@5")


def test_it_lists_nothing_and_reads_each_part_once() -> None:
    calls = (noted := Noted()).seen
    store = open_store(FaultyBackend(MemoryBackend(), noted, atomic_put=True))
    store.set_policy("job", keep_last=2)
    for number in range(10):
        store.put_snapshot(state(50 + number), ref=f"other/{number}")
    save_all(store, range(4))
    store.free_dropped("job")
    save_all(store, range(4, 8))
    calls.clear()
    found = store.free_dropped("job")
    assert found.snapshots == 4
    assert not [call for call in calls if call.startswith("list")]
    assert len([call for call in calls if call.startswith(("read parts/", "get parts/"))]) <= 8
    assert len(calls) < 45


def test_there_is_nothing_to_free() -> None:
    store = open_store()
    assert store.free_dropped("nothing") == (0, 0, 0)
    save_all(store, range(3))
    head = store.engine.log.sync()
    assert store.free_dropped("job") == (0, 0, 0)
    assert store.engine.log.sync() == head


def test_it_refuses_where_gc_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store.set_policy("job", keep_last=1)
    save_all(store, range(3))
    monkeypatch.setattr(type(store.engine.log), "is_changed", property(lambda log: True))
    with pytest.raises(GcRefusedError, match="accept-log"):
        store.free_dropped("job")
    monkeypatch.undo()
    monkeypatch.setattr(store.engine, "config", replace(store.engine.config, exclusive_create=False))
    with pytest.raises(UnsafeBackendError, match="exclusively"):
        store.free_dropped("job")


def test_tombstones_are_truncated() -> None:
    clock = Clock()
    store = open_store(clock=clock)
    store.set_policy("job", keep_last=1)
    for step in range(20):
        store.put_snapshot(state(step), ref="job", step=step)
        clock.advance(86_400)
        store.free_dropped("job")
    swept = sum(found.swept for _, found in store.engine.log.view().objects())
    assert 0 < swept <= 8 * 3 + 3  # a week of them


@pytest.mark.slow
@pytest.mark.race
def test_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed or fails anywhere hurts nothing; the next one and gc free what it left."""
    stay_in_one_thread(monkeypatch)
    template = MemoryBackend(clock=Clock())
    store = open_store(template, clock=Clock())
    store.set_policy("job", keep_last=2)
    store.put_snapshot(state(1, 11), ref="other", step=1)
    save_all(store, range(1, 3))
    store.branch("kept", "job@2")
    save_all(store, range(4, 10))

    later = Clock()
    later.advance(2 * 86_400)  # what another process dropped is freed after the undo window

    def left_after(backend: MemoryBackend) -> int:
        fresh = open_store(backend, clock=later)
        fresh.free_dropped("job")
        fresh.gc(AT_ONCE)
        fresh.gc(AT_ONCE)
        require_sound(fresh, HELD)
        return sum(sizes(backend).values())

    least = left_after(copied(template, Clock()))

    def run(at: int, mode: str) -> str:
        backend, faults = copied(template, Clock()), Faults()
        store = open_store(FaultyBackend(backend, faults, atomic_put=True), clock=later)
        faults.mode, faults.at, faults.calls = mode, at, 0
        with suppress(Death, StoreError):
            store.free_dropped("job")
        if faults.later is not None:
            faults.later()
        require_readable(open_store(backend), HELD)
        assert left_after(backend) <= least * 1.05, f"{mode} at call {at}, {faults.struck}"
        return faults.struck

    assert {"read", "create", "delete"} <= each_call(run, MODES)


def test_a_killed_run_is_continued() -> None:
    """Its windows are ended and nothing is freed yet: the next run finds the snapshots all the same."""
    store = open_store()
    store.set_policy("job", keep_last=1)
    save_all(store, range(5))
    store.engine.log.append(lambda view: [Op.purge(window.n, window.name) for window in view.windows()])
    assert store.free_dropped("job").snapshots == 3


def test_a_pack_that_another_one_has_replaced_is_left() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    store.set_policy("job", keep_last=2)
    store.put_snapshot(state(3, 100, 4), ref="job", step=0)
    [pack] = [name for name in sizes(backend) if name.startswith("packs/")]
    for step in range(1, 4):
        store.put_snapshot(state(4, 100 + step), ref="job", step=step)
    before = contents(backend, "packs/")
    backend.delete([pack])
    backend.put(pack, min(before.values(), key=len))
    found = store.free_dropped("job")
    assert (found.snapshots, found.rewritten_packs) == (2, 0)
    assert pack in contents(backend, "packs/")

"""At every backend call of gc, compaction included, every kind of fault: nothing that is held is hurt, and later runs free the rest."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.errors import StoreError
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import (
    AT_ONCE,
    Clock,
    State,
    contents,
    copied,
    each_call,
    leave_orphans,
    open_store,
    put_all,
    require_readable,
    require_sound,
    sizes,
    state,
    stay_in_one_thread,
)

MODES = ("die-before", "die-after", "tear", "lost-reply", "unknown", "unknown-lands-later", "unavailable")
FAULTS = [*((mode, False, False) for mode in MODES), ("lost-reply", False, True), ("unavailable", False, True), ("tear", True, False)]
"""And whether it is on local files, and whether all later calls fail, too."""
SETTLED = replace(AT_ONCE, tombstone_seconds=0)
HELD: dict[str, State] = {
    "job": state(1, 6),
    "job@2": state(1, 5),
    "other": {**state(11), "text": "lorem ipsum " * 6000},
    "best": state(21),
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


def build(backend: Backend, clock: Clock) -> None:
    """Two sparse packs, one of them moved before; a whole snapshot, a branch and a tag that go; a pin that runs out; orphans."""
    big = partial(state, size=50_000)
    store = open_store(backend, clock=clock)
    put_all(store, "job", [{**state(1), **big(2, 3, 4, 5)}, {**state(1), **state(5)}, state(1, 6)])
    put_all(store, "other", [{**HELD["other"], **big(12, 13)}, HELD["other"]])
    store.pin("other@1", expires=60)
    put_all(store, "best-run", [state(21), big(22)])
    store.tag("best", "best-run@1")
    store.tag("worst", "best-run@2")
    store.branch("kept", "job@1")
    store.put_snapshot(big(2), ref="kept", step=2)
    store.forget("job@1", "kept@1")
    clock.advance(50)
    assert len(store.gc(AT_ONCE).rewritten) == 1
    leave_orphans(backend, big(41, 42))
    store.forget("kept", "other@1", "best-run", "worst")
    clock.advance(50)


@pytest.mark.race
def test_every_call(tmp_path: Path) -> None:
    built, template = Clock(time.time_ns()), MemoryBackend()  # the clock of the objects, since a pin runs out
    build(template, built)

    def collect_twice(backend: Backend) -> int:
        """The bytes that are left of a readable store, by two runs that nothing disturbs."""
        fresh = open_store(backend, clock=built)
        require_readable(fresh, HELD)
        fresh.gc(SETTLED)
        fresh.gc(SETTLED)
        require_sound(fresh, HELD)
        return sum(sizes(backend).values())

    needed_bytes = collect_twice(copied(template))
    garbage_bytes = sum(sizes(template).values()) - needed_bytes
    assert garbage_bytes > 9 * needed_bytes

    def run(at: int, fault: tuple[str, bool, bool]) -> str:
        mode, is_local, persistent = fault
        backend: Backend = copied(template)
        if is_local:
            backend = LocalBackend(str(tmp_path / str(at)), sync=False)
            for name, data in contents(template).items():
                backend.put(name, data)
        faults = Faults()
        store = open_store(FaultyBackend(backend, faults, atomic_put=not is_local), clock=built)
        faults.mode, faults.at, faults.persistent, faults.calls = mode, at, persistent, 0
        try:
            store.gc(SETTLED)
        except (Death, StoreError):
            assert faults.struck
        if faults.later is not None:
            faults.later()
        assert collect_twice(backend) - needed_bytes <= garbage_bytes // 100, f"{mode} at call {at}, {faults.struck}"
        return faults.struck

    assert {"get", "list", "read", "open", "append", "close", "put", "create", "delete"} <= each_call(run, FAULTS)

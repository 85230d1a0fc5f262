"""Every kind of fault at the calls that a writer record adds: no save fails because of them, none is slower, and nothing older is hurt."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck import Store
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.processes import Process
from tensorstore_ck.engine import object_ids
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.log.cache import MemoryTable
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import MODES, Death, Faults, FaultyBackend
from tests.end_to_end.crash.test_every_call import make_state, open_over
from tests.gc.stores import AT_ONCE, same

pytestmark = pytest.mark.race
DEADLY = ("die-before", "die-after", "tear")
PROCESS = Process("node7/0123abcd", "boot", "pid:[4026532222]", 42, 4711)


class AtOnce:
    """A thread that does its work when it is started: faults then come in the same order every time."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work

    def start(self) -> None:
        self._work()

    def join(self, timeout: float) -> None: ...

    def is_alive(self) -> bool:
        return False


class StrikesAt(Faults):
    """At calls whose description begins with `what`."""

    def __init__(self, mode: str, what: str, *, persistent: bool) -> None:
        super().__init__(mode, persistent=persistent)
        self._what = what

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if what.startswith(self._what) and (self.persistent or not self.struck):
            self.at = self.calls + 1
            self.struck = what
            return super().call(what, effect, tear, create=create)
        self.at = 0
        return super().call(what, effect, tear, create=create)


def open_recording(backend: Backend) -> Store:
    config = read_config(backend)
    assert config is not None
    return Store(make_engine(backend, config, MemoryTable(), sleep=lambda _: None, find_process=lambda: PROCESS))


CALLS = [*product(MODES, ("put writers/", "delete"))]
TURNS = [(False, False), (True, False), (False, True)]
"""Whether the fault stays, and whether the backend is local: its puts may be torn."""


@pytest.mark.parametrize(
    ("mode", "call", "persistent", "is_local"), [(*CALLS[case], *variant) for case, variant in in_turns(range(len(CALLS)), TURNS)]
)
def test_every_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, call: str, *, persistent: bool, is_local: bool) -> None:
    monkeypatch.setattr(object_ids, "Helper", AtOnce)
    backend = LocalBackend(str(tmp_path)) if is_local else MemoryBackend()
    init_store(backend)
    with open_over(backend) as good:
        good.put_snapshot(make_state(1), ref="job", step=1)
    faults = StrikesAt(mode, call, persistent=persistent)
    store = open_recording(FaultyBackend(backend, faults, atomic_put=not is_local))
    put = False
    try:
        store.checkout("job")
        store.put_snapshot(make_state(2), ref="job", step=2)
        put = True
        store.close()
    except Death:
        assert mode in DEADLY
    assert faults.struck.startswith(call)
    assert put or (mode in DEADLY and call == "put writers/"), "only a process that is gone has not put"
    with open_over(backend) as fresh:
        step = fresh.resolve("job").step
        assert step == (2 if put else 1)
        assert same(fresh.checkout("job"), make_state(step or 0))
        report = fresh.fsck(read_data=True)
        assert report.ok, report.findings
        fresh.gc(AT_ONCE)
        assert same(fresh.checkout("job"), make_state(step or 0))


def test_the_record_costs_no_save_a_call_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a process, and one when it ends."""
    monkeypatch.setattr(object_ids, "Helper", AtOnce)
    counted = {}
    for record in (False, True):
        backend, faults = MemoryBackend(), Faults()
        init_store(backend)
        faulty = FaultyBackend(backend, faults, atomic_put=True)
        store = open_recording(faulty) if record else open_over(faulty)
        calls = []
        for step in range(1, 4):
            before = faults.calls
            store.put_snapshot(make_state(step), ref="job", step=step)
            calls.append(faults.calls - before)
        store.close()
        counted[record] = calls
    assert [more - less for more, less in zip(counted[True], counted[False], strict=True)] == [1, 0, 0]

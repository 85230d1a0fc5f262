"""At every backend call of a save, every kind of fault: the ref is old or new and nothing between, and nothing older is hurt."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorstore_ck import Store
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.errors import StoreError
from tensorstore_ck.log.cache import MemoryTable
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import MODES, Death, Faults, FaultyBackend
from tests.gc.stores import same

pytestmark = pytest.mark.race


def open_over(backend: Backend) -> Store:
    config = read_config(backend)
    assert config is not None
    return Store(make_engine(backend, config, MemoryTable(), sleep=lambda _: None))


def make_state(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "same": torch.arange(6000, dtype=torch.float32),
        "weights": torch.randn(3, 2000, generator=generator),
        "small": torch.randn(5, generator=generator),
        "text": f"{step}" * 40_000,
        "step": step,
    }


def saved_twice(backend: Backend) -> str:
    """Two saves without faults; the root of the second."""
    init_store(backend)
    with open_over(backend) as good:
        good.put_snapshot(make_state(1), ref="job", step=1)
        return good.put_snapshot(make_state(2), ref="job", step=2).root


def save_under(backend: Backend, faults: Faults) -> bool:
    """The third save, by a process that restores first; whether it was acknowledged."""
    faulty = FaultyBackend(backend, faults, atomic_put=isinstance(backend, MemoryBackend))
    acknowledged = False
    try:
        store = open_over(faulty)
        restored = store.checkout("job")
        assert same(restored, make_state(2))
        acknowledged = store.put_snapshot(make_state(3), ref="job", step=3).step == 3
    except (Death, StoreError):
        pass
    if faults.later is not None:
        faults.later()
    return acknowledged


def require_old_or_new(backend: Backend, before: str) -> bool:
    """Checks what a new process finds, and whether that is the third save; `before` is the root of the second one."""
    fresh = open_over(backend)
    assert same(fresh.checkout("job@1"), make_state(1))
    assert same(fresh.checkout("job@2"), make_state(2))
    head = fresh.resolve("job")
    assert head.step in (2, 3)
    assert same(fresh.checkout("job"), make_state(head.step or 0))
    if head.step == 3:
        assert head.parent == before
        assert [snap.step for snap in fresh.log("job")] == [3, 2, 1]
    else:
        assert head.root == before
    fresh.put_snapshot(make_state(4), ref="job", step=4)
    assert same(fresh.checkout("job"), make_state(4))
    report = fresh.fsck(read_data=True)
    assert report.ok, report.findings
    return head.step == 3


class Calls(Faults):
    """Notes all calls, and strikes at none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        self.made.append(what.split(maxsplit=1)[0])
        return super().call(what, effect, tear, create=create)


@pytest.fixture(scope="module")
def saved() -> tuple[MemoryBackend, str, list[str]]:
    """A store with two saves, the root of the second, and the calls that a third one makes."""
    backend, calls = MemoryBackend(), Calls()
    before = saved_twice(backend)
    assert save_under(copied(backend), calls)
    assert {"get", "open", "append", "close", "put", "create"} <= set(calls.made)
    return backend, before, calls.made


def copied(backend: MemoryBackend) -> MemoryBackend:
    copy = MemoryBackend()
    copy._objects = dict(backend._objects)
    return copy


WRITES = ("open", "append", "close", "put", "create")
STRIKES_AT = {"no-space": WRITES, "tear": ("append",), "unknown": ("create",), "unknown-lands-later": ("create",)}
"""At other calls these modes do what another mode does, or nothing."""
STAYS = {"unavailable", "no-space", "lost-reply", "unknown", "unknown-lands-later"}
"""After the others the process is dead."""


@pytest.mark.parametrize("mode", MODES)
def test_every_call(mode: str, saved: tuple[MemoryBackend, str, list[str]]) -> None:
    base, before, calls = saved
    places = [at for at, call in enumerate(calls, 1) if call in STRIKES_AT.get(mode, (call,))]
    assert places
    for at in places:
        for persistent in (False, True) if mode in STAYS else (False,):
            backend, faults = copied(base), Faults(mode, at, persistent=persistent)
            acknowledged = save_under(backend, faults)
            assert faults.struck
            is_new = require_old_or_new(backend, before)
            assert is_new or not acknowledged, f"acknowledged, but lost: {mode} at call {at}, {faults.struck}"
            if mode == "die-after" and not acknowledged:
                assert is_new == faults.struck.startswith("create log"), "the log entry's creation is the one call that decides"


@pytest.mark.slow
def test_every_call_on_local_files(tmp_path: Path) -> None:
    for at, (mode, persistent) in in_turns(range(1, 1000), [*product(MODES, [False, True])]):
        backend, faults = LocalBackend(str(tmp_path / f"{at} {mode} {persistent}"), sync=False), Faults(mode, at, persistent=persistent)
        before = saved_twice(backend)
        acknowledged = save_under(backend, faults)
        is_new = require_old_or_new(backend, before)
        assert is_new or not acknowledged, f"acknowledged, but lost: {mode} at call {at}, {faults.struck}"
        if not faults.struck:
            assert acknowledged
            assert at > len(WRITES)
            return
    raise AssertionError("endless")

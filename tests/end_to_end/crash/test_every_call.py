"""At every backend call of a save, every kind of fault: the ref is old or new and nothing between, and nothing older is hurt."""

from collections.abc import Callable, Iterable
from itertools import count, product
from pathlib import Path

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


def same(left: object, right: object) -> bool:
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    return left == right


def run_once(backend: Backend, faults: Faults) -> tuple[bool, str, str]:
    """Two good saves, then one under `faults`; returns whether it was acknowledged, the ref's root before it, and after it."""
    init_store(backend)
    with open_over(backend) as good:
        good.put_snapshot(make_state(1), ref="job", step=1)
        before = good.put_snapshot(make_state(2), ref="job", step=2).root
    acknowledged = False
    faulty = FaultyBackend(backend, faults, atomic_put=isinstance(backend, MemoryBackend))
    try:
        store = open_over(faulty)
        restored = store.checkout("job")
        assert same(restored, make_state(2))
        acknowledged = store.put_snapshot(make_state(3), ref="job", step=3).step == 3
    except (Death, StoreError):
        pass
    if faults.later is not None:
        faults.later()
    fresh = open_over(backend)
    assert same(fresh.checkout("job@1"), make_state(1))
    assert same(fresh.checkout("job@2"), make_state(2))
    head = fresh.resolve("job")
    assert head.step in (2, 3)
    assert same(fresh.checkout("job"), make_state(head.step or 0))
    if head.step == 3:
        assert head.parent == before
        assert [snap.step for snap in fresh.log("job")] == [3, 2, 1]
    fresh.put_snapshot(make_state(4), ref="job", step=4)
    assert same(fresh.checkout("job"), make_state(4))
    report = fresh.fsck(read_data=True)
    assert report.ok, report.findings
    return acknowledged, before, head.root


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("persistent", [False, True])
def test_every_call(mode: str, persistent: bool) -> None:
    require_old_or_new(((at, (mode, persistent)) for at in range(1, 1000)), MemoryBackend)


@pytest.mark.slow
def test_every_call_on_local_files(tmp_path: Path) -> None:
    names = (str(tmp_path / str(number)) for number in count())
    require_old_or_new(in_turns(range(1, 1000), [*product(MODES, [False, True])]), lambda: LocalBackend(next(names)))


def require_old_or_new(calls: Iterable[tuple[int, tuple[str, bool]]], make_backend: Callable[[], Backend]) -> None:
    struck = set()
    for at, (mode, persistent) in calls:
        faults = Faults(mode, at, persistent=persistent)
        acknowledged, before, after = run_once(make_backend(), faults)
        assert not acknowledged or after != before, f"acknowledged, but lost: {mode} at call {at}, {faults.struck}"
        if not faults.struck:
            assert acknowledged
            break
        struck.add(faults.struck.split()[0])
    assert {"get", "open", "append", "close", "put", "create"} <= struck


def test_death_is_noticed() -> None:
    """The harness itself: the log entry's creation is the one call that decides."""
    outcomes = {}
    for at in range(1, 1000):
        faults = Faults("die-after", at)
        _, before, after = run_once(MemoryBackend(), faults)
        if not faults.struck:
            break
        if faults.struck.startswith("create log"):
            outcomes[faults.struck] = after != before
    assert list(outcomes.values()) == [True]

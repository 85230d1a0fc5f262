"""Quotas: what counts, which saves warn and which are refused, and that several writers and builds without quotas agree with it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import ConflictError, InvalidOptionError, NotFoundError, QuotaExceededError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log.entry import entry_name
from tensorstore_ck.maintenance.salvage import salvage
from tests.gc.stores import AT_ONCE, Clock, contents, interrupted, leave_orphans, open_store, put_all, sizes, state


def used(store: tsck.Store, glob: str = "*") -> int:
    return store.quotas()[glob].used_bytes


def test_what_counts_is_what_saves_added_and_something_holds() -> None:
    clock = Clock()
    store = open_store(MemoryBackend(clock=clock), clock=clock)
    store.set_quota("runs/*", warn="1TB", refuse="2TB")
    leave_orphans(store.engine.backend, state(7))
    assert sizes(store.engine.backend)
    assert used(store, "runs/*") == 0, "what a crash left behind does not count"
    put_all(store, "runs/a", [state(1), state(1, 2), state(3)])
    put_all(store, "other", [state(9)])
    added = {snapshot.step: snapshot.new_bytes for snapshot in store.log("runs/a")}
    assert added[2] < added[1] + added[3], "what step 2 shares was counted with step 1"
    quota = store.quotas()["runs/*"]
    assert (quota.used_bytes, quota.warn_bytes, quota.refuse_bytes) == (sum(added.values()), 10**12, 2 * 10**12)
    assert (quota.state, round(quota.share * 2 * 10**12)) == ("ok", quota.used_bytes)
    store.branch("runs/b", at="runs/a@1")
    assert used(store, "runs/*") == quota.used_bytes, "a second branch adds nothing"
    store.forget("runs/a@1", "runs/a@2")
    assert used(store, "runs/*") == quota.used_bytes, "undo windows and another branch hold them"
    store.gc(AT_ONCE)
    assert used(store, "runs/*") == added[1] + added[3]
    store.tag("kept", "runs/a")
    store.forget("runs/a", "runs/b")
    store.gc(AT_ONCE)
    assert used(store, "runs/*") == added[3], "the tag holds it"
    store.untag("kept")
    store.gc(AT_ONCE)
    assert used(store, "runs/*") == 0


def test_a_save_that_finds_it_used_up_is_refused_and_writes_nothing() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    store.set_quota("runs/*", refuse=12_000)
    put_all(store, "runs/a", [state(1), state(2), state(3)])
    assert store.quotas()["runs/*"].state == "refuse"
    before = contents(backend)
    saves: list[Callable[[], object]] = [
        lambda: store.put_snapshot(state(4), ref="runs/a", step=4),
        lambda: store.put_snapshot_async(state(4), ref="runs/a", step=4).wait(),
        lambda: open_store(backend).put_snapshot(state(4), ref="runs/b", step=4),
    ]
    for save in saves:
        with pytest.raises(
            QuotaExceededError, match=r"quota for 'runs/\*' is 11.7 KiB.*until `tsck gc.*` has ended their undo windows.*tsck quota set"
        ) as refused:
            save()
        assert (refused.value.kind, refused.value.retry) == ("quota_exceeded", "never")
    assert contents(backend) == before
    store.put_snapshot(state(4), ref="other", step=4)
    store.forget("runs/a@1", "runs/a@2")
    store.gc(AT_ONCE)
    store.put_snapshot(state(4), ref="runs/a", step=4)
    store.set_quota("runs/*", refuse="1MB")
    store.put_snapshot(state(5), ref="runs/a", step=5)
    store.set_quota("runs/*", refuse=0)
    with pytest.raises(QuotaExceededError):
        store.put_snapshot(state(6), ref="runs/a", step=6)
    store.remove_quota("runs/*")
    store.put_snapshot(state(6), ref="runs/a", step=6)
    assert store.quotas() == {}


def test_a_save_that_comes_near_warns_once_for_a_branch() -> None:
    store = open_store()
    store.set_quota("runs/*", warn=8000, refuse="1TB")
    store.put_snapshot(state(1), ref="runs/a", step=1)
    with pytest.warns(tsck.QuotaWarning, match=r"the snapshots of 'runs/\*' use .* KiB, and their quota warns from 7.8 KiB on"):
        store.put_snapshot(state(2), ref="runs/a", step=2)
    assert store.quotas()["runs/*"].state == "warn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put_snapshot(state(3), ref="runs/a", step=3)
    with pytest.warns(tsck.QuotaWarning, match="saves are refused from"):
        store.put_snapshot(state(4), ref="runs/b", step=4)


def test_of_several_quotas_each_counts() -> None:
    store = open_store()
    store.set_quota("*", refuse="1TB")
    store.set_quota("runs/a", refuse=5000)
    put_all(store, "runs/a", [state(1)])
    put_all(store, "runs/ab", [state(2)])
    with pytest.raises(QuotaExceededError, match="the quota for 'runs/a' is"):
        store.put_snapshot(state(3), ref="runs/a", step=3)
    store.put_snapshot(state(3), ref="runs/ab", step=3)
    store.set_quota("runs/*", refuse=1)
    other = open_store(store.engine.backend)
    other.checkout("runs/ab")
    with pytest.raises(ConflictError):  # reported before the quota
        open_store(store.engine.backend).put_snapshot(state(4), ref="runs/ab", step=4, expect=other.resolve("runs/ab~1").root)


@pytest.mark.race
def test_of_two_writers_that_race_the_second_is_refused() -> None:
    """It was admitted, and meets the limit at the head that its entry would follow."""
    backend = MemoryBackend()
    two = open_store(backend)
    two.set_quota("*", refuse=5000)
    one, race = interrupted(backend, "put snapshots/", lambda: two.put_snapshot(state(2), ref="two"))
    with pytest.raises(QuotaExceededError):
        one.put_snapshot(state(1), ref="one")
    assert race.struck
    assert set(two.branches()) == {"two"}


def test_a_quota_that_cannot_be_set() -> None:
    store = open_store()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("warn must be a size", {"warn": -1}),
        ("warns before it refuses", {"warn": "2TB", "refuse": "1TB"}),
    ]
    for message, options in (*wrong, ("needs warn= or refuse=", {}), ("refuse must be a size", {"refuse": "much"})):
        with pytest.raises(InvalidOptionError, match=message):
            store.set_quota("runs/*", **options)
    with pytest.raises(InvalidOptionError, match="matches no ref"):
        store.set_quota("no spaces", refuse=1)
    with pytest.raises(NotFoundError, match="no quota for"):
        store.remove_quota("runs/*")
    assert store.quotas() == {}


def test_a_store_that_is_only_read_shows_them_and_salvage_keeps_them(tmp_path: Path) -> None:
    options = {"no_sync": True}
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "one", state_dir=tmp_path / "one", **options) as store:  # type: ignore[call-overload]
        put_all(store, "runs/a", [state(1), state(2)])
        store.set_quota("runs/*", warn="1GB", refuse="1TB")
        store.forget("runs/a@1")
        store.gc(GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1))
        before = store.quotas()
        with tsck.open(tmp_path / "ck", read_only=True, cache_dir=tmp_path / "cache") as looked:
            assert looked.quotas() == before
        store.engine.backend.delete([entry_name("log", 1)])
        assert salvage(store.engine.backend).log
    with tsck.open(tmp_path / "ck", cache_dir=tmp_path / "two", state_dir=tmp_path / "two", **options) as store:  # type: ignore[call-overload]
        assert store.quotas() == before
        assert store.fsck().ok


def test_a_build_that_does_not_know_them_refuses_nothing(forget_operation: Callable[[str], None]) -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    store.set_quota("*", refuse=1)
    forget_operation("quota")
    put_all(open_store(backend), "job", [state(1), state(2)])
    assert open_store(backend).fsck().ok

"""How fast each of several jobs may write, by a policy of the store that limits them together."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import Op
from tensorstore_ck.log.retention import job_rate
from tests.effort import PATIENCE_SECONDS
from tests.gc.stores import Clock, open_store, state


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[tsck.Store]:
    with open_store(clock=clock) as store:
        yield store


def rate(store: tsck.Store, ref: str) -> float | None:
    return job_rate(store.engine.log.newest_view(), ref, store.engine.clock())


def put(store: tsck.Store, ref: str) -> None:
    store.put_snapshot(state(1), ref=ref, unchanged="ok")


def test_jobs_that_published_lately_share_the_rate(store: tsck.Store, clock: Clock) -> None:
    assert rate(store, "runs/a") is None
    store.set_policy("*", max_write_rate="900MB")
    assert str(store.policies()["*"]) == "max_write_rate 900 MB/s"
    put(store, "runs/a")
    assert rate(store, "runs/a") == 9e8, "it does not count twice"
    put(store, "runs/b")
    put(store, "other")
    assert rate(store, "runs/a") == 3e8
    assert rate(store, "new") == 9e8 / 4, "a job that begins counts itself"
    clock.advance(901)
    put(store, "runs/b")
    assert rate(store, "runs/a") == 4.5e8
    put(store, "other")
    store.set_policy("runs/*", keep_last=3, max_write_rate=3e8)
    assert rate(store, "runs/a") == 1.5e8, "another job does not share what is for runs"
    assert rate(store, "other") == 4.5e8
    store.remove_policy("*")
    assert rate(store, "other") is None


def test_a_save_takes_its_share(store: tsck.Store, clock: Clock) -> None:
    store.set_policy("*", max_write_rate="900MB")
    other = open_store(store.engine.backend, clock=clock)  # another process: its rate limit is its own
    put(store, "runs/a")
    assert store.engine.writes.rate == 9e8
    put(other, "runs/b")
    assert other.engine.writes.rate == 4.5e8
    assert store.engine.writes.rate == 9e8, "until its next save"
    put(store, "runs/a")
    assert store.engine.writes.rate == 4.5e8
    store.remove_policy("*")
    put(store, "runs/a")
    assert store.engine.writes.rate == float("inf")


def test_rules_of_a_newer_build_and_values_that_are_no_rate(store: tsck.Store) -> None:
    store.engine.log.append(lambda _: [Op.policy("a", {"max_write_rate": 5e6, "keep_moonlit": 3}), Op.policy("b", {"max_write_rate": [1]})])
    assert (rate(store, "a"), rate(store, "b")) == (5e6, None)
    for value in (0, -1, "fast", True, [1], float("inf")):
        with pytest.raises(InvalidOptionError, match="rate"):
            store.set_policy("*", max_write_rate=value)
    with pytest.raises(InvalidOptionError, match="keeps something"):
        store.set_policy("*", max_write_rate=1, expire_after="1d")
    store.set_policy("*", max_write_rate="1MB")
    put(store, "a")
    put(store, "a")
    assert len(store.log("a")) == 2, "such a policy lets nothing go"


def test_a_staged_snapshot_counts_as_a_job_that_writes(tmp_path: Path) -> None:
    url, staging = tmp_path / "store", tsck.Staging(tmp_path / "stage", stagger_seconds=3600)
    with tsck.open(url, create=True, cache_dir=tmp_path / "cache") as watching:
        watching.set_policy("*", max_write_rate="100MB")
        with tsck.open(url, staging=staging, cache_dir=tmp_path / "cache") as store:
            pending = store.put_snapshot_async(state(1), ref="runs/a")
            pending.staged.wait(PATIENCE_SECONDS)
            found = rate(watching, "runs/b")
            pending.cancel()
    assert found == 5e7

"""Each checkpoint of the log has all of the ref table, so old ones would outgrow the snapshots."""

from dataclasses import replace

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import BackendUnavailableError, GcRefusedError
from tensorstore_ck.log import Log, follow
from tensorstore_ck.log.follow import Tail
from tests.gc.stores import AT_ONCE, contents, open_store, require_sound, state


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    """A store with a checkpoint at each of ten entries, and one that is ahead of the log."""
    backend = MemoryBackend()
    with monkeypatch.context() as patch:
        patch.setattr(Tail, "is_due", lambda tail: tail.entries > 0)
        patch.setattr(follow, "MIN_TAIL_ENTRIES", 1)
        with open_store(backend) as store:
            for number in range(10):
                store.put_snapshot(state(number), ref="r", step=number)
    backend.put("checkpoint/" + "9" * 20, b"not of this log")
    return backend


def test_gc_leaves_the_newest_that_a_host_without_a_cache_tries(backend: MemoryBackend) -> None:
    before = sorted(contents(backend, "checkpoint/"))
    assert len(before) >= 10
    with open_store(backend) as store:
        store.gc(AT_ONCE, dry_run=True)
        assert sorted(contents(backend, "checkpoint/")) == before
        store.gc(AT_ONCE)
    assert sorted(contents(backend, "checkpoint/")) == before[-5:]
    require_sound(open_store(backend), {"r": state(9)})


def test_those_that_cannot_be_used_do_not_count(backend: MemoryBackend) -> None:
    """fsck and salvage take the ones before them where entries of the log are lost."""
    before = sorted(contents(backend, "checkpoint/"))
    backend.delete(before[-5:-1])
    for name in before[-5:-1]:
        backend.put(name, b"damaged")
    with open_store(backend) as store:
        store.gc(AT_ONCE)
    assert sorted(contents(backend, "checkpoint/")) == before[-9:]


def test_a_run_ends_well_where_they_cannot_be_read(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> list[str]:
        raise BackendUnavailableError("the store does not answer")

    before = sorted(contents(backend, "checkpoint/"))
    monkeypatch.setattr(Log, "spare_checkpoints", fail)
    with open_store(backend) as store:
        assert "old checkpoints of the log stay: the store does not answer" in store.gc(AT_ONCE).notes
    assert sorted(contents(backend, "checkpoint/")) == before


def test_a_run_that_is_refused_deletes_none(backend: MemoryBackend) -> None:
    before = sorted(contents(backend, "checkpoint/"))
    with open_store(backend) as store:
        store.forget("r")
        store.put_snapshot({"a": 1}, ref="kept")
        with pytest.raises(GcRefusedError):
            store.gc(replace(AT_ONCE, max_delete=0.1))
    assert sorted(contents(backend, "checkpoint/")) == before

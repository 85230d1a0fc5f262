"""`Store.retrying`: again what may pass, never what comes again; and of a save that may have happened the log is asked before."""

import random
import threading
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Created
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.errors import BY_KIND, BackendUnavailableError
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS


class Flaky(MemoryBackend):
    """Says nothing of the next log entry, whether it is there (``lands = "at once"``) or never will be, and answers nothing after it."""

    def __init__(self) -> None:
        super().__init__()
        self.lands = ""
        self.was_sent = False

    def create(self, name: str, data: Buffer) -> Created:
        if not self.lands or not name.startswith("log"):
            return super().create(name, data)
        if self.lands == "at once" and not self.was_sent:
            super().create(name, data)
        self.was_sent = True
        raise BackendUnavailableError("injected: no reply")

    def get(self, name: str, *, max_bytes: int) -> bytes:
        if self.lands and self.was_sent and name.startswith("log"):
            raise BackendUnavailableError("injected: no reply")
        return super().get(name, max_bytes=max_bytes)


@pytest.fixture
def backend() -> Flaky:
    backend = Flaky()
    init_store(backend)
    return backend


def opened(backend: Flaky) -> Store:
    config = read_config(backend)
    assert config is not None
    return Store(make_engine(backend, config, MemoryTable(), sleep=lambda _: None))


def test_it_draws_no_number_from_the_generator_of_the_job(backend: Flaky) -> None:
    with opened(backend) as store:
        before = random.getstate()
        store.retrying(lambda: store.put_snapshot({"w": torch.ones(2)}, ref="runs/x"))
        with pytest.raises(BackendUnavailableError):
            store.retrying(_fails, pause_seconds=0.001)
        assert random.getstate() == before


def _fails() -> None:
    raise BackendUnavailableError("injected: no reply")


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": step}


@pytest.mark.parametrize("lands", ["at once", "never"])
def test_a_save_that_may_have_happened_is_there_once(backend: Flaky, lands: str) -> None:
    with opened(backend) as store:
        store.put_snapshot(state(1), ref="job", step=1)
        calls = 0

        def put() -> tsck.Snapshot:
            nonlocal calls
            calls += 1
            backend.lands = lands if calls == 1 else ""
            try:
                return store.put_snapshot(state(2), ref="job", step=2)
            finally:
                backend.lands = ""

        snapshot = store.retrying(put, pause_seconds=0.0)
        assert calls == (1 if lands == "at once" else 2)
        assert [each.step for each in store.log("job")] == [2, 1]
        assert store.resolve("job").root == snapshot.root
        assert store.put_snapshot(state(3), ref="job", step=3).parent == snapshot.root, "the handle goes on from there"


def test_a_save_of_which_the_log_cannot_be_asked_stays_undecided(backend: Flaky) -> None:
    with opened(backend) as store:
        store.put_snapshot(state(1), ref="job", step=1)
        calls: list[int] = []

        def put() -> tsck.Snapshot:
            calls.append(1)
            backend.lands = "at once"
            return store.put_snapshot(state(2), ref="job", step=2)

        with pytest.raises(tsck.UndecidedError):
            store.retrying(put, pause_seconds=0.0)
        assert len(calls) == 1, "it is not put again while that is open"
        backend.lands = ""
        assert [each.step for each in store.log("job")] == [2, 1]


@pytest.mark.parametrize("kind", sorted(set(BY_KIND) - {"undecided"}))
def test_what_passes_is_tried_again_and_nothing_else(backend: Flaky, kind: str) -> None:
    error, calls = BY_KIND[kind]("no"), 0

    def call() -> None:
        nonlocal calls
        calls += 1
        raise error

    with opened(backend) as store, pytest.raises(BY_KIND[kind]) as caught:
        store.retrying(call, attempts=4, pause_seconds=0.0)
    assert caught.value is error
    assert calls == (4 if error.retry == "same" else 1)


@pytest.mark.parametrize("attempts", [0, -1, 1.5, True, None])
def test_attempts_that_make_no_sense(backend: Flaky, attempts: Any) -> None:
    with opened(backend) as store, pytest.raises(tsck.InvalidOptionError, match="attempts"):
        store.retrying(lambda: 1, attempts=attempts)


def test_a_wait_that_ends_too_early_does_not_save_twice(backend: Flaky) -> None:
    with opened(backend) as store:
        puts: list[tsck.PendingSnapshot] = []
        gate, write = threading.Event(), backend.put

        def put(*args: Any, **options: Any) -> Any:
            gate.wait(PATIENCE_SECONDS)
            return write(*args, **options)

        def call() -> tsck.Snapshot:
            puts.append(store.put_snapshot_async(state(1), ref="job", step=1))
            return puts[-1].wait(0.01)

        backend.put = put  # type: ignore[method-assign]
        with pytest.raises(tsck.WaitTimeoutError):
            store.retrying(call, pause_seconds=0.0)
        gate.set()
        assert puts[-1].wait().step == 1
        assert len(puts) == 1

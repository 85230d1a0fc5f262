"""A follower's process has Prometheus metrics of what serves, how old it is, and what swaps and reads cost."""

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.events import Event
from tests.feed.versions import REF, first_state, save, train, update, zeros
from tests.gc.stores import Clock, open_store

prometheus_client = pytest.importorskip("prometheus_client")


def test_metrics_of_a_follower() -> None:
    from tensorstore_ck.integrations.follower_metrics import FollowerMetrics

    clock, registry, events = Clock(), prometheus_client.CollectorRegistry(), list[Event]()
    backend = MemoryBackend(clock=clock)
    trainer, store, state = open_store(backend, clock=clock), open_store(backend, clock=clock), first_state()
    store.on_event(events.append)
    stop = FollowerMetrics(registry).watch(store)

    def value(name: str) -> float | None:
        found: float | None = registry.get_sample_value(f"tsck_follower_{name}", {"ref": REF})
        return found

    feed = store.follow(REF, into=zeros(state))
    for step in range(2):
        save(trainer, state, step)
        saved = clock.now_ns / 1e9
        clock.advance(5)
        feed.poll()
        assert (value("staged_step"), value("step")) == (step, step - 1 if step else None)
        clock.advance(2)
        feed.swap()
        assert value("step") == step
        assert value("version_timestamp_seconds") == pytest.approx(saved, abs=1e-3)
        assert value("swap_timestamp_seconds") == pytest.approx(saved + 7, abs=1e-3)
        assert value("swaps_total") == step + 1
        train(state, step)
    for total, kind, field in (("read_bytes", "fetched", "read_bytes"), ("pause_seconds", "swapped", "pause_seconds")):
        expected = sum(float(event.fields[field]) for event in events if event.kind == kind)
        assert value(f"{total}_total") == pytest.approx(expected)
        assert expected > 0
    assert value("fetch_seconds_total") is not None
    stop()
    save(trainer, state, 2)
    update(feed)
    assert value("swaps_total") == 2

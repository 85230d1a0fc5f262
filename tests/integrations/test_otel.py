"""Metrics and spans of saves, by OpenTelemetry's own SDK."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tensorstore_ck.errors import MissingExtraError
from tensorstore_ck.events import KINDS, Event, Kind, Observers
from tests.effort import PATIENCE_SECONDS

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tensorstore_ck.integrations.otel import instrument
from tests.session.group.pool import rank_process

END_NS = 1_700_000_000_000_000_000
ABOUT = {"tensorstore_ck.ref": "runs/gpt", "tensorstore_ck.rank": 3}
TIMES = {
    "total_seconds": 10.0,
    "stall_seconds": 0.5,
    "capture_seconds": 0.5,
    "queued_seconds": 1.0,
    "hash_seconds": 2.0,
    "encode_seconds": 0.0,
    "write_seconds": 3.0,
    "upload_seconds": 4.0,
    "commit_seconds": 0.25,
}


class FakeStore:
    def __init__(self) -> None:
        self.observers = Observers()

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        return self.observers.subscribe(callback)

    def tell(self, kind: Kind, **fields: Any) -> None:
        values = {name: TIMES.get(name, 0) for name in KINDS[kind]} | fields
        self.observers.emit(Event(kind, "put-1", "runs/gpt", 1000, 3, END_NS, values))


class Seen(NamedTuple):
    store: FakeStore
    reader: InMemoryMetricReader
    exporter: InMemorySpanExporter
    end: Callable[[], None]

    def points(self, name: str) -> list[tuple[str | None, dict[str, Any], Any]]:
        """(unit, attributes, point) of a metric."""
        data = self.reader.get_metrics_data()
        found = [metric for r in (data.resource_metrics if data else ()) for s in r.scope_metrics for metric in s.metrics]
        return [
            (metric.unit, dict(point.attributes or {}), point)
            for metric in found
            if metric.name == name
            for point in metric.data.data_points
        ]

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def seen(caplog: pytest.LogCaptureFixture) -> Iterator[Seen]:
    store, reader, exporter = FakeStore(), InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader], shutdown_on_exit=False), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    yield Seen(store, reader, exporter, instrument(store, meter_provider=meters, tracer_provider=tracers))
    meters.shutdown()
    tracers.shutdown()
    assert not caplog.records, "a callback failed"


def publish(store: FakeStore) -> None:
    sizes = {"logical_bytes": 1000, "hashed_bytes": 900, "new_bytes": 300, "dedup_ratio": 0.7, "compression_ratio": 1.2}
    store.tell("published", root="9f86", snapshot="01J0", queue_depth=1, memory_bytes=2000, **sizes)


def test_metrics_of_a_published_save(seen: Seen) -> None:
    publish(seen.store)
    publish(seen.store)
    ((unit, about, puts),) = seen.points("tensorstore_ck.puts")
    assert (unit, about, puts.value) == ("{put}", {**ABOUT, "tensorstore_ck.outcome": "published"}, 2)
    ((unit, about, stall),) = seen.points("tensorstore_ck.put.stall")
    assert (unit, about, stall.count, stall.sum) == ("s", ABOUT, 2, 1.0)
    assert 0.05 in stall.explicit_bounds, "the buckets are for seconds"
    stages = {about["tensorstore_ck.stage"]: point.sum for _, about, point in seen.points("tensorstore_ck.put.stage.duration")}
    assert stages == {"capture": 1.0, "queued": 2.0, "hash": 4.0, "encode": 0.0, "write": 6.0, "upload": 8.0, "commit": 0.5}
    for name, value in (("logical", 2000), ("hashed", 1800), ("new", 600)):
        ((unit, about, counted),) = seen.points(f"tensorstore_ck.put.{name}")
        assert (unit, about, counted.value) == ("By", ABOUT, value)
    assert seen.points("tensorstore_ck.put.duration")[0][2].sum == 20.0
    assert seen.points("tensorstore_ck.put.dedup_ratio")[0][2].sum == pytest.approx(1.4)
    assert seen.points("tensorstore_ck.put.compression_ratio")[0][2].value == 1.2
    data = seen.reader.get_metrics_data()
    assert data is not None
    assert "step" not in data.to_json(), "each step would be a series of its own"


def test_gauges_follow_what_is_in_use(seen: Seen) -> None:
    seen.store.tell("captured", queue_depth=2, memory_bytes=4000)
    assert [point.value for _, _, point in seen.points("tensorstore_ck.put.in_flight")] == [2]
    publish(seen.store)
    seen.store.tell("dropped", reason="replaced", queue_depth=0, memory_bytes=0)
    ((unit, about, memory),) = seen.points("tensorstore_ck.memory.usage")
    assert (unit, about, memory.value) == ("By", {"tensorstore_ck.rank": 3}, 0)
    assert [point.value for _, _, point in seen.points("tensorstore_ck.put.in_flight")] == [0]


def test_what_went_wrong_is_counted_by_its_kind(seen: Seen) -> None:
    seen.store.tell("failed", error="no space on /stage", error_kind="no_space")
    seen.store.tell("dropped", reason="skipped")
    seen.store.tell("stalled")
    seen.store.tell("retried", what="upload", error="503")
    seen.store.tell("staged")
    outcomes = {about["tensorstore_ck.outcome"]: about.get("error.type") for _, about, _ in seen.points("tensorstore_ck.puts")}
    assert outcomes == {"failed": "no_space", "skipped": None}
    assert seen.points("tensorstore_ck.put.memory_wait")[0][2].sum == 0.5
    assert seen.points("tensorstore_ck.retries")[0][2].value == 1


def test_metrics_of_a_follower(seen: Seen) -> None:
    seen.store.tell("fetched", fetch_seconds=0.5, read_bytes=700, age_seconds=1)
    seen.store.tell("swapped", pause_seconds=0.25, age_seconds=2.5)
    assert [point.sum for _, _, point in seen.points("tensorstore_ck.feed.fetch.duration")] == [0.5]
    assert [point.sum for _, _, point in seen.points("tensorstore_ck.feed.pause")] == [0.25]
    ((unit, about, read),) = seen.points("tensorstore_ck.feed.read")
    assert (unit, about, read.value) == ("By", ABOUT, 700)
    ((unit, about, age),) = seen.points("tensorstore_ck.feed.age")
    assert (unit, about, age.value) == ("s", ABOUT, 2.5)
    assert not seen.spans()


def test_a_span_per_save_with_its_stages_inside(seen: Seen) -> None:
    publish(seen.store)
    spans = seen.spans()
    put = spans.pop("tensorstore_ck.put")
    assert (put.start_time, put.end_time) == (END_NS - 10_000_000_000, END_NS)
    assert dict(put.attributes or {}) == {
        **ABOUT,
        **{f"tensorstore_ck.{name}": value for name, value in (("step", 1000), ("root", "9f86"), ("snapshot", "01J0"))},
        **{f"tensorstore_ck.{name}": value for name, value in (("logical_bytes", 1000), ("hashed_bytes", 900), ("new_bytes", 300))},
    }
    assert put.status.status_code is StatusCode.UNSET
    seconds = {}
    for name, span in spans.items():
        assert span.parent is not None
        assert put.context is not None
        assert span.parent.span_id == put.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        seconds[name.removeprefix("tensorstore_ck.put.")] = tuple((at - END_NS) / 1e9 + 10 for at in (span.start_time, span.end_time))
    assert seconds == {"capture": (0, 0.5), "hash": (1.5, 3.5), "write": (1.5, 4.5), "upload": (5.75, 9.75), "commit": (9.75, 10)}


def test_the_span_of_a_failed_save_has_the_error(seen: Seen) -> None:
    fields = dict.fromkeys((name for name in TIMES if name not in ("total_seconds", "capture_seconds")), 0.0)
    fields.pop("stall_seconds")
    seen.store.tell("failed", error="no space on /stage", error_kind="no_space", **fields)
    spans = seen.spans()
    assert spans.keys() == {"tensorstore_ck.put", "tensorstore_ck.put.capture"}, "as far as it came"
    put = spans["tensorstore_ck.put"]
    assert (put.status.status_code, put.status.description) == (StatusCode.ERROR, "no space on /stage")
    assert (put.attributes or {})["error.type"] == "no_space"


def test_it_ends(seen: Seen) -> None:
    seen.end()
    publish(seen.store)
    assert not seen.points("tensorstore_ck.puts")
    assert not seen.spans()


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "tensorstore_ck.integrations.otel")
    with pytest.raises(MissingExtraError, match=r"pip install 'tensorstore_ck\[otel\]'"):
        importlib.import_module("tensorstore_ck.integrations.otel")


def test_nothing_else_loads_opentelemetry() -> None:
    imported = "sys, tensorstore_ck, tensorstore_ck.events, tensorstore_ck.training.progress_line"
    process = rank_process(exec, f"import {imported}; assert 'opentelemetry' not in sys.modules")
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0

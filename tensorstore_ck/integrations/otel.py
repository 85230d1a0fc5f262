"""OpenTelemetry metrics and spans of saves: ``pip install opentelemetry-api`` (the extra ``otel``), then ``instrument(store)``.

Uses events only. Providers are the caller's, or OpenTelemetry's global ones; the caller sets up exporters. Metrics have the ref and the
rank but not the step, since each value of an attribute makes a new time series. Spans have all three.

An event has the lengths of the stages, not their starts, so child spans are placed by the order of the work: capture first; then hash,
encode and write, in parallel; then upload, and commit last.
"""

from collections.abc import Callable, Iterator
from typing import Final

from tensorstore_ck.common.extras import extra
from tensorstore_ck.common.save_progress import STAGES
from tensorstore_ck.events import Event, Observed

with extra("otel", "recording metrics and spans with OpenTelemetry"):
    from opentelemetry import metrics, trace

SCOPE: Final = "tensorstore_ck"
_SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""The SDK's default buckets are for milliseconds."""
_RATIO_BUCKETS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_COUNTED_BYTES: Final = ("logical_bytes", "hashed_bytes", "new_bytes")
_TIMED: Final = (*STAGES, "queued")


def instrument(
    store: Observed, *, meter_provider: metrics.MeterProvider | None = None, tracer_provider: trace.TracerProvider | None = None
) -> Callable[[], None]:
    """Records every save of `store` from now on: metrics, and a span with a child for each stage.

    Args:
        store: A `Store`.
        meter_provider: For the metrics; by default OpenTelemetry's global one.
        tracer_provider: For the spans; by default OpenTelemetry's global one.

    Returns:
        A function that stops the recording.
    """
    recorded = _Metrics(metrics.get_meter(SCOPE, meter_provider=meter_provider))
    tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)

    def record(event: Event) -> None:
        recorded.record(event)
        if event.kind in ("published", "failed"):
            _trace(tracer, event)

    return store.on_event(record)


class _Metrics:
    """The instruments, and the event fields that each records."""

    def __init__(self, meter: metrics.Meter) -> None:
        def seconds(name: str, description: str) -> metrics.Histogram:
            return meter.create_histogram(
                f"tensorstore_ck.{name}", unit="s", description=description, explicit_bucket_boundaries_advisory=_SECONDS_BUCKETS
            )

        self._puts = meter.create_counter("tensorstore_ck.puts", unit="{put}", description="Saves that ended, by outcome")
        self._duration = seconds("put.duration", "From the call to the durable log entry, or to the failure")
        self._stall = seconds("put.stall", "How long training was blocked by a save")
        self._stage = seconds("put.stage.duration", "How long at least one thread was in a stage of a save; stages overlap")
        self._memory_wait = seconds("put.memory_wait", "How long a save waited for memory before its capture")
        self._bytes = {
            name: meter.create_counter(f"tensorstore_ck.put.{name.removesuffix('_bytes')}", unit="By", description=description)
            for name, description in zip(_COUNTED_BYTES, ("Bytes of the states", "Hashed bytes", "Growth of the store"), strict=True)
        }
        self._dedup = meter.create_histogram(
            "tensorstore_ck.put.dedup_ratio",
            unit="1",
            description="Share of the hashed bytes that the store already had",
            explicit_bucket_boundaries_advisory=_RATIO_BUCKETS,
        )
        self._compression = meter.create_gauge(
            "tensorstore_ck.put.compression_ratio", unit="1", description="Raw bytes of the last save's new blocks per stored byte"
        )
        self._in_flight = meter.create_gauge("tensorstore_ck.put.in_flight", unit="{put}", description="Saves in progress")
        self._memory = meter.create_gauge("tensorstore_ck.memory.usage", unit="By", description="Host memory held by saves in progress")
        self._fetch = seconds("feed.fetch.duration", "From the look at the branch until a version was verified and staged")
        self._pause = seconds("feed.pause", "How long a swap took")
        self._feed_bytes = meter.create_counter("tensorstore_ck.feed.read", unit="By", description="Stored bytes that a follower read")
        self._feed_age = meter.create_gauge("tensorstore_ck.feed.age", unit="s", description="Age of a version when it was swapped in")
        self._retries = meter.create_counter("tensorstore_ck.retries", unit="{retry}", description="Retried requests")

    def record(self, event: Event) -> None:
        about: dict[str, str | int] = {"tensorstore_ck.ref": event.ref, "tensorstore_ck.rank": event.rank}

        def number(name: str) -> float:
            return float(event.fields[name])

        match event.kind:
            case "published":
                self._puts.add(1, {**about, "tensorstore_ck.outcome": "published"})
                self._duration.record(number("total_seconds"), {**about, "tensorstore_ck.outcome": "published"})
                self._stall.record(number("stall_seconds"), about)
                for stage in _TIMED:
                    self._stage.record(number(f"{stage}_seconds"), {**about, "tensorstore_ck.stage": stage})
                for name, counter in self._bytes.items():
                    counter.add(int(number(name)), about)
                self._dedup.record(number("dedup_ratio"), about)
                self._compression.set(number("compression_ratio"), about)
            case "failed":
                failed = {**about, "tensorstore_ck.outcome": "failed", "error.type": str(event.fields["error_kind"])}
                self._puts.add(1, failed)
                self._duration.record(number("total_seconds"), failed)
            case "dropped":
                self._puts.add(1, {**about, "tensorstore_ck.outcome": str(event.fields["reason"])})
            case "stalled":
                self._memory_wait.record(number("stall_seconds"), about)
            case "retried":
                self._retries.add(1, about)
            case "fetched":
                self._fetch.record(number("fetch_seconds"), about)
                self._feed_bytes.add(int(number("read_bytes")), about)
            case "swapped":
                self._pause.record(number("pause_seconds"), about)
                self._feed_age.set(number("age_seconds"), about)
        if "memory_bytes" in event.fields:
            rank = {"tensorstore_ck.rank": event.rank}
            self._in_flight.set(int(number("queue_depth")), rank)
            self._memory.set(int(number("memory_bytes")), rank)


def _trace(tracer: trace.Tracer, event: Event) -> None:
    start_ns = event.time_ns - _ns(event, "total_seconds")
    about: dict[str, str | int] = {"tensorstore_ck.ref": event.ref, "tensorstore_ck.rank": event.rank}
    if event.step is not None:
        about["tensorstore_ck.step"] = event.step
    for name in ("root", "snapshot", *_COUNTED_BYTES):
        value = event.fields.get(name)
        if value is not None:
            about[f"tensorstore_ck.{name}"] = value if isinstance(value, str) else int(value)
    span = tracer.start_span("tensorstore_ck.put", start_time=start_ns, attributes=about)
    if event.kind == "failed":
        span.set_attribute("error.type", event.fields["error_kind"])
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(event.fields["error"])))
    inside = trace.set_span_in_context(span)
    for stage, begun_ns, ended_ns in _windows(event, start_ns):
        tracer.start_span(f"tensorstore_ck.put.{stage}", context=inside, start_time=begun_ns).end(ended_ns)
    span.end(event.time_ns)


def _windows(event: Event, start_ns: int) -> Iterator[tuple[str, int, int]]:
    """The start and end of each stage that ran, as far as events tell."""
    captured_ns = start_ns + _ns(event, "capture_seconds")
    work_ns = captured_ns + _ns(event, "queued_seconds")
    commit_ns = event.time_ns - _ns(event, "commit_seconds")
    begun = {"capture": start_ns, "upload": commit_ns - _ns(event, "upload_seconds"), "commit": commit_ns}
    for stage in STAGES:
        length_ns = _ns(event, f"{stage}_seconds")
        if length_ns:
            begun_ns = begun.get(stage, work_ns)
            yield stage, begun_ns, begun_ns + length_ns


def _ns(event: Event, name: str) -> int:
    return round(float(event.fields[name]) * 1e9)

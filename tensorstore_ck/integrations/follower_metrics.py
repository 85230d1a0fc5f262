"""Prometheus metrics of followers, in the process that follows: ``pip install prometheus_client``, then ``FollowerMetrics().watch(store)``.

A follower writes nothing to the store, so that `tsck exporter` sees what is published, but not what serves. Servers of engines have a
registry of their own, which they expose.
"""

from collections.abc import Callable

from tensorstore_ck.common.extras import extra
from tensorstore_ck.events import Event, Observed

with extra("exporter", "recording Prometheus metrics of a follower"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class FollowerMetrics:
    """The metrics of all followers of a process, by branch."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Adds the metrics to `registry`, once for each."""

        def gauge(name: str, description: str) -> Gauge:
            return Gauge(f"tsck_follower_{name}", description, ("ref",), registry=registry)

        def counter(name: str, description: str) -> Counter:
            return Counter(f"tsck_follower_{name}", description, ("ref",), registry=registry)

        self._staged_step = gauge("staged_step", "Step of the version that was staged last")
        self._step = gauge("step", "Step of the version that serves")
        self._made = gauge("version_timestamp_seconds", "When the version that serves was saved; its age is time() minus this")
        self._swapped = gauge("swap_timestamp_seconds", "When that version was swapped in")
        self._swaps = counter("swaps_total", "Versions that were swapped in")
        self._pause = counter("pause_seconds_total", "How long all swaps took")
        self._fetch = counter("fetch_seconds_total", "How long all versions took from the look at the branch until they were staged")
        self._read = counter("read_bytes_total", "Stored bytes of the blocks that were read")

    def watch(self, store: Observed) -> Callable[[], None]:
        """Records what the feeds of `store` do from now on; returns a function that stops that."""
        return store.on_event(self._record)

    def _record(self, event: Event) -> None:
        def number(name: str) -> float:
            return float(event.fields[name])

        if event.kind == "fetched":
            self._fetch.labels(event.ref).inc(number("fetch_seconds"))
            self._read.labels(event.ref).inc(number("read_bytes"))
            if event.step is not None:
                self._staged_step.labels(event.ref).set(event.step)
        elif event.kind == "swapped":
            self._swaps.labels(event.ref).inc()
            self._pause.labels(event.ref).inc(number("pause_seconds"))
            self._swapped.labels(event.ref).set(event.time_ns / 1e9)
            self._made.labels(event.ref).set(event.time_ns / 1e9 - number("age_seconds"))
            if event.step is not None:
                self._step.labels(event.ref).set(event.step)

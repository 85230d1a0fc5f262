"""`Exporter`: refreshes stores in the background, and offers what it knows of them as metrics."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.sync import OpenStore
from tensorstore_ck.common.ids import Clock
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.integrations.prometheus.collector import Readings, StoreCollector
from tensorstore_ck.integrations.prometheus.watched_store import WatchedStore, read_states

INTERVAL_SECONDS: Final = 30.0
MEASURE_SECONDS: Final = 3600.0
CLOSE_SECONDS: Final = 5.0
"""How long `Exporter.close` waits for reads in progress; a read of an unreachable store may hang longer."""
_TURN_SECONDS: Final = 600.0
"""A measurement waits this long for that of another store: one at a time needs less memory, but one may hang."""

_logger = logging.getLogger(__name__)


class Exporter:
    """Each store is read on its own threads: one that hangs holds up no other. Thread-safe."""

    def __init__(
        self,
        db: str,
        urls: Sequence[str],
        open_store: OpenStore,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        measure_seconds: float = MEASURE_SECONDS,
        clock: Clock = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads nothing yet. `urls`: the stores to read, as `Backend.url` has them; none for a catalog, at `db`, that others sync.

        Logs are read each `interval_seconds`, and the bytes by state measured each `measure_seconds`; 0: never.
        """
        if not interval_seconds > 0 or not measure_seconds >= 0:
            raise InvalidOptionError("the interval must be longer than 0 seconds, and that of usage not negative", object_id="interval")
        self._catalog = Catalog(db, clock=clock)
        self._readings = Readings()
        self.watched: Final = tuple(
            WatchedStore(self._catalog, url, open_store, interval_seconds=interval_seconds, clock=clock, monotonic=monotonic)
            for url in dict.fromkeys(urls)
        )
        self.registry: Final = CollectorRegistry()
        self.registry.register(StoreCollector(self.watched, self._readings))
        ProcessCollector(registry=self.registry)
        self._interval_seconds, self._measure_seconds = interval_seconds, measure_seconds
        self._clock, self._monotonic = clock, monotonic
        self._reading = threading.Lock()
        self._turn = threading.Lock()
        self._stop = Flag()
        self._threads: list[tuple[threading.Thread, WatchedStore | None]] = []
        self._beginning = threading.Lock()
        self._said = ""

    def start(self) -> None:
        """Begins to refresh in the background."""
        for watched in self.watched:
            self._begin(watched, partial(self._watch, watched))
        if not self.watched:
            self._begin(None, self._watch_catalog)

    def refresh(self, *, measure: bool = False) -> None:
        """Reads all stores once, one after another; with `measure` also their bytes by state.

        Raises:
            StoreError: the catalog cannot be read. Stores that cannot be read are errors in the metrics alone.
        """
        for watched in self.watched:
            watched.refresh()
            if measure:
                watched.measure()
        self._read_catalog()

    def note_scrape_error(self) -> None:
        """Counts a scrape that failed."""
        self._readings.scrape_errors += 1

    def close(self) -> None:
        """Ends. A store that hangs stays open."""
        self._stop.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread, _ in [*self._threads]:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [watched for thread, watched in self._threads if thread.is_alive()]
        for watched in self.watched:
            if watched not in hanging:
                watched.synced.close()
        if not hanging:
            self._catalog.close()

    # --- threads ------------------------------------------------------------------------------------------------------

    def _begin(self, watched: WatchedStore | None, work: Callable[[], object]) -> threading.Thread:
        thread = Helper(work, "tsck exporter")
        with self._beginning:
            thread.start()
            self._threads = [*(begun for begun in self._threads if begun[0].is_alive()), (thread, watched)]
        return thread

    def _watch(self, watched: WatchedStore) -> None:
        due, measuring = self._monotonic(), None
        while not self._stop.is_set():
            begun = self._monotonic()
            watched.refresh()
            self._try_catalog()
            if self._measure_seconds and watched.is_up and begun >= due and (measuring is None or not measuring.is_alive()):
                due = begun + self._measure_seconds
                measuring = self._begin(watched, partial(self._measure, watched))
            self._stop.wait(max(0.0, begun + self._interval_seconds - self._monotonic()))

    def _watch_catalog(self) -> None:
        while not self._stop.is_set():
            self._try_catalog()
            self._stop.wait(self._interval_seconds)

    def _measure(self, watched: WatchedStore) -> None:
        has_turn = self._turn.acquire(timeout=_TURN_SECONDS)
        try:
            if not self._stop.is_set():
                watched.measure()
        finally:
            if has_turn:
                self._turn.release()

    def _try_catalog(self) -> None:
        problem = ""
        try:
            self._read_catalog()
        except Exception as exc:  # whatever fails here, the exporter goes on and counts it
            self._readings.catalog_errors += 1
            problem = f"the catalog cannot be read now: {exc}"
            if problem != self._said:
                _logger.warning("%s", problem, exc_info=None if isinstance(exc, StoreError) else exc)
        self._said = problem

    def _read_catalog(self) -> None:
        with self._reading:
            try:
                with self._catalog.reading() as connection:
                    self._readings.states = read_states(connection, self._readings.states)
            except NotFoundError:
                if not self.watched or self._readings.read_ns:
                    raise
                return  # no store could be read yet, so there is no catalog
            self._readings.read_ns = self._clock()

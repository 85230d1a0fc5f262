"""One store of the exporter: whether it can be read, and its space."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.sync import OpenStore
from tensorstore_ck.catalog.synced_store import SyncedStore
from tensorstore_ck.common.ids import Clock
from tensorstore_ck.errors import StoreError
from tensorstore_ck.gc.space_forecast import SpaceForecast
from tensorstore_ck.redaction import display_url, one_line, redacted

OVERDUE: Final = 3
"""A store whose refresh takes longer than this many intervals counts as one that cannot be read."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of a store's space: of `Usage`, which lists all packs, only the sums."""

    by_state: Mapping[str, int]
    unreferenced_bytes: int
    freeable_bytes: int
    time_ns: int
    seconds: float
    space: SpaceForecast


class WatchedStore:
    """A store that is read in the background. Its attributes may be read at any time, also while a refresh hangs."""

    def __init__(
        self, catalog: Catalog, url: str, open_store: OpenStore, *, interval_seconds: float, clock: Clock, monotonic: Callable[[], float]
    ) -> None:
        """Opens nothing yet."""
        self.url = display_url(url)
        self.synced = SyncedStore(catalog, url, open_store)
        self.read_ns: int | None = None
        """When the last refresh succeeded."""
        self.refresh_seconds: float | None = None
        self.refresh_errors = 0
        self.measured: Measured | None = None
        self.measure_errors = 0
        self._overdue_seconds = OVERDUE * interval_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._is_read = False
        self._is_measuring = False
        self._running_since: float | None = None
        self._said: dict[str, str] = {}
        """Work -> the error that was reported last."""

    @property
    def is_up(self) -> bool:
        """Whether the last refresh succeeded, and none hangs."""
        since = self._running_since
        return self._is_read and (since is None or self._monotonic() - since <= self._overdue_seconds)

    def refresh(self) -> None:
        """Reads new log entries into the catalog. Counts an error, and reports it unless it is the same as before."""
        self._running_since = begun = self._monotonic()
        error: Exception | None
        try:
            if not self._is_measuring:
                self.synced.close_dropped()
            error = self.synced.refresh()
        except Exception as exc:  # noqa: BLE001 - whatever fails here, the exporter goes on and says that this store cannot be read
            error = exc
        self._is_read = error is None
        self.refresh_seconds = self._monotonic() - begun
        if error is None:
            self.read_ns = self._clock()
        else:
            self.refresh_errors += 1
        self._running_since = None
        self._report("be read", error)

    def measure(self) -> None:
        """Measures the store's space, if it can be read; errors as in `refresh`."""
        error: Exception | None = None
        self._is_measuring = True  # from here on, refreshes close no store that was opened
        try:
            store = self.synced.store
            if store is None or not self.is_up:
                return
            begun, time_ns = self._monotonic(), self._clock()
            usage = store.usage()
            sums = usage.by_state, usage.unreferenced_bytes, usage.freeable.now_bytes
            self.measured = Measured(*sums, time_ns, self._monotonic() - begun, usage.space)
        except Exception as exc:  # noqa: BLE001 - as above
            self.measure_errors += 1
            error = exc
        finally:
            self._is_measuring = False
        self._report("be measured", error)

    def _report(self, work: str, error: Exception | None) -> None:
        message = "" if error is None else f"{self.url} cannot {work} now: {error}"
        if message and message != self._said.get(work):
            _logger.warning("%s", one_line(redacted(message)), exc_info=None if isinstance(error, StoreError) else error)
        self._said[work] = message

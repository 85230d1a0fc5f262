"""One store that a catalog follows. Opens it read-only at the first read, and again after an error or if another store replaced it."""

import threading
from contextlib import suppress

from tensorstore_ck.catalog.catalog import Catalog, Progress
from tensorstore_ck.catalog.sync import OpenStore
from tensorstore_ck.errors import StoreError
from tensorstore_ck.log.table_rows import Head
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import config_of, is_replaced, log_of


class SyncedStore:
    """One thread at a time refreshes it; its attributes may be read meanwhile."""

    def __init__(self, catalog: Catalog, url: str, open_store: OpenStore) -> None:
        """Opens nothing yet. `url` is as the caller wrote it, and may contain secrets."""
        self.url = url
        self.store: ReadOnlyStore | None = None
        """None: it could not be opened."""
        self.uuid: str | None = None
        """The UUID of the store that was opened last."""
        self.error: StoreError | None = None
        """Why the last `refresh` failed; None: it did not."""
        self._catalog = catalog
        self._open_store = open_store
        self._head: Head | None = None
        """The last log entry that the catalog has."""
        self._dropped: list[ReadOnlyStore] = []
        self._lock = threading.Lock()

    def refresh(self, *, progress: Progress = lambda done, total: None) -> StoreError | None:
        """Reads the new log entries into the catalog; returns the error if it cannot."""
        with self._lock:
            try:
                store = self._current()
                head = log_of(store).sync()
                if head != self._head:
                    self._catalog.sync(store, progress=progress)
                    self._head = head
                self.error = None
            except StoreError as exc:
                self.error = exc
                self._drop()
            return self.error

    def close_dropped(self) -> None:
        """Closes the stores that were open before this one. The caller ensures that no thread reads from them."""
        while self._dropped:
            with suppress(StoreError):
                self._dropped.pop().close()

    def close(self) -> None:
        """Closes the store; idempotent. Waits for a `refresh` in progress."""
        with self._lock:
            self._drop()
            self.close_dropped()

    def _current(self) -> ReadOnlyStore:
        """The open store, if it is still the one at the URL: its log shows neither that it was deleted nor that it was salvaged."""
        if self.store is not None:
            if not is_replaced(self.store):
                return self.store
            self._drop()
        self.store = self._open_store(self.url)
        self.uuid = config_of(self.store).uuid
        return self.store

    def _drop(self) -> None:
        """Makes the next use open the store again. Other threads may still read from the old one."""
        if self.store is not None:
            self._dropped.append(self.store)
        self.store, self._head = None, None

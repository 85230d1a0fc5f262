"""A store that a catalog follows, and where a server keeps its catalog: in the user's cache, so that the next start reads only new entries.

Opens the store read-only at the first read, and again after an error or if another store replaced it.
"""

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import platformdirs

from tensorstore_ck.catalog.catalog import Catalog, Progress
from tensorstore_ck.catalog.schema import VERSION
from tensorstore_ck.catalog.sync import OpenStore
from tensorstore_ck.errors import PermissionDeniedError, StoreError
from tensorstore_ck.log.cache.open_cache import private_folder
from tensorstore_ck.log.table_rows import Head
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import config_of, is_replaced, log_of

_UNUSED_SECONDS: Final = 30 * 24 * 3600


@contextmanager
def private_catalog(cache_dir: str | None, urls: Sequence[str]) -> Iterator[str]:
    """The path of the catalog of the stores at `urls`; in a temporary folder if the cache is not a private folder on a local disk.

    Servers with the same stores share it. A file that no server used for 30 days is removed.
    """
    base = Path(cache_dir) if cache_dir else platformdirs.user_cache_path("tensorstore_ck", appauthor=False)
    locations = sorted({url if "://" in url else os.path.abspath(url) for url in urls})
    digest = hashlib.sha256("\0".join(locations).encode()).hexdigest()
    name = f"{digest[:32]}-v{VERSION}.sqlite"
    try:
        path = private_folder(base, "catalogs") / name
        if path.exists():
            os.utime(path)
    except (OSError, PermissionDeniedError):
        with tempfile.TemporaryDirectory(prefix="tsck-catalog-") as folder:
            yield os.path.join(folder, name)
        return
    for other in path.parent.glob("*.sqlite"):
        with suppress(OSError):
            if other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                other.unlink()
    yield str(path)


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

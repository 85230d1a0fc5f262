"""The stores and their catalog. A store is opened read-only, and its log is read again before a page when it has grown."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.errors import StoreError
from tensorstore_ck.redaction import display_url
from tensorstore_ck.store import ReadOnlyStore

OpenStore = Callable[[str], ReadOnlyStore]


@dataclass(slots=True)
class _Source:
    url: str
    store: ReadOnlyStore | None = None
    head_n: int = -1
    error: StoreError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sources:
    """A catalog, and the stores that keep it up to date. Thread-safe."""

    def __init__(self, db: str, urls: Sequence[str], open_store: OpenStore) -> None:
        """Reads nothing yet. `db` is the catalog's URL; `urls`: none for a catalog that others sync."""
        self.catalog = Catalog(db)
        self._open_store = open_store
        self._sources = [_Source(url) for url in dict.fromkeys(urls)]

    def refresh(self) -> dict[str, StoreError]:
        """Reads what is new in the logs; returns the URL and error of each store that cannot be read now."""
        for source in self._sources:
            with source.lock:
                self._refresh(source)
        return {display_url(source.url): source.error for source in self._sources if source.error is not None}

    def close(self) -> None:
        """Closes the stores and the catalog; idempotent."""
        for source in self._sources:
            with source.lock:
                if source.store is not None:
                    source.store.close()
                    source.store = None
        self.catalog.close()

    def _refresh(self, source: _Source) -> None:
        try:
            if source.store is None:
                source.store = self._open_store(source.url)
            if source.store.engine.log.sync().n != source.head_n:
                source.head_n = self.catalog.sync(source.store).head_n
            source.error = None
        except StoreError as exc:
            source.error = exc

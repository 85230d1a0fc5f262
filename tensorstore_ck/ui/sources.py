"""The stores and their catalog. A store is opened read-only, and its log is read again before a page when it has grown."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.schema import stores
from tensorstore_ck.errors import NotFoundError, StoreError
from tensorstore_ck.redaction import display_url
from tensorstore_ck.store import ReadOnlyStore

OpenStore = Callable[[str], ReadOnlyStore]


@dataclass(frozen=True, slots=True)
class StoreKey:
    """A store in the catalog."""

    store_id: int
    """Its key in the tables."""
    uuid: str
    url: str
    """Without secrets."""


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
        self._opened: dict[str, ReadOnlyStore] = {}
        """Stores of the catalog that others sync, by uuid."""
        self._lock = threading.Lock()

    def refresh(self) -> dict[str, StoreError]:
        """Reads what is new in the logs; returns the URL and error of each store that cannot be read now."""
        for source in self._sources:
            with source.lock:
                self._refresh(source)
        return {display_url(source.url): source.error for source in self._sources if source.error is not None}

    def key(self, uuid: str) -> StoreKey:
        """The store with this uuid.

        Raises:
            NotFoundError: the catalog has no such store.
        """
        with self.catalog.reading() as connection:
            row = connection.execute(select(stores.c.store_id, stores.c.uuid, stores.c.url).where(stores.c.uuid == uuid)).one_or_none()
        if row is None:
            raise NotFoundError("there is no such store here: start from the overview", object_id=uuid)
        return StoreKey(*row)

    def open(self, key: StoreKey) -> ReadOnlyStore:
        """The open store, for what the catalog does not have.

        Raises:
            StoreError: it cannot be opened.
        """
        for source in self._sources:
            with source.lock:
                if source.store is not None and source.store.engine.config.uuid == key.uuid:
                    return source.store
        with self._lock:
            if key.uuid not in self._opened:
                opened = self._open_store(key.url)
                if opened.engine.config.uuid != key.uuid:
                    opened.close()
                    raise NotFoundError(f"another store is at {key.url} now: run `tsck catalog sync`", object_id=key.url)
                self._opened[key.uuid] = opened
            return self._opened[key.uuid]

    def close(self) -> None:
        """Closes the stores and the catalog; idempotent."""
        for source in self._sources:
            with source.lock:
                if source.store is not None:
                    source.store.close()
                    source.store = None
        with self._lock:
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()
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

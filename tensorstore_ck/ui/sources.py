"""The stores and their catalog. Opens a store read-only, and once more for actions; reads its log again before each page.

One thread per store reads its log. A page waits a short time for them and shows which stores are still being read, so neither a store that
does not answer nor the first read of a long log blocks the pages of other stores.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import select

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.schema import stores
from tensorstore_ck.catalog.synced_store import SyncedStore
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.errors import BackendUnavailableError, NotFoundError, PermissionDeniedError
from tensorstore_ck.redaction import display_url
from tensorstore_ck.store import ReadOnlyStore, Store
from tensorstore_ck.store.internals import config_of
from tensorstore_ck.ui.background import Background

OpenStore = Callable[[str], ReadOnlyStore]
OpenWritable = Callable[[str], Store]
AnyStore = TypeVar("AnyStore", bound=ReadOnlyStore)

PAGE_WAITS_SECONDS: Final = 2.0
LOOKS: Final = 32
"""Reads of single snapshots whose results are kept."""
ABANDONED_SECONDS: Final = 120.0
"""Such a read ends when no page has requested it for this time."""


@dataclass(frozen=True, slots=True)
class StoreKey:
    """A store in the catalog."""

    store_id: int
    """Its key in the tables."""
    uuid: str
    url: str
    """Without secrets."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a page may not show all that a store has. Its text follows the store's URL in a sentence."""

    text: str
    is_reading: bool
    """Nothing is wrong so far: its log is being read."""

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class _Source:
    synced: SyncedStore
    progress: tuple[int, int] = (0, 0)
    reading: threading.Thread | None = None
    since: float = 0.0
    overdue: threading.Thread | None = None
    """A read that did not end while a page waited for it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held to begin a reading, not during one."""


class Sources:
    """A catalog, and the stores that keep it up to date. Thread-safe."""

    def __init__(
        self,
        db: str,
        urls: Sequence[str],
        open_store: OpenStore,
        *,
        is_private: bool = False,
        wait_seconds: float = PAGE_WAITS_SECONDS,
        open_writable: OpenWritable | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            db: The catalog's URL.
            urls: The stores to read; none for a catalog that others sync.
            open_store: Opens a store.
            is_private: The catalog is for these stores alone: it is created if missing, and other stores are removed from it.
            wait_seconds: How long a page waits for a log to be read.
            open_writable: Opens a store to change it, when that is first asked for; None: nothing can be changed.
        """
        self.catalog = Catalog(db)
        self.background = Background()
        self.looks = Background(LOOKS, ABANDONED_SECONDS)
        """Reads of single snapshots; there may be many at once."""
        self._open_store = open_store
        self._open_writable = open_writable
        self._writable: dict[str, Store] = {}
        """By uuid."""
        self._sources = [_Source(SyncedStore(self.catalog, url, self._open)) for url in dict.fromkeys(urls)]
        self._is_private = is_private
        self._wait_seconds = wait_seconds
        self._opened: dict[str, ReadOnlyStore] = {}
        """Stores of the catalog that others sync, by uuid."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begins to read the logs, and does not wait. Raises `StoreError` if the catalog cannot be made."""
        if self._is_private:
            self.catalog.sync_all(())
        for source in self._sources:
            self._begin(source)

    def refresh(self, uuid: str | None = None) -> dict[str, Trouble]:
        """Reads the new entries of all logs or of one store's. Returns URL -> trouble of each store whose log was not read to its end."""
        wanted = [source for source in self._sources if uuid is None or source.synced.uuid == uuid] or self._sources
        self._wait(wanted)  # a reading that began earlier may not see what was written since
        for source in wanted:
            self._begin(source)
        self._wait(wanted)
        return {display_url(source.synced.url): trouble for source in wanted if (trouble := _trouble(source)) is not None}

    def trouble(self, key: StoreKey) -> Trouble | None:
        """Why pages of a store may be old, as far as the last `refresh` knows."""
        return next((_trouble(source) for source in self._sources if _is_of(source, key)), None)

    def key(self, uuid: str) -> StoreKey:
        """The store with this uuid. Raises `NotFoundError` if the catalog has no such store."""
        with self.catalog.reading() as connection:
            row = connection.execute(select(stores.c.store_id, stores.c.uuid, stores.c.url).where(stores.c.uuid == uuid)).one_or_none()
        if row is None:
            raise NotFoundError("there is no such store here: start from the overview", object_id=uuid)
        return StoreKey(*row)

    def open(self, key: StoreKey) -> ReadOnlyStore:
        """The open store, for data that the catalog lacks. Raises `StoreError` if it cannot be opened."""
        for source in self._sources:
            if _is_of(source, key):
                store = source.synced.store  # a refresh may close it meanwhile
                if store is not None:
                    return store
                raise source.synced.error or BackendUnavailableError(f"{key.url} does not answer yet: try again", object_id=key.url)
        return self._opened_once(self._opened, key, partial(self._open_store, key.url), "run `tsck catalog sync`")

    def writable(self, key: StoreKey) -> Store:
        """The store, opened to change it. Raises `StoreError` if it cannot be opened, or this server changes nothing."""
        if self._open_writable is None:
            raise PermissionDeniedError("this server changes nothing: start it with --allow", object_id=key.url)
        url = next((source.synced.url for source in self._sources if _is_of(source, key)), key.url)
        return self._opened_once(self._writable, key, partial(self._open_writable, url), "load the page again")

    def _opened_once(self, stores_by_uuid: dict[str, AnyStore], key: StoreKey, open_store: Callable[[], AnyStore], advice: str) -> AnyStore:
        """The store that was opened before, or is opened now. Raises `NotFoundError` if another store is at its URL."""
        with self._lock:
            if key.uuid not in stores_by_uuid:
                opened = open_store()
                if config_of(opened).uuid != key.uuid:
                    opened.close()
                    raise NotFoundError(f"another store is at {key.url} now: {advice}", object_id=key.url)
                stores_by_uuid[key.uuid] = opened
            return stores_by_uuid[key.uuid]

    def close(self) -> None:
        """Ends the reads in the background, and closes the stores and the catalog; idempotent.

        A store that does not answer stays open until the process ends.
        """
        is_idle = False not in [reads.close(self._wait_seconds) for reads in (self.background, self.looks)]
        for source in self._sources:
            with source.lock:
                reading = source.reading
            if reading is not None:
                reading.join(self._wait_seconds)
            if is_idle and not _is_reading(source):
                source.synced.close()
        with self._lock:
            for opened in (*self._opened.values(), *self._writable.values()) if is_idle else ():
                opened.close()
            self._opened.clear()
            self._writable.clear()
        self.catalog.close()

    def _wait(self, sources: Sequence[_Source]) -> None:
        """Waits for the readings in progress, as long as a page does."""
        for source in sources:
            with source.lock:  # so that it was started
                reading, since = source.reading, source.since
            if reading is not None:
                reading.join(max(0.0, since + self._wait_seconds - time.monotonic()))
                if reading.is_alive():
                    source.overdue = reading

    def _begin(self, source: _Source) -> None:
        """Begins to read the source's log, unless that is in progress."""
        with source.lock:
            if source.reading is None or not source.reading.is_alive():
                source.since = time.monotonic()
                source.progress = (0, 0)
                source.reading = Helper(lambda: self._read(source), "tsck-ui")
                source.reading.start()

    def _read(self, source: _Source) -> None:
        def progress(done: int, total: int) -> None:
            source.progress = (done, total)

        source.synced.refresh(progress=progress)

    def _open(self, url: str) -> ReadOnlyStore:
        opened = self._open_store(url)
        if self._is_private:
            self._forget_earlier(opened)
        return opened

    def _forget_earlier(self, opened: ReadOnlyStore) -> None:
        """Removes stores from the catalog that were at this URL before."""
        with self.catalog.reading() as connection:
            conditions = stores.c.url == opened.url, stores.c.uuid != config_of(opened).uuid
            earlier = connection.execute(select(stores.c.uuid).where(*conditions)).scalars().all()
        for uuid in earlier:
            self.catalog.forget_store(uuid)


def _is_of(source: _Source, key: StoreKey) -> bool:
    synced = source.synced
    if synced.uuid is not None:
        return synced.uuid == key.uuid
    return display_url(synced.url if "://" in synced.url else os.path.abspath(synced.url)) == key.url


def _is_reading(source: _Source) -> bool:
    return source.reading is not None and source.reading.is_alive()


def _trouble(source: _Source) -> Trouble | None:
    if source.overdue is not None and source.overdue.is_alive():
        done, total = source.progress
        return Trouble(f"is being read: entry {done:,} of {total:,}" if total else "is being read", is_reading=True)
    return Trouble(f"cannot be read now: {source.synced.error}", is_reading=False) if source.synced.error is not None else None

"""A store's backend some of whose packs lie at other places: colder and cheaper ones, where they were moved for their age.

The log says which (`place`, FORMAT.md), once of each pack and for good. All other objects, and all that a put writes, lie at the store's
own place. A pack is read, listed and deleted where it lies. A place that cannot be used is told at once, and never taken for empty.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from tensorstore_ck.backend.cold.locations import OwnerMarker, read_mark, require_apart, write_mark
from tensorstore_ck.backend.protocol import Backend, ObjectInfo
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.common.threads import ProcessLock
from tensorstore_ck.errors import CorruptObjectError, GcRefusedError, MissingObjectError, PlaceUnavailableError, StoreError

PACKS: Final = "packs/"


class LocationView(Protocol):
    """What the log says."""

    def place_of(self, pack: bytes) -> str | None:
        """Where a pack lies, if not at the store's own place."""

    def places(self) -> Mapping[Ulid, str]:
        """The same of all such packs."""


class ColdTierBackend:
    """See above. What is not here is the own backend's."""

    def __init__(
        self,
        own: Backend,
        open_place: Callable[[str], Backend],
        view: Callable[[], LocationView] | None = None,
        newest_view: Callable[[], LocationView] | None = None,
        *,
        store: str = "",
    ) -> None:
        """`view`: the fold of the log as this host knows it, `newest_view`: after reading the log; without them only what was found.

        `store`: the store's uuid.
        """
        self._own = own
        self._open_place = open_place
        self._view = view
        self._newest_view = newest_view or view
        self._store = store
        self._found: dict[Ulid, str] = {}
        self._opened: dict[str, Backend] = {}
        self._uploads: dict[str, Backend] = {}
        self._lock = ProcessLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """With what is known now: for workers in other processes."""
        by_url: dict[str, list[bytes]] = {}
        for pack, url in self.places().items():
            by_url.setdefault(url, []).append(pack)
        return _reopened, (self._own, self._open_place, self._store, {url: b"".join(packs) for url, packs in by_url.items()})

    # --- which places there are ---------------------------------------------------------------------------------------

    def learn(self, places: Mapping[Ulid, str]) -> None:
        """Told where packs lie by whoever reads the log without this host's cache. It stays so."""
        self._found.update(places)

    def places(self) -> dict[Ulid, str]:
        """Where packs lie, as far as known."""
        known = self._view().places() if self._view is not None else {}
        return {**self._found, **known}

    def at(self, url: str | None) -> Backend:
        """The backend of a place that has the store's mark; None: the own one.

        Raises:
            PlaceUnavailableError: it is not allowed, cannot be opened or read, or is not that place.
        """
        if url is None:
            return self._own
        with self._lock:
            if url not in self._opened:
                self._opened[url] = self._open(url)
            return self._opened[url]

    def check(self, url: str) -> None:
        """Whether packs can be moved there, as far as it tells without a request.

        Raises:
            InvalidOptionError: it is inside the store, or in this process's memory.
            InvalidUrlError, MissingExtraError: it cannot be opened.
            PlaceUnavailableError: this host does not allow it.
        """
        require_apart(url, self._own.url)
        self._open_place(url).close()

    def begin(self, url: str) -> None:
        """Marks a place that has no packs of this store yet, and is not marked."""
        if url in self._opened or url in self.places().values():
            return
        backend = self._open_place(url)
        if read_mark(backend) is None:
            write_mark(backend, OwnerMarker(self._store, self._own.url))
        backend.close()

    def require_own(self) -> None:
        """Refuses where another store with this one's uuid, of which this is a copy or which is one of this, moved packs to a place.

        Raises:
            GcRefusedError: so it is.
            PlaceUnavailableError: a place cannot be read.
        """
        for url, backend in self._others().items():
            mark = read_mark(backend)
            if mark is not None and mark.url != self._own.url:
                raise GcRefusedError(
                    f"the packs at {url} were moved there by the store at {mark.url}, and this one is at {self._own.url}. If one is a copy "
                    "of the other's files, both need them. If this is the only one, and was moved itself: `tsck tier --claim-locations`",
                    object_id=url,
                )

    def take(self, store: str | None = None) -> None:
        """Says that the packs at all places belong to the store here; also where the mark is damaged, or gone from beside the packs.

        `store`: its uuid, if it has another one now.

        Raises:
            PlaceUnavailableError: a place cannot be used, or nothing of the store is there.
        """
        places = self.places()
        for url in sorted(set(places.values())):
            backend = self._open_place(url)
            try:
                is_there = read_mark(backend) is not None
            except CorruptObjectError:
                is_there = True
            if not is_there and not any(parse_ulid(info.name[-26:]) in places for info in backend.list(PACKS)):
                raise self._not_there(url)
            write_mark(backend, OwnerMarker(store or self._store, self._own.url))
            backend.close()

    # --- the backend --------------------------------------------------------------------------------------------------

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Reads where it lies."""
        data: bytes = self._read(name, lambda backend: backend.get(name, max_bytes=max_bytes))
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Reads where it lies."""
        self._read(name, lambda backend: backend.read_into(name, offset, target))

    def size(self, name: str) -> int:
        """Asks where it lies."""
        size: int = self._read(name, lambda backend: backend.size(name))
        return size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Of all places; the marks are none of the store's objects."""
        yield from self._own.list(prefix)
        for url, backend in (self._others() if not prefix or prefix.startswith(PACKS) else {}).items():
            for info in backend.list(prefix or PACKS):
                pack = parse_ulid(info.name[-26:])
                if pack is not None:
                    self._found[pack] = url
                yield info

    def delete(self, names: Iterable[str]) -> None:
        """Where they lie."""
        by_place: dict[str | None, list[str]] = {}
        for name in names:
            by_place.setdefault(self._url_of(name), []).append(name)
        for url, here in by_place.items():
            self.at(url).delete(here)

    def list_uploads(self) -> Iterator[ObjectInfo]:
        """Of all places."""
        for backend in (self._own, *self._others().values()):
            for info in backend.list_uploads():
                self._uploads[info.name] = backend
                yield info

    def abort_upload(self, name: str) -> None:
        """Where it was listed."""
        self._uploads.get(name, self._own).abort_upload(name)

    def close(self) -> None:
        """Of all places."""
        for backend in (self._own, *self._opened.values()):
            backend.close()

    # --- inner --------------------------------------------------------------------------------------------------------

    def _read(self, name: str, read: Callable[[Backend], Any]) -> Any:
        url = self._url_of(name)
        if url is None:
            try:
                return read(self._own)
            except MissingObjectError:
                url = self._url_of(name, anew=True)  # a cache that lags behind, or was emptied, must not make it missing
                if url is None:
                    raise
        try:
            backend = self.at(url)
        except PlaceUnavailableError as exc:
            try:
                return read(self._own)  # an entry that names a place of what lies here must not make it unreadable
            except MissingObjectError:
                raise exc from None
        try:
            return read(backend)
        except (MissingObjectError, CorruptObjectError):
            raise
        except StoreError as exc:
            self._require(url, backend)
            raise exc from None

    def _url_of(self, name: str, *, anew: bool = False) -> str | None:
        pack = parse_ulid(name[-26:]) if name.startswith(PACKS) else None
        if pack is None:
            return None
        url = self._found.get(pack)
        if url is None and self._view is not None and self._newest_view is not None:
            if not anew:
                url = self._view().place_of(pack)
            else:
                with suppress(StoreError):
                    url = self._newest_view().place_of(pack)
            if url is not None:
                self._found[pack] = url
        return url

    def _others(self) -> dict[str, Backend]:
        return {url: self.at(url) for url in sorted(set(self.places().values()))}

    def _open(self, url: str) -> Backend:
        try:
            backend = self._open_place(url)
        except PlaceUnavailableError:
            raise
        except StoreError as exc:
            raise PlaceUnavailableError(f"packs of {self._own.url} lie at {url}, which cannot be opened: {exc}", object_id=url) from exc
        self._require(url, backend)
        return backend

    def _require(self, url: str, backend: Backend) -> None:
        try:
            mark = read_mark(backend)
        except StoreError as exc:
            raise PlaceUnavailableError(f"packs of {self._own.url} lie at {url}, which cannot be read: {exc}", object_id=url) from exc
        if mark is None or (self._store and mark.store != self._store):
            raise self._not_there(url)

    def _not_there(self, url: str) -> PlaceUnavailableError:
        return PlaceUnavailableError(
            f"packs of {self._own.url} were moved to {url}, and what is there now is without their mark: is that place mounted, and "
            "reached with the right credentials?",
            object_id=url,
        )


def _reopened(own: Backend, open_place: Callable[[str], Backend], store: str, by_url: Mapping[str, bytes]) -> ColdTierBackend:
    backend = ColdTierBackend(own, open_place, store=store)
    for url, joined in by_url.items():
        backend.learn({Ulid(joined[at : at + 16]): url for at in range(0, len(joined), 16)})
    return backend

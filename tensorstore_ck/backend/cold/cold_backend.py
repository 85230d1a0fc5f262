"""A store's backend some of whose packs lie at cold locations, where they were moved for their age.

The log says which (`place`, FORMAT.md), once per pack and permanently. All other objects, and all that a save writes, lie at the store's
own location. A pack is read, listed and deleted where it lies. A location that cannot be used is an error, and never taken for empty.
"""
# ruff: noqa: D102 - protocol.py documents the methods

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from tensorstore_ck.backend.cold.locations import require_outside_store
from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME, FoundMarker, OwnerMarker, read_marker, write_marker
from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.protocol import Backend, ObjectInfo
from tensorstore_ck.common.ids import Ulid, parse_ulid, split_ulids
from tensorstore_ck.common.threads import ProcessLock
from tensorstore_ck.errors import CorruptObjectError, GcRefusedError, MissingObjectError, PlaceUnavailableError, StoreError

T = TypeVar("T")

PACKS: Final = "packs/"


class LocationView(Protocol):
    """What the log says."""

    def location_of(self, pack: bytes) -> str | None:
        """The URL of a pack's cold location; None: the store's own."""

    def locations(self) -> Mapping[Ulid, str]:
        """The URL of each pack at a cold location."""


class ColdTierBackend(ForwardingBackend):
    """Reads, lists and deletes each pack where it lies. All else is done by the store's own backend, `inner`."""

    def __init__(
        self,
        own: Backend,
        open_location: Callable[[str], Backend],
        view: Callable[[], LocationView] | None = None,
        newest_view: Callable[[], LocationView] | None = None,
        *,
        store: str = "",
    ) -> None:
        """`view` returns the fold of the log as this host knows it, `newest_view` after reading the log; without them only `add_locations`
        adds any.

        `store`: the store's uuid.
        """
        super().__init__(own)
        self._open_location = open_location
        self._view = view
        self._newest_view = newest_view or view
        self._store = store
        self._known: dict[Ulid, str] = {}
        self._opened: dict[str, Backend] = {}
        self._uploads: dict[str, Backend] = {}
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """The same backend with the locations known now, for workers in other processes."""
        by_url: dict[str, list[bytes]] = {}
        for pack, url in self.locations().items():
            by_url.setdefault(url, []).append(pack)
        return _from_pickle, (self.inner, self._open_location, self._store, {url: b"".join(packs) for url, packs in by_url.items()})

    def add_locations(self, locations: Mapping[Ulid, str]) -> None:
        """Adds packs and their locations, found by reading the log without this host's cache."""
        self._known.update(locations)

    def locations(self) -> dict[Ulid, str]:
        """The locations of packs, as far as known."""
        logged = self._view().locations() if self._view is not None else {}
        return {**self._known, **logged}

    def at(self, url: str | None) -> Backend:
        """The backend of a location with the store's marker; None: the store's own.

        Raises:
            PlaceUnavailableError: it is not allowed, cannot be opened or read, or does not have the marker.
        """
        if url is None:
            return self.inner
        with self._lock.here:
            if url not in self._opened:
                self._opened[url] = self._open(url)
            return self._opened[url]

    def check(self, url: str) -> None:
        """Checks, without a request, that packs can be moved there.

        Raises:
            InvalidOptionError: it is inside the store, or in this process's memory.
            InvalidUrlError, MissingExtraError: it cannot be opened.
            PlaceUnavailableError: this host does not allow it.
        """
        require_outside_store(url, self.inner.url)
        self._open_location(url).close()

    def claim_new(self, url: str) -> None:
        """Marks a location that has no packs of this store yet, unless it is marked."""
        if url in self._opened or url in self.locations().values():
            return
        backend = self._open_location(url)
        if read_marker(backend, self._marker) is None:
            write_marker(backend, self._marker)
        backend.close()

    def marker(self, url: str) -> FoundMarker:
        """The marker of a location.

        Raises:
            PlaceUnavailableError: it cannot be read, or has none, or another store's.
        """
        return self._require_marker(url, self.at(url))

    def markers(self) -> dict[str, FoundMarker]:
        """The marker of each location. Raises the errors of `marker`."""
        return {url: self.marker(url) for url in sorted(set(self.locations().values()))}

    def rewrite_damaged_markers(self) -> list[str]:
        """Writes the damaged markers that were this store's; returns the URLs of their locations."""
        ours = [url for url, marker in self.markers().items() if marker.is_damaged and marker.owner is not None]
        for url in ours:
            write_marker(self.at(url), self._marker)
        return ours

    def require_owner(self) -> None:
        """Checks that no other store with this UUID (a copy of this store, or the original) has moved packs to a location.

        Raises:
            GcRefusedError: one has.
            PlaceUnavailableError: a location cannot be read.
        """
        for url, marker in self.markers().items():
            if marker.owner is None:
                raise GcRefusedError(
                    f"{MARKER_NAME} in {url}, which names the store whose packs are there, is damaged. If no copy of this store's files "
                    "uses that location: `tsck tier --claim-locations` writes it again",
                    object_id=url,
                )
            if marker.owner.url != self.inner.url:
                raise GcRefusedError(
                    f"the store at {marker.owner.url} moved the packs to {url}, and this store is at {self.inner.url}. If one is a copy of "
                    "the other's files, both need them. If this is the only one, and was itself moved: `tsck tier --claim-locations`",
                    object_id=url,
                )

    def claim_all(self, store: str | None = None) -> None:
        """Marks all locations as belonging to this store, even if the marker there is damaged or gone.

        `store`: its new uuid, if it got one.

        Raises:
            PlaceUnavailableError: a location cannot be used, or has nothing of the store.
        """
        located = self.locations()
        for url in sorted(set(located.values())):
            backend = self._open_location(url)
            is_there = read_marker(backend, self._marker) is not None
            if not is_there and not any(parse_ulid(info.name[-26:]) in located for info in backend.list(PACKS)):
                raise self._wrong_location(url)
            write_marker(backend, OwnerMarker(store or self._store, self.inner.url))
            backend.close()

    def get(self, name: str, *, max_bytes: int) -> bytes:
        return self._read(name, lambda backend: backend.get(name, max_bytes=max_bytes))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._read(name, lambda backend: backend.read_into(name, offset, target))

    def size(self, name: str) -> int:
        return self._read(name, lambda backend: backend.size(name))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Lists all locations. Their markers are not objects of the store."""
        yield from self.inner.list(prefix)
        for url, backend in (self._cold_backends() if prefix.startswith(PACKS) else {}).items():
            for info in backend.list(prefix):
                pack = parse_ulid(info.name[-26:])
                if pack is not None:
                    self._known[pack] = url
                yield info

    def delete(self, names: Iterable[str]) -> None:
        by_url: dict[str | None, list[str]] = {}
        for name in names:
            by_url.setdefault(self._location_of(name), []).append(name)
        for url, here in by_url.items():
            self.at(url).delete(here)

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        for backend in (self.inner, *self._cold_backends().values()):
            for info in backend.list_uploads(folders):
                self._uploads[info.name] = backend
                yield info

    def abort_upload(self, name: str) -> None:
        self._uploads.get(name, self.inner).abort_upload(name)

    def close(self) -> None:
        for backend in (self.inner, *self._opened.values()):
            backend.close()

    def _read(self, name: str, read: Callable[[Backend], T]) -> T:
        url = self._known.get(pack) if (pack := _pack_of(name)) is not None else None
        if url is None:
            try:
                return read(self.inner)  # most packs are there, and then no view of the log is needed
            except MissingObjectError:
                # A cache that is behind, or was emptied, must not make it missing.
                url = self._location_of(name) or self._location_of(name, refresh=True)
                if url is None:
                    raise
        try:
            backend = self.at(url)
        except PlaceUnavailableError as exc:
            try:
                return read(self.inner)  # a wrong location in the log must not make a pack in the store unreadable
            except MissingObjectError:
                raise exc from None
        try:
            return read(backend)
        except (MissingObjectError, CorruptObjectError):
            raise
        except StoreError as exc:
            self._require_marker(url, backend)
            raise exc from None

    def _location_of(self, name: str, *, refresh: bool = False) -> str | None:
        pack = _pack_of(name)
        if pack is None:
            return None
        url = self._known.get(pack)
        if url is None and self._view is not None and self._newest_view is not None:
            if not refresh:
                url = self._view().location_of(pack)
            else:
                with suppress(StoreError):
                    url = self._newest_view().location_of(pack)
            if url is not None:
                self._known[pack] = url
        return url

    def _cold_backends(self) -> dict[str, Backend]:
        return {url: self.at(url) for url in sorted(set(self.locations().values()))}

    def _open(self, url: str) -> Backend:
        try:
            backend = self._open_location(url)
        except PlaceUnavailableError:
            raise
        except StoreError as exc:
            raise PlaceUnavailableError(f"packs of {self.inner.url} lie at {url}, which cannot be opened: {exc}", object_id=url) from exc
        self._require_marker(url, backend)
        return backend

    @property
    def _marker(self) -> OwnerMarker:
        return OwnerMarker(self._store, self.inner.url)

    def _require_marker(self, url: str, backend: Backend) -> FoundMarker:
        """A damaged marker is enough for reads: the location is there, and blocks are verified. Callers that delete check the owner."""
        try:
            marker = read_marker(backend, self._marker)
        except StoreError as exc:
            raise PlaceUnavailableError(f"packs of {self.inner.url} lie at {url}, which cannot be read: {exc}", object_id=url) from exc
        if marker is None or (self._store and marker.owner is not None and marker.owner.store != self._store):
            raise self._wrong_location(url)
        return marker

    def _wrong_location(self, url: str) -> PlaceUnavailableError:
        return PlaceUnavailableError(
            f"packs of {self.inner.url} were moved to {url}, which does not have their marker now: is that location mounted, and "
            "reached with the right credentials? If it is, only the marker is lost: `tsck tier --claim-locations` writes it again",
            object_id=url,
        )


def _pack_of(name: str) -> Ulid | None:
    return parse_ulid(name[-26:]) if name.startswith(PACKS) else None


def _from_pickle(own: Backend, open_location: Callable[[str], Backend], store: str, by_url: Mapping[str, bytes]) -> ColdTierBackend:
    backend = ColdTierBackend(own, open_location, store=store)
    for url, joined in by_url.items():
        backend.add_locations(dict.fromkeys(split_ulids(joined), url))
    return backend

"""Where a store's packs lie: some at cold locations, to which they were moved for their age.

The log says which (`place`, FORMAT.md), once per pack and permanently. All other objects, and all that a save writes, lie at the store's
own location. A pack is read, listed and deleted where it lies. A location that cannot be used is an error, and never taken for empty.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from tensorstore_ck.backend.cold.locations import require_outside_store
from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME, FoundMarker, OwnerMarker, read_marker, write_marker
from tensorstore_ck.backend.protocol import Backend, ObjectInfo
from tensorstore_ck.common.ids import Ulid, parse_ulid, split_ulids, ulid_text
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


class ColdLocations:
    """Where the packs of one store lie, if not at its own location, `own`."""

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
        self._own = own
        self._open_location = open_location
        self._view = view
        self._newest_view = newest_view or view
        self._store = store
        self.known: dict[Ulid, str] = {}
        """Packs that lie elsewhere, as far as this object has met them."""
        self._opened: dict[str, Backend] = {}
        self._uploads: dict[str, Backend] = {}
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """The same with the locations known now, for workers in other processes."""
        by_url: dict[str, list[bytes]] = {}
        for pack, url in self.locations().items():
            by_url.setdefault(url, []).append(pack)
        return _from_pickle, (self._own, self._open_location, self._store, {url: b"".join(packs) for url, packs in by_url.items()})

    def add_locations(self, locations: Mapping[Ulid, str]) -> None:
        """Adds packs and their locations, found by reading the log without this host's cache."""
        self.known.update(locations)

    def locations(self) -> dict[Ulid, str]:
        """The locations of packs, as far as known."""
        logged = self._view().locations() if self._view is not None else {}
        return {**self.known, **logged}

    def at(self, url: str | None) -> Backend:
        """The backend of a location with the store's marker; None: the store's own.

        Raises:
            PlaceUnavailableError: it is not allowed, cannot be opened or read, or does not have the marker.
        """
        if url is None:
            return self._own
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
        require_outside_store(url, self._own.url)
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
            if marker.owner.url != self._own.url:
                raise GcRefusedError(
                    f"the store at {marker.owner.url} moved the packs to {url}, and this store is at {self._own.url}. If one is a copy of "
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
                lost = ulid_text(min(pack for pack in located if located[pack] == url))
                raise PlaceUnavailableError(
                    f"{url} has none of the packs of {self._own.url} that were moved there: is that location mounted, and reached with the "
                    f"right credentials? If they are lost permanently: make an empty file {PACKS}{lost[-2:]}/{lost} there, claim it again, "
                    "and `tsck fsck --repair --from OTHER_STORE` takes them from another store, or marks the snapshots that need them",
                    object_id=url,
                )
            write_marker(backend, OwnerMarker(store or self._store, self._own.url))
            backend.close()

    def location_of(self, name: str) -> str | None:
        """The URL of the location of an object that is not at the store's own; None if the log knows none.

        A cache that is behind, or was emptied, must not make a pack missing.
        """
        return self._location_of(name) or self._location_of(name, refresh=True)

    def known_location(self, name: str) -> str | None:
        """The URL of the location where the object was met before."""
        return self.known.get(pack) if (pack := _pack_of(name)) is not None else None

    def read(self, url: str, read: Callable[[Backend], T]) -> T:
        """The result of `read` at a location."""
        try:
            backend = self.at(url)
        except PlaceUnavailableError as exc:
            try:
                return read(self._own)  # a wrong location in the log must not make a pack in the store unreadable
            except MissingObjectError:
                raise exc from None
        try:
            return read(backend)
        except (MissingObjectError, CorruptObjectError):
            raise
        except StoreError as exc:
            self._require_marker(url, backend)
            raise exc from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Lists all locations. Their markers are not objects of the store."""
        yield from self._own.list(prefix)
        for url, backend in (self._backends() if prefix.startswith(PACKS) else {}).items():
            for info in backend.list(prefix):
                pack = parse_ulid(info.name[-26:])
                if pack is not None:
                    self.known[pack] = url
                yield info

    def delete(self, names: Iterable[str]) -> None:
        """Deletes each object where it lies."""
        by_url: dict[str | None, list[str]] = {}
        for name in names:
            by_url.setdefault(self._location_of(name), []).append(name)
        for url, here in by_url.items():
            self.at(url).delete(here)

    def list_uploads(self, folders: Collection[str] | None) -> Iterator[ObjectInfo]:
        """Lists those of all locations."""
        for backend in (self._own, *self._backends().values()):
            for info in backend.list_uploads(folders):
                self._uploads[info.name] = backend
                yield info

    def abort_upload(self, name: str) -> None:
        """Removes a leftover where it was listed."""
        self._uploads.get(name, self._own).abort_upload(name)

    def close(self) -> None:
        """Closes the backends of all locations, the store's own among them."""
        for backend in (self._own, *self._opened.values()):
            backend.close()

    def _location_of(self, name: str, *, refresh: bool = False) -> str | None:
        pack = _pack_of(name)
        if pack is None:
            return None
        url = self.known.get(pack)
        if url is None and self._view is not None and self._newest_view is not None:
            if not refresh:
                url = self._view().location_of(pack)
            else:
                with suppress(StoreError):
                    url = self._newest_view().location_of(pack)
            if url is not None:
                self.known[pack] = url
        return url

    def _backends(self) -> dict[str, Backend]:
        return {url: self.at(url) for url in sorted(set(self.locations().values()))}

    def _open(self, url: str) -> Backend:
        try:
            backend = self._open_location(url)
        except PlaceUnavailableError:
            raise
        except StoreError as exc:
            raise PlaceUnavailableError(f"packs of {self._own.url} lie at {url}, which cannot be opened: {exc}", object_id=url) from exc
        self._require_marker(url, backend)
        return backend

    @property
    def _marker(self) -> OwnerMarker:
        return OwnerMarker(self._store, self._own.url)

    def _require_marker(self, url: str, backend: Backend) -> FoundMarker:
        """A damaged marker is enough for reads: the location is there, and blocks are verified. Callers that delete check the owner."""
        try:
            marker = read_marker(backend, self._marker)
        except StoreError as exc:
            raise PlaceUnavailableError(f"packs of {self._own.url} lie at {url}, which cannot be read: {exc}", object_id=url) from exc
        if marker is None or (self._store and marker.owner is not None and marker.owner.store != self._store):
            raise PlaceUnavailableError(
                f"packs of {self._own.url} were moved to {url}, which does not have their marker now: is that location mounted, and "
                "reached with the right credentials? If it is, only the marker is lost: `tsck tier --claim-locations` writes it again",
                object_id=url,
            )
        return marker


def _pack_of(name: str) -> Ulid | None:
    return parse_ulid(name[-26:]) if name.startswith(PACKS) else None


def _from_pickle(own: Backend, open_location: Callable[[str], Backend], store: str, by_url: Mapping[str, bytes]) -> ColdLocations:
    locations = ColdLocations(own, open_location, store=store)
    for url, joined in by_url.items():
        locations.add_locations(dict.fromkeys(split_ulids(joined), url))
    return locations

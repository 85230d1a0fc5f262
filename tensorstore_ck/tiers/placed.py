"""A store's backend some of whose packs lie at other places: colder and cheaper ones, where they were moved for their age.

The log says which (`place`, FORMAT.md), once of each pack and for good, so what is known here is never wrong, only incomplete. All other
objects, and all that is written, lie at the store's own place. A pack is read where it lies, and listed and deleted everywhere.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.protocol import Backend, ObjectInfo
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.ids import Ulid, parse_ulid

PACKS: Final = "packs/"
STORAGE_CLASSES: Final = ("STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR")
"""Of S3: those that can be read at once."""
MAX_URL_CHARS: Final = 256
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+")


class View(Protocol):
    """What the log says."""

    def place_of(self, pack: bytes) -> str | None:
        """Where a pack lies, if not at the store's own place."""

    def places(self) -> Mapping[Ulid, str]:
        """The same of all such packs."""


@dataclass(frozen=True, slots=True)
class PlaceOpener:
    """Opens places as the store itself was opened, where they are of its kind; others by what the environment says."""

    store_url: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    no_sync: bool = False

    def __call__(self, url: str) -> Backend:
        """The backend of a place."""
        where, storage_class = _split(url)
        options = dict(self.storage_options) if _protocol(where) == _protocol(self.store_url) else {}
        if storage_class is not None:
            options["s3_additional_kwargs"] = {**options.get("s3_additional_kwargs", {}), "StorageClass": storage_class}
        return open_backend(where, options, no_sync=self.no_sync)


class PlacedBackend:
    """See above. What is not here is the own backend's."""

    def __init__(self, own: Backend, open_place: Callable[[str], Backend], view: Callable[[], View] | None = None) -> None:
        self._own = own
        self._open_place = open_place
        self._view = view
        self._learned: dict[Ulid, str] = {}
        self._found: dict[Ulid, str | None] = {}
        """By packs that were read: nobody reads one before the entry that says where it lies."""
        self._opened: dict[str, Backend] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """With what is known now: for workers in other processes."""
        return _with_places, (self._own, self._open_place, self.places())

    def learn(self, places: Mapping[Ulid, str]) -> None:
        """Told where packs lie by whoever reads the log without this host's cache."""
        self._learned.update(places)
        self._found.update(places)

    def places(self) -> dict[Ulid, str]:
        """Where packs lie, as far as known."""
        return {**self._learned, **(self._view().places() if self._view is not None else {})}

    def at(self, url: str | None) -> Backend:
        """The backend of a place; None: the own one."""
        if url is None:
            return self._own
        with self._lock:
            if url not in self._opened:
                self._opened[url] = self._open_place(url)
            return self._opened[url]

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Reads where it lies."""
        return self._of(name).get(name, max_bytes=max_bytes)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Reads where it lies."""
        self._of(name).read_into(name, offset, target)

    def size(self, name: str) -> int:
        """Asks where it lies."""
        return self._of(name).size(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Of all places."""
        others = self._others() if not prefix or prefix.startswith(PACKS) else ()
        return chain(self._own.list(prefix), *(place.list(prefix or PACKS) for place in others))

    def delete(self, names: Iterable[str]) -> None:
        """At all places."""
        wanted = list(names)
        self._own.delete(wanted)
        packs = [name for name in wanted if name.startswith(PACKS)]
        for place in self._others() if packs else ():
            place.delete(packs)

    def close(self) -> None:
        """Of all places."""
        for place in (self._own, *self._opened.values()):
            place.close()

    def _of(self, name: str) -> Backend:
        pack = parse_ulid(name[-26:]) if name.startswith(PACKS) else None
        if pack is None:
            return self._own
        if pack not in self._found:
            self._found[pack] = self._view().place_of(pack) if self._view is not None else None
        url = self._found[pack]
        return self._own if url is None else self.at(url)

    def _others(self) -> tuple[Backend, ...]:
        return tuple(self.at(url) for url in sorted({*self.places().values(), *self._opened}))


def check_place(url: object) -> str:
    """`url`, if packs can be moved there.

    Raises:
        InvalidOptionError: it is neither an absolute path nor a URL, or S3 cannot read its storage class at once.
    """
    if not isinstance(url, str) or not url.isprintable() or len(url) > MAX_URL_CHARS or not (os.path.isabs(url) or _URL.fullmatch(url)):
        raise InvalidOptionError(
            f"packs are moved to a URL such as s3://bucket/prefix or an absolute path, up to {MAX_URL_CHARS} characters, not to {url!r}",
            object_id="move_after",
        )
    _split(url)
    return url


def place_url(url: str, store_uuid: str) -> str:
    """The place of one store below a URL that several may use."""
    where, question, query = url.partition("?")
    return f"{where.rstrip('/')}/{store_uuid}{question}{query}"


def _split(url: str) -> tuple[str, str | None]:
    """(where, storage class)."""
    where, question, query = url.partition("?")
    if not question or _protocol(where) != "s3":
        return url, None
    said = dict(parse_qsl(query, keep_blank_values=True))
    if list(said) != ["storage_class"] or said["storage_class"] not in STORAGE_CLASSES:
        raise InvalidOptionError(
            f"{url}: after the ? goes storage_class=..., one of {', '.join(STORAGE_CLASSES)}; what lies in others cannot be read at once",
            object_id=url,
        )
    return where, said["storage_class"]


def _protocol(url: str) -> str:
    match = _URL.fullmatch(url)
    protocol = match[1].lower() if match is not None else "file"
    return {"local": "file", "s3a": "s3"}.get(protocol, protocol)


def _with_places(own: Backend, open_place: Callable[[str], Backend], places: Mapping[Ulid, str]) -> PlacedBackend:
    backend = PlacedBackend(own, open_place)
    backend.learn(places)
    return backend

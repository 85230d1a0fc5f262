"""The object at each cold location that names the store whose packs are there, and where that store is.

Without it a folder whose disk is not mounted would look like an empty location; and a copy of a store's files, which shares the moved
packs, would free packs that the original needs. A damaged one still shows that the location is there, and usually whose it is.
"""

import json
from typing import Any, Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import MissingObjectError

MARKER_NAME: Final = "place.json"
MAX_MARKER_BYTES: Final = 1 << 16
_MAX_WRONG_CHARS: Final = 2
"""The most wrong characters in a damaged UUID or checksum. Two random ones differ in most characters."""


class OwnerMarker(NamedTuple):
    """What the object says."""

    store: str
    """The uuid of the store whose packs are there."""
    url: str
    """Of that store."""

    def encode(self) -> bytes:
        """JSON, with a checksum over its other keys."""
        return json.dumps({**self._asdict(), "checksum": self.checksum()}, indent=1).encode() + b"\n"

    def checksum(self) -> str:
        """In hex."""
        return derived_hash("place.json", json.dumps(self._asdict(), sort_keys=True).encode()).hex()


class FoundMarker(NamedTuple):
    """What was found at a location."""

    owner: OwnerMarker | None
    """None: it is so damaged that it may be another store's."""
    is_damaged: bool


def read_marker(backend: Backend, own: OwnerMarker) -> FoundMarker | None:
    """The marker of a location; None without one. `own`: of this store, by which a damaged one is recognized."""
    try:
        data = backend.get(MARKER_NAME, max_bytes=MAX_MARKER_BYTES)
    except MissingObjectError:
        return None
    try:
        said: Any = parse_json(data)
        found = OwnerMarker(str(said["store"]), str(said["url"]))
        checksum = said.get("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return FoundMarker(own if _is_of(data, own) else None, is_damaged=True)
    if checksum is None and (found == own or not _is_of(data, own)):
        return FoundMarker(found, is_damaged=False)  # an earlier build's
    if checksum == found.checksum():
        return FoundMarker(found, is_damaged=False)
    return FoundMarker(own if _is_of(data, own) else None, is_damaged=True)


def write_marker(backend: Backend, marker: OwnerMarker) -> None:
    """Writes or replaces the marker of a location."""
    backend.replace(MARKER_NAME, marker.encode())


def _is_of(data: bytes, own: OwnerMarker) -> bool:
    """Whether a damaged marker was this store's: by its checksum or, if it never had one, or is cut off, by its URL and UUID."""
    text, url = data.decode("utf-8", "replace"), json.dumps(own.url)
    if own.encode().startswith(data):
        return url in text
    if _has_almost(text, own.checksum()):
        return True
    return '"checksum"' not in text and url in text and _has_almost(text, own.store)


def _has_almost(text: str, wanted: str) -> bool:
    """Whether `wanted` is in `text`, with a few wrong characters at most."""
    windows = (text[at : at + len(wanted)] for at in range(len(text) - len(wanted) + 1))
    return any(sum(map(str.__ne__, window, wanted)) <= _MAX_WRONG_CHARS for window in windows)

"""How far each object's upload came, and to which name: one small file per object, replaced atomically and durably.

The upload of an object without an entry was never begun. An entry that cannot be read means: begun, by an unknown upload.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError

MAX_ENTRY_BYTES: Final = 1 << 16


class JournalEntry(NamedTuple):
    """One object's upload."""

    name: str
    token: str = ""
    """The token with which the upload continues, if the store has resumable uploads."""
    is_complete: bool = False
    stored_as: str = ""
    """The object's name in the store, if it differs: the name under which it was staged cannot be used any more."""

    @property
    def store_name(self) -> str:
        """Its name in the store."""
        return self.stored_as or self.name


class UploadJournal:
    """Entries below ``uploads/`` of a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def read(self, name: str) -> JournalEntry | None:
        """The entry of an object."""
        try:
            data = self._backend.get(_key(name), max_bytes=MAX_ENTRY_BYTES)
        except MissingObjectError:
            return None
        except CorruptObjectError:
            return JournalEntry(name)
        return _decode(data, name)

    def names(self) -> Iterator[str]:
        """The objects with an entry; an unreadable entry is listed by its own name, with which `delete` works, too."""
        for info in self._backend.list("uploads/"):
            try:
                entry = _decode(self._backend.get(info.name, max_bytes=MAX_ENTRY_BYTES), info.name)
            except (MissingObjectError, CorruptObjectError):
                entry = JournalEntry(info.name)
            yield entry.name

    def write(self, entry: JournalEntry) -> None:
        """Writes or replaces an entry."""
        self._backend.replace(_key(entry.name), json.dumps(entry._asdict()).encode())

    def delete(self, names: Iterable[str]) -> None:
        """Deletes entries, and skips missing ones."""
        self._backend.delete(map(_key, names))


def _key(name: str) -> str:
    return f"uploads/{name.rpartition('/')[2]}"


def _decode(data: bytes, name: str) -> JournalEntry:
    try:
        fields = parse_json(data)
    except ValueError:
        fields = None
    match fields:
        case {"name": str(of), "token": str(token), "is_complete": bool(is_complete), **more} if _key(of) == _key(name):
            stored_as = str(more.get("stored_as", ""))
            if not stored_as or stored_as.partition("/")[0] == of.partition("/")[0]:
                return JournalEntry(of, token, is_complete, stored_as)
    return JournalEntry(name)

"""What lies in the backend: the objects that gc may free, with their sizes and ages."""

from collections.abc import Iterator
from typing import NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.log import FOLDERS, ObjectKey


class ListedObject(NamedTuple):
    """One object."""

    size_bytes: int
    modified_ns: int


def list_objects(backend: Backend) -> dict[ObjectKey, ListedObject]:
    """Every pack, part, record and moved object; what has another name is none, and is left alone."""
    return {key: listed for kind in FOLDERS for key, listed in _list_kind(backend, kind)}


def _list_kind(backend: Backend, kind: str) -> Iterator[tuple[ObjectKey, ListedObject]]:
    for info in backend.list(f"{FOLDERS[kind]}/"):
        ulid = parse_ulid(info.name[-26:])
        key = ObjectKey(kind, ulid) if ulid is not None else None
        if key is not None and key.name == info.name:
            yield key, ListedObject(info.size_bytes, info.modified_ns)

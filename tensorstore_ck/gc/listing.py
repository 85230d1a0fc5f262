"""The objects in the backend that gc may free, with their sizes and ages."""

from collections.abc import Mapping
from typing import NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.log import FOLDERS, ObjectKey


class ListedObject(NamedTuple):
    """One object."""

    size_bytes: int
    modified_ns: int


def list_objects(backend: Backend) -> dict[ObjectKey, ListedObject]:
    """Every pack, part, record and relocation map; gc ignores all other names."""
    return {ObjectKey(kind, ulid): listed for kind in FOLDERS for ulid, listed in list_kind(backend, kind).items()}


def part_sizes(listed: Mapping[ObjectKey, ListedObject]) -> dict[Ulid, int]:
    """The listed parts -> their sizes."""
    return {key.ulid: item.size_bytes for key, item in listed.items() if key.kind == "part"}


def list_kind(backend: Backend, kind: str) -> dict[Ulid, ListedObject]:
    """The objects of one kind: a key of `FOLDERS`."""
    infos = ((parse_ulid(info.name[-26:]), info) for info in backend.list(f"{FOLDERS[kind]}/"))
    return {
        ulid: ListedObject(info.size_bytes, info.modified_ns)
        for ulid, info in infos
        if ulid is not None and ObjectKey(kind, ulid).name == info.name
    }

"""Sets of stored objects, as in the operations of gc. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tensorstore_ck.common.ids import ULID_BYTES, Ulid, split_ulids
from tensorstore_ck.format.sealed import FOLDERS, object_name


class ObjectKey(NamedTuple):
    """One stored object that is named by a ULID."""

    kind: str
    """A key of `FOLDERS`."""
    ulid: Ulid

    @property
    def name(self) -> str:
        """Its name in the store."""
        return object_name(self.kind, self.ulid)


class Objects(frozenset[ObjectKey]):
    """A set of stored objects."""

    def fields(self) -> dict[str, Any]:
        """The fields of an operation on them."""
        return {folder: join_ulids(key.ulid for key in self if key.kind == kind) for kind, folder in FOLDERS.items()}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "Objects":
        """The set of an operation."""
        return cls(ObjectKey(kind, ulid) for kind, folder in FOLDERS.items() for ulid in split_ulids(fields[folder]))


def join_ulids(ulids: Iterable[Ulid]) -> bytes:
    """The ULIDs, sorted and concatenated."""
    return b"".join(sorted(ulids))


def is_ulids(value: object) -> bool:
    """Whether `value` is what `join_ulids` makes."""
    return type(value) is bytes and len(value) % ULID_BYTES == 0


def pieces(objects: Collection[ObjectKey], size: int) -> Iterator[Objects]:
    """The objects in sets of up to `size`, each of which fits into an entry."""
    ordered = sorted(objects)
    for at in range(0, len(ordered), size):
        yield Objects(ordered[at : at + size])

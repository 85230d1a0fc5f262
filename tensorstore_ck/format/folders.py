"""The folders of a store, and the names of the objects that a ULID names."""

from collections.abc import Mapping
from typing import Final

from tensorstore_ck.common.ids import Ulid, ulid_text

FOLDERS: Final[Mapping[str, str]] = {"pack": "packs", "part": "parts", "snapshot": "snapshots", "moved": "moved"}
"""Kind of object -> its folder, which is also the field of a log operation that lists such objects."""

FIXED_FOLDERS: Final = ("checkpoint", *FOLDERS.values(), "writers")
"""The folders of a store's objects, except those of logs: store.json has their names."""


def object_name(kind: str, ulid: Ulid) -> str:
    """The name in the store of an object; `kind` is a key of `FOLDERS`."""
    text = ulid_text(ulid)
    return f"{FOLDERS[kind]}/{text[-2:]}/{text}"

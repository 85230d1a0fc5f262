"""The folders of a store. Other programs may keep folders of their own beside them, which are never listed.

`lost+found` and `.snapshot` need not be readable, and a bucket's root may hold millions of objects.
"""

import re
from collections.abc import Iterator
from typing import Final

from tensorstore_ck.backend.protocol import Backend, ObjectInfo
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.format.sealed import FIXED_FOLDERS, FOLDERS, object_name
from tensorstore_ck.format.writer_record import WRITERS
from tensorstore_ck.log.checkpoint import checkpoint_folder, checkpoint_number

_LOG_FOLDER: Final = re.compile(r"log(?:-[A-Za-z0-9-]+)?")
_ENTRY_PATH: Final = re.compile(r"([0-9]{17})/\1[0-9]{3}")
_KINDS: Final = {folder: kind for kind, folder in FOLDERS.items()}


def store_folders(backend: Backend) -> list[str]:
    """The folders that a store may have, with those of all logs that are there."""
    return [*FIXED_FOLDERS, *_log_folders(backend)]


def store_objects(backend: Backend) -> Iterator[ObjectInfo]:
    """All that is listed in the store's folders, with what else lies in them."""
    for folder in store_folders(backend):
        yield from backend.list(f"{folder}/")


def logs_in(backend: Backend) -> list[str]:
    """The prefixes of the logs that are there, the newest last."""
    return sorted(folder for folder in _log_folders(backend) if any(_is_entry(info.name) for info in backend.list(f"{folder}/")))


def holds_snapshots(backend: Backend) -> bool:
    """Whether there are log entries or snapshot records, as there are without a store.json only if that was lost."""
    return bool(logs_in(backend)) or any(_is_ours(info.name) for info in backend.list(f"{FOLDERS['snapshot']}/"))


def foreign_object(backend: Backend) -> str | None:
    """The first visible object of a store's folder, if no store makes such objects."""
    for folder in store_folders(backend):
        visible = (info.name for info in backend.list(f"{folder}/") if "/." not in info.name)
        first = next(visible, None)
        if first is not None and not _is_ours(first):
            return first
    return None


def _log_folders(backend: Backend) -> list[str]:
    return [folder for folder in backend.folders("log") if _LOG_FOLDER.fullmatch(folder)]


def _is_entry(name: str) -> bool:
    return _ENTRY_PATH.fullmatch(name.partition("/")[2]) is not None


def _is_ours(name: str) -> bool:
    folder, ulid = name.partition("/")[0], parse_ulid(name[-26:])
    if folder in _KINDS:
        return ulid is not None and object_name(_KINDS[folder], ulid) == name
    is_checkpoint = checkpoint_number(name) is not None and (f"{folder}/" == checkpoint_folder("log") or folder.endswith("-checkpoint"))
    return name.startswith(WRITERS) or is_checkpoint or _is_entry(name)

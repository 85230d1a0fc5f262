"""The .ckpt files that Lightning expects: each names a snapshot. They may lie where fsspec reaches."""

import os
from pathlib import Path
from typing import Final

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.errors import InputError
from tensorstore_ck.integrations.trainer.pointers import MAX_BYTES, PointerFiles, SnapshotPointer


def write_pointer(path: str | os.PathLike[str], pointer: SnapshotPointer) -> None:
    """Writes or replaces a pointer, or what Lightning left there."""
    files, place = url_to_fs(str(path))
    if isinstance(files, LocalFileSystem):
        target = Path(place)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():  # a sharded checkpoint of Lightning
            files.rm(place, recursive=True)
        replace_file(target, pointer.encode().encode())
    else:
        files.pipe_file(place, pointer.encode().encode())


def read_pointer(path: str | os.PathLike[str]) -> SnapshotPointer | None:
    """The pointer in a file; None if there is no file, or it is a checkpoint of Lightning. Raises `InputError` if it is neither."""
    try:
        files, place = url_to_fs(str(path))
        if not files.isfile(place):
            return None
        with files.open(place, "rb") as file:
            begin = file.read(MAX_BYTES)
    except (OSError, ValueError, ImportError) as exc:
        raise InputError(f"{path} cannot be read: {exc}", object_id=str(path)) from exc
    return SnapshotPointer.decode(begin, str(path)) if begin.startswith(b"{") else None


def remove_pointer(path: str | os.PathLike[str]) -> None:
    """Removes a pointer if it is there."""
    files, place = url_to_fs(str(path))
    if files.exists(place):
        files.rm(place)


FILES: Final = PointerFiles(read_pointer, write_pointer, remove_pointer)

"""Folders that name a snapshot, where a trainer would write a checkpoint folder."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.errors import InputError
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer

POINTER: Final = "snapshot.json"


def read_pointer(folder: str | os.PathLike[str]) -> SnapshotPointer | None:
    """What a folder names; None if the trainer wrote it. Raises `InputError` if the file cannot be read."""
    path = Path(folder) / POINTER
    try:
        return SnapshotPointer.decode(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise InputError(f"{path} does not name a snapshot: {exc}. Resume from the store by ref@step", object_id=str(path)) from exc


def write_pointer(folder: str | os.PathLike[str], pointer: SnapshotPointer) -> None:
    """Writes or replaces what a folder names."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    replace_file(Path(folder) / POINTER, pointer.encode().encode())


def remove_pointer(folder: str | os.PathLike[str]) -> None:
    """And the folder, unless it has other files: a user may save under one name again and again."""
    (Path(folder) / POINTER).unlink(missing_ok=True)
    with suppress(OSError):
        Path(folder).rmdir()

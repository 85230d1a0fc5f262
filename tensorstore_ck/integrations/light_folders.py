"""Folders that name a snapshot, where a trainer would write a checkpoint folder."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from tensorstore_ck.errors import InputError, StoreError
from tensorstore_ck.integrations.trainer_pointers import SnapshotPointer, replace_file
from tensorstore_ck.session.save import PendingSnapshot

POINTER: Final = "snapshot.json"


def read_pointer(folder: str | os.PathLike[str]) -> SnapshotPointer | None:
    """What a folder names; None if the trainer wrote it.

    Raises:
        InputError: the file cannot be read.
    """
    path = Path(folder) / POINTER
    try:
        return SnapshotPointer.decode(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise InputError(f"{path} does not name a snapshot: {exc}. Resume from the store by ref@step", object_id=str(path)) from exc


def write_pointer(folder: Path, pointer: SnapshotPointer) -> None:
    """Writes or replaces what a folder names."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / POINTER, pointer.encode())


class PendingFolders:
    """Light folders whose saves have not ended."""

    def __init__(self) -> None:
        self._pending: list[tuple[PendingSnapshot, Path, Path | None]] = []

    def add(self, pending: PendingSnapshot, folder: Path, latest: Path | None = None) -> None:
        """Notes a folder; `latest`: a file for its name, which is written once the save has ended well."""
        self._pending.append((pending, folder, latest))

    def finish(self, store: str) -> None:
        """Writes the root into folders whose saves have ended; removes the pointers of those whose saves failed."""
        left = []
        for pending, folder, latest in self._pending:
            if not pending.done():
                left.append((pending, folder, latest))
            elif folder.exists():
                try:
                    pointer = SnapshotPointer(store, pending.wait().root)
                except StoreError:
                    _remove_pointer(folder)  # the Checkpointer has warned
                else:
                    write_pointer(folder, pointer)
                    if latest is not None:
                        replace_file(latest, folder.name)
        self._pending = left


def _remove_pointer(folder: Path) -> None:
    """And the folder, unless it has other files: a user may save under one name again and again."""
    (folder / POINTER).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()

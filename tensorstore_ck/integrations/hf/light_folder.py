"""The folder `checkpoint-N`: small files and the name of a snapshot, in place of the tensors that transformers would write.

transformers looks for these folders by name, reads `trainer_state.json` from them, and deletes them by `save_total_limit`. All that a
resume needs is in the store, so a folder that is lost or left over does no harm.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from transformers.trainer import TRAINER_STATE_NAME

from tensorstore_ck.errors import InputError, StoreError
from tensorstore_ck.session.save import PendingSnapshot

POINTER: Final = "snapshot.json"


class SnapshotPointer(NamedTuple):
    """What a light folder names."""

    store: str
    """URL, without credentials."""
    address: str
    """``ref@step``; or, once the save has ended, the root."""


def write_folder(folder: Path, pointer: SnapshotPointer, trainer_state: str) -> None:
    """Writes or replaces a light folder's files, each at once."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / TRAINER_STATE_NAME, trainer_state)
    write_pointer(folder, pointer)


def write_pointer(folder: Path, pointer: SnapshotPointer) -> None:
    """Writes or replaces what a light folder names."""
    _replace(folder / POINTER, json.dumps(pointer._asdict(), indent=2))


class PendingFolders:
    """Light folders whose saves have not ended."""

    def __init__(self) -> None:
        self._pending: list[tuple[PendingSnapshot, Path]] = []

    def add(self, pending: PendingSnapshot, folder: Path) -> None:
        """Notes a folder."""
        self._pending.append((pending, folder))

    def finish(self, store: str) -> None:
        """Writes the root into folders whose saves have ended; deletes those whose saves failed."""
        left = []
        for pending, folder in self._pending:
            if not pending.done():
                left.append((pending, folder))
            elif folder.exists():
                try:
                    pointer = SnapshotPointer(store, pending.wait().root)
                except StoreError:
                    shutil.rmtree(folder, ignore_errors=True)  # the Checkpointer has warned
                else:
                    write_pointer(folder, pointer)
        self._pending = left


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def read_pointer(folder: str | os.PathLike[str]) -> SnapshotPointer | None:
    """What a folder names; None if transformers wrote it.

    Raises:
        InputError: the file cannot be read.
    """
    path = Path(folder) / POINTER
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return SnapshotPointer(str(found["store"]), str(found["address"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(f"{path} does not name a snapshot: {exc}. Resume from the store by ref@step", object_id=str(path)) from exc

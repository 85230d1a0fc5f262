"""The folder `checkpoint-N`: small files and the name of a snapshot, in place of the tensors that transformers would write.

transformers looks for these folders by name, reads `trainer_state.json` from them, and deletes them by `save_total_limit`.
"""

import os
from pathlib import Path
from typing import Final

from transformers.trainer import TRAINER_STATE_NAME

from tensorstore_ck.errors import InputError
from tensorstore_ck.integrations.trainer_pointers import SnapshotPointer, replace_file

POINTER: Final = "snapshot.json"


def write_folder(folder: Path, pointer: SnapshotPointer, trainer_state: str) -> None:
    """Writes or replaces a light folder's files, each at once."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / TRAINER_STATE_NAME, trainer_state)
    write_pointer(folder, pointer)


def write_pointer(folder: Path, pointer: SnapshotPointer) -> None:
    """Writes or replaces what a light folder names."""
    replace_file(folder / POINTER, pointer.encode())


def read_pointer(folder: str | os.PathLike[str]) -> SnapshotPointer | None:
    """What a folder names; None if transformers wrote it.

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

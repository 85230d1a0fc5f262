"""The folder `checkpoint-N`: the name of a snapshot and `trainer_state.json`, in place of the tensors that transformers would write.

transformers looks for these folders by name, reads `trainer_state.json` from them, and deletes them by `save_total_limit`.
"""

from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from tensorstore_ck.integrations.light_folders import read_pointer, write_pointer
from tensorstore_ck.integrations.trainer_pointers import SnapshotPointer, replace_file


def write_folder(folder: Path, pointer: SnapshotPointer, trainer_state: str) -> None:
    """Writes or replaces a light folder's files, each at once."""
    write_pointer(folder, pointer)  # first: a kill before the second file must not leave what looks like a folder of transformers
    replace_file(folder / TRAINER_STATE_NAME, trainer_state)


def is_native(folder: str) -> bool:
    """Whether transformers wrote the whole folder: `trainer_state.json` is its last file."""
    return read_pointer(folder) is None and (Path(folder) / TRAINER_STATE_NAME).exists()

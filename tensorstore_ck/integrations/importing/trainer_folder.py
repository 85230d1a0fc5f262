"""A folder of transformers' Trainer, such as ``checkpoint-500``: its ``trainer_state.json``, and the small files of the model."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.safetensors_file import parse_json
from tensorstore_ck.integrations.model_file_names import MAX_FILE_BYTES, is_model_file
from tensorstore_ck.integrations.safetensors_format import MAX_HEADER_BYTES

STATE: Final = "trainer_state.json"
ARGUMENTS: Final = "training_args.bin"
SKIPPED_ARGUMENTS: Final = "the TrainingArguments, a pickled object; nothing in a checkpoint is run"
POINTER: Final = "snapshot.json"
"""A file in the folders that tensorstore_ck.hf.Trainer writes, which have no weights."""
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")


def read_trainer_state(files: Files, folder: Folder, known: PickleAllowlist) -> tuple[dict[str, Any], int]:
    """The content of ``trainer_state.json``, and the step in it. Raises `CorruptObjectError` if it is damaged, or has no step."""
    file = files.map(folder.join(STATE))
    with naming_file(file.path, "state of transformers' Trainer"):
        if file.size > MAX_HEADER_BYTES:
            raise MalformedError(f"it has {file.size} bytes")
        state = parse_json(bytes(file.data), allow_constants=True)  # the loss of a diverged run
        step = state.get("global_step") if type(state) is dict else None
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise MalformedError("it has no global_step")
        known.parsed_bytes += file.size
        return state, step


def read_model_files(files: Files, folder: Folder, names: Sequence[str]) -> dict[str, bytes]:
    """Configuration, generation configuration and tokenizer, by name."""
    small_files = {}
    for name in names:
        if is_model_file(name) and folder.has(name):
            file = files.map(folder.join(name))
            if file.size > MAX_FILE_BYTES:
                raise UnsupportedValueError(
                    f"{file.path} has {file.size:,} bytes, and at most {MAX_FILE_BYTES:,} are imported: move it elsewhere",
                    object_id=file.path,
                )
            small_files[name] = bytes(file.data)
            files.drop(file)
    return small_files


def checkpoints_in(folder: Folder, names: Sequence[str]) -> Mapping[str, int]:
    """The Trainer's checkpoint folders in its ``output_dir`` -> their steps."""
    folders = {name: match for name in names if (match := _CHECKPOINT.fullmatch(name))}
    return {name: int(match[1]) for name, match in folders.items() if os.path.isfile(os.path.join(folder.path, name, STATE))}

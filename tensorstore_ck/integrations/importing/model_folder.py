"""Folders of Hugging Face: weights in several files with an index, and the folder of a transformers' Trainer.

Like their own readers it imports everything in the files that the index names; unlike those it rejects an index that does not match them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder, MappedFile
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState
from tensorstore_ck.integrations.importing.safetensors_file import is_safetensors, load_safetensors, parse_json
from tensorstore_ck.integrations.importing.torch_file import is_torch_file, load_torch_file
from tensorstore_ck.integrations.model_folder_format import MAX_FILE_BYTES, MAX_HEADER_BYTES, is_model_file

SUFFIX: Final = ".index.json"
KIND: Final = "index of a checkpoint"


def is_index(file: MappedFile) -> bool:
    """Whether it begins like a JSON object."""
    return bytes(file.data[:64]).lstrip()[:1] == b"{" and file.size <= MAX_HEADER_BYTES


def load_indexed(files: Files, folder: Folder, index: MappedFile, known: PickleAllowlist) -> FoundState:
    """The state in the files that an index names, with the metadata that all of them have in common.

    Raises:
        CorruptObjectError: a file is damaged, or does not match the index; or none exists.
        InvalidNameError: the index names a file outside of its folder.
    """
    with naming_file(index.path, KIND):
        document = parse_json(bytes(index.data))
        files_of = document.get("weight_map") if type(document) is dict else None
        if type(files_of) is not dict or not files_of:
            raise MalformedError("it has no weight_map")
        names: dict[str, set[str]] = {}
        for name, part_name in files_of.items():
            if type(part_name) is not str:
                raise MalformedError("its weight_map has a file name that is not text")
            names.setdefault(part_name, set()).add(name)
        state: dict[Any, Any] = {}
        metadata: dict[str, str] | None = None
        unknown: dict[str, str] = {}
        found_at = {part_name: path for part_name in sorted(names) if (path := folder.find(part_name)) is not None}
        missing = tuple(sorted(names.keys() - found_at.keys()))
        if not found_at:
            folder.join(missing[0])  # raises
        for part_name, path in found_at.items():
            file = files.map(path)
            part, described = _load(files, file, known, unknown)
            lacking = sorted(names[part_name] - part.keys())
            if lacking:
                raise MalformedError(f"it lists {printable(lacking[0])!r} in {printable(part_name)}, which lacks it")
            twice = state.keys() & part.keys()
            if twice:
                raise MalformedError(f"two of its files have {printable(min(map(str, twice)))!r}")
            state.update(part)
            metadata = described if metadata is None else dict(metadata.items() & described.items())
        what, common = f"{len(found_at)} files with an index", dict(sorted((metadata or {}).items()))
        return FoundState(what, state, common, unknown, files=tuple(found_at), missing=missing)


def _load(files: Files, file: MappedFile, known: PickleAllowlist, unknown: dict[str, str]) -> tuple[dict[Any, Any], dict[str, str]]:
    if is_safetensors(file):
        content = load_safetensors(file)
        known.parsed_bytes += content.header_bytes
        return dict(content.tensors), content.metadata
    if not is_torch_file(file):
        raise UnsupportedValueError(f"{file.path}, which an index names, is not a safetensors or torch file", object_id=file.path)
    loaded = load_torch_file(files, file, known)
    unknown.update(dict.fromkeys(loaded.unknown, file.path))
    if not isinstance(loaded.value, dict):
        raise MalformedError(f"{file.path} is not a dict of tensors")
    return loaded.value, {}


STATE: Final = "trainer_state.json"
ARGUMENTS: Final = "training_args.bin"
SKIPPED_ARGUMENTS: Final = "the TrainingArguments, a pickled object; nothing in a checkpoint is run"
POINTER: Final = "snapshot.json"
"""A file in the folders that tensorstore_ck.hf.Trainer writes, which have no weights."""
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")


class TrainerValues(NamedTuple):
    """The values in its JSON."""

    state: dict[str, Any]
    step: int
    size_bytes: int


def read_trainer_state(files: Files, folder: Folder) -> TrainerValues:
    """The content of ``trainer_state.json``. Raises `CorruptObjectError` if it is damaged, or has no step."""
    file = files.map(folder.join(STATE))
    with naming_file(file.path, "state of transformers' Trainer"):
        if file.size > MAX_HEADER_BYTES:
            raise MalformedError(f"it has {file.size} bytes")
        state = parse_json(bytes(file.data), allow_constants=True)  # the loss of a diverged run
        step = state.get("global_step") if type(state) is dict else None
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise MalformedError("it has no global_step")
        return TrainerValues(state, step, file.size)


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

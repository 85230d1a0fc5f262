"""Folders of Megatron-core's `dist_checkpointing` in the format torch_dist, such as Megatron-LM's ``iter_0001000``. Needs no Megatron.

A DCP checkpoint of sharded tensors and objects by their keys, and ``common.pt``, or since Megatron-core 0.19 one more object, with
everything else. The state is the one that `tensorstore_ck.megatron` saves: a flat dict of these keys, and the rest below "common".
"""

import os
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.importing.dcp_folder import METADATA, DcpContent, load_dcp
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder
from tensorstore_ck.integrations.importing.megatron_types import megatron_types
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState
from tensorstore_ck.integrations.importing.safetensors_file import parse_json
from tensorstore_ck.integrations.importing.torch_file import load_torch_file
from tensorstore_ck.integrations.megatron_layout import COMMON, COMMON_OBJECT, is_object_key

CONFIG: Final = "metadata.json"
"""Written last: a folder without it is of a save that did not end."""
COMMON_FILE: Final = "common.pt"
TRACKER: Final = "latest_checkpointed_iteration.txt"
_BACKENDS: Final = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_ITERATION: Final = re.compile(r"iter_(\d{7,18})")
_OLD: Final = re.compile(r"mp_rank_\d+.*")
_MAX_JSON_BYTES: Final = 1 << 16


def load_megatron(files: Files, folder: Folder, names: Sequence[str], known: PickleAllowlist) -> FoundState | None:
    """The state in a folder of Megatron, or in the newest one that it names; None for any other folder."""
    if TRACKER in names and METADATA not in names:
        folder = _newest(files, folder)
        names = folder.names()
    elif not ((METADATA in names or CONFIG in names) and (COMMON_FILE in names or _has_config(files, folder))):
        return None
    config = _require_format(files, folder, names)
    known.allow(megatron_types())
    content = load_dcp(files, folder, known)
    for path, left in content.left.items():
        if left:  # Megatron writes nothing between the items of a file
            raise CorruptObjectError(
                f"{path} has {left} bytes that {METADATA} does not name: the two are of different saves; get the folder of one save",
                object_id=path,
            )
    state, unknown = _state(folder, content), content.unknown
    read = {METADATA, CONFIG, *(os.path.basename(path) for path in content.left)}
    if "common_backend" not in config and COMMON_OBJECT in state:  # Megatron-core 0.19 wrote the object; a common.pt is of an older save
        source, common = METADATA, state.pop(COMMON_OBJECT)
    elif COMMON_FILE in names:
        common, names_in_it = load_torch_file(files, files.map(folder.join(COMMON_FILE)), known)
        source, unknown = COMMON_FILE, {**unknown, **dict.fromkeys(names_in_it, os.path.join(folder.path, COMMON_FILE))}
        read.add(COMMON_FILE)
    else:
        _incomplete(folder, COMMON_FILE)
    step = _step(folder, source, common)
    skipped = tuple((name, f"not named by {METADATA}") for name in names if name not in read)
    return FoundState("checkpoint of Megatron", {**state, COMMON: common}, {}, unknown, step=step, skipped=skipped)


def _newest(files: Files, folder: Folder) -> Folder:
    """The checkpoint that Megatron-LM would load."""
    file = files.map(folder.join(TRACKER))
    with naming_file(file.path, "name of an iteration"):
        text = bytes(file.data[:64]).decode("ascii", "replace").strip()
        if text != "release" and not re.fullmatch(r"\d{1,18}", text):
            raise MalformedError(f"it has {printable(text, 40)!r}, which is neither a number nor 'release'")
    name = text if text == "release" else f"iter_{int(text):07}"
    path = folder.find(name)
    if path is None or not os.path.isdir(path):
        raise CorruptObjectError(f"{file.path} names {name}, which is not there: import another folder by its path", object_id=name)
    return Folder(path)


def _has_config(files: Files, folder: Folder) -> bool:
    """Whether a ``metadata.json`` is Megatron's."""
    if not folder.has(CONFIG):
        return False
    return b'"sharded_backend"' in bytes(files.map(folder.join(CONFIG)).data[:_MAX_JSON_BYTES])


def _require_format(files: Files, folder: Folder, names: Sequence[str]) -> dict[Any, Any]:
    old = next(filter(_OLD.fullmatch, names), None)
    if CONFIG not in names and old:
        raise UnsupportedValueError(
            f"{folder.path} has {old}, as Megatron-LM's format 'torch' does: convert it with Megatron-LM, which loads it with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save DIR, and import DIR",
            object_id=folder.path,
        )
    if CONFIG not in names:
        _incomplete(folder, CONFIG)
    path = folder.join(CONFIG)
    with naming_file(path, "description of a checkpoint of Megatron"):
        file = files.map(path)
        if file.size > _MAX_JSON_BYTES:
            raise MalformedError(f"it has {file.size} bytes")
        config = parse_json(bytes(file.data))
        if type(config) is not dict or "sharded_backend" not in config:
            raise MalformedError("it names no sharded_backend")
    others = [f"{key} {printable(config[key], 40)!r}" for key, value in _BACKENDS.items() if config.get(key, value) != value]
    if config["sharded_backend"] == "tsck":
        raise UnsupportedValueError(
            f"{folder.path} was saved by tensorstore_ck.megatron: its state is in the store that its snapshot.json names already",
            object_id=folder.path,
        )
    if others:
        raise UnsupportedValueError(
            f"{path} names {' and '.join(others)}, and only {_BACKENDS['sharded_backend']!r} of version 1 is supported: load it with "
            "Megatron, and save it with --ckpt-format torch_dist",
            object_id=path,
        )
    if METADATA not in names:
        _incomplete(folder, METADATA)
    return config


def _incomplete(folder: Folder, missing: str) -> NoReturn:
    raise CorruptObjectError(
        f"{folder.path} has no {missing}: its save did not end, or the file was lost; get the whole folder, or import an earlier iteration",
        object_id=folder.path,
    )


def _step(folder: Folder, source: str, common: Any) -> int | None:
    """`source`: the file that has the common state."""
    if type(common) is not dict:
        path = os.path.join(folder.path, source)
        raise CorruptObjectError(f"the common state in {path} is not a dict, as Megatron writes it: get or save it again", object_id=path)
    step = common.get("iteration")
    is_step = type(step) is int and 0 <= step <= MAX_STEP
    named = _ITERATION.fullmatch(os.path.basename(os.path.realpath(folder.path)))
    if is_step and named and int(named[1]) != step:
        raise CorruptObjectError(
            f"{folder.path} is named after iteration {int(named[1])}, and its {source} is of iteration {step}: the files are of "
            "different saves, or somebody renamed the folder; get the folder of one save, or give it its name",
            object_id=folder.path,
        )
    return step if is_step else None


def _state(folder: Folder, content: DcpContent) -> dict[Any, Any]:
    if content.attributes.get("mcore_data"):
        raise UnsupportedValueError(
            f"{folder.path} has flattened tensors, as older optimizers of Megatron-core saved them: load it with the "
            "version that wrote it, and save it without the optimizer, or in one of its layouts of whole parameters",
            object_id=folder.path,
        )
    state: dict[Any, Any] = {}
    for key, value in content.state.items():
        if key == COMMON:
            raise UnsupportedValueError(f"{folder.path} has a tensor with the key {key!r}, which means something else here", object_id=key)
        if is_object_key(key):
            if type(value) is not list or len(value) != 1:
                raise CorruptObjectError(f"{folder.path}: the object {printable(key)!r} is not one object", object_id=printable(key))
            (value,) = value
        state[key] = value
    return state

"""Detects the format at a path, by content and never by name, and reads it with the format's reader."""

import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import AmbiguousAddressError, CorruptObjectError, NotFoundError, UnsupportedValueError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.importing import dcp_folder, dcp_safetensors, megatron_folder, sharded_index, trainer_folder
from tensorstore_ck.integrations.importing.deepspeed.folder import find_tag_folder, load_deepspeed
from tensorstore_ck.integrations.importing.deepspeed.trainers import is_accelerate, load_accelerate, load_trainer
from tensorstore_ck.integrations.importing.detect_history import SeveralStepsError, require_one_step
from tensorstore_ck.integrations.importing.malformed import printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder, MappedFile
from tensorstore_ck.integrations.importing.numbers_in_names import missing_files
from tensorstore_ck.integrations.importing.outside_importers import read_by_outside_importer
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState
from tensorstore_ck.integrations.importing.safetensors_file import is_safetensors, load_safetensors
from tensorstore_ck.integrations.importing.torch_file import is_torch_file, load_torch_file
from tensorstore_ck.integrations.model_file_names import MODEL_FILES

LIGHTNING_VERSION: Final = "pytorch-lightning_version"
_LIGHTNING_META: Final = "meta.pt"
_NO_METADATA: Final = "a folder without a .metadata"
_FORMATS: Final = (
    "a torch file, a Lightning checkpoint, a safetensors file, a folder or index of such files, a DCP folder, or a folder of DeepSpeed or "
    "Megatron"
)


def find_state(files: Files, path: str, known: PickleAllowlist, *, as_one: bool = False) -> FoundState:
    """The state at a path. `as_one`: treat the checkpoints in a folder as one state even if they have several steps.

    Raises:
        SeveralStepsError: the folder has checkpoints of several steps.
        NotFoundError: there is no checkpoint.
        UnsupportedValueError: its format is unknown.
        CorruptObjectError: it is damaged, incomplete or inconsistent.
    """
    outside = read_by_outside_importer(path) if os.path.exists(path) else None
    if outside is not None:
        name, content = outside
        files.newest_ns = os.stat(path).st_mtime_ns
        return FoundState(format=name, state=content.state, metadata=content.metadata, unknown={}, step=content.step)
    if os.path.basename(path) == dcp_folder.METADATA:
        path = os.path.dirname(path) or "."
    if os.path.isdir(path):
        return _with_lightning(_in_folder(files, Folder(path), known, as_one=as_one))
    state = _in_file(files, files.map(path), known)
    others = ("the files of the other ranks",) if dcp_safetensors.OFFSETS in state.metadata else missing_files([os.path.basename(path)])
    return _with_lightning(state._replace(missing=state.missing or others))


def _in_file(files: Files, file: MappedFile, known: PickleAllowlist) -> FoundState:
    if not file.size:
        raise CorruptObjectError(f"{file.path} is empty: get or save it again", object_id=file.path)
    if is_safetensors(file):
        content = load_safetensors(file)
        known.parsed_bytes += content.header_bytes
        return FoundState("safetensors file", content.tensors, content.metadata, {})
    if is_torch_file(file):
        value, unknown = load_torch_file(files, file, known)
        return FoundState("torch file", value, {}, unknown)
    if sharded_index.is_index(file):
        return sharded_index.load_indexed(files, Folder(os.path.dirname(file.path) or "."), file, known)
    if bytes(file.data[257:262]) == b"ustar":
        raise UnsupportedValueError(
            f"{file.path} is a tar archive: unpack it; if torch 0.1 wrote it, load it with torch, and save it again", object_id=file.path
        )
    if bytes(file.data[:1]) == b"\x80":
        raise UnsupportedValueError(
            f"{file.path} is a pickle, but not of torch.save: load it where you trust it, and save it with torch.save", object_id=file.path
        )
    raise UnsupportedValueError(f"{file.path} has no supported format: give {_FORMATS}", object_id=file.path)


def _in_folder(files: Files, folder: Folder, known: PickleAllowlist, *, as_one: bool) -> FoundState:
    names = folder.names()
    if (megatron := megatron_folder.load_megatron(files, folder, names, known)) is not None:
        return megatron
    if dcp_folder.METADATA in names:
        return _dcp(files, folder, known)
    if any(name.startswith("__") and name.endswith(dcp_folder.METADATA) for name in names):
        raise UnsupportedValueError(
            f"{folder.path} was saved with use_collectives=False, as a part for each rank, which is not supported: load it with DCP",
            object_id=folder.path,
        )
    tag_folder = find_tag_folder(folder, names)
    if folder.has(trainer_folder.STATE):
        if tag_folder is None:
            return _trainer(files, folder, names, known)
        return load_trainer(files, folder=folder, names=names, tag_folder=tag_folder, known=known)
    if tag_folder is not None and tag_folder != folder.path and is_accelerate(names):
        return load_accelerate(files, folder=folder, names=names, tag_folder=tag_folder, known=known)
    if tag_folder is not None:
        return load_deepspeed(files, tag_folder, known)[0]
    indexes = [name for name in names if name.endswith(sharded_index.SUFFIX)]
    indexes = [name for name in indexes if name.endswith(f".safetensors{sharded_index.SUFFIX}")] or indexes
    if len(indexes) > 1:
        raise AmbiguousAddressError(
            f"{folder.path} has several indexes: use the path of one of {', '.join(indexes)}", object_id=folder.path
        )
    if indexes:
        model = sharded_index.load_indexed(files, folder, files.map(folder.join(indexes[0])), known)
        others = [name for name in names if name not in (*indexes, *model.files)]
        return model._replace(skipped=tuple((name, f"not named by {indexes[0]}; give its path to import it") for name in others))
    if (sharded := dcp_safetensors.load_sharded(files, folder, names, known)) is not None:
        return sharded
    return _members(files, folder, names, known, as_one=as_one)


def _dcp(files: Files, folder: Folder, known: PickleAllowlist) -> FoundState:
    content = dcp_folder.load_dcp(files, folder, known)
    if not folder.has(_LIGHTNING_META):
        return FoundState("DCP checkpoint", content.state, {}, content.unknown)
    file = files.map(folder.join(_LIGHTNING_META))
    value, unknown = load_torch_file(files, file, known)
    if not isinstance(value, dict):
        raise CorruptObjectError(f"{file.path} is not a dict, as Lightning writes it: get or save it again", object_id=file.path)
    return FoundState("DCP checkpoint of Lightning", {**content.state, **value}, {}, {**content.unknown, **unknown})


class _Members(NamedTuple):
    found: dict[str, FoundState]
    skipped: list[tuple[str, str]]

    def state(self) -> dict[str, Any]:
        """Each under its name, without suffixes if that is clear."""
        stems = {name: os.path.splitext(name)[0] for name in self.found}
        is_clear = len(set(stems.values())) == len(stems)
        return {stems[name] if is_clear else name: member.state for name, member in self.found.items()}

    def missing(self) -> tuple[str, ...]:
        own = missing_files(name for name, member in self.found.items() if not member.missing)
        return tuple(name for member in self.found.values() for name in member.missing) + own

    def with_state(self, format: str, state: Any, step: int | None = None) -> FoundState:  # noqa: A002
        """What was found of all of them, with `state`."""
        unknown = {name: path for member in self.found.values() for name, path in member.unknown.items()}
        return FoundState(format, state, {}, unknown, step=step, skipped=tuple(self.skipped), missing=self.missing())


def _read_members(files: Files, folder: Folder, names: Sequence[str], known: PickleAllowlist) -> _Members:
    states: dict[str, FoundState] = {}
    skipped = []
    for name in names:
        path = os.path.join(folder.path, name)
        if os.path.isfile(os.path.join(path, dcp_folder.METADATA)):
            states[name] = _dcp(
                files, Folder(folder.join(os.path.join(name, dcp_folder.METADATA)).removesuffix(dcp_folder.METADATA)), known
            )
        elif os.path.isdir(path):
            skipped.append((name, _NO_METADATA))
        elif name == trainer_folder.ARGUMENTS:
            skipped.append((name, trainer_folder.SKIPPED_ARGUMENTS))
        else:
            file = files.map(folder.join(name))
            if is_safetensors(file) or is_torch_file(file):
                states[name] = _in_file(files, file, known)
            else:
                files.drop(file)
                skipped.append((name, "not a checkpoint"))
    return _Members(states, skipped)


def _members(files: Files, folder: Folder, names: list[str], known: PickleAllowlist, *, as_one: bool) -> FoundState:
    """A folder of several checkpoints, such as accelerate's: each under its own name."""
    members = _read_members(files, folder, names, known)
    states, skipped = members
    if not states:
        steps = trainer_folder.checkpoints_in(folder, names)
        if len(steps) > 1:
            raise SeveralStepsError(folder.path, steps, "name", names, can_be_one=False)
        below = [printable(name) for name, why in skipped if why == _NO_METADATA]
        inside = f" (the folders in it are not searched: give one of {listed(below)}, or one in it)" if below else ""
        hint = f"import {os.path.join(folder.path, *steps)}" if steps else f"give {_FORMATS}{inside}"
        raise NotFoundError(f"{folder.path} has no checkpoint of a supported format: {hint}", object_id=folder.path)
    if len(states) == 1:
        (only,) = states.values()
        return only._replace(skipped=tuple(skipped), missing=members.missing())
    if not as_one:
        require_one_step(folder.path, {name: member.state for name, member in states.items()}, names)
    return members.with_state(f"folder of {len(states)} checkpoints", members.state())


def _trainer(files: Files, folder: Folder, names: list[str], known: PickleAllowlist) -> FoundState:
    """A checkpoint folder of transformers' Trainer: each file under its own name, and the small files of the model together."""
    trainer_state, step = trainer_folder.read_trainer_state(files, folder, known)
    small = trainer_folder.read_model_files(files, folder, names)
    taken = {trainer_folder.STATE, *small}
    sharded: dict[str, FoundState] = {}
    for name in (name for name in names if name.endswith(sharded_index.SUFFIX)):
        indexed = sharded_index.load_indexed(files, folder, files.map(folder.join(name)), known)
        sharded[name.removesuffix(sharded_index.SUFFIX)] = indexed  # ``model.safetensors``
        taken |= {name, *indexed.files}
    members = _read_members(files, folder, [name for name in names if name not in taken], known)
    members = members._replace(found={**sharded, **members.found})
    if not members.found:
        raise NotFoundError(
            f"{folder.path} has a {trainer_folder.STATE}, and no weights: give another folder. (Of a folder with a "
            f"{trainer_folder.POINTER} the weights are in the store that this file names.)",
            object_id=folder.path,
        )
    state = {**members.state(), "trainer_state": trainer_state, **({MODEL_FILES: small} if small else {})}
    return members.with_state("checkpoint folder of transformers' Trainer", state, step)


def _with_lightning(found: FoundState) -> FoundState:
    state = found.state
    if not isinstance(state, dict) or type(state.get(LIGHTNING_VERSION)) is not str:
        return found
    step = state.get("global_step")
    metadata: dict[str, object] = {LIGHTNING_VERSION: state[LIGHTNING_VERSION]}
    if type(state.get("epoch")) is int:
        metadata["epoch"] = state["epoch"]
    is_step = type(step) is int and 0 <= step <= MAX_STEP
    kind = found.format if "Lightning" in found.format else "Lightning checkpoint"
    return found._replace(format=kind, metadata={**metadata, **found.metadata}, step=step if is_step else None)

"""Detects the format at a path, by content and never by name, and reads it: by the format's reader, or an importer of another package.

An importer is a function of a path, found by the entry point ``tensorstore_ck.importers`` (CONTRIBUTING.md has a template). It returns None
for what is not its format, and else the state: it is asked before the formats here. It runs with the rights of the user, who has
installed it.

A folder of one checkpoint (of several ranks, or of model, optimizer and schedule) is distinguished from one of several training steps,
which must not become one snapshot: that has steps in its file names, or different values of a usual counter (``global_step``) in files
with the same keys.
"""

import fnmatch
import glob
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, NamedTuple

from tensorstore_ck.errors import AmbiguousAddressError, CorruptObjectError, NotFoundError, StoreError, UnsupportedValueError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.importing import dcp_folder, megatron_folder, model_folder
from tensorstore_ck.integrations.importing.deepspeed.folder import find_tag_folder, load_deepspeed
from tensorstore_ck.integrations.importing.deepspeed.trainers import is_accelerate, load_accelerate, load_trainer
from tensorstore_ck.integrations.importing.lookup import top_level_step
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder, MappedFile
from tensorstore_ck.integrations.importing.numbers_in_names import missing_files, progress_in_names, step_in_name
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState
from tensorstore_ck.integrations.importing.safetensors_file import is_safetensors, load_safetensors
from tensorstore_ck.integrations.importing.torch_file import is_torch_file, load_torch_file
from tensorstore_ck.integrations.model_folder_format import MODEL_FILES

_COUNTERS: Final = ("global_step", "global_steps", "step", "steps", "current_step", "iteration", "iter", "iter_num", "iters", "epoch")


class SeveralStepsError(AmbiguousAddressError):
    """A folder has checkpoints of several steps: they are a history, not one snapshot."""

    def __init__(self, folder: str, steps: Mapping[str, int], step_from: str, all_names: Sequence[str], *, can_be_one: bool = True) -> None:
        """`steps`: file name -> step, according to `step_from`. `can_be_one`: they can be imported as one snapshot."""
        by_step: dict[int, str] = {}
        same = next(((by_step[step], name) for name, step in steps.items() if by_step.setdefault(step, name) != name), None)
        first, last = min(steps, key=lambda name: steps[name]), max(steps, key=lambda name: steps[name])
        self._what = (
            f"{folder} has checkpoints of several steps ({first}: {steps[first]}, {last}: {steps[last]}), which are not one snapshot"
        )
        self._same = same
        self._otherwise = "; --as-one (as_one=True) imports all files as one snapshot" if can_be_one else ""
        self._patterns = [] if same else _patterns(list(steps), all_names)
        self._names = [] if same or self._patterns else list(steps)
        self.step_from = step_from
        command = ["tsck", "import", "--history", *self.paths(folder), "--step-from", step_from, "--ref", "REF"]
        super().__init__(self.message(shlex.join(command)), object_id=folder)

    def paths(self, folder: str) -> list[str]:
        """Globs or paths for exactly those files, with `folder` as the caller writes it; empty if two have the same step."""
        patterns = [os.path.join(glob.escape(folder), pattern) for pattern in self._patterns]
        return patterns or [os.path.join(folder, name) for name in self._names]

    def message(self, command: str) -> str:
        """The error message, with `command`, which imports them as a history."""
        if self._same:
            one, other = self._same
            return (
                f"{self._what}. {one} and {other} have the same step: move the files of each step to a separate folder, "
                f"or remove one of them, and import the rest with --history{self._otherwise}"
            )
        return f"{self._what}: import them one by one with `{command}` (tsck.import_history in Python){self._otherwise}"


def require_one_step(folder: str, states: Mapping[str, Any], all_names: Sequence[str]) -> None:
    """Rejects a folder of checkpoints, by name, of several steps. Raises `SeveralStepsError` if there are several steps."""
    named = {name: step for name in states if (step := step_in_name(name)) is not None}
    if len(set(named.values())) > 1:
        raise SeveralStepsError(folder, named, "name", all_names)
    alike: dict[frozenset[object], list[str]] = {}
    for name, state in states.items():
        if isinstance(state, Mapping):
            alike.setdefault(frozenset(key for key in state if isinstance(key, str)), []).append(name)
    for keys, members in alike.items():
        if 2 * len(members) <= len(states):  # for example two objects of one class, among the files of one step
            continue
        for key in _COUNTERS:
            steps = {name: step for name in members if key in keys and (step := top_level_step(states[name], key)) is not None}
            if len(set(steps.values())) > 1:
                raise SeveralStepsError(folder, steps, f"key:{key}", all_names)
    counted = progress_in_names(list(states))
    if counted:
        raise SeveralStepsError(folder, counted, "name", all_names)


def _patterns(chosen: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """A simple glob that matches exactly these files of a folder, if there is one."""
    visible = [name for name in all_names if not name.startswith(".")]
    suffixes = {os.path.splitext(name)[1] for name in chosen}
    suffix = glob.escape(suffixes.pop()) if len(suffixes) == 1 else ""
    prefix = glob.escape(os.path.commonprefix(list(chosen)).rstrip("0123456789"))  # noqa: RUF071 - of names, not paths
    return [pattern for pattern in (f"*{suffix}", f"{prefix}*{suffix}") if set(fnmatch.filter(visible, pattern)) == set(chosen)][:1]


GROUP: Final = "tensorstore_ck.importers"


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """The result of another package's importer for a path."""

    state: Any
    """Any nesting of dicts, lists and tuples with tensors, numpy arrays and plain values."""
    step: int | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Noted in the snapshot's metadata."""


Importer = Callable[[str], ForeignCheckpoint | None]


def read_by_outside_importer(path: str) -> tuple[str, ForeignCheckpoint] | None:
    """The name of the first importer that knows the format at `path`, and what it read; None: no importer does.

    Raises:
        UnsupportedValueError: an importer failed, or returned something else.
    """
    for point in sorted(entry_points(group=GROUP)):
        try:
            importer: Importer = point.load()
            found = importer(path)
        except StoreError:
            raise
        except Exception as exc:  # BLE: code of another package raises anything
            raise UnsupportedValueError(
                f"the importer {point.name!r} ({point.value}) failed on {path}: {type(exc).__name__}: {exc}. Report it to its package, or "
                "uninstall that",
                object_id=point.name,
            ) from exc
        if found is not None and not isinstance(found, ForeignCheckpoint):
            raise UnsupportedValueError(
                f"the importer {point.name!r} ({point.value}) returned a {type(found).__name__}, not a ForeignCheckpoint or None",
                object_id=point.name,
            )
        if found is not None:
            return point.name, found
    return None


LIGHTNING_VERSION: Final = "pytorch-lightning_version"
_LIGHTNING_META: Final = "meta.pt"
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
    is_folder = os.path.isdir(path)
    if is_folder:
        return _with_lightning(_in_folder(files, Folder(path), known, as_one=as_one))
    state = _in_file(files, files.map(path), known)
    others = ("the files of the other ranks",) if dcp_folder.OFFSETS in state.metadata else missing_files([os.path.basename(path)])
    return _with_lightning(state._replace(missing=state.missing or others))


def _in_file(files: Files, file: MappedFile, known: PickleAllowlist) -> FoundState:
    if not file.size:
        raise CorruptObjectError(f"{file.path} is empty: get or save it again", object_id=file.path)
    if is_safetensors(file):
        content = load_safetensors(file)
        known.parsed_bytes += content.header_bytes
        return FoundState("safetensors file", content.tensors, content.metadata, {})
    if is_torch_file(file):
        loaded = load_torch_file(files, file, known)
        return FoundState("torch file", loaded.value, {}, dict.fromkeys(loaded.unknown, file.path))
    if model_folder.is_index(file):
        return model_folder.load_indexed(files, Folder(os.path.dirname(file.path) or "."), file, known)
    if bytes(file.data[257:262]) == b"ustar":
        raise UnsupportedValueError(
            f"{file.path} is a tar archive: unpack it; if torch 0.1 wrote it, load it with torch, and save it again", object_id=file.path
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
    if folder.has(model_folder.STATE):
        if tag_folder is None:
            return _trainer(files, folder, names, known)
        return load_trainer(files, folder=folder, names=names, tag_folder=tag_folder, known=known)
    if tag_folder is not None and tag_folder != folder.path and is_accelerate(names):
        return load_accelerate(files, folder=folder, names=names, tag_folder=tag_folder, known=known)
    if tag_folder is not None:
        return load_deepspeed(files, tag_folder, known).found
    indexes = [name for name in names if name.endswith(model_folder.SUFFIX)]
    indexes = [name for name in indexes if name.endswith(f".safetensors{model_folder.SUFFIX}")] or indexes
    if len(indexes) > 1:
        raise AmbiguousAddressError(
            f"{folder.path} has several indexes: use the path of one of {', '.join(indexes)}", object_id=folder.path
        )
    if indexes:
        model = model_folder.load_indexed(files, folder, files.map(folder.join(indexes[0])), known)
        others = [name for name in names if name not in (*indexes, *model.files)]
        return model._replace(skipped=tuple((name, f"not named by {indexes[0]}; give its path to import it") for name in others))
    if (sharded := dcp_folder.load_sharded(files, folder, names, known)) is not None:
        return sharded
    return _members(files, folder, names, known, as_one=as_one)


def _dcp(files: Files, folder: Folder, known: PickleAllowlist) -> FoundState:
    content = dcp_folder.load_dcp(files, folder, known)
    if not folder.has(_LIGHTNING_META):
        return FoundState("DCP checkpoint", content.state, {}, content.unknown)
    file = files.map(folder.join(_LIGHTNING_META))
    loaded = load_torch_file(files, file, known)
    if not isinstance(loaded.value, dict):
        raise CorruptObjectError(f"{file.path} is not a dict, as Lightning writes it: get or save it again", object_id=file.path)
    unknown = {**content.unknown, **dict.fromkeys(loaded.unknown, file.path)}
    return FoundState("DCP checkpoint of Lightning", {**content.state, **loaded.value}, {}, unknown)


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
            skipped.append((name, "a folder without a .metadata"))
        elif name == model_folder.ARGUMENTS:
            skipped.append((name, model_folder.SKIPPED_ARGUMENTS))
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
        steps = model_folder.checkpoints_in(folder, names)
        if len(steps) > 1:
            raise SeveralStepsError(folder.path, steps, "name", names, can_be_one=False)
        hint = f"import {os.path.join(folder.path, *steps)}" if steps else f"give {_FORMATS}"
        raise NotFoundError(f"{folder.path} has no checkpoint of a supported format: {hint}", object_id=folder.path)
    if len(states) == 1:
        (only,) = states.values()
        return only._replace(skipped=tuple(skipped), missing=members.missing())
    if not as_one:
        require_one_step(folder.path, {name: member.state for name, member in states.items()}, names)
    return members.with_state(f"folder of {len(states)} checkpoints", members.state())


def _trainer(files: Files, folder: Folder, names: list[str], known: PickleAllowlist) -> FoundState:
    """A checkpoint folder of transformers' Trainer: each file under its own name, and the small files of the model together."""
    trained = model_folder.read_trainer_state(files, folder)
    known.parsed_bytes += trained.size_bytes
    small = model_folder.read_model_files(files, folder, names)
    taken = {model_folder.STATE, *small}
    sharded: dict[str, FoundState] = {}
    for name in (name for name in names if name.endswith(model_folder.SUFFIX)):
        indexed = model_folder.load_indexed(files, folder, files.map(folder.join(name)), known)
        sharded[name.removesuffix(model_folder.SUFFIX)] = indexed  # ``model.safetensors``
        taken |= {name, *indexed.files}
    members = _read_members(files, folder, [name for name in names if name not in taken], known)
    members = members._replace(found={**sharded, **members.found})
    if not members.found:
        raise NotFoundError(
            f"{folder.path} has a {model_folder.STATE}, and no weights: give another folder. (Of a folder with a "
            f"{model_folder.POINTER} the weights are in the store that this file names.)",
            object_id=folder.path,
        )
    state = {**members.state(), "trainer_state": trained.state, **({MODEL_FILES: small} if small else {})}
    return members.with_state("checkpoint folder of transformers' Trainer", state, trained.step)


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

"""Imports folders that transformers' Trainer or accelerate wrote with DeepSpeed: each holds a folder of DeepSpeed, and the trainer's files.

They become the snapshots that `tensorstore_ck.hf` and `tensorstore_ck.accelerate` save with DeepSpeed, with the generators of all ranks.
The weights are DeepSpeed's. Files that neither trainer reads when it resumes are skipped, with the reason.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.deepspeed_names import CLIENT_STATE, LATEST
from tensorstore_ck.integrations.importing import sharded_index, trainer_folder
from tensorstore_ck.integrations.importing.deepspeed.files import KIND, SAMPLE, dict_of, load_file
from tensorstore_ck.integrations.importing.deepspeed.folder import LATEST_UNIVERSAL, load_deepspeed
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState
from tensorstore_ck.integrations.importing.rank_generators import OF_ACCELERATE, OF_TRANSFORMERS, GeneratorKeys, generators_of
from tensorstore_ck.integrations.importing.safetensors_file import is_safetensors, load_safetensors
from tensorstore_ck.integrations.model_file_names import MODEL_FILES
from tensorstore_ck.integrations.trainer_names import (
    ACCELERATOR_STEP,
    CUSTOM,
    LOADERS,
    SAVE_ITERATION,
    TRAINER_LOGGED,
    TRAINER_LOSS,
    TRAINER_STATE,
)
from tensorstore_ck.state.sourced_tensor import SourcedTensor
from tensorstore_ck.training.per_rank_state import GENERATORS, VALUES
from tensorstore_ck.training.state_sides import OWN

_OF_ACCELERATE: Final = re.compile(
    r"random_states_\d{1,6}\.pkl|custom_checkpoint_\d{1,6}\.pkl|(scheduler|sampler|dl_state_dict)(_\d{1,6})?\.bin"
)
_NUMBERED: Final = re.compile(r"checkpoint_(\d{1,18})")
_ENGINE: Final = "pytorch_model"
"""The tag of accelerate's first engine."""
_OWN_LOADER: Final = {"iteration": 0, "pass_start": None, "sampler": None, "seed": None}
"""The values of a loader that keeps its own state."""
_SCRIPTS: Final = ("zero_to_fp32.py", "zero_to_torch.py")
"""DeepSpeed copies them into its folders."""
_WEIGHTS: Final = re.compile(r"(adapter_)?(pytorch_)?model([-_].*)?\.(safetensors|bin)(\.index\.json)?")


def is_accelerate(names: Sequence[str]) -> bool:
    """Whether the folder has files of accelerate's, too."""
    return any(_OF_ACCELERATE.fullmatch(name) for name in names)


def load_trainer(files: Files, folder: Folder, names: Sequence[str], tag_folder: str, known: PickleAllowlist) -> FoundState:
    """The state in a folder of transformers' Trainer."""
    _, step = trainer_folder.read_trainer_state(files, folder, known)
    own = _Folder(files, folder=folder, names=names, tag_folder=tag_folder, known=known)
    with naming_file(folder.path, KIND):
        if own.found.step != step and own.config.get("gradient_accumulation_steps") == 1:
            tag = os.path.basename(tag_folder)
            raise MalformedError(f"{tag} is of step {own.found.step} and {trainer_folder.STATE} of step {step}: two saves are mixed")
        own.require_same_weights()
        schedule = own.load("scheduler.pt") if "scheduler.pt" in names else None
        pattern = "rng_state.pth" if own.ranks == 1 else "rng_state_{}.pth"
        values = {
            TRAINER_STATE: bytes(files.map(folder.join(trainer_folder.STATE)).data).decode("utf-8", "replace"),
            TRAINER_LOSS: torch.zeros(()),
            TRAINER_LOGGED: step,
        }
        generators = [generators_of(states, OF_TRANSFORMERS, name) for name, states in own.of_ranks(pattern, OF_TRANSFORMERS)]
        small = trainer_folder.read_model_files(files, folder, [name for name in names if name not in _SCRIPTS])
    own.taken |= {trainer_folder.STATE, *small}
    kind = "checkpoint folder of transformers' Trainer with DeepSpeed"
    return own.finish(kind, schedule, {MODEL_FILES: small}, generators=generators, values=values, step=step)


def load_accelerate(files: Files, folder: Folder, names: Sequence[str], tag_folder: str, known: PickleAllowlist) -> FoundState:
    """The state in a folder of accelerate's ``save_state``, with one engine and nothing that only its own code could read."""
    _require_one_engine(folder, names, tag_folder)
    own = _Folder(files, folder=folder, names=names, tag_folder=tag_folder, known=known)
    named = _NUMBERED.fullmatch(os.path.basename(folder.path))
    number = min(int(named[1]) if named else 0, MAX_STEP)
    with naming_file(folder.path, KIND):
        schedules = own.numbered("scheduler", ".bin")
        customs = {f"{CUSTOM}{at}": state for at, state in enumerate(own.numbered("custom_checkpoint", ".pkl", first="_0"))}
        modules = {name: state for name, state in customs.items() if isinstance(state, OrderedDict) and "_metadata" in vars(state)}
        values = {
            SAVE_ITERATION: number,
            LOADERS: [{**_OWN_LOADER, "loader": state} for state in own.numbered("dl_state_dict", ".bin")],
            **{name: state for name, state in customs.items() if name not in modules},
        }
        ranks = own.of_ranks("random_states_{}.pkl", OF_ACCELERATE, more=("step",))
        steps = {_count(states.get("step", 0), name) for name, states in ranks} or {0}
        if len(steps) > 1:
            raise MalformedError(f"its random_states are of different steps ({', '.join(map(str, sorted(steps)))}): two saves are mixed")
        generators = [generators_of(states, OF_ACCELERATE, name) for name, states in ranks]
    schedule = schedules[0] if len(schedules) == 1 else {str(at): state for at, state in enumerate(schedules)} if schedules else None
    kind = "checkpoint folder of accelerate with DeepSpeed"
    values = {ACCELERATOR_STEP: steps.pop(), **values}
    return own.finish(kind, schedule, modules, generators=generators, values=values, step=number)


class _Folder:
    """A trainer's folder, and the folder of DeepSpeed in it."""

    def __init__(self, files: Files, folder: Folder, names: Sequence[str], tag_folder: str, known: PickleAllowlist) -> None:
        self._files, self._folder, self._names, self._known = files, folder, names, known
        self._tag = os.path.relpath(os.path.realpath(tag_folder), os.path.realpath(folder.path))
        self.found, self.ranks, self.config = load_deepspeed(files, tag_folder, known)
        self.taken = {self._tag, LATEST, LATEST_UNIVERSAL, *_SCRIPTS}
        self._unknown = dict(self.found.unknown)
        self._skipped: dict[str, str] = {}

    def load(self, name: str) -> Any:
        """The value that torch.save wrote into a file."""
        self.taken.add(name)
        return load_file(self._files, self._folder, name, self._known, self._unknown)

    def numbered(self, stem: str, suffix: str, first: str = "") -> list[Any]:
        """The contents of ``stem``, ``stem_1``, ... as far as they go."""
        contents: list[Any] = []
        while (name := f"{stem}{f'_{len(contents)}' if contents else first}{suffix}") in self._names:
            contents.append(self.load(name))
        return contents

    def of_ranks(self, pattern: str, keys: GeneratorKeys, more: Sequence[str] = ()) -> list[tuple[str, dict[Any, Any]]]:
        """File and content of each rank; none if there is no file of any rank."""
        wanted = [pattern.format(rank) for rank in range(self.ranks)]
        missing = [name for name in wanted if name not in self._names]
        of_others = [name for name in self._names if re.fullmatch(r"(rng_state|random_states)(_\d{1,6})?\.(pth|pkl)", name)]
        if missing and of_others:
            raise MalformedError(f"it lacks {missing[0]}; DeepSpeed saved it on {self.ranks} ranks")
        if missing:
            return []
        contents = [(name, dict_of(self.load(name), f"dict in {name}")) for name in wanted]
        other = sorted({printable(key, 40) for _, states in contents for key in states if key not in (*keys, *more)})
        if other:
            self._skipped["generators"] = f"those of {', '.join(other[:5])} are not imported"
        return contents

    def require_same_weights(self) -> None:
        """Checks a sample of the model's own file, if there is one, against DeepSpeed's weights."""
        model = self.found.state["model"]
        for name in (name for name in self._names if _WEIGHTS.fullmatch(name) and name.endswith(".safetensors")):
            file = self._files.map(self._folder.join(name))
            if not is_safetensors(file):
                raise MalformedError(f"{name} is no safetensors file, or is cut off")
            content = load_safetensors(file)
            self._known.parsed_bytes += content.header_bytes
            for key, tensor in content.tensors.items():
                there = model.get(key)
                if (
                    isinstance(tensor, torch.Tensor)
                    and isinstance(there, SourcedTensor)
                    and (there.shape, there.dtype) == (tuple(tensor.shape), tensor.dtype)
                ):
                    size, count = there.source.size_bytes, SAMPLE * there.dtype.itemsize
                    ends = ((0, min(count, size)), (max(size - count, 0), size))
                    flat = tensor.reshape(-1).view(torch.uint8).numpy().data
                    if any(there.source.read(*end) != flat[slice(*end)] for end in ends):
                        raise MalformedError(f"{printable(key, 80)} in {name} differs from {self._tag}: they are of different saves")

    def finish(
        self,
        kind: str,
        schedule: object,
        extra: Mapping[str, Any],
        *,
        generators: Sequence[dict[str, Any]],
        values: dict[str, Any],
        step: int,
    ) -> FoundState:
        """The state with what the trainer's files say; `values` are those of every rank."""
        state = dict(self.found.state)
        client = state[OWN][VALUES][CLIENT_STATE]
        if client:
            self._skipped[CLIENT_STATE] = (
                f"{', '.join(printable(key, 40) for key in list(client)[:5])}: the trainer reads none of DeepSpeed's"
            )
        own: list[dict[str, Any]] = [{"environment": {}, VALUES: values} for _ in range(self.ranks)]
        for of_rank, states in zip(own, generators, strict=False):
            of_rank[GENERATORS] = states
        state |= {"extra": {**state["extra"], **extra}, "ranks": len(own)}
        state[OWN] = own[0] if len(own) == 1 else {str(rank): of_rank for rank, of_rank in enumerate(own)}
        if schedule is not None:
            state["scheduler"] = schedule
        skipped = {**dict(self.found.skipped), **self._skipped, **self._left()}
        return self.found._replace(format=kind, state=state, step=step, unknown=self._unknown, skipped=tuple(skipped.items()))

    def _left(self) -> dict[str, str]:
        left = {}
        for name in (name for name in self._names if name not in self.taken):
            if name == trainer_folder.ARGUMENTS:
                left[name] = trainer_folder.SKIPPED_ARGUMENTS
            elif _WEIGHTS.fullmatch(name) or name.endswith(sharded_index.SUFFIX):
                left[name] = f"the weights are those of {self._tag}"
            else:
                left[name] = "the trainer does not read it when it resumes with DeepSpeed"
        return left


def _require_one_engine(folder: Folder, names: Sequence[str], tag_folder: str) -> None:
    engines = [name for name in names if re.fullmatch(rf"{_ENGINE}_\d+", name) and os.path.isdir(os.path.join(folder.path, name))]
    if engines:
        raise UnsupportedValueError(
            f"{folder.path} has several engines of DeepSpeed ({_ENGINE}, {', '.join(engines[:3])}), and a snapshot of accelerate has one: "
            f"import each by itself, such as {os.path.join(folder.path, engines[0])}, for tensorstore_ck.deepspeed",
            object_id=folder.path,
        )
    if sampler := next((name for name in names if re.fullmatch(r"sampler(_\d+)?\.bin", name)), None):
        raise UnsupportedValueError(
            f"{folder.path} has {sampler}, a pickled sampler, and nothing in a checkpoint is run: load it with accelerate, attach "
            f"tensorstore_ck.accelerate and save; or import {tag_folder} without the order of samples",
            object_id=folder.path,
        )


def _count(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise MalformedError(f"{name} has no valid step")
    return value

"""Universal checkpoints of DeepSpeed: a folder for each parameter, with a file for its masters and for each of its moments."""

import os
from math import prod
from typing import Any, Final

from tensorstore_ck.integrations.deepspeed_names import MASTER, MICRO_OFFSET
from tensorstore_ck.integrations.importing.deepspeed.files import (
    OPTIMIZER_STATE,
    ZERO,
    DeepSpeedFiles,
    copied,
    dict_of,
    flat_of,
    list_of,
    load_file,
    shapes_of,
    shown,
)
from tensorstore_ck.integrations.importing.deepspeed.partitions import FoundOptimizer, FoundParameter, groups_of, united
from tensorstore_ck.integrations.importing.malformed import MalformedError, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.state.sourced_tensor import ElementRun

_FP32: Final = "fp32.pt"
_STEP: Final = "step"
_KEYS: Final = {"param", "cat_dim"}
"""The keys in a file of a whole parameter."""


class UniversalReader:
    """Reads the optimizer in a universal checkpoint."""

    def __init__(self, files: Files, read: DeepSpeedFiles, known: PickleAllowlist) -> None:
        self._files, self._found, self._known = files, read, known

    def read(self) -> FoundOptimizer:
        """The optimizer. Raises `MalformedError` if it is incomplete or `CorruptObjectError` if a file is damaged."""
        saved = dict_of(self._load(OPTIMIZER_STATE), OPTIMIZER_STATE)
        shapes = [shapes_of(group, "param_shapes") for group in list_of(self._found.model.get("param_shapes"), "param_shapes")]
        inner = saved.get("optimizer_state_dict")  # of ZeRO 3
        inner = inner if isinstance(inner, dict) else {}
        states = inner.get("state")
        first = states.get(0) if isinstance(states, dict) else None
        step = first.get(_STEP) if isinstance(first, dict) else None
        parameters = [[self._parameter(name, shape, step) for name, shape in group.items()] for group in shapes]
        steps = {shown(parameter.scalars.get(_STEP)) for group in parameters for parameter in group}
        if len(steps) > 1:
            raise MalformedError(f"its parameters are of different steps ({', '.join(sorted(steps)[:4])}): two saves are mixed")
        groups = groups_of(inner.get("param_groups") or saved.get("param_groups"), [[group] for group in parameters])
        optimizer = FoundOptimizer([parameter for group in parameters for parameter in group], groups, saved.get("loss_scaler"))
        is_pipeline = MICRO_OFFSET in self._found.exported_counters  # then groups are by their first parameter
        return united([optimizer]) if is_pipeline else optimizer

    def _load(self, name: str) -> Any:
        return load_file(self._files, self._found.folder, os.path.join(ZERO, name), self._known, self._found.unknown)

    def _parameter(self, name: str, shape: tuple[int, ...], step: object) -> FoundParameter:
        label = printable(name, 80)
        path = os.path.join(self._found.folder.path, ZERO, name)
        if "/" in name or not os.path.isdir(path):
            raise MalformedError(f"it lacks {ZERO}/{label}, which has the masters and moments of this parameter")
        names = [name for name in Folder(path).names() if name.endswith(".pt")]
        if _FP32 not in names:
            raise MalformedError(f"it lacks {ZERO}/{label}/{_FP32}")
        parameter = FoundParameter(name, shape, {}, {} if step is None else {_STEP: copied(step)})
        for file in names:
            key, value = file.removesuffix(".pt"), self._load(os.path.join(name, file))
            if key == _STEP:
                parameter.scalars[_STEP] = copied(value)
                continue
            if isinstance(value, dict):
                if not value.keys() <= _KEYS:
                    more = printable(next(key for key in value if key not in _KEYS), 40)
                    raise MalformedError(f"{label} has {more}, as of tensor parallelism or experts, which is not known")
                value = value.get("param")
            flat = flat_of(value, f"{ZERO}/{label}/{file}")
            if flat.numel() != prod(shape):
                raise MalformedError(
                    f"{ZERO}/{label}/{file} has {flat.numel()} elements, where its shape {list(shape)[:8]} needs {prod(shape)}"
                )
            parameter.runs[MASTER if file == _FP32 else key] = [ElementRun(0, flat)]
        return parameter

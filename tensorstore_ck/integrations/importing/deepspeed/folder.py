"""Folders of DeepSpeed's ``save_checkpoint``, and universal ones, as the state that `tensorstore_ck.deepspeed` saves.

So an engine of any stage on any number of ranks resumes from the import, and a script without DeepSpeed restores model and optimizer.
Parts of ranks are put together block by block while the store reads them. The generators of ranks are not in such folders.
"""

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final

import torch

from tensorstore_ck.errors import NotFoundError, UnsupportedValueError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.deepspeed_names import (
    CLIENT_STATE,
    COUNTERS,
    EXPORTED,
    LATEST,
    MASTER,
    MICRO_OFFSET,
    NOTE,
    SCALE,
    UNSAVED_COUNTERS,
)
from tensorstore_ck.integrations.importing.deepspeed.classes import PACKAGE
from tensorstore_ck.integrations.importing.deepspeed.experts import ep_size_of, is_expert
from tensorstore_ck.integrations.importing.deepspeed.files import (
    KIND,
    DeepSpeedFiles,
    dict_of,
    flat_of,
    is_tag_folder,
    list_of,
    read_files,
    same_elements,
    shapes_of,
)
from tensorstore_ck.integrations.importing.deepspeed.partitions import FoundOptimizer, FoundParameter, optimizer_of_ranks, united
from tensorstore_ck.integrations.importing.deepspeed.pipeline import model_of_layers, with_shapes
from tensorstore_ck.integrations.importing.deepspeed.universal import UniversalReader
from tensorstore_ck.integrations.importing.deepspeed.unnamed import IN_ORDER, optimizer_without_names
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState
from tensorstore_ck.integrations.trainer.pointers import POINTER
from tensorstore_ck.state.sourced_tensor import ElementRun, SourcedTensor, tensor_of_runs
from tensorstore_ck.training.per_rank_state import VALUES
from tensorstore_ck.training.state_sides import OWN

LATEST_UNIVERSAL: Final = "latest_universal"
_MAX_TAG_BYTES: Final = 4096
_OWN_KEYS: Final = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"),
        *("lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
        *("num_experts", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info", EXPORTED),
    }
)
"""DeepSpeed's own entries, which are not of the client's state."""
_NOT_SAVED: Final = {"data_sampler": "the position of curriculum learning", "random_ltd": "the schedule of random layer-token drop"}


def find_tag_folder(folder: Folder, names: Sequence[str]) -> str | None:
    """The folder of the tag that is imported: this one, or that which its ``latest`` names; None: this is no folder of DeepSpeed.

    Raises:
        NotFoundError: ``latest`` names nothing, or there are tags and no ``latest``.
        InvalidNameError: ``latest``, or what it names, leads out of the folder.
    """
    if is_tag_folder(folder.path):
        return folder.path
    for latest in (LATEST, LATEST_UNIVERSAL):
        path = folder.find(latest) if folder.has(latest) else None
        if path is None or os.path.getsize(path) > _MAX_TAG_BYTES:
            continue
        with open(path, "rb") as file:
            tag = file.read(_MAX_TAG_BYTES).decode("utf-8", "replace").strip()
        if not os.path.lexists(os.path.join(folder.path, tag)) or not tag:
            raise NotFoundError(
                f"{path} names {printable(tag, 80)!r}, which does not exist: get the whole checkpoint, or give the path of another tag",
                object_id=path,
            )
        tagged = folder.join(tag)
        if is_tag_folder(tagged):
            return tagged
        if os.path.isfile(os.path.join(tagged, POINTER)):
            raise NotFoundError(
                f"{tagged} has no weights: they are in the store that its {POINTER} names, so there is nothing to import", object_id=tagged
            )
        raise NotFoundError(f"{path} names {printable(tag, 80)!r}, which has no files of DeepSpeed: give another tag", object_id=path)
    tags = [name for name in names if is_tag_folder(os.path.join(folder.path, name))]
    if tags:
        raise NotFoundError(
            f"{folder.path} has no {LATEST}: give the path of one of its tags, such as {os.path.join(folder.path, tags[-1])}",
            object_id=folder.path,
        )
    return None


def load_deepspeed(files: Files, tag_folder: str, known: PickleAllowlist) -> tuple[FoundState, int, dict[Any, Any]]:
    """The state in the folder of a tag; how many ranks had a part of it; and DeepSpeed's configuration."""
    read = read_files(files, Folder(tag_folder), known)
    with naming_file(tag_folder, KIND):
        state, step = _State(files, read, known).build()
    for name in [name for name in known.converted if name.startswith(PACKAGE)]:
        del known.converted[name]  # they are not in the state
    skipped = [(name, f"{what}, which is not imported") for name, what in _NOT_SAVED.items() if read.model.get(name) is not None]
    note = {"tag": os.path.basename(tag_folder), "version": read.version}
    config = read.model.get("ds_config")
    return (
        FoundState(format=KIND, state=state, metadata={NOTE: note}, unknown=read.unknown, step=step, skipped=(*read.skipped, *skipped)),
        read.model["dp_world_size"] * max(len(read.stages), 1),
        config if isinstance(config, dict) else {},
    )


class _State:
    def __init__(self, files: Files, read: DeepSpeedFiles, known: PickleAllowlist) -> None:
        self._files, self._found, self._known = files, read, known
        model = read.model
        models = [stage.model for stage in read.stages] or [model]
        buffers = {name for states in models for name in list_of(states.get("buffer_names") or [], "buffer_names") if type(name) is str}
        self._optimizers = [self._of_stage(stage) for stage in read.stages]
        if read.stages:
            trained = [parameter for optimizer in self._optimizers if optimizer is not None for parameter in optimizer.parameters]
            self._module: dict[Any, Any] = model_of_layers(read.layers, trained, buffers)
        else:
            self._module = {**dict_of(model.get("module"), "module"), **read.experts.weights}
        self._buffers = {name for name in buffers if not is_expert(name)} | read.experts.buffers(buffers)
        self._shared = dict_of(model.get("shared_params") or {}, "shared_params")

    def build(self) -> tuple[dict[str, Any], int]:
        model = self._found.model
        optimizer = self._optimizer()
        weights, states = self._split(optimizer.parameters if optimizer is not None else [])
        counters = self._counters()
        state: dict[str, Any] = {"model": weights, "extra": {"deepspeed": counters}}
        if optimizer is not None:
            state["optimizer"] = {"state": states, "param_groups": optimizer.groups}
            scaler = optimizer.scaler
            state["scaler"] = {key: scaler[key] for key in SCALE if key in scaler} if isinstance(scaler, dict) else scaler or {}
        if model.get("lr_scheduler") is not None:
            state["scheduler"] = model["lr_scheduler"]
        client = {key: value for key, value in model.items() if key not in _OWN_KEYS}
        own = {"environment": {}, VALUES: {CLIENT_STATE: client}}
        return {**state, "ranks": 1, "mid_step": False, OWN: own}, counters["global_steps"]

    def _optimizer(self) -> FoundOptimizer | None:
        read = self._found
        if read.stages:
            of_stages = [optimizer for optimizer in self._optimizers if optimizer is not None]
            return united(of_stages) if of_stages else None
        if read.is_universal:
            return UniversalReader(self._files, read, self._known).read()
        if read.optimizers:
            optimizer = optimizer_of_ranks(read)
            return united([optimizer]) if read.experts.weights else optimizer
        if read.model.get("optimizer") is None:
            return None
        weights, ep_size = dict(self._parameters_once()), len(read.expert_optimizers)
        if not ep_size:
            return self._named(read.model["optimizer"], weights)
        shared = {name: tensor for name, tensor in weights.items() if not is_expert(name)}
        of_ranks = []
        for ep_rank, saved in enumerate(read.expert_optimizers):
            own = {**shared, **{name: weights[name] for name in read.experts.of_rank(ep_size, ep_rank) if name in weights}}
            of_ranks.append(self._named(saved.get("optimizer"), own))
        spread = max(ep_size_of(group, read.model["dp_world_size"]) for group in of_ranks[0].groups)
        if spread != ep_size:
            raise MalformedError(f"it lacks expp_rank_{ep_size}_mp_rank_00_optim_states.pt; its experts are spread over {spread} ranks")
        return united(of_ranks)

    def _of_stage(self, stage: DeepSpeedFiles) -> FoundOptimizer | None:
        if stage.model.get("optimizer") is not None and not stage.optimizers:
            raise UnsupportedValueError(
                f"{stage.folder.path} is of a pipeline without ZeRO: its optimizers number the parameters of their stages, and nothing "
                "names these: load it with DeepSpeed, then save it with tensorstore_ck.deepspeed",
                object_id="optimizer",
            )
        return optimizer_of_ranks(with_shapes(stage, self._found.layers)) if stage.optimizers else None

    def _named(self, saved: object, weights: dict[str, torch.Tensor]) -> FoundOptimizer:
        named = optimizer_without_names(dict_of(saved, "optimizer"), weights, self._found.folder.path)
        if MASTER not in {key for parameter in named.parameters for key in parameter.runs}:
            self._known.converted[IN_ORDER] += len(named.parameters)
        return named

    def _parameters_once(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters; of those that share memory the first."""
        seen = set()
        for name, tensor in self._module.items():
            if name in self._buffers or type(name) is not str or not isinstance(tensor, torch.Tensor):
                continue
            place = tensor.data_ptr(), tensor.shape
            if not tensor.numel() or place not in seen:
                seen.add(place)
                yield name, tensor

    def _counters(self) -> dict[str, int]:
        model = self._found.model
        counters = {name: model.get(name, 0) for name in COUNTERS if name not in UNSAVED_COUNTERS}
        counters |= {"micro_steps": 0, **self._found.exported_counters}
        config = model.get("ds_config")
        micro_batches = config.get("gradient_accumulation_steps") if isinstance(config, dict) else None
        if type(micro_batches) is int and type(counters["global_steps"]) is int:
            counters["micro_steps"] = counters["global_steps"] * micro_batches  # DeepSpeed does not save it
        if any(type(count) is not int or not 0 <= count < 1 << 62 for count in counters.values()) or counters["global_steps"] > MAX_STEP:
            raise MalformedError(f"it has no valid {', '.join(counters)}")
        if self._found.stages:  # they count micro-batches in another place
            counters |= {"micro_steps": 0, MICRO_OFFSET: counters["micro_steps"]}
        return counters

    # --- weights and optimizer ----------------------------------------------------------------------------------------

    def _split(self, parameters: Sequence[FoundParameter]) -> tuple[dict[str, Any], dict[str, Any]]:
        weights: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.name in states or parameter.name not in self._module:
                raise MalformedError(f"{printable(parameter.name, 80)} is {'twice' if parameter.name in states else 'not'} in the model")
            weights[parameter.name] = self._weights(parameter)
            kept = {key: runs for key, runs in parameter.runs.items() if key != MASTER or runs_dtype(runs) != weights[parameter.name].dtype}
            states[parameter.name] = {
                **{key: tensor_of_runs(parameter.shape, runs_dtype(runs), runs) for key, runs in kept.items()},
                **parameter.scalars,
            }
        frozen = shapes_of(self._found.model.get("frozen_param_shapes") or {}, "frozen_param_shapes")
        for name, tensor in self._module.items():
            if name not in weights and name not in self._shared:
                weights[name] = self._other(name, tensor, frozen.get(name))
        for name, first in self._shared.items():
            if first in weights:
                weights[name] = weights[first]
            elif name in self._module:
                raise MalformedError(f"{printable(name, 80)} shares its memory with {printable(first, 80)}, which is not there")
        return weights, states

    def _weights(self, parameter: FoundParameter) -> SourcedTensor:
        """The weights of a trained parameter; of ZeRO 3 from its masters."""
        tensor = self._module[parameter.name]
        label = printable(parameter.name, 80)
        flat = flat_of(tensor, label)
        masters = parameter.runs.get(MASTER, [])
        if tuple(tensor.shape) == parameter.shape:
            for run in masters:
                if not same_elements(flat[run.start : run.stop], run.elements):
                    raise MalformedError(
                        f"the weights of {label} differ from its masters: these files are of different saves, or say nothing about the "
                        "order of elements"
                    )
            return tensor_of_runs(parameter.shape, tensor.dtype, [ElementRun(0, flat)])
        if tensor.numel() or not masters:
            raise MalformedError(f"{label} has shape {list(tensor.shape)[:8]}, and its optimizer {list(parameter.shape)[:8]}")
        return tensor_of_runs(parameter.shape, tensor.dtype, masters)

    def _other(self, name: object, tensor: object, shape: tuple[int, ...] | None) -> Any:
        if type(name) is not str:
            raise MalformedError(f"it has a weight without a name ({printable(type(name).__name__, 40)})")
        if name in self._buffers or not isinstance(tensor, torch.Tensor):
            return tensor
        label = printable(name, 80)
        if shape is None or tuple(tensor.shape) == shape:
            if not tensor.numel() and shape is None and len(self._found.models) > 1:
                raise MalformedError(f"it has no elements of {label}")
            return tensor_of_runs(tuple(tensor.shape), tensor.dtype, [ElementRun(0, flat_of(tensor, label))])
        size = prod(shape)
        part = -(-size // len(self._found.models))
        runs = []
        for rank, model in enumerate(self._found.models):
            flat = flat_of(dict_of(model.get("frozen_param_fragments"), "frozen_param_fragments").get(name), label)
            start = min(rank * part, size)
            count = min(part, size - start)
            if flat.numel() < count or flat.dtype != tensor.dtype:
                raise MalformedError(f"rank {rank} holds {flat.numel()} elements of {label}, where {count} of {tensor.dtype} are needed")
            runs.append(ElementRun(start, flat[:count]))
        return tensor_of_runs(shape, tensor.dtype, runs)


def runs_dtype(runs: Sequence[ElementRun]) -> torch.dtype:
    """The dtype of all runs of one tensor."""
    dtypes = {run.elements.dtype for run in runs} or {torch.float32}
    if len(dtypes) > 1:
        raise MalformedError(f"the ranks hold a tensor in several dtypes ({', '.join(sorted(map(str, dtypes)))})")
    return dtypes.pop()

"""A snapshot of `tensorstore_ck.deepspeed` as a universal checkpoint, which DeepSpeed loads into any stage and number of ranks.

    DIR/latest_universal                                   global_stepN_universal
    DIR/global_stepN_universal/mp_rank_00_model_states.pt  weights, counters, schedule, client state: for ZeRO 1 and 2
                               zero_pp_rank_0_mp_rank_00_model_states.pt   the same without weights: for ZeRO 3
                               zero/optimizer_state.pt     the options of the parameter groups
                               zero/NAME/fp32.pt           master weights; exp_avg.pt ... for each moment; step.pt

DeepSpeed itself (0.19.8) takes neither frozen parameters nor buffers from a universal checkpoint; they are in the first file.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.common.descriptors import sync_path
from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.deepspeed_names import CLIENT_STATE, COUNTERS, EXPORTED, MASTER, MICRO_OFFSET, UNSAVED_COUNTERS
from tensorstore_ck.integrations.exporting.atomic_target import require_disk_space
from tensorstore_ck.integrations.exporting.byte_routing import ByteRouter
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport
from tensorstore_ck.integrations.exporting.meta_state import MetaState
from tensorstore_ck.integrations.exporting.output_file import OutputFile, write_file
from tensorstore_ck.integrations.exporting.torch_file import TorchOutput
from tensorstore_ck.integrations.exporting.torch_zip_template import TorchZipTemplate, build_template
from tensorstore_ck.training.per_rank_state import VALUES, own_states
from tensorstore_ck.training.state_sides import OWN

LATEST: Final = "latest_universal"
VERSION: Final = "0.19.8"
"""The version of DeepSpeed whose files these are like."""
_STEP: Final = "step"
_EXPERTS: Final = "deepspeed_moe.experts."
"""A part of the names of experts."""
_OPEN_FILES: Final = 64
_PER_FILE_BYTES: Final = 4096
"""For the disk space that is checked: a file without its tensors."""


class _Parameter(NamedTuple):
    name: str
    states: dict[str, torch.Tensor]
    """The stem of a file -> a tensor without bytes; `fp32` are the masters, or weights in float32."""
    step: Any


def write_universal(job: ExportJob) -> WrittenExport:
    """Writes the folder into the job's. Raises `UnsupportedValueError` if there is no optimizer that a universal checkpoint can hold."""
    meta = MetaState(job.content, job.tree, by_value=frozenset("r"))
    meta.require_one_dtype()
    state = meta.state
    groups, counters = _groups(state, job.target.path), state["extra"]["deepspeed"]
    left_out: dict[str, str] = {}
    parameters = [_parameter(state, name, left_out) for group in groups for name in group["params"]]
    tag = f"global_step{counters['global_steps']}_universal"
    folder = os.path.join(job.folder, tag)
    os.makedirs(os.path.join(folder, "zero"))
    output = _Output(job, meta, folder)
    tensors = [*state["model"].values(), *(tensor for parameter in parameters for tensor in parameter.states.values())]
    tensor_bytes = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
    files = sum(len(parameter.states) + 1 for parameter in parameters)
    require_disk_space(job.folder, tensor_bytes + files * _PER_FILE_BYTES, job.target.path)
    own = own_states(state[OWN], state["ranks"])[0] if OWN in state else job.rank_state()
    common = _model_states(state, groups, counters, own.get(VALUES, {}).get(CLIENT_STATE, {}))
    output.write({"mp_rank_00_model_states.pt": {**common, "module": dict(state["model"])}})
    output.write({"zero_pp_rank_0_mp_rank_00_model_states.pt": {**common, "module": {}}})
    output.write({"zero/optimizer_state.pt": _optimizer_state(groups, parameters)})
    for batch in _batches(parameters):
        output.write(batch)
    for place, _, _ in os.walk(job.folder, topdown=False):
        sync_path(place)
    write_file(os.path.join(job.folder, LATEST), job.target.path, tag.encode())
    return WrittenExport(output.tensors, output.tensor_bytes, left_out, list(_notes(state, parameters)))


def _groups(state: Any, shown: str) -> list[dict[str, Any]]:
    optimizer = state.get("optimizer") if isinstance(state, dict) else None
    stored = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    groups = list(stored.values()) if isinstance(stored, Mapping) else stored if isinstance(stored, list) else []
    has_groups = bool(groups) and all(isinstance(group, dict) and "params" in group for group in groups)
    extra = state.get("extra") if isinstance(state, dict) else None
    counters = extra.get("deepspeed") if isinstance(extra, dict) else None
    if not has_groups or not isinstance(counters, dict) or not set(COUNTERS) <= counters.keys() or "model" not in state:
        raise UnsupportedValueError(
            f"{shown}: a universal checkpoint needs model, optimizer and counters of a DeepSpeed engine, as tensorstore_ck.deepspeed saves "
            "them, and tsck import takes them from DeepSpeed's folders: this snapshot has not all of these",
            object_id="optimizer",
        )
    if any(group.get("moe") or any(_EXPERTS in name for name in group["params"]) for group in groups):
        raise UnsupportedValueError(
            "the optimizer has MoE experts, which DeepSpeed names from 0 on each rank: it has no universal checkpoint of them",
            object_id="optimizer.param_groups",
        )
    if isinstance(stored, Mapping):
        groups = _by_position(groups)
    for name in (name for group in groups for name in group["params"]):
        if name not in state["model"]:
            raise UnsupportedValueError(f"the weights of {name!r:.80} are left out, which its master weights need", object_id=name)
        if not name or "/" in name or "\0" in name or name in (".", "..") or len(name.encode()) > 255:
            raise UnsupportedValueError(f"the parameter {name!r:.80} cannot have a folder of its name", object_id=name)
    return groups


def _by_position(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of all stages of a pipeline as one for each set of options, in order: each stage takes options by their position.

    Empty ones follow, as DeepSpeed loads only as many groups as these: a stage may have several with the same options.
    """
    by_options: dict[object, dict[str, Any]] = {}
    taken = set[str]()
    for group in groups:
        options = tuple(
            (key, id(value) if isinstance(value, torch.Tensor) else repr(value)) for key, value in group.items() if key != "params"
        )
        united = by_options.setdefault(options, {**group, "params": []})
        united["params"] += [name for name in group["params"] if name not in taken]  # a tied parameter may be in groups of two stages
        taken.update(group["params"])
    merged = list(by_options.values())
    return merged + [{**merged[-1], "params": []}] * (len(groups) - len(merged))


def _parameter(state: Any, name: str, left_out: dict[str, str]) -> _Parameter:
    moments, weights = state["optimizer"]["state"].get(name, {}), state["model"][name]
    states = {"fp32": moments.get(MASTER, weights)}
    for key, value in moments.items():
        if key in (MASTER, _STEP):
            continue
        if isinstance(value, torch.Tensor) and value.shape == weights.shape:
            states[key] = value
        else:
            left_out[f"optimizer.state.{name}.{key}"] = "universal checkpoints have moments of the parameter's shape, and step"
    return _Parameter(name, states, moments.get(_STEP))


def _model_states(
    state: Mapping[str, Any], groups: list[dict[str, Any]], counters: Mapping[str, int], client: Mapping[str, Any]
) -> dict[str, Any]:
    """The state that DeepSpeed reads in addition to the optimizer's."""
    model = state["model"]
    trained = {name for group in groups for name in group["params"]}
    first: dict[int, str] = {}
    for name in (*trained, *model):
        first.setdefault(id(model[name]), name)
    return {
        **client,
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: model[name].shape for name in group["params"]} for group in groups],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {name: first[id(weight)] for name, weight in model.items() if first[id(weight)] != name},
        "lr_scheduler": state.get("scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        **{name: counters[name] for name in COUNTERS if name not in UNSAVED_COUNTERS},
        EXPORTED: {name: counters[name] for name in UNSAVED_COUNTERS if name in counters},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def _optimizer_state(groups: list[dict[str, Any]], parameters: list[_Parameter]) -> dict[str, Any]:
    """The state that ZeRO 1 and 2 take from ``param_groups``, and ZeRO 3 from ``optimizer_state_dict``."""
    step = {parameter.name: parameter.step for parameter in parameters}
    options = [{**group, "params": [number]} for number, group in enumerate(groups)]
    states = {number: {_STEP: step[group["params"][0]]} for number, group in enumerate(groups) if group["params"]}
    return {"param_groups": options, "optimizer_state_dict": {"state": states, "param_groups": options}, "ds_version": VERSION}


def _batches(parameters: list[_Parameter]) -> Iterator[dict[str, Any]]:
    """Path -> content of files that are written together."""
    batch: dict[str, Any] = {}
    for name, states, step in parameters:
        batch |= {f"zero/{name}/{key}.pt": {"param": tensor, "cat_dim": 0} for key, tensor in states.items()}
        if step is not None:
            batch[f"zero/{name}/{_STEP}.pt"] = step
        if len(batch) > _OPEN_FILES:
            yield batch
            batch = {}
    yield batch


def _notes(state: Mapping[str, Any], parameters: list[_Parameter]) -> Iterator[str]:
    yield 'load it with "checkpoint": {"load_universal": true} in the configuration'
    if MICRO_OFFSET in state["extra"]["deepspeed"]:
        yield "each stage takes the options of parameter groups by their position: compare them if the stages have different groups"
    trained = {id(state["model"][parameter.name]) for parameter in parameters}
    others = [name for name, weight in state["model"].items() if id(weight) not in trained]
    if others:
        yield f"DeepSpeed does not load frozen parameters and buffers from universal checkpoints: {listed(others)}; load them by hand"
    scale = (state.get("scaler") or {}).get("cur_scale", 1.0)
    if scale != 1.0:
        power = round(math.log2(scale))
        yield f"the loss scale is not in it, since DeepSpeed replaces its whole scaler: set initial_scale_power to {power} for {scale:g}"


class _Output:
    def __init__(self, job: ExportJob, meta: MetaState, folder: str) -> None:
        self._job, self._meta, self._folder = job, meta, folder
        self.tensors = 0
        self.tensor_bytes = 0

    def write(self, contents: Mapping[str, Any]) -> None:
        """Writes files; path in the folder -> content."""
        shown = self._job.target.path
        router = ByteRouter(self._job.content)
        with ExitStack() as stack:
            outputs = []
            for name, content in contents.items():
                path = os.path.join(self._folder, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                template: TorchZipTemplate = build_template(content, os.path.join(shown, name))
                file = stack.enter_context(OutputFile(path, os.path.join(shown, name), is_summed=True))
                outputs.append(TorchOutput(file, template))
                outputs[-1].route(router, self._job.content, self._meta)
                self.tensors += len(template.gaps)
                self.tensor_bytes += sum(len(gap.region) for gap in template.gaps)
            router.run(os.path.join(self._job.folder, "scratch"))
            for output in outputs:
                output.finish()

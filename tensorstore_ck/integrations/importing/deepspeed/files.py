"""The files of one tag of a DeepSpeed checkpoint: which there are, which must be there, and what they say.

``mp_rank_00_model_states.pt`` (with ZeRO 3 one for each rank) has weights, counters, schedule and the client's state, and
``[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt`` rank N's part of masters and moments. Pipelines have one ``mp_rank_NN`` for each stage,
and weights in ``layer_NN-model_states.pt``. Names and sizes in them are checked here.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, NoReturn

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.layout import MAX_DIMS, MAX_TENSOR_BYTES
from tensorstore_ck.integrations.deepspeed_names import EXPORTED, UNSAVED_COUNTERS
from tensorstore_ck.integrations.importing.deepspeed.experts import OPTIMIZER_FILE as EXPERT_OPTIMIZER
from tensorstore_ck.integrations.importing.deepspeed.experts import Experts, read_experts
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.torch_file import is_torch_file, load_torch_file

KIND: Final = "DeepSpeed checkpoint"
ZERO: Final = "zero"
"""The folder of a universal checkpoint that has a folder for each parameter."""
OPTIMIZER_STATE: Final = "optimizer_state.pt"
MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
OPTIMIZER: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
LAYER: Final = re.compile(r"layer_(\d{2,6})-model_states\.pt")
_OF_SLICES: Final = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
"""Files of a pipeline with tensor parallelism."""
_OF_OLD_EXPERTS: Final = re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt")
"""Files of versions of DeepSpeed that knew one layer of experts."""
_EQUAL: Final = ("global_steps", "skipped_steps", "dp_world_size", "ds_version")
"""Keys that are equal in the files of all ranks."""

SAMPLE: Final = 256
"""Elements at both ends of a run that are compared."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class DeepSpeedFiles:
    """The content of the files of one tag."""

    folder: Folder
    models: list[dict[str, Any]]
    """With ZeRO 3 of each rank; else one."""
    optimizers: list[dict[str, Any]]
    """The optimizer of each rank; none without ZeRO, and in a universal checkpoint."""
    is_universal: bool
    experts: Experts = field(default_factory=Experts)
    expert_optimizers: list[dict[str, Any]] = field(default_factory=list)
    """Without ZeRO: of each rank that has other experts."""
    layers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The layers of a pipeline: by number, and the names in them."""
    stages: "list[DeepSpeedFiles]" = field(default_factory=list)
    """The stages of a pipeline: each with its own model and optimizers."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Names in the pickles that are not allowed -> the file."""
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def model(self) -> dict[str, Any]:
        """The first rank's."""
        return self.models[0]

    @property
    def exported_counters(self) -> dict[str, Any]:
        """Counters that DeepSpeed does not save, and `tsck export` does."""
        exported = self.model.get(EXPORTED) if self.is_universal else None  # DeepSpeed's users may save it again, as client state
        return {name: exported[name] for name in UNSAVED_COUNTERS if name in exported} if isinstance(exported, dict) else {}

    @property
    def version(self) -> str:
        """DeepSpeed's."""
        return shown(self.model.get("ds_version"))


def is_tag_folder(path: str) -> bool:
    """Whether a folder has such files."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return any(MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name) for name in names) or os.path.isfile(
        os.path.join(path, ZERO, OPTIMIZER_STATE)
    )


def read_files(files: Files, folder: Folder, known: PickleAllowlist) -> DeepSpeedFiles:
    """Reads all files of a tag; tensors stay in them."""
    names = folder.names()
    _refuse_kinds(folder, names)
    unknown: dict[str, str] = {}

    def read(name: str) -> dict[str, Any]:
        loaded = load_file(files, folder=folder, name=name, known=known, unknown=unknown)
        if not isinstance(loaded, dict):
            raise MalformedError(f"{name} has no dict")
        return loaded

    with naming_file(folder.path, KIND):
        first = _read_stage(folder, read, names, 0)
        layers = {int(match[1]): read(name) for name in names if (match := LAYER.fullmatch(name))}
        if layers and first.experts.weights:
            unsupported(folder, "experts in a pipeline")
        count = shown(first.model.get("mp_world_size", 1))
        if not layers and count != "1":
            unsupported(folder, f"tensor parallelism over {count} ranks")
        if not layers:
            return replace(first, unknown=unknown)
        dimensions = first.model.get("checkpoint_parallel_dimensions")
        if isinstance(dimensions, dict) and shown(dimensions.get("tp_degree", 1)) != "1":
            unsupported(folder, "a pipeline with tensor parallelism")
        if not count.isdecimal() or not 0 < int(count) <= 10_000:
            raise MalformedError("it has no mp_world_size")
        stages = [first, *(_read_stage(folder, read, names, stage) for stage in range(1, int(count)))]
        _require_alike([stage.model for stage in stages], "stages", with_shapes=False)
        skipped = [row for stage in stages for row in stage.skipped]
        left = [name for name in names if (match := MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name)) and int(match[2]) >= int(count)]
        skipped += [(name, f"the checkpoint is of {count} stages, so this is left over from a save of more") for name in left]
    return replace(first, unknown=unknown, layers=layers, stages=stages, skipped=tuple(skipped))


def _read_stage(folder: Folder, read: Callable[[str], dict[str, Any]], names: Sequence[str], stage: int) -> DeepSpeedFiles:
    """The files of one stage of a pipeline; of the first one all files, if there are no stages."""
    models_found = [match for name in names if (match := MODEL.fullmatch(name)) and int(match[2]) == stage]
    of_ranks = {int(match[1]): match[0] for match in models_found if match[1] is not None}
    shared = [match[0] for match in models_found if match[1] is None]
    optimizer_names = {int(match[1]): name for name in names if (match := OPTIMIZER.fullmatch(name)) and int(match[2]) == stage}
    is_universal = folder.has(os.path.join(ZERO, OPTIMIZER_STATE))
    if of_ranks and shared and not is_universal:
        raise MalformedError(f"it has {shared[0]} of ZeRO 0 to 2 and {of_ranks[min(of_ranks)]} of ZeRO 3: two saves are mixed")
    if not of_ranks and not shared:
        raise MalformedError(f"it lacks mp_rank_{stage:02}_model_states.pt, which has the weights and counters")
    first = read(shared[0] if shared else of_ranks[min(of_ranks)])
    world = first.get("dp_world_size")
    if type(world) is not int or not 0 < world <= 1_000_000:
        raise MalformedError("it has no dp_world_size")
    if shared:
        models = [first]
    else:
        models = [read(name) for name in _of_all_ranks(of_ranks, world, f"zero_pp_rank_{{}}_mp_rank_{stage:02}_model_states.pt")]
    experts = read_experts(names, first.get("num_experts"), read)
    if experts.weights and first.get("ds_autoep_layers") is not None:
        unsupported(folder, "experts of AutoEP")
    expert_optimizers = [read(name) for name in _of_ep_ranks(names)] if experts.weights else []
    if experts.weights and first.get("optimizer") is not None and not expert_optimizers:
        raise MalformedError("it lacks expp_rank_0_mp_rank_00_optim_states.pt, which has the optimizer")
    optimizers = []
    if optimizer_names or (first.get("param_shapes") is not None and not is_universal):
        prefix = next(iter(optimizer_names.values()), ZERO).partition(ZERO)[0]
        form = f"{prefix}zero_pp_rank_{{}}_mp_rank_{stage:02}_optim_states.pt"
        optimizers = [read(name) for name in _of_all_ranks(optimizer_names, world, form)]
    _require_alike(models, "ranks")
    why = f"the checkpoint is of {world} ranks, so this is left over from a save of more"
    skipped = tuple((name, why) for numbered in (of_ranks, optimizer_names) for rank, name in numbered.items() if rank >= world)
    return DeepSpeedFiles(
        folder=folder,
        models=models,
        optimizers=optimizers,
        is_universal=is_universal,
        experts=experts,
        expert_optimizers=expert_optimizers,
        skipped=skipped,
    )


def _of_ep_ranks(names: Sequence[str]) -> list[str]:
    numbered = {int(match[1]): name for name in names if (match := EXPERT_OPTIMIZER.fullmatch(name))}
    missing = [rank for rank in range(len(numbered)) if rank not in numbered]
    if missing:
        raise MalformedError(f"it lacks expp_rank_{missing[0]}_mp_rank_00_optim_states.pt")
    return [numbered[rank] for rank in range(len(numbered))]


def _of_all_ranks(numbered: Mapping[int, str], world: int, form: str) -> list[str]:
    missing = [rank for rank in range(world) if rank not in numbered]
    if missing:
        more = f" and those of {len(missing) - 1} more ranks" if len(missing) > 1 else ""
        raise MalformedError(f"it lacks {form.format(missing[0])}{more}; it was saved by {world} ranks")
    return [numbered[rank] for rank in range(world)]


def _require_alike(models: Sequence[Mapping[str, Any]], whose: str, *, with_shapes: bool = True) -> None:
    for rank, model in enumerate(models):
        for key in _EQUAL:
            one, other = models[0].get(key), model.get(key)
            if type(one) not in (int, str, type(None)) or type(one) is not type(other) or one != other:
                raise MalformedError(
                    f"the files of {whose} 0 and {rank} are of different saves: their {key} are {shown(one)} and {shown(other)}"
                )
        if with_shapes and _shapes(model) != _shapes(models[0]):
            raise MalformedError(f"the files of ranks 0 and {rank} are of different saves: they have parameters of other shapes")


def _shapes(model: Mapping[str, Any]) -> tuple[list[Shapes], Shapes]:
    shapes = [shapes_of(group, "param_shapes") for group in list_of(model.get("param_shapes") or [], "param_shapes")]
    return shapes, shapes_of(model.get("frozen_param_shapes") or {}, "frozen_param_shapes")


def _refuse_kinds(folder: Folder, names: Sequence[str]) -> None:
    for name in names:
        if _OF_SLICES.fullmatch(name):
            unsupported(folder, f"a pipeline with tensor parallelism ({name})")
        if _OF_OLD_EXPERTS.fullmatch(name):
            unsupported(folder, f"MoE experts of an old version ({name})")
        match = MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name)
        if match is not None and int(match[2]) and not any(LAYER.fullmatch(other) for other in names):
            unsupported(folder, f"tensor parallelism ({name})")


def unsupported(folder: Folder, what: str) -> NoReturn:
    """Raises `UnsupportedValueError`: a folder of this kind is not imported."""
    raise UnsupportedValueError(
        f"{folder.path} is a DeepSpeed checkpoint with {what}, which is not imported: load it with DeepSpeed, then save it with "
        "tensorstore_ck.deepspeed, or as a state dict with torch.save",
        object_id=folder.path,
    )


def load_file(files: Files, folder: Folder, name: str, known: PickleAllowlist, unknown: dict[str, str]) -> Any:
    """The object in a torch file of a folder; adds names that are not allowed to `unknown`."""
    file = files.map(folder.join(name))
    if not is_torch_file(file):
        raise MalformedError(f"{name} is no file of torch.save, or is cut off")
    value, names = load_torch_file(files, file, known)
    unknown.update(names)
    return value


# --- what a foreign file says, checked ------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A foreign value in a message; only its type, unless it is a short one."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return printable(value, 40) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


def shapes_of(value: object, what: str) -> Shapes:
    """A dict of name -> shape."""
    if not isinstance(value, dict):
        raise MalformedError(f"its {what} is malformed")
    shapes = {}
    for name, shape in value.items():
        is_shape = isinstance(shape, torch.Size | tuple | list) and len(shape) <= MAX_DIMS and all(type(extent) is int for extent in shape)
        if type(name) is not str or not is_shape or min(shape, default=0) < 0 or prod(extent or 1 for extent in shape) > MAX_TENSOR_BYTES:
            raise MalformedError(f"the shape of {printable(name, 80)} in its {what} is malformed")
        shapes[name] = tuple(shape)
    return shapes


def flat_of(value: object, what: str) -> torch.Tensor:
    """A plain tensor, as one dimension."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise MalformedError(f"{what} is no plain tensor")
    return value.detach().reshape(-1)


def list_of(value: object, what: str, count: int | None = None) -> list[Any]:
    """A list, of `count` items."""
    if not isinstance(value, list | tuple) or count not in (None, len(value)):
        have = f"{len(value)} items" if isinstance(value, list | tuple) else "no list"
        raise MalformedError(f"its {what} has {have}" + ("" if count is None else f", where {count} are needed"))
    return list(value)


def dict_of(value: object, what: str) -> dict[Any, Any]:
    """A dict."""
    if not isinstance(value, dict):
        raise MalformedError(f"it has no {what}")
    return value


def copied(value: Any) -> Any:
    """A value that each parameter has a copy of."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def same_elements(weights: torch.Tensor, masters: torch.Tensor) -> bool:
    """Whether the ends of these weights are the masters, rounded to the dtype of the weights; both as flat or not.

    DeepSpeed makes weights from masters in each step, so those of one save agree; a sample shows files of different saves, and elements
    in another order.
    """
    weights, masters = weights.detach().reshape(-1), masters.detach().reshape(-1)
    for part in (slice(None, SAMPLE), slice(-SAMPLE, None)):
        one, other = weights[part], masters[part].to(weights.dtype)
        if not bool(((one == other) | (one.isnan() & other.isnan())).all()):
            return False
    return True

"""The position of each parameter's elements in the flat tensors of DeepSpeed's files.

ZeRO 1 and 2, and the optimizer for bfloat16, flatten the parameters of a group in the order of ``param_shapes``, and cut that into equal
parts by ranks; the last ends with padding. ZeRO 3 cuts each parameter into equal parts by ranks, which end with padding; a rank's
parts of several parameters are one flat tensor.

``param_slice_mappings`` is not needed for that, and is wrong with ``round_robin_gradients`` (DeepSpeed 0.19.8); else it must agree.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.integrations.deepspeed_names import MASTER
from tensorstore_ck.integrations.importing.deepspeed.experts import ep_size_of, is_expert
from tensorstore_ck.integrations.importing.deepspeed.files import (
    DeepSpeedFiles,
    Shapes,
    copied,
    dict_of,
    flat_of,
    list_of,
    shapes_of,
    shown,
    unsupported,
)
from tensorstore_ck.integrations.importing.malformed import MalformedError, printable
from tensorstore_ck.state.sourced_tensor import ElementRun
from tensorstore_ck.training.optimizers import is_same, named_groups

_STAGE_3: Final = "fp32_flat_groups"
"""The key of masters in files of ZeRO 3."""
_MAX_DEPTH: Final = 3
"""The depth of an optimizer's options: groups, options, pairs such as ``betas``."""


@dataclass(frozen=True, slots=True)
class FoundParameter:
    """A trained parameter."""

    name: str
    shape: tuple[int, ...]
    runs: dict[str, list[ElementRun]] = field(default_factory=dict)
    """Its master weights, and those states of the optimizer that have a number for each element."""
    scalars: dict[str, Any] = field(default_factory=dict)


class FoundOptimizer(NamedTuple):
    """An optimizer by the names of its parameters."""

    parameters: list[FoundParameter]
    groups: Any
    """The options of each group, in a list, whose ``params`` are names; or what `united` makes."""
    scaler: object
    """A loss scaler, as a dict; None: there is none."""


class _Rank(NamedTuple):
    flats: list[torch.Tensor]
    """Masters."""
    base: dict[str, Any]
    """The state dict of the optimizer that DeepSpeed's wraps."""
    mappings: list[Any] | None
    saved: dict[str, Any]
    number: int


def optimizer_of_ranks(read: DeepSpeedFiles) -> FoundOptimizer:
    """The optimizer in the files of all ranks. Raises `MalformedError` if they do not fit each other."""
    saved = [dict_of(of_rank.get("optimizer_state_dict"), "optimizer_state_dict") for of_rank in read.optimizers]
    shapes = [shapes_of(group, "param_shapes") for group in list_of(read.model.get("param_shapes"), "param_shapes")]
    flats_key, base_key = (
        (_STAGE_3, "optimizer_state_dict") if _STAGE_3 in saved[0] else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    ranks = []
    for number, of_rank in enumerate(saved):
        if isinstance(of_rank.get(base_key), list):
            unsupported(read.folder, "elastic_checkpoint (its optimizer does not say where parameters lie)")
        if flats_key not in of_rank or not isinstance(of_rank.get(base_key), dict):
            what = f"it lacks {flats_key} or {base_key}"
            raise MalformedError(f"DeepSpeed {read.version} laid out the optimizer of rank {number} in a way that is not known ({what})")
        flats = [flat_of(flat, f"{flats_key} of rank {number}") for flat in list_of(of_rank[flats_key], flats_key, len(shapes))]
        mappings = of_rank.get("param_slice_mappings")
        mappings = None if mappings is None else list_of(mappings, "param_slice_mappings", len(shapes))
        ranks.append(_Rank(flats, base=of_rank[base_key], mappings=mappings, saved=of_rank, number=number))
    for number, rank in enumerate(ranks):
        if not is_same(_plain(rank.base.get("param_groups")), _plain(ranks[0].base.get("param_groups"))):
            raise MalformedError(f"the optimizers of ranks 0 and {number} have other options: their files are of different saves")
        if not is_same(_plain(rank.saved.get("loss_scaler")), _plain(ranks[0].saved.get("loss_scaler"))):
            raise MalformedError(f"the loss scalers of ranks 0 and {number} differ: their files are of different saves")
    options = list_of(ranks[0].base.get("param_groups"), "param_groups")
    parameters = [
        list(_spread(read, group=group, index=index, ranks=ranks, ep_size=_ep_size(options, index, len(ranks))))
        for index, group in enumerate(shapes)
    ]
    groups = groups_of(options, parameters)
    return FoundOptimizer(
        [parameter for spread in parameters for part in spread for parameter in part], groups, ranks[0].saved.get("loss_scaler")
    )


def _ep_size(groups: Sequence[Any], index: int, ranks: int) -> int:
    """Over how many ranks the experts in a flat tensor are spread; 1: it has none."""
    for group in groups:
        if isinstance(group, dict) and isinstance(group.get("params"), list) and index in group["params"]:
            return ep_size_of(group, ranks)
    return 1


def _spread(read: DeepSpeedFiles, group: Shapes, index: int, ranks: Sequence[_Rank], ep_size: int) -> Iterator[list[FoundParameter]]:
    """The parameters of a group; of one with experts those of each rank that has other experts, by their global names."""
    for ep_rank in range(ep_size):
        holders = ranks[ep_rank::ep_size]
        _require_parts(holders, index)
        parameters = _of_group(read, group, index, holders)
        if ep_size > 1 or read.experts.weights:
            names = {name: read.experts.global_name(name, ep_size, ep_rank) if is_expert(name) else name for name in group}
            parameters = [replace(parameter, name=names[parameter.name]) for parameter in parameters]
        yield parameters


def _of_group(read: DeepSpeedFiles, group: Shapes, index: int, ranks: Sequence[_Rank]) -> list[FoundParameter]:
    if _STAGE_3 in ranks[0].saved:
        places = _cut_each(group, index, ranks)
        sizes = [rank.flats[index].numel() for rank in ranks]
    else:
        places, part = _cut_together(group, index, ranks, _alignments(ranks[0].saved, index, len(group)))
        sizes = [max(part, rank.flats[index].numel() + _padding(rank.saved, index)) for rank in ranks]
        config = read.model.get("ds_config")
        options = config.get("zero_optimization") if isinstance(config, dict) else None
        if not isinstance(options, dict) or options.get("round_robin_gradients") is not True:
            _require_mapped(places, index, ranks)
    return _with_states(group, index=index, ranks=ranks, places=places, sizes=sizes)


def _require_parts(ranks: Sequence[_Rank], index: int) -> None:
    for rank in ranks:
        counts = rank.saved.get("partition_count")
        count = counts[index] if isinstance(counts, list | tuple) and index < len(counts) else None if isinstance(counts, list) else counts
        if count is not None and shown(count) != str(len(ranks)):
            raise MalformedError(f"rank {rank.number} has one of {shown(count)} parts, where there are {len(ranks)} ranks")


def united(optimizers: Sequence[FoundOptimizer]) -> FoundOptimizer:
    """The optimizers of ranks with different parameters as one: each parameter once, and groups as `named_groups` makes them."""
    parameters: dict[str, FoundParameter] = {}
    groups: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        for parameter in optimizer.parameters:
            parameters.setdefault(parameter.name, parameter)
        own: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key != "name" or not group.get("moe")} for group in optimizer.groups
        ]
        for key, group in named_groups(own).items():
            groups.setdefault(key, {**group, "params": {}})["params"].update(group["params"])
    return FoundOptimizer(list(parameters.values()), groups, optimizers[0].scaler)


# --- positions ------------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A run of a parameter's elements in a rank's flat tensor."""

    name: str
    rank: int
    start: int
    """The position in the parameter."""
    offset: int
    """The position in the flat tensor."""
    size: int


def _cut_together(shapes: Shapes, index: int, ranks: Sequence[_Rank], paddings: Sequence[int]) -> tuple[list[_Place], int]:
    """ZeRO 1 and 2: also returns the size of a part, with padding."""
    sizes = [prod(shape) for shape in shapes.values()]
    total = sum(sizes) + sum(paddings)
    held = [rank.flats[index].numel() for rank in ranks]
    part = held[0] if len(ranks) > 1 else max(held[0], total)  # only the last part is saved without its padding
    if part * len(ranks) < total:
        raise MalformedError(f"its ranks hold {part * len(ranks)} elements of group {index}, whose parameters have {total}")
    places = []
    offset = 0
    for name, size, padding in zip(shapes, sizes, paddings, strict=True):
        for rank in range(offset // part, min(-(-(offset + size) // part), len(ranks))) if part else ():
            first, end = max(offset, rank * part), min(offset + size, (rank + 1) * part)
            if first < end:
                places.append(_Place(name, rank=rank, start=first - offset, offset=first - rank * part, size=end - first))
        offset += size + padding
    for place in places:
        if place.offset + place.size > held[place.rank]:
            raise MalformedError(
                f"rank {place.rank} holds {held[place.rank]} elements of group {index}, and {printable(place.name, 80)} needs those "
                f"from {place.offset} to {place.offset + place.size}"
            )
    return places, part


def _cut_each(shapes: Shapes, index: int, ranks: Sequence[_Rank]) -> list[_Place]:
    """ZeRO 3."""
    offset = 0
    places = []
    for name, shape in shapes.items():
        size = prod(shape)
        part = -(-size // len(ranks))
        for rank in range(len(ranks)):
            start = min(rank * part, size)
            if held := min(part, size - start):
                places.append(_Place(name, rank=rank, start=start, offset=offset, size=held))
        offset += part
    for number, flat in ((rank.number, rank.flats[index]) for rank in ranks):
        if flat.numel() != offset:
            raise MalformedError(f"rank {number} holds {flat.numel()} elements of group {index}, whose parameters need {offset}")
    return places


def _require_mapped(places: Iterable[_Place], index: int, ranks: Sequence[_Rank]) -> None:
    """Checks the places against DeepSpeed's own list, if there is one."""
    computed: list[dict[str, tuple[int, int]]] = [{} for _ in ranks]
    for place in places:
        computed[place.rank][place.name] = place.offset, place.size
    for number, rank in enumerate(ranks):
        if rank.mappings is None:
            continue
        mapping = dict_of(rank.mappings[index], "param_slice_mappings")
        listed = {name: (piece.get("start"), piece.get("numel")) for name, piece in mapping.items() if isinstance(piece, dict)}
        if listed != computed[number]:
            name = next((name for name in computed[number] if listed.get(name) != computed[number][name]), next(iter(listed), ""))
            raise MalformedError(
                f"param_slice_mappings of rank {rank.number} places {printable(name, 80)} elsewhere than its shapes do: these files are of "
                "different saves, or of a version of DeepSpeed that is not known"
            )


def _alignments(saved: Mapping[str, Any], index: int, count: int) -> list[int]:
    """The padding behind each parameter of a group."""
    saved_paddings = saved.get("param_alignment_paddings")
    if saved_paddings is None:
        return [0] * count
    paddings = list_of(list_of(saved_paddings, "param_alignment_paddings")[index : index + 1], "param_alignment_paddings", 1)[0]
    paddings = list_of(paddings, "param_alignment_paddings", count)
    if any(type(padding) is not int or not 0 <= padding < 1 << 40 for padding in paddings):
        raise MalformedError("its param_alignment_paddings are malformed")
    return paddings


def _padding(saved: Mapping[str, Any], index: int) -> int:
    """The padding of a rank's part, which moments are saved with."""
    paddings = saved.get("group_paddings")
    padding = paddings[index] if isinstance(paddings, list) and index < len(paddings) else 0
    return padding if type(padding) is int else 0


# --- states ---------------------------------------------------------------------------------------------------------------


def _with_states(
    shapes: Shapes, index: int, ranks: Sequence[_Rank], places: Sequence[_Place], sizes: Sequence[int]
) -> list[FoundParameter]:
    """The parameters of a group. `sizes`: of each rank's part, with padding, as moments have it."""
    states = [dict_of(dict_of(rank.base.get("state"), "state").get(index, {}), "state") for rank in ranks]
    flats: dict[str, list[torch.Tensor]] = {MASTER: [rank.flats[index] for rank in ranks]}
    scalars: dict[str, Any] = {}
    for key in states[0]:
        if type(key) is not str or key == MASTER or any(key not in state for state in states):
            raise MalformedError(f"not all ranks have {printable(key, 40)!r} of group {index}")
        held = [state[key] for state in states]
        if isinstance(held[0], torch.Tensor) and held[0].dim() > 0:
            flats[key] = [flat_of(tensor, f"{key} of group {index}") for tensor in held]
            for number, tensor in enumerate(flats[key]):
                if tensor.numel() not in (sizes[number], ranks[number].flats[index].numel()):
                    raise MalformedError(
                        f"{key} of group {index} has {tensor.numel()} elements on rank {number}, where its masters have "
                        f"{ranks[number].flats[index].numel()}"
                    )
        elif all(is_same(_plain(value), _plain(held[0])) for value in held):
            scalars[key] = held[0]
        else:
            values = ", ".join(sorted({shown(value) for value in held})[:4])
            raise MalformedError(f"{key} of group {index} differs by rank ({values}): the files are of different saves")
    if any(state.keys() != states[0].keys() for state in states):
        raise MalformedError(f"the ranks have other states of group {index}: their files are of different saves")
    parameters = {
        name: FoundParameter(name, shape, {key: [] for key in flats}, {key: copied(scalar) for key, scalar in scalars.items()})
        for name, shape in shapes.items()
    }
    for key, of_ranks in flats.items():
        for place in places:
            elements = of_ranks[place.rank][place.offset : place.offset + place.size]
            parameters[place.name].runs[key].append(ElementRun(place.start, elements))
    return list(parameters.values())


def groups_of(saved: object, parameters: Sequence[Sequence[Sequence[FoundParameter]]]) -> list[dict[str, Any]]:
    """The groups of the optimizer. Each has some of DeepSpeed's flat tensors.

    `parameters`: in each flat tensor; of experts for each of the ranks that have others, which have groups of their own.
    """
    groups = []
    numbers: list[int] = []
    for group in list_of(saved, "param_groups"):
        options = dict(dict_of(group, "group of parameters"))
        indexes = list_of(options.pop("params", None), "params")
        if any(type(number) is not int or not 0 <= number < len(parameters) for number in indexes):
            raise MalformedError("a group of parameters names flat tensors that it does not have")
        numbers += indexes
        for part in range(max((len(parameters[number]) for number in indexes), default=1)):
            names = [parameter.name for number in indexes for parameter in parameters[number][part]]
            groups.append({**options, "params": names})
    if sorted(numbers) != list(range(len(parameters))):
        raise MalformedError("its groups of parameters do not have each flat tensor once")
    return groups


def _plain(value: object, depth: int = 0) -> object:
    """For a comparison: lists as dicts."""
    if isinstance(value, list | tuple | dict):
        if depth > _MAX_DEPTH:
            raise MalformedError("the options of its optimizer are nested too deep")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: _plain(item, depth + 1) for key, item in items}
    return value

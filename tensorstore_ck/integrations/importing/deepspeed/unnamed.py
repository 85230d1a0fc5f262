"""Names for the optimizer of a DeepSpeed checkpoint without ZeRO, which numbers its parameters.

Masters are compared with the weights of the model. Without masters, in float32, the parameters of each shape are taken in the model's
order, if that leaves no choice: all of them are in one group, and none of the model's is missing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.deepspeed_names import MASTER
from tensorstore_ck.integrations.importing.deepspeed.experts import is_expert
from tensorstore_ck.integrations.importing.deepspeed.files import copied, dict_of, flat_of, list_of, same_elements
from tensorstore_ck.integrations.importing.deepspeed.partitions import FoundOptimizer, FoundParameter
from tensorstore_ck.integrations.importing.malformed import MalformedError, printable
from tensorstore_ck.state.sourced_tensor import ElementRun

IN_ORDER = "numbers of parameters, read as their names in the model's order"
"""A conversion, in words."""


def optimizer_without_names(saved: Mapping[str, Any], weights: Mapping[str, torch.Tensor], origin: str) -> FoundOptimizer:
    """The optimizer of a checkpoint without ZeRO, from its state dict. `weights`: the model's parameters, each once.

    Raises `UnsupportedValueError` if more than one parameter may be meant, `MalformedError` if it does not fit.
    """
    base = dict_of(saved.get("optimizer_state_dict", saved), "state dict of an optimizer")
    states = dict_of(base.get("state"), "state of the optimizer")
    groups = [dict(dict_of(group, "group of parameters")) for group in list_of(base.get("param_groups"), "param_groups")]
    indexes = [list_of(group.pop("params", None), "params") for group in groups]
    left = dict(weights)
    if "fp32_groups" in saved:
        masters = [list_of(group, "fp32_groups") for group in list_of(saved["fp32_groups"], "fp32_groups", len(groups))]
        members = [[_take(left, flat_of(tensor, "a master"), tuple(tensor.shape)) for tensor in group] for group in masters]
        parameters = [
            [_of_one(*member, states.get(index, {})) for member, index in zip(group, list_of(own, "params", len(group)), strict=True)]
            for group, own in zip(members, indexes, strict=True)
        ]
    elif "fp32_groups_flat" in saved:
        flats = list_of(saved["fp32_groups_flat"], "fp32_groups_flat", len(groups))
        parameters = [
            list(_of_flat(left, flat_of(flat, "masters"), states.get(list_of(own, "params", 1)[0], {})))
            for flat, own in zip(flats, indexes, strict=True)
        ]
    else:
        names = _in_order(indexes, of_experts=[group.get("moe") is True for group in groups], states=states, weights=weights, origin=origin)
        parameters = [
            [_of_one(name, tuple(weights[name].shape), None, states.get(index, {})) for name, index in zip(group, own, strict=True)]
            for group, own in zip(names, indexes, strict=True)
        ]
    for group, own in zip(groups, parameters, strict=True):
        group["params"] = [parameter.name for parameter in own]
    return FoundOptimizer([parameter for own in parameters for parameter in own], groups, saved if "cur_scale" in saved else None)


def _take(left: dict[str, torch.Tensor], master: torch.Tensor, shape: tuple[int, ...] | None) -> tuple[str, tuple[int, ...], torch.Tensor]:
    """The next parameter in the model's order that has these master weights, or whose masters these begin with if `shape` is None."""
    for name, weights in left.items():
        size = weights.numel()
        if (shape is None or tuple(weights.shape) == shape) and 0 < size <= master.numel() and same_elements(weights, master[:size]):
            return name, tuple(left.pop(name).shape), master[:size]
    raise MalformedError(
        f"no weights of the model equal masters of {master.numel()} elements: weights and optimizer are of different saves"
    )


def _of_one(name: str, shape: tuple[int, ...], master: torch.Tensor | None, state: object) -> FoundParameter:
    parameter = FoundParameter(name, shape, {} if master is None else {MASTER: [ElementRun(0, master)]})
    for key, value in dict_of(state, "state of a parameter").items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            parameter.scalars[key] = copied(value)
        elif type(key) is str and tuple(value.shape) == shape:
            parameter.runs[key] = [ElementRun(0, flat_of(value, key))]
        else:
            raise MalformedError(f"{printable(key, 40)} of {printable(name, 80)} has shape {list(value.shape)[:8]}, not {list(shape)[:8]}")
    return parameter


def _of_flat(left: dict[str, torch.Tensor], flat: torch.Tensor, state: object) -> Iterator[FoundParameter]:
    """The parameters that are flattened into one tensor."""
    offset = 0
    while offset < flat.numel():
        name, shape, master = _take(left, flat[offset:], None)
        parameter = FoundParameter(name, shape, {MASTER: [ElementRun(0, master)]})
        for key, value in dict_of(state, "state of a group").items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                parameter.scalars[key] = copied(value)
            elif value.numel() == flat.numel() and type(key) is str:
                parameter.runs[key] = [ElementRun(0, flat_of(value, key)[offset : offset + prod(shape)])]
            else:
                raise MalformedError(f"{printable(key, 40)} has {value.numel()} elements, where its masters have {flat.numel()}")
        yield parameter
        offset += prod(shape)


def _in_order(
    indexes: Sequence[Sequence[Any]],
    of_experts: Sequence[bool],
    states: Mapping[Any, Any],
    weights: Mapping[str, torch.Tensor],
    origin: str,
) -> list[list[str]]:
    """`of_experts`: whether a group has experts, and nothing else."""
    kind_of: dict[Any, tuple[bool, tuple[int, ...]]] = {}
    for own, has_experts in zip(indexes, of_experts, strict=True):
        for index in own:
            state = dict_of(states.get(index, {}), "state of a parameter")
            shapes = {tuple(value.shape) for value in state.values() if isinstance(value, torch.Tensor) and value.dim()}
            kind_of[index] = has_experts, shapes.pop() if len(shapes) == 1 else ()
    by_kind: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    for name, tensor in weights.items():
        by_kind.setdefault((is_expert(name), tuple(tensor.shape)), []).append(name)
    groups_of: dict[tuple[bool, tuple[int, ...]], set[int]] = {}
    for number, own in enumerate(indexes):
        for index in own:
            groups_of.setdefault(kind_of[index], set()).add(number)
    for kind, count in Counter(kind_of.values()).items():
        names = by_kind.get(kind, [])
        if len(names) != count or len(groups_of[kind]) > 1:
            raise UnsupportedValueError(
                f"{origin} was saved without ZeRO in float32: its optimizer numbers its parameters, and of shape {list(kind[1])[:8]} "
                f"it has {count} in {len(groups_of[kind])} groups where the model has {len(names)}, so their names cannot be found: load "
                "it with DeepSpeed, then save it with tensorstore_ck.deepspeed",
                object_id="optimizer",
            )
    taken = {kind: iter(names) for kind, names in by_kind.items()}
    return [[next(taken[kind_of[index]]) for index in own] for own in indexes]

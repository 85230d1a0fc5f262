"""Layers of pipelines in DeepSpeed's files: ``layer_NN-model_states.pt``, under the names that parameters have in the whole model.

A parameter of layer 3 is ``3.NAME``. One of a tied layer is ``tied_modules.KEY.NAME``, and its file does not say so: it is the layer whose
own names are in no optimizer, and whose weights are the masters of that key.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from tensorstore_ck.integrations.deepspeed_names import MASTER
from tensorstore_ck.integrations.importing.deepspeed.files import DeepSpeedFiles, Shapes, dict_of, list_of, same_elements
from tensorstore_ck.integrations.importing.deepspeed.partitions import FoundParameter
from tensorstore_ck.integrations.importing.malformed import MalformedError, printable

_TIED: Final = re.compile(r"tied_modules\.([^.]+)\.(.+)")


def model_of_layers(
    layers: Mapping[int, Mapping[str, Any]], parameters: Iterable[FoundParameter], buffers: Collection[str]
) -> dict[str, Any]:
    """The weights of the whole model. `layers`: by number, and the names in them. `parameters`: those that are trained.

    Raises `MalformedError` if the layer of a parameter is missing, or more than one may be meant.
    """
    trained = {parameter.name: parameter for parameter in parameters}
    tied: dict[str, dict[str, FoundParameter]] = {}
    for parameter in trained.values():
        if match := _TIED.fullmatch(parameter.name):
            tied.setdefault(match[1], {})[match[2]] = parameter
    model: dict[str, Any] = {}
    for number, layer in sorted(layers.items()):
        own = {f"{number}.{name}": tensor for name, tensor in layer.items()}
        if not own.keys() & {*trained, *buffers} and (key := _key_of(number, layer, tied)) is not None:
            own = {f"tied_modules.{key}.{name}": tensor for name, tensor in layer.items()}
        for name, tensor in own.items():
            model.setdefault(name, tensor)
    missing = next((name for name in (*trained, *buffers) if name not in model), None)
    if missing is not None:
        raise MalformedError(f"it lacks the file of the layer that has {printable(missing, 80)}, or that is of another save")
    return model


def with_shapes(stage: DeepSpeedFiles, layers: Mapping[int, Mapping[str, Any]]) -> DeepSpeedFiles:
    """The files of a stage with ``param_shapes``, which the optimizer for bfloat16 without ZeRO leaves out: from ``param_slice_mappings``.

    Raises:
        MalformedError: they say nothing of a parameter.
    """
    if stage.model.get("param_shapes") is not None:
        return stage
    saved = [dict_of(states.get("optimizer_state_dict"), "optimizer_state_dict") for states in stage.optimizers]
    mappings = [list_of(optimizer.get("param_slice_mappings"), "param_slice_mappings") for optimizer in saved]
    groups: list[Shapes] = []
    for index in range(len(mappings[0])):
        sizes: dict[str, int] = {}  # in the order of ranks, and of the parts in each rank's flat tensor
        for mapping in mappings:
            pieces = dict_of(list_of(mapping, "param_slice_mappings", len(mappings[0]))[index], "param_slice_mappings")
            for name, piece in sorted(pieces.items(), key=lambda item: _count(item[1], "start")):
                sizes[str(name)] = sizes.get(str(name), 0) + _count(piece, "numel")
        groups.append({name: _shape_of(name, size, layers) for name, size in sizes.items()})
    return replace(stage, models=[{**stage.model, "param_shapes": groups}])


def _count(piece: object, key: str) -> int:
    count = piece.get(key) if isinstance(piece, dict) else None
    if type(count) is not int or not 0 <= count < 1 << 62:
        raise MalformedError("its param_slice_mappings are malformed")
    return count


def _shape_of(name: str, size: int, layers: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    match, own = _TIED.fullmatch(name), name.partition(".")
    candidates = (
        [layer.get(match[2]) for layer in layers.values()]
        if match
        else [layers.get(int(own[0]), {}).get(own[2])]
        if own[0].isdecimal()
        else []
    )
    shapes = {tuple(tensor.shape) for tensor in candidates if isinstance(tensor, torch.Tensor) and tensor.numel() == size}
    if len(shapes) != 1:
        raise MalformedError(f"no file of a layer has {printable(name, 80)} with {size} elements")
    return shapes.pop()


def _key_of(number: int, layer: Mapping[str, Any], tied: Mapping[str, Mapping[str, FoundParameter]]) -> str | None:
    """The key of a tied layer; None: it is not tied."""
    fitting = [key for key, members in tied.items() if all(_has(layer, name, parameter) for name, parameter in members.items())]
    if len(fitting) > 1:
        raise MalformedError(f"layer {number} may be each of the tied layers {', '.join(printable(key, 40) for key in fitting[:4])}")
    return fitting[0] if fitting else None


def _has(layer: Mapping[str, Any], name: str, parameter: FoundParameter) -> bool:
    tensor = layer.get(name)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != parameter.shape:
        return False
    flat = tensor.detach().reshape(-1)
    return all(same_elements(flat[run.start : run.stop], run.elements) for run in parameter.runs.get(MASTER, []))

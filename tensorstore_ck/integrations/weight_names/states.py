"""Converts a state in memory: each new tensor is `Boxes` of views of the old ones, so nothing is copied."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tensorstore_ck.format.block_assignment import overlap
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.integrations.weight_names.conversion import ConvertedTensor, TensorForm, plan_conversion, row_box
from tensorstore_ck.integrations.weight_names.names_file import WeightNames
from tensorstore_ck.state.boxes import Box, Boxes


def convert_state(names: WeightNames, state: Any) -> tuple[dict[str, torch.Tensor | Boxes], list[str]]:
    """The tensors of a state under the names of the other side, and the paths of what is no tensor. Raises: see `plan_conversion`."""
    tensors: dict[str, Sequence[Box]] = {}
    left_out = []
    for path, value in _leaves(state, ""):
        if isinstance(value, torch.Tensor):
            tensors[path] = [Box(value.detach(), tuple(value.shape), (0,) * value.dim())]
        elif isinstance(value, Boxes):
            tensors[path] = value.boxes
        else:
            left_out.append(path)
    forms = {name: TensorForm(boxes[0].global_shape, str(boxes[0].local.dtype).removeprefix("torch.")) for name, boxes in tensors.items()}
    return {name: _converted(tensor, tensors) for name, tensor in plan_conversion(names, forms).items()}, left_out


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _converted(tensor: ConvertedTensor, sources: Mapping[str, Sequence[Box]]) -> torch.Tensor | Boxes:
    shape, boxes = tensor.form.shape, []
    for copy in tensor.copies:
        for held in sources[copy.source]:
            wanted = row_box(copy.source_index, copy.source_row, copy.rows, held.global_shape)
            common = overlap(wanted, BoxBounds(held.offsets, tuple(held.local.shape)))
            if common is None:
                continue
            within = tuple(slice(a - b, a - b + size) for a, b, size in zip(common.offsets, held.offsets, common.sizes, strict=True))
            local = held.local[within][(0,) * len(copy.source_index)][(None,) * len(copy.target_index)]
            first = row_box(copy.target_index, copy.target_row, copy.rows, shape).offsets
            shifts = [a - b for a, b in zip(common.offsets, wanted.offsets, strict=True)][len(copy.source_index) :]
            at = (*copy.target_index, *(a + b for a, b in zip(first[len(copy.target_index) :], shifts, strict=True)))
            boxes.append(Box(local, shape, at))
    if len(boxes) == 1 and len(tensor.copies) == 1 and boxes[0].local.shape == sources[copy.source][0].local.shape:
        return boxes[0].local  # a tensor of its own, not a view of one with others
    return Boxes(boxes) if boxes else torch.empty(shape, dtype=getattr(torch, tensor.form.dtype))

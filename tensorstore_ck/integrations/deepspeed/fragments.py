"""The position of each parameter's elements on this rank: in the model, and in the flat tensors that DeepSpeed's optimizers update.

ZeRO flattens the parameters of a group into one tensor, pads it, and cuts it by ranks; each of its optimizers has other names for that.
Here all of them are one thing: a run of a parameter's elements. Padding is left out, so a saved state fits any stage and number of ranks.

Names mean the same on all ranks: experts are numbered over all ranks, not from 0 on each. The stages of a pipeline need nothing of the
kind: DeepSpeed names a stage's layers by their numbers in the whole model, and tied layers by their key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.state import FlatShard
from tensorstore_ck.training.parameter_names import ParameterNames

OPTIMIZERS: Final = (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    BF16_Optimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
    torch.optim.Optimizer,
)
"""Classes of an engine's optimizer; the last one without ZeRO, in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """A run of a parameter's elements on this rank; empty where other ranks have all of them."""

    name: str
    shape: tuple[int, ...]
    start: int
    """Its first element in the flattened parameter."""
    weights: torch.Tensor
    """These elements as the model has them; one-dimensional."""
    is_whole: bool
    """All ranks have all elements."""
    flat: torch.Tensor | None = None
    """The tensor that the optimizer updates, the key of its state; None: the parameter is frozen."""
    offset: int = 0
    """Where in `flat` the elements begin."""
    group: int = 0

    def is_elementwise(self, value: object) -> bool:
        """Whether this value in the optimizer's state has a number for each element that the optimizer updates."""
        return isinstance(value, torch.Tensor) and self.flat is not None and value.shape == self.flat.shape and value.dim() > 0

    def piece(self, of: torch.Tensor) -> "torch.Tensor | FlatShard":
        """The piece to save for these elements, and to restore them into; `of`: the model's elements, or a tensor like `flat`."""
        if of is not self.weights:
            of = of.detach().view(-1).narrow(0, self.offset, self.weights.numel())
        return of.view(self.shape) if self.is_whole else FlatShard(of, self.shape, self.start)


def base_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed's wraps, with its groups and states."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def fragments_of(optimizer: Any, names: ParameterNames) -> list[Fragment]:
    """The fragments of all parameters, in the order of the parameter groups; then those that are frozen.

    Raises:
        InvalidOptionError: the optimizer trains parameters of no given model.
        UnsupportedValueError: a parameter is spread in another way.
    """
    fragments = [] if optimizer is None else list(_trained(optimizer, names))
    trained = {fragment.name for fragment in fragments}
    frozen = ((name, parameter) for name, parameter in names.parameters.items() if name not in trained)
    return fragments + [_frozen(name, parameter) for name, parameter in frozen]


def _trained(optimizer: Any, names: ParameterNames) -> Iterator[Fragment]:
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _of_stage_3(optimizer, names)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        # not by parameter._hp_mapping, which is wrong for round_robin_gradients (DeepSpeed 0.19.8)
        for group, parameters in enumerate(optimizer.round_robin_bit16_groups):
            offsets, rank = optimizer.round_robin_bit16_offsets[group], torch.distributed.get_rank(optimizer.real_dp_process_group[group])
            yield from _of_partition(
                names, parameters, offsets, rank=rank, flat=optimizer.single_partition_of_fp32_groups[group], group=group
            )
    elif isinstance(optimizer, BF16_Optimizer):
        for group, parameters in enumerate(optimizer.bf16_groups):
            ends = [*accumulate(parameter.numel() for parameter in parameters)]
            offsets, rank = [0, *ends[:-1]], torch.distributed.get_rank(optimizer.real_dp_process_group[group])
            yield from _of_partition(names, parameters, offsets, rank=rank, flat=optimizer.fp32_groups_flat_partition[group], group=group)
    elif isinstance(optimizer, FP16_Optimizer):
        for group, (parameters, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
            offset = 0
            for parameter in parameters:
                yield _whole(_name_of(names, parameter), parameter=parameter, flat=flat, offset=offset, group=group)
                offset += parameter.numel()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for group, (parameters, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
            for parameter, master in zip(parameters, masters, strict=True):
                yield _whole(_name_of(names, parameter), parameter=parameter, flat=master, offset=0, group=group)
    else:
        for group, options in enumerate(optimizer.param_groups):
            for parameter in options["params"]:
                yield _whole(_name_of(names, parameter), parameter=parameter, flat=parameter, offset=0, group=group)


def _of_partition(
    names: ParameterNames, parameters: list[torch.Tensor], offsets: list[int], *, rank: int, flat: torch.Tensor, group: int
) -> Iterator[Fragment]:
    """ZeRO 1 and 2, and the optimizer for bfloat16: each rank has all weights, and updates its part of a flat group.

    `offsets`: where each parameter begins in the flat group. `flat`: the part of rank number `rank`, which is as large as any.
    """
    begin = rank * flat.numel()
    for parameter, offset in zip(parameters, offsets, strict=True):
        first, end = max(offset, begin), min(offset + parameter.numel(), begin + flat.numel())
        start, at, count = (first - offset, first - begin, end - first) if first < end else (0, 0, 0)
        weights = parameter.detach().view(-1).narrow(0, start, count)
        name, shape = _name_of(names, parameter), tuple(parameter.shape)
        yield Fragment(name, shape, start, weights, is_whole=False, flat=flat, offset=at, group=group)


def _of_stage_3(optimizer: Any, names: ParameterNames) -> Iterator[Fragment]:
    """ZeRO 3: each parameter is cut into equal parts by ranks, and the parts of several parameters make a flat tensor."""
    for number, parameters in enumerate(optimizer.fp16_groups):
        offset = 0
        for parameter in parameters:
            start, weights = _part_of(parameter)
            flat, group = optimizer.fp32_partitioned_groups_flat[number], optimizer.sub_group_to_group_id[number]
            name, shape = _name_of(names, parameter), tuple(parameter.ds_shape)
            yield Fragment(name, shape, start, weights, is_whole=False, flat=flat, offset=offset, group=group)
            offset += parameter.partition_numel()


def _part_of(parameter: Any) -> tuple[int, torch.Tensor]:
    """The first element of this rank's part of a parameter that ZeRO 3 has cut, and the part without padding."""
    size = parameter.partition_numel()
    start = min(torch.distributed.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return start, parameter.ds_tensor.detach().view(-1).narrow(0, 0, min(size, parameter.ds_numel - start))


def _frozen(name: str, parameter: Any) -> Fragment:
    if not hasattr(parameter, "ds_tensor"):
        return _whole(name, parameter)
    start, weights = _part_of(parameter)
    return Fragment(name, tuple(parameter.ds_shape), start, weights, is_whole=False)


def _whole(name: str, parameter: torch.Tensor, flat: torch.Tensor | None = None, offset: int = 0, group: int = 0) -> Fragment:
    if not parameter.is_contiguous():
        raise UnsupportedValueError(f"model.{name} is not contiguous: call .contiguous() before deepspeed.initialize", object_id=name)
    weights = parameter.detach().view(-1)
    return Fragment(name, tuple(parameter.shape), 0, weights, is_whole=True, flat=flat, offset=offset, group=group)


def _name_of(names: ParameterNames, parameter: torch.Tensor) -> str:
    name = names.of(parameter)
    if name is None:
        raise InvalidOptionError("the optimizer trains a parameter that engine.module does not have", object_id="optimizer")
    return name


def with_global_names(model: nn.Module) -> nn.Module:
    """The same parameters and buffers, in modules whose names have global numbers of experts; the model itself if it has no experts."""
    first = {id(experts): ep_rank * len(experts) for ep_rank, experts in _experts_of(model)}
    return _renamed(model, first) if first else model


def has_other_experts(model: nn.Module) -> bool:
    """Whether parameters that differ by expert-parallel rank are outside `MoE` layers, as in those that AutoEP makes."""
    known = {id(parameter) for _, experts in _experts_of(model) for parameter in experts.parameters()}
    return any(is_moe_param(parameter) and id(parameter) not in known for parameter in model.parameters())


def is_copy(parameter: torch.Tensor) -> bool:
    """Whether an earlier stage of the pipeline has the same parameter, which is tied."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def partly_tied(pipeline: Any) -> str | None:
    """A trained parameter of a tied layer whose gradients DeepSpeed does not add up over the stages that have the layer."""
    for key, shared in pipeline.tied_comms.items():
        for name, parameter in shared["module"].named_parameters() if len(shared["ranks"]) > 1 else ():
            if parameter.requires_grad and name not in shared["weight_attr"]:
                return f"tied_modules.{key}.{name}"
    return None


def _experts_of(model: nn.Module) -> Iterator[tuple[int, nn.ModuleList]]:
    """For each MoE layer: this rank's number in the expert-parallel group, and the experts that it has."""
    for module in model.modules():
        if isinstance(module, MoE):
            layer = module.deepspeed_moe
            yield torch.distributed.get_rank(layer.ep_group), layer.experts.deepspeed_experts


def _renamed(module: nn.Module, first: dict[int, int]) -> nn.Module:
    """`first`: id of a list of experts -> the global number of its first expert."""
    shell, start = nn.Module(), first.get(id(module))
    same = ("_parameters", "_buffers", "_non_persistent_buffers_set")  # the same objects, so that later assignments show
    vars(shell).update({name: vars(module)[name] for name in same})
    for name, child in module._modules.items():
        key = name if start is None else str(start + int(name))
        shell._modules[key] = child if child is None else _renamed(child, first)
    return shell

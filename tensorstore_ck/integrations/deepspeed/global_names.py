"""A model's modules under names that mean the same on all ranks: experts are numbered over all ranks, not from 0 on each.

The stages of a pipeline need nothing of the kind: DeepSpeed names a stage's layers by their numbers in the whole model, and tied layers by
their key.
"""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from torch import nn


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

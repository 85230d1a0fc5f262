"""Gradients in the middle of a step, for a save between two micro-batches. Knows no store.

Gradients of sharded parameters are already summed over ranks, so they are shared; those of plain parameters are the rank's own (for
example under DDP's `no_sync`).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.state.memory_order import in_order_of
from tensorstore_ck.state.plain_memory import PLAIN
from tensorstore_ck.training.parameter_names import ParameterNames

Gradients = dict[str, torch.Tensor]


def get_gradients(names: ParameterNames, models: Iterable[nn.Module]) -> tuple[Gradients, Gradients]:
    """The shared gradients and this rank's own, by parameter name; not copied.

    Raises:
        UnsupportedValueError: FSDP holds gradients that it has not summed over ranks yet.
    """
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule) and _holds_unreduced(module):
                raise UnsupportedValueError(
                    "FSDP holds gradients that are not summed over the ranks yet: save after the last micro-batch, or do not call "
                    "set_requires_gradient_sync(False)",
                    object_id="gradients",
                )
    gradients = {name: parameter.grad for name, parameter in names.parameters.items() if parameter.grad is not None}
    shared: Gradients = {name: gradient for name, gradient in gradients.items() if isinstance(gradient, DTensor)}
    return shared, {name: gradient for name, gradient in gradients.items() if name not in shared}


def get_target(names: ParameterNames, stored: Iterable[str]) -> Gradients:
    """Tensors to restore shared gradients into."""
    targets: Gradients = {}
    for name in stored:
        parameter = names.parameters.get(name)
        if parameter is None:
            raise MismatchError(f"the snapshot has a gradient of {name!r}, and the model has no such parameter", object_id=name)
        targets[name] = torch.empty_like(parameter, requires_grad=False)
    return targets


def set_gradients(names: ParameterNames, gradients: Gradients) -> None:
    """Sets each parameter's gradient; None for those without one, as after ``zero_grad``.

    Raises:
        MismatchError: a gradient does not fit a parameter.
    """
    for name, gradient in gradients.items():
        parameter = names.parameters.get(name)
        if parameter is None or parameter.shape != gradient.shape:
            raise MismatchError(f"the snapshot has a gradient of {name!r}, and the model has no such parameter", object_id=name)
    for name, parameter in names.parameters.items():
        restored = gradients.get(name)
        parameter.grad = None if restored is None else _with_strides_of(parameter, restored.to(parameter.device))


def _with_strides_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with the strides of its parameter, as torch makes gradients."""
    return in_order_of(parameter, gradient) if type(gradient) in PLAIN and type(parameter) in PLAIN else gradient


def _holds_unreduced(module: FSDPModule) -> bool:
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # before torch 2.13
    sharded = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
    whole = [getattr(parameter, "_unsharded_param", None) for parameter in sharded]  # made by the first forward pass
    return any(parameter.unsharded_accumulated_grad is not None for parameter in sharded) or any(
        parameter is not None and parameter.grad is not None for parameter in whole
    )

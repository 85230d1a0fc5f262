"""The parameters and buffers of all model parts as one module, by their own names.

torchtitan's `state_dict` splits fused projections (``wqkv``) into copies, which the optimizer's states do not fit, and numbers nothing:
stages of a pipeline have different names, so that they make one model again.
"""

from collections.abc import Sequence

import torch
from torch import nn

from tensorstore_ck.training.parameter_names import walk


def weights_of(parts: Sequence[nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """A module that has the parameters and buffers of `parts`, the models or stages of this rank, and none of their hooks.

    With a `dtype`, floating-point ones are copied into it; without, they are those of `parts`, also if a buffer is replaced later.
    """
    weights = nn.Module()
    copies: dict[int, nn.Parameter] = {}  # tied parameters stay tied

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()

    for part in parts:
        for prefix, module in walk(part, ""):
            parameters = [*module.named_parameters(recurse=False, remove_duplicate=False)]
            if not parameters and not module._buffers:
                continue
            own = _child(weights, prefix)
            for name, parameter in parameters:
                if dtype is not None and id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(copied(parameter), requires_grad=False)
                own.register_parameter(name, copies.get(id(parameter), parameter))
            own._non_persistent_buffers_set = own._non_persistent_buffers_set | module._non_persistent_buffers_set
            if dtype is not None:
                copies_here = {name: None if buffer is None else copied(buffer) for name, buffer in module._buffers.items()}
                own._buffers = {**own._buffers, **copies_here}
            else:
                own._buffers = {**own._buffers, **module._buffers} if own._buffers else module._buffers
    return weights


def _child(module: nn.Module, prefix: str) -> nn.Module:
    """The submodule with this prefix, such as ``layers.0.``."""
    for name in prefix.split(".")[:-1]:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module

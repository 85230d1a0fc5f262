"""The parameters and buffers of a model by their own names, whatever wraps the model or its layers. Knows no store.

Does not call torch.distributed.checkpoint.state_dict: its names depend on the order in which wrappers are nested.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tensorstore_ck.training.parameter_names import wrapping


def get_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The entries of ``model.state_dict()``, not copied, by their own names. `keep_vars`: the parameters themselves."""
    return {_own_name(model, key): value for key, value in model.state_dict(keep_vars=keep_vars).items()}


def state_dict_of(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The result of `get_state` by the names of ``model.state_dict()``; the state may come from the same model in other wrappers."""
    keys = {_own_name(model, key): key for key in model.state_dict()}
    return {keys.get(name, name): value for name, value in state.items()}


def set_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads what `get_state` returned."""
    model.load_state_dict(state_dict_of(model, state), strict=False)


def _own_name(model: nn.Module, key: str) -> str:
    """`key` without the attributes in which wrappers keep their modules."""
    names: list[str] = []
    module: nn.Module | None = model
    for part in key.split("."):
        attribute = wrapping(module)
        while module is not None and attribute not in (None, part):  # hooks of activation checkpointing leave its attribute out
            module = module._modules[attribute]
            attribute = wrapping(module)
        if attribute is None:
            names.append(part)
        module = None if module is None or part not in module._modules else module._modules[part]
    return ".".join(names)

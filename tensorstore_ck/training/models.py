"""The states of models: parameters and buffers by torch's names, the tensors themselves. Knows no store."""

from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

State = dict[str, Any]
_LENIENT: Final = StateDictOptions(strict=False)
"""A model without parameters is as good as any."""


def get_state(model: nn.Module) -> State:
    """Name -> tensor."""
    return get_model_state_dict(model, options=_LENIENT)


def set_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Hands it what was restored."""
    if state:
        set_model_state_dict(model, dict(state))

"""States of models: parameters and buffers by torch's names, not copied. Knows no store."""

from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

State = dict[str, Any]
_LENIENT: Final = StateDictOptions(strict=False)  # a model without parameters is allowed


def get_state(model: nn.Module) -> State:
    """Name -> tensor."""
    return get_model_state_dict(model, options=_LENIENT)


def set_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a restored state."""
    if state:
        set_model_state_dict(model, dict(state))

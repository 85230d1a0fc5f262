"""The states of models: parameters and buffers by torch's names, the tensors themselves.

Buffers under DDP, such as batch norm's statistics, differ between ranks. What all share has those of the first rank, from which DDP begins
a step, and a rank's own side has its own. Knows no store.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from tensorstore_ck.state import FlatShard
from tensorstore_ck.training.names import walk

State = dict[str, Any]
_LENIENT: Final = StateDictOptions(strict=False)
"""A model without parameters is as good as any."""


def get_state(model: nn.Module) -> State:
    """Name -> tensor."""
    return get_model_state_dict(model, options=_LENIENT)


def get_share(model: nn.Module) -> State:
    """What this rank puts of it, so that all ranks together put one state."""
    state = get_state(model)
    for name, is_first in _replicated(model).items():
        if name in state:
            flat = state[name].reshape(-1)
            state[name] = FlatShard(flat if is_first else flat[:0], tuple(state[name].shape), 0)
    return state


def set_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Hands it what was restored."""
    if state:
        set_model_state_dict(model, dict(state))


def get_own_buffers(model: nn.Module) -> State:
    """Those that other ranks may have otherwise."""
    state = get_state(model)
    return {name: state[name] for name in _replicated(model) if name in state}


@torch.no_grad()
def set_own_buffers(model: nn.Module, buffers: Mapping[str, Any]) -> None:
    """Puts back what `get_own_buffers` gave on this rank; others are as all share them."""
    for name, buffer in get_own_buffers(model).items():
        if name in buffers:
            buffer.copy_(buffers[name])


def _replicated(model: nn.Module) -> dict[str, bool]:
    """Names of buffers under DDP -> whether this is the first rank."""
    found: dict[str, bool] = {}
    replica: DistributedDataParallel | None = None
    inside = ""
    for prefix, module in walk(model, ""):
        if isinstance(module, DistributedDataParallel):
            replica, inside = module, prefix
        elif replica is not None and prefix.startswith(inside):
            is_first = dist.get_rank(replica.process_group) == 0
            found |= {prefix + name: is_first for name, _ in module.named_buffers(recurse=False)}
    return found

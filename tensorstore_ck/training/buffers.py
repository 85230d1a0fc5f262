"""Buffers of modules that are not sharded and may still differ between ranks: batch norm's statistics, histories, counters.

The shared state has the buffers of the first rank that holds them, so that one process, an export and inference get a complete state;
each rank's own state has that rank's buffers. Excludes parameters and DTensors. Knows no store.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from blake3 import blake3
from torch import nn

from tensorstore_ck.state import FlatShard
from tensorstore_ck.training.parameter_names import walk
from tensorstore_ck.training.rank_group import Agreement

State = dict[str, Any]
BIG_BYTES: Final = 1 << 20
"""A larger buffer that is equal on all ranks, such as a mask or rotary angles, is stored once and checked for drift like parameters."""


def plain_buffers(module: nn.Module, *, of_model: bool) -> dict[str, torch.Tensor]:
    """The persistent buffers of a module that are plain tensors, by name.

    `of_model`: use torch's names of a model, whatever wraps it; else the names in ``state_dict``.
    """
    if of_model:
        modules = walk(module, "")
    else:
        modules = ((f"{name}." if name else "", submodule) for name, submodule in module.named_modules(remove_duplicate=False))
    return {
        prefix + name: buffer
        for prefix, submodule in modules
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False)
        if name not in submodule._non_persistent_buffers_set and type(buffer) is torch.Tensor and buffer.layout is torch.strided
    }


def digest(buffer: torch.Tensor) -> bytes:
    """The hash of a big buffer's bytes; empty for a small one."""
    if buffer.nbytes <= BIG_BYTES:
        return b""
    memory = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return blake3(memory.data, max_threads=blake3.AUTO).digest(16)


def shared_state(path: str, state: State, buffers: Mapping[str, torch.Tensor], agreement: Agreement) -> State:
    """The state of the module at `path` as this rank saves it: only one rank adds the bytes of a buffer that differs."""
    state = dict(state)
    for name, buffer in rank_buffers(path, buffers, agreement).items():
        if name in state:
            flat = buffer.detach().contiguous().reshape(-1)
            state[name] = FlatShard(flat if f"{path}.{name}" in agreement.leads else flat[:0], tuple(buffer.shape), 0)
    return state


def rank_buffers(path: str, buffers: Mapping[str, torch.Tensor], agreement: Agreement) -> State:
    """The buffers that this rank stores as its own."""
    kept = agreement.leads | agreement.follows
    return {name: buffer for name, buffer in buffers.items() if f"{path}.{name}" in kept}


@torch.no_grad()
def restore(buffers: Mapping[str, torch.Tensor], stored: Mapping[str, Any]) -> None:
    """Fills the buffers that have a stored value; the others keep the shared one."""
    for name, buffer in buffers.items():
        if name in stored:
            buffer.copy_(stored[name])

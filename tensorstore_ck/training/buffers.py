"""Buffers of modules, which ranks may come to hold differently though nobody splits them: batch norm's statistics, histories, counters.

What all ranks share has those of the first rank that holds them, so that one process, an export and inference get a sound state; each
rank's own side has its own. Parameters and DTensors are never among them. Knows no store.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from blake3 import blake3
from torch import nn

from tensorstore_ck.state import FlatShard
from tensorstore_ck.training.parameter_names import walk
from tensorstore_ck.training.rank_agreement import Agreement

State = dict[str, Any]
BIG_BYTES: Final = 1 << 20
"""Of a larger buffer that is equal on all ranks, such as a mask or rotary angles, copies would cost more than they are worth: as long as
all ranks put it alike it is watched for drift, as parameters are."""


def plain_buffers(module: nn.Module, *, of_model: bool) -> dict[str, torch.Tensor]:
    """The buffers of a module's state of which this process holds a plain tensor, by their names there.

    `of_model`: whether those are torch's names of a model, whatever wraps it, or what ``state_dict`` gives.
    """
    if of_model:
        modules = walk(module, "")
    else:
        modules = ((f"{name}." if name else "", each) for name, each in module.named_modules(remove_duplicate=False))
    return {
        prefix + name: buffer
        for prefix, each in modules
        for name, buffer in each.named_buffers(recurse=False, remove_duplicate=False)
        if name not in each._non_persistent_buffers_set and type(buffer) is torch.Tensor and buffer.layout is torch.strided
    }


def digest(buffer: torch.Tensor) -> bytes:
    """Of the bytes of a big one; empty for another."""
    if buffer.nbytes <= BIG_BYTES:
        return b""
    memory = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return blake3(memory.data, max_threads=blake3.AUTO).digest(16)


def shared_state(path: str, state: State, found: Mapping[str, torch.Tensor], agreement: Agreement) -> State:
    """The state of a module as this rank puts it, so that all ranks together put one. `path`: where it lies in the whole."""
    state = dict(state)
    for name, buffer in rank_buffers(path, found, agreement).items():
        if name in state:
            flat = buffer.detach().contiguous().reshape(-1)
            state[name] = FlatShard(flat if f"{path}.{name}" in agreement.leads else flat[:0], tuple(buffer.shape), 0)
    return state


def rank_buffers(path: str, found: Mapping[str, torch.Tensor], agreement: Agreement) -> State:
    """What this rank keeps of it."""
    kept = agreement.leads | agreement.follows
    return {name: each for name, each in found.items() if f"{path}.{name}" in kept}


@torch.no_grad()
def restore(found: Mapping[str, torch.Tensor], stored: Mapping[str, Any]) -> None:
    """Fills those of which something is stored; others are as all share them."""
    for name, buffer in found.items():
        if name in stored:
            buffer.copy_(stored[name])

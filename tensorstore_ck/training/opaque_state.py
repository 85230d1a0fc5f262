"""Keeps torch.distributed.checkpoint from flattening states.

DCP flattens dicts and lists, and loads only names that the target state already has: entries that a loader or counter gained later would
be lost silently. It keeps a tuple as one item, so everything without tensors goes into tuples.
"""

from typing import Any, Final

import torch

_SEAL: Final = "sealed"


def seal(state: Any) -> Any:
    """The state, with everything that has no tensors in tuples."""
    if not _has_tensors(state):
        return (_SEAL, state)
    return {key: seal(value) for key, value in state.items()} if isinstance(state, dict) else state


def unseal(state: Any) -> Any:
    """What `seal` was given."""
    if type(state) is tuple and len(state) == 2 and type(state[0]) is str and state[0] == _SEAL:
        return state[1]
    return {key: unseal(value) for key, value in state.items()} if isinstance(state, dict) else state


def _has_tensors(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_has_tensors, state.values()))
    return isinstance(state, torch.Tensor) or (isinstance(state, list | tuple) and any(map(_has_tensors, state)))

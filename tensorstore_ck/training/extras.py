"""What a user adds to the state: stateful objects, and plain values, which are restored into the user's dict.

Knows no store. Generators among them are a rank's own; see `rng`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorstore_ck.training.stateful_parts import StatefulPart, is_stateful, load


def get_state(_: str, found: Any) -> Any:
    """The state of an object, or the value itself."""
    return found.state_dict() if is_stateful(found) else found


def get_target(_: str, found: Any) -> Any:
    """What a snapshot is restored into: existing tensors; None for what the snapshot replaces."""
    if isinstance(found, nn.Module):
        return found.state_dict()
    return found if not is_stateful(found) and _has_tensors(found) else None


def put_back(extra: dict[str, Any], part: StatefulPart, state: Mapping[str, Any]) -> None:
    """Restores each. Dicts and lists stay the same objects, so that other references to them see the restored values."""
    for path, found, stored in part.with_states(state):
        if is_stateful(found):
            load(path, found.load_state_dict, stored)
        else:
            extra[path.removeprefix(f"{part.name}.")] = _filled(found, stored)


def _filled(found: Any, stored: Any) -> Any:
    """`found`, filled with `stored` where its type allows that; else `stored`."""
    if found is stored:  # it was filled in place
        return found
    if isinstance(found, torch.Tensor) and isinstance(stored, torch.Tensor) and (found.shape, found.dtype) == (stored.shape, stored.dtype):
        found.detach().copy_(stored)
        return found
    if type(found) is dict and type(stored) is dict:
        filled = {key: _filled(found.get(key), each) for key, each in stored.items()}
        found.clear()
        found.update(filled)
        return found
    if type(found) is list and type(stored) is list:
        found[:] = [_filled(each, there) for each, there in zip(found, stored, strict=False)] + stored[len(found) :]
        return found
    return stored


def _has_tensors(found: Any) -> bool:
    if isinstance(found, Mapping):
        return any(map(_has_tensors, found.values()))
    if isinstance(found, list | tuple):
        return any(map(_has_tensors, found))
    return isinstance(found, torch.Tensor | np.ndarray)

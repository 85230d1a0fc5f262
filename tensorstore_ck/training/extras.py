"""Objects and values that a user adds to the state: stateful objects, and plain values, which are restored into the user's dict.

Knows no store. Generators among them are a rank's own; see `random_generators`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorstore_ck.training.stateful_parts import StatefulPart, is_stateful, load


def get_state(_: str, given: Any) -> Any:
    """The state of an object, or the value itself."""
    return given.state_dict() if is_stateful(given) else given


def get_target(_: str, given: Any) -> Any:
    """The target of a restore: existing tensors; None for values that the snapshot replaces."""
    if isinstance(given, nn.Module):
        return given.state_dict()
    return given if not is_stateful(given) and _has_tensors(given) else None


def put_back(extra: dict[str, Any], part: StatefulPart, state: Mapping[str, Any]) -> None:
    """Restores each. Dicts and lists stay the same objects, so that other references to them see the restored values."""
    for path, given, stored in part.with_states(state):
        if is_stateful(given):
            load(path, given.load_state_dict, stored)
        else:
            extra[path.removeprefix(f"{part.name}.")] = _filled(given, stored)


def _filled(given: Any, stored: Any) -> Any:
    """`given`, filled with `stored` where its type allows that; else `stored`."""
    if given is stored:  # it was filled in place
        return given
    if isinstance(given, torch.Tensor) and isinstance(stored, torch.Tensor) and (given.shape, given.dtype) == (stored.shape, stored.dtype):
        given.detach().copy_(stored)
        return given
    if type(given) is dict and type(stored) is dict:
        filled = {key: _filled(given.get(key), value) for key, value in stored.items()}
        given.clear()
        given.update(filled)
        return given
    if type(given) is list and type(stored) is list:
        given[:] = [_filled(current, there) for current, there in zip(given, stored, strict=False)] + stored[len(given) :]
        return given
    return stored


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor | np.ndarray)

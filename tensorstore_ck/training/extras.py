"""What a user adds to the state: objects with a state of their own, and plain values, which are put back into the dict they came in.

Knows no store. Generators among them are a rank's own, see `generators`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorstore_ck.training.parts import Part, is_stateful, load


def get_state(_: str, found: Any) -> Any:
    """Of one of them."""
    return found.state_dict() if is_stateful(found) else found


def get_target(_: str, found: Any) -> Any:
    """What it is restored into: tensors that stay where they are; None for what comes anew with the snapshot."""
    if isinstance(found, nn.Module):
        return found.state_dict()
    return found if not is_stateful(found) and _has_tensors(found) else None


def put_back(extra: dict[str, Any], part: Part, state: Mapping[str, Any]) -> None:
    """Gives each its state. A dict or list stays the same object, so that whoever else holds it sees what was restored."""
    for path, found, stored in part.found(state):
        if is_stateful(found):
            load(path, found.load_state_dict, stored)
        elif found is stored:
            pass  # it was filled in place
        elif type(found) is dict and type(stored) is dict:
            found.clear()
            found.update(stored)
        elif type(found) is list and type(stored) is list:
            found[:] = stored
        else:
            extra[path.removeprefix(f"{part.name}.")] = stored


def _has_tensors(found: Any) -> bool:
    if isinstance(found, Mapping):
        return any(map(_has_tensors, found.values()))
    if isinstance(found, list | tuple):
        return any(map(_has_tensors, found))
    return isinstance(found, torch.Tensor | np.ndarray)

"""Objects and values that a user adds to the state: stateful objects, and plain values, which are restored into the user's dict.

Knows no store. Generators among them are a rank's own; see `random_generators`.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.tree import leaves, parse
from tensorstore_ck.state import capture
from tensorstore_ck.state.allocate import form_of
from tensorstore_ck.training.stateful_parts import StatefulPart, is_stateful, load

if TYPE_CHECKING:
    from tensorstore_ck.state import LazySnapshot


def get_state(_: str, given: Any) -> Any:
    """The state of an object, or the value itself."""
    return given.state_dict() if is_stateful(given) else given


def get_target(path: str, given: Any, snapshot: "LazySnapshot") -> Any:
    """The target of a restore: existing tensors; None for what the snapshot replaces, or has in another form than `given`."""
    if isinstance(given, nn.Module):
        return given.state_dict()
    return given if not is_stateful(given) and _has_tensors(given) and _has_form(path, given, snapshot) else None


def put_back(extra: dict[str, Any], part: StatefulPart, state: Mapping[str, Any]) -> None:
    """Restores each. Dicts, lists, sets and deques stay the same objects, so that other references to them see the restored values.

    A record, such as parsed arguments, is replaced: the script may hold other ones on purpose.
    """
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
        with suppress(RuntimeError):  # its elements share memory
            given.detach().copy_(stored)
            return given
    if type(given) is not type(stored):
        return stored
    if isinstance(given, dict):
        filled = {key: _filled(given.get(key), value) for key, value in stored.items()}
        given.clear()
        for key, value in filled.items():  # Counter.update would add
            given[key] = value
    elif isinstance(given, list):
        given[:] = [_filled(current, there) for current, there in zip(given, stored, strict=False)] + stored[len(given) :]
    elif isinstance(given, set):
        given.clear()
        given.update(stored)
    elif isinstance(given, deque) and given.maxlen == stored.maxlen:
        given.clear()
        given.extend(stored)
    else:
        return stored
    return given


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor | np.ndarray)


def _has_form(path: str, given: Any, snapshot: "LazySnapshot") -> bool:
    """Whether the snapshot has tensors and values of the same names, shapes and dtypes at `path`."""
    try:
        captured = capture({path: given})
    except UnsupportedValueError:
        return True  # it is spread over ranks, which the restore compares
    own = leaves(parse(captured.layout, len(captured.values)))
    forms = {leaf.path: None if leaf.kind == "value" else form_of(captured.layout, leaf)[:2] for leaf in own}
    stored = dict.fromkeys(name for name in snapshot.state_values if _is_below(path, name))
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in snapshot.items() if _is_below(path, name)}
    return forms == stored | tensors


def _is_below(path: str, name: str) -> bool:
    return name == path or name.startswith(f"{path}.")

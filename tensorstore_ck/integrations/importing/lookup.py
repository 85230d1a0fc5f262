"""Reads one value by its path out of an imported state: ``trainer.global_step`` is ``state["trainer"]["global_step"]``.

A key may contain dots, so each level tries the longest matching key first. List positions are numbers.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from tensorstore_ck.errors import MismatchError, NotFoundError
from tensorstore_ck.format.record import MAX_STEP
from tensorstore_ck.integrations.importing.malformed import printable

_MISSING: Final = object()
_SHOWN_KEYS: Final = 12


def step_at(state: Any, path: str, origin: str) -> int:
    """The training step at `path` in a state.

    Raises:
        NotFoundError: there is nothing at `path`; the message names `origin`, the file.
        MismatchError: it is not a whole number from 0 on.
    """
    value = _number(_require(state, path, origin))
    if value is None or value != int(value) or not 0 <= value <= MAX_STEP:
        raise MismatchError(
            f"{origin}: {path!r} is {_shown(state, path)}, not a training step: use the path of a whole number", object_id=origin
        )
    return int(value)


def metric_at(state: Any, path: str, origin: str) -> float:
    """The number at `path` in a state. Raises as `step_at`: `MismatchError` if it is not a number."""
    value = _number(_require(state, path, origin), finite=False)
    if value is None:
        raise MismatchError(f"{origin}: {path!r} is {_shown(state, path)}, not a number", object_id=origin)
    return float(value)


def top_level_step(state: Any, key: str) -> int | None:
    """The whole number at a key of a state's outermost dict, if any."""
    value = _number(state[key]) if isinstance(state, Mapping) and key in state else None
    return int(value) if value is not None and value == int(value) else None


def _require(state: Any, path: str, origin: str) -> Any:
    value = _at(state, path)
    if value is _MISSING:
        raise NotFoundError(f"{origin} has nothing at {path!r}; it has: {_known(state)}", object_id=origin)
    return value


def _at(value: Any, path: str) -> Any:
    if not path:
        return value
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        below = _item(value, ".".join(parts[:count]))
        if below is not _MISSING:
            value_below = _at(below, ".".join(parts[count:]))
            if value_below is not _MISSING:
                return value_below
    return _MISSING


def _item(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        number = int(name) if name.isdecimal() else None
        return value[name] if name in value else value.get(number, _MISSING) if number is not None else _MISSING
    if isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return _MISSING


def _number(value: Any, *, finite: bool = True) -> int | float | None:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        is_one = (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
        value = value.item() if is_one else None
    if type(value) not in (int, float) or (finite and value - value != 0):
        return None
    number: int | float = value
    return number


def _shown(state: Any, path: str) -> str:
    value = _at(state, path)
    return printable(value, 40) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


def _known(state: Any) -> str:
    """The keys of the outermost dict, and those one level deeper with plain numbers."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    names = [printable(key, 60) for key in state]
    names += [
        f"{printable(key, 60)}.{printable(inner, 60)}"
        for key, value in state.items()
        if isinstance(value, Mapping)
        for inner, item in value.items()
        if type(item) in (int, float)
    ]
    return ", ".join(names[:_SHOWN_KEYS]) + (", ..." if len(names) > _SHOWN_KEYS else "")

"""Compares two captured states bit by bit, including NaN payloads and signs of zeros. Knows no store and no job."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.values import encode
from tensorstore_ck.state.registered_types import encode_torch

Leaves = dict[str, Any]
"""Path -> tensor or plain value, in the state's order."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor or value that was not the same both times."""

    step: int
    """Steps after the snapshot: 0 when the restored states differ already."""
    name: str
    """The tensor or value, by its path in the state."""
    what: str
    """For people: ``3 of 100 elements differ, by 1.2e-07 at most``."""
    differing: int = 0
    """Elements of a tensor."""
    elements: int = 0
    max_difference: float | None = None
    """Over the elements that are not NaN either time."""


def leaves_of(state: object, path: str = "") -> Leaves:
    """The tensors and values of a state, not copied."""
    return dict(_flat(state, path))


def copied(leaves: Leaves) -> Leaves:
    """A copy for `first_difference`, which later steps do not change."""
    return {path: _copied(leaf) for path, leaf in leaves.items()}


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _flat(child, f"{prefix}{key}")
    elif isinstance(value, list | tuple) and any(isinstance(child, torch.Tensor | np.ndarray | Mapping | list | tuple) for child in value):
        for number, child in enumerate(value):
            yield from _flat(child, f"{prefix}{number}")
    else:
        yield path, value


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return _local(leaf).clone()
    return _bits(leaf)


def _local(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, np.ndarray):
        is_number = leaf.dtype.kind in "biufc" and leaf.itemsize <= 16 and leaf.dtype.isnative
        return torch.from_numpy(leaf.copy() if is_number else np.frombuffer(leaf.tobytes(), np.uint8).copy())
    local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    assert isinstance(local, torch.Tensor)
    return local.detach().cpu()


def _bits(value: object) -> object:
    """Equal for two values only if they are bit-identical."""
    plain = tuple(value) if isinstance(value, list) else value
    try:
        return type(value).__name__, pack_body(encode(plain, "", encode_torch))
    except UnsupportedValueError:
        return type(value).__name__, repr(value)


def first_difference(step: int, expected: Leaves, actual: Leaves) -> Difference | None:
    """The first difference, in the order of the state. `expected` comes from `copied`."""
    for name, leaf in actual.items():
        if name not in expected:
            return Difference(step, name, "it is there the second time only")
        difference = _compare(step, name, expected[name], leaf)
        if difference is not None:
            return difference
    gone = next((name for name in expected if name not in actual), None)
    return None if gone is None else Difference(step, gone, "it is there the first time only")


def _compare(step: int, name: str, old: Any, new: Any) -> Difference | None:
    if not isinstance(old, torch.Tensor):
        return None if old == _copied(new) else Difference(step, name, "the values are not the same")
    if not isinstance(new, torch.Tensor | np.ndarray):
        return Difference(step, name, "it is a tensor the first time only")
    other = _local(new)
    if (old.dtype, old.shape) != (other.dtype, other.shape):
        return Difference(step, name, f"{old.dtype} {list(old.shape)} the first time, {other.dtype} {list(other.shape)} the second")
    differs = (_bytes_of(old) != _bytes_of(other)).any(dim=-1)
    count = int(differs.sum())
    if not count:
        return None
    gap = _largest_gap(old, other)
    by = "" if gap is None else f", by {gap:.3g} at most"
    what = f"{count} of {old.numel()} elements differ{by}"
    return Difference(step, name, what, differing=count, elements=old.numel(), max_difference=gap)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1, 1).view(torch.uint8)


def _largest_gap(old: torch.Tensor, new: torch.Tensor) -> float | None:
    wide = torch.complex128 if old.is_complex() else torch.float64
    gaps = (old.to(wide) - new.to(wide)).abs()
    numbers = gaps[~gaps.isnan()]
    return float(numbers.max()) if len(numbers) else None

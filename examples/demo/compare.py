"""Tells whether two states are the same to the last bit, and where they are not. It knows nothing of stores."""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Container(NamedTuple):
    """Stands in the list of leaves for the container that holds the next ones."""

    kind: str
    length: int


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value of a nested state with its path, in order, and before them a `Container` for what they are in."""
    if isinstance(value, dict):
        yield path, Container(type(value).__qualname__, len(value))
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key!r}" if path else str(key))
    elif isinstance(value, list | tuple):
        yield path, Container(type(value).__qualname__, len(value))
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def exact(leaf: Any) -> str:
    """A text that two plain values share only if they have the same type and the same bits."""
    return f"float {leaf.hex()}" if isinstance(leaf, float) else f"{type(leaf).__name__} {leaf!r}"


def same(ours: Any, theirs: Any) -> bool:
    """Whether two leaves are of one type, dtype and shape, and equal bit for bit (a NaN equals itself, 0.0 is not -0.0)."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(_bytes(ours), _bytes(theirs))
    return exact(ours) == exact(theirs)


def differences(ours: Any, theirs: Any) -> list[str]:
    """The paths at which two states are not the same."""
    left, right = dict(leaves(ours)), dict(leaves(theirs))
    found = [path for path in left if path not in right or not same(left[path], right[path])]
    found += [path for path in right if path not in left]
    return found if found or list(left) == list(right) else ["the order of the keys"]


def fingerprint(state: Any) -> str:
    """A hash over every bit of a state, for comparing states of two processes."""
    digest = hashlib.sha256()
    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
            digest.update(_bytes(leaf).numpy().tobytes())
        else:
            digest.update(f"{path} {exact(leaf)}\n".encode())
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)

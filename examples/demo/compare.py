"""Compares two states bit by bit. Knows no stores."""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Container(NamedTuple):
    """Represents, among the leaves, the container of the next ones."""

    kind: str
    length: int


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value of a nested state with its path, in order; a `Container` precedes those in it."""
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
    """A text that two leaves share only if they have one type, dtype and shape, and are bit-identical (also NaN and -0.0)."""
    if isinstance(leaf, torch.Tensor):
        data = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{leaf.dtype} {tuple(leaf.shape)} {hashlib.sha256(data).hexdigest()}"
    return f"float {leaf.hex()}" if isinstance(leaf, float) else f"{type(leaf).__name__} {leaf!r}"


def differences(ours: Any, theirs: Any) -> list[str]:
    """The paths at which two states differ."""
    left, right = ({path: exact(leaf) for path, leaf in leaves(state)} for state in (ours, theirs))
    found = [path for path in {**left, **right} if left.get(path) != right.get(path)]
    return found if found or list(left) == list(right) else ["the order of the keys"]


def fingerprint(state: Any) -> str:
    """A hash over every bit of a state, to compare states of two processes."""
    return hashlib.sha256("".join(f"{path} {exact(leaf)}\n" for path, leaf in leaves(state)).encode()).hexdigest()

"""Whether states that were read are equal bit by bit."""

from typing import Any

import torch


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not equal bit by bit."""

    def same(name: str) -> bool:
        a, b = one.get(name), other.get(name)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return [name for name in one.keys() | other.keys() if not same(name)]

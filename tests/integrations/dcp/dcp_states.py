"""What tests of DCP save, what they load into, and when two states are the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

from tests.session.group.pool import local_of


def difference(one: Any, two: Any, path: str = "state") -> str | None:
    """Where they differ: types, keys in their order, dtypes, shapes and bits."""
    if isinstance(one, torch.Tensor | ShardedTensor):
        return _tensor_difference(one, two, path)
    if type(one) is not type(two):
        return f"{path}: {type(one)} and {type(two)}"
    if isinstance(one, np.ndarray):
        is_same = one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
        return None if is_same else f"{path}: {one!r:.80} and {two!r:.80}"
    if isinstance(one, Mapping):
        if list(map(repr, one)) != list(map(repr, two)):
            return f"{path}: keys {list(one)} and {list(two)}"
        return next(filter(None, (difference(one[key], two[other], f"{path}.{key}") for key, other in zip(one, two, strict=True))), None)
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return f"{path}: {len(one)} and {len(two)} items"
        found = (difference(a, b, f"{path}.{at}") for at, (a, b) in enumerate(zip(one, two, strict=True)))
        return next(filter(None, found), None)
    return None if one == two or repr(one) == repr(two) else f"{path}: {one!r:.80} and {two!r:.80}"


def _tensor_difference(one: Any, two: Any, path: str) -> str | None:
    if type(one) is not type(two) or one.shape != two.shape or one.dtype != two.dtype or one.requires_grad != two.requires_grad:
        return f"{path}: {describe(one)} and {describe(two)}"
    own, other = local_of(one), local_of(two)
    for a, b in zip(own, other, strict=True):
        if a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            return f"{path}: other bits"
    return None


def describe(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)} {tensor.requires_grad}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaNs are equal."""
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return flat.view(-1).view(torch.uint8)


def blank(value: Any) -> Any:
    """Something of the same form with nothing of the contents, to load into."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return "nothing"


def causes(error: BaseException) -> list[BaseException]:
    """What the ranks raised, of what `dcp.save` or `dcp.load` raised."""
    return [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def clear_plan_cache() -> None:
    """Forgets the plans that DCP keeps for planners with ``enable_plan_caching=True``: they belong to the process."""
    for cache in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        cache.clear()

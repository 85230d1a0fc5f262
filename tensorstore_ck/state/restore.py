"""Restores a stored state: as a new one, or into an existing one. Checks everything possible before it reads any tensor.

This file only validates and dispatches; `byte_sources` and `allocate` convert dtypes.
"""

from collections.abc import Collection
from typing import Any

import torch

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.tree import parse
from tensorstore_ck.state.allocate import CONVERTIBLE, TensorAllocator, WantedLeaf, require_memory_for
from tensorstore_ck.state.load_report import LoadReport, UnclaimedNames
from tensorstore_ck.state.optimizer_scalars import with_exact_scalars
from tensorstore_ck.state.rebuild_tree import build, require_buildable
from tensorstore_ck.state.restore_into import RestorePlan, restore_into
from tensorstore_ck.state.select import Rename, Selection, missing_names
from tensorstore_ck.state.sharded_tensors import describer_of


def restore(
    content: SnapshotContent,
    *,
    into: object = None,
    select: Any = None,
    strict: bool = True,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    report: LoadReport | None = None,
    group: Any = None,
    unclaimed: UnclaimedNames | None = None,
) -> Any:
    """The state that `content` holds; see `Store.checkout` for the options. `unclaimed` collects names that another rank may claim.

    With `into`, stored values replace those of `into`, in lists and dicts in place. Tensors on the meta device are replaced by new ones;
    empty dicts are filled. If reading fails, the contents of its tensors are undefined, and the error says so.

    Raises:
        InvalidOptionError: an option is invalid, or does not fit the others.
        MismatchError: a glob matches nothing, or the snapshot does not fit `into`.
        UnsupportedValueError: this process cannot make a type or dtype in it.
        DamageError: the stored data is damaged.
    """
    target_device = _device(device)
    if dtype is not None and dtype not in CONVERTIBLE:
        options = ", ".join(sorted(str(option).removeprefix("torch.") for option in CONVERTIBLE))
        raise InvalidOptionError(f"dtype must be a floating-point torch.dtype ({options}), not {dtype!r}", object_id="dtype")
    if into is None and rename is not None:
        raise InvalidOptionError("rename needs into=: names matter only where they are matched", object_id="rename")
    selection = None if select is None else Selection(select)
    stored = tree = parse(content.layout, len(content.values))
    if selection is not None:
        selection.require_used(stored)
        tree = selection.prune(stored) or stored
    if into is not None:
        describer = None if group is None else describer_of(group)
        is_missing = None if selection is None else missing_names(selection, rename, stored)
        plan = RestorePlan(content=content, tree=tree, whole=stored, is_missing=is_missing, rename=rename, dtype=dtype, describer=describer)
        return restore_into(into, plan, target_device, strict=strict, report=report, unclaimed=unclaimed)
    wanted: Collection[WantedLeaf] = require_buildable(tree, content, dtype).items()
    if dtype is not None:
        wanted = with_exact_scalars(content, wanted)
    require_memory_for(content.layout, wanted, target_device)
    fresh = TensorAllocator(content.layout, wanted, target_device)
    content.read(fresh.targets)
    return build(tree, content, fresh.get)


def _device(device: str | torch.device) -> torch.device:
    try:
        target_device = torch.device(device)
        torch.empty(0, device=target_device)
    except (RuntimeError, TypeError, AssertionError) as exc:
        raise InvalidOptionError(f"device={device!r} cannot be used here: {exc}", object_id="device") from exc
    if target_device.type == "meta":
        raise InvalidOptionError("device='meta' holds no data; use open_snapshot to look at shapes", object_id="device")
    return target_device

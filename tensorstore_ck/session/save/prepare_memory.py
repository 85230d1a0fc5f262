"""What an asynchronous save of tensors on devices needs, made ready before the first one. Knows torch."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

import tensorstore_ck.session.save.save  # noqa: F401 - so that the first save need not load it
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.dedup import held_blocks
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.capture_copy import slot_bytes
from tensorstore_ck.state.device.device_blocks import DeviceBlocks
from tensorstore_ck.state.device.optimizer_step_gates import open_storages
from tensorstore_ck.state.select import Selection
from tensorstore_ck.state.sharded_tensors import describer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Preparation(NamedTuple):
    """The rest of the preparation, for a thread."""

    size_bytes: int
    """The size of the memory that a copy needs."""
    warm_up: Callable[[], object]
    """Compiles the kernel that hashes, and makes the devices hash the state: memory for that is allocated then."""


def prepare(
    context: SaveContext, state: object, group: "ProcessGroup | None", frozen: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]
) -> Preparation:
    """Begins to watch the optimizers.

    Raises:
        UnsupportedValueError: the state cannot be saved.
    """
    captured = capture(state, None if group is None else describer_of(group))
    frozen_tensors = Selection(frozen).fitting([spec.name for spec in captured.layout.tensors]) if frozen else ()
    open_storages(context.gates_of(optimizers))
    return Preparation(slot_bytes(captured, frozen_tensors), partial(_hash, captured, 0 if group is None else group.rank(), context))


def _hash(captured: CapturedState, rank: int, context: SaveContext) -> None:
    device_blocks = captured.device_blocks
    if not isinstance(device_blocks, DeviceBlocks):
        return
    blocks = held_blocks(captured, range(len(captured.sources)), rank, context.engine.config.block_bytes)
    device_blocks.ids(captured.sources, blocks)
    # A save that is copied beside the next passes hashes before and after, and torch keeps memory for both: pinning stops the device.
    both = [device_blocks.start(captured.sources, blocks) for _ in ("before", "after")]
    with suppress(RuntimeError):
        for started in both:
            started.wait()

"""What an asynchronous save of tensors on devices needs, made ready before the first one. Knows torch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.unchanged_blocks import held_blocks
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.capture_copy import slot_bytes
from tensorstore_ck.state.device.step_gates import open_storages
from tensorstore_ck.state.select import Selection
from tensorstore_ck.state.sharded_tensors import describer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Preparation(NamedTuple):
    """The rest of the preparation, for a thread."""

    size_bytes: int
    """The size of the memory that a capture needs."""
    warm_up: Callable[[], object]
    """Compiles the kernel that hashes, and makes the devices hash the state once: memory for that is allocated then."""


def prepare(
    context: SaveContext, state: object, group: "ProcessGroup | None", frozen: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]
) -> Preparation:
    """Begins to watch the optimizers.

    Raises:
        UnsupportedValueError: the state cannot be saved.
    """
    captured = capture(state, None if group is None else describer_of(group))
    selection = Selection(frozen) if frozen else None
    frozen_tensors = [number for number, spec in enumerate(captured.layout.tensors) if selection is not None and selection.fits(spec.name)]
    open_storages(context.gates_of(optimizers))
    return Preparation(slot_bytes(captured, frozen_tensors), partial(_hash, captured, 0 if group is None else group.rank(), context))


def _hash(captured: CapturedState, rank: int, context: SaveContext) -> None:
    if captured.device_blocks is not None:
        blocks = held_blocks(captured, range(len(captured.sources)), rank, context.engine.config.block_bytes)
        captured.device_blocks.ids(captured.sources, blocks)

"""What an asynchronous save of tensors on devices needs, made ready before the first one. Knows torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.capture_copy import slot_bytes
from tensorstore_ck.state.device.kernel import hasher_if_ready
from tensorstore_ck.state.device.step_gates import open_storages
from tensorstore_ck.state.select import Selection
from tensorstore_ck.state.sharded_tensors import describer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def prepare(
    context: SaveContext, state: object, group: "ProcessGroup | None", frozen: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]
) -> int:
    """Begins to compile kernels, and to watch the optimizers; returns how much memory a capture of the state needs, in bytes.

    Raises:
        UnsupportedValueError: the state cannot be saved.
    """
    captured = capture(state, None if group is None else describer_of(group))
    selection = Selection(frozen) if frozen else None
    frozen_tensors = [number for number, spec in enumerate(captured.layout.tensors) if selection is not None and selection.fits(spec.name)]
    for device in {tensor.device for each in optimizers for group in each.param_groups for tensor in group["params"]}:
        hasher_if_ready(device)
    open_storages(context.gates_of(optimizers))
    return slot_bytes(captured, frozen_tensors)

"""The optimizer that holds a rank's states. For torch's ZeroRedundancyOptimizer that is the optimizer inside it. Knows no store.

Each rank of a ZeroRedundancyOptimizer steps an ordinary optimizer of some of the parameters, and then all ranks exchange parameters. Its
`state_dict` needs a collective first, and returns all states on one rank; what each rank holds is saved as it is for a pipeline's stages.
"""

import sys
from typing import Any, Final

import torch

from tensorstore_ck.errors import UnsupportedValueError

_MODULE: Final = "torch.distributed.optim.zero_redundancy_optimizer"
_OWN_NAMES: Final = ("params", "param_names")


def is_partitioned(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each rank has the states of some of its parameters."""
    module = sys.modules.get(_MODULE)  # importing it takes long, and without it there is no such optimizer
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def require_supported(path: str, optimizer: torch.optim.Optimizer) -> None:
    """Rejects a ZeroRedundancyOptimizer whose states may move between ranks.

    Raises:
        UnsupportedValueError: it overlaps its steps with DistributedDataParallel.
    """
    partitioned: Any = optimizer
    if is_partitioned(optimizer) and partitioned._overlap_with_ddp:
        raise UnsupportedValueError(
            f"{path} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, which makes its optimizer after some steps, and steps it "
            "within the backward pass: create it with overlap_with_ddp=False",
            object_id=path,
        )


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of this rank's states, with the options that schedules have set."""
    partitioned: Any = optimizer
    if not is_partitioned(optimizer):
        return optimizer
    _copy_options(partitioned, partitioned.optim)  # as it does itself, before each step
    own: torch.optim.Optimizer = partitioned.optim
    return own


def take_options(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the options of its `own_optimizer`, after that has loaded them."""
    partitioned: Any = optimizer
    if is_partitioned(optimizer):
        _copy_options(partitioned.optim, partitioned)


def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for given, group in zip(source.param_groups, target.param_groups, strict=True):
        group.update({name: value for name, value in given.items() if name not in _OWN_NAMES})

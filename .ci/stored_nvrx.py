"""A plugin of pytest for NVRx's own tests of its local checkpoint manager, on CPUs, with the one here in its place.

`make test-trainers TRAINERS=nvrx` runs them on two ranks; with `JUDGED_STOCK=1` in the environment the manager stays NVRx's own. The tests
need CUDA devices, so each name of torch.cuda and each "cuda" that they use is replaced here by the CPU, and NCCL by gloo.
"""

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

import tensorstore_ck as tsck

RANKS = 2


def on_cpu() -> None:
    """Replaces what NVRx and its tests use of CUDA."""
    to, init = torch.Tensor.to, dist.init_process_group
    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.cuda.device_count = lambda: RANKS
    torch.empty = partial(_empty, torch.empty)
    torch.Tensor.to = lambda self, place, **options: to(self, "cpu", **options)  # type: ignore[method-assign, assignment]
    dist.init_process_group = lambda backend, **options: init("gloo", **options)


def _empty(empty: Any, *size: Any, device: object = None, **options: Any) -> torch.Tensor:
    made: torch.Tensor = empty(*size, **options)
    return made


class Checkpoint:
    """In place of the file that the tests look for, and remove."""

    def __init__(self, manager: "Stored", ckpt_id: Any) -> None:
        self.manager, self.ckpt_id = manager, ckpt_id

    def exists(self) -> bool:
        """Whether it is found."""
        return self.ckpt_id in self.manager._my_ckpt_ids()

    def remove(self) -> None:
        """Deletes it."""
        self.manager._cleanup_failed_save(self.ckpt_id[0])


class Stored(tsck.nvrx.LocalCheckpointManager):
    """With checkpoints in place of files."""

    def _local_ckpt_path_from_id(self, ckpt_id: Any) -> Checkpoint:
        return Checkpoint(self, ckpt_id)


def pytest_collection_finish() -> None:
    """After the tests were imported: their state dict can be stored."""
    (cls,) = {vars(module)["SimpleTensorAwareStateDict"] for name, module in sys.modules.items() if name.endswith("test_utilities")}

    def from_state(state: Any) -> Any:
        made = object.__new__(cls)
        made.__dict__.update(state)
        return made

    tsck.register_type(cls, "nvrx.tests.SimpleTensorAwareStateDict", lambda value: dict(vars(value)), from_state)


def _replace() -> None:
    local_manager.LocalCheckpointManager = Stored
    remove = os.remove
    os.remove = lambda path: path.remove() if isinstance(path, Checkpoint) else remove(path)  # type: ignore[assignment]


on_cpu()
if "JUDGED_STOCK" not in os.environ:
    _replace()

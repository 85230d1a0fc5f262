"""Runs NVRx's own tests of its local checkpoint manager on CPUs: ``judge_nvrx.py CHECKOUT stock|stored``: with its own, or the one here.

It needs the environment of `make test-apart`. CHECKOUT: NVRx's sources at v0.4.1, since the package has no tests. They need CUDA devices,
so each name of torch.cuda and each "cuda" that they use is replaced here by the CPU, and NCCL by gloo. Prints what failed on either of two
ranks, which docs/trainers.md explains.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

import tensorstore_ck as tsck

TESTS = ("test_basic_local.py", "test_cleanup.py")
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


class Registered:
    """A plugin of pytest: the tests' state dict can be stored."""

    def pytest_collection_finish(self) -> None:
        """After the tests were imported."""
        (cls,) = {vars(module)["SimpleTensorAwareStateDict"] for name, module in sys.modules.items() if name.endswith("test_utilities")}

        def from_state(state: Any) -> Any:
            made = object.__new__(cls)
            made.__dict__.update(state)
            return made

        tsck.register_type(cls, "nvrx.tests.SimpleTensorAwareStateDict", lambda value: dict(vars(value)), from_state)


def run_rank(checkout: Path, manager: str) -> int:
    """One of the ranks."""
    on_cpu()
    if manager == "stored":
        local_manager.LocalCheckpointManager = Stored
        remove = os.remove
        os.remove = lambda path: path.remove() if isinstance(path, Checkpoint) else remove(path)  # type: ignore[assignment]
    tests = [str(checkout / "tests" / "checkpointing" / "unit" / name) for name in TESTS]
    options = ["-q", "-rf", "--tb=line", "-c", os.devnull, f"--basetemp={checkout}/tmp/rank{os.environ['RANK']}"]
    return pytest.main([*tests, *options], [Registered()] if manager == "stored" else [])


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in {"stock", "stored"}:
        sys.exit(__doc__)
    if "LOCAL_RANK" in os.environ:
        sys.exit(run_rank(Path(sys.argv[1]), sys.argv[2]))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), *sys.argv]
    sys.exit(subprocess.run(command, check=False).returncode)

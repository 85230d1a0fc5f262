"""A checkpointing mechanism for DLIO (MLPerf Storage): one snapshot of all ranks a checkpoint. See `benches.dlio`.

DLIO saves the same random tensors each time, of which nothing would be stored after the first: here each is changed where DLIO would
compute, which it does not time.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from dlio_benchmark.framework.torch_framework import TorchFramework
from dlio_benchmark.utils.utility import DLIOMPI

import tensorstore_ck as tsck

REF = "runs/dlio"


class TsckCheckpointing(PyTorchCheckpointing):  # type: ignore[misc]
    """DLIO's states of all ranks, in a store in its folder of checkpoints."""

    _instance: "TsckCheckpointing | None" = None

    @staticmethod
    def get_instance() -> "TsckCheckpointing":
        """What DLIO calls."""
        if TsckCheckpointing._instance is None:
            TsckCheckpointing._instance = TsckCheckpointing()
        return TsckCheckpointing._instance

    def __init__(self) -> None:
        super().__init__()
        mpi = DLIOMPI.get_instance()
        self._rank = mpi.rank()
        dist.init_process_group("gloo", init_method=f"file://{os.environ['DLIO_RENDEZVOUS']}", rank=self._rank, world_size=mpi.size())
        folder = Path(self.args.checkpoint_folder) / "store"
        if self._rank == 0:
            tsck.open(folder, create=True).close()
        dist.barrier()
        self._store = tsck.open(folder)
        self._files: dict[str, Any] = {}
        TorchFramework.compute = lambda *_: self._change()

    def save_state(self, suffix: str, state: dict[str, Any], fsync: bool = False) -> None:
        """Takes what DLIO would write to a file of this name."""
        self._files[suffix.rpartition("/")[2]] = state

    def save_checkpoint(self, epoch: int, step: int) -> None:
        """One snapshot of what all ranks have."""
        self._files = {}
        super().save_checkpoint(epoch, step)
        self._store.put_snapshot({f"rank{self._rank}": self._files}, ref=REF, step=step, group=dist.group.WORLD)

    def load_state(self, suffix: str, state: dict[str, Any]) -> None:
        """Nothing: `load_checkpoint` loads all."""

    def load_checkpoint(self, epoch: int, step: int) -> None:
        """This rank's part."""
        loaded = self._store.checkout(f"{REF}@{step}", select=[f"rank{self._rank}.**"])
        assert loaded

    def _change(self) -> None:
        for state in (self.layer_state, self.optimization_state):
            for tensor in _tensors(state):
                tensor.add_(1e-3)


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in _tensors(value)] if isinstance(state, dict) else []

"""Local checkpoints of NVRx in a store on each host's disk: ``torchrun --nproc-per-node 2 -m examples.nvrx_local FOLDER [STEPS]``.

Kill it and start it again: it continues. The only line that NVRx's own manager would change is the one that makes the manager. The state
dict is NVRx's simplest, whose tensors must be on CUDA devices.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from torch import nn

import tensorstore_ck as tsck

SAVE_EVERY = 5


def main(folder: Path, steps: int, device: str) -> float:
    """Trains; returns the newest loss."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = tsck.nvrx.LocalCheckpointManager(folder, session_id="regression")
    newest = manager.find_latest()
    if newest >= 0:
        model.load_state_dict(manager.load()[0].state_dict["model"])
    loss = torch.zeros(())
    for step in range(max(newest, 0) + 1, steps + 1):
        torch.manual_seed(step)
        given = torch.randn(16, 8, device=device)
        loss = nn.functional.mse_loss(model(given), given.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            manager.save(BasicTensorAwareStateDict({"model": model.state_dict()}), step)
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=20)
    given = options.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    print("loss", main(given.folder, given.steps, "cuda"))
    dist.destroy_process_group()

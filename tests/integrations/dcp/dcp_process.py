"""A rank that saves in another process: ``python dcp_process.py RANK FOLDER``. Prints what it sees as JSON."""

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tensorstore_ck.integrations.dcp import Writer

RANKS = 2
SAVES = 5


def main(rank: int, folder: str) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = dist.FileStore(f"{folder}/ranks", RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    writer = Writer(f"{folder}/store", "job", cache_dir=f"{folder}/cache-{rank}")
    mesh = DeviceMesh("cpu", torch.arange(RANKS))
    weight = distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)], src_data_rank=None)
    state: dict[str, Any] = {"model": {"w": weight, "b": torch.zeros(5)}, "step": 0, "rng": (3, (1, 2), None), f"own_{rank}": [rank]}
    descriptors = []
    for step in range(1, SAVES + 1):
        weight.to_local().fill_(step)
        state["model"]["b"].fill_(step)
        state["step"] = step
        future = save(state, writer, step)
        weight.to_local().fill_(-1)  # already the next step
        state["model"]["b"].fill_(-1)
        state["step"] = -1
        future.result()
        process = _async_process_executor._CHECKPOINT_PROCESS
        assert process is not None
        descriptors.append(len(os.listdir(f"/proc/{process._save_process.pid}/fd")))
    state[f"own_{rank}"] = [torch.Generator()] if rank == 1 else [rank]
    try:
        save(state, writer, 99).result()
    except CheckpointException as exc:
        refused = str(exc)
    else:
        refused = ""
    state[f"own_{rank}"] = [rank]
    save(state, writer, SAVES + 1).result()
    print(json.dumps({"descriptors": descriptors, "refused": refused}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def save(state: dict[str, Any], writer: Writer, step: int) -> Any:
    kind = AsyncCheckpointerType.PROCESS
    return dcp.async_save(state, storage_writer=writer, checkpoint_id=f"step-{step}", async_checkpointer_type=kind)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

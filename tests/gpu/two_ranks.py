"""Two processes on one device that save together over gloo: `python -m tests.gpu.two_ranks FOLDER DEVICE IS_WAITED_FOR`."""

import sys
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tensorstore_ck as tsck
from tests.gpu.kinds import clones, different, random_tensor

REF = "runs/ranks"


def rank_main(rank: int, folder: Path, device: str, is_waited_for: bool) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=FileStore(str(folder / "rendezvous"), 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu" if device == "cpu" else "cuda", (2,))
    local = random_tensor(torch.device(device), 700, 1000, seed=rank)
    state: dict[str, Any] = {
        "sharded": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        "replicated": DTensor.from_local(random_tensor(torch.device(device), 3 << 20), mesh, [Replicate()], run_check=False),
        "plain": random_tensor(torch.device(device), 100_000),
    }
    expected = clones({name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()})
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache{rank}") as store:
        if is_waited_for:
            store.put_snapshot(state, ref=REF, step=1, group=dist.group.WORLD)
        else:
            store.put_snapshot_async(state, ref=REF, step=1, group=dist.group.WORLD).wait()
        with torch.no_grad():
            for value in state.values():
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
        store.checkout(REF, into=state, group=dist.group.WORLD)
        locals_ = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
        assert different(locals_, expected) == []
    dist.destroy_process_group()


def main() -> None:
    folder, device, is_waited_for = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
    context = get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, folder, device, is_waited_for)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()

"""What ranks pay to find out which items of a checkpoint they have in common: `python -m benches.rank_items --folder /tmp/bench`.

`tsck.CheckpointManager` on ranks over gloo. The payload is equal on all of them, as with DDP, and new at each save. Either nothing is said
of the item, so that the ranks hash it first, or it has a resharder, which says that it is equal.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

import tensorstore_ck as tsck

TENSORS: Final = 64
KINDS: Final = {"hashed": None, "with a resharder": object()}


def _config(resharder: object, *, sync: bool) -> Any:
    items = {"model": SimpleNamespace(resharder=resharder, required=False)}
    save = SimpleNamespace() if sync else SimpleNamespace(staging_config=None)
    return SimpleNamespace(items=items, default=SimpleNamespace(resharder=None), save=save)


def _job(rank: int, ranks: int, folder: Path, mib: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = {f"layer{each}": torch.rand(mib * (1 << 18) // TENSORS) for each in range(TENSORS)}
    taken: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for sync in (True, False):
        for kind, resharder in KINDS.items():
            with (
                tsck.open(folder / f"{kind}-{sync}", create=True, cache_dir=folder / f"cache-{kind}-{sync}-{rank}") as store,
                tsck.CheckpointManager(_config(resharder, sync=sync), store=store, ref="runs/bench") as manager,
            ):
                for step in range(rounds + 1):
                    torch.manual_seed(step)
                    for each in model.values():
                        each.uniform_()
                    dist.barrier()
                    began = time.perf_counter()
                    saved = manager.save(f"step_{step}", {"model": model})
                    stalled = time.perf_counter() - began
                    if saved is not None:
                        saved.result()
                    if step:  # the first one allocates
                        taken.setdefault((kind, sync), []).append((stalled, time.perf_counter() - began))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder / f"{kind}-{sync}")
    if rank == 0:
        print(f"| {mib} MiB, {ranks} ranks | stall, ms | until published, ms |\n|---|---|---|")
        for (kind, sync), times in taken.items():
            stall, whole = (statistics.median(each) * 1e3 for each in zip(*times, strict=True))
            print(f"| {kind}, {'synchronous' if sync else 'in the background'} | {stall:.0f} | {whole:.0f} |")
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--mib", type=int, default=1024)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    folder = given.folder / "rank-items"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["XDG_STATE_HOME"] = str(folder)
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_job, args=(rank, given.ranks, folder, given.mib, given.rounds)) for rank in range(given.ranks)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

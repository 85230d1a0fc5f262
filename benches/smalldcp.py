"""Many small plain tensors through `dcp.save`, with `Writer` and with FileSystemWriter: `python -m benches.smalldcp --folder DIR`.

Gloo ranks, each with the same tensors of 1 to 16 KiB (DDP), and a save of the same state for comparison. FileSystemWriter has its defaults,
which sync its files. "First" makes the store. In each pair the order alternates, and each time is that of the slowest rank. Python's
garbage is collected before each save: a full collection takes 140 ms of a process with torch, DCP makes one due in every tenth save
whatever writes, and one that fell into a first save was all there was to be seen.
"""

import argparse
import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.multiprocessing.spawn import spawn

import tensorstore_ck as tsck
from benches._ranks import pick_port
from benches.local import small_state
from tensorstore_ck.integrations.dcp import Writer

PAIRS = {"first": ("FileSystemWriter, first", "Writer, first"), "later": ("FileSystemWriter, later", "Writer, later")}


def time_rank(rank: int, ranks: int, port: int, folder: Path, job: tuple[int, int]) -> None:
    """Entry point of a rank; rank 0 prints. `job`: how many tensors and rounds."""
    tensors, rounds = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    state = small_state(tensors)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        gc.collect()
        if rank == 0:
            os.sync()
        dist.barrier()
        started = time.perf_counter()
        work()
        dist.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    for number in range(rounds + 1):
        place = folder / str(number)
        if rank == 0:
            place.mkdir(parents=True)
            tsck.open(place / "put", create=True, cache_dir=place / "cache").close()
        dist.barrier()
        writer = Writer(place / "store", "bench", cache_dir=place / "cache")
        with tsck.open(place / "put", cache_dir=place / "cache") as store:
            for when, (theirs, ours) in PAIRS.items():
                by_files = partial(dcp_save, dict(state), storage_writer=FileSystemWriter(place / when))
                both = [(theirs, by_files), (ours, partial(dcp_save, dict(state), storage_writer=writer))]
                for name, work in both if number % 2 else both[::-1]:
                    timed(name, work)
                timed(f"put_snapshot, {when}", partial(store.put_snapshot, state, ref="bench", group=dist.group.WORLD))
                for tensor in state.values():
                    tensor.add_(1)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
    if rank == 0:
        warm = {name: taken[1:] for name, taken in seconds.items()}
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        print(f"\n{ranks} ranks, {tensors} tensors, median (least-most) of {rounds} rounds, load in the end {load}")
        print("| what | ms | of FileSystemWriter's, median of pairs |\n|---|---|---|")
        for name, taken in warm.items():
            other = warm[PAIRS[name.rpartition(", ")[2]][0]]
            share = median(mine / theirs for mine, theirs in zip(taken, other, strict=True))
            print(f"| {name} | {median(taken) * 1e3:.0f} ({min(taken) * 1e3:.0f}-{max(taken) * 1e3:.0f}) | {share:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    args = parser.parse_args()
    for ranks in args.ranks:
        work = (ranks, pick_port(), args.folder, (args.tensors, args.rounds))
        spawn(time_rank, work, nprocs=ranks)  # type: ignore[no-untyped-call]
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()

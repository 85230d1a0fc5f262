"""Saves of ranks with different states, compared with ranks with equal states: `python -m benches.kinds --gib 1 --folder /tmp/bench`.

Gloo ranks on this machine. All cases hold the same bytes: a half is spread over all ranks, the other half is experts or a replicated
part. They take turns, round by round; a round's seconds are those of the slowest rank; ratios are medians of pairs from one round.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benches._ranks import REF, Job, Measured, begin, fresh, local_of, opened
from benches.local import ratio
from benches.ranks import spawn

TENSORS = 16
COLUMNS = 1024


def sharded(name: str, rows: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Tensors of which each rank of the mesh has so many rows."""
    local = torch.randn(TENSORS, rows, COLUMNS)
    return {f"{name}.{number}": DTensor.from_local(local[number].clone(), mesh, [Shard(0)], run_check=False) for number in range(TENSORS)}


def plain(name: str, rows: int, seed: int) -> dict[str, torch.Tensor]:
    local = torch.randn(TENSORS, rows, COLUMNS, generator=torch.Generator().manual_seed(seed))
    return {f"{name}.{number}": local[number].clone() for number in range(TENSORS)}


def states(job: Job, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """The states of a rank, one for each case."""
    rows = int(job.gib * (1 << 30)) // 2 // job.ranks // TENSORS // COLUMNS // 4
    world = init_device_mesh("cpu", (job.ranks,))
    pairs = [DeviceMesh("cpu", torch.arange(first, first + 2)) for first in range(0, job.ranks, 2)]
    pair = rank // 2
    common = sharded("common", rows, world)
    return {
        "alike: all spread over all ranks": common | sharded("experts", rows, world),
        "experts of each rank under names of their own": common | plain(f"experts.{rank}", rows, rank),
        "experts spread over pairs of ranks": common | sharded(f"experts.{pair}", rows, pairs[pair]),
        "one value on rank 0": common | sharded("experts", rows, world) | ({"epoch": torch.tensor(1)} if rank == 0 else {}),
        "alike: half of it replicated": common | plain("replicated", rows * job.ranks, 0),
        "half of it replicated, one value on rank 0": common
        | plain("replicated", rows * job.ranks, 0)
        | ({"epoch": torch.tensor(1)} if rank == 0 else {}),
        "plain, half of it replicated, experts of each rank": plain("replicated", rows * job.ranks, 0)
        | plain(f"experts.{rank}", rows, rank),
    }


PAIRS = [
    ("experts of each rank under names of their own", "alike: all spread over all ranks"),
    ("experts spread over pairs of ranks", "alike: all spread over all ranks"),
    ("one value on rank 0", "alike: all spread over all ranks"),
    ("half of it replicated, one value on rank 0", "alike: half of it replicated"),
    ("plain, half of it replicated, experts of each rank", "alike: half of it replicated"),
]


def time_kinds(rank: int, job: Job, port: int, results: "SimpleQueue[Measured]") -> None:
    """Entry point of a rank."""
    begin(rank, job, port)
    measured = Measured(int(job.gib * (1 << 30)), {}, {}, {})
    every = states(job, rank)

    def timed(name: str, round_number: int, work: Callable[[], object]) -> None:
        dist.barrier()
        started = time.perf_counter()
        work()
        dist.barrier()
        if round_number:  # the first one is to warm up
            measured.seconds.setdefault(name, []).append(time.perf_counter() - started)

    for round_number in range(job.rounds + 1):
        for name, state in every.items():
            fresh(job, rank, "tsck")
            with opened(job, rank) as store:
                for when in ("first", "later"):
                    put = partial(store.put_snapshot, state, ref=REF, group=dist.group.WORLD)
                    timed(f"{name}, {when}", round_number, put)
                    for tensor in state.values():
                        local_of(tensor).add_(1)
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="held by all ranks together, replicas once")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    seconds = spawn(Job(args.ranks, args.gib, args.folder, rounds=args.rounds), time_kinds).seconds
    print("| put | first / that of ranks that are alike | later |\n|---|---|---|")
    for ours, theirs in PAIRS:
        cells = [f"{1 / ratio(seconds, f'{ours}, {when}', f'{theirs}, {when}'):.2f}" for when in ("first", "later")]
        print(f"| {ours} | {' | '.join(cells)} |", flush=True)
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()

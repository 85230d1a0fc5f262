"""Save and restore of a process group compared with DCP in the same group: `python -m benches.ranks --gib 2 --folder /tmp/bench`.

Gloo ranks on this machine, fsync on both sides. Both take turns, round by round, and a round's seconds are those of the slowest rank;
ratios are medians of pairs from one round. Each save begins with no data of its own on the disk and with nothing dirty; each restore
opens what it reads from, and reads from the page cache. `--dedup` instead stores one state by 2, 4 and 8 ranks in turn.
"""

import argparse
import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from torch.multiprocessing.spawn import spawn as spawn_ranks

from benches._ranks import Job, Measured, dedup_rank, pick_port, time_rank
from benches.local import ratio
from tensorstore_ck.engine.opening import open_engine


def spawn(job: Job, work: Callable[..., None]) -> Measured:
    """Runs `work` on every rank; returns the result of rank 0."""
    results: multiprocessing.SimpleQueue[Measured] = multiprocessing.get_context("spawn").SimpleQueue()
    spawn_ranks(work, (job, pick_port(), results), nprocs=job.ranks)  # type: ignore[no-untyped-call]
    return results.get()


def table(title: str, measured: Measured) -> None:
    seconds, size_bytes = measured.seconds, measured.size_bytes
    columns = [
        "what",
        "GB/s",
        "seconds",
        "CPU seconds of all ranks",
        "MiB written by a rank",
        "MiB read by a rank",
        "peak MiB beyond the state",
    ]
    print(f"\n{title}\n| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for name, taken in seconds.items():
        middle = median(taken)
        figures = [spread(each) for each in zip(*measured.figures[name], strict=True)]
        cells = [
            f"{size_bytes / middle / 1e9:.2f}",
            f"{middle:.3f} ({min(taken):.3f}-{max(taken):.3f})",
            f"{median(measured.cpu_seconds[name]):.2f}",
            *figures,
        ]
        print("|", " | ".join([name, *cells]), "|")
    print("\n| ratio of speeds, median of pairs | |\n|---|---|")
    for ours, theirs in (
        ("tsck put, first of the layout", "DCP save"),
        ("tsck put, later", "DCP save"),
        ("tsck put, nothing changed", "DCP save"),
        ("tsck checkout into=", "DCP load"),
        ("DCP save, tsck Writer, first", "DCP save"),
        ("DCP save, tsck Writer, later", "DCP save"),
        ("DCP load, tsck Reader", "DCP load"),
    ):
        print(f"| {ours} / {theirs} | {ratio(seconds, ours, theirs):.2f} |", flush=True)


def spread(figures: Sequence[int]) -> str:
    """From the least to the most of all ranks, in MiB."""
    least, most = min(figures) / 2**20, max(figures) / 2**20
    return f"{least:.0f}" if f"{least:.0f}" == f"{most:.0f}" else f"{least:.0f}-{most:.0f}"


def stored_bytes(folder: Path) -> int:
    engine = open_engine(folder / "store")
    found = sum(info.size_bytes for kind in ("packs/", "parts/") for info in engine.backend.list(kind))
    engine.close()
    return found


def dedup(gib: float, folder: Path) -> None:
    """With tensors so large that the borders between ranks fall on the grid; with smaller ones each number of ranks has its own blocks."""
    for own_caches in (False, True):
        where = "each rank on a host of its own" if own_caches else "all ranks on one host"
        print(f"\n{where}\n| ranks | MiB stored in all | of the state |\n|---|---|---|")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for ranks in (2, 4, 8):
            size_bytes = spawn(Job(ranks, gib, folder, tensors=8, own_caches=own_caches), dedup_rank).size_bytes
            stored = stored_bytes(folder)
            print(f"| {ranks} | {stored / 2**20:.1f} | {stored / size_bytes:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="held by all ranks together")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="of the sharded state")
    parser.add_argument("--replicas", type=int, nargs="*", default=[4], help="ranks of the replicated state")
    parser.add_argument("--dcp-threads", type=int, default=2)
    parser.add_argument("--dedup", action="store_true")
    args = parser.parse_args()
    if args.dedup:
        dedup(args.gib, args.folder)
    else:
        every = [*((ranks, True) for ranks in args.ranks), *((ranks, False) for ranks in args.replicas)]
        for ranks, is_sharded in every:
            shutil.rmtree(args.folder, ignore_errors=True)
            args.folder.mkdir(parents=True)
            job = Job(ranks, args.gib, args.folder, is_sharded=is_sharded, rounds=args.rounds, dcp_threads=args.dcp_threads)
            measured = spawn(job, time_rank)
            what = "sharded (FSDP2)" if is_sharded else "replicated (DDP)"
            where = f"{args.folder}, median (least-most) of {args.rounds} rounds"
            table(f"{ranks} ranks, {what}, {measured.size_bytes / 2**30:.2f} GiB once, {where}", measured)
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()

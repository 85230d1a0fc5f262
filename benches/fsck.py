"""`fsck --read-data` compared with reading and hashing the same files, in one run: `python -m benches.fsck --gib 1 --folder /tmp/bench`.

The floor reads the store's own packs in pieces of 4 MiB, from as many threads as there are cores, and takes BLAKE3 of each piece: no
format, nothing looked up, nothing compared. Both take turns, so that drift of the machine hits both alike. With `--cold`, the packs are
dropped from the page cache before each turn. `--snapshots` times the structure level on a store of so many small snapshots.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from blake3 import blake3

import tensorstore_ck as tsck
from benches._folder import new_folder
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.maintenance.fsck import FsckOptions, run_fsck

PIECE_BYTES = 4 << 20


def make_store(folder: Path, gib: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with tsck.open(folder / "store", create=True, no_sync=True, cache_dir=folder / "cache") as store:
        for step in range(4):  # four packs and more, as a run leaves them
            size = int(gib * (1 << 30)) // 4 // 16 // 4
            state = {f"layer.{number}.weight": torch.randn(size, generator=generator) for number in range(16)}
            store.put_snapshot(state, ref="bench", step=step)
    os.sync()


def make_small(folder: Path, snapshots: int) -> None:
    with tsck.open(folder / "store", create=True, no_sync=True, cache_dir=folder / "cache") as store:
        for step in range(snapshots):
            store.put_snapshot({f"w{n}": torch.full((2000,), float(step * 20 + n)) for n in range(20)}, ref="bench", step=step)


def pack_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "store" / "packs").rglob("*") if path.is_file())


def floor(files: list[Path], threads: int) -> None:
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, PIECE_BYTES)]
    queue = iter(pieces)
    lock = threading.Lock()

    def drain() -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while True:
            with lock:
                piece = next(queue, None)
            if piece is None:
                return
            fd = os.open(piece[0], os.O_RDONLY)
            count = os.preadv(fd, [buffer], piece[1])
            os.close(fd)
            blake3(buffer[:count]).digest()

    helpers = [threading.Thread(target=drain) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    drain()
    for helper in helpers:
        helper.join()


def check(folder: Path, *, read_data: bool) -> None:
    engine = open_engine(folder / "store", cache_dir=folder / "cache")
    report = run_fsck(engine, FsckOptions(read_data=read_data))
    engine.close()
    if report.findings:
        raise SystemExit(f"fsck found something: {report.findings[0]}")


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def drop(files: list[Path]) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--snapshots", type=int, default=0, help="instead: the structure of a store of so many snapshots")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with new_folder(args.folder):
        if args.snapshots:
            make_small(args.folder, args.snapshots)
            taken = [timed(lambda: check(args.folder, read_data=False)) for _ in range(args.rounds)]
            print(f"structure of {args.snapshots} snapshots in {args.folder}: {statistics.median(taken):.2f} s (median of {args.rounds})")
            return
        make_store(args.folder, args.gib)
        files, cores = pack_files(args.folder), len(os.sched_getaffinity(0))
        size = sum(path.stat().st_size for path in files)
        works: dict[str, Callable[[], object]] = {
            f"floor: read + BLAKE3, {cores} threads": lambda: floor(files, cores),
            f"floor, {cores + 2} threads": lambda: floor(files, cores + 2),
            "fsck --read-data": lambda: check(args.folder, read_data=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for round_number in range(args.rounds + 1):
            for name, work in works.items():
                if args.cold:
                    drop(files)
                taken_once = timed(work)
                if round_number:
                    seconds[name].append(taken_once)
        state = "cold" if args.cold else "warm"
        print(f"{len(files)} packs, {size / 2**30:.2f} GiB, {args.folder}, page cache {state}, median (least-most) of {args.rounds} rounds")
        print("| what | GB/s | seconds |\n|---|---|---|")
        for name, taken in seconds.items():
            middle = statistics.median(taken)
            print(f"| {name} | {size / middle / 1e9:.2f} | {middle:.3f} ({min(taken):.3f}-{max(taken):.3f}) |")
        *floors, ours = seconds
        for name in floors:
            ratio = statistics.median(b / a for a, b in zip(seconds[ours], seconds[name], strict=True))
            print(f"| {ours} / {name} | {ratio:.2f} | |")


if __name__ == "__main__":
    main()

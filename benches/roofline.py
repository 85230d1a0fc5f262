"""The roofline of this machine and each path's distance to it: `python -m benches.roofline --folder DIR`.

What one core does with 1 GiB, in CPU time, the least of several rounds: copies, hashes, first uses of pages, reads from the page cache and
writes into it. What the disk takes by wall time: O_DIRECT by three threads, and plain write + fsync. A path needs some of these for each
byte; its limit is their sum over all cores, or the disk, whichever is longer. Beside it the measured median.
"""

import argparse
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches._usage import watch_others
from benches.local import make_state, timed
from tensorstore_ck.common.huge_pages import new_pages

MIB = 1 << 20
SIZE = 1 << 30
PIECE = MIB
WINDOW = 8 * MIB


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def small_pages() -> None:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        np.frombuffer(pages, np.uint8)[:: mmap.PAGESIZE] = 1


def huge_pages() -> None:
    with new_pages(SIZE) as pages:
        np.frombuffer(pages, np.uint8)[:: 2 * MIB] = 1


def in_pieces(call: Callable[[memoryview, int], object], memory: memoryview, step: int = PIECE) -> None:
    for start in range(0, len(memory), step):
        call(memory[start : start + step], start)


def core_table(folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of one core for 1 GiB."""
    pages = [memoryview(new_pages(SIZE)) for _ in range(2)]
    source, target = (np.frombuffer(each, np.uint8) for each in pages)
    source[:] = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    target[:] = 1
    piece = pages[0][:PIECE]
    file = folder / "file"
    fd = os.open(file, os.O_RDWR | os.O_CREAT)

    def write_fresh() -> None:
        os.ftruncate(fd, 0)
        in_pieces(lambda part, at: os.pwritev(fd, [part], at), pages[0])

    works: dict[str, Callable[[], object]] = {
        "copy, warm": lambda: np.copyto(target, source),
        "BLAKE3, from memory": lambda: in_pieces(lambda part, _: blake3(part).digest(), pages[0]),
        "BLAKE3, from the cache": lambda: [blake3(piece).digest() for _ in range(SIZE // PIECE)],
        "first use of pages of 4 KiB": small_pages,
        "first use of huge pages": huge_pages,
        "write into the page cache": write_fresh,
        "read from the page cache": lambda: in_pieces(lambda part, at: os.preadv(fd, [part], at), pages[1]),
    }
    least = {name: min(cpu_seconds(work) for _ in range(rounds)) for name, work in works.items()}
    os.close(fd)
    file.unlink()
    return least


def disk_seconds(folder: Path, *, direct: bool) -> float:
    """Of 1 GiB and an fsync: three threads with O_DIRECT, a file for each; or one plain write."""
    window = new_pages(WINDOW)
    window[:] = os.urandom(WINDOW)
    threads = 3 if direct else 1
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    os.sync()
    began = time.perf_counter()
    fds = [os.open(folder / f"disk-{number}", flags) for number in range(threads)]

    def write(number: int) -> None:
        for at, _ in enumerate(range(number, SIZE // WINDOW, threads)):
            os.pwrite(fds[number], window, at * WINDOW)
        os.fsync(fds[number])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(threads)))
    seconds = time.perf_counter() - began
    for number, fd in enumerate(fds):
        os.close(fd)
        (folder / f"disk-{number}").unlink()
    return seconds


def path_seconds(folder: Path, rounds: int) -> dict[str, float]:
    """The medians of what a user calls."""
    state = make_state(64, SIZE // 64)
    target = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        shutil.rmtree(folder / "store", ignore_errors=True)
        store = tsck.open(folder / "store", create=True, cache_dir=folder / "cache", state_dir=folder / "state")
        works: dict[str, Callable[[], object]] = {
            "put, all new": lambda store=store: store.put_snapshot(state, ref="bench"),  # type: ignore[misc]
            "put, nothing changed": lambda store=store: store.put_snapshot(state, ref="bench"),  # type: ignore[misc]
            "": lambda store=store: store.checkout("bench", into=target),  # type: ignore[misc] # now the page cache has it
            "checkout into=": lambda store=store: store.checkout("bench", into=target),  # type: ignore[misc]
            "checkout, new tensors": lambda store=store: store.checkout("bench"),  # type: ignore[misc]
        }
        for name, work in works.items():
            seconds = timed(work)
            if number:
                taken.setdefault(name, []).append(seconds)
        store.close()
    return {name: statistics.median(found) for name, found in taken.items() if name}


def limits(core: dict[str, float], disk: float, *, is_memory: bool) -> dict[str, float]:
    """Seconds that each path needs at least."""
    cores = os.cpu_count() or 1

    def spread(names: Sequence[str]) -> float:
        return sum(core[name] for name in names) / cores

    store = "write into the page cache" if is_memory else "copy, warm"
    restore = ["BLAKE3, from the cache", "read from the page cache"]
    first_use = min(("first use of pages of 4 KiB", "first use of huge pages"), key=core.__getitem__)
    return {
        "put, all new": max(spread(["BLAKE3, from memory", store]), 0.0 if is_memory else disk),
        "put, nothing changed": spread(["BLAKE3, from memory"]),
        "checkout into=": spread(restore),
        "checkout, new tensors": spread([*restore, first_use]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with new_folder(args.folder), watch_others() as others:
        is_memory = os.major(args.folder.stat().st_dev) == 0
        core = core_table(args.folder, args.rounds)
        direct, plain = (min(disk_seconds(args.folder, direct=way) for _ in range(args.rounds)) for way in (not is_memory, False))
        measured = path_seconds(args.folder, args.rounds)
    print(f"{args.folder}, 1 GiB, {args.rounds} rounds; {others}\n\n| one core | GB/s | CPU s |\n|---|---|---|")
    for name, seconds in core.items():
        print(f"| {name} | {SIZE / seconds / 1e9:.1f} | {seconds:.3f} |")
    print("\n| the folder | GB/s | s |\n|---|---|---|")
    writes = {} if is_memory else {"write + fsync, O_DIRECT, 3 threads": direct}
    for name, seconds in (writes | {"plain write + fsync": plain}).items():
        print(f"| {name} | {SIZE / seconds / 1e9:.2f} | {seconds:.3f} |")
    print("\n| path | limit, GB/s | measured, GB/s | share of the limit |\n|---|---|---|---|")
    for name, limit in limits(core, direct, is_memory=is_memory).items():
        print(f"| {name} | {SIZE / limit / 1e9:.2f} | {SIZE / measured[name] / 1e9:.2f} | {limit / measured[name]:.2f} |")


if __name__ == "__main__":
    main()

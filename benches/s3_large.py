"""A large tensor put to SeaweedFS on loopback and read back, beside s5cmd: `python -m benches.s3_large --gib 8 --folder /tmp/bench --tls`.

Each step is a process of its own: seconds, its CPU seconds, the peak of its memory beyond the tensor (of s5cmd: all of it), and the bytes
that went over loopback meanwhile, to the server and back. Run it as `unshare --net bash -c "ip link set lo up; python -m ..."`, and no
other process counts among these. The reading process writes into a tensor that it made before, and compares all of it.
Needs three times the size on the disk, and once in memory; each side has a server of its own.
"""

import argparse
import multiprocessing
import resource
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches.s3 import S5cmd, cpu_seconds, self_signed
from tests.servers import BUCKET, S3Server, seaweedfs

MIB = 1 << 20
SLICE = 16 * MIB
"""Elements of the tensor that are made at a time."""

Figures = tuple[float, float, float, float]
"""Seconds, CPU seconds, MiB of memory, GB over loopback."""
Step = tuple[str, Callable[[S3Server, str, Path, int], Figures], str, Path]


def pieces(elements: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tensor's contents, and where they are in it."""
    for start in range(0, elements, SLICE):
        piece = torch.randn(min(SLICE, elements - start), generator=torch.Generator().manual_seed(start))
        yield slice(start, start + len(piece)), piece


def measured(work: Callable[[], object]) -> Figures:
    """Memory: the peak of this process beyond what it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what it has now
    memory, sent, cpu, began = _status("VmRSS"), _loopback_bytes(), cpu_seconds(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    return seconds, cpu, (_status("VmHWM") - memory) / MIB, (_loopback_bytes() - sent) / 1e9


def put(server: S3Server, url: str, folder: Path, elements: int) -> Figures:
    tensor = torch.empty(elements)
    for place, piece in pieces(elements):
        tensor[place] = piece
    with tsck.open(url, create=True, storage_options=server.storage_options, cache_dir=folder / "cache") as store:
        return measured(lambda: store.put_snapshot({"w": tensor}, ref="bench"))


def get(server: S3Server, url: str, folder: Path, elements: int) -> Figures:
    tensor = torch.zeros(elements)
    tensor += 1  # pages of its own
    with tsck.open(url, storage_options=server.storage_options, cache_dir=folder / "cache") as store:
        figures = measured(lambda: store.checkout("bench", into={"w": tensor}))
    if not all(torch.equal(tensor[place], piece) for place, piece in pieces(elements)):
        raise SystemExit("a restore returned other bytes")
    return figures


def put_file(server: S3Server, key: str, file: Path, elements: int) -> Figures:
    with file.open("wb") as target:
        for _, piece in pieces(elements):
            target.write(piece.numpy().data)
    return _with_memory_of_child(measured(lambda: S5cmd(server).put(file, key)))


def get_file(server: S3Server, key: str, file: Path, elements: int) -> Figures:
    return _with_memory_of_child(measured(lambda: S5cmd(server).get(key, file, 4 * elements)))


def _with_memory_of_child(figures: Figures) -> Figures:
    return (*figures[:2], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, figures[3])


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tls", action="store_true", help="over TLS, with a certificate that nobody signed")
    args = parser.parse_args()
    elements = int(args.gib * (1 << 28))
    place = f"{BUCKET}/{uuid.uuid4()}"
    store, object_, file = f"s3://{place}/store", f"{place}/file", args.folder / "file"
    sides: list[list[Step]] = [[("tsck put", put, store, args.folder), ("tsck checkout into=", get, store, args.folder)]]
    if S5cmd.is_there():
        sides.append([("s5cmd put", put_file, object_, file), ("s5cmd get", get_file, object_, file)])
    print(f"{args.gib} GiB in one tensor\n| what | seconds | GB/s | CPU seconds | peak MiB | GB over loopback |\n|---|---|---|---|---|---|")
    for steps in sides:
        with new_folder(args.folder), seaweedfs(args.folder, certificate=self_signed(args.folder) if args.tls else None) as server:
            for name, work, target, path in steps:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    seconds, cpu, memory, moved = pool.submit(work, server, target, path, elements).result()
                print(
                    f"| {name} | {seconds:.1f} | {elements * 4 / seconds / 1e9:.2f} | {cpu:.1f} | {memory:.0f} | {moved:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()

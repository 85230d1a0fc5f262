"""A virtual ``.safetensors`` file against a real one of the same bytes: `python -m benches.virtual_files --gib 1 --folder /tmp/bench`.

Read on from the beginning in pieces, and tensor by tensor as a lazy reader does; with both in the page cache and with both out of it.
What is read of the real file is believed; every block behind the virtual one is hashed.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import torch

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches.local import make_state
from tensorstore_ck.integrations.filesystem import SnapshotFileSystem

TENSORS = 64
PIECES_MIB = (1, 4, 16)
PATH = "bench/model.safetensors"

Open = Callable[[], Any]


def read_on(open_file: Open, piece: int) -> None:
    """All of it, piece by piece."""
    with open_file() as file:
        while file.read(piece):
            pass


def read_into(open_file: Open, piece: int) -> None:
    """All of it, piece by piece, into one buffer."""
    buffer = bytearray(piece)
    with open_file() as file:
        while file.readinto(buffer):
            pass


def read_lazily(open_file: Open) -> None:
    """The header, and then one tensor after another in an order of its own, each where it is to stay."""
    with open_file() as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name in sorted(header, reverse=True):
            if name != "__metadata__":
                start, stop = header[name]["data_offsets"]
                tensor = torch.empty(stop - start, dtype=torch.uint8)
                file.seek(8 + size + start)
                file.readinto(tensor.numpy())


WAYS: dict[str, Callable[[Open], None]] = {
    **{f"read, {piece} MiB pieces": partial(lambda piece, opened: read_on(opened, piece << 20), piece) for piece in PIECES_MIB},
    **{f"readinto, {piece} MiB pieces": partial(lambda piece, opened: read_into(opened, piece << 20), piece) for piece in PIECES_MIB},
    "lazily, tensor by tensor": read_lazily,
}


def forget_pages(folder: Path) -> None:
    """So that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds(way: Callable[[Open], None], opened: Open) -> float:
    started = time.perf_counter()
    way(opened)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    size = int(args.gib * 2**30)
    with new_folder(args.folder):
        print(f"load average {os.getloadavg()[0]:.1f} at the start")
        with tsck.open(args.folder / "store", create=True, cache_dir=args.folder / "cache") as store:
            store.put_snapshot(make_state(TENSORS, size // TENSORS), ref="bench")
        files = SnapshotFileSystem(str(args.folder / "store"), cache_dir=str(args.folder / "cache"), skip_instance_cache=True)
        real = args.folder / "model.safetensors"
        files.get_file(PATH, str(real))
        os.sync()
        places: tuple[Open, Open] = (partial(fsspec.filesystem("file").open, str(real), "rb"), partial(files.open, PATH, "rb"))
        print(f"{args.gib} GiB, {TENSORS} tensors, {args.folder}, median (least-most) of {args.rounds} rounds")
        print("| | | real, GB/s | virtual, GB/s | virtual / real, median of pairs |\n|---|---|---|---|---|")
        for state in ("in the page cache", "from the disk"):
            for name, way in WAYS.items():
                taken: tuple[list[float], list[float]] = ([], [])
                for number in range(args.rounds + 1):
                    for opened, found in zip(places, taken, strict=True):
                        if state == "from the disk":
                            forget_pages(args.folder)
                        spent = seconds(way, opened)
                        if number:
                            found.append(spent)
                shown = [
                    f"{size / statistics.median(each) / 1e9:.2f} ({size / max(each) / 1e9:.2f}-{size / min(each) / 1e9:.2f})"
                    for each in taken
                ]
                ratio = statistics.median(one / two for one, two in zip(*taken, strict=True))
                print(f"| {name} | {state} | {shown[0]} | {shown[1]} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()

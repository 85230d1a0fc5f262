"""A host's block index as it grows: `python -m benches.block_index --folder DIR [--blocks N ...]`.

The rows are made without saves: block ids drawn at random, in packs of 1,024, written in the order of their keys as LMDB's append does, so
that its pages are full; random saves leave them two thirds full. Each operation runs in a process of its own, after the file left the page
cache: CPU and wall time, and what the process read from and wrote to the disk. 1e8 blocks take 13 GB.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import lmdb
import numpy as np
import torch

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches.memory import high_water_bytes, reset_high_water
from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid
from tensorstore_ck.gc.live_bits import LiveBits
from tensorstore_ck.gc.part_summary import PartSummary
from tensorstore_ck.log.block_index import Location, forget_packs

SIZES = (1_000_000, 10_000_000, 100_000_000)
PACK_BLOCKS = 1024
BUCKETS = 256
"""Of ids, by their first byte: one is in memory at a time. A pack has `PACK_BLOCKS // BUCKETS` blocks of each."""
BLOCK_BYTES = 1 << 20
VALUE = np.dtype([("pack", "V16"), ("entry", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("codec", "<u2")])
FEW = 1000

Row = tuple[bytes, bytes]


def pack_name(number: int) -> bytes:
    return number.to_bytes(16)


def ids_of(bucket: int, packs: int) -> Any:
    """The ids of a bucket, in order; row r is in pack r modulo `packs`."""
    ids = np.random.default_rng(bucket).integers(0, 256, (packs * PACK_BLOCKS // BUCKETS, DIGEST_BYTES), np.uint8)
    ids[:, 0] = bucket
    return np.sort(ids.view(f"V{DIGEST_BYTES}").ravel())


def block_rows(packs: int, ids: Any) -> Iterator[Row]:
    """As `BlockIndex` writes them; all ids go to `ids`, by bucket, turn and pack."""
    names = np.frombuffer(b"".join(map(pack_name, range(packs))), "V16")
    for bucket in range(BUCKETS):
        own = ids_of(bucket, packs)
        ids[bucket] = own.view(np.uint8).reshape(-1, packs, DIGEST_BYTES)
        values = np.zeros(len(own), VALUE)
        values["pack"] = np.tile(names, len(own) // packs)
        values["entry"] = bucket * (PACK_BLOCKS // BUCKETS) + np.repeat(np.arange(len(own) // packs), packs)
        values["offset"] = values["entry"].astype(np.uint64) * BLOCK_BYTES
        values["stored"] = values["raw"] = BLOCK_BYTES
        raw = values.tobytes()
        for number, block in enumerate(own.tolist()):
            yield protected(b"b/" + block, raw[number * VALUE.itemsize : (number + 1) * VALUE.itemsize])


def pack_rows(packs: int, ids: Any) -> Iterator[Row]:
    step = 4096
    for first in range(0, packs, step):
        some = np.ascontiguousarray(ids[:, :, first : first + step].transpose(2, 0, 1, 3))
        for number, blocks in enumerate(some, start=first):
            value = blocks.tobytes()
            yield protected(b"p/" + pack_name(number) + value[:DIGEST_BYTES], value)


def protected(key: bytes, value: bytes) -> Row:
    return key, value + crc32(value, crc32(key)).to_bytes(4, "little")


def make(folder: Path, blocks: int) -> None:
    """A store with a snapshot, and the cache of a host that knows `blocks` blocks."""
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        store.put_snapshot({"weights": torch.zeros(64)}, ref="runs/a", step=1)
    own = data_file(folder)
    packs = blocks // PACK_BLOCKS
    with lmdb.open(str(own.parent), map_size=1 << 26) as environment, environment.begin() as txn:
        kept = list(txn.cursor())
    ids = np.memmap(folder / "ids", np.uint8, "w+", shape=(BUCKETS, PACK_BLOCKS // BUCKETS, packs, DIGEST_BYTES))
    parts = [
        [row for row in kept if row[0] < b"b/"],
        block_rows(packs, ids),
        [row for row in kept if b"b/" < row[0] < b"p/" and not row[0].startswith(b"b/")],
        pack_rows(packs, ids),
        [row for row in kept if row[0] > b"p/" and not row[0].startswith(b"p/")],
    ]
    made = folder / "made"
    with lmdb.open(str(made), map_size=(blocks * 160) + (64 << 20), sync=False, writemap=False) as environment:
        for rows in parts:
            rows, left = iter(rows), True
            while left:
                with environment.begin(write=True) as txn, txn.cursor() as cursor:
                    taken = list(zip(range(500_000), rows, strict=False))
                    cursor.putmulti([row for _, row in taken], append=True)
                    left = bool(taken)
        environment.sync(True)
    os.replace(made / "data.mdb", own)
    shutil.rmtree(made)
    ids.flush()


def data_file(folder: Path) -> Path:
    (found,) = (folder / "cache").rglob("data.mdb")
    return found


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def random_blocks(folder: Path, blocks: int, seed: int) -> list[Digest]:
    packs = blocks // PACK_BLOCKS
    ids = np.memmap(folder / "ids", np.uint8, "r", shape=(BUCKETS, PACK_BLOCKS // BUCKETS, packs, DIGEST_BYTES))
    draw = np.random.default_rng(seed)
    return [Digest(ids[draw.integers(BUCKETS), draw.integers(PACK_BLOCKS // BUCKETS), draw.integers(packs)].tobytes()) for _ in range(FEW)]


def new_blocks(seed: int) -> list[Digest]:
    return [Digest(block.tobytes()) for block in np.random.default_rng(BUCKETS + seed).integers(0, 256, (FEW, DIGEST_BYTES), np.uint8)]


def find(store: tsck.Store, blocks: list[Digest], known: int) -> None:
    assert len(store.engine.index.find(blocks)) == known


def add(store: tsck.Store, blocks: list[Digest]) -> None:
    pack = Ulid(b"\xff" * 16)
    places = [(block, Location(pack, entry, entry, BLOCK_BYTES, BLOCK_BYTES, 0)) for entry, block in enumerate(blocks)]
    store.engine.index.add(places, published_at=store.engine.log.view().head().n)  # type: ignore[union-attr]


def forget(store: tsck.Store, pack: int) -> None:
    with store.engine.table.batch() as batch:
        forget_packs(batch, [Ulid(pack_name(pack))])


OPERATIONS: dict[str, Callable[[Path, int], Callable[[tsck.Store], object]]] = {
    "open": lambda folder, blocks: lambda store: store.branches(),
    "find 1,000 that it has": lambda folder, blocks: _finding(random_blocks(folder, blocks, 1), FEW),
    "find 1,000 new ones": lambda folder, blocks: _finding(new_blocks(2), 0),
    "add 1,000 of a save": lambda folder, blocks: _adding(new_blocks(3)),
    "forget a pack of 1,024": lambda folder, blocks: lambda store: forget(store, blocks // PACK_BLOCKS // 2),
    "put of 64 MiB": lambda folder, blocks: _put,
}


def _finding(blocks: list[Digest], known: int) -> Callable[[tsck.Store], object]:
    return lambda store: find(store, blocks, known)


def _adding(blocks: list[Digest]) -> Callable[[tsck.Store], object]:
    return lambda store: add(store, blocks)


def _put(store: tsck.Store) -> None:
    store.put_snapshot({"weights": torch.arange(8 << 20)}, ref="runs/b", step=2)


def mark(blocks: int) -> None:
    """What gc keeps in memory of which blocks are needed, if all are: parts of 128 packs each, as cached summaries."""
    names = [Ulid(pack_name(number)) for number in range(blocks // PACK_BLOCKS)]
    words = PACK_BLOCKS // 64
    reset_high_water()
    memory, begin = high_water_bytes(), time.process_time()
    live = LiveBits()
    for first in range(0, len(names), 128):
        packs = names[first : first + 128]
        counts, numbers = np.full(len(packs), words, "<u4"), np.tile(np.arange(words, dtype="<u4"), len(packs))
        live.mark(PartSummary(Digest(bytes(32)), 0, packs, counts=counts, words=numbers, bits=np.full(len(numbers), 2**64 - 1, "<u8")))
    seconds = time.process_time() - begin
    grown = high_water_bytes() - memory
    print(f"marks of {blocks:,} blocks: {seconds:.2f} s of CPU, {live.size_bytes / blocks:.2f} bytes a block, process {grown / 1e6:.0f} MB")


def io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def measure(folder: Path, what: str, blocks: int) -> None:
    """In a process of its own: prints what an operation takes in an open store, twice: the second time with what the first one cached."""
    operation = OPERATIONS[what](folder, blocks)
    drop(data_file(folder))
    rows = []
    for _ in range(1 if what in ("open", "forget a pack of 1,024", "put of 64 MiB") else 2):
        opening = what == "open"
        before, wall, cpu = io(), time.perf_counter(), time.process_time()
        with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
            if not opening:
                store.branches()
                before, wall, cpu = io(), time.perf_counter(), time.process_time()
            operation(store)
            after = io()
            rows.append(
                (
                    time.perf_counter() - wall,
                    time.process_time() - cpu,
                    *(after[name] - before[name] for name in ("read_bytes", "write_bytes")),
                )
            )
    print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="*", default=SIZES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only")
    args = parser.parse_args()
    if args.only:
        measure(args.folder, args.only, args.blocks[0])
        return
    print("| blocks | operation | wall, ms | CPU, ms | read, KiB | written, KiB |\n|---|---|---|---|---|---|")
    for blocks in args.blocks:
        mark(blocks)
        with new_folder(args.folder):
            begin = time.process_time()
            make(args.folder, blocks)
            size_bytes = data_file(args.folder).stat().st_size
            print(f"{blocks:,} blocks: {size_bytes / 1e6:,.0f} MB, made in {time.process_time() - begin:.0f} s of CPU", flush=True)
            for what in OPERATIONS:
                command = [sys.executable, "-W", "ignore", "-m", "benches.block_index", "--folder", str(args.folder), "--only", what]
                line = subprocess.run([*command, "--blocks", str(blocks)], check=True, stdout=subprocess.PIPE).stdout
                for state, (wall, cpu, read, written) in zip(("cold", "warm"), json.loads(line), strict=False):
                    times = f"{1000 * wall:,.1f} | {1000 * cpu:,.1f}"
                    print(f"| {blocks:,} | {what}, {state} | {times} | {read / 1024:,.0f} | {written / 1024:,.0f} |", flush=True)


if __name__ == "__main__":
    main()

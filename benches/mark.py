"""Marking and usage of a large store without packs: `python -m benches.mark --folder /tmp/bench [--scale 0.01]`.

At scale 1: 200 snapshots of 10 parts of 125,000 references, of which each snapshot replaces a tenth, rows drawn at random (that
is the hardest: what is kept of a pack has gaps everywhere); 250 M references to 26 M blocks, 16 GB of parts on disk. A second
mark comes after one more snapshot, with the summaries that the first one left in the cache. Each measurement is a process of its own
and begins with a listing of the parts; its memory is the growth of anonymous memory, sampled.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benches._folder import new_folder
from tensorstore_ck.common.ids import Digest, Ulid, parse_ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Part, part_name
from tensorstore_ck.format.record import Record, encode_metadata, record_name
from tensorstore_ck.gc.live_bits import LiveBits
from tensorstore_ck.gc.mark_reachable import LiveSet
from tensorstore_ck.gc.usage import measure_usage
from tensorstore_ck.log import Op

MIB: Final = 1 << 20
PARTS: Final = 10
PART_BLOCKS: Final = 125_000
SNAPSHOTS: Final = 200
NEW: Final = 0.1
STORED_BYTES: Final = 64 << 10


class Rank:
    """The blocks that one rank refers to, from snapshot to snapshot."""

    def __init__(self, rank: int, engine: Engine, pack_blocks: int, packs_at_once: int) -> None:
        self._rank = rank
        self._engine = engine
        self._pack_blocks = pack_blocks
        self._packs_at_once = packs_at_once
        self._random = np.random.default_rng(rank)
        self._packs: list[Ulid] = []
        self._places = np.zeros(PART_BLOCKS, [("pack", np.int64), ("entry", np.int64)])
        self._ids = np.zeros((PART_BLOCKS, 4), np.uint64)
        self._next_id = rank << 40

    def part(self) -> tuple[Ulid, Part]:
        """The next snapshot's part; its new blocks lie in new packs, of which several are filled in turn."""
        rows = np.flatnonzero(self._random.random(PART_BLOCKS) < NEW) if self._packs else np.arange(PART_BLOCKS)
        self._ids[rows, 0] = np.arange(self._next_id, self._next_id + len(rows))
        self._next_id += len(rows)
        at = np.arange(len(rows))
        group, within = np.divmod(at, self._pack_blocks * self._packs_at_once)
        pack = group * self._packs_at_once + within % self._packs_at_once
        self._places["pack"][rows] = len(self._packs) + pack
        self._places["entry"][rows] = within // self._packs_at_once
        self._packs += [self._engine.new_id() for _ in range(int(pack.max()) + 1)]
        used, numbers = np.unique(self._places["pack"], return_inverse=True)
        extents = np.zeros(PART_BLOCKS, EXTENT_DTYPE)
        extents["pack"], extents["entry"] = numbers, self._places["entry"]
        extents["offset"] = 64 + self._places["entry"] * STORED_BYTES
        extents["stored"] = extents["raw"] = STORED_BYTES
        extents["base"] = -1
        blobs = np.array([(1, 0, STORED_BYTES)], BLOB_DTYPE)
        packs = [self._packs[number] for number in used.tolist()]
        ids = self._ids.tobytes()
        part = Part(Digest(bytes(32)), self._rank, PARTS, blobs, ids, b"\x90", b"", packs, extents, b"", 0, layout_of=b"")
        return self._engine.new_id(), part

    @property
    def blocks(self) -> int:
        """Distinct blocks so far."""
        return self._next_id - (self._rank << 40)


def put(engine: Engine, ranks: list[Rank], step: int) -> None:
    """Publishes a snapshot."""
    parts = [rank.part() for rank in ranks]
    for ulid, part in parts:
        engine.backend.put(part_name(ulid), part.encode())
    record = Record(
        f"runs/{step % 4}",
        step,
        None,
        encode_metadata(None),
        {},
        step,
        [ulid for ulid, _ in parts],
        b"".join(part.part_id() for _, part in parts),
        PARTS * PART_BLOCKS * STORED_BYTES,
        0,
    )
    ulid, sealed = engine.new_id(), record.encode()
    engine.backend.put(record_name(ulid), sealed)
    operations = [Op.put(record.ref, ulid, record, sealed, anchor=0, txn=ulid)]
    engine.log.append(lambda _: operations)
    if step % 20 == 0:
        engine.log.append(lambda _: [Op.tag(f"best/{step}", record.root())])


class Memory:
    """The largest anonymous memory of this process while it is entered, beyond what there was."""

    def __enter__(self) -> "Memory":
        self._done = threading.Event()
        self._before = self.peak = self._anonymous_bytes()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._sampler.join()
        self.peak -= self._before

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, self._anonymous_bytes())

    @staticmethod
    def _anonymous_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


def mark(engine: Engine) -> LiveBits:
    """What gc does first: every part of every root, by its summary."""
    listed = {ulid: info.size_bytes for info in engine.backend.list("parts/") if (ulid := parse_ulid(info.name[-26:]))}
    reach = LiveSet(engine, listed)
    reach.update(engine.log.view())
    return reach._marks


def measure(what: str, folder: Path) -> None:
    """In a process of its own: prints what it takes."""
    with open_store(folder) as engine:
        head, blocks = engine.log.sync(), json.loads((folder / "blocks").read_text())
        references = sum(1 for _ in engine.log.view().snapshots()) * PARTS * PART_BLOCKS
        with Memory() as memory:
            begin, cpu = time.perf_counter(), time.process_time()
            found: dict[str, Any] = {}
            if what == "mark":
                marks = mark(engine)
            else:
                usage = measure_usage(engine, per_snapshot=what == "usage per snapshot")
                assert usage.stored_bytes >= blocks * STORED_BYTES
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        if what == "mark":
            assert sum(len(marks.live_entries(pack)) for pack in marks.packs) == blocks
            found = {"marks": marks.size_bytes / blocks, "packs": len(marks.packs)}
        cache = sum(file.stat().st_size for file in (folder / "cache").rglob("*.mdb"))
        found |= {"seconds": seconds, "cpu": cpu, "rate": references / seconds / 1e6, "memory": memory.peak, "cache": cache, "head": head.n}
        print(json.dumps({**found, "blocks": blocks, "references": references}))


class open_store:  # noqa: N801 - used like a function
    """The engine of the bench's store."""

    def __init__(self, folder: Path) -> None:
        self._engine = open_engine(folder / "store", create=True, no_sync=True, cache_dir=folder / "cache")

    def __enter__(self) -> Engine:
        return self._engine

    def __exit__(self, *exc: object) -> None:
        self._engine.close()


def measured(what: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benches.mark", "--folder", str(folder), "--measure", what]
    line = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(line)
    return found


def variant(folder: Path, snapshots: int, pack_blocks: int, packs_at_once: int) -> None:
    """Makes a store, and measures it."""
    with new_folder(folder):
        rows = []
        with open_store(folder) as engine:
            ranks = [Rank(number, engine, pack_blocks, packs_at_once) for number in range(PARTS)]
            for step in range(1, snapshots + 1):
                put(engine, ranks, step)
            (folder / "blocks").write_text(str(sum(rank.blocks for rank in ranks)))
            rows.append(("first mark", measured("mark", folder)))
            put(engine, ranks, snapshots + 1)
            (folder / "blocks").write_text(str(sum(rank.blocks for rank in ranks)))
            rows.append(("mark after one more snapshot", measured("mark", folder)))
        first = rows[0][1]
        rows += [(what, measured(what, folder)) for what in ("usage", "usage per snapshot")]
        print(
            f"\n{snapshots} snapshots, {first['references'] / 1e6:.1f} M references, {first['blocks'] / 1e6:.2f} M blocks "
            f"in {first['packs']} packs of up to {pack_blocks}, filled {packs_at_once} at once; cache {first['cache'] / MIB:.0f} MiB\n"
        )
        columns = ["", "s", "CPU s", "M references/s", "x first", "marks, bytes/block", "memory, MiB", "memory, bytes/block"]
        print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
        for name, row in rows:
            print(
                f"| {name} | {row['seconds']:.2f} | {row['cpu']:.2f} | {row['rate']:.1f} | {first['seconds'] / row['seconds']:.1f} | "
                f"{row.get('marks', float('nan')):.2f} | {row['memory'] / MIB:.0f} | {row['memory'] / row['blocks']:.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of snapshots")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pack-blocks", type=int, default=16_384, help="256: packs of 1 GiB of blocks of 4 MiB")
    parser.add_argument("--packs-at-once", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--measure")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.folder)
        return
    for packs_at_once in args.packs_at_once:
        variant(args.folder / str(packs_at_once), max(2, int(SNAPSHOTS * args.scale)), args.pack_blocks, packs_at_once)


if __name__ == "__main__":
    main()

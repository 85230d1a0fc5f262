"""Save and checkout on SeaweedFS on loopback, against s3fs's own transfers: `python -m benches.s3 --gib 1 --folder /tmp/bench`.

The server, our client and its peers share this machine's cores, and take turns round by round, each with nothing dirty at its
start; medians are compared. The first round warms up and does not count. s3fs verifies nothing and writes no format: its
`put_file` and `get_file` are what a user would call, `cat_ranges` in ranges of 8 MiB is the fastest way it has to read.
"""

import argparse
import random
import statistics
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import s3fs
import torch
from aiobotocore.client import AioBaseClient

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches.local import make_state, ratio, timed
from tests.servers import BUCKET, S3Server, seaweedfs

MIB = 1 << 20
RANGE_BYTES = 8 * MIB
RANGES_AT_ONCE = 8

Seconds = dict[str, list[float]]


@contextmanager
def counting(requests: "Counter[str]") -> Iterator[None]:
    """Counts every request that any client in this process makes, by operation."""
    original = AioBaseClient._make_api_call

    async def call(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        requests[operation] += 1
        return await original(self, operation, arguments)

    AioBaseClient._make_api_call = call
    try:
        yield
    finally:
        AioBaseClient._make_api_call = original


class Bench:
    """One server, one state and one file of the same size."""

    def __init__(self, server: S3Server, state: dict[str, torch.Tensor], folder: Path) -> None:
        self.server = server
        self.state = state
        self.folder = folder
        self.size = sum(tensor.nbytes for tensor in state.values())
        self.file = folder / "file"
        with self.file.open("wb") as file:
            for tensor in state.values():
                file.write(tensor.numpy().data)
        self.target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.seconds: Seconds = {}
        self.requests: dict[str, Counter[str]] = {}

    def run_round(self, number: int) -> None:
        options = {**self.server.storage_options, "use_listings_cache": False, "skip_instance_cache": True}
        files = s3fs.S3FileSystem(**options)
        place = f"{BUCKET}/{uuid.uuid4()}"
        key = f"{place}/file"
        self.time("s3fs put_file", lambda: files.put_file(str(self.file), key))
        with tsck.open(
            f"s3://{place}/store", create=True, storage_options=self.server.storage_options, cache_dir=self.folder / "cache"
        ) as store:
            self.time("tsck put", lambda: store.put_snapshot(self.state, ref="bench"))
            self.cat_ranges(files, key)  # the server is slower at what it has not read before
            store.checkout("bench", into=self.target)
            reads: list[tuple[str, Callable[[], object]]] = [
                ("s3fs get_file", lambda: files.get_file(key, str(self.folder / "fetched"))),
                ("s3fs cat_ranges", lambda: self.cat_ranges(files, key)),
                ("tsck checkout", lambda: store.checkout("bench")),
                ("tsck checkout into=", lambda: store.checkout("bench", into=self.target)),
            ]
            random.Random(number).shuffle(reads)  # who comes after get_file finds less free memory
            for name, read in reads:
                self.time(name, read)
            self.time("tsck put, nothing changed", lambda: store.put_snapshot(self.state, ref="bench"))
        if not all(torch.equal(tensor, self.target[name]) for name, tensor in self.state.items()):
            raise SystemExit("a restore returned other bytes")
        files.rm(place, recursive=True)

    def cat_ranges(self, files: s3fs.S3FileSystem, key: str) -> list[bytes]:
        starts = list(range(0, self.size, RANGE_BYTES))
        ends = [min(start + RANGE_BYTES, self.size) for start in starts]
        found: list[bytes] = files.cat_ranges([key] * len(starts), starts, ends, batch_size=RANGES_AT_ONCE, on_error="raise")
        return found

    def time(self, name: str, work: Callable[[], object]) -> None:
        requests: Counter[str] = Counter()
        with counting(requests):
            self.seconds.setdefault(name, []).append(timed(work))
        self.requests[name] = requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with new_folder(args.folder):
        state = make_state(64, int(args.gib * (1 << 30)) // 64)
        with seaweedfs(args.folder) as server:
            bench = Bench(server, state, args.folder)
            for number in range(args.rounds + 1):
                bench.run_round(number)
    seconds = {name: taken[1:] for name, taken in bench.seconds.items()}
    print(f"{len(state)} fp32 tensors, {bench.size / 2**30:.2f} GiB, SeaweedFS on loopback, median (least-most) of {args.rounds} rounds")
    print("| what | GB/s | seconds | requests |\n|---|---|---|---|")
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        requests = ", ".join(f"{count} {operation}" for operation, count in bench.requests[name].most_common())
        print(f"| {name} | {bench.size / middle / 1e9:.2f} | {middle:.3f} ({min(taken):.3f}-{max(taken):.3f}) | {requests} |")
    print("\n| ratio of speeds, median of pairs | |\n|---|---|")
    for ours, theirs in (
        ("tsck put", "s3fs put_file"),
        ("tsck checkout", "s3fs get_file"),
        ("tsck checkout into=", "s3fs get_file"),
        ("tsck checkout", "s3fs cat_ranges"),
        ("tsck checkout into=", "s3fs cat_ranges"),
    ):
        print(f"| {ours} / {theirs} | {ratio(seconds, ours, theirs):.2f} |")


if __name__ == "__main__":
    main()

"""Save and checkout on SeaweedFS on loopback, beside s3fs, s5cmd and obstore: `python -m benches.s3 --gib 1 --folder /tmp/bench [--tls]`.

The server, our client and its peers share this machine's cores, and take turns round by round, each with nothing dirty at its
start; medians are compared. The first round warms up and does not count. s3fs verifies nothing and writes no format: its
`put_file` and `get_file` are what a user would call, `cat_ranges` in ranges of 8 MiB is the fastest way it has to read. s5cmd (Go,
a process of its own) and obstore (Rust) are taken if they are installed; they verify nothing either. CPU seconds are the client's.
"""

import argparse
import importlib
import importlib.util
import os
import random
import resource
import shutil
import statistics
import subprocess
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
from tests.servers import BUCKET, KEY, SECRET, S3Server, seaweedfs

MIB = 1 << 20
RANGE_BYTES = 8 * MIB
RANGES_AT_ONCE = 8

Seconds = dict[str, list[float]]


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


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


def self_signed(folder: Path) -> Path:
    """A file with a key and its certificate."""
    file = folder / "tls.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", "-", "-out", "-"]
    file.write_bytes(subprocess.run(made, check=True, capture_output=True).stdout)
    return file


class S5cmd:
    """The fastest command line for S3 that is widely used: a file to an object and back."""

    name = "s5cmd"

    def __init__(self, server: S3Server) -> None:
        self._command = ["s5cmd", "--endpoint-url", server.endpoint, "--no-verify-ssl", "cp", "--concurrency", str(RANGES_AT_ONCE)]
        self._environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}

    @staticmethod
    def is_there() -> bool:
        return shutil.which("s5cmd") is not None

    def put(self, file: Path, key: str) -> None:
        self._run(str(file), f"s3://{key}")

    def get(self, key: str, file: Path, _: int) -> None:
        self._run(f"s3://{key}", str(file))

    def _run(self, source: str, target: str) -> None:
        subprocess.run([*self._command, source, target], check=True, env=self._environment, stdout=subprocess.DEVNULL)


class Obstore:
    """Rust's object_store: a file to an object, and ranges of it into memory."""

    name = "obstore"

    def __init__(self, server: S3Server) -> None:
        self._obstore = importlib.import_module("obstore")
        self._store = importlib.import_module("obstore.store").S3Store(
            BUCKET,
            endpoint=server.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "allow_invalid_certificates": True, "timeout": "600s"},
        )

    @staticmethod
    def is_there() -> bool:
        return importlib.util.find_spec("obstore") is not None

    def put(self, file: Path, key: str) -> None:
        self._obstore.put(self._store, key.partition("/")[2], file, chunk_size=RANGE_BYTES, max_concurrency=RANGES_AT_ONCE)

    def get(self, key: str, _: Path, size_bytes: int) -> None:
        starts = list(range(0, size_bytes, RANGE_BYTES))
        lengths = [min(RANGE_BYTES, size_bytes - start) for start in starts]
        self._obstore.get_ranges(self._store, key.partition("/")[2], starts=starts, lengths=lengths)


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
        self.cpu: Seconds = {}
        self.requests: dict[str, Counter[str]] = {}

    def run_round(self, number: int) -> None:
        options = {**self.server.storage_options, "use_listings_cache": False, "skip_instance_cache": True}
        files = s3fs.S3FileSystem(**options)
        place = f"{BUCKET}/{uuid.uuid4()}"
        key = f"{place}/file"
        self.time("s3fs put_file", lambda: files.put_file(str(self.file), key))
        peers = [peer(self.server) for peer in (S5cmd, Obstore) if peer.is_there()]
        for peer in peers:
            self.time(f"{peer.name} put", lambda peer=peer: peer.put(self.file, f"{place}/{peer.name}"))  # type: ignore[misc]
        with tsck.open(
            f"s3://{place}/store", create=True, storage_options=self.server.storage_options, cache_dir=self.folder / "cache"
        ) as store:
            self.time("tsck put", lambda: store.put_snapshot(self.state, ref="bench"))
            self.cat_ranges(files, key)  # the server is slower at what it has not read before
            store.checkout("bench", into=self.target)
            reads: list[tuple[str, Callable[[], object]]] = [
                ("s3fs get_file", lambda: files.get_file(key, str(self.folder / "fetched"))),
                ("s3fs cat_ranges", lambda: self.cat_ranges(files, key)),
                *[(f"{p.name} get", lambda p=p: p.get(f"{place}/{p.name}", self.folder / "fetched", self.size)) for p in peers],
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
        before = cpu_seconds()
        with counting(requests):
            self.seconds.setdefault(name, []).append(timed(work))
        self.cpu.setdefault(name, []).append(cpu_seconds() - before)
        self.requests[name] = requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tls", action="store_true", help="over TLS, with a certificate that nobody signed")
    args = parser.parse_args()
    with new_folder(args.folder):
        state = make_state(64, int(args.gib * (1 << 30)) // 64)
        with seaweedfs(args.folder, certificate=self_signed(args.folder) if args.tls else None) as server:
            bench = Bench(server, state, args.folder)
            for number in range(args.rounds + 1):
                bench.run_round(number)
    seconds = {name: taken[1:] for name, taken in bench.seconds.items()}
    print(f"{len(state)} fp32 tensors, {bench.size / 2**30:.2f} GiB, SeaweedFS on loopback, median (least-most) of {args.rounds} rounds")
    print("| what | GB/s | seconds | CPU seconds | requests |\n|---|---|---|---|---|")
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        requests = ", ".join(f"{count} {operation}" for operation, count in bench.requests[name].most_common())
        spread, cpu = f"{min(taken):.3f}-{max(taken):.3f}", statistics.median(bench.cpu[name][1:])
        print(f"| {name} | {bench.size / middle / 1e9:.2f} | {middle:.3f} ({spread}) | {cpu:.2f} | {requests} |")
    print("\n| ratio of speeds, median of pairs | |\n|---|---|")
    for ours, theirs in (
        ("tsck put", "s3fs put_file"),
        ("tsck checkout", "s3fs get_file"),
        ("tsck checkout into=", "s3fs get_file"),
        ("tsck checkout", "s3fs cat_ranges"),
        ("tsck checkout into=", "s3fs cat_ranges"),
        ("tsck put", "s5cmd put"),
        ("tsck checkout into=", "s5cmd get"),
        ("tsck put", "obstore put"),
        ("tsck checkout into=", "obstore get"),
    ):
        if theirs not in seconds:
            continue
        print(f"| {ours} / {theirs} | {ratio(seconds, ours, theirs):.2f} |")


if __name__ == "__main__":
    main()

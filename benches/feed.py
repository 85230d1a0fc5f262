"""From published to swapped on SeaweedFS on loopback with 50 ms of latency: `python -m benches.feed --gib 1 --folder /dev/shm/bench`.

A trainer changes 0.5 % of the elements of bf16 weights for each version, and publishes it; a follower at the version before takes it:
`tsck follow` (`Store.follow`), a full reload (`checkout(into=)` of a store without differences), and files of XOR and zstd, written and
read by a plain client, as trainers write them that have no store. The first round warms up and does not count; medians.
`--local` is without a server and its latency, and counts processor time, which other load on the machine changes little.
"""

import argparse
import os
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import numpy as np
import torch
import zstandard

import tensorstore_ck as tsck
from benches._folder import new_folder
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy
from tests.servers import BUCKET, KEY, SECRET, seaweedfs, storage_options

LAYERS = 64
SHARE = 0.005
LATENCY_SECONDS = 0.05
REF = "runs/rl"
Weights = dict[str, torch.Tensor]
Seconds = dict[str, list[float]]


def delayed(_: object) -> Fault:
    """Each request takes `LATENCY_SECONDS` more."""
    time.sleep(LATENCY_SECONDS)
    return Fault.NONE


def train(weights: Weights, version: int) -> None:
    """Changes `SHARE` of the elements by little."""
    for number, tensor in enumerate(weights.values()):
        flat = tensor.view(-1)
        chosen = torch.randint(0, len(flat), (int(len(flat) * SHARE),), generator=torch.Generator().manual_seed(version * LAYERS + number))
        flat[chosen] = (flat[chosen].float() * 1.01 + 1e-4).bfloat16()


class XorFiles:
    """Versions as the XOR with the one before, compressed with zstd, in one object of S3."""

    def __init__(self, endpoint: str, place: str) -> None:
        self.client = botocore.session.Session().create_client(
            "s3", "us-east-1", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET
        )
        self.place = place

    def publish(self, version: int, before: Weights, weights: Weights) -> int:
        """Writes a version; returns its bytes."""
        compressor = zstandard.ZstdCompressor(level=1, threads=-1)
        pieces = [compressor.compress(np.bitwise_xor(bits(before[name]), bits(tensor)).data) for name, tensor in weights.items()]
        body = b"".join(len(piece).to_bytes(8, "little") + piece for piece in pieces)
        self.client.put_object(Bucket=BUCKET, Key=f"{self.place}/{version}", Body=body)
        return len(body)

    def take(self, version: int, mine: Weights) -> None:
        """Reads a version into the tensors of the one before, in place: a failure leaves both mixed."""
        body = self.client.get_object(Bucket=BUCKET, Key=f"{self.place}/{version}")["Body"].read()
        at = 0
        for tensor in mine.values():
            size = int.from_bytes(body[at : at + 8], "little")
            difference = np.frombuffer(zstandard.ZstdDecompressor().decompress(body[at + 8 : at + 8 + size]), np.int16)
            np.bitwise_xor(bits(tensor), difference, out=bits(tensor))
            at += 8 + size


def bits(tensor: torch.Tensor) -> Any:
    """The elements as integers, flat."""
    return tensor.view(torch.int16).view(-1).numpy()


class Bench:
    """One trainer and its follower, in a folder or on a server."""

    def __init__(self, place: str, gib: float, **options: Any) -> None:
        torch.manual_seed(0)
        count = int(gib * (1 << 30)) // LAYERS // 2
        self.weights = {f"l{number}": (torch.randn(count) * 0.02).bfloat16().view(-1, 1024) for number in range(LAYERS)}
        self.seconds, self.cpu_seconds, self.mib = Seconds(), Seconds(), Seconds()
        self.trainer = tsck.open(f"{place}/delta", create=True, delta={REF: True}, **options)
        self.trainer.put_snapshot({"model": self.weights}, ref=REF, step=0)
        self.mine = {name: tensor.clone() for name, tensor in self.weights.items()}
        self.feed = tsck.open(f"{place}/delta", read_only=True, **options).follow(REF, into={"model": self.mine})
        self.feed.poll()
        self.feed.swap()

    def run_round(self, version: int) -> None:
        """Publishes a version, and follows it."""
        train(self.weights, version)
        snapshot = self.note("tsck publish", lambda: self.trainer.put_snapshot({"model": self.weights}, ref=REF, step=version))
        self.note("tsck poll", self.feed.poll)
        self.note("tsck swap", self.feed.swap)
        self.mib.setdefault("tsck", []).append(snapshot.new_bytes / (1 << 20))
        self.require(self.mine)

    def require(self, taken: Weights) -> None:
        """Ends the bench if `taken` is not the newest version."""
        if not all(torch.equal(tensor, taken[name]) for name, tensor in self.weights.items()):
            raise SystemExit("a follower has another version")

    def note(self, name: str, work: Callable[[], Any]) -> Any:
        """Times `work`, and returns its result."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        result = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        self.cpu_seconds.setdefault(name, []).append(time.process_time() - cpu_begin)
        return result


class BenchOnS3(Bench):
    """Also with the peers."""

    def __init__(self, proxy: ChaosProxy, gib: float) -> None:
        place, options = f"s3://{BUCKET}/{uuid.uuid4()}", storage_options(proxy.url)
        super().__init__(place, gib, storage_options=options)
        self.plain = tsck.open(f"{place}/plain", create=True, storage_options=options, codec="raw")
        self.reader = tsck.open(f"{place}/plain", read_only=True, storage_options=options)
        self.files = XorFiles(proxy.url, str(uuid.uuid4()))
        self.before, self.full = ({name: tensor.clone() for name, tensor in self.weights.items()} for _ in range(2))

    def run_round(self, version: int) -> None:
        """Publishes a version, and takes it in each way."""
        super().run_round(version)
        self.note("full publish", lambda: self.plain.put_snapshot({"model": self.weights}, ref=REF, step=version))
        self.note("full reload", lambda: self.reader.checkout(REF, into={"model": self.full}))
        size_bytes = self.note("xor publish", lambda: self.files.publish(version, self.before, self.weights))
        self.note("xor take", lambda: self.files.take(version, self.before))
        self.mib.setdefault("xor", []).append(size_bytes / (1 << 20))
        self.require(self.full)
        self.require(self.before)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--local", action="store_true", help="In the folder, without a server: also seconds of processor time.")
    args = parser.parse_args()
    with new_folder(args.folder):
        if args.local:
            bench = Bench(str(args.folder), args.gib)
            run(bench, args.rounds)
        else:
            with seaweedfs(args.folder) as server, chaos_proxy(server.port) as proxy:
                proxy.plan = delayed
                bench = BenchOnS3(proxy, args.gib)
                run(bench, args.rounds)
    print(f"{args.gib} GiB of bf16, {SHARE:.1%} changed, load {os.getloadavg()[0]:.1f} at the end")
    for name, taken in bench.seconds.items():
        cpu = f", {statistics.median(bench.cpu_seconds[name][1:]):.3f} s of processor time" if args.local else ""
        print(f"{name:14} {statistics.median(taken[1:]):7.3f} s{cpu}")
    for name, sizes in bench.mib.items():
        print(f"{name:14} {statistics.median(sizes[1:]):7.2f} MiB a version")


def run(bench: Bench, rounds: int) -> None:
    """All rounds."""
    for number in range(rounds + 1):
        bench.run_round(number + 1)


if __name__ == "__main__":
    main()

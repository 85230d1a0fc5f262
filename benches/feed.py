"""From published to swapped on SeaweedFS on loopback with 50 ms of latency: `python -m benches.feed --gib 1 --folder /dev/shm/bench`.

A trainer changes 0.5 % of the elements of bf16 weights for each version, and publishes it; a follower at the version before takes it:
`tsck follow` (`Store.follow`), a full reload (`checkout(into=)` of a store without differences), and files of XOR and zstd, written and
read by a plain client, as trainers write them that have no store. The first round warms up and does not count; medians.
`--local` is without a server and its latency, and counts processor time, which other load on the machine changes little; "hash alone" is
what the ids of all blocks cost.
`--simulate 100` computes the local figures of a model of 100 GB, which does not fit here: processor time of each step is taken to be a
constant and a cost for each block, from runs of `--gib` and of a quarter of it. `--followers 1000` counts requests of that many followers.
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
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import block_id
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.format.store_config import BLOCK_BYTES
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy
from tests.feed.versions import REF as VERSIONS_REF
from tests.feed.versions import NotedFaults, first_state, follower, save, update, zeros
from tests.feed.versions import train as train_a_little
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


def hash_one(block: memoryview) -> None:
    """What `block_id` costs."""
    block_id(block)


def bits(tensor: torch.Tensor) -> Any:
    """The elements as integers, flat."""
    return tensor.view(torch.int16).view(-1).numpy()


class Bench:
    """One trainer and its follower, in a folder or on a server."""

    def __init__(self, place: str, gib: float, layers: int = LAYERS, **options: Any) -> None:
        torch.manual_seed(0)
        count = int(gib * (1 << 30)) // layers // 2
        self.weights = {f"l{number}": (torch.randn(count) * 0.02).bfloat16().view(-1, 1024) for number in range(layers)}
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
        self.note("hash alone", self.hash_all)
        self.note("tsck poll", self.feed.poll)
        self.note("tsck swap", self.feed.swap)
        self.mib.setdefault("tsck", []).append(snapshot.new_bytes / (1 << 20))
        self.require(self.mine)

    def hash_all(self) -> None:
        """The blocks of all weights, by as many threads as a save has."""
        blocks = [
            memoryview(bits(tensor)).cast("B")[at : at + BLOCK_BYTES]
            for tensor in self.weights.values()
            for at in range(0, tensor.nbytes, BLOCK_BYTES)
        ]
        for_each(blocks, hash_one, cpu_threads())

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
    parser.add_argument("--simulate", type=float, metavar="GB", help="Compute the processor time for a model of that size.")
    parser.add_argument("--followers", type=int, metavar="N", help="Count the requests of N followers, and no times.")
    args = parser.parse_args()
    if args.followers:
        print_requests(args.followers)
        return
    with new_folder(args.folder):
        if args.simulate:
            small, bench = (Bench(str(args.folder / f"1-{part}"), args.gib / part, LAYERS // part) for part in (4, 1))
            run(small, args.rounds)
            run(bench, args.rounds)
            simulate(small, bench, args.simulate)
        elif args.local:
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


def simulate(small: Bench, large: Bench, gb: float) -> None:
    """Prints the processor time of a model of `gb` GB, by the costs of two runs."""
    blocks = [sum(-(-tensor.nbytes // BLOCK_BYTES) for tensor in bench.weights.values()) for bench in (small, large)]
    wanted = round(gb * 1e9 / BLOCK_BYTES)
    print(f"{gb:.0f} GB, {wanted:,} blocks, from {blocks[0]} and {blocks[1]} blocks; load {os.getloadavg()[0]:.1f} at the end")
    for name in large.cpu_seconds:
        seconds = [min(bench.cpu_seconds[name][1:]) for bench in (small, large)]  # the least: what other programs cost is not ours
        each = max(seconds[1] - seconds[0], 0.0) / (blocks[1] - blocks[0])
        fixed = max(seconds[0] - each * blocks[0], 0.0)
        total = fixed + each * wanted
        print(f"{name:14} {fixed * 1e3:7.1f} ms + {each * 1e6:7.1f} us a block = {total:6.1f} s of one core, {total / 32:5.2f} s of 32")
    print(f"{'differences':14} {statistics.median(large.mib['tsck'][1:]) / blocks[1] * wanted:7.0f} MiB a version")


def print_requests(count: int) -> None:
    """Prints the requests of `count` followers of a small model, and of its trainer with and without them."""
    requests = {number: requests_of(number) for number in (1, count)}
    for number, (trainer, followers) in requests.items():
        print(f"{number:5} followers: {trainer} requests of the trainer a version; of each follower {min(followers)} to {max(followers)}")


def requests_of(count: int, versions: int = 3) -> tuple[float, list[float]]:
    """Requests for each version: of the trainer, and of each follower."""
    backend, state, publisher = MemoryBackend(), first_state(), NotedFaults()
    backend.is_local = False  # as a bucket
    trainer = follower(backend, publisher)
    save(trainer, state, 0)
    noted = [NotedFaults() for _ in range(count)]
    feeds = [follower(backend, faults).follow(VERSIONS_REF, into=zeros(state)) for faults in noted]
    for feed in feeds:
        update(feed)
    for faults in (publisher, *noted):
        faults.noted.clear()
    for step in range(1, versions + 1):
        train_a_little(state, step)
        save(trainer, state, step)
        for feed in feeds:
            update(feed)
    return len(publisher.noted) / versions, [len(faults.noted) / versions for faults in noted]


def run(bench: Bench, rounds: int) -> None:
    """All rounds."""
    for number in range(rounds + 1):
        bench.run_round(number + 1)


if __name__ == "__main__":
    main()

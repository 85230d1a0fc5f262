"""Uploads from a staging disk to SeaweedFS on loopback: `python -m benches.staging --folder /tmp/bench`.

speed: from "staged" to "published", compared with s3fs's own transfer of the same packs. They take turns in an order that
changes, with the files not in the page cache (a save bypasses it). Each round has a server of its own, which a first save warms up.
rate: an upload, and a save without staging, held to a third of that speed.
memory: the kernel's high-water mark of an upload, beyond what the process held when all was staged, by number of requests at a time.

The server shares this machine's cores. `--quick` tries all of it on 0.25 GiB.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import s3fs
import torch

import tensorstore_ck as tsck
from benches._usage import watch_others
from benches._warmcopy import State
from benches.local import make_state
from benches.memory import high_water_bytes, reset_high_water
from benches.s3 import MIB
from tensorstore_ck.backend.staging import Staging
from tensorstore_ck.common.rate_limit import BURST_SECONDS
from tests.servers import BUCKET, S3Server, seaweedfs

PARTS = ("speed", "rate", "memory")
REQUESTS = (1, 4, 8)
TSCK = "tsck, staged to published"
ALL = "s3fs put, all packs at once"
EACH = "s3fs put_file, one by one"
TINY = {"tiny": torch.zeros(1 << 16)}


class Upload(NamedTuple):
    """How one went."""

    seconds: float
    size_bytes: int
    extra_bytes: int
    """Beyond what the process held when all was staged."""


@contextmanager
def served(folder: Path) -> Iterator[S3Server]:
    """A new server: what was deleted on an old one still uses space. All is gone at the end."""
    folder.mkdir()
    try:
        with seaweedfs(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder)


@contextmanager
def opened(server: S3Server, folder: Path, *, requests: int = 4, rate: float | None = None, is_staged: bool = True) -> Iterator[tsck.Store]:
    """A new store."""
    with tsck.open(
        f"{server.url}/{uuid.uuid4()}",
        create=True,
        storage_options=server.storage_options,
        cache_dir=folder / "cache",
        staging=Staging(folder / "stage", max_parallel_requests=requests) if is_staged else None,
        rate_limit=rate,
    ) as store:
        yield store


def change(state: State) -> None:
    for tensor in state.values():
        tensor.add_(1e-3)


def put(store: tsck.Store, state: State) -> Upload:
    """Changes the state, saves it, and times what comes after "staged"."""
    change(state)
    staged: list[float] = []

    def note(_: object) -> None:  # before the upload begins, on the thread that staged
        reset_high_water()
        staged.extend((time.perf_counter(), high_water_bytes()))

    pending = store.put_snapshot_async(state, ref="bench")
    pending.staged.on_settled(note)
    pending.wait()
    seconds = time.perf_counter() - staged[0]
    return Upload(seconds, pending.progress().stage_bytes["upload"], high_water_bytes() - int(staged[1]))


def put_directly(store: tsck.Store, state: State) -> Upload:
    """Changes the state, saves it to a store without staging, and times all of that save."""
    change(state)
    began = time.perf_counter()
    snapshot = store.put_snapshot(state, ref="bench")
    return Upload(time.perf_counter() - began, snapshot.new_bytes, 0)


class Packs:
    """The files that a save staged, of which the disk keeps copies, for s3fs."""

    def __init__(self, server: S3Server, folder: Path) -> None:
        self._files = s3fs.S3FileSystem(**server.storage_options, use_listings_cache=False, skip_instance_cache=True)
        self._paths = [str(path) for path in (folder / "stage").glob("*/copies/packs/*/*") if path.stat().st_size > MIB]

    def one_by_one(self) -> Upload:
        return self._send(lambda paths, keys: [self._files.put_file(path, key) for path, key in zip(paths, keys, strict=True)])

    def all_at_once(self) -> Upload:
        return self._send(self._files.put)

    def _send(self, send: Callable[[list[str], list[str]], object]) -> Upload:
        place, paths = f"{BUCKET}/{uuid.uuid4()}", self._paths
        drop_pages(paths)
        reset_high_water()
        before, began = high_water_bytes(), time.perf_counter()
        send(paths, [f"{place}/{os.path.basename(path)}" for path in paths])
        upload = Upload(time.perf_counter() - began, sum(map(os.path.getsize, paths)), high_water_bytes() - before)
        self._files.rm(place, recursive=True)
        return upload


def drop_pages(paths: list[str]) -> None:
    """Leaves files to the disk alone."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# --- parts --------------------------------------------------------------------------------------------------------------


def bench_speed(state: State, folder: Path, rounds: int, requests: int) -> float:
    """Prints how fast uploads are compared with s3fs; returns tsck's bytes a second."""
    speeds: dict[str, list[float]] = {}
    with watch_others() as others:
        for number in range(rounds):
            with served(folder) as server, opened(server, folder, requests=requests) as store:
                put(store, state)
                packs = Packs(server, folder)
                turns: dict[str, Callable[[], Upload]] = {TSCK: lambda: put(store, state), ALL: packs.all_at_once, EACH: packs.one_by_one}
                names = list(turns)
                random.Random(number).shuffle(names)
                for name in names:
                    upload = turns[name]()
                    speeds.setdefault(name, []).append(upload.size_bytes / upload.seconds)
    print(f"{requests} requests at a time, median (least-most) of {rounds} rounds; {others}")
    print("| upload | MB/s | tsck / it |\n|---|---|---|")
    for name in (TSCK, ALL, EACH):
        middle = statistics.median(speeds[name])
        ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds[TSCK], speeds[name], strict=True))
        must = "" if name == TSCK else f"{ratio:.2f} (must be >= 0.9)"
        print(f"| {name} | {middle / 1e6:.0f} ({min(speeds[name]) / 1e6:.0f}-{max(speeds[name]) / 1e6:.0f}) | {must} |", flush=True)
    return statistics.median(speeds[TSCK])


def bench_rate(state: State, folder: Path, speed: float) -> None:
    """Prints how well a third of a speed is held."""
    rate = speed / 3
    print(f"\nheld to {rate / 1e6:.1f} MB/s\n| what | MB/s | of the limit |\n|---|---|---|")
    for name, is_staged in (("upload from the staging disk", True), ("put without staging", False)):
        with served(folder) as server, opened(server, folder, rate=rate, is_staged=is_staged) as store:
            store.put_snapshot(TINY, ref="warm-up")
            time.sleep(BURST_SECONDS)  # saves are far apart: what the limit lets pass at once is there
            held = put(store, state) if is_staged else put_directly(store, state)
        reached = held.size_bytes / held.seconds
        print(f"| {name} | {reached / 1e6:.1f} | {reached / rate:.3f} (must be 0.95 to 1.05) |", flush=True)


def bench_memory(folder: Path, gib: float) -> None:
    """Prints what requests side by side cost."""
    print("\n| upload | memory beyond what was held before | for each request |\n|---|---|---|")
    for requests in (*REQUESTS, 0):
        with served(folder) as server:
            command = [sys.executable, "-m", "benches.staging", "--folder", str(folder), "--gib", str(gib), "--child"]
            command += [json.dumps((server.port, requests))]
            extra = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        each = f"{extra / requests / MIB:.1f} MiB (must be <= 16)" if requests else ""
        name = f"tsck, max_parallel_requests={requests}" if requests else ALL
        print(f"| {name} | {extra / MIB:.0f} MiB | {each} |", flush=True)


def answer_parent(port: int, requests: int, folder: Path, gib: float) -> None:
    """Prints the memory that one upload took, by s3fs if there are no requests."""
    server, state = S3Server(port), new_state(gib)
    with opened(server, folder, requests=requests or 4) as store:
        store.put_snapshot(TINY, ref="warm-up")  # loads what an upload needs
        upload = put(store, state)
        if not requests:
            packs = Packs(server, folder)
            packs.all_at_once()
            upload = packs.all_at_once()
    print(upload.extra_bytes)


def new_state(gib: float) -> State:
    return make_state(64, int(gib * (1 << 30)) // 64 // 64 * 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="at a time, in part speed")
    parser.add_argument("--speed", type=float, help="MB/s of which part rate takes a third; by default what part speed measures")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        port, requests = json.loads(args.child)
        answer_parent(port, requests, args.folder, args.gib)
        return
    if args.quick:
        args.gib, args.rounds = 0.25, 2
    folder = args.folder / "staging"
    shutil.rmtree(folder, ignore_errors=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    state = new_state(args.gib)
    print(f"{args.gib:.2f} GiB in 64 fp32 tensors, SeaweedFS on loopback\n", flush=True)
    speed = args.speed * 1e6 if args.speed else 0.0
    if "speed" in args.part or ("rate" in args.part and not speed):
        measured = bench_speed(state, folder, args.rounds, args.requests)
        speed = speed or measured
    if "rate" in args.part:
        bench_rate(state, folder, speed)
    if "memory" in args.part:
        del state
        bench_memory(folder, args.gib)


if __name__ == "__main__":
    main()

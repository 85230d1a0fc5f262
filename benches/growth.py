"""What a store's operations take as it grows: `python -m benches.growth --folder DIR`.

Each store is made by real saves of a tiny state, a tenth as many branches as snapshots. Each operation runs in a process of its own, which
imports everything and counts from then on: CPU time, growth of the kernel's high-water mark of memory, and what the backend is asked.
A cache is lost by giving `open` a new folder. Stores that an earlier run left with `--keep` are not made again.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import tensorstore_ck as tsck
from benches.memory import high_water_bytes, reset_high_water
from tensorstore_ck.backend.local import LocalBackend

MIB = 1 << 20
SIZES = (1_000, 10_000, 100_000)
AT_ONCE = tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1.0)


def state(number: int) -> dict[str, Any]:
    return {"weights": torch.full((64,), number), "step": number}


def put(store: tsck.Store, number: int, branches: int) -> None:
    store.put_snapshot(state(number), ref=f"runs/{number % branches}", step=number, metrics={"loss": 1 / number}, expect=tsck.ANY)


def make(folder: Path, snapshots: int) -> float:
    """Returns the CPU seconds of a save."""
    begin = time.process_time()
    with tsck.open(folder / "store", create=True, no_sync=True, cache_dir=folder / "cache") as store:
        for number in range(1, snapshots + 1):
            put(store, number, snapshots // 10)
    return (time.process_time() - begin) / snapshots


def forget_and_free(store: tsck.Store) -> None:
    store.forget("runs/1")
    assert store.gc(AT_ONCE).snapshots


def put_several(store: tsck.Store, snapshots: int) -> None:
    for number in range(1, 101):
        put(store, 2 * snapshots + number, snapshots // 10)


OPERATIONS: dict[str, Callable[[tsck.Store, int], object]] = {
    "open, no cache": lambda store, snapshots: None,
    "open": lambda store, snapshots: None,
    "checkout": lambda store, snapshots: store.checkout("runs/0"),
    "log of a branch": lambda store, snapshots: store.log("runs/0"),
    "log of all, 20 rows": lambda store, snapshots: store.log(limit=20),
    "branches": lambda store, snapshots: store.branches(),
    "put": lambda store, snapshots: put(store, 2 * snapshots, snapshots // 10),
    "fsck, no data": lambda store, snapshots: store.fsck(record=False),
    "gc, dry run": lambda store, snapshots: store.gc(AT_ONCE, dry_run=True),
    "gc, first": lambda store, snapshots: forget_and_free(store),
    "100 puts": put_several,
}


def counted(calls: "Counter[str]") -> None:
    """Counts the requests of this process to stores in folders, and the bytes of what they return and write."""

    def count(name: str, size_bytes: Callable[..., int]) -> None:
        method = getattr(LocalBackend, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            calls[name] += 1
            calls[f"{'read' if name in ('get', 'read_into') else 'written'} bytes"] += size_bytes(result, *args)
            return result

        setattr(LocalBackend, name, call)

    count("get", lambda data, *_: len(data))
    count("read_into", lambda _result, _self, _name, _offset, target: len(target))
    for name in ("put", "create"):
        count(name, lambda _result, _self, _name, data: len(data))
    walk = LocalBackend.list

    def listed(self: LocalBackend, prefix: str) -> Any:
        for info in walk(self, prefix):
            calls["listed"] += 1
            yield info

    LocalBackend.list = listed  # type: ignore[method-assign]


def measure(folder: Path, what: str, snapshots: int) -> None:
    """In a process of its own: prints what one operation takes, with `open` before it."""
    import tensorstore_ck.maintenance.fsck  # noqa: PLC0415 - not to be counted
    import tensorstore_ck.state  # noqa: F401, PLC0415

    cache = folder / ("cache" if what != "open, no cache" else "cold")
    shutil.rmtree(folder / "cold", ignore_errors=True)
    calls = Counter[str]()
    counted(calls)
    reset_high_water()
    before, begin = high_water_bytes(), time.process_time()
    with tsck.open(folder / "store", cache_dir=cache, no_sync=True) as store:
        if what != "open":
            store.branches() if what == "open, no cache" else OPERATIONS[what](store, snapshots)
        grown, seconds = high_water_bytes() - before, time.process_time() - begin
    print(json.dumps({"cpu": seconds, "memory": grown, **calls}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, nargs="*", default=SIZES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="leave the stores there")
    parser.add_argument("--only")
    args = parser.parse_args()
    if args.only:
        measure(args.folder, args.only, args.snapshots[0])
        return
    columns = ("snapshots", "operation", "CPU, ms", "memory, MiB", "requests", "read, KiB", "written, KiB", "listed")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for snapshots in args.snapshots:
        folder = args.folder / str(snapshots)
        if not folder.exists():
            print(f"{snapshots} puts: {1000 * make(folder, snapshots):.1f} ms of CPU each", flush=True)
        for what in OPERATIONS:
            command = [sys.executable, "-W", "ignore", "-m", "benches.growth", "--folder", str(folder), "--only", what]
            line = subprocess.run([*command, "--snapshots", str(snapshots)], check=True, stdout=subprocess.PIPE).stdout
            found = Counter(json.loads(line))
            requests = sum(found[name] for name in ("get", "read_into", "put", "create"))
            sizes = " | ".join(f"{found[name] / 1024:,.0f}" for name in ("read bytes", "written bytes"))
            row = f"{1000 * found['cpu']:,.0f} | {found['memory'] / MIB:.1f} | {requests:,} | {sizes} | {found['listed']:,}"
            print(f"| {snapshots:,} | {what} | {row} |", flush=True)
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

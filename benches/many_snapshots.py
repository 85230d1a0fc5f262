"""Opening a store of many snapshots and restoring a small one: `python -m benches.many_snapshots --folder /tmp/bench`.

Two stores, of which one has a tenth of the other's snapshots, are made by real saves. Each measurement is a process of its own;
it imports everything first, so that what is left is what the store costs. Memory is the growth of the kernel's high-water mark.
"""
# ruff: noqa: PLC0415 - imports are timed

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benches._folder import new_folder

MIB = 1 << 20


def make_store(folder: Path, snapshots: int) -> float:
    """Saves tiny states, one after another; returns the seconds that it took."""
    import torch

    import tensorstore_ck as tsck

    begin = time.perf_counter()
    with tsck.open(folder / "store", create=True, no_sync=True, cache_dir=folder / "cache") as store:
        for step in range(1, snapshots + 1):
            state = {"weights": torch.full((2000,), step), "step": step}
            store.put_snapshot(state, ref=f"runs/{step % 10}", step=step, metrics={"loss": 1 / step})
    return time.perf_counter() - begin


def measure(folder: Path, cache: Path) -> None:
    """In a process of its own: prints what `open` and `checkout` take."""
    begin = time.perf_counter()
    import torch  # noqa: F401 - to be timed apart

    torch_done = time.perf_counter()
    import tensorstore_ck as tsck
    import tensorstore_ck.state

    imported = time.perf_counter()
    from benches.memory import high_water_bytes, reset_high_water

    reset_high_water()
    before = high_water_bytes()
    start = time.perf_counter()
    with tsck.open(folder / "store", cache_dir=cache) as store:
        opened = time.perf_counter()
        assert store.checkout("runs/0")["step"] > 0
        done = time.perf_counter()
        grown = high_water_bytes() - before
    seconds = {"import torch": torch_done - begin, "import tensorstore_ck": imported - torch_done}
    seconds |= {"open": opened - start, "checkout": done - opened, "open + checkout": done - start}
    seconds["with imports"] = imported - begin + done - start
    print(json.dumps({**seconds, "memory": grown}))


def measured(folder: Path, cache: Path, *, cold: bool, rounds: int) -> dict[str, float]:
    """Medians over `rounds` processes."""
    lines: list[dict[str, Any]] = []
    for _ in range(rounds):
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, "-m", "benches.many_snapshots", "--folder", str(folder), "--measure", str(cache)]
        lines.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    return {name: statistics.median(line[name] for line in lines) for name in lines[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=Path)
    args = parser.parse_args()
    if args.measure:
        measure(args.folder, args.measure)
        return
    with new_folder(args.folder):
        rows = []
        for snapshots in (args.snapshots // 10, args.snapshots):
            folder = args.folder / str(snapshots)
            seconds = make_store(folder, snapshots)
            print(f"{snapshots} puts without fsync: {1000 * seconds / snapshots:.1f} ms each", flush=True)
            for what, cache in (("warm cache", folder / "cache"), ("no cache", folder / "cold")):
                found = measured(folder, cache, cold=what == "no cache", rounds=args.rounds)
                times = " | ".join(f"{1000 * found[name]:.0f}" for name in ("open", "checkout", "open + checkout", "with imports"))
                rows.append(f"| {snapshots} | {what} | {times} | {found['memory'] / MIB:.1f} |")
        imports = ", ".join(f"{name} {1000 * found[name]:.0f} ms" for name in ("import torch", "import tensorstore_ck"))
        print(f"median of {args.rounds} processes; {imports}; page cache warm")
        print("| snapshots | | open, ms | checkout, ms | both, ms | with imports, ms | memory, MiB |\n|---|---|---|---|---|---|---|")
        print("\n".join(rows))


if __name__ == "__main__":
    main()

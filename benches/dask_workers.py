"""gc and recode over a Dask cluster, beside one process: `python -m benches.dask_workers --folder /tmp/bench`.

A store of many snapshots in a folder: each save has a tensor that a second branch keeps and one that it does not, so the first branch's end
leaves packs of which a half is live. The commands are `tsck gc` and `tsck recode --all`, each on the same store, with two sizes of tensors:
what a pack and what a byte costs follows from both, and so what 100 TB would take. Printed: seconds, CPU seconds and peak memory of the
command; CPU seconds and growth of the memory of the workers, processes of one thread on this machine.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from distributed import LocalCluster

import tensorstore_ck as tsck
from benches._folder import new_folder

MIB = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")
COMMANDS = {
    "gc": ("gc", "--min-age", "0s", "--undo-window", "0s", "--max-delete", "100%", "--compact-below", "90%"),
    "recode": ("recode", "--all"),
}
LARGE_BYTES, LARGE_PACKS = 100e12, 100_000


class Used(NamedTuple):
    """By one command, or by all workers."""

    seconds: float
    cpu: float
    mib: float


def build(folder: Path, snapshots: int, size_bytes: int) -> int:
    """Makes the store; returns the bytes that stay."""
    generator = torch.Generator().manual_seed(0)
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache", state_dir=folder / "state") as store:
        for step in range(snapshots // 2):
            state = {name: torch.randn(size_bytes // 4, generator=generator) for name in ("kept", "dropped")}
            store.put_snapshot(state, ref="both", step=step, codec="raw")
            store.put_snapshot({"kept": state["kept"]}, ref="kept", step=step)
        store.forget("both")
    return snapshots // 2 * size_bytes


def run(folder: Path, command: Sequence[str], workers: Sequence[int]) -> tuple[Used, Used]:
    """What the command used, and the workers."""
    for pid in workers:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins at what they have now
    cpu, memory, began = _cpu(workers), _memory(workers, "VmRSS"), time.perf_counter()
    options = ("--store", folder / "store", "--cache-dir", folder / "cache", "--state-dir", folder / "state")
    process = subprocess.Popen([sys.executable, "-m", "tensorstore_ck.cli", *command, *options], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"tsck {command[0]} failed")
    own = Used(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
    return own, Used(seconds, _cpu(workers) - cpu, (_memory(workers, "VmHWM") - memory) / MIB)


def _cpu(pids: Sequence[int]) -> float:
    found = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in found) / TICKS


def _memory(pids: Sequence[int], name: str) -> int:
    lines = (line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def bench(folder: Path, snapshots: int, size_bytes: int, cluster: Any, workers: Sequence[int]) -> dict[str, float]:
    """Prints rows; returns the seconds of each."""
    live = build(folder, snapshots, size_bytes)
    for name in ("store", "cache", "state"):
        shutil.copytree(folder / name, folder / "before" / name)
    seconds: dict[str, float] = {}
    for name, command in COMMANDS.items():
        for who, there in (("one process", ()), (f"{len(workers)} workers", ("--dask", cluster.scheduler_address))):
            for kept in ("store", "cache", "state"):
                shutil.rmtree(folder / kept)
                shutil.copytree(folder / "before" / kept, folder / kept)
            os.sync()
            own, theirs = run(folder, (*command, *there), workers)
            seconds[f"{name}, {who}"] = own.seconds
            found = f"{own.seconds:.1f} | {live / own.seconds / 1e6:.0f} | {own.cpu:.1f} | {own.mib:.0f} | "
            found += f"{theirs.cpu:.1f} | {theirs.mib:.0f}" if there else " | "
            print(f"| {snapshots}, {live / 1e6:.0f} MB | {name} | {who} | {found} |", flush=True)
    shutil.rmtree(folder)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--snapshots", type=int, default=2000)
    parser.add_argument("--kib", type=int, nargs=2, default=(256, 1024))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    sizes = [kib * 1024 for kib in args.kib]
    print("| snapshots, live bytes | command | by | s | MB/s | CPU s | peak MiB | workers' CPU s | workers' growth, MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    with (
        new_folder(args.folder),
        contextlib.chdir(args.folder),
        LocalCluster(n_workers=args.workers, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster,
    ):
        workers = [worker.process.pid for worker in cluster.workers.values()]
        less, more = (bench(args.folder / str(size), args.snapshots, size, cluster, workers) for size in sizes)
    packs = args.snapshots // 2
    print(f"\nComputed for {LARGE_BYTES / 1e12:.0f} TB live in {LARGE_PACKS} packs, from the difference of both sizes\n")
    print("| command | ms a pack | s a GB | hours |\n|---|---|---|---|")
    for name in less:
        a_byte = (more[name] - less[name]) / (packs * (sizes[1] - sizes[0]))
        a_pack = max(0.0, (less[name] - a_byte * packs * sizes[0]) / packs)
        hours = (a_pack * LARGE_PACKS + a_byte * LARGE_BYTES) / 3600
        print(f"| {name} | {a_pack * 1e3:.2f} | {a_byte * 1e9:.2f} | {hours:.1f} |")


if __name__ == "__main__":
    main()

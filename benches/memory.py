"""Peak memory of a save and of a checkout, beyond the state: `python -m benches.memory --gib 1 --folder /tmp/bench`.

Each is run in a process of its own; the peak is the kernel's high-water mark of resident memory.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import tensorstore_ck as tsck
from benches.local import make_state

MIB = 1 << 20


def high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status")


def reset_high_water() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(what: str, gib: float, folder: Path) -> None:
    state = make_state(64, int(gib * (1 << 30)) // 64) if what in ("put", "checkout into=") else {}
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        tiny = {"warm-up": torch.zeros(10_000)}
        store.put_snapshot(tiny, ref="warm-up", expect=tsck.ANY)
        store.checkout("warm-up")
        reset_high_water()
        before = high_water_bytes()
        if what == "put":
            store.put_snapshot(state, ref="bench", expect=tsck.ANY)
            restored = state
        else:
            restored = store.checkout("bench", into=state or None)
        extra = high_water_bytes() - before
        if what == "checkout":
            extra -= sum(tensor.nbytes for tensor in restored.values())
    print(f"| {what} | {extra / MIB:.0f} MiB |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only")
    args = parser.parse_args()
    if args.only:
        measure(args.only, args.gib, args.folder)
        return
    print("| peak beyond the state | |\n|---|---|", flush=True)
    for what in ("put", "checkout", "checkout into="):
        command = [sys.executable, "-m", "benches.memory", "--gib", str(args.gib), "--folder", str(args.folder), "--only", what]
        subprocess.run(command, check=True)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()

"""Statistics of tensors compared with a checkout, by turns: `python -m benches.statistics --gib 1 --folder /tmp/bench`.

Two snapshots of normal float32 and bfloat16 tensors, half of which change. Peak memory is the kernel's high-water mark of this process
beyond what it had before, for a checkout without the restored state. Packs stay in the page cache.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tensorstore_ck as tsck
from benches._usage import watch_others
from benches.memory import MIB, high_water_bytes, reset_high_water

TENSORS = 16


def make_store(store: tsck.Store, gib: float) -> int:
    """The bytes of one snapshot."""
    generator = torch.Generator().manual_seed(0)
    rows = int(gib * (1 << 30)) // TENSORS // 4 // 4096
    state = {f"layer.{n}.weight": torch.randn(rows, 4096, generator=generator) for n in range(TENSORS)}
    for n in range(0, TENSORS, 4):  # a quarter of the tensors; as many bytes as the others
        state[f"layer.{n}.weight"] = torch.randn(2 * rows, 4096, generator=generator).bfloat16()
    store.put_snapshot(state, ref="bench")
    for n in range(TENSORS // 2):
        state[f"layer.{n}.weight"] *= 1.01
    store.put_snapshot(state, ref="bench")
    return sum(tensor.nbytes for tensor in state.values())


def measure(call: Callable[[], object], kept_bytes: int = 0) -> tuple[float, float]:
    """(seconds, MiB beyond what was there)."""
    reset_high_water()
    before, began = high_water_bytes(), time.perf_counter()
    call()
    return time.perf_counter() - began, (high_water_bytes() - before - kept_bytes) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    try:
        with (
            tsck.open(args.folder / "store", create=True, no_sync=True, cache_dir=args.folder / "cache") as store,
            watch_others() as others,
        ):
            size = make_store(store, args.gib)
            calls: dict[str, tuple[Callable[[], object], float, int]] = {  # what is read, in snapshots; what stays in memory
                "checkout": (lambda: store.checkout("bench"), 1, size),
                "statistics": (lambda: store.statistics("bench"), 1, 0),
                "statistics, 20 bins": (lambda: store.statistics("bench", bins=20), 2, 0),
                "change_statistics, half changed": (lambda: store.change_statistics("bench~1", "bench"), 1, 0),
                "change_statistics, all the same": (lambda: store.change_statistics("bench", "bench"), 0, 0),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            for _ in range(args.rounds):
                for name, (call, _, kept_bytes) in calls.items():
                    found[name].append(measure(call, kept_bytes))
        print("| | seconds | MB/s read | peak MiB |\n|---|---|---|---|")
        for name, (_, reads, _) in calls.items():
            seconds = statistics.median(each for each, _ in found[name])
            print(f"| {name} | {seconds:.2f} | {size * reads / seconds / 1e6:,.0f} | {max(peak for _, peak in found[name]):.0f} |")
        print(others)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()

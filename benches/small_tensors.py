"""The CPU time of saves and restores of many small tensors, beside a clone of each: `python -m benches.small_tensors --folder /dev/shm/b`.

One core, the least of several rounds after the first, so that other work on the machine matters little. The same tensors are saved again
and again with other values. A state of one tensor shows what any save costs; `call`: the call of `put_snapshot_async` alone.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tensorstore_ck as tsck
from benches._folder import new_folder

STATES = ((1, 8, 60), (1_000, 8, 60), (1_000, 4_096, 60), (20_000, 1_024, 8))
"""Tensors, bytes of each, rounds."""


def cpu_ms(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """The CPU time of `work`; `clock`: of the process, or of this thread alone."""
    began = clock()
    work()
    return (clock() - began) * 1e3


def bench(count: int, size_bytes: int, rounds: int, folder: Path) -> None:
    """Prints a row of the table."""
    state = {f"layers.{number}.weight": torch.randn(size_bytes // 4) for number in range(count)}
    least: dict[str, float] = {}
    pending: list[tsck.PendingSnapshot] = []
    with tsck.open(folder / f"{count}-{size_bytes}", create=True, cache_dir=folder / "cache") as store:

        def measure(name: str, work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> None:
            least[name] = min(least.get(name, float("inf")), cpu_ms(work, clock))

        for number in range(rounds):
            if number == 1:
                least.clear()  # the first save loads modules and makes the plan
            torch._foreach_add_([*state.values()], 1e-3)
            measure("clone", lambda: [tensor.clone() for tensor in state.values()])
            measure("put", lambda: store.put_snapshot(state, ref="bench"))
            torch._foreach_add_([*state.values()], 1e-3)
            measure("call", lambda: pending.append(store.put_snapshot_async(state, ref="bench")), time.thread_time)
            pending.pop().wait()
            measure("checkout", lambda: store.checkout("bench"))
    clone = least.pop("clone")
    print(f"| {count} of {size_bytes} bytes | {clone:.2f} |", " | ".join(f"{ms:.1f} ({ms / clone:.1f})" for ms in least.values()), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print("CPU ms (/ clone)\n| tensors | clone | put | call | checkout |\n|---|---|---|---|---|")
    with new_folder(args.folder):
        for count, size_bytes, rounds in STATES:
            bench(count, size_bytes, rounds, args.folder)


if __name__ == "__main__":
    main()

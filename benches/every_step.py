"""A save at every step, as FastPersist does: `python -m benches.every_step --folder /tmp/bench`.

Steps are real work on one core, as in the bench `loop`, and change all of the state. Steps alone, steps with a warm copy of the state after
each, and steps with a save in the background after each take turns, in an order that changes. For each size of the state: the cost of copy
and save, the bytes per second that became durable, and how long after the last step the last save was durable: a fraction of a step if
saves keep up. If they do not, the call of a save waits for memory, which the cost includes. The last line says where it ends.

`--quick` tries it on two small states, in half a minute.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tensorstore_ck as tsck
from benches._training import Trainer, timed
from benches._usage import watch_others
from benches._warmcopy import State, WarmCopy
from benches.local import make_state
from tensorstore_ck.common.threads import cpu_threads

MIB = 1 << 20
COPIES = 3
"""Of the state, for which the captures have memory: one that is written, one that waits, one that is copied."""
KEEPS_UP = 0.05
"""The cost up to which saves keep up."""


class Turn(NamedTuple):
    """One turn of steps, each with a save."""

    seconds: float
    """Of the steps."""
    behind_seconds: float
    """From the end of the last step until its save was durable."""


class Result(NamedTuple):
    """One size."""

    size_bytes: int
    step_seconds: float
    copy_cost: float
    save_cost: float
    """Shares of the time of a step; medians over the rounds."""
    bytes_per_second: float
    behind_seconds: float

    @property
    def keeps_up(self) -> bool:
        return self.save_cost <= KEEPS_UP and self.behind_seconds <= 2 * self.step_seconds


def run_copying(trainer: Trainer, copy: WarmCopy, steps: int) -> float:
    def run() -> None:
        for _ in range(steps):
            trainer.run(1)
            copy.by_memmove()

    return timed(run)


def run_saving(trainer: Trainer, state: State, folder: Path, steps: int) -> Turn:
    """In a store of its own; the first save, which allocates its memory, does not count."""
    shutil.rmtree(folder, ignore_errors=True)
    size_bytes = sum(tensor.nbytes for tensor in state.values())
    options = {"create": True, "cache_dir": folder / "cache", "host_memory_bytes": COPIES * size_bytes + (64 << 20)}
    with tsck.open(folder / "store", **options) as store:  # type: ignore[call-overload]
        for step in range(COPIES):
            store.put_snapshot_async(state, ref="bench", step=step, unchanged="ok")
        store.drain()
        began = time.perf_counter()
        for step in range(steps):
            trainer.run(1)
            pending = store.put_snapshot_async(state, ref="bench", step=COPIES + step)
        ended = time.perf_counter()
        pending.wait()
        turn = Turn(ended - began, time.perf_counter() - ended)
    shutil.rmtree(folder)
    return turn


def measure(folder: Path, size_bytes: int, step_seconds: float, steps: int, *, rounds: int) -> Result:
    state = make_state(64, size_bytes // 64)
    trainer, copy = Trainer(state, step_seconds), WarmCopy(state, cpu_threads())
    plain: list[float] = []
    copying: list[float] = []
    saving: list[Turn] = []
    turns: list[Callable[[], object]] = [
        lambda: plain.append(timed(lambda: trainer.run(steps))),
        lambda: copying.append(run_copying(trainer, copy, steps)),
        lambda: saving.append(run_saving(trainer, state, folder, steps)),
    ]
    for number in range(rounds):
        for turn in turns if number % 2 == 0 else reversed(turns):
            turn()
    return Result(
        size_bytes,
        statistics.median(plain) / steps,
        copy_cost=statistics.median(copied / alone - 1 for copied, alone in zip(copying, plain, strict=True)),
        save_cost=statistics.median(saved.seconds / alone - 1 for saved, alone in zip(saving, plain, strict=True)),
        bytes_per_second=statistics.median(steps * size_bytes / (saved.seconds + saved.behind_seconds) for saved in saving),
        behind_seconds=statistics.median(saved.behind_seconds for saved in saving),
    )


def print_row(result: Result) -> None:
    cells = [
        f"{result.size_bytes / MIB:.0f} MiB",
        f"{result.step_seconds * 1e3:.0f} ms",
        f"{result.copy_cost:+.1%}",
        f"{result.save_cost:+.1%}",
    ]
    cells += [f"{result.bytes_per_second / 1e6:.0f} MB/s", f"{result.behind_seconds * 1e3:.0f} ms"]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mib", type=int, nargs="*", default=[16, 64, 128, 256, 512])
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.steps, args.rounds = [16, 64], 10, 2
    print(f"{args.steps} steps a turn, {args.rounds} rounds, 64 fp32 tensors, Python {sys.version.split()[0]}\n")
    print(
        "| state | a step alone | + a warm copy | + a save | durable | last save after the last step |\n|---|---|---|---|---|---|",
        flush=True,
    )
    results = []
    with watch_others() as others:
        for mib in args.mib:
            results.append(measure(args.folder / "every_step", mib * MIB, args.step_seconds, args.steps, rounds=args.rounds))
            print_row(results[-1])
    kept = [result for result in results if result.keeps_up]
    largest = f"{max(result.size_bytes for result in kept) / MIB:.0f} MiB" if kept else "none of these sizes"
    fastest = max(result.bytes_per_second for result in results)
    print(f"\nup to {KEEPS_UP:.0%} and two steps behind: {largest}; at most {fastest / 1e6:.0f} MB/s became durable; {others}")


if __name__ == "__main__":
    main()

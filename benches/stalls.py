"""How long `put_snapshot_async` blocks training, against one warm copy of the state: `python -m benches.stalls --folder /tmp/bench`.

Both copy into memory that was used before, with as many threads; they take turns in an order that changes from round to round, with
nothing else in progress: each save is published before the next turn begins. The first save, which allocates memory and stores all data,
does not count. Ratios are medians of pairs from one round, against the faster of two plain copies. `--quick` tries it on 0.25 GiB.
"""

import argparse
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import tensorstore_ck as tsck
from benches._usage import watch_others
from benches._warmcopy import State, WarmCopy
from benches.local import make_state
from tensorstore_ck.common.threads import cpu_threads

MEMMOVE = "warm copy, memmove"
FOREACH = "warm copy, torch._foreach_copy_"
PUT = "put_snapshot_async"
FROZEN = "put_snapshot_async, all frozen"
MUST = {PUT: 1.2, FROZEN: 0.05}

Seconds = dict[str, list[float]]


class Stalls:
    """Turns over one state and one open store."""

    def __init__(self, state: State, store: tsck.Store) -> None:
        self._state = state
        self._store = store
        copy = WarmCopy(state, cpu_threads())
        self.turns: dict[str, Callable[[], float]] = {
            MEMMOVE: lambda: _timed(copy.by_memmove),
            FOREACH: lambda: _timed(copy.by_torch),
            PUT: self._put,
            FROZEN: lambda: self._put(["*"]),
        }
        self.copying: list[float] = []
        """The share of it that a save's copying took; the rest is taking the state apart and freeing memory."""

    def run(self, rounds: int) -> Seconds:
        seconds: Seconds = {}
        for number in range(rounds + 1):
            names = list(self.turns)
            random.Random(number).shuffle(names)
            for name in names:
                taken = self.turns[name]()
                if number:
                    seconds.setdefault(name, []).append(taken)
        return seconds

    def _put(self, frozen: Sequence[str] = ()) -> float:
        began = time.perf_counter()
        pending = self._store.put_snapshot_async(self._state, ref="bench", frozen=frozen)
        taken = time.perf_counter() - began
        pending.wait()
        if not frozen:
            self.copying.append(pending.progress().stage_seconds["capture"] / taken)
        return taken


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bench(tensors: int, gib: float, folder: Path, rounds: int) -> None:
    state = make_state(tensors, int(gib * (1 << 30)) // tensors // 64 * 64)
    shutil.rmtree(folder, ignore_errors=True)
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        stalls = Stalls(state, store)
        with watch_others() as others:
            seconds = stalls.run(rounds)
    shutil.rmtree(folder)
    floor = min((MEMMOVE, FOREACH), key=lambda name: statistics.median(seconds[name]))
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"\n{tensors} fp32 tensors, {size / 2**30:.2f} GiB, {cpu_threads()} threads, median (least-most) of {rounds} rounds; {others}")
    print(f"| what | ms | GB/s | / {floor} | must be |\n|---|---|---|---|---|")
    for name in stalls.turns:
        taken = seconds[name]
        middle = statistics.median(taken)
        ratio = statistics.median(ours / theirs for ours, theirs in zip(taken, seconds[floor], strict=True))
        must = f"<= {MUST[name]:g}" if name in MUST else ""
        spread = f"{middle * 1e3:.1f} ({min(taken) * 1e3:.1f}-{max(taken) * 1e3:.1f})"
        print(f"| {name} | {spread} | {size / middle / 1e9:.1f} | {ratio:.3f} | {must} |", flush=True)
    print(f"of the put's stall, {statistics.median(stalls.copying):.0%} is copying")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, nargs="*", default=[1, 2, 4], help="sizes of the states of 64 tensors")
    parser.add_argument("--small", type=int, nargs="*", default=[20_000], help="numbers of tensors that hold 1 GiB together")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # for `_foreach_copy_`: its threads are ours
    if args.quick:
        args.gib, args.small, args.rounds = [0.25], [1000], 3
    args.folder.mkdir(parents=True, exist_ok=True)
    for gib in args.gib:
        bench(64, gib, args.folder / "stalls", args.rounds)
    for tensors in args.small:
        bench(tensors, 0.25 if args.quick else 1, args.folder / "stalls", args.rounds)


if __name__ == "__main__":
    main()

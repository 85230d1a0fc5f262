"""What a job pays to free what its own policy dropped, against a run of gc: `python -m benches.dropped --folder /tmp/bench`.

A store of many branches, in which one job saves with `keep_last=2`. After every four saves it frees what these dropped, in turns by
`free_dropped` and by gc. Both free the same snapshots; seconds are medians, and the calls are those of the backend.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches._folder import new_folder
from tensorstore_ck.backend.local import LocalBackend
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.gc.stores import AT_ONCE, open_store, state

JOB = "runs/job"
SAVES = 4
KEPT = 5
"""Snapshots of each other branch."""


class Counted(Faults):
    """Counts calls by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        self.kinds[what.partition(" ")[0]] += 1
        return super().call(what, effect, tear, create=create)


def bench(folder: Path, branches: int, rounds: int) -> None:
    faults = Counted()
    store = open_store(FaultyBackend(LocalBackend(str(folder / "store")), faults, atomic_put=True))
    store.set_policy(JOB, keep_last=2)
    step = 0
    for branch in range(branches):
        for _ in range(KEPT):
            step += 1
            store.put_snapshot(state(step), ref=f"others/{branch}", step=step)
    ways: dict[str, Callable[[], object]] = {"free_dropped": lambda: store.free_dropped(JOB), "gc": lambda: store.gc(AT_ONCE)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    calls: dict[str, Counter[str]] = {}
    for turn in range(rounds + 1):
        for way, free in ways.items():
            for _ in range(SAVES):
                step += 1
                store.put_snapshot(state(step), ref=JOB, step=step)
            faults.kinds.clear()
            began = time.perf_counter()
            free()
            if turn:  # the first reads the parts of all branches
                seconds[way].append(time.perf_counter() - began)
            calls[way] = Counter(faults.kinds)
    print(f"{branches * KEPT} snapshots of {branches} other branches; per object listed, gc also gets its size and age\n")
    print("| | seconds | backend calls | of these, lists |\n|---|---|---|---|")
    for way in ways:
        print(f"| {way} | {statistics.median(seconds[way]):.3f} | {calls[way].total()} | {calls[way]['list']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--branches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with new_folder(args.folder):
        bench(args.folder, args.branches, args.rounds)


if __name__ == "__main__":
    main()

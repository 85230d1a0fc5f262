"""What the default codec costs compared with `raw` and `fast`: `python -m benches.auto --folder DIR --memory /dev/shm/DIR`.

A gibibyte of fp32 on a disk and in memory, with DCP in the same rounds, and less of it on stores that take and give so many bytes a
second: files in memory behind a limit, which count as an object store. Ways to save take turns, round by round, in an order that changes.
Each round has a new store and a new handle: the first save, a later save of other numbers, and restores of both into the same tensors:
cold, with nothing of the store in the page cache, then warm. Nothing is dirty when a measurement begins.
"""

import argparse
import os
import random
import shutil
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

import tensorstore_ck as tsck
from benches._peers import State, load_dcp, save_dcp
from benches.local import make_state, ratio, timed
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.store_backend import StoreBackend
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.format.codec import CodecName

CODECS: tuple[CodecName, ...] = ("raw", "auto", "fast")
RATES = (500e6, 200e6, 100e6, 50e6)
THROTTLED_SECONDS = 0.5
"""How long a save of unencoded blocks takes on a throttled store."""
PUT_MUST, RESTORE_MUST = 0.95, 0.9

Seconds = dict[str, dict[str, list[float]]]
"""What was done -> who did it -> how long each round took."""


class Throttled(StoreBackend):
    """An object store limited to `rate` bytes a second in each direction."""

    def __init__(self, inner: Backend, rate: float) -> None:
        super().__init__(inner)
        self.is_local = False
        self._rate = rate

    def begin(self) -> None:
        """From now on nothing passes at once that was not used before."""
        self._writes, self._reads = RateLimit(self._rate), RateLimit(self._rate)


class Place(NamedTuple):
    """Where a bench saves to."""

    folder: Path
    size_bytes: int
    rate: float = 0.0
    """Bytes a second; 0: as fast as the storage can."""
    has_cold: bool = False
    """Whether its page cache can be emptied."""


class Turn:
    """One turn of one way to save."""

    def __init__(self, seconds: Seconds, who: str, states: tuple[State, State], target: State, place: Place) -> None:
        self._seconds = seconds
        self._who = who
        self._states = states
        self._target = target
        self._folder = place.folder
        self._has_cold = place.has_cold
        self.begin: Callable[[], None] = lambda: None
        """Called when a measurement begins."""

    def measure(self, put: Callable[[State, int], object], restore: Callable[[int], object]) -> None:
        for number, (what, state) in enumerate(zip(("first put", "later put"), self._states, strict=True)):
            self._time(what, lambda number=number, state=state: put(state, number))  # type: ignore[misc]
        for number, (what, state) in enumerate(zip(("first", "later"), self._states, strict=True)):
            if self._has_cold:
                os.sync()
                drop_from_cache(self._folder)
                self._time(f"{what}, cold", lambda number=number: restore(number))  # type: ignore[misc]
            self._time(f"{what}, warm" if self._has_cold else what, lambda number=number: restore(number))  # type: ignore[misc]
            if any(not torch.equal(state[name], tensor) for name, tensor in self._target.items()):
                raise SystemExit(f"{self._who}: a restore returned other bytes")

    def _time(self, what: str, work: Callable[[], object]) -> None:
        def begun() -> object:
            self.begin()
            return work()

        self._seconds.setdefault(what, {}).setdefault(self._who, []).append(timed(begun))


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def take_turn(seconds: Seconds, who: str, states: tuple[State, State], target: State, place: Place) -> float:
    """One turn; returns what both saves stored, as a share of their size."""
    folder = place.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    turn = Turn(seconds, who, states, target, place)
    if who == "DCP":
        folders = [folder / "0", folder / "1"]
        turn.measure(lambda state, number: save_dcp(folders[number], state), lambda number: load_dcp(folders[number], target))
        return 1.0
    with ExitStack() as stack:
        store = stack.enter_context(tsck.open(folder / "store", create=True, cache_dir=folder / "cache", codec=who))  # type: ignore[call-overload]
        if place.rate:
            throttled = Throttled(store.engine.backend, place.rate)
            store.engine.backend, turn.begin = throttled, throttled.begin
        puts: list[tsck.Snapshot] = []
        turn.measure(
            lambda state, number: puts.append(store.put_snapshot(state, ref="b", step=number)),
            lambda number: store.checkout(f"b@{number}", into=target),
        )
        return sum(put.new_bytes for put in puts) / sum(put.logical_bytes for put in puts)


def bench(place: Place, rounds: int) -> None:
    """Prints a table of one kind of storage."""
    ways = [*CODECS] if place.rate else ["DCP", *CODECS]
    states = make_state(64, place.size_bytes // 64), {name: -tensor for name, tensor in make_state(64, place.size_bytes // 64).items()}
    target = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    size_bytes = sum(tensor.nbytes for tensor in target.values())
    seconds: Seconds = {}
    shares: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        if number <= 1:
            seconds = {}  # the first round warms up
        for who in random.Random(number).sample(ways, len(ways)):
            shares.setdefault(who, []).append(take_turn(seconds, who, states, target, place))
    shutil.rmtree(place.folder, ignore_errors=True)
    where = f"a store of {place.rate / 1e6:.0f} MB/s" if place.rate else str(place.folder)
    print(f"\n{where}, {size_bytes / 2**20:.0f} MiB of fp32: GB/s, median (best) of {rounds}\n")
    print(f"| | {' | '.join(seconds)} | stored / raw |\n|---|{'---|' * (len(seconds) + 1)}")
    for who in ways:
        speeds = [size_bytes / 1e9 / each for taken in seconds.values() for each in (statistics.median(taken[who]), min(taken[who]))]
        cells = [f"{middle:.3g} ({best:.3g})" for middle, best in zip(speeds[::2], speeds[1::2], strict=True)]
        print(f"| {who} | {' | '.join(cells)} | {statistics.mean(shares[who]):.3f} |")
    cells = []
    for what, taken in seconds.items():
        reached, must = ratio(taken, "auto", "raw"), PUT_MUST if what.endswith("put") else RESTORE_MUST
        cells.append(f"{reached:.2f}" if reached >= must else f"**{reached:.2f}, missed**")
    print(f"| auto / raw, median of pairs | {' | '.join(cells)} | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on a disk")
    parser.add_argument("--memory", type=Path, required=True, help="on a file system in memory")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=["disk", "memory", "throttled"], choices=["disk", "memory", "throttled"])
    args = parser.parse_args()
    print(f"others used the machine at a load of {os.getloadavg()[0]:.1f} at the start; {len(os.sched_getaffinity(0))} cores")
    if "disk" in args.only:
        bench(Place(args.folder / "auto", int(args.gib * 2**30), has_cold=True), args.rounds)
    if "memory" in args.only:
        bench(Place(args.memory / "auto", int(args.gib * 2**30)), args.rounds)
    for rate in RATES if "throttled" in args.only else ():
        bench(Place(args.memory / "auto", int(rate * THROTTLED_SECONDS), rate), args.rounds)


if __name__ == "__main__":
    main()

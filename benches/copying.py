"""`tsck copy` compared with a plain copy of the files: `python -m benches.copying --gib 2 --folder /tmp/bench`.

The first copy carries all blocks, the second finds nothing to do, the third carries one more snapshot of which a fifth is new. The plain
copy is one `cp -r` and a sync of the same store, and verifies nothing.
"""

import argparse
import os
import shutil
import statistics
import subprocess
from functools import partial
from pathlib import Path

import torch

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches._peers import State
from benches.local import make_state, timed

TENSORS = 64
CHANGED = 0.2


def copied(source: tsck.Store, folder: Path) -> float:
    """Seconds of a copy into a store that is open, as fast as its data is durable."""
    with tsck.open(folder / "target", create=True, cache_dir=folder / "cache") as target:
        return timed(partial(tsck.copy, source, target))


def copied_plainly(folder: Path) -> float:
    def work() -> None:
        subprocess.run(["cp", "-r", folder / "source", folder / "plain"], check=True)
        subprocess.run(["sync", "--file-system", folder / "plain"], check=True)

    seconds = timed(work)
    shutil.rmtree(folder / "plain")
    return seconds


def change(state: State, generator: torch.Generator) -> None:
    for name in sorted(state)[: round(CHANGED * TENSORS)]:
        state[name] = torch.randn(state[name].shape, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"cp -r + sync": [], "tsck copy": [], "tsck copy, nothing new": [], "tsck copy, a fifth new": []}
    with new_folder(args.folder):
        print(f"load average {os.getloadavg()[0]:.1f} at the start")
        generator, state = torch.Generator().manual_seed(1), make_state(TENSORS, int(args.gib * 2**30) // TENSORS)
        for round_number in range(args.rounds + 1):
            with tsck.open(args.folder / "source", create=True, cache_dir=args.folder / "source-cache") as source:
                source.put_snapshot(state, ref="bench", step=0)
                taken = [copied_plainly(args.folder), copied(source, args.folder), copied(source, args.folder)]
                change(state, generator)
                source.put_snapshot(state, ref="bench", step=1)
                taken.append(copied(source, args.folder))
            if round_number:
                for name, value in zip(seconds, taken, strict=True):
                    seconds[name].append(value)
            for name in ("source", "source-cache", "target", "cache"):
                shutil.rmtree(args.folder / name)
    plain = seconds["cp -r + sync"]
    print(f"{args.gib} GiB, {args.folder}, median (least-most) of {args.rounds} rounds")
    print("| | seconds | GB/s | speed beside cp, median of pairs |\n|---|---|---|---|")
    for (name, taken), size in zip(seconds.items(), (1, 1, 0, CHANGED), strict=True):
        middle = statistics.median(taken)
        speed = f"{size * args.gib * 2**30 / middle / 1e9:.2f}" if size else ""
        beside = f"{statistics.median(b / a for a, b in zip(taken, plain, strict=True)):.2f}" if size == 1 else ""
        print(f"| {name} | {middle:.3f} ({min(taken):.3f}-{max(taken):.3f}) | {speed} | {beside} |")


if __name__ == "__main__":
    main()

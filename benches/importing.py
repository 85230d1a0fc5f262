"""`tsck import` compared with a plain copy of the files: `python -m benches.importing --gib 1 --folder /tmp/bench`.

The same tensors as a torch file, a safetensors file and a DCP folder of one rank. The plain copy is `cp -r` and a sync of the same
bytes, and checks nothing. Both read from the page cache; each import goes to a new store. Memory is what the importing process has
beyond its state before, sampled: anonymous pages, since files are mapped.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches._peers import save_dcp, save_safetensors, save_torch
from benches.local import make_state, timed
from tensorstore_ck.integrations.importing import import_checkpoint

TENSORS = 64
KINDS = {"torch.save": (save_torch, "state.pt"), "safetensors": (save_safetensors, "state.safetensors"), "DCP": (save_dcp, "dcp")}


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no RssAnon in /proc/self/status")


def most_anonymous(work: Callable[[], object]) -> int:
    """The most anonymous memory while `work` runs, beyond that before."""
    before, found, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            found.append(anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(found)


def copied_plainly(source: Path, folder: Path) -> float:
    def work() -> None:
        subprocess.run(["cp", "-r", source, folder / "plain"], check=True)
        subprocess.run(["sync", "--file-system", folder / "plain"], check=True)

    seconds = timed(work)
    subprocess.run(["rm", "-r", folder / "plain"], check=True)
    return seconds


def imported(source: Path, folder: Path, *, memory: bool = False) -> float:
    """Seconds, or bytes of memory."""
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        work = lambda: import_checkpoint(store, source, ref="bench")  # noqa: E731
        taken = most_anonymous(work) if memory else timed(work)
    for name in ("store", "cache"):
        shutil.rmtree(folder / name)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with new_folder(args.folder):
        print(f"load average {os.getloadavg()[0]:.1f} at the start")
        state = make_state(TENSORS, int(args.gib * 2**30) // TENSORS)
        for save, _ in KINDS.values():
            save(args.folder, state)
        del state
        print(f"{args.gib} GiB, {args.folder}, median (least-most) of {args.rounds} rounds")
        print("| | cp + sync, s | import, s | GB/s | speed beside cp, median of pairs | memory, MiB |\n|---|---|---|---|---|---|")
        for name, (_, file) in KINDS.items():
            source, plain, ours = args.folder / file, [], []
            for round_number in range(args.rounds + 1):
                pair = copied_plainly(source, args.folder), imported(source, args.folder)
                if round_number:
                    plain.append(pair[0])
                    ours.append(pair[1])
            memory = imported(source, args.folder, memory=True) / 2**20
            texts = [f"{statistics.median(taken):.3f} ({min(taken):.3f}-{max(taken):.3f})" for taken in (plain, ours)]
            beside = statistics.median(b / a for a, b in zip(ours, plain, strict=True))
            speed = args.gib * 2**30 / statistics.median(ours) / 1e9
            print(f"| {name} | {texts[0]} | {texts[1]} | {speed:.2f} | {beside:.2f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()

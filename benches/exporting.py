"""`tsck export` compared with a plain copy of as many bytes: `python -m benches.exporting --gib 1 --folder /tmp/bench`.

The plain copy is one `cp` of a file and an fsync, and verifies nothing. An export verifies every block, reads its files back and compares
them, and has fsynced them when it returns. Sources lie in the page cache. Peak memory is anonymous, sampled, of a process of its own.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches._peers import fsync_path
from benches.local import make_state, timed
from tensorstore_ck.integrations.exporting import Format, export_snapshot

TENSORS = 64
FORMATS: tuple[Format, ...] = ("torch", "safetensors", "dcp")
"""Those that hold any state."""
MIB = 1 << 20


def copied_plainly(folder: Path) -> float:
    def work() -> None:
        subprocess.run(["cp", folder / "plain", folder / "copy"], check=True)
        fsync_path(folder / "copy")

    seconds = timed(work)
    (folder / "copy").unlink()
    return seconds


def exported(store: tsck.Store, format_: Format, folder: Path) -> float:
    seconds = timed(lambda: export_snapshot(store, "bench", folder / "exported", format=format_))
    shutil.rmtree(folder / "exported")
    return seconds


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no RssAnon in /proc/self/status")


def measure_peak(format_: Format, folder: Path) -> None:
    """Prints how much anonymous memory an export takes beyond what the process had after a small one."""
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    with tsck.open(folder / "source", cache_dir=folder / "cache") as store:
        export_snapshot(store, "small", folder / "small", format=format_)
        before = anonymous_bytes()
        sampler = threading.Thread(target=sample)
        sampler.start()
        export_snapshot(store, "bench", folder / "exported", format=format_)
        done.set()
        sampler.join()
    shutil.rmtree(folder / "small")
    shutil.rmtree(folder / "exported")
    print(max(peak - before, 0) // MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=FORMATS)
    args = parser.parse_args()
    if args.peak:
        measure_peak(args.peak, args.folder)
        return
    names = ["cp + fsync", *(f"tsck export --to {each}" for each in FORMATS)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with new_folder(args.folder):
        print(f"load average {os.getloadavg()[0]:.1f} at the start")
        state = make_state(TENSORS, int(args.gib * 2**30) // TENSORS)
        with (args.folder / "plain").open("wb") as file:
            for tensor in state.values():
                file.write(tensor.numpy().tobytes())
        with tsck.open(args.folder / "source", create=True, cache_dir=args.folder / "cache") as store:
            store.put_snapshot(state, ref="bench")
            store.put_snapshot({"weight": state["layer.0.weight"][:1000]}, ref="small")
            del state
            for round_number in range(args.rounds + 1):
                taken = [copied_plainly(args.folder), *(exported(store, each, args.folder) for each in FORMATS)]
                if round_number:
                    for name, value in zip(names, taken, strict=True):
                        seconds[name].append(value)
        peaks = ["", *(_peak_of(each, args.folder) for each in FORMATS)]
    plain = seconds["cp + fsync"]
    print(f"{args.gib} GiB, {args.folder}, median (least-most) of {args.rounds} rounds")
    print("| | seconds | GB/s | speed beside cp, median of pairs | peak memory, MiB |\n|---|---|---|---|---|")
    for (name, taken), peak in zip(seconds.items(), peaks, strict=True):
        middle = statistics.median(taken)
        beside = statistics.median(b / a for a, b in zip(taken, plain, strict=True))
        rate = args.gib * 2**30 / middle / 1e9
        print(f"| {name} | {middle:.3f} ({min(taken):.3f}-{max(taken):.3f}) | {rate:.2f} | {beside:.2f} | {peak} |")


def _peak_of(format_: Format, folder: Path) -> str:
    arguments = [sys.executable, "-m", "benches.exporting", "--folder", str(folder), "--peak", format_]
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()

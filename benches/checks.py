"""What the checks of a save cost: `python -m benches.checks --folder /dev/shm/bench`.

Later saves of a gibibyte of fp32 in 64 tensors, of which all change, with the checks of the default and with none; turn by turn, in an
order that changes. The median of the ratios round by round.
"""

import argparse
import random
import shutil
import statistics
import time
from pathlib import Path

import torch

import tensorstore_ck as tsck

NONE = {"unchanged": "ok", "verify_capture": 0.0}
WAYS: dict[str, dict[str, object]] = {"default": {}, "no checks": NONE}


def save(folder: Path, state: dict[str, torch.Tensor], options: dict[str, object], *, in_background: bool) -> float:
    """Seconds of a second save of a new store."""
    shutil.rmtree(folder, ignore_errors=True)
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        store.put_snapshot(state, ref="b", step=1)
        for tensor in state.values():
            tensor.add_(1)
        begin = time.perf_counter()
        if in_background:
            store.put_snapshot_async(state, ref="b", step=2, **options).wait()  # type: ignore[arg-type]
        else:
            store.put_snapshot(state, ref="b", step=2, **options)  # type: ignore[arg-type]
        return time.perf_counter() - begin


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    elements = int(options.gib * 2**30) // 4 // 64
    state = {f"w{number}": torch.randn(elements) for number in range(64)}
    for in_background in (False, True):
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(list(WAYS), len(WAYS)):
                taken = save(options.folder / "checks", state, WAYS[name], in_background=in_background)
                if number:  # the first round warms up
                    seconds[name].append(taken)
        ratio = statistics.median(own / base for own, base in zip(seconds["default"], seconds["no checks"], strict=True))
        medians = ", ".join(f"{name} {statistics.median(each):.3f} s" for name, each in seconds.items())
        print(f"{'put_snapshot_async' if in_background else 'put_snapshot'}: {medians}, ratio {ratio:.3f}")
    shutil.rmtree(options.folder / "checks", ignore_errors=True)


if __name__ == "__main__":
    main()

"""What two workers of an engine hold, and a load takes: `python -m benches.held_weights --gib 1 --folder /dev/shm/bench`.

"once together" is `examples/held_weights.py` over gloo; "each all" is the same without a group of workers. By turns. The engine is a
stand-in: each worker copies its half of each tensor's rows, as tensor-parallel engines do. Seconds of the slower worker, medians.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches.feed import LAYERS, REF, train
from examples.held_weights import HeldWeights
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool

COUNT = 2
HELD: dict[str, HeldWeights] = {}
MODEL: dict[str, torch.Tensor] = {}
"""In a worker's process."""


def follow(url: str, way: str) -> int:
    """Begins; returns the bytes that this worker holds."""
    group = GROUPS[COUNT]
    workers = SimpleNamespace(world_size=COUNT, cpu_group=group, device_group=group, device=torch.device("cpu"))
    cache = f"{url}-cache-{way}-{dist.get_rank()}"
    shared = workers if way == "once together" else None
    HELD[way] = HeldWeights(url, REF, workers=shared, timeout_seconds=TIMEOUT_SECONDS, cache_dir=cache)
    return sum(tensor.nbytes for tensor in HELD[way].tensors.values())


def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """This worker's half."""
    for name, tensor in weights:
        half = tensor.chunk(COUNT)[dist.get_rank()]
        MODEL.setdefault(name, torch.empty_like(half)).copy_(half)


def update(way: str, root: str) -> tuple[float, float]:
    """Seconds to stage a version, and to load it."""
    started = time.perf_counter()
    HELD[way].stage(root)
    staged = time.perf_counter()
    HELD[way].load(load_weights)
    return staged - started, time.perf_counter() - staged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    ways = ("each all", "once together")
    seconds: dict[str, list[Any]] = {way: [] for way in ways}
    url = options.folder / "store"
    with new_folder(options.folder), tsck.open(url, create=True, delta={REF: True}) as store, Pool(COUNT) as pool:
        rows = int(options.gib * 2**30 / LAYERS / 2 / 4096)
        weights = {f"layers.{number}": torch.randn(rows, 4096).bfloat16() for number in range(LAYERS)}
        for version in range(options.rounds + 1):
            root = store.put_snapshot(weights, ref=REF, step=version).root
            for way in ways:
                if version == 0:
                    print(f"{way}: {[held >> 20 for held in pool.run(follow, str(url), way, ranks=COUNT)]} MiB held")
                taken = pool.run(update, way, root, ranks=COUNT)
                seconds[way] += [[max(each) for each in zip(*taken, strict=True)]] if version else []
            train(weights, version + 1)
    for way in ways:
        stage, load = (statistics.median(each) for each in zip(*seconds[way], strict=True))
        print(f"{way}: stage {stage:.2f} s, load {load:.2f} s")


if __name__ == "__main__":
    main()

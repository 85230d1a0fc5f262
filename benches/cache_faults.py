"""What a broken host's cache costs: `python -m benches.cache_faults --folder /tmp/bench`.

Opens a store and saves 60 small states, while the cache breaks; compared with a cache in memory from the start. All turn by
turn; medians of the ratios round by round. Needs the right to mount a tmpfs for the disk's troubles.
"""

import argparse
import shutil
import statistics
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

import tensorstore_ck as tsck
from tensorstore_ck.engine import opening
from tensorstore_ck.log.cache import CacheWarning, MemoryTable
from tests.end_to_end.crash.test_cache_troubles import TROUBLES, mounted

SAVES = 60
IN_MEMORY = "in memory from the start"


def job(folder: Path, trouble: str) -> tuple[float, float]:
    """Seconds of an open with the trouble there already, and of all saves."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cache, disk = folder / "cache", None
    with ExitStack() as stack:
        if trouble == IN_MEMORY:
            stack.enter_context(mock.patch.object(opening, "open_table", side_effect=lambda *_, **__: MemoryTable()))
        if trouble in ("full", "read-only"):
            disk = stack.enter_context(mounted(cache, 1 << 20))
        with tsck.open(folder / "store", create=True, cache_dir=cache) as store:
            store.put_snapshot({"step": 0}, ref="job", step=0)
        if disk is not None:
            disk(trouble)
        if trouble in TROUBLES:
            stack.enter_context(TROUBLES[trouble](cache))
        begin = time.perf_counter()
        store = stack.enter_context(tsck.open(folder / "store", cache_dir=cache))
        store.checkout("job")
        opened = time.perf_counter() - begin
        begin = time.perf_counter()
        for step in range(1, SAVES + 1):
            store.put_snapshot({"weights": torch.full((300,), float(step)), "step": step}, ref="job", step=step)
        return opened, time.perf_counter() - begin


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore", CacheWarning)
    names = [IN_MEMORY, *TROUBLES, "full", "read-only"]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    job(options.folder, IN_MEMORY)
    for _ in range(options.rounds):
        for name in names:
            seconds[name].append(job(options.folder, name))
    print(f"{'':26} open ms  ratio   {SAVES} saves s  ratio")
    for name in names:
        ratios = [[own[at] / base[at] for own, base in zip(seconds[name], seconds[IN_MEMORY], strict=True)] for at in (0, 1)]
        opened, saved = (statistics.median(each[at] for each in seconds[name]) for at in (0, 1))
        print(f"{name:26} {opened * 1e3:7.1f} {statistics.median(ratios[0]):6.2f} {saved:13.2f} {statistics.median(ratios[1]):6.2f}")


if __name__ == "__main__":
    main()

"""A save through O_DIRECT and through the page cache, on several kinds of folders: `python -m benches.direct --folders DIR /mnt/b`.

Which of the two a save takes goes by the kind of the disk (`use_direct`). Here it is made to take each, in turns, and the last column
says which it takes by itself. To mount overlay, loop devices and others in a namespace that ends with the bench:

    unshare --mount bash -c "mount -t overlay overlay -o lowerdir=a,upperdir=b,workdir=c DIR; python -m benches.direct --folders DIR"
"""

import argparse
import fcntl
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches._peers import State
from benches.local import make_state
from tensorstore_ck.backend import local
from tensorstore_ck.backend.local_io import use_direct
from tensorstore_ck.common.filesystem_kind import filesystem_of


def try_direct(fd: int) -> bool:
    """Switches to O_DIRECT wherever the kernel lets it."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


WAYS: dict[str, Callable[[int], bool]] = {"O_DIRECT": try_direct, "page cache": lambda fd: False}


def save(folder: Path, state: State, way: Callable[[int], bool]) -> tuple[float, float]:
    """Wall and CPU seconds of a first save in a new store."""
    with (
        patch.object(local, "use_direct", way),
        new_folder(folder),
        tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store,
    ):
        os.sync()
        cpu, began = time.process_time(), time.perf_counter()
        store.put_snapshot(state, ref="bench")
        return time.perf_counter() - began, time.process_time() - cpu


def own_choice(folder: Path) -> str:
    """What a save takes by itself."""
    with (folder / "tried").open("wb") as file:
        chosen = use_direct(file.fileno())
    (folder / "tried").unlink()
    return "O_DIRECT" if chosen else "page cache"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=Path, nargs="+", required=True)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    state = make_state(64, int(args.gib * (1 << 30)) // 64)
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"GB/s (CPU seconds), medians of {args.rounds} rounds, {args.gib} GiB\n| folder | {' | '.join(WAYS)} | ratio | takes |")
    print("|---|---|---|---|---|")
    for folder in args.folders:
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        for number in range(args.rounds + 1):
            for name, way in WAYS.items():
                found = save(folder / "bench", state, way)
                if number:
                    taken[name].append(found)
        walls, cpus = ([statistics.median(row[at] for row in rows) for rows in taken.values()] for at in (0, 1))
        cells = [f"{size / wall / 1e9:.2f} ({cpu:.2f})" for wall, cpu in zip(walls, cpus, strict=True)]
        pairs = statistics.median(other[0] / direct[0] for direct, other in zip(*taken.values(), strict=True))
        print(f"| {filesystem_of(folder)}, {folder} | {' | '.join(cells)} | {pairs:.2f} | {own_choice(folder)} |", flush=True)


if __name__ == "__main__":
    main()

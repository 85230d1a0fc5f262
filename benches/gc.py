"""What freeing space costs, against restic and borg, a plain copy and plain deletes: `python -m benches.gc peers --folder /tmp/bench`.

`peers` keeps the last 2 of many versions of a state and frees the rest, and checks all data; each tool starts from a copy of the same
repository, cold, and takes turns with the others. Peak memory is the kernel's, of the whole command. `compaction` rewrites packs of which
40 % is live, compared with a copy of as many bytes. `sweep` and `sweep-s3` free objects that nothing refers to, compared with a list
and plain deletes.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tensorstore_ck as tsck
from benches._folder import new_folder
from benches._peers import State
from benches.local import make_state, ratio, timed
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.format.part import part_name
from tensorstore_ck.gc import GcOptions, GcReport, run_gc
from tests.servers import BUCKET, seaweedfs

MIB = 1 << 20
TENSORS = 64
CHANGED = 0.2
KEEP = 2
LIVE = 0.4
AT_ONCE = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=1)

MEASURE = """
import os, sys
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
_, status, usage = os.wait4(os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet), 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""
"""Started from a small process: a new one's peak begins with that of the one which started it."""

Seconds = dict[str, list[float]]
Command = list[str]


# --- against restic and borg --------------------------------------------------------------------------------------------


class Tool(NamedTuple):
    """One tool, as its own commands."""

    name: str
    versions: Callable[[Iterable[State], Path], None]
    """Stores each state as a version, in an empty folder."""
    free: dict[str, Callable[[Path, int], list[Command]]]
    """Setting -> the commands that keep the last of so many versions."""
    check: Callable[[Path], Command]


class Cost(NamedTuple):
    seconds: float
    peak_bytes: int
    left_bytes: int


def states(mib: int, versions: int) -> Iterator[State]:
    """Each differs from the one before in a fifth of its tensors, chosen at random."""
    chance, generator = random.Random(0), torch.Generator().manual_seed(1)
    state = make_state(TENSORS, mib * MIB // TENSORS)
    for _ in range(versions):
        yield state
        for name in chance.sample(sorted(state), round(CHANGED * TENSORS)):
            state[name] = torch.randn(state[name].shape, generator=generator)


def save_tsck(states: Iterable[State], folder: Path) -> None:
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        for step, state in enumerate(states):
            store.put_snapshot(state, ref="bench", step=step)


def save_as_files(folder: Path, states: Iterable[State], init: Command, save: Callable[[int, Path], Command]) -> None:
    """A file per tensor, of which only those that changed are written again."""
    run(init, folder)
    data, last = folder / "data", dict[str, int]()
    data.mkdir()
    for step, state in enumerate(states):
        for name, tensor in state.items():
            if last.get(name) != id(tensor):
                (data / name).write_bytes(tensor.view(torch.uint8).numpy().data)
                last[name] = id(tensor)
        run(save(step, data), folder)
    shutil.rmtree(data)


def _tsck(*words: str) -> Callable[[Path], Command]:
    program = os.path.join(os.path.dirname(sys.executable), "tsck")
    return lambda folder: [program, *words, "--store", str(folder / "store"), "--cache-dir", str(folder / "cache")]


def _free_tsck(*options: str) -> Callable[[Path, int], list[Command]]:
    def commands(folder: Path, versions: int) -> list[Command]:
        forget = _tsck("forget", *(f"bench@{step}" for step in range(versions - KEEP)))
        gc = _tsck("gc", "--undo-window", "0s", "--min-age", "0s", "--max-delete", "100%", *options)
        return [forget(folder), gc(folder)]

    return commands


def _restic(folder: Path, *words: str) -> Command:
    return ["restic", "--repo", str(folder / "repo"), "--cache-dir", str(folder / "cache"), "--quiet", *words]


def _free_restic(*options: str) -> Callable[[Path, int], list[Command]]:
    return lambda folder, versions: [_restic(folder, "forget", "--keep-last", str(KEEP), "--prune", *options)]


def _free_borg(*options: str) -> Callable[[Path, int], list[Command]]:
    def commands(folder: Path, versions: int) -> list[Command]:
        repo = str(folder / "repo")
        return [["borg", "delete", repo, *(f"v{step}" for step in range(versions - KEEP))], ["borg", "compact", *options, repo]]

    return commands


TOOLS = [
    Tool(
        "tsck",
        save_tsck,
        {"forget + gc": _free_tsck(), "forget + gc --compact-below 100%": _free_tsck("--compact-below", "100%")},
        _tsck("fsck", "--read-data"),
    ),
    Tool(
        "restic",
        lambda states, folder: save_as_files(
            folder, states, _restic(folder, "init"), lambda step, data: _restic(folder, "--compression", "off", "backup", str(data))
        ),
        {
            "forget --prune --compression off": _free_restic("--compression", "off"),
            "the same, --max-unused 0": _free_restic("--compression", "off", "--max-unused", "0"),
        },
        lambda folder: _restic(folder, "check", "--read-data"),
    ),
    Tool(
        "borg",
        lambda states, folder: save_as_files(
            folder,
            states,
            ["borg", "init", "--encryption", "none", str(folder / "repo")],
            lambda step, data: ["borg", "create", "--compression", "none", f"{folder}/repo::v{step}", str(data)],
        ),
        {"delete + compact": _free_borg(), "the same, --threshold 0": _free_borg("--threshold", "0")},
        lambda folder: ["borg", "check", "--verify-data", str(folder / "repo")],
    ),
]


def run(command: Command, folder: Path) -> int:
    """Runs it; its peak of resident memory."""
    environment = {**os.environ, "RESTIC_PASSWORD": "bench", "BORG_BASE_DIR": str(folder / "cache")}
    environment |= {"BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
    done = subprocess.run([sys.executable, "-S", "-c", MEASURE, *command], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    code, peak_kib = map(int, done.stdout.splitlines()[-1].split())
    if code:
        raise SystemExit(f"{command} ended with {code}")
    return peak_kib * 1024


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def drop(paths: Iterable[Path]) -> None:
    """Takes files out of the page cache."""
    os.sync()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for place in ("store", "repo") for path in files_in(folder / place))


def cost(commands: Sequence[Command], folder: Path) -> Cost:
    drop(files_in(folder))
    begin = time.perf_counter()
    peak = max(run(command, folder) for command in commands)
    return Cost(time.perf_counter() - begin, peak, stored_bytes(folder))


def bench_peers(folder: Path, mib: int, versions: int, rounds: int) -> None:
    place = folder / "run"  # each tool finds its repository where it made it
    before: dict[str, int] = {}
    for tool in TOOLS:
        place.mkdir()
        tool.versions(states(mib, versions), place)
        before[tool.name] = stored_bytes(place)
        place.rename(folder / tool.name)
    costs: dict[tuple[str, str], list[Cost]] = {}
    for _ in range(rounds):
        for tool in TOOLS:
            works = {"check": [tool.check(place)]} | {name: make(place, versions) for name, make in tool.free.items()}
            for name, commands in works.items():
                shutil.copytree(folder / tool.name, place)
                costs.setdefault((tool.name, name), []).append(cost(commands, place))
                if tool.name == "tsck":
                    require_kept(place, mib, versions)
                shutil.rmtree(place)
    print(f"{versions} versions of {mib} MiB, a fifth new in each, the last {KEEP} stay; cold, median (least-most) of {rounds} rounds")
    print("| | seconds | MiB before | MiB after | peak MiB |\n|---|---|---|---|---|")
    for (tool_name, name), taken in costs.items():
        sizes = [before[tool_name] / MIB, taken[-1].left_bytes / MIB, max(each.peak_bytes for each in taken) / MIB]
        print(f"| {tool_name} {name} | {spread([each.seconds for each in taken])} | {' | '.join(f'{size:.0f}' for size in sizes)} |")


def require_kept(folder: Path, mib: int, versions: int) -> None:
    """Both remaining snapshots are what was saved."""
    kept = {step: dict(state) for step, state in enumerate(states(mib, versions)) if step >= versions - KEEP}
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        for step, state in kept.items():
            found = store.checkout(f"bench@{step}")
            if not all(torch.equal(found[name], tensor) for name, tensor in state.items()):
                raise SystemExit(f"step {step} is not what was put")


# --- against a copy -----------------------------------------------------------------------------------------------------


def make_sparse(folder: Path, mib: int) -> None:
    """Snapshots of which the newest holds some tensors of the one before; the older one is forgotten."""
    chance = random.Random(0)
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        for number in range(8):
            generator = torch.Generator().manual_seed(number)
            size = mib * MIB // 8 // TENSORS // 4
            state = {f"layer.{at}.weight": torch.randn(size, generator=generator) for at in range(TENSORS)}
            store.put_snapshot(state, ref=f"job.{number}", step=0)
            kept = chance.sample(sorted(state), round(LIVE * TENSORS))
            store.put_snapshot({name: state[name] for name in kept}, ref=f"job.{number}", step=1)
            store.forget(f"job.{number}@0")


def copy_plainly(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def bench_compaction(folder: Path, mib: int, rounds: int) -> None:
    seconds: Seconds = {"copy + fsync of the live bytes": [], "gc, all of it": [], "gc, from the plan to the last block": []}
    for round_number in range(rounds + 1):
        place = folder / "sparse"
        make_sparse(place, mib)
        drop(files_in(place))
        taken, phase, report = gc_and_phase(place)
        with (folder / "source").open("wb") as file:
            for _ in range(0, report.written_bytes, MIB):
                file.write(os.urandom(MIB))
        drop([folder / "source"])
        copied = timed(lambda: copy_plainly(folder / "source", folder / "target"))
        if round_number:
            for name, value in zip(seconds, (copied, taken, phase), strict=True):
                seconds[name].append(value)
        shutil.rmtree(place)
    size, live = report.total_bytes, report.written_bytes
    print(f"{size / 2**30:.2f} GiB of packs, {live / 2**30:.2f} GiB live, cold, median (least-most) of {rounds} rounds")
    print_table(seconds, live, "copy + fsync of the live bytes")


def gc_and_phase(folder: Path) -> tuple[float, float, GcReport]:
    """Seconds in all, and of what comes after the mark until the last block was copied."""
    stamps: dict[str, float] = {}
    with opened(folder) as engine:
        reports: list[GcReport] = []

        def note(what: str, done: int, total: int) -> None:
            if what != "marking snapshots" or "rewriting packs" not in stamps:  # the marks are looked at again after each batch
                stamps[what] = time.perf_counter()

        taken = timed(lambda: reports.append(run_gc(engine, AT_ONCE, progress=note)))
    return taken, stamps["rewriting packs"] - stamps["marking snapshots"], reports[0]


# --- against plain deletes ----------------------------------------------------------------------------------------------


def bench_sweep(folder: Path, objects: int, rounds: int) -> None:
    seconds: Seconds = {"list + unlink": [], "gc": []}
    for round_number in range(rounds + 1):
        for name in seconds:
            place = folder / "sweep"
            with opened(place) as engine:
                make_orphans(engine, objects, threads=1)
                taken = timed(partial(run_gc, engine, AT_ONCE) if name == "gc" else partial(unlink_all, place))
            if left := files_in(place / "store" / "parts"):
                raise SystemExit(f"{name} left {len(left)} objects")
            if round_number:
                seconds[name].append(taken)
            shutil.rmtree(place)
    print(f"{objects} objects of 1 KiB on local files, median (least-most) of {rounds} rounds")
    print_table(seconds, 0, "list + unlink")


def unlink_all(folder: Path) -> None:
    for path in files_in(folder / "store" / "parts"):
        path.unlink()


def bench_sweep_s3(folder: Path, objects: int, rounds: int) -> None:
    seconds: Seconds = {"list + delete_objects, 1,000 at once": [], "gc": []}
    with seaweedfs(folder) as server:
        client = server.client()
        for round_number in range(rounds + 1):
            for name in seconds:
                prefix = f"{round_number}-{name[:2]}"
                url, options = f"{server.url}/{prefix}", server.storage_options
                engine = open_engine(url, create=True, storage_options=options, cache_dir=folder / "cache")
                make_orphans(engine, objects, threads=16)
                taken = timed(partial(run_gc, engine, AT_ONCE) if name == "gc" else partial(delete_all, client, prefix))
                if left := sum(1 for _ in engine.backend.list("parts/")):
                    raise SystemExit(f"{name} left {left} objects")
                engine.close()
                if round_number:
                    seconds[name].append(taken)
    print(f"{objects} objects of 1 KiB on SeaweedFS on loopback, median (least-most) of {rounds} rounds")
    print_table(seconds, 0, "list + delete_objects, 1,000 at once")


def delete_all(client: Any, prefix: str) -> None:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/parts/"):
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": found["Key"]} for found in page["Contents"]], "Quiet": True})


def make_orphans(engine: Engine, objects: int, threads: int) -> None:
    """Parts of saves that died."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: engine.backend.put(part_name(engine.new_id()), bytes(1024)), range(objects)))


@contextmanager
def opened(folder: Path) -> Iterator[Engine]:
    engine = open_engine(folder / "store", create=True, cache_dir=folder / "cache")
    try:
        yield engine
    finally:
        engine.close()


# --- say it -------------------------------------------------------------------------------------------------------------


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def print_table(seconds: Seconds, size: int, plain: str) -> None:
    print("| | seconds | GB/s | speed beside plain, median of pairs |\n|---|---|---|---|")
    for name, taken in seconds.items():
        speed = f"{size / statistics.median(taken) / 1e9:.2f}" if size else ""
        print(f"| {name} | {spread(taken)} | {speed} | {ratio(seconds, name, plain):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["peers", "compaction", "sweep", "sweep-s3"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, help="of each version (256), or of all packs (2048)")
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--objects", type=int, help="20000, on S3 5000")
    args = parser.parse_args()
    with new_folder(args.folder):
        print(f"load average {os.getloadavg()[0]:.1f} at the start")
        if args.what == "peers":
            bench_peers(args.folder, args.mib or 256, args.versions, args.rounds)
        elif args.what == "compaction":
            bench_compaction(args.folder, args.mib or 2048, args.rounds)
        elif args.what == "sweep":
            bench_sweep(args.folder, args.objects or 20_000, args.rounds)
        else:
            bench_sweep_s3(args.folder, args.objects or 5_000, args.rounds)


if __name__ == "__main__":
    main()

"""Jobs of two forked ranks, of which one is killed with -9 at each point of a save; what a new job then loads; their table.

A point is a call that changes a file: before it, in the middle of it (a half-written file), and after the last one. The other rank goes on
for as long as it can: `GRACE_SECONDS`, as a launcher lets it until it notices the death.
"""

import builtins
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.end_to_end.crash.faulty import Faults

RANKS: Final = 2
SAVED_AFTER: Final = (2, 4)
"""Steps; the kill is in the second save."""
GRACE_SECONDS: Final = 2.0
JOB_SECONDS: Final = 120.0
WHOLE, FAILS, MIXED, STARTS_AGAIN = "a whole step", "does not load", "a mixed or torn state", "nothing: starts again at step 0"
NOT_REACHED: Final = "not reached"
"""The save took fewer calls than the undisturbed one, whose number varies by one or two."""
Said = dict[str, Any]


class Point(NamedTuple):
    """Where a rank is killed."""

    rank: int
    at: int
    """The number of the call, from 1."""
    how: str
    """``before``, ``torn`` or ``after``."""


class Strike(Faults):
    """Counts the calls of a save on this rank, and kills the process at one of them."""

    def __init__(self, point: Point | None) -> None:
        super().__init__()
        self._point = point
        self.is_counting = False
        self.made: list[tuple[str, bool]] = []
        """What was called, and whether it can be torn."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        """See `Faults`."""
        if not self.is_counting:
            return effect()
        self.made.append((what, tear is not None))
        how = self._point.how if self._point is not None and len(self.made) == self._point.at else ""
        if how == "torn" and tear is not None:
            tear()
        result = effect() if how in ("", "after") else None
        if how:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The save in which it strikes."""
        self.is_counting = True
        yield
        self.is_counting = False


class Job(NamedTuple):
    """A trainer's job on one rank."""

    title: str
    save: Callable[[Path, Strike], dict[str, str]]
    """Trains, and saves after `SAVED_AFTER`; returns step -> a hash of this rank's state then."""
    load: Callable[[Path], tuple[int, str]]
    """Loads; returns the step and the hash."""


@contextmanager
def watched_files(folder: Path, strike: Strike) -> Iterator[None]:
    """Reports calls that change files below `folder` to a `Strike`."""
    below, plain_open, plain_save = os.fspath(folder), open, torch.save

    def is_watched(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(below)

    def opened(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not (set(mode) & set("wax+") and is_watched(path)):
            return plain_open(path, mode, *arguments, **named)
        what = f"open {Path(path).name}"
        return strike.call(what, lambda: plain_open(path, mode, *arguments, **named), lambda: plain_open(path, mode).close())

    def saved(state: Any, path: Any, *arguments: Any, **named: Any) -> None:
        def tear() -> None:
            whole = io.BytesIO()
            plain_save(state, whole, *arguments, **named)
            with plain_open(path, "wb") as file:
                file.write(whole.getvalue()[: whole.tell() // 2])

        if not is_watched(path):
            plain_save(state, path, *arguments, **named)
        else:
            strike.call(f"write {Path(path).name}", lambda: plain_save(state, path, *arguments, **named), tear)

    def plain(original: Callable[..., Any], which: int) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if not is_watched(arguments[which]):
                return original(*arguments, **named)
            return strike.call(f"{original.__name__} {Path(arguments[which]).name}", lambda: original(*arguments, **named))

        return called

    with (
        patch.object(builtins, "open", opened),
        patch.object(io, "open", opened),  # pathlib's
        patch.object(torch, "save", saved),
        patch.object(os, "mkdir", plain(os.mkdir, 0)),
        patch.object(os, "rename", plain(os.rename, 1)),
        patch.object(os, "replace", plain(os.replace, 1)),
    ):
        yield


def run_ranks(folder: Path, work: Callable[[int], Said], ranks: int = RANKS) -> list[Said]:
    """What `work` returned on each forked rank; ``error`` if it failed, ``killed`` if it was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    server, port = _fork_store()
    pids = [_fork_rank(rank, ranks, port, folder, work) for rank in range(ranks)]
    said: list[Said] = [{} for _ in pids]
    limit, is_ending = time.monotonic() + JOB_SECONDS, False
    while not all(said):
        for rank, pid in enumerate(pids):
            ended, status = (0, 0) if said[rank] else os.waitpid(pid, os.WNOHANG)
            if ended:
                said[rank] = {"killed": True} if os.WIFSIGNALED(status) else json.loads((folder / f"said-{rank}").read_text())
                if not is_ending and said[rank].keys() & {"killed", "error"}:
                    limit, is_ending = time.monotonic() + GRACE_SECONDS, True
        if time.monotonic() > limit:
            for rank, pid in enumerate(pids):
                if not said[rank]:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a rank has started, such as the process of Megatron's asynchronous saves
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return said


def _fork_store() -> tuple[int, str]:
    """A process with the ranks' key-value store, and its port. As under torchrun, it is there when rank 0 is not."""
    here, there = os.pipe()
    server = os.fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        os.write(there, str(store.port).encode())
        while True:
            signal.pause()
    port = os.read(here, 20).decode()
    os.close(here)
    os.close(there)
    return server, port


def _fork_rank(rank: int, ranks: int, port: str, folder: Path, work: Callable[[int], Said]) -> int:
    pid = os.fork()
    if pid:
        with suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        return pid
    os.setpgid(0, 0)
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    try:
        found = work(rank)
    except BaseException as exc:  # noqa: BLE001 - said to the parent
        traceback.print_exc()
        found = {"error": f"{type(exc).__name__}: {exc}"}
    (folder / f"said-{rank}").write_text(json.dumps(found))
    os._exit(0)


def _outcome(loaded: list[Said], whole: list[Said]) -> str:
    """What a job has after a load, by the states that the undisturbed job had."""
    if any("step" not in each for each in loaded):
        return FAILS
    for step in map(str, SAVED_AFTER):
        if all(each["state"] == before["states"][step] for each, before in zip(loaded, whole, strict=True)):
            return WHOLE
    return STARTS_AGAIN if all(each["step"] == 0 for each in loaded) else MIXED


def kill_everywhere(job: Job, folder: Path) -> Counter[str]:
    """Outcome -> at how many points."""

    def save(folder: Path, point: Point | None, rank: int) -> Said:
        strike = Strike(point if point is not None and point.rank == rank else None)
        states = job.save(folder, strike)
        return {"states": states, "made": strike.made}

    def load(folder: Path) -> Said:
        step, state = job.load(folder)
        return {"step": step, "state": state}

    whole = run_ranks(folder / "whole", lambda rank: save(folder / "whole", None, rank))
    if any("made" not in each for each in whole):
        raise SystemExit(f"{job.title}: {whole}; see {folder / 'whole'}")
    found: Counter[str] = Counter()
    for rank, said in enumerate(whole):
        points = [Point(rank, at, "before") for at in range(1, len(said["made"]) + 1)]
        points += [Point(rank, at, "torn") for at, (_, tears) in enumerate(said["made"], 1) if tears]
        for point in [*sorted(points, key=lambda each: each.at), Point(rank, len(said["made"]), "after")]:
            one = folder / "-".join(map(str, point))
            killed = run_ranks(one, lambda rank, one=one, point=point: save(one, point, rank))  # type: ignore[misc]
            outcome = NOT_REACHED
            if killed[point.rank] == {"killed": True}:
                outcome = _outcome(run_ranks(one, lambda _, one=one: load(one)), whole)  # type: ignore[misc]
            found[outcome] += 1
            print(f"{job.title}: rank {rank}, {point.how} call {point.at}, {said['made'][point.at - 1][0]}: {outcome}", file=sys.stderr)
            shutil.rmtree(one)
    return found


def kill_table(jobs: Iterable[Job], folder: Path) -> None:
    """A row for each job; the points themselves go to stderr."""
    print(f"| | points | {WHOLE} | {FAILS} | {MIXED} | {STARTS_AGAIN} |\n|---|---|---|---|---|---|", flush=True)
    for job in jobs:
        shutil.rmtree(folder, ignore_errors=True)
        found = kill_everywhere(job, folder)
        points = sum(found.values()) - found.pop(NOT_REACHED, 0)
        print(
            "|",
            " | ".join([job.title, *map(str, (points, *(found[each] for each in (WHOLE, FAILS, MIXED, STARTS_AGAIN))))]),
            "|",
            flush=True,
        )
    shutil.rmtree(folder)

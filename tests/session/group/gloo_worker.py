"""Run by test_gloo: a process that forks the ranks of process groups, one of which dies or stops at a given point of a save.

A nursery, because imports take longer than most of these processes live. What a rank found out it says in a file, a line each, in one
write, which SIGKILL cannot tear. The store of a process group is served by a process of its own, as torchrun's agent does, or by rank 0.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import lmdb  # noqa: F401 - before the fork, not after each
import numpy.random  # noqa: F401
import s3fs  # noqa: F401
import torch
import torch._dynamo  # that, too: making a process group imports it
import torch.distributed
import torch.distributed._shard.sharded_tensor
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.write.pack_writer import PackWriter
from tensorstore_ck.log import Log
from tensorstore_ck.session.group import Channel, Group
from tensorstore_ck.session.group.rank_put import RankPut
from tests.effort import PATIENCE_SECONDS

dist: Any = torch.distributed
"""Its annotations lack most of what we use."""
RANKS: Final = 8
GRACE_SECONDS: Final = 1.0
WAIT_SECONDS: Final = PATIENCE_SECONDS
BUSY_FACTOR: Final = 4
"""On a machine that has other things to do, the ranks that live must still come in time."""

POINTS: Final[dict[str, tuple[Any, str, str, str]]] = {
    "before its put": (Group, "begin", "", "before"),
    "before proposal": (Channel, "put", "proposal/", "before"),
    "in capture": (import_module("tensorstore_ck.state.capture"), "capture", "", "before"),
    "after proposal": (Channel, "put", "proposal/", "after"),
    "before go": (Channel, "put", "go", "before"),
    "after go": (Channel, "put", "go", "after"),
    "before its work": (RankPut, "execute", "", "before"),
    "in packs": (PackWriter, "add", "", "after"),
    "before packs are durable": (PackWriter, "close", "", "before"),
    "before its part": (LocalBackend, "put", "parts/", "before"),
    "after its part": (LocalBackend, "put", "parts/", "after"),
    "before result": (Channel, "put", "result/", "before"),
    "after result": (Channel, "put", "result/", "after"),
    "before commit": (RankPut, "commit", "", "before"),
    "before the record": (LocalBackend, "put", "snapshots/", "before"),
    "after the record": (LocalBackend, "put", "snapshots/", "after"),
    "before the log entry": (Log, "append", "", "before"),
    "after the log entry": (Log, "append", "", "after"),
    "before outcome": (Channel, "put_first", "outcome", "before"),
    "after outcome": (Channel, "put_first", "outcome", "after"),
}
"""Name -> (what has the method, method, what its first argument begins with, before or after)."""


@dataclass(frozen=True)
class Play:
    """Three saves by one group of ranks; in the second a rank is struck, and the third is by a new group of all others."""

    point: str
    victim: int
    signal: int
    server: str
    """Who serves the process group's store: ``agent`` or ``rank 0``."""
    url: str
    storage_options: dict[str, Any]
    folder: str
    timeout_seconds: float
    """Of the second save; more when the first one took long."""
    dead_after_seconds: float = 60.0


# --- what is saved --------------------------------------------------------------------------------------------------------


def full_tensors(step: int) -> dict[str, torch.Tensor]:
    """The whole state of a step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "uneven": torch.randn(1003, 64, generator=generator),
        "few": torch.randn(5, 3000, generator=generator),
        "same": torch.arange(200_000, dtype=torch.float32).view(400, 500),
    }


def state_of(step: int, rank: int, ranks: int) -> dict[str, Any]:
    """A rank's side of it, laid out as FSDP2 does."""
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    tensors = {}
    for name, full in full_tensors(step).items():
        chunks = full.chunk(ranks)
        local = chunks[rank] if rank < len(chunks) else full[:0]
        tensors[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    return {"model": tensors, "replicated": torch.full((3000,), float(step)), "step": step}


# --- what is said -------------------------------------------------------------------------------------------------------


def say(folder: str, who: str, **said: object) -> None:
    fd = os.open(_said_path(folder, who), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(said).encode() + b"\n")
    os.close(fd)


def heard(folder: str | Path, who: str) -> list[dict[str, Any]]:
    """What was said, oldest first."""
    path = _said_path(folder, who)
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _said_path(folder: str | Path, who: str) -> Path:
    return Path(folder, f"{who}.jsonl")


def _await(folder: str, who: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not heard(folder, who):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{who} said nothing")
        time.sleep(0.01)
    return heard(folder, who)[0]


# --- what a rank does ---------------------------------------------------------------------------------------------------


class Trap:
    """Strikes this process at a point of a save, once it is armed."""

    def __init__(self, play: Play) -> None:
        self.armed = False
        self._play = play
        owner, method, prefix, when = POINTS[play.point]
        plain: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(plain)
        def trapped(*args: Any, **options: Any) -> Any:
            is_here = not prefix or (len(args) > 1 and str(args[1]).startswith(prefix))
            if is_here and when == "before":
                self._strike()
            result = plain(*args, **options)
            if is_here and when == "after":
                self._strike()
            return result

        setattr(owner, method, trapped)

    def _strike(self) -> None:
        if self.armed:
            self.armed = False
            say(self._play.folder, "struck", at=self._play.point)
            os.kill(os.getpid(), self._play.signal)


def live(play: Play, rank: int) -> None:
    """A rank's whole life."""
    Group.begin.__kwdefaults__["grace"] = GRACE_SECONDS  # type: ignore[index]
    trap = None
    cache, patience = f"{play.folder}/cache-{rank}", play.dead_after_seconds
    with tsck.open(play.url, storage_options=play.storage_options, cache_dir=cache, dead_after_seconds=patience) as store:
        if play.storage_options:
            for point, (owner, method, prefix, when) in POINTS.items():
                POINTS[point] = (type(store.engine.placed.at(None)) if owner is LocalBackend else owner, method, prefix, when)
        if rank == play.victim:
            trap = Trap(play)
        join(play, rank, RANKS, first=True)
        seconds = put(play, store, 1, rank, RANKS, timeout_seconds=WAIT_SECONDS)
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if trap is not None:
            trap.armed = True
        put(play, store, 2, rank, RANKS, timeout_seconds=max(play.timeout_seconds, BUSY_FACTOR * slowest.item()))
        if rank == play.victim:
            return  # it was stopped, and goes on long after
        dist.destroy_process_group()
        number = rank - (rank > play.victim)
        join(play, number, RANKS - 1, first=False)
        put(play, store, 3, number, RANKS - 1, who=rank, timeout_seconds=WAIT_SECONDS)


def join(play: Play, rank: int, ranks: int, *, first: bool) -> None:
    """Makes the process group: one for all, or a new one for those that are left."""
    if first and play.server == "rank 0":
        if rank == 0:
            store = tcp_store(0, is_master=True)
            say(play.folder, "served by rank 0", port=store.port)
        else:
            store = tcp_store(_await(play.folder, "served by rank 0")["port"])
    else:
        store = tcp_store(_await(play.folder, "served by agent")["port"])
    prefix = dist.PrefixStore("first" if first else "second", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=ranks, timeout=timedelta(seconds=WAIT_SECONDS))


def tcp_store(port: int, *, is_master: bool = False) -> Any:
    timeout = timedelta(seconds=WAIT_SECONDS)
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def put(
    play: Play, store: tsck.Store, step: int, rank: int, ranks: int, *, timeout_seconds: float, who: int | None = None
) -> float:  # fmt: skip
    """Says what came of it; returns how long it took."""
    state, own = state_of(step, rank, ranks), {"rng": torch.tensor([step, rank])}
    started = time.monotonic()
    said: dict[str, object] = {"timeout": timeout_seconds}
    options: dict[str, Any] = {"group": dist.group.WORLD, "timeout_seconds": timeout_seconds}
    try:
        said["root"] = store.put_snapshot(state, ref="job" if step < 3 else "again", step=step, rank_state=own, **options).root
    except tsck.StoreError as exc:
        said |= {"error": type(exc).__name__, "message": str(exc)}
    seconds = time.monotonic() - started
    say(play.folder, f"rank-{rank if who is None else who}", step=step, seconds=seconds, **said)
    return seconds


def serve_store(play: Play) -> None:
    """What torchrun's agent does for a process group."""
    store = tcp_store(0, is_master=True)
    say(play.folder, "served by agent", port=store.port)
    while True:
        signal.pause()


# --- the nursery --------------------------------------------------------------------------------------------------------


def fork(folder: str, who: str, body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            null, log = os.open(os.devnull, os.O_RDONLY), os.open(f"{folder}/{who}.err", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            for fd, place in ((null, 0), (log, 1), (log, 2)):
                os.dup2(fd, place)
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def serve(requests: Iterator[list[Any]]) -> None:
    """Forks the processes of a play; waits for the end of one: until then its id is nobody else's. All end with the nursery."""
    alive: set[int] = set()
    try:
        for request, argument in requests:
            answer: Any
            if request == "play":
                play = Play(**argument)
                answer = [fork(play.folder, f"rank-{rank}", functools.partial(live, play, rank)) for rank in range(RANKS)]
                answer.append(fork(play.folder, "agent", functools.partial(serve_store, play)))
                alive |= set(answer)
            else:
                pid, status = os.waitpid(argument, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                alive -= {pid}
            print(json.dumps(answer), flush=True)
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)


class Nursery:
    """The other end: what a test holds. Thread-safe."""

    def __init__(self, requests: Any, answers: Any) -> None:
        self._requests, self._answers = requests, answers
        self._lock = threading.Lock()

    def play(self, play: Play) -> list[int]:
        """Process ids: of the ranks, and of the agent."""
        return list(self._ask("play", asdict(play)))

    def exit_code(self, pid: int) -> int | None:
        """None while it lives."""
        code: int | None = self._ask("poll", pid)
        return code

    def _ask(self, request: str, argument: object) -> Any:
        with self._lock:
            self._requests.write(json.dumps([request, argument]) + "\n")
            self._requests.flush()
            return json.loads(self._answers.readline())


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(map(json.loads, sys.stdin))

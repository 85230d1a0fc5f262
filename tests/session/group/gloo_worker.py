"""Run by test_gloo: the life of one rank of a process group, of which one dies or stops at a given point of a save.

What a rank found out it says in a file, a line each, in one write, which SIGKILL cannot tear. The store of a process group is served by a
process of its own, as torchrun's agent does, or by rank 0.
"""

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.write.pack_writer import PackWriter
from tensorstore_ck.log import Log
from tensorstore_ck.session.group import Channel, Group
from tensorstore_ck.session.group.rank_save import RankSave
from tests.effort import PATIENCE_SECONDS

dist: Any = torch.distributed
"""Its annotations lack most of what we use."""
RANKS: Final = 8
GRACE_SECONDS: Final = 1.0
BUSY_FACTOR: Final = 4
"""On a machine that has other things to do, the ranks that live must still come in time."""

POINTS: Final[dict[str, tuple[Any, str, str, str]]] = {
    "before its put": (Group, "begin", "", "before"),
    "in capture": (import_module("tensorstore_ck.state.capture"), "capture", "", "before"),
    "after proposal": (Channel, "put", "proposal/", "after"),
    "before go": (Channel, "put", "go", "before"),
    "in packs": (PackWriter, "add", "", "after"),
    "after its part": (LocalBackend, "put", "parts/", "after"),
    "after result": (Channel, "put", "result/", "after"),
    "before commit": (RankSave, "commit", "", "before"),
    "after the record": (LocalBackend, "put", "snapshots/", "after"),
    "after the log entry": (Log, "append", "", "after"),
    "before outcome": (Channel, "put_first", "outcome", "before"),
}
"""Name -> (what has the method, method, what its first argument begins with, before or after). Simulations try every step."""


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
    fd = os.open(f"{folder}/{who}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(said).encode() + b"\n")
    os.close(fd)


def heard(folder: str, who: str) -> list[dict[str, Any]]:
    """What was said, oldest first."""
    path = Path(folder, f"{who}.jsonl")
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _await(folder: str, who: str) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not heard(folder, who):
        if time.monotonic() > deadline:
            raise TimeoutError(who)
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
    """A rank's whole life, in a process of its own."""
    os.dup2(os.open(f"{play.folder}/rank-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
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
        seconds = put(play, store, 1, rank, RANKS, timeout_seconds=PATIENCE_SECONDS)
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
        put(play, store, 3, number, RANKS - 1, who=rank, timeout_seconds=PATIENCE_SECONDS)


def join(play: Play, rank: int, ranks: int, *, first: bool) -> None:
    """Makes the process group: one for all, or a new one for those that are left."""
    server = play.server if first else "agent"
    if server == "rank 0" and rank == 0:
        store = serve(play.folder, server)
    else:
        store = tcp_store(_await(play.folder, f"served by {server}")["port"])
    prefix = dist.PrefixStore("first" if first else "second", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_SECONDS))


def tcp_store(port: int, *, is_master: bool = False) -> Any:
    timeout = timedelta(seconds=PATIENCE_SECONDS)
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def put(play: Play, store: tsck.Store, step: int, rank: int, ranks: int, *, timeout_seconds: float, who: int | None = None) -> float:
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


def serve(folder: str, server: str) -> Any:
    """A store for process groups."""
    store = tcp_store(0, is_master=True)
    say(folder, f"served by {server}", port=store.port)
    return store


def be_agent(folder: str) -> None:
    """What torchrun's agent does for a process group."""
    store = serve(folder, "agent")
    while store:
        signal.pause()

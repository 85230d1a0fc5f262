"""What one rank of the bench `ranks` does: its own side of a state, saves and restores in turns, all ranks in step."""

import os
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tensorstore_ck as tsck
from benches.memory import high_water_bytes, reset_high_water
from tensorstore_ck.integrations.dcp import Reader, Writer

State = dict[str, torch.Tensor]
COLUMNS = 1024
REF = "bench"


class Job(NamedTuple):
    """What all ranks do."""

    ranks: int
    gib: float
    """Held by all ranks together."""
    folder: Path
    is_sharded: bool = True
    tensors: int = 64
    rounds: int = 0
    dcp_threads: int = 2
    own_caches: bool = False
    """As if each rank ran on a host of its own."""


class Measured(NamedTuple):
    """What all ranks measured."""

    size_bytes: int
    """Of whole tensors."""
    seconds: dict[str, list[float]]
    """Of the slowest rank, round by round."""
    figures: dict[str, list[tuple[int, int, int]]]
    """Of each rank in the last round: bytes written, bytes read, peak memory beyond the state."""
    cpu_seconds: dict[str, list[float]]
    """Of all ranks together, round by round: what other processes on the cores change least."""


class Watch:
    """Bytes that this process wrote and read, by system calls on files and sockets, and how its memory grew."""

    def __init__(self) -> None:
        reset_high_water()
        self._begin = self._now()

    def figures(self) -> tuple[int, int, int]:
        written, read, peak = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return written, read, peak

    @staticmethod
    def _now() -> tuple[int, int, int]:
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(io["wchar"]), int(io["rchar"]), high_water_bytes()


def pick_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def time_rank(rank: int, job: Job, port: int, results: "SimpleQueue[Measured]") -> None:
    """Entry point of a rank: times saves, then restores."""
    begin(rank, job, port)
    state = make_state(job, rank)
    measured = Measured(size_of(state), {}, {}, {})

    def timed(name: str, round_number: int, work: Callable[[], object]) -> None:
        if rank == 0:
            os.sync()
        dist.barrier()
        watch = Watch()
        started, cpu_seconds = time.perf_counter(), torch.tensor(-time.process_time(), dtype=torch.float64)
        work()
        figures = watch.figures()
        cpu_seconds += time.process_time()
        dist.barrier()
        taken = time.perf_counter() - started
        dist.all_reduce(cpu_seconds)
        if round_number:  # the first one is to warm up
            measured.seconds.setdefault(name, []).append(taken)
            measured.cpu_seconds.setdefault(name, []).append(cpu_seconds.item())
        if round_number == job.rounds:
            of_all: list[Any] = [None] * job.ranks
            dist.all_gather_object(of_all, figures)
            measured.figures[name] = of_all

    for round_number in range(job.rounds + 1):
        fresh(job, rank, "dcp")
        timed("DCP save", round_number, lambda: save_dcp(job, state))
        fresh(job, rank, "tsck")
        with opened(job, rank) as store:
            timed("tsck put, first of the layout", round_number, lambda: store.put_snapshot(state, ref=REF, group=dist.group.WORLD))
            change(state)
            timed("tsck put, later", round_number, lambda: store.put_snapshot(state, ref=REF, group=dist.group.WORLD))
            timed("tsck put, nothing changed", round_number, lambda: store.put_snapshot(state, ref=REF, group=dist.group.WORLD))
        fresh(job, rank, "tsck")
        with opened(job, rank) as store:
            save = partial(save_through, Writer(store, REF), state)
            timed("DCP save, tsck Writer, first", round_number, save)
            change(state)
            timed("DCP save, tsck Writer, later", round_number, save)
    fresh(job, rank, "dcp")
    save_dcp(job, state)
    expected = {name: local_of(tensor).clone() for name, tensor in state.items()}

    for round_number in range(job.rounds + 1):
        for name, load in (("DCP load", load_dcp), ("tsck checkout into=", load_tsck), ("DCP load, tsck Reader", load_through)):
            clear(state)
            timed(name, round_number, lambda load=load: load(job, rank, state))  # type: ignore[misc]
            if not all(torch.equal(expected[key], local_of(tensor)) for key, tensor in state.items()):
                raise SystemExit(f"{name} returned other bytes")
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def dedup_rank(rank: int, job: Job, port: int, results: "SimpleQueue[Measured]") -> None:
    """Entry point of a rank: saves the state that is the same for every number of ranks, on top of what others saved."""
    begin(rank, job, port)
    state = make_state(job, rank)
    with opened(job, rank, "") as store:
        store.put_snapshot(state, ref=REF, expect=tsck.ANY, group=dist.group.WORLD)
    if rank == 0:
        results.put(Measured(size_of(state), {}, {}, {}))
    dist.destroy_process_group()


def begin(rank: int, job: Job, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.ranks)


def make_state(job: Job, rank: int) -> State:
    """fp32, each tensor whole on every rank or sharded by rows; the numbers are the same for any number of ranks."""
    copies = 1 if job.is_sharded else job.ranks
    rows = max(int(job.gib * (1 << 30)) // copies // job.tensors // COLUMNS // 4, job.ranks)
    generator = torch.Generator()
    if not job.is_sharded:
        names = (f"layer.{number}.weight" for number in range(job.tensors))
        return {name: torch.randn(rows, COLUMNS, generator=generator.manual_seed(number)) for number, name in enumerate(names)}
    mesh = init_device_mesh("cpu", (job.ranks,))
    state: State = {}
    for number in range(job.tensors):
        whole = torch.randn(rows, COLUMNS, generator=generator.manual_seed(number))
        chunks = whole.chunk(job.ranks)
        local = chunks[rank].clone() if rank < len(chunks) else whole[:0]
        shape, stride = whole.shape, whole.stride()
        state[f"layer.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return state


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's side."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_of(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def change(state: State) -> None:
    """Makes every block a new one, alike on all ranks."""
    for tensor in state.values():
        local_of(tensor).add_(1)


def clear(state: State) -> None:
    for tensor in state.values():
        local_of(tensor).zero_()


def fresh(job: Job, rank: int, name: str) -> None:
    """An empty folder, for all ranks."""
    dist.barrier()
    if rank == 0:
        shutil.rmtree(job.folder / name, ignore_errors=True)
        (job.folder / name).mkdir(parents=True)
        if name == "tsck":
            tsck.open(job.folder / name / "store", create=True, cache_dir=job.folder / name / "cache").close()
    dist.barrier()


def opened(job: Job, rank: int, name: str = "tsck") -> tsck.Store:
    """The store that all ranks use, with the cache of this rank's host."""
    folder = job.folder / name
    return tsck.open(folder / "store", create=True, cache_dir=folder / (f"cache{rank}" if job.own_caches else "cache"))


def save_dcp(job: Job, state: State) -> None:
    writer = FileSystemWriter(job.folder / "dcp" / "dcp", single_file_per_rank=True, sync_files=True, thread_count=job.dcp_threads)
    dcp_save(dict[str, Any](state), storage_writer=writer)


def save_through(writer: Writer, state: State) -> None:
    dcp_save(dict[str, Any](state), storage_writer=writer)


def load_dcp(job: Job, rank: int, state: State) -> None:
    dcp_load(dict[str, Any](state), storage_reader=FileSystemReader(job.folder / "dcp" / "dcp"))


def load_tsck(job: Job, rank: int, state: State) -> None:
    with opened(job, rank) as store:
        store.checkout(REF, into=state, group=dist.group.WORLD)


def load_through(job: Job, rank: int, state: State) -> None:
    with opened(job, rank) as store:
        dcp_load(dict[str, Any](state), storage_reader=Reader(store, REF))

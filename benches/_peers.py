"""What the local bench times: each peer saves and restores one state of fp32 tensors in its own way, with fsync unless it has none."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tensorstore_ck as tsck

State = dict[str, torch.Tensor]
BLOCK_BYTES = 4 << 20


class Peer(NamedTuple):
    """One way to do one thing."""

    name: str
    run: Callable[[Path, State], object]
    """Called with a folder of its own; timed as a whole."""


def fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


# --- save ---------------------------------------------------------------------------------------------------------------


def save_torch(folder: Path, state: State) -> None:
    torch.save(state, folder / "state.pt")
    fsync_path(folder / "state.pt")


def save_dcp(folder: Path, state: State) -> None:
    writer = FileSystemWriter(folder / "dcp", single_file_per_rank=True, sync_files=True, thread_count=2)
    dcp_save(state, storage_writer=writer, no_dist=True)


def save_safetensors(folder: Path, state: State) -> None:
    save_file(state, folder / "state.safetensors")


def save_plain(folder: Path, state: State) -> None:
    with (folder / "plain").open("wb", buffering=0) as file:
        for tensor in state.values():
            file.write(_bytes_of(tensor))
        os.fsync(file.fileno())


@contextmanager
def opened(folder: Path) -> Iterator[tsck.Store]:
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        yield store


# --- restore ------------------------------------------------------------------------------------------------------------


def load_torch(folder: Path, _: State) -> object:
    return torch.load(folder / "state.pt", weights_only=True)


def load_dcp(folder: Path, state: State) -> None:
    dcp_load(state, storage_reader=FileSystemReader(folder / "dcp"), no_dist=True)


def load_safetensors(folder: Path, _: State) -> object:
    return load_file(folder / "state.safetensors")


def load_tsck(folder: Path, _: State) -> object:
    with opened(folder) as store:
        return store.checkout("bench")


def load_tsck_into(folder: Path, state: State) -> None:
    with opened(folder) as store:
        store.checkout("bench", into=state)


def _floor(path: Path, memory: list[memoryview]) -> None:
    """Two threads, each preadv then BLAKE3 of every second block: no format, nothing looked up."""
    offset = 0
    work: list[tuple[int, memoryview]] = []
    for view in memory:
        work += [(offset + start, view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]
        offset += len(view)
    fd = os.open(path, os.O_RDONLY)

    def drain(part: int) -> None:
        for at, block in work[part::2]:
            os.preadv(fd, [block], at)
            blake3(block).digest()

    helper = threading.Thread(target=drain, args=(1,))
    helper.start()
    drain(0)
    helper.join()
    os.close(fd)


def load_floor(folder: Path, state: State) -> object:
    fresh = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    _floor(folder / "plain", [_bytes_of(tensor) for tensor in fresh.values()])
    return fresh


def load_floor_into(folder: Path, state: State) -> None:
    _floor(folder / "plain", [_bytes_of(tensor) for tensor in state.values()])


SAVERS = [
    Peer("torch.save + fsync", save_torch),
    Peer("DCP save, 2 threads, fsync", save_dcp),
    Peer("safetensors, no fsync", save_safetensors),
    Peer("plain write + fsync", save_plain),
]
LOADERS = [
    Peer("torch.load", load_torch),
    Peer("DCP load (in place)", load_dcp),
    Peer("safetensors load", load_safetensors),
    Peer("floor, fresh memory", load_floor),
    Peer("floor, in place", load_floor_into),
    Peer("tsck checkout", load_tsck),
    Peer("tsck checkout into=", load_tsck_into),
]

"""Ways to save in the background, all to a store with a limited bandwidth: what the bench `loop` compares.

Each is what its library offers for this. `save` returns when the state may change, `wait` when all is durable. Peers write through `Paced`
files, at the rate that tsck is given as `rate_limit`; all of them fsync.
"""

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

import tensorstore_ck as tsck
from benches._peers import fsync_path
from benches._warmcopy import State
from tensorstore_ck.common.rate_limit import BURST_SECONDS


class Saver(Protocol):
    """One way."""

    def save(self, state: State, step: int) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class TsckSaver:
    def __init__(self, folder: Path, rate: float, budget_bytes: int, on_full: Any = "block") -> None:
        self._on_full = on_full
        self._store = tsck.open(folder / "store", create=True, cache_dir=folder / "cache", host_memory_bytes=budget_bytes, rate_limit=rate)

    def save(self, state: State, step: int) -> None:
        self._pending = self._store.put_snapshot_async(state, ref="bench", step=step, on_full=self._on_full)

    def wait(self) -> None:
        self._pending.wait()

    def close(self) -> None:
        self._store.close()


class Paced:
    """A file that takes so many bytes a second, with tsck's arithmetic: what was not used is kept for `BURST_SECONDS`."""

    def __init__(self, file: BinaryIO, rate: float) -> None:
        self._file = file
        self._rate = rate
        self._free_at = time.monotonic() - BURST_SECONDS

    def write(self, data: Any) -> int:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + memoryview(data).nbytes / self._rate
        if self._free_at > now:
            time.sleep(self._free_at - now)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TorchSaver:
    """`torch.save` of a cloned state, in a thread."""

    def __init__(self, folder: Path, rate: float) -> None:
        self._folder = folder
        self._rate = rate
        self._thread = threading.Thread()

    def save(self, state: State, step: int) -> None:
        cloned = {name: tensor.clone() for name, tensor in state.items()}
        self._thread = threading.Thread(target=self._write, args=(cloned, step))
        self._thread.start()

    def _write(self, state: State, step: int) -> None:
        path = self._folder / f"{step}.pt"
        with path.open("wb", buffering=0) as file:
            torch.save({"state": state, "step": step}, Paced(cast(BinaryIO, file), self._rate))
        fsync_path(path)

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        pass


class PacedFileSystem(FileSystem):
    def __init__(self, rate: float) -> None:
        self._rate = rate

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            yield Paced(cast(BinaryIO, stream), self._rate)


class DcpSaver:
    """`dcp.async_save`; with `kept`, its stager is kept from save to save, and so are its buffers."""

    def __init__(self, folder: Path, rate: float, kind: AsyncCheckpointerType, *, kept: bool) -> None:
        self._folder = folder
        self._rate = rate
        self._kind = kind
        is_shared = kind == AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(False, is_shared, False, False)) if kept else None
        self._done: Future[Any] = Future()
        self._done.set_result(None)
        if is_shared:
            dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)

    def save(self, state: State, step: int) -> None:
        writer = FileSystemWriter(self._folder / f"{step}", sync_files=True)
        writer.fs = PacedFileSystem(self._rate)
        answer = async_save(
            {"state": state, "step": step},
            storage_writer=writer,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            no_dist=self._kind == AsyncCheckpointerType.THREAD,
        )
        self._done = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer

    def wait(self) -> None:
        self._done.result()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

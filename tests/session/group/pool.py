"""Real processes, eight by default, that are the ranks of a gloo group, and do what a test asks: each calls the same function.

They are forked once from a server that has imported torch, so a call costs milliseconds. Each also is in a group of the first n ranks,
for several n. Between tests they are suspended: each thread of gloo looks for news a hundred times a second, and all those that wait would
take a third of two cores.
"""

import dataclasses
import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.format.store_config import CONFIG_NAME, new_config
from tests.effort import PATIENCE_SECONDS
from tests.session.group.boxed import boxes_of

os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
"""torch's stores ask a name server for the name of each client, ::ffff:127.0.0.1: a lost answer would cost 5 s. Children inherit it."""

RANKS: Final = 8
SIZES: Final = (1, 2, 3, 4, 8)
TIMEOUT_SECONDS: Final = PATIENCE_SECONDS / 2
"""Of saves and restores, which say why before the test gives up."""
BLOCK_BYTES: Final = 4096
IMPORTED: Final = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "tensorstore_ck.state", "lmdb"]

GROUPS: dict[int, Any] = {}
"""In a rank's process: n -> the group of ranks 0 to n - 1."""


class RemoteError(Exception):
    """A rank raised; the message has its traceback."""


def rank_process(function: Callable[..., object], *args: Any, daemon: bool | None = None) -> ForkServerProcess:
    """One that is not started yet: it will be forked from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context.Process(target=function, args=args, daemon=daemon)


class Pool:
    """The ranks; a context manager."""

    def __init__(self, ranks: int = RANKS) -> None:
        self._ranks = ranks

    def __enter__(self) -> "Pool":
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self._ranks):
            here, there = multiprocessing.Pipe()
            process = rank_process(_serve, rank, self._ranks, self._store.port, there, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a rank that was killed
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()

    def suspend(self) -> None:
        """The ranks do nothing, and answer nothing, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """After `suspend`; otherwise it changes nothing."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid or 0, number)

    def kill(self) -> None:
        """What a rank that hangs or is gone leaves."""
        for process in self._processes:
            process.kill()

    def ask(self, function: Callable[..., Any], *args: Any, ranks: int = RANKS) -> list[Any]:
        """What `function` returned or raised on each of the first ranks."""
        for pipe in self._pipes[:ranks]:
            pipe.send((function, args))
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            assert pipe.poll(PATIENCE_SECONDS), f"rank {rank} does not answer; those before it answered {answers}"
            try:
                answers.append(pipe.recv())
            except EOFError as exc:  # it was killed
                answers.append(exc)
        return answers

    def ask_one(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """As `ask`, one rank."""
        self._pipes[rank].send((function, args))
        assert self._pipes[rank].poll(PATIENCE_SECONDS), f"rank {rank} does not answer"
        return self._pipes[rank].recv()

    def run(self, function: Callable[..., Any], *args: Any, ranks: int = RANKS) -> list[Any]:
        """What `function` returned on each of the first ranks.

        Raises:
            RemoteError: a rank raised.
        """
        answers = self.ask(function, *args, ranks=ranks)
        for rank, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                raise RemoteError(f"rank {rank}: {''.join(answer.__notes__)}")
        return answers


def _serve(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    faulthandler.enable()  # a rank that crashes says where
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    timeout = timedelta(seconds=PATIENCE_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    sizes = [size for size in SIZES if size < ranks]
    GROUPS.update({ranks: dist.group.WORLD} | {size: dist.new_group(range(size)) for size in sizes})
    while (asked := pipe.recv()) is not None:
        function, args = asked
        try:
            answer = function(*args)
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            exc.add_note(traceback.format_exc())
            answer = exc
        try:
            pipe.send(answer)
        except Exception as exc:  # noqa: BLE001 - it cannot be pickled
            pipe.send(RuntimeError(f"{answer!r}: {exc!r}"))
    os._exit(0)  # nothing to say goodbye to


STORES: dict[tuple[str, int], tsck.Store] = {}
"""In a rank's process. They stay open: a clone of a c10d TCPStore, which each makes, may take seconds to connect."""


def opened(folder: str, ranks: int, *, cache: int | None = None) -> tsck.Store:
    """This rank's handle for what it does in the group of the first `ranks`: handles of one group must have seen the same."""
    if (folder, ranks) not in STORES:
        number = dist.get_rank() if cache is None else cache
        STORES[folder, ranks] = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{number}")
    return STORES[folder, ranks]


def make_store(folder: Path, block_bytes: int = BLOCK_BYTES) -> None:
    """With small blocks, so that small tensors have many."""
    backend = LocalBackend(str(folder / "store"))
    config = dataclasses.replace(new_config(exclusive_create=True), block_bytes=block_bytes)
    backend.create(CONFIG_NAME, config.encode())
    backend.close()


def local_of(value: Any) -> list[torch.Tensor]:
    """The memory in which a share lies."""
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, tsck.FlatShard):
        return [value.local]
    if isinstance(value, tsck.Box | tsck.Boxes):
        return [box.local for box in (value.boxes if isinstance(value, tsck.Boxes) else [value])]
    if hasattr(value, "global_shape"):
        return boxes_of(value)
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]

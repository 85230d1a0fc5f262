"""Megatron-core's torch_dist and the backend "tsck" when a rank of two is killed: `python -m benches.trainers_megatron /tmp/bench`.

In the environment of `make test-apart`; see `_rank_kills`. As in Megatron-LM, rank 0 writes ``latest_checkpointed_iteration.txt`` after a
save, and a job loads what that names. torch_dist's writer processes are threads here, so that they die with their rank.
"""
# ruff: noqa: I001 - on_cpu comes before anything that imports Megatron

import hashlib
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from tests.integrations.megatron import on_cpu  # noqa: F401

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

import tensorstore_ck as tsck
from benches._rank_kills import SAVED_AFTER, Job, Strike, kill_table, watched_files
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.end_to_end.crash.faulty import FaultyBackend
from tests.integrations.megatron import gpt

LAYOUT: Final = "fully_reshardable"
TRACKER: Final = "latest_checkpointed_iteration.txt"


def _state_of(job: gpt.Job) -> str:
    found = hashlib.sha256(str(job.step).encode())
    tensors = [*job.model.parameters()]
    for optimizer in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        for group in optimizer.optimizer.param_groups:
            for each in group["params"]:
                state = optimizer.optimizer.state[each]
                tensors += [each, *(state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)]
    for each in tensors:
        found.update(each.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _writers_are_threads() -> Iterator[None]:
    threads = SimpleNamespace(Process=threading.Thread, Queue=queue.Queue, JoinableQueue=queue.Queue)
    others = filesystem_async.mp.get_context
    with patch.object(filesystem_async.mp, "get_context", lambda method: threads if method == "fork" else others(method)):
        yield


def _native_save(job: gpt.Job, out: Path) -> None:
    folder = out / f"iter_{job.step:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with _writers_are_threads():
        dist_checkpointing.save(job.sharded_state_dict(), str(folder), ("torch_dist", 1), content_metadata=dict(job.metadata))
    dist.barrier()
    if dist.get_rank() == 0:
        with open(out / TRACKER, "w") as file:  # as Megatron-LM does
            file.write(str(job.step))


def _saves(job: gpt.Job, folder: Path, strike: Strike, save: Any) -> dict[str, str]:
    states = {}
    for _ in range(SAVED_AFTER[-1]):
        job.train()
        states[str(job.step)] = _state_of(job)
        if job.step == SAVED_AFTER[-1]:
            with watched_files(folder / "out", strike), strike.counting():
                save(job, folder / "out")
        elif job.step in SAVED_AFTER:
            save(job, folder / "out")
    return states


def _native_job() -> Job:
    def save(folder: Path, strike: Strike) -> dict[str, str]:
        gpt.join(1, 1)
        return _saves(gpt.Job(1, 1, LAYOUT), folder, strike, _native_save)

    def load(folder: Path) -> tuple[int, str]:
        gpt.join(1, 1)
        job = gpt.Job(1, 1, LAYOUT)
        if (folder / "out" / TRACKER).exists():
            job.load(folder / "out" / f"iter_{int((folder / 'out' / TRACKER).read_text()):07d}")
        return job.step, _state_of(job)

    return Job("Megatron-core, torch_dist", save, load)


def _store_job() -> Job:
    def registered(folder: Path, strike: Strike) -> Any:
        gpt.join(1, 1)
        local = LocalBackend(str(folder / "store"))
        config = read_config(local) or init_store(local)
        store = Store(make_engine(FaultyBackend(local, strike, atomic_put=False), config, MemoryTable()))
        return tsck.megatron.register(store, ref="runs/gpt")

    def save(folder: Path, strike: Strike) -> dict[str, str]:
        strategy = registered(folder, strike).save
        return _saves(gpt.Job(1, 1, LAYOUT), folder, strike, lambda job, out: job.save(out, strategy))

    def load(folder: Path) -> tuple[int, str]:
        found = registered(folder, Strike(None)).write_folder(folder / "out")
        job = gpt.Job(1, 1, LAYOUT)
        if found is not None:
            job.load(found)
        return job.step, _state_of(job)

    return Job("tensorstore_ck.megatron", save, load)


if __name__ == "__main__":
    kill_table([_native_job(), _store_job()], Path(sys.argv[1]) / "kills")

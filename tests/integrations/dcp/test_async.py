"""`dcp.async_save`: what is stored is the state of the moment when it returns."""

import multiprocessing
import os
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Writer
from tests.effort import PATIENCE_SECONDS
from tests.integrations.dcp.dcp_states import causes
from tests.session.group.pool import GROUPS, Pool, rank_process

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS = 2


class Odd:
    """Nothing that could be stored."""


def changing() -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(RANKS), _init_backend=False)
    weight = distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)], src_data_rank=None)
    return {"model": {"w": weight, "b": torch.zeros(5)}, "step": 0, "list": [1, {"a": torch.zeros(2)}], "tied": None}


def change(state: dict[str, Any], step: int) -> None:
    state["model"]["w"].to_local().fill_(step)
    state["model"]["b"].fill_(step)
    state["list"][1]["a"].fill_(step)
    state["tied"] = state["model"]["b"]
    state["step"] = step


def save_in_threads(folder: str, stager: str | None, ref: str) -> list[str]:
    """Three saves, of which each is waited for when the next begins; then one that is refused, and one after that."""
    state = changing()
    writer = Writer(f"{folder}/store", ref, cache_dir=f"{folder}/cache-{dist.get_rank()}")
    options = {"none": None, "plain": (False, False, False, False), "shared": (False, True, False, False)}[stager or "none"]
    async_stager = DefaultStager(StagingOptions(*options)) if options is not None else None
    last = None
    for step in (1, 2, 3):
        change(state, step)
        if last is not None:
            last.result()
        last = begin(state, writer, step, async_stager)
        change(state, -1)
    assert last is not None
    last.result()
    state["odd"] = Odd()
    try:
        begin(state, writer, 99, None).result()
    except CheckpointException as exc:
        refused = [type(cause).__name__ for cause in causes(exc)]
    del state["odd"]
    change(state, 4)
    begin(state, writer, 4, async_stager).result()
    if async_stager is not None:
        async_stager.close()
    return refused


def begin(state: dict[str, Any], writer: Writer, step: int, stager: DefaultStager | None) -> Any:
    found = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"step-{step}", async_stager=stager, process_group=GROUPS[RANKS])
    if isinstance(found, AsyncSaveResponse):
        found.staging_completion.result()
        return found.upload_completion
    return found


OLD = torch.__version__ < "2.13"
"""Its stager cannot copy DTensors."""


@pytest.mark.parametrize("stager", [None, *([] if OLD else ["plain", "shared"])])
def test_in_a_thread(pool: Pool, folder: Path, stager: str | None) -> None:
    ref = f"thread-{stager}"
    assert pool.run(save_in_threads, str(folder), stager, ref, ranks=RANKS) in (
        [["UnsupportedValueError"]] * RANKS,
        [["UnsupportedValueError"] * RANKS] * RANKS,
    )
    with tsck.open(folder / "store", cache_dir=folder / "cache-0") as store:
        check(store, ref, (1, 2, 3, 4))


def check(store: tsck.Store, ref: str, steps: tuple[int, ...]) -> None:
    assert [snapshot.step for snapshot in store.log(ref)] == list(reversed(steps))
    for step in steps:
        found = store.checkout(f"{ref}@{step}")
        assert found["step"] == step
        assert torch.equal(found["model"]["w"], torch.full((64, 8), float(step)))
        assert torch.equal(found["model"]["b"], torch.full((5,), float(step)))
    assert store.fsck(read_data=True).ok


def test_saves_of_one_writer_that_overlap(tmp_path: Path) -> None:
    """No matter which are refused: what is published is what its step says."""
    writer = Writer(tmp_path / "store", "job", no_sync=True)
    futures = [
        dcp.async_save({"w": torch.full((100, 100), float(step))}, storage_writer=writer, checkpoint_id=f"step-{step}", no_dist=True)
        for step in range(6)
    ]
    for future in futures:
        assert isinstance(future, Future)
        error = future.exception()
        assert error is None or all(isinstance(cause, tsck.StoreError) for cause in causes(error)), error
    with tsck.open(tmp_path / "store") as store:
        for snapshot in store.log("job"):
            assert store.checkout(snapshot.root)["w"][0, 0].item() == snapshot.step


SAVES = 3


def save_in_a_process(rank: int, folder: str, pipe: Connection) -> None:
    """Says how many files the process that saves has open after each save, and why one save was refused."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = dist.FileStore(f"{folder}/ranks", RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_SECONDS))
    writer = Writer(f"{folder}/store", "job", cache_dir=f"{folder}/cache-{rank}")
    mesh = DeviceMesh("cpu", torch.arange(RANKS))
    weight = distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)], src_data_rank=None)
    state: dict[str, Any] = {"model": {"w": weight, "b": torch.zeros(5)}, "step": 0, "rng": (3, (1, 2), None), f"own_{rank}": [rank]}

    def save(step: int) -> Any:
        kind = AsyncCheckpointerType.PROCESS
        return dcp.async_save(state, storage_writer=writer, checkpoint_id=f"step-{step}", async_checkpointer_type=kind)

    def fill(step: int) -> None:
        weight.to_local().fill_(step)
        state["model"]["b"].fill_(step)
        state["step"] = step

    descriptors = []
    for step in range(1, SAVES + 1):
        fill(step)
        future = save(step)
        fill(-1)  # already the next step
        future.result()
        process = _async_process_executor._CHECKPOINT_PROCESS
        assert process is not None
        links = [os.readlink(path) for path in Path(f"/proc/{process._save_process.pid}/fd").iterdir()]
        descriptors.append(
            sum(not link.startswith("/dev/shm/torch_") for link in links)
        )  # Python frees torch's own when it looks for garbage
    state[f"own_{rank}"] = [torch.Generator()] if rank == 1 else [rank]
    with pytest.raises(CheckpointException) as raised:
        save(99).result()
    state[f"own_{rank}"] = [rank]
    save(SAVES + 1).result()
    pipe.send((descriptors, str(raised.value)))
    dist.barrier()
    os._exit(0)


@pytest.mark.slow  # each rank starts a process that imports torch
def test_in_a_process(tmp_path: Path) -> None:
    """Each save has a copy of the writer."""
    ranks = []
    for rank in range(RANKS):
        here, there = multiprocessing.Pipe()
        process = rank_process(save_in_a_process, rank, str(tmp_path), there)
        process.start()
        there.close()
        ranks.append((process, here))
    try:
        for rank, (_, pipe) in enumerate(ranks):
            assert pipe.poll(PATIENCE_SECONDS), f"rank {rank} does not answer"
            descriptors, refused = pipe.recv()
            assert descriptors[-1] <= descriptors[1] + 1, f"rank {rank} keeps files open"
            assert "own_1" in refused
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-0") as store:
        assert [snapshot.step for snapshot in store.log("job")] == [4, 3, 2, 1]
        for step in range(1, SAVES + 1):
            found = store.checkout(f"job@{step}")
            assert (found["step"], found["rng"], found["own_0"], found["own_1"]) == (step, (3, (1, 2), None), [0], [1])
            assert torch.equal(found["model"]["w"], torch.full((64, 8), float(step)))
            assert torch.equal(found["model"]["b"], torch.full((5,), float(step)))
        assert store.fsck(read_data=True).ok

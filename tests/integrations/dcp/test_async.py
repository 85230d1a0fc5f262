"""`dcp.async_save`: what is stored is the state of the moment when it returns."""

import json
import subprocess
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Writer
from tests.effort import PATIENCE_SECONDS
from tests.integrations.dcp.dcp_states import causes
from tests.session.group.pool import GROUPS, Pool

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


def test_in_a_process(tmp_path: Path) -> None:
    """Each save has a copy of the writer."""
    command = [sys.executable, str(Path(__file__).with_name("dcp_process.py"))]
    with ExitStack() as running:
        ranks = []
        for rank in range(RANKS):
            process = subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            running.enter_context(process)
            running.callback(process.kill)
            ranks.append(process)
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, err
            said = json.loads(out.splitlines()[-1])
            assert said["descriptors"][-1] <= said["descriptors"][1] + 1, f"rank {rank} keeps files open"
            assert "own_1" in said["refused"]
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-0") as store:
        assert [snapshot.step for snapshot in store.log("job")] == [6, 5, 4, 3, 2, 1]
        for step in range(1, 6):
            found = store.checkout(f"job@{step}")
            assert (found["step"], found["rng"], found["own_0"], found["own_1"]) == (step, (3, (1, 2), None), [0], [1])
            assert torch.equal(found["model"]["w"], torch.full((64, 8), float(step)))
            assert torch.equal(found["model"]["b"], torch.full((5,), float(step)))
        assert store.fsck(read_data=True).ok

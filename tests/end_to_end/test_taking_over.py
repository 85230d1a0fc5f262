"""For every way to save: a reader does not take the ref over, and a job that lost its ref learns who has it and how to continue."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.end_to_end.test_fencing import printed_commands, run_printed
from tests.group_of_one import group_of_one

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Open = Callable[[], tsck.Store]
Put = Callable[[tsck.Store, int], object]
LOWER = "step 1 is lower than step 1000"


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((5000,), float(number))}


def put_alone(store: tsck.Store, step: int) -> object:
    return store.put_snapshot(state(step), ref="job", step=step)


def put_beside(store: tsck.Store, step: int) -> object:
    return store.put_snapshot_async(state(step), ref="job", step=step).wait()


def put_in_group(store: tsck.Store, step: int) -> object:
    return store.put_snapshot(state(step), ref="job", step=step, group=dist.group.WORLD)


def put_beside_in_group(store: tsck.Store, step: int) -> object:
    return store.put_snapshot_async(state(step), ref="job", step=step, group=dist.group.WORLD).wait()


def put_by_dcp(store: tsck.Store, step: int) -> object:
    return dcp.save(state(step), storage_writer=Writer(store, "job"), checkpoint_id=f"step-{step}", no_dist=True)


def put_training(store: tsck.Store, step: int) -> object:
    return tsck.TrainingState(model=nn.Linear(3, 3)).put(store, ref="job", step=step)


WAYS: dict[str, tuple[Put, bool]] = {
    "staged beside": (put_beside, True),
    "group beside": (put_beside_in_group, False),
    "group staged": (put_in_group, True),
    "dcp": (put_by_dcp, False),
    "training": (put_training, False),
}
"""How to save, and whether there is a staging disk. Alone, with neither: tests/end_to_end/test_fencing.py."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Put, bool]]:
    put, staged = WAYS[request.param]
    if put not in (put_in_group, put_beside_in_group):
        yield put, staged
        return
    with group_of_one():
        yield put, staged


@pytest.fixture
def put(way: tuple[Put, bool]) -> Put:
    return way[0]


@pytest.fixture
def open_store(way: tuple[Put, bool], tmp_path: Path) -> Iterator[Open]:
    """Opens the store as one more process would, on a host of its own."""
    opened: list[tsck.Store] = []

    def open_one() -> tsck.Store:
        number = len(opened)
        staging = tmp_path / f"staging-{number}" if way[1] else None
        opened.append(tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / f"cache-{number}", staging=staging))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def test_a_reader_takes_nothing_over_and_the_job_learns_how_to_go_on(put: Put, open_store: Open) -> None:
    job, notebook = open_store(), open_store()
    put(job, 1000)
    (first,) = job.log("job")
    notebook.checkout("job")
    with pytest.raises((tsck.StoreError, dcp.api.CheckpointException), match=LOWER):
        put(notebook, 1)
    taken = notebook.put_snapshot(state(2), ref="job", step=1002)
    with pytest.raises((tsck.StoreError, dcp.api.CheckpointException)) as caught:
        put(job, 1001)
    said = str(caught.value)
    require_helpful(said, 1002)
    run_printed(said)
    assert job.resolve(f"job-{taken.root[:8]}").root == taken.root
    put(job, 1003)
    assert [snapshot.step for snapshot in job.log("job")] == [1003, 1000, 1002, 1000]
    assert job.resolve("job").parent == first.root
    notebook.checkout("job@1000")
    put(notebook, 5)
    put(notebook, 3)
    assert [snapshot.step for snapshot in job.log("job")][:2] == [3, 5]
    assert job.fsck(read_data=True).ok


@pytest.mark.parametrize("way", ["group beside", "dcp"], indirect=True)
def test_the_ref_is_moved_while_the_save_is_under_way(put: Put, open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = open_store(), open_store()
    put(job, 1)
    other.checkout("job")
    write = job.engine.backend.put

    def move_first(name: str, data: Any) -> None:
        if name.startswith("snapshots/") and len(other.log("job")) == 1:
            other.put_snapshot(state(7), ref="job", step=7)
        write(name, data)

    monkeypatch.setattr(job.engine.backend, "put", move_first, raising=False)
    with pytest.raises((tsck.StoreError, dcp.api.CheckpointException)) as caught:
        put(job, 2)
    require_helpful(str(caught.value), 7)
    run_printed(str(caught.value))
    put(job, 3)
    assert [snapshot.step for snapshot in job.log("job")] == [3, 1, 7, 1]


def require_helpful(said: str, step: int) -> None:
    assert re.search(rf"moved it \(to step {step}, by \S+@\S+:\d+ at [-0-9]+ [:0-9]+ UTC\)", said), said
    assert [words[1] for words in printed_commands(said)] == ["branch", "reset"]


@pytest.mark.parametrize("way", ["dcp"], indirect=True)
def test_a_reader_of_dcp_restores_too(put: Put, open_store: Open) -> None:
    job, notebook = open_store(), open_store()
    put(job, 1000)
    dcp.load(state(0), storage_reader=Reader(notebook, "job"), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match=LOWER):
        put(notebook, 1)
    with pytest.raises(tsck.InvalidOptionError, match=LOWER):
        put_alone(notebook, 1)
    dcp.save(state(1), storage_writer=Writer(notebook, "own"), checkpoint_id="step-1", no_dist=True)
    assert notebook.resolve("own").parent is None
    dcp.load(state(0), storage_reader=Reader(notebook, "job"), checkpoint_id="step-1000", no_dist=True)


@pytest.mark.parametrize("way", ["training"], indirect=True)
def test_a_checkpointer_ends_and_the_job_is_unharmed(open_store: Open) -> None:
    job, notebook = open_store(), open_store()
    put_alone(job, 1000)
    own = notebook.checkout("job")
    with pytest.raises(tsck.InvalidOptionError, match=LOWER):
        tsck.Checkpointer(notebook, own, ref="job", when=tsck.every_steps(1), asynchronous=False).step(1)
    ckpt = tsck.Checkpointer(notebook, own, ref="job", when=tsck.every_steps(1), asynchronous=False)
    assert ckpt.resume() is not None
    put_alone(job, 1001)
    with pytest.raises(tsck.ConflictError, match=r"moved it \(to step 1001, by "):
        ckpt.step(1001)
    assert [snapshot.step for snapshot in job.log("job")] == [1001, 1000]


@pytest.mark.parametrize("way", ["training"], indirect=True)
def test_a_copy_says_who_moved_the_ref(open_store: Open, tmp_path: Path) -> None:
    source = open_store()
    put_alone(source, 1)
    with tsck.open(tmp_path / "copy", create=True, cache_dir=tmp_path / "copy-cache") as target:
        tsck.copy(source, target)
        target.checkout("job")
        theirs = put_alone(target, 2)
        put_alone(source, 3)
        with pytest.raises(tsck.ConflictError, match=r"\(to step 2, by \S+ at .* UTC\), which the source never had") as caught:
            tsck.copy(source, target)
        run_printed(str(caught.value))
        tsck.copy(source, target)
        assert target.resolve("job").step == 3
        assert isinstance(theirs, tsck.Snapshot)
        assert target.resolve(f"job-{theirs.root[:8]}").root == theirs.root

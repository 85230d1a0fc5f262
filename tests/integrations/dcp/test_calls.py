"""How DCP is called: several saves with cached plans, checkpoint ids, options, copies of a Writer."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import blank, causes, clear_plan_cache, difference

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# --- the planner's cache ------------------------------------------------------------------------------------------------


@pytest.fixture
def cached() -> Iterator[Callable[[], SavePlanner]]:
    yield lambda: DefaultSavePlanner(enable_plan_caching=True)
    clear_plan_cache()


def test_cached_plans(tmp_path: Path, cached: Callable[[], SavePlanner]) -> None:
    writer = Writer(tmp_path / "store", "job", no_sync=True)
    states: list[dict[str, Any]] = [
        {"w": torch.zeros(3), "step": 0},
        {"w": torch.ones(3), "step": 1},
        {"w": torch.ones(3), "step": 2, "more": [1, {"a": torch.ones(2)}]},
        {"w": torch.ones(3), "step": 3, "more": [1, {"a": torch.zeros(2)}]},
        {"w": torch.ones(4), "step": 3},
        {"w": 5, "step": 3},
        {"step": 3, "w": 5},
        {},
        {"w": 5},
    ]
    for state in states:
        dcp.save(state, storage_writer=writer, planner=cached(), no_dist=True)
        found = blank(state)
        dcp.load(found, storage_reader=Reader(tmp_path / "store", "job"), no_dist=True)
        assert difference(state, found) is None
        with tsck.open(tmp_path / "store") as store:
            assert difference(state, store.checkout("job")) is None


def test_cached_plans_of_other_dtypes(tmp_path: Path, cached: Callable[[], SavePlanner]) -> None:
    """DCP does not compare dtypes: its own files would be read as another dtype."""
    writer = Writer(tmp_path / "store", "job", no_sync=True)
    dcp.save({"w": torch.zeros(3)}, storage_writer=writer, planner=cached(), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match=r"the planner planned float32 and gave torch\.float64"):
        dcp.save({"w": torch.zeros(3, dtype=torch.float64)}, storage_writer=writer, planner=cached(), no_dist=True)


def test_cached_plans_with_another_writer_in_between(tmp_path: Path, cached: Callable[[], SavePlanner]) -> None:
    writer = Writer(tmp_path / "store", "job", no_sync=True)
    state = {"w": torch.zeros(3), "step": 0}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "files"), planner=cached(), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="made for another storage writer"):
        dcp.save(state, storage_writer=writer, planner=cached(), no_dist=True)
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(), no_dist=True)
    other = Writer(tmp_path / "other", "job", no_sync=True)
    changed = {"w": torch.zeros(3), "step": 0, "new": 1}
    dcp.save(changed, storage_writer=writer, planner=cached(), no_dist=True)
    dcp.save(changed, storage_writer=other, planner=cached(), no_dist=True)
    dcp.save(changed, storage_writer=writer, planner=cached(), no_dist=True)
    for store in ("store", "other"):
        loaded = {"w": torch.ones(3), "step": 1, "new": 2}
        dcp.load(loaded, storage_reader=Reader(tmp_path / store, "job"), no_dist=True)
        assert difference(changed, loaded) is None


# --- names and ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "checkpoint_id", "expected"),
    [
        (None, "runs/gpt@7", ("runs/gpt", 7)),
        (None, "runs/gpt", ("runs/gpt", None)),
        (None, Path("runs/gpt@7"), ("runs/gpt", 7)),
        ("runs/gpt", "/somewhere/step-7", ("runs/gpt", 7)),
        ("runs/gpt", "step-000007/", ("runs/gpt", 7)),
        ("runs/gpt", Path("/somewhere/step-7"), ("runs/gpt", 7)),
        ("runs/gpt", "7", ("runs/gpt", 7)),
        ("runs/gpt", "last", ("runs/gpt", None)),
        ("runs/gpt", None, ("runs/gpt", None)),
    ],
)
def test_checkpoint_ids(tmp_path: Path, ref: str | None, checkpoint_id: Any, expected: tuple[str, int | None]) -> None:
    writer = Writer(tmp_path / "store", ref, no_sync=True)
    dcp.save({"a": 1}, storage_writer=writer, checkpoint_id=checkpoint_id, no_dist=True)
    assert writer.snapshot is not None
    assert (writer.snapshot.ref, writer.snapshot.step) == expected
    state = {"a": 0}
    dcp.load(state, storage_reader=Reader(tmp_path / "store", ref), checkpoint_id=checkpoint_id, no_dist=True)
    assert state == {"a": 1}


@pytest.mark.parametrize("checkpoint_id", [None, "runs/gpt@x", "runs/gpt@", "a@1@2", "", "/tmp/x", "-", "runs/gpt~1"])
def test_ids_that_say_nothing(tmp_path: Path, checkpoint_id: str | None) -> None:
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.save({"a": 1}, storage_writer=Writer(tmp_path / "store"), checkpoint_id=checkpoint_id, no_dist=True)
    assert all(isinstance(cause, tsck.InputError) for cause in causes(raised.value)), causes(raised.value)


@pytest.mark.parametrize("step", [-1, 2**70])
def test_steps_that_are_none(tmp_path: Path, step: int) -> None:
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.save({"a": 1}, storage_writer=Writer(tmp_path / "store", "job", step=step), no_dist=True)
    assert [type(cause) for cause in causes(raised.value)] == [tsck.InvalidOptionError]


def test_without_collectives(tmp_path: Path) -> None:
    with pytest.raises((tsck.InvalidOptionError, dcp.api.CheckpointException), match="use_collectives"):
        dcp.save({"a": 1}, storage_writer=Writer(tmp_path / "store", "job"), no_dist=True, use_collectives=False)


def test_pickled(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "store", "job", metrics={"loss": 2.0}, metadata={"by": "me"}, no_sync=True)
    dcp.save({"a": 1}, storage_writer=writer, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save({"a": torch.eye(2).to_sparse()}, storage_writer=writer, no_dist=True)
    again = pickle.loads(pickle.dumps(writer))
    dcp.save({"a": 2}, storage_writer=again, checkpoint_id="step-3", no_dist=True)
    assert again.snapshot.metrics == {"loss": 2.0}
    with tsck.open(tmp_path / "store") as store:
        assert store.checkout("job@3") == {"a": 2}
        with pytest.raises(tsck.InvalidOptionError, match="open Store"):
            pickle.dumps(Writer(store, "job"))


def test_a_copy_goes_on_from_where_it_finds_the_branch(tmp_path: Path) -> None:
    """As with `AsyncCheckpointerType.PROCESS`, where each save has a copy of the writer."""
    writer = Writer(tmp_path / "store", "job", no_sync=True)
    dcp.save({"a": 1}, storage_writer=writer, no_dist=True)
    copy = pickle.loads(pickle.dumps(writer))
    dcp.save({"a": 2}, storage_writer=Writer(tmp_path / "store", "job"), no_dist=True)
    dcp.save({"a": 3}, storage_writer=copy, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.save({"a": 4}, storage_writer=writer, no_dist=True)
    assert [type(cause) for cause in causes(raised.value)] == [tsck.ConflictError]

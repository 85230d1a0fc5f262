"""How DCP is called; a save by it is one of the store handle's saves: after those in progress, with their events and checks."""

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.free_space import MinFree, Space
from tensorstore_ck.engine.write.suspicious_save import SuspiciousSaveWarning
from tensorstore_ck.errors import BackendUnavailableError, NoSpaceError
from tensorstore_ck.integrations.dcp import Reader, Writer
from tensorstore_ck.integrations.dcp.dcp_save import Begun, DcpSave
from tests.integrations.dcp.dcp_states import blank, causes, clear_plan_cache, difference
from tests.integrations.dcp.test_failures import sharded
from tests.session.group.pool import GROUPS, Pool, make_store
from tests.session.save.places import SIZE, Scene, put_beside, scene, state_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def place() -> Iterator[Scene]:
    with scene() as made:
        yield made


def save(place: Scene, step: int) -> None:
    dcp.save(state_of(step), storage_writer=Writer(place.store, "job"), checkpoint_id=f"step-{step}", no_dist=True)


def test_events(place: Scene) -> None:
    save(place, 1)
    (event,) = place.events
    assert (event.kind, event.address, event.rank) == ("published", "job@1", 0)
    assert event.fields["root"] == place.store.resolve("job@1").root
    assert event.fields["logical_bytes"] == SIZE
    assert int(event.fields["hashed_bytes"]) >= SIZE
    times = {name: float(event.fields[name]) for name in ("hash_seconds", "write_seconds", "commit_seconds")}
    assert all(0 < each <= float(event.fields["total_seconds"]) for each in times.values()), times


@pytest.mark.parametrize("step", ["open packs/", "put parts/", "append"])
def test_a_failure_is_an_event(place: Scene, step: str) -> None:
    """While the tensors are written, and in the coordinator's last step."""
    place.gate.fail(step, BackendUnavailableError("injected"))
    with pytest.raises(CheckpointException, match="injected"):
        save(place, 1)
    (event,) = place.events
    assert (event.kind, event.fields["error_kind"], event.fields["is_waited_for"]) == ("failed", BackendUnavailableError.kind, 1)
    save(place, 2)
    assert place.steps() == [2]
    assert len(place.told("failed")) == 1


def test_nothing_keeps_the_state_after_a_save(place: Scene) -> None:
    """Not even until Python's next collection: DCP's own process would hold a second state in shared memory."""
    gc.disable()
    gc.freeze()  # what is there is not looked at
    try:
        save(place, 1)
        assert not [found for found in gc.get_objects() if type(found) in (DcpSave, Begun)]
    finally:
        gc.unfreeze()
        gc.enable()


def test_it_comes_after_the_saves_in_progress(place: Scene) -> None:
    stop = place.gate.stop("append")
    put_beside(place.store, 1)
    stop.await_reached()
    thread = threading.Thread(target=save, args=(place, 2))
    thread.start()
    thread.join(0.2)
    stop.let_go()
    thread.join()
    assert place.steps() == [1, 2]


def test_it_raises_the_error_of_an_earlier_save(place: Scene) -> None:
    place.gate.fail("put parts/", BackendUnavailableError("injected"))
    put_beside(place.store, 1)
    with pytest.raises(CheckpointException, match="injected") as raised:
        save(place, 2)
    assert [type(cause) for cause in causes(raised.value)] == [BackendUnavailableError]
    save(place, 3)
    assert place.steps() == [3]


def test_a_refs_first_save_needs_free_space_for_all_its_bytes(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBackend, "space", lambda _: Space(SIZE, 2 * SIZE))
    place.store.engine.min_free = MinFree(size_bytes=1)
    with pytest.raises(CheckpointException, match="the save to 'job' needs") as raised:
        save(place, 1)
    assert [type(cause) for cause in causes(raised.value)] == [NoSpaceError]
    assert not [name for name in place.gate.calls_made if name.startswith("open packs/")]
    place.store.engine.min_free = MinFree()
    save(place, 1)
    place.store.engine.min_free = MinFree(size_bytes=1)
    save(place, 2)
    assert place.steps() == [1, 2]


# --- ranks --------------------------------------------------------------------------------------------------------------


def save_on_rank(folder: str, failing: bool) -> list[tuple[str, int]]:
    """The events of this rank; its share of the write rate must be half, and of the read rate that of a rank of the job."""
    rank, events = dist.get_rank(), list[tuple[str, int]]()
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", rate_limit="100MB", read_rate_limit="80MB") as store:
        store.on_event(lambda event: events.append((event.kind, event.rank)))
        if failing and rank == 1:
            store.engine.min_free = MinFree(size_bytes=1 << 60)
        with pytest.raises(CheckpointException) if failing else nullcontext() as raised:
            dcp.save({"w": sharded(600)}, storage_writer=Writer(store, "job"), process_group=GROUPS[2])
        if raised is not None:
            assert [type(cause) for cause in causes(raised.value)] == [NoSpaceError]
        else:
            dcp.load({"w": sharded(600)}, storage_reader=Reader(store, "job"), process_group=GROUPS[2])
            assert store.engine.reads.rate == 80e6 / dist.get_world_size()
        assert store.engine.writes.rate == 50e6
    return events


def test_ranks_share_the_write_rate_and_tell_their_own_failures(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    assert pool.run(save_on_rank, str(tmp_path), True, ranks=2) == [[], [("failed", 1)]]
    assert pool.run(save_on_rank, str(tmp_path), False, ranks=2) == [[("published", 0)], []]


# --- saves with the wrong content, which are reported like those of any other save --------------------------------------------------


def training_of(seed: int, count: int) -> dict[str, Any]:
    w = torch.randn(5000, generator=torch.Generator().manual_seed(seed))
    return {"model": {"w": w, "b": w[:5].clone()}, "optimizer": {"state": {"w": {"step": torch.tensor(float(count))}}}}


def save_training(store: tsck.Store, step: int, seed: int, count: int, **options: Any) -> None:
    dcp.save(training_of(seed, count), storage_writer=Writer(store, "job", **options), checkpoint_id=f"step-{step}", no_dist=True)


def test_wrong_content_of_one_process_is_reported(place: Scene) -> None:
    for step in (1, 2):
        save_training(place.store, step, step, step)
    with pytest.warns(SuspiciousSaveWarning, match="job@3: no floating tensor differs from the save before"):
        save_training(place.store, 3, 2, 3)
    with pytest.warns(SuspiciousSaveWarning, match=r"at 'optimizer' are at 3; .* makes 4"):
        save_training(place.store, 4, 4, 3)
    with pytest.raises(CheckpointException, match="nothing was published to 'job'"):
        save_training(place.store, 9, 4, 8, unchanged="error")
    save_training(place.store, 10, 4, 9, unchanged="ok")
    assert place.steps() == [1, 2, 3, 4, 10]


def test_a_tensor_that_changes_meanwhile(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    state, real = training_of(1, 1), place.gate.call

    def call(what: str, *args: Any, **options: Any) -> Any:
        if what.startswith("close"):
            thread = threading.Thread(target=lambda: state["model"]["w"].add_(1))
            thread.start()
            thread.join()
        return real(what, *args, **options)

    monkeypatch.setattr(place.gate, "call", call)
    with pytest.raises(CheckpointException, match=r"model\.w changed while being captured"):
        dcp.save(state, storage_writer=Writer(place.store, "job"), checkpoint_id="1", no_dist=True)
    assert place.steps() == []


def save_training_on_rank(folder: str, step: int, seeds: list[int], unchanged: str) -> str:
    rank = dist.get_rank()
    state = {f"rank-{rank}": training_of(seeds[rank], step)["model"], "same": torch.ones(10)}
    try:
        with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}") as store:
            writer = Writer(store, "job", unchanged=unchanged)  # type: ignore[arg-type]
            if store.log("job") if "job" in store.branches() else []:
                store.session.fence.adopt(store.engine.log.view(), "job")
            dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}", process_group=GROUPS[2])
    except CheckpointException as exc:
        return str(exc)
    return "published"


def test_wrong_content_of_many_ranks_is_reported(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    for step, seeds in ((1, [1, 1]), (2, [2, 2]), (3, [2, 3]), (4, [4, 3])):
        assert pool.run(save_training_on_rank, str(tmp_path), step, seeds, "error", ranks=2) == ["published"] * 2
    for said in pool.run(save_training_on_rank, str(tmp_path), 5, [4, 3], "error", ranks=2):
        assert "nothing was published to 'job': no floating tensor differs" in said


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


def test_ids_and_steps_that_say_nothing(tmp_path: Path) -> None:
    ids = (None, "runs/gpt@x", "runs/gpt@", "a@1@2", "", "/tmp/x", "-", "runs/gpt~1")
    wrong = [(each, Writer(tmp_path / "store"), tsck.InputError) for each in ids]
    wrong += [(None, Writer(tmp_path / "store", "job", step=step), tsck.InvalidOptionError) for step in (-1, 2**70)]
    for checkpoint_id, writer, expected in wrong:
        with pytest.raises(dcp.api.CheckpointException) as raised:
            dcp.save({"a": 1}, storage_writer=writer, checkpoint_id=checkpoint_id, no_dist=True)
        assert all(isinstance(cause, expected) for cause in causes(raised.value)), causes(raised.value)


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

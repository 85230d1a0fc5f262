"""A DCP save with the wrong content is reported like any other save."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tensorstore_ck as tsck
from tensorstore_ck.engine.write.suspicious_save import SuspiciousSaveWarning
from tensorstore_ck.integrations.dcp import Writer
from tests.session.group.pool import GROUPS, Pool, make_store
from tests.session.save.places import Scene, scene

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def place() -> Iterator[Scene]:
    with scene() as made:
        yield made


def state_of(seed: int, count: int) -> dict[str, Any]:
    w = torch.randn(5000, generator=torch.Generator().manual_seed(seed))
    return {"model": {"w": w, "b": w[:5].clone()}, "optimizer": {"state": {"w": {"step": torch.tensor(float(count))}}}}


def save(store: tsck.Store, step: int, seed: int, count: int, **options: Any) -> None:
    dcp.save(state_of(seed, count), storage_writer=Writer(store, "job", **options), checkpoint_id=f"step-{step}", no_dist=True)


def test_one_process(place: Scene) -> None:
    for step in (1, 2):
        save(place.store, step, step, step)
    with pytest.warns(SuspiciousSaveWarning, match="job@3: no floating tensor differs from the save before"):
        save(place.store, 3, 2, 3)
    with pytest.warns(SuspiciousSaveWarning, match=r"at 'optimizer' are at 3; .* makes 4"):
        save(place.store, 4, 4, 3)
    with pytest.raises(CheckpointException, match="nothing was published to 'job'"):
        save(place.store, 9, 4, 8, unchanged="error")
    save(place.store, 10, 4, 9, unchanged="ok")
    assert place.steps() == [1, 2, 3, 4, 10]


def test_a_tensor_that_changes_meanwhile(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    state, real = state_of(1, 1), place.gate.call

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


def save_on_rank(folder: str, step: int, seeds: list[int], unchanged: str) -> str:
    rank = dist.get_rank()
    state = {f"rank-{rank}": state_of(seeds[rank], step)["model"], "same": torch.ones(10)}
    try:
        with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}") as store:
            writer = Writer(store, "job", unchanged=unchanged)  # type: ignore[arg-type]
            if store.log("job") if "job" in store.branches() else []:
                store.session.fence.adopt(store.engine.log.view(), "job")
            dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}", process_group=GROUPS[2])
    except CheckpointException as exc:
        return str(exc)
    return "published"


def test_many_ranks(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    for step, seeds in ((1, [1, 1]), (2, [2, 2]), (3, [2, 3]), (4, [4, 3])):
        assert pool.run(save_on_rank, str(tmp_path), step, seeds, "error", ranks=2) == ["published"] * 2
    for said in pool.run(save_on_rank, str(tmp_path), 5, [4, 3], "error", ranks=2):
        assert "nothing was published to 'job': no floating tensor differs" in said

"""A restore in several moments: counters first, then weights and optimizer, and the generators last."""

import random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.engine.read import snapshot_reader
from tensorstore_ck.format.layout import decode_layout
from tensorstore_ck.training import TrainingState
from tests.group_of_one import group_of_one
from tests.training.job import Job, make, run

STEPS = 3


def _saved(store: tsck.Store) -> dict[str, object]:
    """A snapshot in the middle of a job, and what the job goes on with."""
    job = make()
    run(job, 4)
    job.training.put(store, ref="runs/job", step=4)
    return run(job, STEPS)


def _weights(job: Job) -> list[torch.Tensor]:
    return [each.clone() for each in job.model.state_dict().values()]


def _is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_a_restore_in_three_moments_goes_on_bit_for_bit(store: tsck.Store) -> None:
    expected = _saved(store)
    other = make(99)
    fresh, drawn = _weights(other), random.getstate()
    other.training.restore(store, "runs/job", parts=("extra", "scheduler", "scaler", "dataloader"))
    assert other.extra["seen"] == 4 * 8
    assert _is_same(_weights(other), fresh)
    assert not other.optimizer.state
    other.training.restore(store, "runs/job", parts=["model", "optimizer"])
    assert not _is_same(_weights(other), fresh)
    assert random.getstate() == drawn
    random.random()  # as loops do that skip batches
    other.training.restore(store, "runs/job", parts={"generators"})
    assert run(other, STEPS) == expected


def test_a_restore_opens_the_tables_of_a_snapshot_once(store: tsck.Store) -> None:
    _saved(store)
    with patch.object(snapshot_reader, "decode_layout", wraps=decode_layout) as decoded:
        make(99).training.restore(store, "runs/job")
    assert decoded.call_count == 1


def test_a_rank_opens_the_shared_tables_once_and_those_of_its_own_state_once(store: tsck.Store) -> None:
    job = make()
    with group_of_one():
        job.training.put(store, ref="runs/job", step=4, group=dist.group.WORLD)
        with patch.object(snapshot_reader, "decode_layout", wraps=decode_layout) as decoded:
            make(99).training.restore(store, "runs/job", group=dist.group.WORLD)
    assert decoded.call_count == 2


def test_plain_values_are_read_without_the_objects_of_the_job(store: tsck.Store) -> None:
    """Before a loop has made its model."""
    job = make()
    values = {"tokens": 77}
    TrainingState(model=job.model, optimizer=job.optimizer, rank_values=values).put(store, ref="runs/values", step=5)
    read: dict[str, object] = {"tokens": None}
    found = TrainingState(rank_values=read).restore(store, "runs/values", parts=("rank_values",))
    assert found is not None
    assert (found.step, read) == (5, {"tokens": 77})


def test_a_part_that_was_not_saved_is_an_error(store: tsck.Store) -> None:
    job = make()
    TrainingState(model=job.model).put(store, ref="runs/model")
    with pytest.raises(tsck.MismatchError, match="scheduler"):
        job.training.restore(store, "runs/model", parts=("model", "scheduler"))


@pytest.mark.parametrize("parts", ["model", ("model", "weights")])
def test_an_unknown_part_is_an_error(store: tsck.Store, parts: str | tuple[str, ...]) -> None:
    with pytest.raises(tsck.InvalidOptionError, match="parts= takes any of model, optimizer"):
        make().training.restore(store, "runs/job", parts=parts)


def test_a_part_that_does_not_fit_changes_nothing(store: tsck.Store) -> None:
    _saved(store)
    other = Job(width=8)
    fresh = _weights(other)
    with pytest.raises(tsck.MismatchError):
        other.training.restore(store, "runs/job", parts=("model",))
    assert _is_same(_weights(other), fresh)

"""What ranks that differ make of the snapshots that there are: all restore the same one, or all raise the same at once."""

from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tests.session.group.pool import Pool, make_store
from tests.training.checkpointing import resume_side

KINDS = ["TrainingState", "plain"]


@pytest.fixture
def saved(pool: Pool, tmp_path: Path, kind: str) -> str:
    make_store(tmp_path)
    pool.run(resume_side.put, str(tmp_path), kind, 2, [0.0] * 3, ranks=2)
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["plain"])
def test_a_read_that_fails_once_costs_no_snapshot(pool: Pool, saved: str, kind: str) -> None:
    for step, at, said in pool.run(resume_side.resume, saved, kind, 2, "away once", ranks=2):
        assert (step, at) == (3, 3.0)
        assert not any("was skipped" in each for each in said)


@pytest.mark.parametrize("kind", ["TrainingState", "TrainingState alone"])
def test_a_store_that_stays_away_is_no_damage(pool: Pool, saved: str, kind: str) -> None:
    for error in pool.ask(resume_side.resume, saved, kind, 2, "away for good", ranks=2):
        assert isinstance(error, tsck.RetryableError)
        assert "injected" in str(error)


@pytest.mark.parametrize("kind", [*KINDS, "TrainingState alone"])
def test_what_one_rank_finds_damaged_all_pass_over(pool: Pool, saved: str, kind: str) -> None:
    for step, at, said in pool.run(resume_side.resume, saved, kind, 2, "damage", ranks=2):
        assert (step, at) == (2, 2.0)
        (told,) = [each for each in said if "was skipped" in each]
        assert told.startswith("job@3 was skipped: ")
        assert told.endswith("; resuming from job@2 instead")
        assert "rank 1" in told
        assert "does not match its hash" in told


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_does_not_fit_on_one_rank(pool: Pool, saved: str, kind: str) -> None:
    for error in pool.ask(resume_side.resume, saved, kind, 2, "another model", ranks=2):
        assert isinstance(error, tsck.MismatchError), error
        assert "(4, 300)" in str(error) or "[4, 300]" in str(error)


def test_one_rank_that_does_not_take_its_state_ends_all(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    pool.run(resume_side.put, str(tmp_path), "TrainingState", 2, [0.0], ranks=2)
    for error in pool.ask(resume_side.resume, str(tmp_path), "TrainingState", 2, "a state that is not taken", ranks=2):
        assert isinstance(error, tsck.MismatchError)
        assert "dataloader does not take its state from the snapshot: KeyError: 'n'" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_before_a_broadcast_leaves_nobody_waiting(pool: Pool, saved: str, kind: str) -> None:
    for error, at in pool.run(resume_side.restore_with_broadcast, saved, kind, 2, ranks=2):
        assert "300" in error
        assert "within" not in error
        assert at == 3.0, "and the group goes on"


# --- drift ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def drifted(pool: Pool, tmp_path: Path) -> str:
    """Rank 1 went another way at step 3, and has what rank 0 has again at step 4."""
    make_store(tmp_path)
    pool.run(resume_side.put, str(tmp_path), "plain", 2, [0.0, 0.0, 0.5, 0.0], ranks=2)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        assert [each.mark for each in store.log("job")] == ["", "drift", "", ""]
    return str(tmp_path)


def test_drift_stops_a_resume_and_is_named(pool: Pool, drifted: str) -> None:
    """Also where a later save of the same run, which looks at a share of the replicas only, has found nothing."""
    for error in pool.ask(resume_side.resume, drifted, "plain", 2, "", ranks=2):
        assert isinstance(error, tsck.SnapshotMarkedBadError)
        said = str(error)
        assert "job@4 (step 4, " in said
        assert "comes from a run whose step 3 (" in said
        assert "is marked drift: rank " in said
        assert "'model.weight'" in said or "'weight'" in said
        assert "drift/job/rank-" in said
        assert 'resume(drift="accept")' in said
        assert 'resume(drift="skip")' in said


def test_drift_is_accepted_or_passed_over_where_that_is_said(pool: Pool, drifted: str) -> None:
    for step, at, said in pool.run(resume_side.resume, drifted, "plain", 2, "", "skip", ranks=2):
        assert (step, at) == (2, 2.0)
        assert len([each for each in said if "was skipped" in each]) == 2
    for step, at, _ in pool.run(resume_side.resume, drifted, "plain", 2, "", "accept", ranks=2):
        assert (step, at) == (4, 4.0)


def test_drift_that_is_neither_accepted_nor_passed_over(tmp_path: Path) -> None:
    with (
        tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store,
        tsck.Checkpointer(store, {}, ref="run", when=tsck.first()) as ckpt,
        pytest.raises(tsck.InvalidOptionError, match="drift must be"),
    ):
        ckpt.resume(drift="take")  # type: ignore[arg-type]

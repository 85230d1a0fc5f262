"""No run goes on for long without a snapshot and looks healthy: what ends it, when, and after the same step on all ranks."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.session.ref_fence import RefFence
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.session.group.pool import Pool, make_store
from tests.training.checkpointing import unsaved_side

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Job:
    """A run of one process, whose backend goes away."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.clock, self.faults = Clock(), Faults()
        staging = options.pop("staging", None)
        self.store = tsck.open(folder / "store", create=True, cache_dir=folder / "cache", codec="raw", staging=staging)
        engine = self.store.engine
        engine.backend = engine.log._writer.backend = FaultyBackend(engine.backend, self.faults, atomic_put=False)
        self.state: dict[str, Any] = {"w": torch.zeros(3000)}
        self.ckpt = tsck.Checkpointer(
            self.store,
            self.state,
            ref="run",
            when=tsck.every_steps(1),
            clock=self.clock,
            unchanged="ok",
            **{"timeout_seconds": 0.1, **options},
        )
        self.step = 0
        JOBS.append(self)

    def away(self, mode: str = "unavailable") -> None:
        self.faults.mode, self.faults.at, self.faults.persistent = mode, self.faults.calls + 1, True

    def back(self) -> None:
        self.faults.mode, self.faults.at, self.faults.persistent = "", 0, False

    def save(self, seconds: float = 0.0) -> list[str]:
        """Another step, so long after the one before; what was warned of."""
        self.clock.now += seconds
        self.step += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.ckpt.step(self.step)
            if self.store.engine.tier is None:
                self.store.session.queue.wait_idle()
        return [str(each.message) for each in caught]

    def steps(self) -> list[int | None]:
        return [snapshot.step for snapshot in self.store.log("run")]


JOBS: list[Job] = []
"""Of the test that runs."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while JOBS:
        job = JOBS.pop()
        job.back()
        job.store.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_will_repeat_ends_the_training_at_the_first_save(tmp_path: Path, asynchronous: bool) -> None:
    job = Job(tmp_path, asynchronous=asynchronous)
    job.state["thing"] = object()
    with pytest.raises(tsck.UnsupportedValueError, match="cannot store thing") as raised:
        job.save()
    assert "each save to 'run' would fail the same way" in raised.value.__notes__[-1]
    assert "nothing was published" in raised.value.__notes__[-1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_ref_that_another_job_took_over_ends_the_training(tmp_path: Path, asynchronous: bool) -> None:
    """Each later save would meet the same conflict."""
    job = Job(tmp_path, asynchronous=asynchronous)
    job.save()
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "other") as other:
        other.put_snapshot({"w": torch.ones(3)}, ref="run", step=2, expect=tsck.ANY)
    with pytest.raises(tsck.ConflictError):
        [job.save() for _ in range(2)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_quota_that_is_used_up_is_a_warning_until_somebody_raises_it(tmp_path: Path, asynchronous: bool) -> None:
    job = Job(tmp_path, asynchronous=asynchronous, max_unsaved_seconds=100)
    job.save()
    job.store.set_quota("*", refuse=1)
    said = [text for _ in range(3) for text in job.save(10)]
    assert any("was not saved: saves to 'run' are refused" in text and "the training continues" in text for text in said), said
    job.store.set_quota("*", refuse="1TB")
    job.save(10)
    assert job.save(10) == []
    job.store.set_quota("*", refuse=1)
    with pytest.raises(tsck.QuotaExceededError):
        [job.save(50) for _ in range(5)]


@pytest.mark.parametrize(("asynchronous", "mode"), [(True, "unavailable"), (False, "no-space")])
def test_a_transient_failure_is_a_warning_until_it_has_lasted_too_long(tmp_path: Path, asynchronous: bool, mode: str) -> None:
    job = Job(tmp_path, asynchronous=asynchronous, max_unsaved_seconds=100)
    job.save()
    job.save(10)
    job.away(mode)
    for _ in range(3):
        job.save(20)
    (said,) = job.save(20)
    assert "was not saved: " in said
    assert "the training continues" in said
    with pytest.raises(tsck.NoSpaceError if mode == "no-space" else tsck.BackendUnavailableError) as raised:
        [job.save(20) for _ in range(4)]
    assert "no snapshot of 'run' was published in the last 1" in str(raised.value)
    assert "max_unsaved_seconds is 100; the newest save failed: " in str(raised.value)
    assert "run@2" in str(raised.value)
    job.back()
    assert job.steps() == [2, 1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_published_save_ends_the_count(tmp_path: Path, asynchronous: bool) -> None:
    job = Job(tmp_path, asynchronous=asynchronous, max_unsaved_seconds=100)
    for _ in range(3):
        job.away()
        job.save(45)
        job.save(45)
        job.back()
        job.save(5)
        assert job.save() == []
    job.ckpt.close()
    assert job.steps() == [12, 11, 8, 7, 4, 3], "a save that failed costs none of those after it"


@pytest.mark.parametrize(("interval", "at"), [(60.0, HOUR), (1000.0, 10_000.0)])
def test_by_default_an_hour_or_ten_intervals(tmp_path: Path, interval: float, at: float) -> None:
    job = Job(tmp_path, asynchronous=False)
    for _ in range(5):
        job.save(interval)
    began = job.clock.now
    job.away()
    with pytest.raises(tsck.BackendUnavailableError):
        [job.save(interval) for _ in range(100)]
    assert at < job.clock.now - began <= at + 2 * interval


@pytest.mark.slow
def test_a_staged_save_that_is_never_published_counts(tmp_path: Path) -> None:
    """Its upload is tried again and again: nothing has failed."""
    job = Job(tmp_path, staging=tmp_path / "stage", max_unsaved_seconds=100)
    job.save()
    job.store.drain()
    job.save(1)
    job.store.drain()
    job.away()
    job.save(1)
    assert job.save(50) == []
    with pytest.raises(tsck.StoreError, match="no snapshot of 'run' was published in the last 1") as raised:
        [job.save(50) for _ in range(3)]
    assert "a save does not end" in str(raised.value)
    job.back()
    assert job.steps() == [2, 1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_whose_last_save_failed_does_not_end_well(tmp_path: Path, asynchronous: bool) -> None:
    job = Job(tmp_path, asynchronous=asynchronous)
    job.save()
    job.away()
    job.save()
    said = "'run' does not have the newest state; the newest save failed: "
    warnings.simplefilter("ignore")  # until the test ends
    with pytest.raises(tsck.BackendUnavailableError, match=said):
        job.ckpt.close()


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "1h"])
def test_a_limit_that_is_no_time(tmp_path: Path, seconds: Any) -> None:
    with pytest.raises(tsck.InvalidOptionError, match="max_unsaved_seconds"):
        Job(tmp_path, max_unsaved_seconds=seconds)


# --- many ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "asynchronous"),
    [
        ("one rank's state is refused", True),
        ("one rank's state is refused", False),
        ("one rank's backend is away", True),
        ("one rank's backend is away for long", True),
        ("one rank's backend is away for long", False),
        ("one rank is a step ahead once", False),
    ],
)
def test_all_ranks_end_after_the_same_step(pool: Pool, tmp_path: Path, asynchronous: bool, trouble: str) -> None:
    """Each rank waits for the others at each step, as for their gradients: one that ends alone would leave them there."""
    make_store(tmp_path)
    found = pool.run(unsaved_side.run, str(tmp_path), trouble, asynchronous, 3, ranks=3)
    ended, kinds, texts = zip(*found, strict=True)
    assert len(set(ended)) == 1, found
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        steps = [snapshot.step for snapshot in reversed(store.log("job"))]
    if trouble == "one rank's state is refused":
        assert set(kinds) == {"UnsupportedValueError"}
        assert all("cannot store" in text and "rank 1" in text for text in texts[:1] + texts[2:])
        assert (steps, 8 <= ended[0] <= 8 + unsaved_side.LEAD_STEPS + 2) == ([4], True)
    elif trouble == "one rank's backend is away":
        assert set(kinds) == {""}
        assert (steps[0], steps[-1]) == (4, 40)
    elif trouble == "one rank is a step ahead once":
        assert set(kinds) == {""}
        assert steps == [4, *range(12, 41, 4)]
    else:
        assert all("no snapshot of 'job' was published in the last" in text for text in texts)
        assert (steps, ended[0] < 40) == ([4], True)


def test_a_reported_end_is_void_when_the_save_is_published(pool: Pool, tmp_path: Path) -> None:
    """Rank 0 says at step 9 that all end at step 12; the save of step 8 is published at step 10."""
    make_store(tmp_path)
    found = pool.run(unsaved_side.run, str(tmp_path), "two saves are slow", True, 3, ranks=3)
    assert found == [(40, "", "")] * 3
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        assert [snapshot.step for snapshot in reversed(store.log("job"))] == [*range(4, 41, 4)]


def test_a_board_that_is_away_ends_a_run_that_saves_by_it(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    [(step, said)] = pool.run(unsaved_side.without_a_board, str(tmp_path), ranks=1)
    assert 32 <= step <= 34
    assert "the ranks cannot agree on when to save: injected" in said


def lose_a_reply(job: Job, *, happened: bool) -> None:
    """Of the log, to the next save."""
    log = job.store.engine.log
    append = log.append

    def without_a_reply(build: Any, **options: Any) -> Any:
        log.append = append  # type: ignore[method-assign]
        if happened:
            append(build, **options)
        raise tsck.UndecidedError("injected: no reply")

    log.append = without_a_reply  # type: ignore[method-assign]


@pytest.mark.parametrize(("asynchronous", "happened"), [(True, True), (False, False)])
def test_a_save_that_may_have_happened_is_settled_before_the_next(tmp_path: Path, asynchronous: bool, happened: bool) -> None:
    job = Job(tmp_path, asynchronous=asynchronous)
    job.save()
    lose_a_reply(job, happened=happened)
    job.save()
    job.save()
    job.save()
    job.ckpt.close()
    assert job.steps() == ([4, 3, 2, 1] if happened else [4, 3, 1])


@pytest.mark.parametrize("happened", [True, False])
def test_a_last_save_that_may_have_happened_is_looked_for_at_the_end(tmp_path: Path, happened: bool) -> None:
    job = Job(tmp_path, asynchronous=False)
    lose_a_reply(job, happened=happened)
    job.save()
    if happened:
        job.ckpt.close()
        assert job.steps() == [1]
    else:
        with pytest.raises(tsck.UndecidedError, match="'run' does not have the newest state"):
            job.ckpt.close()


def test_a_save_after_one_that_may_have_happened_is_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, asynchronous=False)
    job.save()
    lose_a_reply(job, happened=True)
    job.save()
    with monkeypatch.context() as patch:

        def unknown(action: Any, **_: Any) -> Any:
            return action()  # the log does not answer either

        patch.setattr(job.store, "retrying", unknown)
        assert any("the next save checks again" in each for each in job.save())
    job.save()
    job.ckpt.close()
    assert job.steps() == [4, 3, 2, 1]


def test_a_conflict_with_a_save_that_may_have_happened_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the log does not say whose entry it is."""
    job = Job(tmp_path, asynchronous=False)
    job.save()
    lose_a_reply(job, happened=True)
    job.save()
    with monkeypatch.context() as patch:

        def unknown(action: Any, **_: Any) -> Any:
            return action()

        patch.setattr(job.store, "retrying", unknown)
        patch.setattr(RefFence, "catch_up", lambda *_: False)
        assert any("the next save checks again" in each for each in job.save())
    job.save()
    job.ckpt.close()
    assert job.steps() == [4, 2, 1]

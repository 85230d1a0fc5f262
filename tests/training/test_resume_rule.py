"""What `TrainingState.restore` and `Checkpointer.resume` take where the newest snapshot is damaged, marked or cannot be read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.training import resume_search
from tests.training.resume_rule import ALL, NEWEST, check_door, resumes_logged

REF = "runs/job"


class Job:
    """Weights that say the step."""

    def __init__(self) -> None:
        self.model = nn.Linear(100, 100)
        self.training = tsck.TrainingState(model=self.model)
        self.state: dict[str, Any] = dict(self.model.state_dict())

    def go_to(self, step: int) -> None:
        with torch.no_grad():
            self.model.weight.uniform_(step, step + 1)

    @property
    def step(self) -> int:
        return int(self.model.weight.detach().min())


def save(store: tsck.Store, *, plain: bool = False, steps: tuple[int, ...] = (1, 2, 3)) -> None:
    job = Job()
    for step in steps:
        job.go_to(step)
        if plain:
            store.put_snapshot(job.state, ref=REF, step=step)
        else:
            job.training.put(store, ref=REF, step=step)


@pytest.mark.parametrize("case", ALL)
def test_a_training_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    def resume(store: tsck.Store, address: str | None) -> int | None:
        job = Job()
        found = job.training.restore(store, address or REF)
        assert found is not None
        assert found.step == job.step
        return found.step

    check_door(case, tmp_path, monkeypatch, REF, save=save, resume=resume)


@pytest.mark.parametrize(("case", "plain"), [*((case, True) for case in NEWEST), ("newest damaged", False)])
def test_a_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, plain: bool) -> None:
    def resume(store: tsck.Store, _: str | None) -> int | None:
        job = Job()
        with tsck.Checkpointer(store, job.state if plain else job.training, ref=REF, when=tsck.first()) as ckpt:
            found = ckpt.resume()
        assert found is not None
        assert found.step == job.step
        return found.step

    check_door(case, tmp_path, monkeypatch, REF, save=lambda store: save(store, plain=plain), resume=resume)


@pytest.mark.parametrize("plain", [False, True])
def test_one_line_says_that_there_is_nothing_to_resume(tmp_path: Path, *, plain: bool) -> None:
    job = Job()
    with tsck.open(tmp_path / "store", create=True) as store, resumes_logged() as logged:
        checkpointer = tsck.Checkpointer(store, job.state if plain else job.training, ref=REF, when=tsck.first())
        assert checkpointer.resume() is None
    assert logged == [f"nothing to resume: {REF} has no snapshot yet in {tmp_path / 'store'}"]


@pytest.mark.parametrize("options", [{"parts": ["model"]}, {"address": "tag"}, {"address": f"{REF}~0"}], ids=str)
def test_what_means_one_snapshot_is_replaced_by_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Two restores of parts would else be of two snapshots."""

    def save_and_tag(store: tsck.Store) -> None:
        save(store)
        store.tag("tag", REF)

    def resume(store: tsck.Store, _: str | None) -> None:
        Job().training.restore(store, **{"address": REF, **options})

    check_door("named and damaged", tmp_path, monkeypatch, REF, save=save_and_tag, resume=resume)


def test_marked_snapshots_are_taken_where_that_is_allowed(store: tsck.Store) -> None:
    save(store)
    store.mark(REF, "bad")
    job = Job()
    found = job.training.restore(store, REF, allow_marked=True)
    assert found is not None
    assert (found.step, job.step) == (3, 3)


def test_snapshots_without_steps_have_one_before_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        for step in (1, 2):
            job.go_to(step)
            job.training.put(store, ref=REF)
        store.mark(REF, "bad")
        with pytest.warns(UserWarning, match=f"{REF}~0 was skipped: it is marked bad; resuming from {REF}~1 instead"):
            job.training.restore(store, REF)
    assert job.step == 1


def test_what_a_run_left_behind_when_it_went_back_is_not_before_it(store: tsck.Store) -> None:
    save(store)
    job = Job()
    job.training.restore(store, f"{REF}@1")
    job.go_to(4)
    job.training.put(store, ref=REF, step=4)
    store.mark(REF, "bad")
    with pytest.warns(UserWarning, match=f"resuming from {REF}@1 instead"):
        job.training.restore(store, REF)
    assert job.step == 1


@pytest.mark.parametrize(("errors", "step"), [(2, 3), (3, None)])
def test_a_log_that_cannot_be_read_is_asked_again_before_anything_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: int, step: int | None
) -> None:
    chosen, left = vars(resume_search)["choose"], [tsck.BackendUnavailableError("it does not answer")] * errors

    def choose(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return chosen(*args, **options)

    monkeypatch.setattr(resume_search, "choose", choose)
    monkeypatch.setattr(resume_search, "PAUSE_SECONDS", 0.0)
    with tsck.open(tmp_path / "ck", create=True) as store:
        save(store)
        if step is None:
            with pytest.raises(tsck.BackendUnavailableError):
                Job().training.restore(store, REF)
        else:
            found = Job().training.restore(store, REF)
            assert found is not None
            assert found.step == step

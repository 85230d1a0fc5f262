"""An exception in a loop: the last completed step is saved, unless the next one has changed a weight; never half a step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.verify_resume import copied, first_difference, leaves_of
from tests.group_of_one import group_of_one

STEPS, FAILS_IN = 5, 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        yield store


class FailedError(Exception):
    """Of the loop."""


class Job:
    """Everything in it moves in each step; the weights do last."""

    def __init__(self, **more: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3])
        self.scaler = torch.amp.GradScaler(device="cpu", init_scale=64.0)
        self.cursor = tsck.SampleCursor(40, batch_size=4)
        self.mean = torch.optim.swa_utils.AveragedModel(self.model)
        self.extra: dict[str, Any] = {"seen": [0], "noise": torch.Generator().manual_seed(1), "mean": self.mean, **more}
        self.values = {"sum": torch.zeros(2)}
        self.training = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            dataloader=self.cursor,
            extra=self.extra,
            rank_values=self.values,
        )

    def step(self, at: Callable[[str], None] = lambda _: None) -> None:
        """`at` is called with what was done."""
        at("nothing")
        batch = torch.tensor(next(iter(self.cursor.batches())))[:, None].float() + torch.rand(4, 2, generator=self.extra["noise"])
        self.cursor.advance()
        self.extra["seen"][0] += 4
        self.values["sum"] += batch.sum(0)
        at("batch")
        self.scaler.scale(self.model(batch).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        at("gradients")
        self.scaler.step(self.optimizer)
        at("optimizer")
        self.scaler.update()
        self.scheduler.step()
        self.mean.update_parameters(self.model)
        self.optimizer.zero_grad()
        at("all")


def train(store: tsck.Store, job: Job, error: BaseException, place: str, **options: Any) -> None:
    """Fails in one step of the loop, at that place."""

    def at(here: str) -> None:
        if number == FAILS_IN and here == place:
            raise error

    with tsck.Checkpointer(store, job.training, ref="run", when=tsck.every_steps(2), **{"asynchronous": False, **options}) as ckpt:
        for number in range(1, STEPS + 1):
            job.step(at)
            ckpt.step(number, {"loss": 1.0 / number})


@pytest.mark.parametrize("place", ["nothing", "batch", "gradients"])
def test_the_last_completed_step_is_saved_and_resumes_exactly(store: tsck.Store, place: str) -> None:
    error = FailedError()
    with pytest.raises(FailedError):
        train(store, Job(), error, place)
    assert error.__notes__ == ["tensorstore_ck: step 3, the last completed one, was saved as run@3"]
    saved = store.resolve("run")
    assert (saved.step, saved.triggers, saved.metrics) == (3, ("on_exception",), {"loss": 1 / 3})
    whole, resumed = Job(), Job()
    for _ in range(STEPS):
        whole.step()
    expected = copied(leaves_of(whole.training.captured()))
    resumed.training.restore(store, "run")
    for _ in range(saved.step or 0, STEPS):
        resumed.step()
    assert first_difference(0, expected, leaves_of(resumed.training.captured())) is None


@pytest.mark.parametrize("place", ["optimizer", "all"])
def test_half_a_step_is_not_saved(store: tsck.Store, place: str) -> None:
    error = FailedError()
    with pytest.raises(FailedError):
        train(store, Job(), error, place)
    (note,) = error.__notes__
    assert (
        "step 3, the last completed one, was not saved to 'run': an optimizer had begun the next step; the last save was of step 2" in note
    )
    assert store.resolve("run").step == 2


@pytest.mark.parametrize(
    "touch",
    [
        lambda job: job.model[0].weight.detach().add_(1),
        lambda job: job.mean.module[0].weight.detach().add_(1),
        lambda job: job.scaler._scale.mul_(2),
    ],
    ids=["weight", "average", "scale"],
)
def test_what_changed_without_an_optimizer_is_noticed(store: tsck.Store, touch: Callable[[Job], object]) -> None:
    job, error = Job(), FailedError()

    def loop() -> None:
        with tsck.Checkpointer(store, job.training, ref="run", when=tsck.every_steps(9)) as ckpt:
            job.step()
            ckpt.step(1)
            touch(job)
            raise error

    with pytest.raises(FailedError):
        loop()
    assert "the next step had changed a parameter, a buffer or the gradient scaler; nothing was saved before" in error.__notes__[0]
    assert "run" not in store.branches()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_a_stop_of_the_process_saves_too(store: tsck.Store, error: BaseException) -> None:
    with pytest.raises(type(error)):
        train(store, Job(), error, "batch", asynchronous=True)
    assert store.resolve("run").step == 3


def test_a_step_that_calls_no_optimizer_may_be_a_graph(store: tsck.Store) -> None:
    """A CUDA graph that is replayed changes weights, and nothing counts that."""
    job, error = Job(), FailedError()

    def loop() -> None:
        with tsck.Checkpointer(store, job.training, ref="run", when=tsck.every_steps(9)) as ckpt:
            job.model[0].weight.data.add_(1)
            ckpt.step(1)
            job.model[0].weight.data.add_(1)
            raise error

    with pytest.raises(FailedError):
        loop()
    assert "no optimizer was called in that step" in error.__notes__[0]
    assert "run" not in store.branches()


class Loader:
    """Its position is its own affair."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


UNKNOWN: dict[str, tuple[Any, str]] = {
    "an object": (Loader(), "extra.more is a Loader, whose state at the end of a step is not known later"),
    "much": (list(range(2000)), "extra.more has a list that is not copied after each step, or is too large for that"),
    "a large tensor": (torch.zeros(1 << 20), "too large for that"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_later_is_said(store: tsck.Store, name: str) -> None:
    value, why = UNKNOWN[name]
    error = FailedError()
    with pytest.raises(FailedError):
        train(store, Job(more=value), error, "batch")
    assert why in error.__notes__[0]
    assert store.resolve("run").step == 2


def test_ranks_of_a_group_do_not_save_alone(store: tsck.Store) -> None:
    error = FailedError()
    with group_of_one(), pytest.raises(FailedError):
        train(store, Job(), error, "batch", group=torch.distributed.group.WORLD)
    assert "the ranks of a group save together only; the last save was of step 2" in error.__notes__[0]


def test_an_error_of_step_itself_saves_nothing(store: tsck.Store) -> None:
    job = Job()

    def loop() -> None:
        with tsck.Checkpointer(store, job.training, ref="run", when=tsck.every_steps(9)) as ckpt:
            job.step()
            ckpt.step(2)
            ckpt.step(1)

    with pytest.raises(tsck.InvalidOptionError) as caught:
        loop()
    assert caught.value.__notes__ == ["`tsck help invalid_option` says what to do"]
    assert "run" not in store.branches()


def test_a_failure_does_not_replace_the_exception(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    error = FailedError()

    def refuse(*_: object, **__: object) -> None:
        raise tsck.NoSpaceError("the disk is full")

    def loop(job: Job) -> None:
        with tsck.Checkpointer(store, job.training, ref="run", when=tsck.every_steps(9)) as ckpt:
            job.step()
            ckpt.step(1)
            raise error

    monkeypatch.setattr(store, "put_snapshot", refuse)
    with pytest.raises(FailedError):
        loop(Job())
    assert "was not saved to 'run': NoSpaceError: the disk is full" in error.__notes__[0]


def test_it_can_be_turned_off_and_leaves_no_hooks(store: tsck.Store) -> None:
    error, job = FailedError(), Job()
    with pytest.raises(FailedError):
        train(store, job, error, "batch", on_exception=False)
    assert not hasattr(error, "__notes__")
    assert store.resolve("run").step == 2
    with tsck.Checkpointer(store, job.training, ref="other", when=tsck.every_steps(2)):
        assert job.optimizer._optimizer_step_pre_hooks
    assert not job.optimizer._optimizer_step_pre_hooks

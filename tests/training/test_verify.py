"""verify_resume, and the command: what differs between two resumes is found and named."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.cli.cmd_verify_resume import verify_resume as command
from tensorstore_ck.training import TrainingState, verify_resume
from tensorstore_ck.training.verify_resume import copied, first_difference
from tests.training.job import Job, make

Made = tuple[TrainingState, Callable[[], object]]


def whole() -> Made:
    job = make()
    return job.training, job.step


@pytest.fixture
def put(store: tsck.Store) -> tsck.Snapshot:
    job = make()
    for _ in range(2):
        job.step()
    return job.training.put(store, ref="runs/job", step=2)


@pytest.mark.usefixtures("put")
def test_a_job_that_resumes_bit_for_bit(store: tsck.Store) -> None:
    report = verify_resume(whole, store, "runs/job", steps=2)
    assert report.ok
    assert report.compared > 50
    assert "2 steps from" in str(report)
    assert "same both times, bit for bit" in str(report)


def planted(plant: Callable[[Job, int], None]) -> Callable[[], Made]:
    runs = itertools.count()

    def built() -> Made:
        job, run = make(), next(runs)
        steps = itertools.count(1)

        def step() -> Any:
            loss = job.step()
            if next(steps) == 2:
                plant(job, run)
            return loss

        return job.training, step

    return built


def nudge(job: Job, run: int) -> None:
    with torch.no_grad():
        job.model.get_parameter("3.weight")[0, :3] += 1e-3 * run


@pytest.mark.usefixtures("put")
def test_the_first_tensor_that_differs_is_named(store: tsck.Store) -> None:
    report = verify_resume(planted(nudge), store, "runs/job")
    found = report.difference
    assert found is not None
    assert (found.step, found.name, found.differing, found.elements) == (2, "model.3.weight", 3, 16)
    assert found.max_difference == pytest.approx(1e-3, rel=1e-3)
    assert "after step 2 of 3: model.3.weight differs: 3 of 16 elements differ, by 0.001 at most" in str(report)


@pytest.mark.usefixtures("put")
def test_values_count_and_what_the_step_returns(store: tsck.Store) -> None:
    def count(job: Job, run: int) -> None:
        job.extra["seen"] += run

    found = verify_resume(planted(count), store, "runs/job").difference
    assert found is not None
    assert (found.step, found.name) == (2, "extra.seen")
    numbers = itertools.count()

    def built() -> Made:
        return make().training, lambda: {"loss": next(numbers)}

    found = verify_resume(built, store, "runs/job").difference
    assert found is not None
    assert (found.step, found.name) == (1, "what step() returned.loss")


def test_what_was_not_captured_is_found(store: tsck.Store) -> None:
    """The loader begins where the process does: here elsewhere each time."""
    seeds = itertools.count()

    def built() -> Made:
        job = make(0)
        job = Job("dataloader")
        job.loader._shuffle.manual_seed(next(seeds))
        job.loader._position = 1000
        return job.training, job.step

    built()[0].put(store, ref="runs/job")
    found = verify_resume(built, store, "runs/job", steps=1).difference
    assert found is not None
    assert found.step == 1


def test_bits_are_compared() -> None:
    """Signs of zeros, payloads of NaNs, types of numbers."""
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)

    def differ(old: Any, new: Any) -> Any:
        return first_difference(1, copied({"x": old}), {"x": new})

    assert differ(nan, nan.clone()) is None
    found = differ(nan, nan.flip(0))
    assert (found.differing, found.max_difference) == (2, None)
    assert differ(torch.zeros(2), -torch.zeros(2)).differing == 2
    for old, new in ((1, 1.0), (0.0, -0.0), (1, True), ("a", b"a"), ([1], (1,)), ({}, []), (1, torch.ones(()))):
        assert differ(old, old) is None
        assert differ(old, new) is not None
        assert differ(new, old) is not None
    for same in (
        float("nan"),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(0),
        torch.tensor(True),
        torch.ones(2, dtype=torch.complex64),
    ):
        assert differ(same, same) is None
    assert "float32 [2] the first time" in differ(torch.ones(2), torch.ones(3)).what
    assert first_difference(1, copied({"x": 1}), {}) is not None
    assert first_difference(1, {}, {"x": 1}) is not None


@pytest.mark.usefixtures("put")
def test_what_make_must_give(store: tsck.Store) -> None:
    with pytest.raises(tsck.InvalidOptionError, match="must return a TrainingState and a function"):
        verify_resume(lambda: make().training, store, "runs/job")  # type: ignore[arg-type, return-value]
    with pytest.raises(tsck.InvalidOptionError, match="steps must be 1 or more"):
        verify_resume(whole, store, "runs/job", steps=0)
    with pytest.raises(tsck.NotFoundError):
        verify_resume(whole, store, "runs/nothing")


# --- the command --------------------------------------------------------------------------------------------------------

SCRIPT = """
import itertools, torch, tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState

runs = itertools.count()

def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, 3)).square().mean().backward()
        optimizer.step()

    return TrainingState(model=model, optimizer=optimizer), step

def odd():
    training, step = make()
    run = next(runs)
    return training, lambda: (step(), run)[1]
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the current folder, next to a store with a snapshot of its job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job_of_mine.py").write_text(SCRIPT)
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        TrainingState(model=model, optimizer=optimizer).put(store, ref="runs/job", step=5)
    return tmp_path / "job_of_mine.py"


def invoke(*args: str) -> Any:
    return CliRunner().invoke(command, [*args, "--ref", "runs/job", "--store", "ck", "--cache-dir", "cache"])


@pytest.mark.usefixtures("script")
def test_the_command() -> None:
    for module in ("job_of_mine", "./job_of_mine.py"):
        result = invoke(f"{module}:make", "--steps", "2")
        assert result.exit_code == 0, result.output
        assert "2 steps from" in result.output


@pytest.mark.usefixtures("script")
def test_the_command_says_what_differs() -> None:
    result = invoke("job_of_mine:odd", "--json")
    assert result.exit_code == 3
    document = json.loads(result.output)
    assert document["ok"] is False
    assert document["report"]["difference"]["name"] == "what step() returned"


@pytest.mark.usefixtures("script")
def test_wrong_names_and_errors_of_the_users_module(tmp_path: Path) -> None:
    for text, message in (
        ("job_of_mine", "is not MODULE:FUNCTION"),
        ("job_of_mine:nothing", "has no function 'nothing'"),
        ("no_such_module:make", "there is no module 'no_such_module' here"),
        ("no_such_file.py:make", "there is no file 'no_such_file.py'"),
    ):
        result = invoke(text)
        assert result.exit_code == 2
        assert message in result.output
    (tmp_path / "broken_job.py").write_text("import not_installed_anywhere\n")
    result = invoke("broken_job:make")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "not_installed_anywhere"

"""What torchtitan's options mean for a store, with a manager of a small model."""

import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan cannot be installed with the pinned fsspec: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.integrations.titan import compatibility
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.gc.stores import open_store
from tests.integrations.titan.runs import REF
from tests.integrations.titan.small import Job, saved_steps
from tests.long_errors import frames_of_package
from tests.training.resume_rule import NEWEST, check_door

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"interval": 3}, [3, 6, 7]),
        ({"interval": 3, "enable_first_step_checkpoint": True}, [1, 3, 6, 7]),
        ({"interval": 3, "load_only": True}, []),
        ({"interval": 3, "enable": False}, []),
    ],
)
def test_when_it_saves(tmp_path: Path, options: dict[str, Any], saved: list[int]) -> None:
    with Job(tmp_path, last_save_model_only=False, **options) as job:
        assert job.train(7, ends=True) == saved
    if saved:
        assert saved_steps(tmp_path) == saved[::-1]


@pytest.mark.parametrize("async_mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_run_continues(tmp_path: Path, async_mode: str) -> None:
    """Its generator, too, from which each step draws."""
    with Job(tmp_path / "whole", async_mode=async_mode, last_save_model_only=False) as whole:
        assert whole.manager.load() is False
        whole.train(6, ends=True)
        assert whole.manager.save_future is None, "the last save of a run is waited for"
    assert saved_steps(tmp_path / "whole") == [6, 5, 4, 3, 2, 1]
    with Job(tmp_path / "cut", async_mode=async_mode) as job:
        job.train(4)
        if async_mode != "disabled":
            assert job.manager.save_future.result(PATIENCE_SECONDS).step == 4
        job.manager.maybe_wait_for_saving()
        assert job.manager.save_future is None
    with Job(tmp_path / "cut", async_mode=async_mode) as job:
        assert job.manager.load() is True
        assert job.progress.step == 4
        job.train(6)
    assert torch.equal(job.weights, whole.weights)
    assert job.optimizer.state_dict()["state"][0]["step"] == 6


def test_a_save_that_fails_in_the_background(tmp_path: Path) -> None:
    """Its future has the error, and whoever waits for it is warned; a run that saved nothing ends with it."""
    for at in range(1, 100):
        faults = Faults("no-space", persistent=True)
        store = open_store(FaultyBackend(MemoryBackend(), faults, atomic_put=False))
        with patch("tensorstore_ck.integrations.titan.snapshot_manager.opened", return_value=store):
            job = Job(tmp_path, async_mode="async")
        faults.calls, faults.at = 0, at
        try:
            job.train(1)
        except tsck.NoSpaceError:
            continue  # before it was in the background
        future = job.manager.save_future
        with pytest.warns(UserWarning, match="the snapshot of step 1 was not saved"):
            job.manager.maybe_wait_for_saving()
        assert isinstance(future.exception(PATIENCE_SECONDS), tsck.NoSpaceError)
        with pytest.raises(tsck.NoSpaceError, match="the newest save failed") as closing:
            job.manager.close()
        assert frames_of_package(closing.value) == []
        faults.at = 0
        store.close()
        return
    raise AssertionError("no save failed in the background")


def test_load_step(tmp_path: Path) -> None:
    """The history goes on from there."""
    with Job(tmp_path) as job:
        job.train(5)
        wanted = job.weights
    with Job(tmp_path) as job:
        job.manager.load(step=3)
        assert job.progress.step == 3
        job.train(5)
        assert torch.equal(job.weights, wanted)
    with Job(tmp_path) as job, pytest.raises(tsck.errors.NotFoundError, match="no snapshot of step 9"):
        job.manager.load(step=9)
    with Job(tmp_path / "empty") as job, pytest.raises(FileNotFoundError, match="load_step=9"):
        job.manager.load(step=9)


def test_exclude_from_loading(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.train(3)
        wanted = job.weights
    with Job(tmp_path, exclude_from_loading=["optimizer", "train_state"]) as job:
        job.manager.load()
        assert (job.progress.step, job.optimizer.state_dict()["state"]) == (0, {})
        assert torch.equal(job.weights, wanted)
    with Job(tmp_path, exclude_from_loading=["lr_scheduler"]) as job:
        job.manager.load()
        assert (job.progress.step, job.scheduler.last_epoch) == (3, 0)
    with pytest.raises(tsck.errors.InvalidOptionError, match=r"has 'lr'.*only dataloader, lr_scheduler, optimizer, train_state"):
        Job(tmp_path, exclude_from_loading=["lr"])


def test_the_last_save_has_only_weights(tmp_path: Path) -> None:
    with Job(tmp_path, interval=2, export_dtype="bfloat16") as job:
        job.train(5, ends=True)
    with tsck.open(tmp_path / "store") as store:
        last = store.checkout(REF)
        assert "optimizer" not in last
        assert torch.equal(last["model"]["weight"], job.weights.bfloat16())
    with Job(tmp_path, interval=2, export_dtype="bfloat16") as again:
        with pytest.warns(UserWarning, match=r"ended with runs/t@5.*from runs/t@4"):
            again.manager.load()
        again.train(5, ends=True)
    assert torch.equal(again.weights, job.weights)
    assert saved_steps(tmp_path) == [5, 5, 4, 2]
    with Job(tmp_path) as again, pytest.raises(tsck.errors.MismatchError, match="only its weights"):
        again.manager.load(step=5)
    with Job(tmp_path / "other", interval=9) as job:
        job.train(2, ends=True)
    with Job(tmp_path / "other") as again, pytest.raises(tsck.errors.MismatchError, match=r'"tsck://runs/t@2" and another checkpoint\.ref'):
        again.manager.load()


def test_a_snapshot_of_another_run_as_the_beginning(tmp_path: Path) -> None:
    with Job(tmp_path, interval=2) as base:
        base.train(3, ends=True)
    for step, options, wanted in ((3, {}, 0), (2, {}, 0), (2, {"initial_load_model_only": False}, 2)):
        ref = f"runs/from-{step}-{wanted}"
        with Job(tmp_path, ref=ref, initial_load_path=f"tsck://{REF}@{step}", **options) as job:
            assert job.manager.load()
            assert job.progress.step == wanted
            assert torch.equal(job.weights, base.weights) == (step == 3)
            job.train(wanted + 1)
        with Job(tmp_path, ref=ref, initial_load_path=f"tsck://{REF}@{step}", **options) as job:  # its own snapshots come first
            job.manager.load()
            assert job.progress.step == wanted + 1
    with (
        Job(tmp_path, ref="runs/new", initial_load_path="tsck://runs/none@3") as job,
        pytest.raises(tsck.errors.NotFoundError, match="none"),
    ):
        job.manager.load()
    with pytest.raises(ValueError, match="initial_load_in_hf is not supported with a remote"):
        Job(tmp_path, ref="runs/new", initial_load_path=f"tsck://{REF}@2", initial_load_in_hf=True)


def test_a_seed_checkpoint(tmp_path: Path) -> None:
    """It has the weights of step 0."""
    with Job(tmp_path) as job:
        job.manager.save(curr_step=0, last_step=True)
        seed = job.weights
    with Job(tmp_path) as job:
        torch.nn.init.zeros_(job.model.weight)
        assert job.manager.load()
        assert torch.equal(job.weights, seed)
        assert job.progress.step == 0
        job.train(2)
    assert saved_steps(tmp_path) == [2, 1, 0]


def test_what_torchtitan_has_saved_is_loaded_while_the_ref_is_empty(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of saves and loads without ranks
        with Job(tmp_path) as job:
            job.train(2)
            states = job.manager.states
            state = {**states["model"].state_dict(), **{name: states[name] for name in ("train_state", "lr_scheduler")}}
            torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "out" / "checkpoint" / "step-2", no_dist=True)
        with Job(tmp_path, ref="runs/new", exclude_from_loading=["optimizer", "dataloader"]) as new:
            assert new.manager.load()
    assert (new.progress.step, new.scheduler.last_epoch) == (2, 2)
    assert torch.equal(new.weights, job.weights)


def test_a_limit_bounds_names_and_bytes(tmp_path: Path) -> None:
    with Job(tmp_path, width=4096, keep_latest_k=2, async_mode="async") as job:
        assert len(job.train(30)) == 30
    assert saved_steps(tmp_path) == [30, 29]
    with tsck.open(tmp_path / "store") as store:
        usage = store.usage()
    assert usage.undo_bytes == 0
    assert usage.objects_bytes < 2.5 * usage.stored_bytes
    with Job(tmp_path / "other", keep_latest_k=2, keep={"keep_last": 3}) as job:
        job.train(7)
    assert saved_steps(tmp_path / "other") == [7, 6, 5]


@pytest.mark.parametrize("case", [*NEWEST, "named and damaged"])
def test_which_snapshot_a_resume_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    def save(_: tsck.Store) -> None:
        with Job(tmp_path, width=512) as job:
            job.train(3)

    def resume(_: tsck.Store, address: str | None) -> int:
        with Job(tmp_path, width=512) as job:
            job.manager.load(step=-1 if address is None else int(address.rpartition("@")[2]))
            return job.progress.step

    check_door(case, tmp_path, monkeypatch, REF, save=save, resume=resume)


def test_a_ref_of_another_run(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.train(2)
    with Job(tmp_path) as other, pytest.raises(tsck.errors.ConflictError, match="snapshots of an earlier run") as saving:
        other.train(1)
    with Job(tmp_path, width=5) as other, pytest.raises(tsck.errors.MismatchError, match="weight") as loading:
        other.manager.load()
    assert frames_of_package(saving.value) == frames_of_package(loading.value) == []


def test_options_that_are_missing(tmp_path: Path) -> None:
    for name in ("store", "ref"):
        missing: dict[str, Any] = {name: ""}
        with pytest.raises(tsck.errors.InvalidOptionError, match=rf"checkpoint\.{name} is missing"):
            Job(tmp_path, **missing)
    with (
        patch("torch.distributed.is_initialized", return_value=True),
        patch("torch.distributed.get_backend", return_value="fake"),
        pytest.raises(tsck.errors.InvalidOptionError, match=r"nothing can be saved in comm\.mode"),
    ):
        Job(tmp_path)
    with pytest.raises(ValueError, match="sd_adapter is not provided"):
        Job(tmp_path, last_save_in_hf=True)
    with Job(tmp_path) as job:
        job.manager.close()  # twice


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("torchtitan.__version__", "0.2.2", "torchtitan 0.2.2 is not supported: run `pip install 'torchtitan>=0.3,<0.4'`"),
        ("torchtitan.__version__", "0.4.0", "torchtitan 0.4.0 is not supported"),
        ("tensorstore_ck.integrations.titan.compatibility.OPTIONS", compatibility.OPTIONS - {"load_only"}, "another load_only than"),
        ("torchtitan.components.checkpointer.CheckpointManager._save", lambda self, step: True, "another _save than the one that is used"),
    ],
)
def test_other_versions(monkeypatch: pytest.MonkeyPatch, changed: str, value: object, said: str) -> None:
    monkeypatch.setattr(changed, value)
    with pytest.raises(tsck.errors.MissingExtraError, match=re.escape(said)):
        compatibility.require_supported()

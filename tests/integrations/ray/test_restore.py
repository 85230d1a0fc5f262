"""`tsck.ray.restore` by what Ray names; and options that `report` refuses. As a worker alone, without a running Ray."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer, write_pointer
from tests.training.resume_rule import NEWEST, check_door

REF = "runs/r"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    """A job's second handle: another one has saved steps 1 and 2."""
    with tsck.open(tmp_path / "store", create=True) as earlier:
        for step in (1, 2):
            earlier.put_snapshot({"at": [step]}, ref=REF, step=step)
    with tsck.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def names(tmp_path: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Called with the root that Ray's checkpoint names."""
    ray_train = pytest.importorskip("ray.train", reason="the extra ray is not installed: run `make test-apart`")
    from tensorstore_ck.integrations.ray import reporting

    monkeypatch.setattr(reporting, "_require_worker", lambda store: None)

    def name(root: str) -> None:
        write_pointer(tmp_path / "checkpoint", SnapshotPointer(store.url, root))
        checkpoint = ray_train.Checkpoint.from_directory(tmp_path / "checkpoint")
        monkeypatch.setattr(ray_train, "get_checkpoint", lambda: checkpoint)

    return name


def restore(store: tsck.Store, ref: str = REF) -> tuple[Any, Any]:
    into = {"at": [0]}
    found = tsck.ray.restore(into, store=store, ref=ref)
    return found and found.step, into["at"]


def test_not_the_newest_but_what_ray_names(store: tsck.Store, names: Callable[[str], None]) -> None:
    names(store.resolve(f"{REF}@1").root)
    assert restore(store) == (1, [1])
    again = store.put_snapshot({"at": [3]}, ref=REF, step=2)  # the run goes on from there
    assert next(iter(store.log(REF))).root == again.root


def test_a_snapshot_that_is_gone(store: tsck.Store, names: Callable[[str], None]) -> None:
    names("0" * 64)
    with pytest.warns(UserWarning, match=f"that Ray's checkpoint names was skipped: .*; resuming from {REF}@2 instead"):
        assert restore(store) == (2, [2])


@pytest.mark.parametrize("case", NEWEST)
def test_which_snapshot_a_resume_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Of a new experiment, in which Ray has no checkpoint yet."""
    ray_train = pytest.importorskip("ray.train", reason="the extra ray is not installed: run `make test-apart`")
    from tensorstore_ck.integrations.ray import reporting

    monkeypatch.setattr(reporting, "_require_worker", lambda store: None)
    monkeypatch.setattr(ray_train, "get_checkpoint", lambda: None)

    def save(opened: tsck.Store) -> None:
        for step in (1, 2):
            opened.put_snapshot({"at": torch.rand(10_000) + step}, ref=REF, step=step)

    def resume(opened: tsck.Store, _: str | None) -> int:
        into = {"at": torch.zeros(10_000)}
        found = tsck.ray.restore(into, store=opened, ref=REF)
        assert found is not None
        assert found.step == int(into["at"].min())
        return found.step

    check_door(case, tmp_path, monkeypatch, REF, save=save, resume=resume)


def test_another_store(store: tsck.Store, names: Callable[[str], None]) -> None:
    names("0" * 64)
    with pytest.raises(tsck.NotFoundError, match="open the store that it was reported from"):
        restore(store, "runs/none")


def test_options_of_uploads_are_refused(store: tsck.Store, names: Callable[[str], None]) -> None:
    with pytest.raises(tsck.InvalidOptionError, match="not checkpoint_upload_mode"):
        tsck.ray.report({}, {"a": 1}, store=store, ref=REF, step=1, checkpoint_upload_mode=None)

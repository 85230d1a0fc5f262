"""What a TrainingState notes of each save, and which commit is checked out."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.format.attributes import MAX_ATTRIBUTES
from tensorstore_ck.training import noted_attributes
from tensorstore_ck.training.noted_attributes import MAX_NOTED, commit_of
from tests.gc.stores import open_store
from tests.group_of_one import group_of_one

COMMIT = "3f2a" * 10


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tsck.Store]:
    monkeypatch.setattr(noted_attributes, "code_version", lambda: COMMIT)
    with open_store(MemoryBackend()) as opened:
        yield opened


def test_a_save_notes_rates_positions_and_the_commit(store: tsck.Store) -> None:
    model = torch.nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    cursor = tsck.SampleCursor(10, batch_size=4)
    extra: dict[str, Any] = {"tokens_seen": 7, "name": "a", "list": [1], "generator": torch.Generator(), "long": "x" * 300}
    training = tsck.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=cursor, extra=extra)
    for _ in range(3):
        cursor.advance()
    optimizer.step()
    scheduler.step()
    noted = {"lr": 0.5, "lr.1": 0.25, "scheduler_step": 1, "epoch": 1, "samples_seen": 12, "extra.tokens_seen": 7, "extra.name": "a"}
    saved = training.put(store, ref="r", step=1, attributes={"extra.name": "mine"})
    assert saved.attributes == {**noted, "extra.name": "mine", "code_version": COMMIT}
    later = training.put_async(store, ref="r", step=2, unchanged="ok").wait()
    assert later.attributes == {**noted, "code_version": COMMIT}
    found = store.log("r").where("lr between 0.4 and 0.6 and extra.tokens_seen = 7 and code_version like '3f2a%' and samples_seen = 12")
    assert [snapshot.step for snapshot in found] == [2, 1]


def test_what_ranks_save_together_has_them_too(store: tsck.Store) -> None:
    model = torch.nn.Linear(2, 2)
    training = tsck.TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    with group_of_one():
        saved = training.put(store, ref="r", step=1, group=torch.distributed.group.WORLD)
    assert saved.attributes == {"lr": 0.5, "code_version": COMMIT}
    assert store.log("r") == [saved]


def test_what_a_state_notes_fails_no_save(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted_attributes, "code_version", lambda: "\0" * 40)  # a file of git after a power failure
    training = tsck.TrainingState(extra={"a\0b": 1, "good": 2})
    assert training.put(store, ref="r", step=1).attributes == {"extra.good": 2}
    given = {f"n{number}": float(number) for number in range(MAX_ATTRIBUTES)}
    assert training.put(store, ref="r", step=2, attributes=given, unchanged="ok").attributes == given


def test_a_state_with_much_to_note_is_saved(store: tsck.Store) -> None:
    extra = {f"n{number:03}": number for number in range(100)} | {"x" * 200: 1}
    optimizers = {name: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1) for name in "ab"}
    del optimizers["a"].param_groups[0]["lr"]
    saved = tsck.TrainingState(extra=extra).put(store, ref="r", step=1, metadata={"a": 1})
    assert len(saved.attributes) == MAX_NOTED + 1
    assert noted_attributes.noted_attributes(optimizers=optimizers, schedulers={}, loaders={}, extra={}) == {
        "lr.b": 1,
        "code_version": COMMIT,
    }


# --- the commit of the code -------------------------------------------------------------------------------------------


def git(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("packed_refs", "packed-refs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_commit_is_read_from_the_files_of_git(tmp_path: Path) -> None:
    main = "ref: refs/heads/main\n"
    assert commit_of(git(tmp_path / "detached", HEAD=f"{COMMIT}\n")) == COMMIT
    assert commit_of(git(tmp_path / "loose", HEAD=main, refs__heads__main=f"{COMMIT}\n")) == COMMIT
    assert (
        commit_of(git(tmp_path / "packed", HEAD=main, packed_refs=f"# pack-refs\n{'0' * 40} refs/heads/x/main\n{COMMIT} refs/heads/main\n"))
        == COMMIT
    )
    assert commit_of(git(tmp_path / "unborn", HEAD=main)) is None
    git(tmp_path / "loose" / "worktrees" / "w", HEAD=main, commondir="../..\n")
    worktree = git(tmp_path / "w", **{".git": f"gitdir: {tmp_path / 'loose' / 'worktrees' / 'w'}\n"}) / ".git"
    assert commit_of(worktree) == COMMIT


@pytest.mark.parametrize("damage", ["no HEAD", "not text", "zeros"])
def test_a_damaged_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    if damage == "zeros":  # a worktree's file after a power failure
        (tmp_path / ".git").write_bytes(bytes(40))
    else:
        (tmp_path / ".git").mkdir()
    if damage == "not text":
        (tmp_path / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    noted_attributes.code_version.cache_clear()
    assert noted_attributes.code_version() is None
    noted_attributes.code_version.cache_clear()

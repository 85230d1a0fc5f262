"""`current` of a followed folder is a whole version, under the names of `from_pretrained`, whatever fails meanwhile."""

import errno
import fcntl
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.integrations.exporting import FollowedFolder, followed_folder
from tests.effort import PATIENCE_SECONDS
from tests.feed.versions import REF, NotedFaults, State, copy_of, equal, first_state, follower, save, train
from tests.gc.stores import copied, open_store


def read(folder: Path) -> State:
    """What an engine reads from `current`; every file in it is of one version."""
    current = folder / "current"
    files = sorted(current.glob("*.safetensors"))
    return {"model": {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}}


def step_of(folder: Path) -> int:
    step: int = json.loads((folder / "current" / "version.json").read_text())["step"]
    return step


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.mark.parametrize("one_file", [True, False])
def test_it_is_each_version_for_the_bytes_that_changed(
    backend: MemoryBackend, tmp_path: Path, one_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_folder, "MAX_FILE_BYTES", 1 << 30 if one_file else 1)
    trainer, state, faults = open_store(backend), first_state(rows=1024), NotedFaults()
    folder = FollowedFolder(follower(backend, faults), REF, str(tmp_path))
    weights = sum(tensor.nbytes for tensor in state["model"].values())
    for step in range(4):
        trainer.put_snapshot({**state, "optimizer": {"step": step}}, ref=REF, step=step, delta=True, metadata={"loss": str(step)})
        faults.read_bytes = 0
        updated = folder.update()
        assert updated is not None
        assert (updated.step, step_of(tmp_path), folder.root) == (step, step, updated.root)
        assert equal(read(tmp_path), state)
        assert folder.update() is None
        assert step == 0 or faults.read_bytes < 0.05 * weights
        with safetensors.safe_open(next((tmp_path / "current").glob("*.safetensors")), "pt") as file:
            assert file.metadata() == {"loss": str(step), "format": "pt"}
        train(state, step, 0.005)
    assert (tmp_path / "current" / "model.safetensors.index.json").exists() != one_file
    assert len({*tmp_path.iterdir()} - {tmp_path / ".lock"}) == 3
    faults.read_bytes = 0
    trainer.put_snapshot({**state, "optimizer": {"step": 4}}, ref=REF, step=4, delta=True)
    with FollowedFolder(follower(backend, faults), REF, str(tmp_path)) as another:  # after a restart
        another.update()
    assert equal(read(tmp_path), state)
    assert faults.read_bytes < 0.05 * weights


def test_a_rewound_branch_and_another_architecture(backend: MemoryBackend, tmp_path: Path) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    old = copy_of(state)
    folder = FollowedFolder(follower(backend), REF, str(tmp_path))
    folder.update()
    train(state, 1)
    save(trainer, state, 1)
    folder.update()
    trainer.reset(REF, f"{REF}@0")
    folder.update()
    assert equal(read(tmp_path), old)
    state["model"]["layers.0"] += 1  # the others are those of the version from which the branch was moved back
    save(trainer, state, 2)
    folder.update()
    assert equal(read(tmp_path), state)
    state["model"]["adapter"] = torch.ones(64, 64)
    save(trainer, state, 3)
    folder.update()
    assert equal(read(tmp_path), state)
    other = first_state(torch.float32, layers=5)
    save(trainer, other, 4)
    folder.update()
    assert equal(read(tmp_path), other)
    trainer.forget(REF)
    with pytest.raises(tsck.errors.NotFoundError):
        folder.update()
    assert equal(read(tmp_path), other)


@pytest.mark.slow
def test_transformers_loads_each_version(backend: MemoryBackend, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    trained = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    trained.save_pretrained(tmp_path / "first")
    trainer, faults = open_store(backend), NotedFaults()
    followed = FollowedFolder(follower(backend, faults), REF, str(tmp_path / "served"), config_from=str(tmp_path / "first"))
    served = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    feed = follower(backend).follow(REF, into=served)
    for step in range(3):
        trainer.put_snapshot({"model": trained.state_dict()}, ref=REF, step=step, delta=True)
        followed.update()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served" / "current")
        feed.poll()
        feed.swap()
        for model in (loaded, served):
            assert model.state_dict().keys() == trained.state_dict().keys()
            assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trained.state_dict().items())
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(-1)[:: 97 + step] += 0.5


def test_another_selection_is_another_version(backend: MemoryBackend, tmp_path: Path) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    for select, names in (None, {*state["model"]}), (["model.bias"], {"bias"}), (["model.layers.*"], {*state["model"]} - {"bias"}):
        with FollowedFolder(follower(backend), REF, str(tmp_path), select=select) as folder:
            assert folder.update() is not None
            assert equal(read(tmp_path), {"model": {name: state["model"][name] for name in names}})
            assert folder.update() is None
    with pytest.raises(tsck.MismatchError, match="nothing in the snapshot fits 'modle"):
        FollowedFolder(follower(backend), REF, str(tmp_path), select=["modle.*"]).update()


def test_what_lies_there_already_is_refused(backend: MemoryBackend, tmp_path: Path) -> None:
    (tmp_path / "current").mkdir()
    with pytest.raises(tsck.errors.AlreadyExistsError, match="no link"):
        FollowedFolder(open_store(backend), REF, str(tmp_path))


def test_current_stays_where_it_cannot_be_renamed(backend: MemoryBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    folder = FollowedFolder(follower(backend), REF, str(tmp_path))
    folder.update()
    old = copy_of(state)
    train(state, 1)
    save(trainer, state, 1)
    with monkeypatch.context() as patched:
        patched.delattr(os, "replace")
        with pytest.raises(AttributeError):
            folder.update()
    assert equal(read(tmp_path), old)
    folder.update()
    assert equal(read(tmp_path), state)


def test_of_two_followers_of_one_folder_one_updates_it_at_a_time(
    backend: MemoryBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    slow, other = (FollowedFolder(follower(backend), REF, str(tmp_path)) for _ in range(2))
    slow.update()
    train(state, 1)
    save(trainer, state, 1)
    publish = FollowedFolder._publish

    waits, flock = threading.Event(), fcntl.flock

    def lock(fd: int, operation: int) -> None:
        if threading.current_thread() is second:
            waits.set()
        flock(fd, operation)

    def delayed(folder: FollowedFolder, name: str) -> None:
        if folder is slow:
            train(state, 2)
            save(trainer, state, 2)
            second.start()
            assert waits.wait(PATIENCE_SECONDS)
        publish(folder, name)

    second = threading.Thread(target=other.update)
    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(FollowedFolder, "_publish", delayed)
    slow.update()
    second.join(PATIENCE_SECONDS)
    assert equal(read(tmp_path), state)


def test_what_is_being_written_stays_where_a_filesystem_has_no_locks(
    backend: MemoryBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", lock)
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    (others := tmp_path / f".{'0' * 32}.{'1' * 12}.part").mkdir()
    FollowedFolder(follower(backend), REF, str(tmp_path)).update()
    assert equal(read(tmp_path), state)
    assert others.exists()


@pytest.mark.race
@pytest.mark.slow
def test_current_is_whole_wherever_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, state = MemoryBackend(), first_state()
    save(open_store(backend), state, 0)
    old = copy_of(state)
    train(state, 1)
    calls = 0

    def failing(call: Callable[..., Any], at: int) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(28, "No space left on device")
            return call(*args, **options)

        return run

    for at in itertools.count(1):
        folder = tmp_path / str(at)
        mine = copied(backend)
        trainer = open_store(mine)
        followed = FollowedFolder(follower(mine), REF, str(folder))
        followed.update()
        trainer.checkout(REF)
        save(trainer, state, 1)
        calls = 0
        with monkeypatch.context() as patched:
            for name in ("mkdir", "open", "rename", "replace", "symlink", "unlink", "fsync", "pwrite", "pwritev"):
                patched.setattr(os, name, failing(getattr(os, name), at))
            try:
                followed.update()
            except (OSError, tsck.StoreError):
                pass
            else:
                assert calls < at
                break
        step = step_of(folder)
        assert equal(read(folder), state if step else old)
        followed.update()
        assert step_of(folder) == 1
        assert equal(read(folder), state)
    assert at > 8

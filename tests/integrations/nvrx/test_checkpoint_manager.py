"""One rank's manager: every death in a save, bad input, other state dicts, and versions."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nvidia_resiliency_ext", reason="NVRx is not installed: run `make test-apart`")
pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
    SameMachineReplicationException,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager as StockManager

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.integrations.nvrx import rank_store
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.integrations.kill_at import KillAt, forked, open_killable
from tests.integrations.nvrx.on_cpu import differs, state_dict_of
from tests.long_errors import frames_of_package, long_errors_of_adapter


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def manager_in(folder: Path, **options: Any) -> Any:
    return tsck.nvrx.LocalCheckpointManager(folder / "disk", **options)


def bytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("store/packs/**/*") if each.is_file())


def load_in(folder: Path) -> tuple[int, list[str]]:
    """The iteration that a new manager finds, and what of it is wrong."""
    manager = manager_in(folder)
    iteration = manager.find_latest()
    return iteration, [] if iteration == -1 else differs(manager.load()[0], 0, iteration)


def test_it_has_the_arguments_of_nvrx(tmp_path: Path) -> None:
    ours, theirs = manager_in(tmp_path, session_id="job"), StockManager(tmp_path / "disk", "job")
    assert isinstance(ours, BaseCheckpointManager)
    assert ours.local_ckpt_dir == theirs.local_ckpt_dir
    assert ours.find_latest() == theirs.find_latest() == -1
    for each in (ours, theirs):
        with pytest.raises(CheckpointingException, match="find_latest"):
            each.load()


def test_sessions_are_apart_and_old_checkpoints_are_freed(tmp_path: Path) -> None:
    first, second = manager_in(tmp_path, session_id="first"), manager_in(tmp_path, session_id="second")
    first.save(state_dict_of(0, 1), 1)
    once = bytes_in(tmp_path / "disk" / "first")
    assert second.find_latest() == -1
    for iteration in range(2, 8):
        first.save(state_dict_of(0, iteration), iteration)
        assert first._my_ckpt_ids() == [(iteration, 0, "first")]
        assert bytes_in(tmp_path / "disk" / "first") <= 2 * once
    with tsck.open(tmp_path / "disk" / "first" / "0" / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert store.forgotten() == ()
        assert store.fsck(read_data=True).ok


def test_an_id_that_a_dead_run_left_is_replaced(tmp_path: Path) -> None:
    manager_in(tmp_path).save(state_dict_of(0, 4), 4)
    other = state_dict_of(0, 4)
    other.common["lr"] = 0.5
    manager = manager_in(tmp_path)
    manager._save(other, (4, 0, ""))  # as a run that went on from an earlier, global checkpoint
    assert manager._load((4, 0, "")).common["lr"] == 0.5


def test_two_saves_of_one_id_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, stock = manager_in(tmp_path), Store.put_snapshot

    def after_another(store: Store, state: Any, **options: Any) -> Any:
        monkeypatch.setattr(Store, "put_snapshot", stock)
        manager_in(tmp_path)._save(state_dict_of(0, 1), (1, 0, ""))
        return stock(store, state, **options)

    monkeypatch.setattr(Store, "put_snapshot", after_another)
    with pytest.raises(SameMachineReplicationException, match="already exists"):
        manager._save(state_dict_of(0, 1), (1, 0, ""))


def test_a_save_while_another_process_frees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a save that is not published yet are no garbage."""
    manager, create = manager_in(tmp_path), LocalBackend.create
    manager.save(state_dict_of(0, 1), 1)

    def freed_before_publishing(self: Any, name: str, data: Any) -> Any:
        if name.startswith("log/"):
            monkeypatch.setattr(LocalBackend, "create", create)
            manager_in(tmp_path)._cleanup(1)
        return create(self, name, data)

    monkeypatch.setattr(LocalBackend, "create", freed_before_publishing)
    manager.save(state_dict_of(0, 2), 2)
    assert LocalBackend.create is create
    assert load_in(tmp_path) == (2, [])


@pytest.mark.slow
@pytest.mark.race
def test_every_death_in_a_save_and_its_cleanup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(folder: Path, at: int, torn: bool) -> int:
        faults = KillAt(at, torn=torn)

        def open_faulty(path: Path, **_: object) -> Store:
            return open_killable(path, faults)

        monkeypatch.setattr(rank_store, "open_store", open_faulty)
        manager = manager_in(folder)
        manager._save(state_dict_of(0, 1), (1, 0, ""))  # what `save` calls: a forked child cannot use its parent's process group
        faults.is_counting = True
        manager._save(state_dict_of(0, 2), (2, 0, ""))
        manager._cleanup(2)
        return faults.calls

    calls = forked(lambda: saved(tmp_path / "whole", 0, False), tmp_path / "whole")
    assert calls is not None
    found = set()
    every = [(at, torn) for at in range(1, calls + 1) for torn in (False, True)]
    for at, torn in effort([*dict.fromkeys(every[::5] + every[-1:])], every):
        folder = tmp_path / f"killed-{at}-{torn}"
        assert forked(lambda: saved(folder, at, torn), folder) is None  # noqa: B023
        iteration, wrong = load_in(folder)
        assert (iteration in {1, 2}, wrong) == (True, []), (at, torn)
        found.add(iteration)
        manager_in(folder).save(state_dict_of(0, 3), 3)
        assert load_in(folder) == (3, [])
        assert bytes_in(folder) <= 2 * bytes_in(tmp_path / "whole"), (at, torn)
    assert found == {1, 2}


def test_a_damaged_checkpoint_is_an_error_and_found_no_more(tmp_path: Path) -> None:
    manager_in(tmp_path).save(state_dict_of(0, 3), 3)
    packs = [each for each in tmp_path.rglob("store/packs/**/*") if each.is_file()]
    largest = max(packs, key=lambda each: each.stat().st_size)
    held = bytearray(largest.read_bytes())
    held[len(held) // 2] ^= 1
    largest.chmod(0o600)
    largest.write_bytes(held)
    manager = manager_in(tmp_path)
    assert manager.find_latest() == 3
    with pytest.raises(
        tsck.nvrx.LocalCheckpointUnavailableError, match=r"rank 0 from iteration 3 .* was damaged .*there is no other"
    ) as error:
        manager.load()
    assert isinstance(error.value, CheckpointingException)
    assert manager_in(tmp_path).find_latest() == -1
    manager.save(state_dict_of(0, 3), 3)
    assert load_in(tmp_path) == (3, [])


RESUME = """
import sys

import megatron.core
import torch.distributed as dist

import tensorstore_ck as tsck

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous-of-resume", rank=0, world_size=1)
manager = tsck.nvrx.LocalCheckpointManager(f"{sys.argv[1]}/disk")
print("found", manager.find_latest(), "with the rate", manager.load()[0].common["lr"])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_process_of_megatron_that_has_saved_nothing_loads(tmp_path: Path) -> None:
    manager_in(tmp_path).save(state_dict_of(0, 4), 4)
    done = subprocess.run([sys.executable, "-c", RESUME, tmp_path], capture_output=True, text=True, check=False)
    assert "found 4 with the rate 0.1" in done.stdout, done.stderr


def test_the_state_dict_of_nvrx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes tensors on CUDA devices alone, and puts them there."""
    made = object.__new__(BasicTensorAwareStateDict)
    made.state_dict, made._is_hollow = {"model": [torch.arange(4.0), {"b": torch.ones(2, dtype=torch.int8)}], "step": 7}, False
    monkeypatch.setattr(BasicTensorAwareStateDict, "restore_tensor_device", lambda self, non_blocking: None)
    manager_in(tmp_path).save(made, 1)
    manager = manager_in(tmp_path)
    assert manager.find_latest() == 1
    found = manager.load()[0]
    assert type(found) is BasicTensorAwareStateDict
    assert [each.tolist() for each in found.tensors] == [[0, 1, 2, 3], [1, 1]]
    assert (found.state_dict["step"], found.is_hollow) == (7, False)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import nvrx_local

    def take(self: Any, state_dict: Any) -> None:
        self.state_dict, self._is_hollow = state_dict, False

    monkeypatch.setattr(BasicTensorAwareStateDict, "__init__", take)  # it takes tensors on CUDA devices alone, and puts them there
    monkeypatch.setattr(BasicTensorAwareStateDict, "restore_tensor_device", lambda self, non_blocking: None)
    whole = nvrx_local.main(tmp_path / "whole", 20, "cpu")
    nvrx_local.main(tmp_path / "cut", 12, "cpu")
    assert nvrx_local.main(tmp_path / "cut", 20, "cpu") == whole


class Other(BasicTensorAwareStateDict):  # type: ignore[misc]
    pass


class Opaque:
    pass


def test_what_cannot_be_stored_is_an_error(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    other = object.__new__(Other)
    other.state_dict, other._is_hollow = {}, False
    with pytest.raises(tsck.UnsupportedValueError, match=r"checkpoint.*Other.*tsck\.register_type") as caught:
        manager.save(other, 1)
    assert frames_of_package(caught.value) == []
    opaque = state_dict_of(0, 1)
    opaque.common["args"] = {"inner": Opaque()}
    with pytest.raises(tsck.UnsupportedValueError, match=r"checkpoint\.common\.args\.inner.*Opaque"):
        manager.save(opaque, 1)
    assert manager_in(tmp_path).find_latest() == -1
    manager.save(state_dict_of(0, 1), 1)


def test_a_type_that_is_not_registered_here(tmp_path: Path) -> None:
    """It deletes nothing: the process that registers it can load it."""
    with tsck.open(tmp_path / "disk" / "0" / "store", create=True, cache_dir=tmp_path / "cache") as store:
        tsck.register_type(Opaque, "tests.Opaque", lambda _: {}, lambda _: Opaque())
        store.put_snapshot({"checkpoint": Opaque()}, ref="iteration-1/rank-0", step=1)
    from tensorstore_ck.state import registered_types

    registered_types._registered_names.pop("tests.Opaque")
    registered_types._registered_classes.pop(Opaque)
    manager = manager_in(tmp_path)
    assert manager.find_latest() == 1
    with pytest.raises(tsck.nvrx.LocalCheckpointUnavailableError, match=r"tests\.Opaque.*tsck\.register_type"):
        manager.load()
    assert manager_in(tmp_path).find_latest() == 1


@pytest.mark.parametrize("session_id", ["../other", "/tmp", 7])
def test_a_session_that_leads_out_of_the_folder(tmp_path: Path, session_id: Any) -> None:
    with pytest.raises(tsck.InvalidOptionError, match="session_id= must be a relative path"):
        manager_in(tmp_path, session_id=session_id)


def test_a_cleanup_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, gc = manager_in(tmp_path), Store.gc

    def fail(*_: object) -> None:
        raise tsck.BackendUnavailableError("the disk does not answer")

    manager.save(state_dict_of(0, 1), 1)
    monkeypatch.setattr(Store, "gc", fail)
    with pytest.warns(UserWarning, match="still take space: the disk does not answer"):
        manager.save(state_dict_of(0, 2), 2)
    monkeypatch.setattr(Store, "gc", gc)
    manager.save(state_dict_of(0, 3), 3)
    assert manager._my_ckpt_ids() == [(3, 0, "")]


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstore_ck.integrations.nvrx import checkpoint_manager

    monkeypatch.setattr(checkpoint_manager, "version", lambda _: "0.8.0")
    with pytest.raises(tsck.MissingExtraError, match=r"NVRx 0\.8\.0 is not supported"):
        manager_in(tmp_path)
    monkeypatch.undo()
    for name, expected in ("USED", ((BaseCheckpointManager.find_latest, ("self", "group")),)), ("ABSTRACT", frozenset({"_load"})):
        monkeypatch.setattr(checkpoint_manager, name, expected)
        with pytest.raises(tsck.MissingExtraError, match="has another BaseCheckpointManager"):
            manager_in(tmp_path)
        monkeypatch.undo()


def test_errors_of_what_it_offers_are_short() -> None:
    assert long_errors_of_adapter("nvrx") == []

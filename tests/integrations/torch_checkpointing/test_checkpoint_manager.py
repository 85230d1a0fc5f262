"""`tsck.CheckpointManager`: what torch_checkpointing's saves and loads, without its files."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.state.arena import Arena
from tensorstore_ck.state.load_report import LoadWarning
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import contents, open_store
from tests.state.device.late_device import LateDevice, put_tensors_on
from tests.training.resume_rule import NEWEST, check_door

REF = "runs/m"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        yield store


def spec(*, resharder: object = None, required: bool = True) -> SimpleNamespace:
    return SimpleNamespace(requires_copy=True, layout=None, resharder=resharder, required=required)


def config(items: dict[str, Any] | None = None, *, default: object = spec(), sync: bool = False) -> SimpleNamespace:
    """In the form of torch_checkpointing's."""
    return SimpleNamespace(items=items or {}, default=default, save=SimpleNamespace() if sync else SimpleNamespace(staging_config=1))


def payload(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    for _ in range(step):
        optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step, "rng": torch.get_rng_state()}


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_saved_is_loaded_in_place(store: tsck.Store, sync: bool) -> None:
    saved, into = payload(10), payload(11)
    weight = into["model"]["weight"]
    with tsck.CheckpointManager(config(sync=sync), store=store, ref=REF) as manager:
        manager.prewarm_staging(saved)
        future = manager.save("/ckpt/step_10", saved)
        assert (future is None) == sync
        if future is not None:
            snapshot = future.result()
            assert (snapshot.ref, snapshot.step) == (REF, 10)
        with manager.lock():
            saved["model"]["weight"].zero_()
        found = manager.load(Path("/ckpt/step_10"), into=into, strict=True)
    assert_equal(found, payload(10))
    assert found["model"]["weight"] is weight
    assert type(found["model"]) is OrderedDict


def test_the_store_that_a_manager_opens_is_closed_with_it(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[tsck.Store] = []
    close = tsck.Store.close

    def noted(self: tsck.Store) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(tsck.Store, "close", noted)
    with tsck.CheckpointManager(store=store, ref=REF):
        pass
    assert not closed
    with tsck.CheckpointManager(store=store.url, ref=REF):
        pass
    assert len(closed) == 1


def test_parts_and_wholes(store: tsck.Store) -> None:
    """Only what is asked for; None stands for all of an item, and so do the items of the Config."""
    with tsck.CheckpointManager(config({"model": spec()}), store=store, ref=REF) as manager:
        manager.save("one", payload(1))
        found = manager.load("one", into={"model": {"bias": torch.zeros(2)}})
        assert_equal(found, {"model": {"bias": payload(1)["model"]["bias"]}})
        assert_equal(manager.load("one", into={"model": None, "optim": None}), {key: payload(1)[key] for key in ("model", "optim")})
        assert_equal(manager.load("one"), {"model": payload(1)["model"]})


def test_ids(store: tsck.Store) -> None:
    """A number at the end is the step, if it can be; of several checkpoints with one id the newest counts; addresses work, too."""
    with tsck.CheckpointManager(config(sync=True), store=store, ref=REF) as manager:
        for number, name in enumerate(["step_5", "best_3", "final", "step_5"]):
            manager.save(name, {"number": number})
        assert [snapshot.step for snapshot in store.log(REF)] == [5, None, None, 5]
        loaded = {name: manager.load(name, into={"number": None})["number"] for name in ("best_3", "final", "step_5", REF, f"{REF}~3")}
        assert loaded == {"best_3": 1, "final": 2, "step_5": 3, REF: 3, f"{REF}~3": 0}
        assert manager.newest_id() == "step_5"


def test_the_newest_id_is_of_a_sound_checkpoint(store: tsck.Store) -> None:
    with tsck.CheckpointManager(config(sync=True), store=store, ref=REF) as manager:
        assert manager.newest_id() is None
        assert manager.load_newest({"number": None}) is None
        manager.save("step_1", {"number": 1})
        manager.save("step_2", {"number": 2})
        store.mark(REF, "bad")
        with pytest.warns(UserWarning, match="was skipped"):
            assert manager.newest_id() == "step_1"


@pytest.mark.parametrize("case", NEWEST)
def test_which_snapshot_a_resume_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    def save(store: tsck.Store) -> None:
        with tsck.CheckpointManager(config(sync=True), store=store, ref=REF) as manager:
            for step in (1, 2):
                manager.save(f"step_{step}", {"weights": torch.rand(10_000) + step})

    def resume(store: tsck.Store, _: str | None) -> int:
        with tsck.CheckpointManager(config(sync=True), store=store, ref=REF) as manager:
            found = manager.load_newest({"weights": torch.zeros(10_000)})
        assert found is not None
        step = int(found[1]["weights"].min())
        assert found[0] == f"step_{step}"
        return step

    check_door(case, tmp_path, monkeypatch, REF, save=save, resume=resume)


@pytest.mark.parametrize("name", ["step_5", "final"])
def test_a_run_goes_on_from_what_it_loads(store: tsck.Store, tmp_path: Path, name: str) -> None:
    """Also from an older checkpoint; a run that loads nothing does not take over the ref."""
    with tsck.CheckpointManager(config(sync=True), store=store, ref=REF) as manager:
        manager.save(name, {"number": 1})
        manager.save("step_6", {"number": 2})
    with tsck.CheckpointManager(config(sync=True), store=store.url, ref=REF) as manager:
        with pytest.raises(tsck.ConflictError):
            manager.save("step_9", {"number": 3})
        manager.load(name, into={"number": None})
        manager.save("step_7", {"number": 4})
    assert store.resolve(REF).step == 7


def test_what_a_checkpoint_lacks(store: tsck.Store) -> None:
    with tsck.CheckpointManager(store=store, ref=REF) as manager:
        manager.save("one", {"model": {"a": torch.ones(2), "b": [1, torch.ones(3)]}})
        with pytest.raises(FileNotFoundError, match="has no checkpoint 'two'"):
            manager.load("two", into={"model": None})
        with pytest.raises(FileNotFoundError, match="no item 'optim'"):
            manager.load("one", into={"optim": {"x": 1}})
        wanted: dict[str, Any] = {"model": {"a": torch.zeros(2), "c": {"d": torch.zeros(1), "e": 7}}}
        with pytest.raises(RuntimeError, match=r"missing keys: \['model.c.d', 'model.c.e'\]"):
            manager.load("one", into=wanted, strict=True)
        with pytest.warns(LoadWarning, match=r"model\.c\.d"):
            found = manager.load("one", into=wanted)
        assert_equal(found, {"model": {"a": torch.ones(2), "c": {"d": torch.zeros(1), "e": 7}}})
        with pytest.raises(RuntimeError, match=r"shape \[3\] here, \[2\] in the snapshot"):
            manager.load("one", into={"model": {"a": torch.zeros(3)}})


def test_a_schema(store: tsck.Store) -> None:
    manager = tsck.CheckpointManager(config({"model": spec(), "optim": spec(required=False)}, default=None), store=store, ref=REF)
    with manager:
        for call in (manager.save, manager.load):
            with pytest.raises(KeyError, match=r"missing required checkpoint item\(s\): \['model'\]"):
                call("one", {})
            with pytest.raises(KeyError, match="strict"):
                call("one", {"model": 1, "extra": 2}) if call == manager.save else manager.save("one", {"model": 1, "extra": 2})
            manager.save("one", {"model": 1})
    assert store.checkout(REF) == {"model": 1}


def test_bad_input(store: tsck.Store) -> None:
    with tsck.CheckpointManager(store=store, ref=REF) as manager:
        for wrong in ("", "/", 3, None):
            with pytest.raises(tsck.InvalidOptionError, match="a checkpoint id is a text"):
                manager.save(wrong, {"a": 1})  # type: ignore[arg-type]
        for key in ("a b", "a/b", "", 1):
            with pytest.raises(ValueError, match="invalid checkpoint keys"):
                manager.save("one", {key: 1})  # type: ignore[dict-item]
        with pytest.raises(tsck.InvalidOptionError, match="a dict of items by key"):
            manager.save("one", [1])  # type: ignore[arg-type]
        with pytest.raises(tsck.UnsupportedValueError, match=r"a\.b"):
            manager.save("one", {"a": {"b": object()}})
        with pytest.raises(ValueError, match="requires into="):
            manager.load("one")
        with pytest.raises(tsck.InvalidOptionError, match="map_location"):
            manager.load("one", into={"a": 1}, map_location={"cuda:0": "cpu"})
        manager.save("one", {"a": 1})
        with pytest.raises(tsck.InvalidOptionError, match="device='meta'"):
            manager.load("one", into={"a": 1}, map_location="meta")
        with pytest.raises(tsck.InvalidOptionError, match="metadata_format"):
            manager.load("one", into={"a": 1}, metadata_format=object())
    for call in (lambda: manager.save("x", {}), lambda: manager.load("x", into={"a": 1}), lambda: manager.prewarm_staging({})):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    manager.close()
    assert len(store.log(REF)) == 1


@pytest.mark.parametrize("name", ["pre_finalize_callback", "finalize_callback", "subprocess_init_fn"])
def test_options_of_files_are_refused(store: tsck.Store, name: str) -> None:
    native = config()
    setattr(native, name, print)
    with pytest.raises(tsck.InvalidOptionError, match=f"Config.{name} has no meaning"):
        tsck.CheckpointManager(native, store=store, ref=REF)
    with pytest.raises(tsck.InvalidOptionError, match="Config of torch_checkpointing"):
        tsck.CheckpointManager({"items": {}}, store=store, ref=REF)


def test_a_failed_save_is_raised_by_its_future_and_by_the_next_save() -> None:
    for at in range(1, 100):
        faults = Faults("no-space", persistent=True)
        with open_store(FaultyBackend(MemoryBackend(), faults, atomic_put=False)) as store:
            manager = tsck.CheckpointManager(store=store, ref=REF)
            faults.calls, faults.at = 0, at
            try:
                future = manager.save("step_1", {"a": torch.ones(3)})
            except tsck.NoSpaceError:
                continue  # before it was in the background
            assert future is not None
            assert isinstance(future.exception(), tsck.NoSpaceError)
            with pytest.raises(tsck.NoSpaceError):
                manager.save("step_2", {"a": torch.ones(3)})
            faults.at = 0
            manager.save("step_3", {"a": torch.ones(3)})
            manager.close()
            assert [snapshot.step for snapshot in store.log(REF)] == [3]
            return
    raise AssertionError("no save failed in the background")


def test_a_policy_bounds_bytes(store: tsck.Store) -> None:
    with tsck.CheckpointManager(config(sync=True), store=store, ref=REF, keep={"keep_last": 2}) as manager:
        for step in range(1, 11):
            manager.save(f"step_{step}", {"weights": torch.randn(1 << 14)})
    assert [snapshot.step for snapshot in store.log(REF)] == [10, 9]
    usage = store.usage()
    assert usage.undo_bytes == 0
    assert usage.stored_bytes < 4 * (1 << 16)


@pytest.mark.slow
@pytest.mark.race
def test_a_death_at_every_call_of_a_save() -> None:
    """The last whole checkpoint is there, with all its items, and no other."""
    before = MemoryBackend()
    with open_store(before) as store, tsck.CheckpointManager(config(sync=True), store=store, ref=REF) as manager:
        manager.save("step_1", payload(1))
    seen = set()
    for at, mode in in_turns(range(1, 1000), ["die-before", "die-after", "tear"]):
        backend, faults = MemoryBackend(), Faults(mode)
        for name, data in contents(before).items():
            backend.put(name, data)
        dying = tsck.CheckpointManager(config(sync=True), store=open_store(FaultyBackend(backend, faults, atomic_put=False)), ref=REF)
        dying.load("step_1", into={"step": None})
        faults.calls, faults.at = 0, at
        with suppress(Death):
            dying.save("step_2", payload(2))
        with open_store(backend) as store, tsck.CheckpointManager(store=store, ref=REF) as manager:
            newest = manager.newest_id()
            assert newest is not None
            step = int(newest.removeprefix("step_"))
            assert_equal(manager.load(newest, into=dict.fromkeys(payload(1)), strict=True), payload(step))
        seen.add(step)
        if not faults.struck:
            break
    assert at > 5
    assert seen == {1, 2}


def test_what_the_named_optimizer_changes_is_copied_until_its_next_step(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    put_tensors_on(device, monkeypatch)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(torch.ones(300)).sum().backward()
        optimizer.step()

    with tsck.CheckpointManager(store=store, ref=REF, changed_by=optimizer) as manager:
        for number in range(2):  # the first save tries the optimizer out
            future = manager.save(f"step_{number}", {"model": model.state_dict()})
            expected = model.weight.detach().clone()
            assert len(device.late) == number
            step()
            assert device.late == []
            assert future is not None
            future.result()
        into = {"model": {name: torch.empty_like(value) for name, value in model.state_dict().items()}}
        assert torch.equal(manager.load("step_1", into=into)["model"]["weight"], expected)


def test_prewarm_staging_prepares_memory_and_watches_the_optimizer(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Arena, "prepare", lambda arena, size_bytes, count: prepared.append(size_bytes))
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tsck.CheckpointManager(store=store, ref=REF, changed_by=optimizer) as manager:
        manager.prewarm_staging({"model": model.state_dict()})
        assert optimizer._optimizer_step_pre_hooks
    store.close()
    assert prepared == [300 * 300 * 4 + 19 * 64]


def test_a_damaged_checkpoint_is_not_called_missing(store: tsck.Store) -> None:
    with tsck.CheckpointManager(config(sync=True), store=store, ref=REF) as manager:
        manager.save("step_1", payload(1))
    (record,) = Path(store.url).glob("snapshots/*/*")
    record.chmod(0o600)
    record.write_bytes(record.read_bytes()[:-5])
    with (
        tsck.open(store.url) as other,
        tsck.CheckpointManager(config(sync=True), store=other, ref=REF) as manager,
        pytest.raises(tsck.CorruptObjectError),
    ):
        manager.load("step_1", into=payload(1))

"""The strategies on one rank, with Megatron's own mapping classes: what is stored, `strict=`, errors."""

import io
import json
import logging
import random
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import CheckpointingException, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState
from megatron.core.transformer.enums import AttnBackend

import tensorstore_ck as tsck
from tensorstore_ck.errors import (
    ConflictError,
    MismatchError,
    NotFoundError,
    SnapshotAbortedError,
    UnsupportedValueError,
)
from tensorstore_ck.integrations.megatron import Strategies
from tensorstore_ck.integrations.megatron.version import has_registry, keeps_common_state_as_object
from tests.integrations.conftest import has_finished
from tests.state.device.late_device import LateDevice, put_tensors_on

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True, scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('ranks') / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def registered(tmp_path: Path) -> Iterator[Strategies]:
    with tsck.megatron.register(tmp_path / "store", ref="runs/gpt") as made:
        yield made


def folder(tmp_path: Path, step: int = 1) -> str:
    made = tmp_path / f"iter_{step:07d}"
    made.mkdir(exist_ok=True)
    return str(made)


def weight(**options: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("layer.weight", torch.arange(6.0).reshape(2, 3), **options)


def state(**more: Any) -> dict[str, Any]:
    return {"model": {"w": weight()}, "rng": ShardedObject("rng_state", {"seed": 3}, (1,), (0,)), "iteration": 7, **more}


def empty() -> dict[str, Any]:
    return {
        "model": {"w": ShardedTensor.from_rank_offsets("layer.weight", torch.zeros(2, 3))},
        "rng": ShardedObject("rng_state", None, (1,), (0,)),
    }


def test_a_folder_names_a_snapshot_that_has_everything(tmp_path: Path, registered: Strategies) -> None:
    where = folder(tmp_path, 5)
    dist_checkpointing.save(state(args=Namespace(lr=0.1)), where, registered.save, content_metadata={"version": 2})
    assert {each.name for each in Path(where).iterdir()} == {"metadata.json", "snapshot.json"}
    newest = registered.store.resolve("runs/gpt")
    assert json.loads(Path(where, "snapshot.json").read_text()) == {"store": registered.store.url, "address": newest.root}
    assert newest.step == 5
    whole = registered.store.checkout("runs/gpt")
    assert torch.equal(whole["layer.weight"], torch.arange(6.0).reshape(2, 3))
    assert whole["rng_state/shard_0_1"] == {"seed": 3}
    assert whole["common"] == {"iteration": 7, "args": Namespace(lr=0.1), "content_metadata": {"version": 2}}

    loaded = dist_checkpointing.load(empty(), where)
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert (loaded["rng"], loaded["iteration"], loaded["args"].lr) == ({"seed": 3}, 7, 0.1)
    assert dist_checkpointing.load_content_metadata(where) == {"version": 2}
    assert torch.equal(dist_checkpointing.load_plain_tensors(where)["layer.weight"], torch.arange(6.0).reshape(2, 3))


def test_values_of_each_type_come_back(tmp_path: Path, registered: Strategies) -> None:
    values = {
        "rerun": [RerunMode.VALIDATE_RESULTS, RerunState.INITIAL_RUN, RerunDiagnostic.TRANSIENT_ERROR],
        "backend": AttnBackend.flash,
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "sizes": {(torch.bfloat16, torch.float32): [7936]},
        "path": Path("/a/b"),
        "none": None,
    }
    sent = {**values, "extra": io.BytesIO(b"amax"), "config": OptimizerConfig(lr=0.25)}
    dist_checkpointing.save({"object": ShardedObject("all", sent, (1, 1), (0, 0))}, folder(tmp_path), registered.save)
    found = dist_checkpointing.load({"object": ShardedObject("all", None, (1, 1), (0, 0))}, folder(tmp_path))["object"]
    assert (found.pop("extra").getvalue(), found.pop("config")) == (b"amax", sent["config"])
    assert torch.equal(found.pop("torch"), values.pop("torch"))
    for one, other in zip(found.pop("numpy"), values.pop("numpy"), strict=True):
        assert np.array_equal(one, other)
    assert found == values


def test_replicas_and_nonpersistent_objects_are_not_stored(tmp_path: Path, registered: Strategies) -> None:
    sent = state(
        local=LocalNonpersistentObject([1, 2]),
        copy=ShardedTensor.from_rank_offsets("copy", torch.ones(2), replica_id=1),
        object_copy=ShardedObject("object", 1, (1,), (0,), replica_id=(0, 1)),
    )
    dist_checkpointing.save(sent, folder(tmp_path), registered.save, validate_access_integrity=False)
    assert set(registered.store.checkout("runs/gpt")) == {"layer.weight", "rng_state/shard_0_1", "common"}
    assert dist_checkpointing.load({**empty(), "local": LocalNonpersistentObject([3])}, folder(tmp_path))["local"] == [3]


def test_a_factory_is_applied_and_merged(tmp_path: Path, registered: Strategies) -> None:
    def build(key: str, tensor: torch.Tensor, replica_id: Any, _: object) -> Any:
        halves = torch.chunk(tensor, 2)
        return {name: ShardedTensor.from_rank_offsets(f"{key}.{name}", half) for name, half in zip("wv", halves, strict=True)}

    def factory(tensor: torch.Tensor) -> ShardedTensorFactory:
        return ShardedTensorFactory("fc1", tensor, build, lambda parts: torch.cat([parts["w"], parts["v"]]))

    dist_checkpointing.save({"fc1": factory(torch.arange(8.0))}, folder(tmp_path), registered.save)
    with registered.store.open_snapshot("runs/gpt") as found:
        assert set(found) == {"fc1.w", "fc1.v"}
    assert torch.equal(dist_checkpointing.load({"fc1": factory(torch.zeros(8))}, folder(tmp_path))["fc1"], torch.arange(8.0))


def test_prepended_axes_and_several_boxes_of_one_tensor(tmp_path: Path, registered: Strategies) -> None:
    layers = torch.arange(12.0).reshape(3, 4)
    sent = {str(at): ShardedTensor.from_rank_offsets("layers.bias", layers[at].clone(), (0, at, 3), prepend_axis_num=1) for at in range(3)}
    dist_checkpointing.save(sent, folder(tmp_path), registered.save)
    assert torch.equal(registered.store.checkout("runs/gpt")["layers.bias"], layers)
    one = {"last": ShardedTensor.from_rank_offsets("layers.bias", torch.zeros(4), (0, 2, 3), prepend_axis_num=1)}
    assert torch.equal(dist_checkpointing.load(one, folder(tmp_path), validate_access_integrity=False)["last"], layers[2])


@pytest.mark.parametrize(("rows", "expected"), [(6, [0.0, 1, 2, 3, 0, 0]), (2, [0.0, 1])])
def test_a_padded_tensor_may_have_another_shape(tmp_path: Path, registered: Strategies, rows: int, expected: list[float]) -> None:
    dist_checkpointing.save({"e": ShardedTensor.from_rank_offsets("embedding", torch.arange(4.0))}, folder(tmp_path), registered.save)
    wanted = ShardedTensor.from_rank_offsets("embedding", torch.full((rows,), 9.0), allow_shape_mismatch=True)
    assert dist_checkpointing.load({"e": wanted}, folder(tmp_path))["e"].tolist() == expected
    with pytest.raises(MismatchError, match=rf"embedding: its global shape is \[{rows}\] here, and \[4\] in"):
        dist_checkpointing.load({"e": ShardedTensor.from_rank_offsets("embedding", torch.zeros(rows))}, folder(tmp_path))


def test_a_tensor_of_another_dtype_is_converted(tmp_path: Path, registered: Strategies) -> None:
    dist_checkpointing.save(state(), folder(tmp_path), registered.save)
    wanted = {"w": ShardedTensor.from_rank_offsets("layer.weight", torch.zeros(2, 3, dtype=torch.bfloat16))}
    loaded = dist_checkpointing.load(wanted, folder(tmp_path))["w"]
    assert loaded.dtype == torch.bfloat16
    assert loaded.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_all_strict_flags(tmp_path: Path, registered: Strategies, caplog: pytest.LogCaptureFixture) -> None:
    where = folder(tmp_path)
    dist_checkpointing.save(state(), where, registered.save)

    def wanted() -> dict[str, Any]:
        return {
            "model": {"w": weight()},
            "new": ShardedTensor.from_rank_offsets("new.weight", torch.zeros(2)),
            "object": ShardedObject("new_object", None, (1,), (0,)),
        }

    def load(strict: StrictHandling) -> Any:
        return dist_checkpointing.load(wanted(), where, strict=strict)

    unexpected, missing = {"new.weight", "new_object"}, {"rng_state"}
    with pytest.raises(CheckpointingException, match=r"has no object 'new_object/shard_0_1'"):
        load(StrictHandling.ASSUME_OK_UNEXPECTED)
    for strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
        with pytest.raises(CheckpointingException, match=r"new\.weight"):
            load(strict)
    for strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL, StrictHandling.IGNORE_ALL):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert set(load(strict)["model"]) == {"w"}
        assert ("new.weight" in caplog.text) == (strict != StrictHandling.IGNORE_ALL)
        assert ("rng_state" in caplog.text) == (strict == StrictHandling.LOG_ALL)
    assert load(StrictHandling.RETURN_UNEXPECTED)[1:] == (set(), unexpected)
    assert load(StrictHandling.RETURN_ALL)[1:] == (missing, unexpected)


def test_a_folder_whose_snapshot_is_gone_or_elsewhere_or_was_never_published(tmp_path: Path, registered: Strategies) -> None:
    where = folder(tmp_path)
    dist_checkpointing.save(state(), where, registered.save)
    registered.store.forget("runs/gpt")
    dist_checkpointing.load(empty(), where)  # it can be undone for a day
    registered.store.gc(tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1))
    with pytest.raises(NotFoundError, match=r"which is not there: a policy or a person dropped it; resume from another one"):
        dist_checkpointing.load(empty(), where)
    with tsck.megatron.register(tmp_path / "other", ref="runs/gpt"):
        with pytest.raises(NotFoundError, match=r"which the registered store .*other does not have: register the other one"):
            dist_checkpointing.load(empty(), where)
        Path(where, "snapshot.json").unlink()
        with pytest.raises(NotFoundError, match=r"snapshot\.json is missing: no snapshot was published for this folder"):
            dist_checkpointing.load(empty(), where)


@pytest.mark.parametrize("ends", ["with the block", "by an error", "when it is closed", "without a save"])
def test_the_end_of_a_run_is_noted(tmp_path: Path, ends: str) -> None:
    with suppress(KeyError), tsck.megatron.register(tmp_path / "store", ref="runs/gpt") as registered:
        registered.store.put_snapshot({}, ref="runs/other")
        if ends != "without a save":
            dist_checkpointing.save(state(), folder(tmp_path), registered.save)
        if ends == "by an error":
            raise KeyError
        if ends == "when it is closed":
            registered.close(finished=True)
    with tsck.open(tmp_path / "store", read_only=True) as store:
        assert has_finished(store) == (ends in {"with the block", "when it is closed"})


def test_a_run_that_loaded_nothing_does_not_take_over_a_ref(tmp_path: Path, registered: Strategies) -> None:
    dist_checkpointing.save(state(), folder(tmp_path), registered.save)
    registered.close()
    with tsck.megatron.register(tmp_path / "store", ref="runs/gpt") as again:
        with pytest.raises(ConflictError):
            dist_checkpointing.save(state(), folder(tmp_path, 2), again.save)
        assert not dist_checkpointing.check_is_distributed_checkpoint(folder(tmp_path, 2))
        dist_checkpointing.load(empty(), folder(tmp_path))
        dist_checkpointing.save(state(), folder(tmp_path, 2), again.save)
        assert again.store.resolve("runs/gpt").step == 2


def resumed_locally(tmp_path: Path, iteration: int = 2, load: str = ".", **more: Any) -> dict[str, Any]:
    """As Megatron-LM saves it, in a job that began with an iteration; 0: a new job, or one that only takes weights."""
    return state(args=Namespace(load=str(tmp_path / load), iteration=iteration), **more)


def save_twice(tmp_path: Path, registered: Strategies, latest: str = "2") -> None:
    """Ends with the end of the job."""
    for step in (1, 2):
        dist_checkpointing.save(state(), folder(tmp_path, step), registered.save)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    registered.close()


@pytest.mark.parametrize("saving", ["sync", "async"])
def test_a_job_that_resumed_from_a_local_checkpoint_goes_on_with_the_ref(tmp_path: Path, registered: Strategies, saving: str) -> None:
    save_twice(tmp_path, registered)
    with tsck.megatron.register(tmp_path / "store", ref="runs/gpt") as again:
        queue = AsyncCallsQueue()
        for step in (4, 5):
            request = dist_checkpointing.save(
                resumed_locally(tmp_path, 3), folder(tmp_path, step), again.save, async_sharded_save=saving == "async"
            )
            if request is not None:
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
        assert [again.store.resolve(f"runs/gpt{back}").step for back in ("", "~1", "~2", "~3")] == [5, 4, 2, 1]


@pytest.mark.parametrize(
    ("latest", "resumed"),
    [
        ("2", {"iteration": 0}),
        ("2", {"iteration": 1}),
        ("2", {"load": "elsewhere"}),
        ("1", {}),
        ("3", {}),
        ("release", {}),
    ],
    ids=["new job", "a successor has saved since", "loads from another folder", "not the head", "no folder", "no number"],
)
def test_who_does_not_go_on_with_a_ref(tmp_path: Path, registered: Strategies, latest: str, resumed: dict[str, Any]) -> None:
    save_twice(tmp_path, registered, latest)
    with tsck.megatron.register(tmp_path / "store", ref="runs/gpt") as again:
        for _ in range(2):
            with pytest.raises(ConflictError):
                dist_checkpointing.save(resumed_locally(tmp_path, **resumed), folder(tmp_path, 4), again.save)
        assert again.store.resolve("runs/gpt").step == 2


def test_a_folder_that_another_strategy_wrote_since_names_no_snapshot(tmp_path: Path, registered: Strategies) -> None:
    save_twice(tmp_path, registered)
    dist_checkpointing.save({"w": weight()}, folder(tmp_path, 2))
    assert (tmp_path / "iter_0000002" / "snapshot.json").exists()
    with tsck.megatron.register(tmp_path / "store", ref="runs/gpt") as again, pytest.raises(ConflictError):
        dist_checkpointing.save(resumed_locally(tmp_path), folder(tmp_path, 4), again.save)


def test_what_cannot_be_stored_is_named(tmp_path: Path, registered: Strategies) -> None:
    with pytest.raises(UnsupportedValueError, match=r"cannot store .*call"):
        dist_checkpointing.save(state(o=ShardedObject("call", print, (1,), (0,))), folder(tmp_path), registered.save)
    with pytest.raises(UnsupportedValueError, match=r"a ShardedTensor may not have the key 'common'"):
        dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("common", torch.zeros(2))}, folder(tmp_path, 2), registered.save)
    assert registered.store.branches() == {}


# Of torch, because of how Megatron calls it, in some versions.
@pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The argument order of load has been changed:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_folders_of_other_backends_are_still_loaded_by_megatron(tmp_path: Path, registered: Strategies) -> None:
    where = folder(tmp_path)
    dist_checkpointing.save({"iteration": 7, "w": weight()}, where)
    assert dist_checkpointing.load_common_state_dict(where) == {"iteration": 7}
    loaded = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("layer.weight", torch.zeros(2, 3))}, where)
    assert torch.equal(loaded["w"], torch.arange(6.0).reshape(2, 3))
    with pytest.raises(CheckpointingException, match=r"written with the backend 'torch_dist'"):
        dist_checkpointing.load(empty(), where, registered.load)


def test_the_backend_that_megatron_names_is_that_of_the_last_save(tmp_path: Path, registered: Strategies) -> None:
    """Its wrapper has a name of its own since 0.17."""
    where = folder(tmp_path)
    for strategy, expected in (
        (FullyParallelSaveStrategyWrapper(registered.save), "tsck"),
        (None, "torch_dist"),
        (registered.save, "tsck"),
    ):
        dist_checkpointing.save(state(name=expected), where, strategy)
        assert json.loads(Path(where, "metadata.json").read_text())["sharded_backend"] == expected
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of how Megatron calls it
            assert dist_checkpointing.load(empty(), where)["name"] == expected


def test_a_folder_of_a_later_version(tmp_path: Path, registered: Strategies) -> None:
    where = folder(tmp_path)
    dist_checkpointing.save(state(), where, registered.save)
    config = Path(where, "metadata.json")
    config.write_text(config.read_text().replace('"sharded_backend_version": 1', '"sharded_backend_version": 2'))
    with pytest.raises(CheckpointingException, match=r"version 2 of the backend 'tsck': upgrade tensorstore_ck|'load_sharded', 'tsck', 2"):
        dist_checkpointing.load(empty(), where)


@pytest.mark.skipif(has_registry(), reason="this Megatron-core has one queue for asynchronous saves")
def test_a_save_for_an_unknown_queue_publishes_nothing(tmp_path: Path, registered: Strategies) -> None:
    with pytest.raises(TypeError, match="mine"):
        dist_checkpointing.save(state(), folder(tmp_path), registered.save, async_sharded_save=True, async_strategy="mine")
    registered.close()  # it waits for saves
    with tsck.open(tmp_path / "store") as store:
        assert store.branches() == {}


@pytest.mark.skipif(not has_registry(), reason="this Megatron-core has no registry of strategies")
def test_the_backend_by_its_name(tmp_path: Path, registered: Strategies) -> None:
    dist_checkpointing.save(state(), folder(tmp_path, 5), ("tsck", 1))
    assert registered.store.resolve("runs/gpt").step == 5


@pytest.mark.parametrize("killed_in", ["put_snapshot", *([] if keeps_common_state_as_object() else ["load"])])
def test_another_checkpoint_in_the_folder_ends_before_its_common_state_is_replaced(
    tmp_path: Path, registered: Strategies, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    where = folder(tmp_path)
    dist_checkpointing.save({"iteration": 7, "w": weight()}, where)
    owner = registered.store if killed_in == "put_snapshot" else torch
    monkeypatch.setattr(owner, killed_in, lambda *_, **__: pytest.fail("the process dies here"))
    with pytest.raises(pytest.fail.Exception, match="dies here"):
        dist_checkpointing.save(state(), where, registered.save)
    assert not dist_checkpointing.check_is_distributed_checkpoint(where)


def test_a_save_that_fails_leaves_the_snapshot_of_its_folder(tmp_path: Path, registered: Strategies) -> None:
    where = folder(tmp_path)
    dist_checkpointing.save(state(), where, registered.save)
    with pytest.raises(UnsupportedValueError):
        dist_checkpointing.save(state(iteration_2=1, o=ShardedObject("call", print, (1,), (0,))), where, registered.save)
    assert Path(where, "common.pt").exists() != keeps_common_state_as_object()
    loaded = dist_checkpointing.load(empty(), where)
    assert (loaded["iteration"], "iteration_2" in loaded) == (7, False)


def test_a_common_state_that_cannot_be_read_fails_the_save_of_all_ranks(
    tmp_path: Path, registered: Strategies, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, met = registered.store.put_snapshot, []

    def put(**options: Any) -> Any:
        met.append(options["group"])
        return original(**options)

    monkeypatch.setattr(registered.store, "put_snapshot", put)
    with pytest.raises(SnapshotAbortedError, match=r"rank 0: FileNotFoundError: .*common\.pt"):
        registered.save.save({"w": weight()}, folder(tmp_path))
    assert set(met) == {dist.group.WORLD}  # else the others wait there for this rank
    assert registered.store.branches() == {}


def test_lost_folders_are_written_again(tmp_path: Path, registered: Strategies) -> None:
    assert registered.write_folder(tmp_path / "out") is None
    for step in (1, 2):
        dist_checkpointing.save(state(step=step), folder(tmp_path, step), registered.save)
    newest = registered.write_folder(tmp_path / "out")
    assert newest == tmp_path / "out" / "iter_0000002"
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert dist_checkpointing.load(empty(), str(newest))["step"] == 2
    first = registered.write_folder(tmp_path / "out", "runs/gpt@1")
    assert dist_checkpointing.load(empty(), str(first))["step"] == 1
    dist_checkpointing.save(state(step=20), folder(tmp_path, 2), registered.save)  # the ref goes on from there
    assert registered.store.checkout("runs/gpt")["common"]["step"] == 20
    assert registered.store.resolve("runs/gpt~1").step == 1

    (tmp_path / "native" / "iter_0000001").mkdir(parents=True)
    dist_checkpointing.save({"w": weight()}, str(tmp_path / "native" / "iter_0000001"))
    with pytest.raises(ConflictError, match="iter_0000001 has a checkpoint of torch_dist"):
        registered.write_folder(tmp_path / "native", "runs/gpt@1")
    (tmp_path / "native" / "iter_0000001" / "metadata.json").unlink()
    (tmp_path / "native" / "iter_0000001" / ".metadata").touch()  # as of Megatron-LM's torch_dcp
    with pytest.raises(ConflictError, match="iter_0000001 has a checkpoint of torch's DCP"):
        registered.write_folder(tmp_path / "native", "runs/gpt@1")
    (tmp_path / "native" / "iter_0000001" / "metadata.json").write_text("")
    with pytest.raises(ConflictError, match="iter_0000001 has a checkpoint of an unknown backend"):
        registered.write_folder(tmp_path / "native", "runs/gpt@1")


def test_a_folder_whose_save_was_killed_while_megatron_wrote_metadata_json(tmp_path: Path, registered: Strategies) -> None:
    dist_checkpointing.save(state(step=1), folder(tmp_path, 1), registered.save)
    Path(folder(tmp_path, 1), "metadata.json").write_text("")
    newest = registered.write_folder(tmp_path)
    assert dist_checkpointing.load(empty(), str(newest))["step"] == 1
    Path(folder(tmp_path, 1), "metadata.json").write_text("")
    dist_checkpointing.save(state(step=1), folder(tmp_path, 1), registered.save)
    assert dist_checkpointing.load(empty(), folder(tmp_path, 1))["step"] == 1


@pytest.mark.parametrize("queue_of", [None] if has_registry() else ["mcore", "nvrx"])
def test_an_asynchronous_save_ends_with_its_request(tmp_path: Path, registered: Strategies, queue_of: str | None) -> None:
    options = {"async_sharded_save": True} | ({} if queue_of is None else {"async_strategy": queue_of})
    tensor = torch.arange(6.0).reshape(2, 3)
    sent = {"w": ShardedTensor.from_rank_offsets("layer.weight", tensor), "iteration": 3}
    request = dist_checkpointing.save(sent, folder(tmp_path), registered.save, **options)
    assert request is not None
    tensor.zero_()
    assert not dist_checkpointing.check_is_distributed_checkpoint(folder(tmp_path))
    queue = AsyncCallsQueue()
    if queue_of == "nvrx":  # its process is persistent, as by default in Megatron-LM, but does without CUDA
        queue = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core").AsyncCallsQueue(cpu_shm_mode=True)
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    loaded = dist_checkpointing.load(empty(), folder(tmp_path), strict=StrictHandling.LOG_UNEXPECTED)
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0).reshape(2, 3))
    queue.close()
    dist_checkpointing.save(sent, folder(tmp_path, 2), registered.save, **options).execute_sync()
    assert registered.store.resolve("runs/gpt").step == 2


def test_a_folder_without_a_number(tmp_path: Path, registered: Strategies) -> None:
    where = tmp_path / "release"
    where.mkdir()
    dist_checkpointing.save(state(), str(where), registered.save)
    assert registered.store.resolve("runs/gpt").step is None
    with tsck.megatron.register(tmp_path / "store", ref="runs/gpt") as again:
        assert dist_checkpointing.load(empty(), str(where))["iteration"] == 7
        dist_checkpointing.save(state(), str(where), again.save)


@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")  # Megatron's, of its own layers
def test_the_example_continues(tmp_path: Path) -> None:
    from examples import megatron_layers

    whole = megatron_layers.main(tmp_path / "whole", 15)
    megatron_layers.main(tmp_path / "cut", 10)
    assert megatron_layers.main(tmp_path / "cut", 15) == whole


def test_what_the_named_optimizer_changes_is_copied_until_its_next_step(
    tmp_path: Path, registered: Strategies, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    put_tensors_on(device, monkeypatch)
    parameter = torch.nn.Parameter(torch.zeros(300, 300))
    parameter.grad = torch.ones(300, 300)
    optimizer = torch.optim.SGD([parameter], 0.1)
    registered.changed_by(Namespace(chained_optimizers=[Namespace(optimizer=optimizer)]))  # in the form of Megatron's
    queue = AsyncCallsQueue()
    for number in range(2):  # the first save tries the optimizer out
        saved = {"w": ShardedTensor.from_rank_offsets("w", parameter.detach())}
        request = dist_checkpointing.save(saved, folder(tmp_path, number), registered.save, async_sharded_save=True)
        assert len(device.late) == number
        optimizer.step()
        assert device.late == []
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    loaded = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", torch.empty(300, 300))}, folder(tmp_path, 1))
    assert torch.equal(loaded["w"], torch.full((300, 300), -0.1))

"""`tsck.accelerate.attach`: a loop that is killed and resumed does what an undisturbed one does, bit for bit."""

import gc
import json
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.training.checkpointing.pending_saves import saved_by
from tests.effort import effort
from tests.integrations.accelerate import runs
from tests.integrations.conformance import AdapterConformance, Trained
from tests.integrations.conftest import has_finished

pytestmark = pytest.mark.slow


class TestConformance(AdapterConformance):
    ref = runs.REF
    first_step = 0  # accelerate counts saves
    continuing = r"pass load_state\(\) to continue it"

    def train(self, folder: Path, store: tsck.Store, steps: int, *, resume: str | bool) -> Trained:
        given = resume if isinstance(resume, str) else None if resume and self.ref in store.branches() else False
        begun: list[int] = []
        run = runs.train(
            folder,
            store,
            resume=given,
            stop_after=steps,
            save_every=1,
            attach={"asynchronous": False},
            on_step=lambda step: begun.append(step - 1),
        )
        return Trained(None if given is False else begun[0] - 1, run.weights)


def assert_continues(resumed: runs.Run, whole: runs.Run, done: int) -> None:
    assert resumed.batches == whole.batches[done:]
    assert resumed.losses == whole.losses[done:]
    assert all(torch.equal(tensor, resumed.weights[name]) for name, tensor in whole.weights.items())
    assert resumed.average == whole.average


@pytest.mark.parametrize(("killed_after", "asynchronous"), [(4, True), (9, False), (10, True), (11, False), (21, True), (25, False)])
def test_a_killed_run_is_resumed_exactly(tmp_path: Path, store: tsck.Store, killed_after: int, asynchronous: bool) -> None:
    """Within the first epoch, at its end, and in later ones."""
    attach: dict[str, Any] = {"asynchronous": asynchronous}
    whole = runs.train(tmp_path / "whole", None, resume=False)
    with pytest.raises(runs.Killed):
        runs.train(tmp_path / "out", store, resume=False, kill_after=killed_after, attach=attach)
    resumed = runs.train(tmp_path / "out", store, attach=attach)
    assert_continues(resumed, whole, killed_after // runs.SAVE_EVERY * runs.SAVE_EVERY)
    assert resumed.iteration == whole.iteration


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["generator", "seedable", "stateful"])
def test_loaders_of_other_kinds(tmp_path: Path, store: tsck.Store, kind: str) -> None:
    """With a generator of the user's, accelerate's seedable sampler, and torchdata's loader, which skips by itself.

    The second process begins with other seeds.
    """
    options: dict[str, Any] = {"loader_kind": kind}
    whole = runs.train(tmp_path / "whole", None, resume=False, **options)
    with pytest.raises(runs.Killed):
        runs.train(tmp_path / "out", store, resume=False, kill_after=17, **options)
    resumed = runs.train(tmp_path / "out", store, seed=2, **options)
    assert_continues(resumed, whole, 15)


@pytest.mark.parametrize(("kind", "name"), [("python", "PythonSampler"), ("numpy", "NumpySampler")])
def test_a_sampler_whose_order_is_lost_warns_once(tmp_path: Path, store: tsck.Store, kind: str, name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name} draws from Python's or NumPy's") as found:
        runs.train(tmp_path / "out", store, resume=False, stop_after=9, loader_kind=kind)
    assert len([each for each in found if "draws from Python's" in str(each.message)]) == 1
    runs.train(tmp_path / "border", store, resume=False, save_every=10, loader_kind=kind, ref="runs/border")  # a warning is an error


@pytest.mark.parametrize("kind", ["torch", "sequential", "weighted", "subset"])
def test_a_sampler_whose_order_continues_does_not_warn(tmp_path: Path, store: tsck.Store, kind: str) -> None:
    """Warnings are errors. That of torch.randperm is what the warning advises."""
    whole = runs.train(tmp_path / "whole", None, resume=False, loader_kind=kind)
    with pytest.raises(runs.Killed):
        runs.train(tmp_path / "out", store, resume=False, kill_after=17, loader_kind=kind)
    assert_continues(runs.train(tmp_path / "out", store, seed=2, loader_kind=kind), whole, 15)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["", "generator", "seedable", "stateful"])
def test_a_save_after_the_last_batch_of_an_epoch(tmp_path: Path, store: tsck.Store, kind: str) -> None:
    options: dict[str, Any] = {"loader_kind": kind, "save_every": 5}
    whole = runs.train(tmp_path / "whole", None, resume=False, **options)
    with pytest.raises(runs.Killed):
        runs.train(tmp_path / "out", store, resume=False, kill_after=12, **options)
    assert_continues(runs.train(tmp_path / "out", store, seed=2, **options), whole, 10)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["", "stateful"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
def test_the_order_of_every_cut(tmp_path: Path, store: tsck.Store, kind: str, workers: int, persistent: bool) -> None:
    """Batches, losses and weights, of workers that live for one pass or for all."""
    loading: dict[str, Any] = {"loader_kind": kind, "workers": workers, "persistent": persistent}
    whole = runs.train(tmp_path / "whole", None, resume=False, save_every=100, **loading)
    runs.train(tmp_path / "out", store, resume=False, save_every=1, **loading)
    for done in effort([3, 10, 13], [*range(1, 21)]):
        resumed = runs.train(tmp_path / "out", store, seed=2, resume=f"{runs.REF}@{done - 1}", save_every=100, **loading)
        assert_continues(resumed, whole, done)


def test_hooks_that_draw_numbers(tmp_path: Path, store: tsck.Store) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    accelerator.register_load_state_pre_hook(lambda models, folder: torch.rand(3))
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "out")
    drawn = torch.rand(3)
    accelerator.load_state(tmp_path / "out")
    assert torch.equal(torch.rand(3), drawn)
    accelerator.end_training()


def test_a_save_between_micro_batches_warns(store: tsck.Store) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    model = accelerator.prepare(nn.Linear(2, 2))
    for warned in (True, False):
        with accelerator.accumulate(model), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            accelerator.save_state()
        assert any("whose gradients so far are not saved" in str(each.message) for each in found) == warned
    accelerator.end_training()


def test_a_folder_of_an_unpublished_save_does_not_become_another_snapshot(tmp_path: Path, store: tsck.Store) -> None:
    """A process died after `save_state` returned; the next one saved under the same number."""
    folder = tmp_path / "out" / "checkpoints" / "checkpoint_0"
    runs.train(tmp_path / "out", store, resume=False)
    pointer = {"store": store.url, "address": f"{runs.REF}@0", "run": "1-0"}
    (folder / "snapshot.json").write_text(json.dumps(pointer))
    with pytest.raises(tsck.errors.NotFoundError, match="was never published"):
        runs.train(tmp_path / "out", store, resume=folder)
    found = store.resolve(f"{runs.REF}@0")
    (folder / "snapshot.json").write_text(json.dumps({**pointer, "run": saved_by(store, found)}))
    assert len(runs.train(tmp_path / "out", store, resume=folder).losses) == 27


@pytest.mark.parametrize("how", ["folder", "address", "native"])
def test_what_a_run_resumes_from(tmp_path: Path, store: tsck.Store, how: str) -> None:
    whole = runs.train(tmp_path / "whole", None, resume=False)
    if how == "native":  # a run that had begun without the store
        with pytest.raises(runs.Killed):
            runs.train(tmp_path / "out", None, resume=False, kill_after=13)
        resumed = runs.train(tmp_path / "out", store)
        assert len(resumed.losses) == len(whole.losses) - 12
        return
    runs.train(tmp_path / "out", store, resume=False)
    given = tmp_path / "out" / "checkpoints" / "checkpoint_4" if how == "folder" else f"{runs.REF}@4"
    with tsck.open(store.url, cache_dir=tmp_path / "another-cache") as another:
        assert_continues(runs.train(tmp_path / "out", another, resume=given), whole, 15)


def test_a_limit_bounds_names_and_bytes(tmp_path: Path, store: tsck.Store) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerate.Accelerator(cpu=True, project_config=config)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    model = accelerator.prepare(nn.Linear(100, 100))
    for _ in range(30):
        nn.init.normal_(model.weight)
        accelerator.save_state()
    accelerator.end_training()
    assert has_finished(store)
    assert [snapshot.step for snapshot in store.log(runs.REF)] == [29, 28]
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_28", "checkpoint_29"]
    usage = store.usage()
    assert usage.undo_bytes == 0
    assert usage.objects_bytes < 2.5 * usage.stored_bytes


def test_a_folder_of_accelerates_own_is_not_deleted(tmp_path: Path, store: tsck.Store) -> None:
    with pytest.raises(runs.Killed):
        runs.train(tmp_path / "out", None, resume=False, kill_after=7)
    runs.train(tmp_path / "out", store, config={"total_limit": 2})
    names = sorted(each.name for each in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_8", "checkpoint_9"]
    with pytest.raises(tsck.errors.InvalidOptionError, match="that accelerate wrote"):
        runs.train(tmp_path / "out", tsck.open(tmp_path / "new", create=True), resume=False)


def test_nothing_to_load(tmp_path: Path, store: tsck.Store) -> None:
    for given in ("runs/other@3", "runs/other", str(tmp_path / "none"), "./none"):
        with pytest.raises(tsck.errors.NotFoundError, match="neither a folder nor a snapshot"):
            runs.train(tmp_path / "out", store, resume=given)
    with pytest.raises(tsck.errors.NotFoundError, match="nothing to load"):
        runs.train(tmp_path / "out", store, resume=None, config={"automatic_checkpoint_naming": False})


def test_a_folder_of_a_save_that_never_ended_is_nothing_to_load(tmp_path: Path, store: tsck.Store) -> None:
    """The run died in its first save. Folders that accelerate wrote before are still there to load."""
    light = tmp_path / "out" / "checkpoints" / "checkpoint_5"
    light.mkdir(parents=True)
    (light / "snapshot.json").write_text(f'{{"store": "{store.url}", "address": "{runs.REF}@5"}}')
    (light.parent / "checkpoint_6").mkdir()
    with pytest.raises(tsck.errors.NotFoundError, match="nothing to load"):
        runs.train(tmp_path / "out", store)
    with pytest.raises(runs.Killed):
        runs.train(tmp_path / "out", None, resume=False, kill_after=7)
    assert len(runs.train(tmp_path / "out", store).losses) == 24


def test_a_folder_of_another_store_is_refused(tmp_path: Path, store: tsck.Store) -> None:
    runs.train(tmp_path / "out", store, resume=False)
    folder = tmp_path / "out" / "checkpoints" / "checkpoint_3"
    (folder / "snapshot.json").write_text('{"store": "s3://other/ckpt", "address": "runs/a@3"}')
    with pytest.raises(tsck.errors.MismatchError, match="s3://other/ckpt"):
        runs.train(tmp_path / "out", store, resume=folder)


def test_attach_twice(tmp_path: Path, store: tsck.Store) -> None:
    runs.forget_earlier()
    accelerator = accelerate.Accelerator(cpu=True)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    with pytest.raises(tsck.errors.InvalidOptionError, match="already"):
        tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    assert type(pickle.loads(pickle.dumps(accelerator))) is accelerate.Accelerator


class Later:
    """Registered for checkpointing: has a tensor from its first step on, another one in each process."""

    def __init__(self) -> None:
        self.mean: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def test_optimizers_and_objects_without_a_prepared_model(tmp_path: Path, store: tsck.Store) -> None:
    """accelerate saves such an optimizer, too. Both have no tensors before their first step."""

    def job() -> tuple[accelerate.Accelerator, torch.optim.Adam, torch.optim.SGD, Later]:
        accelerator = accelerate.Accelerator(cpu=True)
        tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
        trained, other, model = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(3, 3)
        adam, sgd = torch.optim.Adam(other.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(trained, model, adam, sgd)
        later = Later()
        accelerator.register_for_checkpointing(later)
        other(torch.ones(2)).sum().backward()
        return accelerator, adam, sgd, later

    accelerator, adam, sgd, later = job()
    adam.step()
    sgd.param_groups[0]["lr"] = 0.7
    later.mean = torch.arange(3)
    accelerator.save_state()
    accelerator.end_training()
    again, other_adam, other_sgd, other_later = job()
    again.load_state()
    own, stored = (each.state_dict() for each in (other_adam, adam))
    assert own["param_groups"] == stored["param_groups"]
    assert all(torch.equal(own["state"][0][name], tensor) for name, tensor in stored["state"][0].items())
    assert len(stored["state"][0]) == 3
    assert other_sgd.param_groups[0]["lr"] == 0.7
    assert other_later.mean is not None
    assert other_later.mean.tolist() == [0, 1, 2]


def test_hooks_with_automatic_naming(tmp_path: Path, store: tsck.Store) -> None:
    """It needs a folder."""
    nowhere = accelerate.Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    tsck.accelerate.attach(nowhere, store=store, ref="runs/nowhere")
    with pytest.raises(tsck.errors.InvalidOptionError, match="needs project_dir="):
        nowhere.save_state()
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=config)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    accelerator.prepare(nn.Linear(3, 3))
    given: list[str] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: given.append(folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: given.append(folder))
    accelerator.save_state()
    accelerator.save_state()
    accelerator.load_state()
    folders = [str(tmp_path / "checkpoints" / f"checkpoint_{number}") for number in (0, 1)]
    assert given == [*folders, folders[1]]


def test_what_is_prepared_between_two_saves_is_saved(tmp_path: Path, store: tsck.Store) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    accelerator.prepare(nn.Linear(3, 3))
    accelerator.save_state()
    average = accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_for_checkpointing(nn.Linear(4, 4))
    accelerator.save_state()
    accelerator.end_training()
    assert [snapshot.step for snapshot in store.log(runs.REF)] == [1, 0]
    with store.open_snapshot(runs.REF) as saved:
        assert torch.equal(saved["model.1.weight"][:], average.weight)
        assert "extra.custom_0.weight" in saved.names()


def test_free_memory_frees_what_was_saved(store: tsck.Store) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    model = accelerator.prepare(nn.Linear(3, 3))
    freed = weakref.ref(model)
    accelerator.save_state()
    [model] = accelerator.free_memory(model)
    gc.collect()
    assert freed() is None
    assert store.resolve(runs.REF).step == 0


def test_hooks_get_no_weights_of_shards(tmp_path: Path, store: tsck.Store) -> None:
    """As accelerate does: no process needs memory for all weights."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 3))
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
    given: list[tuple[list[nn.Module], list[Any]]] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: given.append((models, weights)))
    accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    assert given == [([model], [])]


def test_hooks_and_models_that_are_registered(tmp_path: Path, store: tsck.Store) -> None:
    """A hook's files are in the folder; a registered module's tensors are in the snapshot; two models have names."""

    def job() -> tuple[accelerate.Accelerator, nn.Linear, nn.Linear, nn.Linear]:
        accelerator = accelerate.Accelerator(cpu=True)
        tsck.accelerate.attach(accelerator, store=store, ref=runs.REF)
        one, two, average = nn.Linear(3, 3), nn.Linear(2, 2), nn.Linear(4, 4)
        accelerator.prepare(one, two)
        accelerator.register_for_checkpointing(average)
        return accelerator, one, two, average

    accelerator, *models = job()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: (Path(folder) / "noted").write_text(str(len(weights))))
    with pytest.raises(tsck.errors.InvalidOptionError, match="pass output_dir="):
        accelerator.save_state()
    folder = accelerator.save_state(tmp_path / "saved")
    assert folder == tmp_path / "saved"
    accelerator.end_training()
    assert (folder / "noted").read_text() == "2"
    with store.open_snapshot(runs.REF) as saved:
        assert {"model.0.weight", "model.1.bias", "extra.custom_0.weight"} <= set(saved.names())
    again, *others = job()
    loaded: list[str] = []
    again.register_load_state_pre_hook(lambda models, given: loaded.append(given))
    again.load_state(folder)
    assert loaded == [str(folder)]
    for model, other in zip(models, others, strict=True):
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())

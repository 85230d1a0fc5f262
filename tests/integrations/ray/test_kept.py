"""`tsck.ray.report` keeps the snapshots of the checkpoints that Ray has, and no others."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.integrations.ray import runs

REF = "runs/r"


def put(store: tsck.Store, step: int, ref: str = REF) -> str:
    return store.put_snapshot({"step": step}, ref=ref, step=step).root


class Experiment:
    """A folder of checkpoints, and the list that Ray would give of it."""

    def __init__(self, folder: Path, listed: list[Any]) -> None:
        self.folder, self._listed = folder, listed

    def write(self, name: str, root: str, store: tsck.Store) -> Any:
        import ray.train

        (self.folder / name).mkdir(parents=True)
        (self.folder / name / "snapshot.json").write_text(json.dumps({"store": store.url, "address": root}))
        return ray.train.Checkpoint.from_directory(self.folder / name)

    def lists(self, *names: str) -> None:
        import ray.train

        self._listed[:] = [SimpleNamespace(checkpoint=ray.train.Checkpoint(str(self.folder / name))) for name in names]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True) as opened:
        yield opened


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    pytest.importorskip("ray.train", reason="the extra ray is not installed: run `make test-apart`")
    from tensorstore_ck.integrations.ray import reporting

    listed: list[Any] = []
    monkeypatch.setattr(reporting, "reported_checkpoints", lambda: listed)
    return Experiment(tmp_path / "exp", listed)


def pinned(store: tsck.Store) -> dict[int | None, str]:
    return {pin.snapshot.step: pin.reason for pin in store.pins()}


def test_deleted_ones_are_unpinned_and_coming_ones_not(store: tsck.Store, experiment: Experiment) -> None:
    from tensorstore_ck.integrations.ray import reporting as kept

    for step in range(1, 6):
        root = put(store, step)
        kept.pin_reported(store, experiment.write(f"c{step}", root, store), root)
    kept.follow_ray(store, REF)  # Ray has taken none yet
    assert set(pinned(store)) == {1, 2, 3, 4, 5}
    experiment.lists("c1", "c3")  # it deleted c2, and c4 and c5 are on their way
    kept.follow_ray(store, REF)
    assert pinned(store) == {1: "c1", 3: "c3", 4: "c4", 5: "c5"}
    experiment.lists("c3", "c5")
    kept.follow_ray(store, REF)
    assert pinned(store) == {3: "c3", 5: "c5"}


def test_other_pins_stay(store: tsck.Store, experiment: Experiment) -> None:
    from tensorstore_ck.integrations.ray import reporting as kept

    first, other = put(store, 1), put(store, 7, "runs/other")
    store.pin(first, owner="me", reason="the first")
    kept.pin_reported(store, experiment.write("c7", other, store), other)
    elsewhere = Experiment(experiment.folder.with_name("exp-2"), [])
    kept.pin_reported(store, elsewhere.write("c1", first, store), first)
    newest = put(store, 2)
    kept.pin_reported(store, experiment.write("c2", newest, store), newest)
    experiment.lists("c2")
    kept.follow_ray(store, REF)
    assert sorted((pin.snapshot.ref, pin.reason) for pin in store.pins()) == [
        ("runs/other", "c7"),
        (REF, "c1"),
        (REF, "c2"),
        (REF, "the first"),
    ]


def test_what_has_no_pin_gets_one(store: tsck.Store, experiment: Experiment) -> None:
    """A worker died between the report and the pin; or another program reported; or the snapshot is gone."""
    from tensorstore_ck.integrations.ray import reporting as kept

    experiment.write("c1", put(store, 1), store)
    experiment.write("gone", "0" * 64, store)
    (experiment.folder / "foreign").mkdir()
    experiment.lists("gone", "c1", "foreign")
    kept.follow_ray(store, REF)
    assert pinned(store) == {1: "c1"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_validations_choose(ray_here: Any, tmp_path: Path) -> None:
    """Two workers; the scores come from validations, and are nested; a policy that the ref has would keep one snapshot."""

    def validate(checkpoint: Any, store: str) -> dict[str, Any]:
        with checkpoint.as_directory() as folder:
            pointer = json.loads((Path(folder) / "snapshot.json").read_text())
        with tsck.open(store, cache_dir=Path(store).with_name("cache-validation")) as opened:
            step = opened.resolve(pointer["address"]).step or 0
        return {"eval": {"score": 10 - abs(step - 3)}}

    def job(config: dict[str, Any]) -> None:
        import ray.train
        import torch

        rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
        with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as opened:
            if rank == 0:
                opened.set_policy(runs.REF, keep_last=1)
            for step in range(1, 9):
                tsck.ray.report(
                    {"eval": {"score": 0}}, {"w": torch.full((8,), step)}, store=opened, ref=runs.REF, step=step, validation=True
                )
                ray.train.get_all_reported_checkpoints()  # waits for the validation

    from ray.train.v2.api.validation_config import ValidationConfig, ValidationTaskConfig

    validation = ValidationConfig(
        fn=validate, task_config=ValidationTaskConfig(fn_kwargs={"store": str(tmp_path / "store")}), ray_remote_kwargs={"num_cpus": 0}
    )
    keep = {"num_to_keep": 2, "checkpoint_score_attribute": "eval/score", "checkpoint_score_order": "max"}
    result = runs.run(tmp_path, steps=8, workers=2, train=job, keep=keep, validation=validation)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-test") as opened:
        opened.gc()
        steps = set()
        for checkpoint, _ in result.best_checkpoints:
            into = opened.checkout(json.loads((Path(checkpoint.path) / "snapshot.json").read_text())["address"])
            steps.add(int(into["w"][0]))
        assert steps - {8} in ({2, 3}, {3, 4})  # of equal scores either; Ray may count the newest
        assert len(list(opened.log(runs.REF))) <= 5
        assert opened.policies()[runs.REF].keep_last == 1

"""`tsck.ray`: a worker of Ray Train is killed, and the run ends as one that nothing disturbed; Ray's limit bounds the store."""

from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.integrations.ray import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def opened(folder: Path) -> tsck.Store:
    return tsck.open(folder / "store", cache_dir=folder / "cache-test")


@pytest.mark.race
@pytest.mark.parametrize(("workers", "killed"), [(1, 0), (2, 1)])
def test_a_killed_worker(ray_here: Any, tmp_path: Path, workers: int, killed: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    runs.run(whole, steps=10, workers=workers)
    runs.run(cut, steps=10, workers=workers, kill=[killed, 7])
    for rank in range(workers):
        began = [each for each in runs.said(cut, rank) if "began" in each]
        assert [each["from_ray"] for each in began] == [False, True]
        assert began[1]["began"] in (4, 6)  # Ray may not have come to the newest report
        assert runs.losses(cut, rank) == runs.losses(whole, rank)
        assert runs.ends(cut, rank) == runs.ends(whole, rank)


def test_another_number_of_workers(ray_here: Any, tmp_path: Path) -> None:
    """Equal weights, and the samples that are left, in a new experiment."""
    whole = tmp_path / "whole"
    runs.run(whole, steps=8, name="one")
    runs.run(whole, steps=12, workers=2, name="two")
    began = [each for each in runs.said(whole) if "began" in each]
    assert [(each["began"], each["workers"]) for each in began] == [(0, 1), (8, 2)]
    one = next(each for each in runs.said(whole) if "ended" in each)
    assert began[1]["weights"] == one["weights"]
    alone = tmp_path / "alone"
    runs.run(alone, steps=12)
    for step in range(9, 13):
        numbers = [number for rank in (0, 1) for number in runs.losses(whole, rank)[step][1]]
        assert sorted(numbers) == sorted(runs.losses(alone)[step][1])


@pytest.mark.parametrize("best", [False, True])
def test_rays_limit_bounds_the_store(ray_here: Any, tmp_path: Path, best: bool) -> None:
    keep: dict[str, Any] = {"num_to_keep": 2}
    if best:
        keep |= {"checkpoint_score_attribute": "score", "checkpoint_score_order": "max"}
    result = runs.run(tmp_path, steps=20, every=1, keep=keep)
    kept = [checkpoint for checkpoint, _ in result.best_checkpoints]
    with opened(tmp_path) as store:
        steps = {snapshot.step for snapshot in store.log(runs.REF)}
        for checkpoint in kept:  # all that Ray keeps is there
            text = (Path(checkpoint.path) / "snapshot.json").read_text()
            assert any(snapshot.root in text for snapshot in store.log(runs.REF))
        if best:
            assert {14, 19, 20} <= steps
        else:
            assert steps <= {16, 17, 18, 19, 20}  # the oldest were deleted after the last report
        assert len(steps) <= 6
        assert {pin.snapshot.step for pin in store.pins()} == steps
        assert all(snapshot.metrics["score"] == (snapshot.step or 0) % 5 for snapshot in store.log(runs.REF))
        usage = store.usage()
        assert usage.undo_bytes < 5 * usage.stored_bytes
        assert sum(each.ref == runs.REF for each in store.forgotten()) < 4


def test_errors_of_workers(ray_here: Any, tmp_path: Path) -> None:
    """A ref of another run is refused; so is a checkpoint that another program reported."""

    def takes_over(config: dict[str, Any]) -> None:
        with tsck.open(Path(config["folder"]) / "store", create=True) as store:
            store.put_snapshot({"a": 1}, ref=runs.REF, step=1)
        with tsck.open(Path(config["folder"]) / "store") as store:
            tsck.ray.report({}, {"a": 2}, store=store, ref=runs.REF, step=2)

    def foreign(config: dict[str, Any]) -> None:
        import tempfile

        import ray.train

        with tsck.open(Path(config["folder"]) / "store", create=True) as store, tempfile.TemporaryDirectory() as empty:
            (Path(empty) / "model.pt").touch()
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(empty))
            tsck.ray.restore({"a": 1}, store=store, ref="runs/other")

    def unopened(config: dict[str, Any]) -> None:
        tsck.ray.report({}, {"a": 2}, store=config["folder"], ref=runs.REF, step=2)

    for number, (job, message) in enumerate(
        [(takes_over, "moved|another|exists"), (foreign, "has no snapshot.json"), (unopened, "store= must be an open store")]
    ):
        with pytest.raises(Exception, match=message):
            runs.run(tmp_path, steps=1, name=f"job-{number}", train=job)


def test_a_damaged_snapshot_is_skipped(ray_here: Any, tmp_path: Path) -> None:
    """Plain states, too."""

    def job(config: dict[str, Any]) -> None:
        import torch

        folder = Path(config["folder"])
        with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
            for step in (1, 2):
                tsck.ray.report({"step": step}, {"w": torch.full((1 << 14,), float(step))}, store=store, ref=runs.REF, step=step)
            into = {"w": torch.zeros(1 << 14)}
            found = tsck.ray.restore(into, store=store, ref=runs.REF)
            assert found is not None
            runs.note(config, 0, found=found.step, value=into["w"][0].item())
            damaged = max((folder / "store").rglob("packs/*/*"), key=lambda path: path.name)
            damaged.write_bytes(bytes(damaged.stat().st_size))
            found = tsck.ray.restore(into, store=store, ref=runs.REF)
            assert found is not None
            runs.note(config, 0, found=found.step, value=into["w"][0].item())

    runs.run(tmp_path, steps=2, train=job)
    assert [(each["found"], each["value"]) for each in runs.said(tmp_path)] == [(2, 2.0), (1, 1.0)]

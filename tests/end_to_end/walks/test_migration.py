"""A team that moves: files of torch.save and of DCP become snapshots, training goes on from them, and files come out again."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import tensorstore_ck as tsck
from tests.end_to_end.walks.walk import Walk
from tests.integrations.importing.same import require_same

pytestmark = pytest.mark.slow

EXISTS, NOT_FOUND, UNSUPPORTED = 28, 25, 24


class Config:
    """A class of the team's own, which a pickle would call."""


def state(step: int) -> dict[str, object]:
    weights = torch.arange(3000.0) + step
    return {"model": {"w": weights, "tied": weights[:10]}, "optimizer": {"step": step, "moments": weights.square()}, "loss": 1 / step}


def test_years_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (100, 200, 300):
        torch.save(state(step), tmp_path / f"model_{step}.pt")
    torch.save({"model": state(1)["model"], "config": Config()}, tmp_path / "strange.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's, of a save by one process
        dcp.save(state(400), checkpoint_id=tmp_path / "step-400", no_dist=True)
    with Walk(tmp_path, monkeypatch) as walk:
        walk.type("tsck init store")

        # the history, named by its files; a second import of the same finds all of it
        imported = walk.type("tsck import --history 'model_*.pt' --step-from name --metric loss=key:loss --ref runs/old -s store")
        assert "step 300" in imported.text
        walk.type("tsck import --history 'model_*.pt' --step-from name --metric loss=key:loss --ref runs/old -s store")
        log = walk.type("tsck log runs/old -s store").lines
        assert [line.split()[1] for line in log[1:]] == ["300", "200", "100"]
        assert log[1].endswith("loss=0.0033")

        # a folder of DCP goes on from it; a file with an object of a class runs nothing
        walk.type("tsck import step-400 --step 400 --ref runs/old -s store")
        assert walk.type("tsck log runs/old -n 1 -s store").lines[1].split()[1] == "400"
        refused = walk.type("tsck import strange.pt --ref runs/strange -s store", code=UNSUPPORTED)
        assert "config" in refused.text
        assert "Config" in refused.text
        walk.type("tsck import strange.pt --ref runs/strange --exclude config -s store")
        missing = walk.type("tsck import model_500.pt --ref runs/old -s store", code=NOT_FOUND)
        assert "model_500.pt" in missing.text

        # what came in is what was there, shared memory too; training goes on, and only what changed is stored
        with tsck.open("store") as store:
            for step in (100, 200, 300):
                require_same(store.checkout(f"runs/old@{step}"), state(step))
            job = store.checkout("runs/old@300")
            job["model"]["w"] += 1
            assert job["model"]["tied"][0] == job["model"]["w"][0] == 301
            store.put_snapshot(job, ref="runs/old", step=301)
        states = [line.split()[1:2] + line.split()[7:8] for line in walk.type("tsck log runs/old -s store").lines[1:3]]
        assert states == [["301", "head"], ["400", "abandoned"]]

        # out again, for programs that know nothing of the store
        walk.type("tsck export runs/old --to torch out.pt -s store")
        require_same(torch.load("out.pt", weights_only=True), job)
        walk.type("tsck export runs/old --to safetensors weights --include 'model.*' -s store")
        (weights,) = Path("weights").glob("*.safetensors")
        assert torch.equal(load_file(weights)["model.w"], job["model"]["w"])
        taken = walk.type("tsck export runs/old --to torch out.pt -s store", code=EXISTS)
        assert "out.pt" in taken.text
        assert "no errors" in walk.type("tsck fsck --read-data -s store").text

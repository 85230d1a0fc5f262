"""Fabric over a store: a script with one more line."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tests.integrations.lightning.conftest import QUIET

pytestmark = [pytest.mark.slow, *QUIET]
REF = "runs/fabric"


def _script(folder: Path, store: tsck.Store | Path | None, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Trains, saves every second step, and returns its state with the losses of these steps."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    if store is not None:
        tsck.lightning.attach(fabric, store=store, ref=REF)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "losses": []}
    if resume is not None:
        fabric.load(resume, state)
    while state["step"] < steps:
        loss = model(torch.randn(4, 4)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state["step"] += 1
        state["losses"].append(loss.item())
        if state["step"] % 2 == 0 and store is not None:
            fabric.save(folder / f"step-{state['step']}.ckpt", state)
    return state


@pytest.mark.parametrize("form", ["file", "address"])
def test_a_resume_is_bit_for_bit_the_undisturbed_run(tmp_path: Path, store: tsck.Store, form: str) -> None:
    """Also the random numbers, which Fabric does not save."""
    whole = _script(tmp_path, None, 7)
    _script(tmp_path, store, 5)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as another:
        resumed = _script(tmp_path, another, 7, str(tmp_path / "step-4.ckpt") if form == "file" else f"{REF}@4")
    assert resumed["losses"] == whole["losses"]
    assert resumed["schedule"].state_dict() == whole["schedule"].state_dict()
    for one, other in zip(resumed["model"].parameters(), whole["model"].parameters(), strict=True):
        assert torch.equal(one, other)
    assert [each.step for each in store.log(REF)] == [6, 4, 2]


def test_what_the_state_does_not_name_is_returned(tmp_path: Path, store: tsck.Store) -> None:
    trained = _script(tmp_path, store, 2)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    tsck.lightning.attach(fabric, store=store, ref=REF)
    everything = fabric.load(tmp_path / "step-2.ckpt")
    assert everything.keys() == {"model", "optimizer", "schedule", "step", "losses"}
    assert torch.equal(everything["model"]["0.weight"], trained["model"].state_dict()["0.weight"])
    state: dict[str, Any] = {"step": 0}
    assert fabric.load(tmp_path / "step-2.ckpt", state).keys() == everything.keys() - {"step"}
    assert state["step"] == 2
    with pytest.raises(tsck.MismatchError, match="has no 'other'"):
        fabric.load(tmp_path / "step-2.ckpt", {"other": 1})


def test_an_earlier_snapshot_goes_on_in_the_same_process(tmp_path: Path, store: tsck.Store) -> None:
    """Also one without a step, whose saves are counted."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    tsck.lightning.attach(fabric, store=store, ref=REF)
    for value in (1, 2, 3):
        fabric.save(tmp_path / f"{value}.ckpt", {"value": value})
    assert fabric.load(tmp_path / "1.ckpt") == {"value": 1}
    fabric.save(tmp_path / "again.ckpt", {"value": 9})
    assert [each.step for each in store.log(REF)] == [2, 3, 2, 1]
    assert fabric.load(f"{REF}@2") == {"value": 9}


def test_a_file_of_fabric_is_loaded_as_before(tmp_path: Path, store: tsck.Store) -> None:
    lightning.Fabric(accelerator="cpu", devices=1).save(tmp_path / "native.ckpt", {"step": 3})
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    tsck.lightning.attach(fabric, store=store, ref=REF)
    assert fabric.load(tmp_path / "native.ckpt") == {"step": 3}


def test_what_cannot_be_done_is_refused(tmp_path: Path, store: tsck.Store) -> None:
    _script(tmp_path, store, 2)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as another:
        tsck.lightning.attach(fabric, store=another, ref=REF)
        with pytest.raises(tsck.InvalidOptionError, match="already"):
            tsck.lightning.attach(fabric, store=another, ref=REF)
        with pytest.raises(tsck.ConflictError, match=r"fabric\.load"):
            fabric.save(tmp_path / "a.ckpt", {"model": nn.Linear(1, 1), "step": 1})
        with pytest.raises(tsck.NotFoundError, match="is no file, and no snapshot of"):
            fabric.load("runs/none@3", {"step": 1})
        with pytest.raises(tsck.InvalidOptionError, match="filter"):
            fabric.save(tmp_path / "a.ckpt", {"model": nn.Linear(1, 1)}, filter={"model": lambda *_: True})
        with pytest.raises(tsck.InvalidOptionError, match="a dict of objects by name, not a Linear"):
            fabric.save(tmp_path / "a.ckpt", nn.Linear(1, 1))
        with pytest.raises(tsck.InvalidOptionError, match="a dict of objects by name, not a Linear"):
            fabric.load(REF, nn.Linear(1, 1))
        one = lightning.Fabric(accelerator="cpu", devices=1)
        tsck.lightning.attach(one, store=another, ref="runs/b", step="count")
        with pytest.raises(tsck.InvalidOptionError, match="no whole number 'count'"):
            one.save(tmp_path / "a.ckpt", {"step": 1})
    with pytest.raises(tsck.InvalidNameError, match="cannot be the name"):
        tsck.lightning.attach(lightning.Fabric(accelerator="cpu", devices=1), store=store, ref="a b")
    with pytest.raises(tsck.InvalidOptionError, match="is not a Fabric"):
        tsck.lightning.attach(store, store=store, ref=REF)

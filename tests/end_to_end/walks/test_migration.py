"""Somebody with 40 checkpoints of torch.save moves in."""

import re
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests.end_to_end.scripts.launch import launched
from tests.end_to_end.walks.walk import Walk
from tests.integrations.importing.same import require_same

pytestmark = pytest.mark.slow

STEPS = range(10, 401, 10)
NOT_FOUND = 25
SEVERAL_STEPS = 26


def train() -> None:
    """A training loop that saves a file every 10 steps."""
    Path("old").mkdir()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, STEPS[-1] + 1):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "global_step": step, "val_loss": loss.item()}
            torch.save(state, f"old/step_{step}.pt")


def test_forty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Walk(tmp_path, monkeypatch) as walk:
        train()
        walk.type("tsck init ckpt")
        refused = walk.type("tsck import old/ --ref runs/gpt -s ckpt", code=SEVERAL_STEPS)
        (printed,) = refused.printed
        with launched(["-m", "tensorstore_ck.cli", *walk.arguments(printed)], tmp_path) as importing:
            importing.wait_for(r"^12/40 ")
            importing.send(9)
            assert importing.end()[0] == -9
        done = walk.follow(refused, "import --history")
        there = len(re.findall("is there already", done.out))
        assert 12 <= there < 40
        assert f"{40 - there} snapshots imported, {there} snapshots were there already" in done.out

        with tsck.open("ckpt", read_only=True) as store:
            assert [snapshot.step for snapshot in reversed(store.log("runs/gpt"))] == list(STEPS)
            for step in STEPS:
                require_same(store.checkout(f"runs/gpt@{step}"), torch.load(f"old/step_{step}.pt", weights_only=True))
        walk.type("tsck export runs/gpt@200 --to torch back.pt -s ckpt")
        require_same(torch.load("back.pt", weights_only=True), torch.load("old/step_200.pt", weights_only=True))
        assert walk.type("tsck fsck --read-data -s ckpt").out.splitlines()[-1] == "no errors"

        missing = walk.type("tsck find 'val_loss < 1'", code=NOT_FOUND)
        synced = walk.follow(missing, "catalog sync", STORE="ckpt")
        assert "40 snapshots" in synced.out
        assert walk.follow(synced, "find").out.splitlines()[-2] == "40 snapshots"
        unknown = walk.type("tsck find 'val_loss < 1'", code=NOT_FOUND)
        walk.type(f"{printed} --metric val_loss=key:val_loss")
        walk.follow(unknown, "catalog sync")
        losses = {step: torch.load(f"old/step_{step}.pt", weights_only=True)["val_loss"] for step in STEPS}
        limit = sorted(losses.values())[5]
        found = walk.type(f"tsck find 'val_loss < {limit}' --sort val_loss")
        best = [int(line.split()[1]) for line in found.out.splitlines()[1:6]]
        assert best == sorted(losses, key=losses.__getitem__)[:5]

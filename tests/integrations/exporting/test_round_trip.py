"""What another library saved, brought in and written out again, is for its own reader what it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file

import tensorstore_ck as tsck
from tests.state.fake import assert_same

TENSORS = {"w": torch.randn(300, 50), "half": torch.arange(7).bfloat16(), "none": torch.empty(0, 3), "one": torch.tensor(2.5)}


def through(tmp_path: Path, path: Path, kind: Any) -> Path:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        tsck.import_checkpoint(store, path, ref="r")
        tsck.export_snapshot(store, "r", tmp_path / f"out{path.suffix}", format=kind)
    return tmp_path / f"out{path.suffix}"


def test_torch(tmp_path: Path) -> None:
    state = {"model": TENSORS, "step": 7, "lrs": [0.1, 0.2], "names": ("a", None, b"x"), "tied": TENSORS["w"]}
    torch.save(state, tmp_path / "in.pt")
    found = torch.load(through(tmp_path, tmp_path / "in.pt", "torch"), weights_only=True)
    assert_same(state, found)
    assert found["tied"].data_ptr() == found["model"]["w"].data_ptr()


def test_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "in.safetensors", {"who": "me"})
    found = load_file(through(tmp_path, tmp_path / "in.safetensors", "safetensors"))
    assert_same(dict(sorted(TENSORS.items())), dict(sorted(found.items())))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp(tmp_path: Path) -> None:
    state = {"model": TENSORS, "step": 7, "lrs": [0.1, 0.2], "names": ("a", None)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    out = through(tmp_path, tmp_path / "in", "dcp")
    found = {"model": {name: torch.full_like(each, 9) for name, each in TENSORS.items()}, "step": 0, "lrs": [], "names": ()}
    torch.distributed.checkpoint.load(found, checkpoint_id=out, no_dist=True)
    assert_same(state, found)

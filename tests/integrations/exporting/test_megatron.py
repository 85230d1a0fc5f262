"""Folders for Megatron-core: what is written, without Megatron. tests/integrations/megatron loads them with Megatron."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint
from tests.gc.stores import open_store
from tests.integrations.exporting.states import small_blocks
from tests.integrations.importing import megatron_folders

TYPED = ["common.args", "rerun_state_machine_state/*", "decoder.layers.mlp.linear_fc2._extra_state/*"]
"""What has types of Megatron, which is not installed here."""


@pytest.fixture
def store() -> Iterator[tsck.Store]:
    with open_store(small_blocks()) as opened:
        yield opened


@pytest.mark.filterwarnings("ignore")
def test_an_imported_folder_comes_out_as_it_was(store: tsck.Store, tmp_path: Path) -> None:
    megatron_folders.write(tmp_path / "run")
    root = import_checkpoint(store, tmp_path / "run", ref="old", exclude=TYPED).snapshot.root
    written = export_snapshot(store, "old", tmp_path / "iter_0001000", format="megatron", max_file_bytes=8000)
    names = [file.name for file in written.files]
    assert names == [".metadata", "__0_0.distcp", "__0_1.distcp", "__0_2.distcp", "__0_3.distcp", "common.pt", "metadata.json"]
    assert (written.tensors, written.left_out, written.notes) == (3, {}, ())
    assert json.loads((tmp_path / "iter_0001000" / "metadata.json").read_text()) == megatron_folders.CONFIG
    again = import_checkpoint(store, tmp_path / "iter_0001000", ref="again")
    assert (again.snapshot.root, again.snapshot.step, again.contents.skipped) == (root, 1000, {})


def test_without_a_common_state(store: tsck.Store, tmp_path: Path) -> None:
    store.put_snapshot({"a.weight": torch.ones(3)}, ref="run")
    (note,) = export_snapshot(store, "run", tmp_path / "out", format="megatron").notes
    assert "common.pt is empty" in note
    assert torch.load(tmp_path / "out" / "common.pt") == {}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {"a": torch.ones(2)}, "common": {}}, r"model is neither a tensor nor an object of Megatron: --to megatron takes"),
        ({"step": 3, "a": torch.ones(2)}, r"step is neither"),
        ([torch.ones(2)], r"takes a flat dict of tensors by name"),
        ({1: torch.ones(2)}, r"takes a flat dict of tensors by name"),
    ],
)
def test_states_of_others_are_refused(store: tsck.Store, tmp_path: Path, state: Any, said: str) -> None:
    store.put_snapshot(state, ref="run")
    with pytest.raises(tsck.UnsupportedValueError, match=said):
        export_snapshot(store, "run", tmp_path / "out", format="megatron")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="Megatron is installed")
def test_types_of_megatron_need_megatron(store: tsck.Store, tmp_path: Path) -> None:
    megatron_folders.write(tmp_path / "run")
    import_checkpoint(store, tmp_path / "run", ref="old")
    with pytest.raises(tsck.MissingExtraError, match=r"megatron"):
        export_snapshot(store, "old", tmp_path / "out", format="megatron")
    assert not (tmp_path / "out").exists()

"""A checkpoint of which files are missing is refused by their names, and with `partial` the snapshot says so."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tensorstore_ck as tsck
from tests.integrations.importing.conftest import Bring, Refuse
from tests.integrations.importing.same import require_same
from tests.integrations.importing.test_safetensors import save_sharded


@pytest.mark.parametrize(
    "case",
    [
        (
            ["model-00001-of-00003.safetensors"],
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors, model-00003-of-00003",
        ),
        (["model-00001-of-00003.safetensors"], "", "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"),
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "", "lacks model-00002-of-00003.safetensors:"),
        (["part.0-of-2.pt"], "", "lacks part.1-of-2.pt:"),
        (["model_world_size_4_rank_0.pt"], "model_world_size_4_rank_0.pt", "model_world_size_4_rank_1.pt, model_world_size_4_rank_2.pt"),
        (
            ["model_world_size_2_rank_1.pt", "optim_world_size_2_rank_0.pt", "optim_world_size_2_rank_1.pt"],
            "",
            "model_world_size_2_rank_0.pt:",
        ),
    ],
)
def test_what_is_missing_of_a_numbered_set_is_named(
    refuse: Refuse, bring: Bring, store: tsck.Store, tmp_path: Path, case: tuple[Sequence[str], str, str]
) -> None:
    names, given, lacks = case
    for name in names:
        save_one(tmp_path / name)
    assert lacks in refuse(tmp_path / given, tsck.CorruptObjectError)
    _, contents = bring(tmp_path / given, partial=True)
    assert contents.missing
    assert str(store.metadata("old")["partial"]).startswith(f"lacks {contents.missing[0]}")


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00001.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["a-0-of-2.pt", "a-1-of-2.pt"],
        ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"],
        ["epoch-3-of-10.pt"],
        ["shape-640x480.pt"],
    ],
)
def test_whole_sets_and_other_numbers(bring: Bring, store: tsck.Store, tmp_path: Path, names: Sequence[str]) -> None:
    for name in names:
        save_one(tmp_path / name)
    assert bring(tmp_path, partial=True)[1].missing == ()
    assert "partial" not in store.metadata("old")


def test_an_index_of_missing_files(refuse: Refuse, bring: Bring, store: tsck.Store, tmp_path: Path) -> None:
    state = {name: torch.tensor([float(number)]) for number, name in enumerate("abc")}
    save_sharded(tmp_path, state, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert "lacks model-00002-of-00003.safetensors:" in refuse(path, tsck.CorruptObjectError)
        require_same(bring(path, partial=True)[0], {"a": state["a"], "c": state["c"]})
        assert store.metadata("old")["partial"] == "lacks model-00002-of-00003.safetensors"


def save_one(path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file({path.stem: torch.ones(2)}, path)
    else:
        torch.save({path.stem: torch.ones(2)}, path)

"""Folders of torch's HuggingFaceStorageWriter, in which the file of each rank has pieces of tensors."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file

import tensorstore_ck as tsck
from tests.integrations.importing.conftest import Bring, Refuse
from tests.integrations.importing.same import require_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"b": torch.arange(3.0), "w": torch.arange(40.0).reshape(8, 5), "x": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)}
PIECES: tuple[dict[str, tuple[int, ...]], ...] = ({"w": (0, 0), "x": (0, 3)}, {"w": (3, 0), "b": (0,), "x": (0, 0)})
"""Of each rank: tensor -> offset of its piece."""


def save_ranks(folder: Path, ranks: Mapping[int, dict[str, tuple[int, ...]]]) -> Path:
    folder.mkdir()
    for rank, offsets in ranks.items():
        info = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"}
        save_file({name: piece(name, offset) for name, offset in offsets.items()}, folder / name_of(rank), metadata)
    return folder


def name_of(rank: int) -> str:
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def piece(name: str, offset: tuple[int, ...]) -> torch.Tensor:
    starts = {each[name] for each in PIECES if name in each}
    ends = [
        min([start[dim] for start in starts if start[dim] > offset[dim]], default=extent)
        for dim, extent in enumerate(STATE[name].shape[: len(offset)])
    ]
    return STATE[name][tuple(slice(start, end) for start, end in zip(offset, ends, strict=False))].contiguous()


def test_the_pieces_of_all_ranks_become_whole_tensors(bring: Bring, tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "ranks", dict(enumerate(PIECES)))
    found, contents = bring(folder)
    require_same(found, STATE)
    assert (contents.format, contents.metadata) == ("folder of HuggingFaceStorageWriter", {})
    target = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    require_same(target, found)


def test_a_folder_that_torch_wrote(bring: Bring, tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(2.0)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "one"), save_distributed=True), no_dist=True)
    with safe_open(tmp_path / "one" / name_of(0), "pt") as file:
        assert "DCP_SHARDING_INFO" in file.metadata()
    require_same(bring(tmp_path / "one")[0], dict(sorted(state.items())))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({1: PIECES[1]}, "15 elements are missing of the tensor 'w', of shape [8, 5] (it lacks shard-00001-*)"),
        ({0: {"w": (3, 0)}}, "of the tensor 'w'"),
        ({0: {"w": (0, 0)}, 1: {"w": (0, 0)}}, "of the tensor 'w'"),
        ({1: {"b": (0,)}}, "lacks shard-00001-*: get all files"),
        ({0: {"w": (0,)}}, "no valid offset of 'w'"),
    ],
)
def test_pieces_that_are_not_all_of_it(refuse: Refuse, tmp_path: Path, ranks: dict[int, dict[str, tuple[int, ...]]], message: str) -> None:
    folder = save_ranks(tmp_path / "ranks", ranks)
    assert message in refuse(folder, tsck.CorruptObjectError)


def test_one_file_is_not_the_checkpoint(refuse: Refuse, tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "ranks", dict(enumerate(PIECES)))
    assert "lacks the files of the other ranks: get all files and import their folder" in refuse(folder / name_of(0))

"""--to dcp: `load` reads what DCP would have written itself."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.exporting import export_snapshot
from tests.gc.stores import open_store
from tests.integrations.exporting.conftest import Export
from tests.integrations.exporting.states import load_dcp, many_ranks, small_blocks, tensors_of
from tests.state.fake import assert_same, bits
from tests.state.samples import Point

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def saved_by_dcp(state: dict[str, Any], folder: Path) -> None:
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def metadata_of(folder: Path) -> Metadata:
    found = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def test_dtypes_that_dcp_does_not_know_are_refused_by_name(export: Export, unsavable: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"dtypes\.\w+ \(torch\.\w+\), .* --exclude NAME") as caught:
        export(tmp_path / "out", "dcp")
    assert caught.value.object_id in unsavable
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_it_reads_as_what_dcp_saves_of_the_same_state(export: Export, state: dict[str, Any], unsavable: list[str], tmp_path: Path) -> None:
    report = export(tmp_path / "ours", "dcp", exclude=unsavable)
    saved_by_dcp(state, tmp_path / "theirs")
    ours, theirs = metadata_of(tmp_path / "ours"), metadata_of(tmp_path / "theirs")
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version
    assert_same(load_dcp(tmp_path / "theirs"), load_dcp(tmp_path / "ours"))
    assert report.tensors == len(tensors_of(state))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_load_into_a_state_and_convert(export: Export, state: dict[str, Any], unsavable: list[str], tmp_path: Path) -> None:
    export(tmp_path / "out", "dcp", exclude=unsavable)
    into = {"model": {name: torch.zeros_like(found) for name, found in state["model"].items()}, "step": 0}
    load(into, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert into["step"] == 12
    assert all(torch.equal(into["model"][name], found) for name, found in state["model"].items())  # type: ignore[index]
    dcp_to_torch_save(tmp_path / "out", tmp_path / "converted.pt")
    back = tensors_of(torch.load(tmp_path / "converted.pt", weights_only=False))
    assert back.keys() == tensors_of(state).keys()
    assert all(bits(back[name]) == bits(found) for name, found in tensors_of(state).items())


def test_every_item_is_a_whole_torch_file(export: Export, tmp_path: Path) -> None:
    export(tmp_path / "out", "dcp", select=["model"], max_file_bytes=10_000)
    items = metadata_of(tmp_path / "out").storage_data.values()
    assert len({item.relative_path for item in items}) > 2
    for item in items:
        data = (tmp_path / "out" / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
        (tmp_path / "item").write_bytes(data)
        with zipfile.ZipFile(tmp_path / "item") as archive:
            assert archive.testzip() is None


def test_files_are_split(export: Export, state: dict[str, Any], unsavable: list[str], tmp_path: Path) -> None:
    report = export(tmp_path / "out", "dcp", max_file_bytes=100_000, exclude=unsavable)
    names = [file.name for file in report.files]
    assert len(names) > 3
    assert set(names) == {".metadata", *(f"__0_{number}.distcp" for number in range(len(names) - 1))}
    back = load_dcp(tmp_path / "out")
    assert bits(back["large"]) == bits(state["large"])


def test_what_dcp_drops_and_changes_is_reported(export: Export, unsavable: list[str], tmp_path: Path) -> None:
    report = export(tmp_path / "out", "dcp", exclude=unsavable)
    assert report.left_out == {
        "values.9.k": "an empty dict, which DCP drops",
        "model._metadata": "an attribute of an OrderedDict, which DCP drops",
    }
    keys, dicts, flags = report.notes
    assert "optimizer.state, values.9" in keys
    assert "model, counts, ordered" in dicts
    assert "parameter, grad" in flags


def test_tensors_in_tuples_are_saved_with_their_bytes(tmp_path: Path) -> None:
    state = {"pair": (torch.arange(5000), 1), "point": Point(torch.arange(3000.0), [torch.ones(2000)]), "list": [(torch.ones(2000),)]}
    with open_store(small_blocks()) as store:
        store.put_snapshot(state, ref="run")
        export_snapshot(store, "run", tmp_path / "out", format="dcp")
    assert_same(state, load_dcp(tmp_path / "out"))


def test_what_is_no_dict_and_equal_names_are_refused(tmp_path: Path) -> None:
    with open_store(small_blocks()) as store:
        store.put_snapshot([torch.ones(3)], ref="list")
        store.put_snapshot({"a": {1: torch.ones(2), "1": torch.ones(3)}}, ref="twice")
        with pytest.raises(UnsupportedValueError, match="DCP holds only dicts"):
            export_snapshot(store, "list", tmp_path / "out", format="dcp")
        with pytest.raises(UnsupportedValueError, match=r"duplicated flatten key a\.1"):
            export_snapshot(store, "twice", tmp_path / "out", format="dcp")
        memory = torch.ones(2)
        store.put_snapshot({"a": {"pair": (memory, memory.view(torch.int32), {1})}, "b": 1}, ref="shared")
        with pytest.raises(UnsupportedValueError, match=r"torch cannot save a\.pair: .* exclude it with --exclude"):
            export_snapshot(store, "shared", tmp_path / "out", format="dcp")
        assert list(tmp_path.iterdir()) == []
        export_snapshot(store, "shared", tmp_path / "out", format="dcp", exclude=["a.pair"])


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_several_ranks_and_a_load_with_another_mesh(tmp_path: Path) -> None:
    rank = 1
    store, tensors = many_ranks()
    export_snapshot(store, "job", tmp_path / "job", format="dcp")
    assert_same({**tensors, "text": "text", "number": 7}, load_dcp(tmp_path / "job"))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        into: dict[str, Any] = {"same": torch.zeros(10, 1000, dtype=torch.int32), "number": 0}
        for name, dim in (("fsdp", 0), ("tp", 1), ("columns", 0), ("deep", 2)):
            local = torch.zeros_like(tensors[name].chunk(3, dim)[rank])
            into[name] = DTensor.from_local(local, mesh, [Shard(dim)], shape=tensors[name].shape, stride=tensors[name].stride())
        load(into, storage_reader=FileSystemReader(tmp_path / "job"), no_dist=True)
    finally:
        dist.destroy_process_group()
    assert into["number"] == 7
    assert torch.equal(into["same"], tensors["same"])
    for name, dim in (("fsdp", 0), ("tp", 1), ("columns", 0), ("deep", 2)):
        assert torch.equal(into[name].to_local(), tensors[name].chunk(3, dim)[rank]), name

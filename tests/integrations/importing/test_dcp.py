"""Folders of torch.distributed.checkpoint, from one process: the tree that torch's own reader makes, without its pickle."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import inspect_checkpoint
from tests.integrations.importing.conftest import Bring, Refuse
from tests.integrations.importing.same import require_same
from tests.integrations.importing.test_torch_files import many_tensors, many_values, training_state

pytestmark = pytest.mark.filterwarnings("ignore")


def save(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    dcp_save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def as_torch_reads(folder: Path) -> Any:
    dcp_to_torch_save(folder, folder.parent / "consolidated.pt")
    return torch.load(folder.parent / "consolidated.pt", weights_only=False)


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_a_training_state(bring: Bring, tmp_path: Path, options: dict[str, Any]) -> None:
    state = {**training_state(), "step": 7, "lists": [{"a": torch.ones(2)}, [1, 2], {"b": (1, torch.ones(3))}], "none": None}
    folder = save(state, tmp_path / "dcp", **options)
    found, contents = bring(folder)
    require_same(found, as_torch_reads(folder))
    assert contents.format == "DCP checkpoint"
    require_same(bring(folder / ".metadata")[0], found)


def test_all_values_and_tensors(bring: Bring, tmp_path: Path) -> None:
    folder = save({"values": many_values(), "tensors": many_tensors()}, tmp_path / "dcp")
    require_same(bring(folder)[0], as_torch_reads(folder))


def test_transposed_complex128_at_any_address_of_a_file(bring: Bring, tmp_path: Path) -> None:
    state = {"bytes": torch.arange(3, dtype=torch.uint8), "transposed": torch.arange(12.0).to(torch.complex128).reshape(4, 3).t()}
    require_same(bring(save(state, tmp_path / "dcp"))[0], state)


def test_keys_that_were_never_flattened(bring: Bring, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp_save({"a.b": torch.ones(2), "c": {"d": 1}}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    require_same(bring(folder)[0], {"a.b": torch.ones(2), "c": {"d": 1}})


def test_tensors_with_strides_as_newer_torch_reports_them(bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*older(self)[:5], (1, 3)))  # type: ignore[no-untyped-call]
    folder = save({"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(2)}, tmp_path / "dcp")
    require_same(bring(folder)[0], {"a": torch.arange(6.0).view(2, 3).t().contiguous(), "b": torch.ones(2)})


def test_accelerate(bring: Bring, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state = training_state()
    save({"model": state["model"]}, folder / "pytorch_model_fsdp_0")
    save({"optimizer": state["optimizer"]}, folder / "optimizer_0")
    torch.save(state["scheduler"], folder / "scheduler.bin")
    torch.save({"random_state": many_values()["generators"]}, folder / "random_states_0.pkl")
    found, contents = bring(folder)
    assert contents.format == "folder of 4 checkpoints"
    expected = {
        "optimizer_0": as_torch_reads(folder / "optimizer_0"),
        "pytorch_model_fsdp_0": as_torch_reads(folder / "pytorch_model_fsdp_0"),
        "random_states_0": {"random_state": many_values()["generators"]},
        "scheduler": state["scheduler"],
    }
    (folder / "consolidated.pt").unlink()
    assert list(found) == list(expected)
    for name in ("optimizer_0", "pytorch_model_fsdp_0", "scheduler"):
        require_same(found[name], expected[name])


def test_lightning(bring: Bring, store: tsck.Store, tmp_path: Path) -> None:
    state = training_state()
    folder = save({"model": state["model"], "optimizer_0": state["optimizer"]}, tmp_path / "dcp")
    extra = {"epoch": 1, "global_step": 12, "pytorch-lightning_version": "2.5.1", "loops": {}, "lr_schedulers": [state["scheduler"]]}
    tensors = as_torch_reads(folder)
    torch.save(extra, folder / "meta.pt")
    found, contents = bring(folder)
    require_same(found, {**tensors, **extra})
    assert contents.format == "DCP checkpoint of Lightning"
    assert store.log("old")[0].step == 12


class Own:
    """Somebody's own class."""


def test_values_of_unknown_classes(bring: Bring, refuse: Refuse, tmp_path: Path) -> None:
    folder = save({"a": torch.ones(2), "config": {"x": Own(), "y": 1}}, tmp_path / "dcp")
    assert "config.x (tests.integrations.importing.test_dcp.Own)" in refuse(folder, tsck.UnsupportedValueError)
    require_same(bring(folder, exclude=["config.x"])[0], {"a": torch.ones(2), "config": {"y": 1}})


# --- bad folders --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save({"model": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}, "step": 3}, tmp_path_factory.mktemp("saved") / "dcp")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "dcp"))


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def set_storage(**fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.a")
        vars(info).update(fields)

    return change


def set_tensor(**fields: Any) -> Callable[[Metadata], object]:
    return lambda metadata: vars(metadata.state_dict_metadata["model.a"]).update(fields)


def set_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a"].properties.dtype = torch.int32  # type: ignore[union-attr]


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


CHANGES: dict[str, Callable[[Metadata], object]] = {
    "outside": set_storage(relative_path="../x.distcp"),
    "absolute": set_storage(relative_path="/etc/passwd"),
    "no path": set_storage(relative_path=None),
    "no file": set_storage(relative_path="x.distcp"),
    "the metadata": set_storage(relative_path=".metadata"),
    "negative offset": set_storage(offset=-1),
    "wrong offset": set_storage(offset=1),
    "huge offset": set_storage(offset=10**12),
    "offset of another type": set_storage(offset="0"),
    "no length": set_storage(length=0),
    "short length": set_storage(length=100),
    "huge length": set_storage(length=10**12),
    "true length": set_storage(length=True),
    "compressed": set_storage(transform_descriptors=["stream.zstd"]),
    "another dtype": set_dtype,
    "another size": set_tensor(size=torch.Size([4, 3])),
    "huge size": set_tensor(size=torch.Size([10**12, 4])),
    "impossible size": set_tensor(size=torch.Size([2**62, 4])),
    "negative size": set_tensor(size=torch.Size([-3, 4])),
    "no pieces": set_tensor(chunks=[]),
    "a piece too many": set_tensor(chunks=chunks(((0, 0), (3, 4)), ((0, 0), (3, 4)))),
    "a piece elsewhere": set_tensor(chunks=chunks(((1, 0), (3, 4)))),
    "a piece of another size": set_tensor(chunks=chunks(((0, 0), (3, 3)))),
    "a piece of other dims": set_tensor(chunks=chunks(((0,), (12,)))),
    "a piece of nothing": set_tensor(chunks=[None]),
    "pieces of another type": set_tensor(chunks=7),
    "a name without a place": lambda metadata: metadata.storage_data.pop(MetadataIndex("model.a", torch.Size([0, 0]))),
    "a value without a place": lambda metadata: metadata.storage_data.pop(MetadataIndex("step")),
    "no places": lambda metadata: setattr(metadata, "storage_data", None),
    "no names": lambda metadata: setattr(metadata, "state_dict_metadata", None),
    "a name that is none": lambda metadata: metadata.state_dict_metadata.update({7: None}),  # type: ignore[dict-item]
    "a value that is none": lambda metadata: metadata.state_dict_metadata.update(x=7),  # type: ignore[call-overload]
    "a path that is none": lambda metadata: metadata.planner_data.update({"model.a": 7}),
    "an empty path": lambda metadata: metadata.planner_data.update({"model.a": ()}),
    "a list without end": lambda metadata: metadata.planner_data.update({"model.a": ("list", 10**9)}),
    "a negative position": lambda metadata: metadata.planner_data.update({"model.a": ("list", -1)}),
    "paths that contradict": lambda metadata: metadata.planner_data.update({"model.b": ("model", "a", "b")}),
    "a value where a container is": lambda metadata: metadata.planner_data.update({list(metadata.planner_data)[-1]: ("model",)}),
    "plans of another type": lambda metadata: setattr(metadata, "planner_data", [1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_lies(refuse: Refuse, folder: Path, change: str) -> None:
    change_metadata(folder, CHANGES[change])
    message = refuse(folder)
    if change == "no pieces":
        assert "12 elements are missing of the tensor 'model.a', of shape [3, 4]" in message


def test_another_object_as_metadata(refuse: Refuse, folder: Path) -> None:
    values: list[object] = [{}, [1], torch.Size([1]), MetadataIndex("x"), None]
    for value in values:
        (folder / ".metadata").write_bytes(pickle.dumps(value))
        refuse(folder, tsck.CorruptObjectError)
    (folder / ".metadata").write_bytes(b"")
    refuse(folder, tsck.CorruptObjectError)


def test_metadata_that_runs_code(refuse: Refuse, folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("gotcha",)

    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Evil()))
    assert "builtins.print" in refuse(folder, tsck.UnsupportedValueError)


def test_damaged_bytes_of_a_piece_are_noticed(refuse: Refuse, folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(12.0).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    assert "checksum" in refuse(folder, tsck.CorruptObjectError)


def test_parts_that_were_saved_for_each_rank(refuse: Refuse, folder: Path) -> None:
    (folder / ".metadata").rename(folder / "__0.metadata")
    assert "use_collectives" in refuse(folder, tsck.UnsupportedValueError)


def test_a_dry_run_reads_no_tensors(folder: Path) -> None:
    contents = inspect_checkpoint(folder)
    assert (contents.tensors, contents.tensor_bytes, contents.values) == (2, 68, 1)
    assert contents.path == str(folder)

"""Files of safetensors, alone, with an index, and in folders as Hugging Face has them."""

import json
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tensorstore_ck as tsck
from tests.integrations.importing.conftest import Bring, Refuse
from tests.integrations.importing.same import require_same

DTYPES = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2"
ODD_DTYPES = "float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz float4_e2m1fn_x2"
"""torch converts no numbers to some of them."""


def many_tensors() -> dict[str, torch.Tensor]:
    state = {f"a.{name}": torch.arange(1, 7).to(getattr(torch, name)).reshape(2, 3) for name in DTYPES.split()}
    state |= {f"b.{name}": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(getattr(torch, name)) for name in ODD_DTYPES.split()}
    return {**state, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.0), "weight": torch.randn(100, 333)}


def save_sharded(folder: Path, state: dict[str, torch.Tensor], shards: int, suffix: str = "safetensors", base: str = "model") -> None:
    """As transformers does it."""
    names: list[str] = sorted(state)
    places = {}
    for number in range(shards):
        file = f"{base}-{number + 1:05}-of-{shards:05}.{suffix}"
        part = {name: state[name] for name in names[number::shards]}
        places.update(dict.fromkeys(part, file))
        if suffix == "safetensors":
            save_file(part, folder / file, {"format": "pt"})
        else:
            torch.save(part, folder / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())}, "weight_map": places}
    (folder / f"{base}.{suffix}.index.json").write_text(json.dumps(index))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def test_one_file(bring: Bring, store: tsck.Store, tmp_path: Path) -> None:
    save_file(many_tensors(), tmp_path / "model.safetensors", {"format": "pt", "author": "me"})
    found, contents = bring(tmp_path / "model.safetensors", step=3, metrics={"loss": 1.5}, metadata={"author": "you"})
    expected = load_file(tmp_path / "model.safetensors")
    require_same(found, {name: expected[name] for name in sorted(expected)})
    assert contents.format == "safetensors file"
    assert store.show("old").metadata == {"format": "pt", "author": "you"}
    assert (store.log("old")[0].step, store.log("old")[0].metrics) == (3, {"loss": 1.5})


def test_an_imported_snapshot_was_made_when_its_newest_file_was(bring: Bring, store: tsck.Store, folder: Path) -> None:
    save_sharded(folder, {"a": torch.ones(3), "b": torch.zeros(3)}, 2)
    for number, path in enumerate(sorted(folder.iterdir()), 1):
        os.utime(path, (number, number))
    newest = folder / "model-00001-of-00002.safetensors"
    os.utime(newest, (9, 9))
    bring(folder)
    found = store.log("old")[0]
    assert (found.time_ns, found.time_ns < found.arrived_ns) == (9 * 10**9, True)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index(bring: Bring, folder: Path, suffix: str) -> None:
    state = many_tensors()
    save_sharded(folder, state, 3, suffix, {"safetensors": "model", "bin": "pytorch_model"}[suffix])
    (folder / "config.json").write_text('{"hidden_size": 8}')
    for path in (folder, next(folder.glob("*.index.json"))):
        found, contents = bring(path)
        require_same({name: found[name] for name in sorted(found)}, {name: state[name] for name in sorted(state)})
        assert contents.format == "3 files with an index"


def test_the_index_of_safetensors_comes_first(bring: Bring, folder: Path) -> None:
    save_sharded(folder, {"a": torch.zeros(2)}, 1)
    save_sharded(folder, {"b": torch.zeros(2)}, 1, "bin", "pytorch_model")
    found, contents = bring(folder)
    assert list(found) == ["a"]
    assert [name for name in contents.skipped if not name.endswith(".json")] == ["pytorch_model-00001-of-00001.bin"]


def test_a_folder_with_one_file(bring: Bring, folder: Path) -> None:
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "sub").mkdir()
    found, contents = bring(folder)
    require_same(found, {"a": torch.ones(3)})
    assert contents.skipped == {"config.json": "not a checkpoint", "sub": "a folder without a .metadata"}


def test_a_folder_with_several(bring: Bring, folder: Path) -> None:
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, folder / "optimizer.bin")
    require_same(bring(folder)[0], {"model": {"a": torch.ones(3)}, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}})
    torch.save([1, 2], folder / "model.pt")
    assert list(bring(folder)[0]) == ["model.pt", "model.safetensors", "optimizer.bin"]


def test_the_cache_of_hugging_face(bring: Bring, tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    save_sharded(blobs, {"a": torch.ones(3), "b": torch.zeros(2)}, 2)
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / str(number))
        (folder / path.name).symlink_to(f"../../blobs/{number}")
    assert set(bring(folder)[0]) == {"a", "b"}


# --- bad folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(folder: Path) -> Path:
    save_sharded(folder, {"a": torch.ones(3), "b": torch.zeros(2)}, 2)
    return folder


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", "", "a\0b", "x" * 5000])
def test_names_outside_of_the_folder(refuse: Refuse, model: Path, place: object) -> None:
    save_file({"a": torch.ones(3)}, model.parent / "outside.safetensors")
    (model / "sub").mkdir()
    change_index(model, lambda places: places.update(a=place))
    assert "do not trust" in refuse(model, tsck.InvalidNameError)


def test_links_out_of_the_folder(refuse: Refuse, model: Path) -> None:
    file = model / "model-00001-of-00002.safetensors"
    file.rename(model.parent / "outside.safetensors")
    file.symlink_to("../outside.safetensors")
    assert "cp -rL" in refuse(model, tsck.InvalidNameError)
    file.unlink()
    file.symlink_to(file.name)
    refuse(model, tsck.CorruptObjectError)


def test_files_that_are_none(refuse: Refuse, model: Path) -> None:
    file = model / "model-00001-of-00002.safetensors"
    file.unlink()
    assert "lacks model-00001-of-00002.safetensors" in refuse(model, tsck.CorruptObjectError)
    os.mkfifo(file)
    assert "no regular file" in refuse(model, tsck.UnsupportedValueError)
    file.unlink()
    file.mkdir()
    assert "no regular file" in refuse(model, tsck.UnsupportedValueError)


@pytest.mark.parametrize(
    "change",
    [
        lambda places: places.update(c="model-00001-of-00002.safetensors"),
        lambda places: places.clear(),
        lambda places: places.update(a="model.safetensors.index.json"),
        lambda places: places.update(a=7),
        lambda places: places.update(a=["model-00001-of-00002.safetensors"]),
    ],
)
def test_indexes_that_contradict_the_files(refuse: Refuse, model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    change_index(model, change)
    refuse(model)


def test_a_name_in_two_files(refuse: Refuse, model: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, model / "model-00002-of-00002.safetensors")
    assert "two of its files" in refuse(model, tsck.CorruptObjectError)


def test_nothing_to_import(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero").touch()
    (tmp_path / "text").write_text("hello")
    refuse(tmp_path / "empty", tsck.NotFoundError)
    refuse(tmp_path / "nowhere", tsck.NotFoundError)
    refuse(tmp_path / "zero", tsck.CorruptObjectError)
    refuse(tmp_path / "text", tsck.UnsupportedValueError)
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
    assert "is a pickle, but not of torch.save" in refuse(tmp_path / "pickle", tsck.UnsupportedValueError)


def test_folders_in_a_folder_are_named(refuse: Refuse, tmp_path: Path) -> None:
    """As in a pipeline of diffusers, or in the cache of Hugging Face."""
    for name in ("unet", "vae"):
        (tmp_path / "pipeline" / name).mkdir(parents=True)
        save_file({"w": torch.ones(2)}, tmp_path / "pipeline" / name / "model.safetensors")
    assert "not searched: give one of unet, vae" in refuse(tmp_path / "pipeline", tsck.NotFoundError)


# --- bad headers --------------------------------------------------------------------------------------------------------


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def text_of(entries: Iterable[tuple[str, object]]) -> bytes:
    return ("{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in entries) + "}").encode()


LIES: list[bytes] = [
    text_of([("a", entry(shape=[10**12]))]),
    text_of([("a", entry(shape=[2**62, 4]))]),
    text_of([("a", entry(shape=[-2, -1]))]),
    text_of([("a", entry(shape=[2.0]))]),
    text_of([("a", entry(shape=[True, 2]))]),
    text_of([("a", entry(shape="2"))]),
    text_of([("a", entry(shape=[1] * 65 + [2]))]),
    text_of([("a", entry(shape=[0, 2**47, 2**47], offsets=[0, 0])), ("b", entry())]),
    text_of([("a", entry(offsets=[8, 0]))]),
    text_of([("a", entry(offsets=[0, 10**12]))]),
    text_of([("a", entry(offsets=[0, 8, 8]))]),
    text_of([("a", entry(shape=[1], offsets=[4, 8]))]),
    text_of([("a", entry(shape=[1], offsets=[0, 4]))]),
    text_of([("a", entry()), ("b", entry())]),
    text_of([("a", entry()), ("b", entry(shape=[1], offsets=[4, 8]))]),
    text_of([("a", entry()), ("a", entry())]),
    text_of([("a", entry("F64"))]),
    text_of([("a", entry("NONE"))]),
    text_of([("a", entry(7))]),
    text_of([("a", {"dtype": "F32", "shape": [2]})]),
    text_of([("a", {**entry(), "more": 1})]),
    text_of([("a", [1, 2])]),
    text_of([("__metadata__", {"x": 1}), ("a", entry())]),
    text_of([("__metadata__", [])]),
    b"[1]",
    b"{",
    b'{"a":NaN}',
    b'{"a":' + b"[" * 100_000,
    b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
    b"{\xff\xfe}",
]


@pytest.mark.parametrize("header", LIES, ids=lambda header: header[:60].decode("latin-1"))
def test_headers_that_lie(refuse: Refuse, tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refuse(tmp_path / "a.safetensors")


@pytest.mark.parametrize("size", [0, 1, 2**20, 100_000_001, 2**63, 2**64 - 1])
def test_headers_of_another_size(refuse: Refuse, tmp_path: Path, size: int) -> None:
    header = text_of([("a", entry())])
    (tmp_path / "a.safetensors").write_bytes(size.to_bytes(8, "little") + header + bytes(8))
    refuse(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("dtype", "shape"), [("F6_E2M3", [4]), ("F6_E3M2", [2, 2]), ("F4", [2, 3]), ("F4", [3, 2])])
def test_dtypes_that_torch_lacks(refuse: Refuse, bring: Bring, tmp_path: Path, dtype: str, shape: list[int]) -> None:
    header = json.dumps(
        {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 3]}, "w": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}
    )
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(range(4)))
    if shape == [3, 2]:
        require_same(bring(path)[0]["a"], torch.arange(3, dtype=torch.uint8).reshape(3, 1).view(torch.float4_e2m1fn_x2))
        return
    message = refuse(path, tsck.UnsupportedValueError)
    assert f"a (a tensor of {dtype}{shape}, which torch does not have); exclude them (--exclude 'a')" in message
    require_same(bring(path, exclude=["a"])[0], {"w": torch.tensor([3], dtype=torch.uint8)})


def test_half_bytes_must_fill_their_place(refuse: Refuse, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [3], "data_offsets": [0, 3]}})
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(3))
    assert "claims 3 elements of F6_E2M3" in refuse(tmp_path / "odd.safetensors", tsck.CorruptObjectError)

"""``tsck://`` shows what `checkout` restores, as files that safetensors parses, and nothing else."""

import errno
import json
import multiprocessing
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.core import url_to_fs
from safetensors import safe_open
from safetensors.torch import load

import tensorstore_ck as tsck
from tensorstore_ck.backend import local, open_backend
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.format.layout import Layout
from tensorstore_ck.integrations import virtual_safetensors
from tensorstore_ck.integrations.filesystem import SnapshotFileSystem
from tests.maintenance.fsck.stores import State
from tests.servers import S3Server
from tests.session.group.built import RANKS, shared, stage, tensors
from tests.session.group.stores import put_all

DTYPES = [dtype for dtype in torch.__dict__.values() if isinstance(dtype, torch.dtype) and dtype.itemsize <= 8]
LOADABLE = {
    name: dtype for dtype in DTYPES if (name := str(dtype).removeprefix("torch.")) in virtual_safetensors._DTYPES and "e8m0" not in name
}
LOADABLE.pop("float4_e2m1fn_x2", None)  # safetensors.torch.load does not know it


@pytest.fixture(autouse=True)
def registered() -> None:
    """As the entry point does where the package is installed."""
    fsspec.register_implementation("tsck", SnapshotFileSystem, clobber=True)


def model_state(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    model = {f"layers.{number}.weight": torch.randn(300, 70 + number, generator=generator) for number in range(4)}
    model |= {"bias": torch.randn(7, generator=generator).bfloat16(), "embed": torch.randn(90, 30, generator=generator)}
    return {"model": {**model, "head": model["embed"]}, "optimizer": {"step": torch.tensor(step), "lr": 0.1}, "rng": [1, 2], "epoch": step}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with tsck.open(folder / "ck", create=True, cache_dir=folder / "cache") as store:
        for step in (1, 2, 3):
            store.put_snapshot(
                model_state(step), ref="runs/gpt", step=step, metrics={"loss": float("nan")}, metadata={"lr": [1e-3, float("inf")]}
            )
        store.tag("paper", "runs/gpt@2")
    return folder / "ck"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Iterator[tsck.Store]:
    shutil.copytree(made, tmp_path / "ck")
    with tsck.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        yield store


@pytest.fixture
def files(store: tsck.Store, tmp_path: Path) -> SnapshotFileSystem:
    return SnapshotFileSystem(str(tmp_path / "ck"), cache_dir=str(tmp_path / "cache"))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def read_lazily(file: Any) -> dict[str, torch.Tensor]:
    """What lazy readers do: the header, then ranges of single tensors, in an order of their own."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header.pop("__metadata__")
    found = {}
    for name, each in sorted(header.items(), reverse=True):
        start, stop = each["data_offsets"]
        file.seek(8 + size + start)
        data = bytearray(file.read(stop - start))
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}[each["dtype"]]
        found[name] = torch.frombuffer(data, dtype=dtype).reshape(each["shape"]) if data else torch.empty(each["shape"], dtype=dtype)
    return found


# --- contents ---------------------------------------------------------------------------------------------------------


def test_a_model_and_the_rest(store: tsck.Store, files: SnapshotFileSystem) -> None:
    for address in ("runs/gpt", "runs/gpt@1", "runs/gpt/@1", "runs/gpt~1", "runs/gpt/~1", "paper", store.resolve("runs/gpt@2").root[:9]):
        state = store.checkout(address.replace("/@", "@").replace("/~", "~"))
        assert_same(load(files.cat_file(f"{address}/model.safetensors")), state["model"])
        assert_same(load(files.cat_file(f"{address}/state.safetensors")), {"optimizer.step": state["optimizer"]["step"]})
        about = json.loads(files.cat_file(f"{address}/snapshot.json"), parse_constant=pytest.fail)
        assert about["values"] == {"optimizer.lr": 0.1, "rng": "list of 2: 1, 2", "epoch": state["epoch"]}
        assert (about["step"], about["metrics"], about["metadata"]) == (state["epoch"], {"loss": "nan"}, {"lr": [1e-3, "inf"]})
        assert about["root"] == files.info(f"{address}/snapshot.json")["root"]


def test_a_reader_of_safetensors(store: tsck.Store, files: SnapshotFileSystem, tmp_path: Path) -> None:
    files.get_file("runs/gpt/model.safetensors", str(tmp_path / "copy.safetensors"))
    with safe_open(tmp_path / "copy.safetensors", "pt") as copy:
        assert copy.metadata() == {"format": "pt", "root": store.resolve("runs/gpt").root, "step": "3"}
        assert_same({name: copy.get_tensor(name) for name in copy.keys()}, store.checkout("runs/gpt")["model"])  # noqa: SIM118 - no mapping
    with files.open("runs/gpt/model.safetensors") as file:
        assert_same(read_lazily(file), store.checkout("runs/gpt")["model"])


def test_every_dtype_and_form(store: tsck.Store, files: SnapshotFileSystem) -> None:
    raw = torch.randint(0, 256, (3000 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    base = torch.arange(6000.0).reshape(60, 100)
    numpy = {dtype: np.arange(3000).astype(dtype) for dtype in ("<f8", "<f4", "<f2", "<i8", "<u4", "<i2", "|u1", "|i1", "|b1")}
    state: dict[str, Any] = {
        **{name: raw[: 3000 * dtype.itemsize].clone().view(dtype) for name, dtype in LOADABLE.items() if name != "bool"},
        "bool": raw > 100,
        **{f"numpy {dtype}": array for dtype, array in numpy.items()},
        "base": base,
        "tied": base,
        "row": base[7],
        "transposed": base.t(),
        "every third": base[::3, 5:],
        "repeated": torch.ones(1).expand(4, 5),
        "one": raw[10:5000],
        "other": raw[100:9000].numpy()[::-1],
        "odd": raw[5001:5009].view(torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "grid": torch.arange(3_000_000, dtype=torch.int32).reshape(1000, 3000),
        "long rows": torch.arange(2 * 1_100_000, dtype=torch.int32).reshape(2, 1_100_000),
    }
    held_by_none = {"big": np.arange(3, dtype=">f4"), "complex128": torch.ones(3, dtype=torch.complex128), "text": np.array("a")}
    store.put_snapshot({**state, **held_by_none}, ref="all")
    with pytest.warns(UserWarning, match="model.safetensors lacks big, complex128, text, which safetensors cannot hold"):
        data = files.cat_file("all/model.safetensors")
    assert json.loads(header_of(data)["__metadata__"]["left_out"]) == list(held_by_none)
    assert_same(load(data), {name: value for name, value in store.checkout("all").items() if name not in held_by_none})
    assert sorted(json.loads(files.cat_file("all/snapshot.json"))["left_out"]) == sorted(held_by_none)
    assert files.ls("all", detail=False) == ["all/model.safetensors", "all/snapshot.json"]
    with files.open("all/model.safetensors") as file:  # from any byte to any other
        for start, stop in np.random.default_rng(1).integers(0, len(data), (60, 2)).tolist():
            file.seek(start)
            assert file.read(stop - start if stop > start else 3) == data[start : max(stop, start + 3)]


def test_what_only_safetensors_format_has(store: tsck.Store, files: SnapshotFileSystem) -> None:
    """Types that its torch loader lacks; what the header says of them is in its format."""
    state = {"e8m0": torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu), "fp4": torch.arange(6, dtype=torch.uint8).view(2, 3)}
    state["fp4"] = state["fp4"].view(torch.float4_e2m1fn_x2)
    store.put_snapshot(state, ref="few")
    data = files.cat_file("few/model.safetensors")
    header = header_of(data)
    assert (header["e8m0"]["dtype"], header["fp4"]["dtype"], header["fp4"]["shape"]) == ("F8_E8M0", "F4", [2, 6])
    assert data[-12:] == bytes(range(6)) * 2


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def test_a_state_without_tensors(store: tsck.Store, files: SnapshotFileSystem) -> None:
    store.put_snapshot({"a": 1}, ref="none")
    assert files.ls("none", detail=False) == ["none/snapshot.json"]
    with pytest.raises(FileNotFoundError, match=r"'none' has no model.safetensors"):
        files.open("none/model.safetensors")


@pytest.mark.parametrize(("ranks", "put"), [(RANKS, shared(1)), (RANKS, stage)])
def test_many_ranks(ranks: int, put: Callable[[int], CapturedState], tmp_path: Path) -> None:
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        put_all(open_backend(tmp_path / "ck"), ranks, put)
        files = SnapshotFileSystem(str(tmp_path / "ck"), cache_dir=str(tmp_path / "cache"))
        state = store.checkout("job")
        if put is not stage:
            state = dict(zip(map(str, range(len(tensors()))), state, strict=False))
        expected = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        assert len(expected) > 3
        assert_same(load(files.cat_file("job/model.safetensors")), expected)
        with files.open("job/model.safetensors") as file:
            assert_same(read_lazily(file), expected)
            file.seek(0)
            pieces = list(iter(lambda: file.read(10_007), b""))
        assert b"".join(pieces) == files.cat_file("job/model.safetensors")


def test_a_subtree_replaces_a_hole(tmp_path: Path) -> None:
    layout = Layout([], ["d", ["model", "y"], [None, None]])
    subtree = ["tree", ["d", ["a", "b"], [None, ["l", [None]]]], [1, "x"]]
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache"):
        put_all(open_backend(tmp_path / "ck"), 1, lambda _: CapturedState(layout, [subtree, "text"], (), ListedSources()))
    files = SnapshotFileSystem(str(tmp_path / "ck"), cache_dir=str(tmp_path / "cache"))
    assert json.loads(files.cat_file("job/snapshot.json"))["values"] == {"model.a": 1, "model.b.0": "x", "y": "text"}


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders(store: tsck.Store, files: SnapshotFileSystem) -> None:
    store.branch("runs/gpt/wide", "runs/gpt@1")
    store.branch("other", "runs/gpt@1")
    assert files.ls("", detail=False) == ["other", "paper", "runs"]
    assert files.ls("/runs/", detail=False) == ["runs/gpt"]
    names = ["model.safetensors", "state.safetensors", "snapshot.json"]
    assert files.ls("tsck://runs/gpt", detail=False) == ["runs/gpt/wide", *(f"runs/gpt/{name}" for name in names)]
    assert files.ls("runs/gpt@", detail=False) == ["runs/gpt@1", "runs/gpt@2", "runs/gpt@3"]
    assert files.ls("runs/gpt@2", detail=False) == [f"runs/gpt@2/{name}" for name in names]
    assert files.ls("runs/gpt@2/snapshot.json", detail=False) == ["runs/gpt@2/snapshot.json"]
    assert files.find("runs") == sorted(f"{folder}/{name}" for folder in ("runs/gpt", "runs/gpt/wide") for name in names)
    assert len(files.find("runs/gpt@")) == 9
    assert files.glob("*/*/model.safetensors") == ["runs/gpt/model.safetensors"]
    assert files.glob("runs/**/model.*") == ["runs/gpt/model.safetensors", "runs/gpt/wide/model.safetensors"]
    for folder in ("", "runs", "runs/gpt", "runs/gpt@", "runs/gpt@2", "runs/gpt~1"):
        assert files.isdir(folder)
        assert files.info(folder)["type"] == "directory"
    listing: Any = files.ls("runs/gpt")
    for listed in listing:
        assert files.info(listed["name"]) == listed
        if listed["type"] == "file":
            assert files.isfile(listed["name"])
            assert listed["size"] == len(files.cat_file(listed["name"]))
    root = store.resolve("runs/gpt@2").root
    assert (files.info("runs/gpt@2")["root"], files.info("runs/gpt@2/model.safetensors")["step"]) == (root, 2)
    assert files.modified("runs/gpt@2").timestamp() * 1e9 == pytest.approx(store.resolve(root).time_ns)
    assert files.ukey("runs/gpt/model.safetensors") != files.ukey("runs/gpt@2/model.safetensors")


BAD_PATHS = [
    "nothing",
    "runs/gp",
    "runs/model.safetensors",
    "runs/gpt@7/model.safetensors",
    "runs/gpt~9",
    "runs/gpt/pytorch_model.bin",
    "runs/gpt/model.safetensors/x",
    "paper@",
    "0123456789abcdef",
    "a//b",
    "model.safetensors",
]


def test_bad_paths(files: SnapshotFileSystem) -> None:
    for path in BAD_PATHS:
        assert not files.exists(path)
        for call in (files.info, files.ls, files.open, files.cat_file, files.created):
            with pytest.raises(FileNotFoundError):
                call(path)


def test_a_folder_is_no_file(files: SnapshotFileSystem) -> None:
    with pytest.raises(IsADirectoryError, match=r"model\.safetensors"):
        files.open("runs/gpt")


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no store at"):
        SnapshotFileSystem(str(tmp_path)).ls("")
    with pytest.raises(ValueError, match="which store"):
        fsspec.filesystem("tsck")
    with pytest.raises(ValueError, match="storage_options are for remote stores"):
        SnapshotFileSystem(str(tmp_path), target_options={"key": "x"}).ls("")


WRITES: list[Callable[[SnapshotFileSystem], object]] = [
    lambda files: files.open("runs/gpt/model.safetensors", "wb"),
    lambda files: files.open("runs/new/model.safetensors", "ab"),
    lambda files: files.open("runs/gpt/snapshot.json", "w"),
    lambda files: files.pipe_file("runs/gpt/x", b"x"),
    lambda files: files.pipe({"runs/gpt/x": b"x"}),
    lambda files: files.put_file(__file__, "runs/gpt/x"),
    lambda files: files.put(__file__, "runs/gpt/x"),
    lambda files: files.mkdir("runs/x"),
    lambda files: files.makedirs("runs/x/y", exist_ok=True),
    lambda files: files.rmdir("runs"),
    lambda files: files.rm("runs/gpt", recursive=True),
    lambda files: files.rm_file("runs/gpt/model.safetensors"),
    lambda files: files.cp_file("runs/gpt/model.safetensors", "runs/x"),
    lambda files: files.mv("runs/gpt/model.safetensors", "runs/x"),
    lambda files: files.touch("runs/gpt/model.safetensors"),
]


def test_nothing_is_written(store: tsck.Store, files: SnapshotFileSystem) -> None:
    before = [snapshot.root for snapshot in store.log()]
    for write in WRITES:
        with pytest.raises(PermissionError, match="tsck:// is read-only") as caught:
            write(files)
        assert caught.value.errno == errno.EROFS
    assert [snapshot.root for snapshot in store.log()] == before
    assert list(store.branches()) == ["runs/gpt"]


# --- where the store is -----------------------------------------------------------------------------------------------


def test_urls_of_local_stores(store: tsck.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected, options = store.checkout("runs/gpt@2")["model"], {"cache_dir": str(tmp_path / "cache")}
    for place in (f"{tmp_path}/ck", f"file://{tmp_path}/ck", "./ck", f"local://{tmp_path}/ck"):
        with fsspec.open(f"tsck://runs/gpt@2/model.safetensors::{place}", tsck=options) as file:
            assert_same(load(file.read()), expected)
    with fsspec.open("tsck://runs/gpt@2/model.safetensors", store="ck", **options) as file:
        assert_same(load(file.read()), expected)
    with fsspec.open(f"tsck://runs/gpt@2/snapshot.json::{tmp_path}/ck", "r", tsck=options) as text:
        assert json.load(text)["step"] == 2
    files, path = url_to_fs(f"tsck://runs/gpt@2::{tmp_path}/ck", tsck=options)
    assert files.isdir(path)
    (opened,) = fsspec.open_files(f"tsck://runs/*/model.safetensors::{tmp_path}/ck", tsck=options)
    assert opened.path == "runs/gpt/model.safetensors"


def test_a_store_in_memory(tmp_path: Path) -> None:
    with tsck.open("memory://virtual-files/ck", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(model_state(1), ref="runs/gpt")
        with fsspec.open("tsck://runs/gpt/model.safetensors::memory://virtual-files/ck", tsck={"cache_dir": str(tmp_path / "c")}) as file:
            assert_same(load(file.read()), store.checkout("runs/gpt")["model"])


@pytest.mark.s3
def test_a_store_on_s3(moto_server: S3Server, tmp_path: Path) -> None:
    url, options = f"{moto_server.url}/virtual-files", moto_server.storage_options
    with tsck.open(url, create=True, storage_options=options, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(model_state(1), ref="runs/gpt")
        expected = store.checkout("runs/gpt")["model"]
    with fsspec.open(f"tsck://runs/gpt/model.safetensors::{url}", s3=options, tsck={"cache_dir": str(tmp_path / "c")}) as file:
        assert_same(read_lazily(file), expected)
    files = SnapshotFileSystem(url, target_options=options, cache_dir=str(tmp_path / "c"))
    assert_same(load(files.cat_file("runs/gpt/model.safetensors")), expected)


def test_instances(store: tsck.Store, tmp_path: Path) -> None:
    """As Dask needs it: equal arguments are one instance, which a pickle, JSON and another process make again."""
    options = {"store": str(tmp_path / "ck"), "cache_dir": str(tmp_path / "cache")}
    files = fsspec.filesystem("tsck", **options)
    assert fsspec.filesystem("tsck", **options) is files
    assert pickle.loads(pickle.dumps(files)) is files
    assert fsspec.AbstractFileSystem.from_json(files.to_json()) is files
    expected = files.cat_file("runs/gpt/model.safetensors")
    opened = pickle.loads(pickle.dumps(fsspec.open("tsck://runs/gpt/model.safetensors", **options)))
    with opened as file:
        assert file.read() == expected
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(files.cat_file, ("runs/gpt/model.safetensors",)) == expected


# --- open files -------------------------------------------------------------------------------------------------------


def test_an_open_file_stays_with_its_snapshot(store: tsck.Store, files: SnapshotFileSystem) -> None:
    before = files.cat_file("runs/gpt/model.safetensors")
    with files.open("runs/gpt/model.safetensors") as file:
        start = file.read(5000)
        store.put_snapshot(model_state(4), ref="runs/gpt", step=4, expect=tsck.ANY)
        assert start + file.read() == before
    assert_same(load(files.cat_file("runs/gpt/model.safetensors")), store.checkout("runs/gpt@4")["model"])
    root = files.info("runs/gpt@3")["root"]
    assert files.cat_file(f"{root}/model.safetensors", 0, 100) == before[:100]


def test_seeking(files: SnapshotFileSystem) -> None:
    data = files.cat_file("runs/gpt/model.safetensors")
    assert files.cat_file("runs/gpt/model.safetensors", -9, -2) == data[-9:-2]
    assert files.cat_ranges(["runs/gpt/model.safetensors"] * 2, [5, 50_000], [9, 50_001]) == [data[5:9], data[50_000:50_001]]
    assert files.read_block("runs/gpt/model.safetensors", 100, 50) == data[100:150]
    with files.open("runs/gpt/model.safetensors") as file:
        assert (file.readable(), file.seekable(), file.writable(), file.size) == (True, True, False, len(data))
        assert (file.seek(-10, 2), file.read(4), file.tell()) == (len(data) - 10, data[-10:-6], len(data) - 6)
        assert (file.seek(2, 1), file.read(100), file.read(1), file.read()) == (len(data) - 4, data[-4:], b"", b"")
        buffer = bytearray(7)
        assert (file.seek(len(data) - 5), file.readinto(buffer), bytes(buffer[:5])) == (len(data) - 5, 5, data[-5:])
        assert (file.seek(len(data) + 9), file.read(), file.readinto(buffer)) == (len(data) + 9, b"", 0)
        with pytest.raises(OSError, match="before the beginning"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every read of a pack."""
    sizes: list[int] = []
    read_into = local.LocalBackend.read_into

    def counting(self: local.LocalBackend, name: str, offset: int, target: memoryview) -> None:
        sizes.append(len(target))
        read_into(self, name, offset, target)

    monkeypatch.setattr(local.LocalBackend, "read_into", counting)
    return sizes


def test_every_block_is_read_once(store: tsck.Store, files: SnapshotFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who reads on, in pieces of any size; and a tensor alone costs its own blocks."""
    monkeypatch.setattr(virtual_safetensors, "WINDOW_BYTES", 8 << 20)
    state = {f"t{number}": torch.randn(1900, 1500 + number) for number in range(3)}
    state |= {f"s{number}": torch.randn(5000) for number in range(9)}
    store.put_snapshot(state, ref="big", codec="raw")
    total = sum(tensor.nbytes for tensor in state.values())
    data = files.cat_file("big/model.safetensors")
    sizes = count_reads(monkeypatch)
    for piece in (70_001, 3 << 20, 20 << 20):
        sizes.clear()
        with files.open("big/model.safetensors") as file:
            pieces = [file.read(8)]
            pieces.append(file.read(int.from_bytes(pieces[0], "little")))
            assert not sizes
            while found := file.read(piece):
                pieces.append(found)
            assert b"".join(pieces) == data
        assert sum(sizes) == total
    with files.open("big/model.safetensors") as file:
        sizes.clear()
        wanted = state["s3"].numpy().tobytes()
        assert file.seek(data.index(wanted))
        assert file.read(len(wanted)) == wanted
        assert sizes == [len(wanted)]


def test_threads(store: tsck.Store, files: SnapshotFileSystem) -> None:
    addresses = [f"runs/gpt@{step}/model.safetensors" for step in (1, 2, 3)] * 4
    expected = {address: SnapshotFileSystem(files.store, skip_instance_cache=True).cat_file(address) for address in set(addresses)}
    found: list[bool] = []
    shared = files.open(addresses[0])

    def read(address: str) -> None:
        with files.open(address) as file:
            found.append(b"".join(iter(lambda: file.read(9999), b"")) == expected[address])
        found.append(len(shared.read(5000)) == 5000)

    threads = [threading.Thread(target=read, args=(address,)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 2 * len(addresses)
    assert shared.tell() == 5000 * len(addresses)


def test_damage(store: tsck.Store, files: SnapshotFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"good": torch.randn(5000), "bad": torch.randn(5000)}, "rest": torch.randn(5000)}
    store.put_snapshot(state, ref="hit", codec="raw")
    data = files.cat_file("hit/model.safetensors")
    wrong = state["model"]["bad"].numpy().tobytes()  # type: ignore[index]
    (pack,) = [path for path in (tmp_path / "ck" / "packs").rglob("*") if path.is_file() and wrong in path.read_bytes()]
    pack.write_bytes(pack.read_bytes().replace(wrong, wrong[:-1] + bytes([wrong[-1] ^ 1])))
    begin = data.index(wrong)
    for start, stop in ((begin + 7, begin + 8), (0, len(data)), (begin + 19_000, begin + 20_000)):
        with pytest.raises(OSError, match=r"of tensor 'model\.bad' does not match its hash: .*; run `tsck fsck") as caught:
            files.cat_file("hit/model.safetensors", start, stop)
        assert caught.value.errno == errno.EIO
    monkeypatch.setattr(virtual_safetensors, "WINDOW_BYTES", 32768)  # one tensor
    with SnapshotFileSystem(files.store, skip_instance_cache=True).open("hit/model.safetensors") as file:
        head = file.seek(begin - 20_000)
        assert file.read(10) + file.read(10) + file.read(19_980) == data[head:begin]
        for _ in range(2):  # nothing of a window that could not be read is given out
            with pytest.raises(OSError, match="does not match its hash"):
                file.read(10)
        file.seek(head)
        assert file.read(20_000) == data[head:begin]
    assert load(files.cat_file("hit/state.safetensors"))["rest"].tolist() == state["rest"].tolist()  # type: ignore[attr-defined]


def test_what_was_freed(store: tsck.Store, files: SnapshotFileSystem) -> None:
    file = files.open("runs/gpt@1/model.safetensors")
    store.forget("runs/gpt@1")
    store.gc(tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1))
    with pytest.raises(OSError, match="forgotten"):
        file.read()
    assert not files.exists("runs/gpt@1/model.safetensors")


def test_a_tensor_that_a_file_cannot_name(store: tsck.Store, files: SnapshotFileSystem) -> None:
    store.put_snapshot({"model": {"__metadata__": torch.ones(2), "w": torch.ones(3)}}, ref="odd")
    with pytest.warns(UserWarning, match="model.safetensors lacks model.__metadata__"):
        data = files.cat_file("odd/model.safetensors")
    assert list(load(data)) == ["w"]
    assert json.loads(files.cat_file("odd/snapshot.json"))["left_out"] == ["model.__metadata__"]


def test_a_trust_file_counts(made: Path, tmp_path: Path) -> None:
    (tmp_path / "trust.toml").write_text('[[trust]]\nrefs = ["runs/*"]\nkeys = []\n')
    trusting = SnapshotFileSystem(str(made), cache_dir=str(tmp_path / "cache"), trust=str(tmp_path / "trust.toml"))
    with pytest.raises(OSError, match=r"'runs/gpt' .* is not trusted"):
        trusting.cat_file("runs/gpt/snapshot.json")
    assert trusting.cat_file("paper/snapshot.json")

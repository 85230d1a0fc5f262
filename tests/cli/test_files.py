"""put and get: model files come back as they were, and nothing in them is ever run."""

import errno
import mmap
import os
import pickle
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tensorstore_ck.cli import model_files
from tensorstore_ck.common import host_memory
from tensorstore_ck.errors import NoSpaceError
from tests.cli.conftest import Tsck


@pytest.fixture
def store(tsck: Tsck) -> Tsck:
    assert tsck("init", "ck").code == 0
    return tsck


def test_safetensors_round_trip(history: Tsck, model: dict[str, torch.Tensor]) -> None:
    assert history("get", "runs/gpt@1", "out.safetensors").code == 0
    back = load_file("out.safetensors")
    assert back.keys() == model.keys()
    assert all(torch.equal(back[name], model[name]) and back[name].dtype == model[name].dtype for name in model)
    with safe_open("out.safetensors", "pt") as file:
        assert file.metadata() == {"author": "me", "format": "pt", "lr": "0.0003"}


def test_torch_round_trip_keeps_values_and_aliases(store: Tsck, tmp_path: Path) -> None:
    shared = torch.randn(50, 50)
    state = {"model": {"emb": shared, "head": shared}, "step": 3, "opt": [{"lr": 1e-3, "betas": (0.9, 0.95)}]}
    torch.save(state, "in.pt")
    assert store("put", "in.pt", "--ref", "runs/x").code == 0
    assert store("get", "runs/x", "out.pt").code == 0
    back = torch.load("out.pt", weights_only=True)
    assert back["step"] == 3
    assert back["opt"] == state["opt"]
    assert torch.equal(back["model"]["emb"], shared)
    assert back["model"]["emb"].data_ptr() == back["model"]["head"].data_ptr()

    written = store("get", "runs/x", "out.safetensors", "--json").json
    assert written["left_out"] == ["step", "opt.0.lr", "opt.0.betas.0", "opt.0.betas.1"]
    tensors = load_file("out.safetensors")
    assert torch.equal(tensors["model.emb"], shared)
    assert torch.equal(tensors["model.head"], shared)
    assert "left out 4 values" in store("get", "runs/x", "again.safetensors").out


def test_views_and_transposes_are_written_as_they_look(store: Tsck) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    torch.save({"base": base, "row": base[1], "turned": base.t()}, "in.pt")
    store("put", "in.pt", "--ref", "x")
    assert store("get", "x", "out.safetensors").code == 0
    back = load_file("out.safetensors")
    assert torch.equal(back["base"], base)
    assert torch.equal(back["row"], base[1])
    assert torch.equal(back["turned"], base.t())


def test_select(history: Tsck) -> None:
    assert history("get", "runs/gpt", "out.safetensors", "--include", "model.*").code == 0
    assert set(load_file("out.safetensors")) == {"model.a", "model.b"}
    assert history("get", "runs/gpt", "none.safetensors", "--include", "nothing.*").code == 27
    assert not Path("none.safetensors").exists()


def test_get_never_overwrites_unasked(history: Tsck) -> None:
    Path("out.safetensors").write_text("precious")
    assert history("get", "runs/gpt", "out.safetensors").code == 28
    assert Path("out.safetensors").read_text() == "precious"
    assert history("get", "runs/gpt", "out.safetensors", "--force").code == 0
    assert load_file("out.safetensors")


def test_a_get_that_fails_leaves_the_target_alone(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    Path("out.pt").write_text("precious")
    monkeypatch.setattr(torch, "save", fail)
    assert history("get", "runs/gpt", "out.pt", "--force").code == 34
    assert Path("out.pt").read_text() == "precious"
    assert not [name for name in os.listdir() if name.startswith(".out.pt")]


def test_a_file_is_durable_before_it_replaces_another_and_so_is_its_name(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.pt").write_text("precious")
    synced = list[tuple[str, bool]]()
    monkeypatch.setattr(model_files, "sync_path", lambda path: synced.append((path[:9], Path("out.pt").read_bytes() == b"precious")))
    assert history("get", "runs/gpt", "out.pt", "--force").code == 0
    assert synced == [("./.out.pt", True), (".", False)]


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_files_have_the_mode_of_the_umask(history: Tsck, name: str) -> None:
    before = os.umask(0o027)
    try:
        assert history("get", "runs/gpt", name).code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(name).st_mode) == 0o640


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_torch_file_is_never_run(store: Tsck, zipped: bool) -> None:
    torch.save({"a": torch.zeros(3), "x": _Evil()}, "evil.pt", _use_new_zipfile_serialization=zipped)
    result = store("put", "evil.pt", "--ref", "x", "--json")
    assert result.code == 24
    assert "mkdir" in result.json["error"]["message"]
    assert not Path("ran").exists()
    assert store("branch", "--json").json == {}


def test_plain_pickle_is_refused(store: Tsck) -> None:
    Path("plain.ckpt").write_bytes(pickle.dumps(_Evil()))
    assert store("put", "plain.ckpt", "--ref", "x").code in (24, 41)
    assert not Path("ran").exists()


def test_legacy_torch_files_are_read(store: Tsck) -> None:
    torch.save({"a": torch.ones(3)}, "old.pth", _use_new_zipfile_serialization=False)
    assert store("put", "old.pth", "--ref", "x").code == 0


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello world, this is no model", b"PK\x03\x04junk", b"\xff" * 64])
def test_files_that_are_not_models(store: Tsck, name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    result = store("put", name, "--ref", "x")
    assert result.code in (24, 41)
    assert name in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("name", ["whole.pt", "whole.safetensors"])
def test_truncated_files(history: Tsck, name: str) -> None:
    assert history("get", "runs/gpt", name).code == 0
    os.truncate(name, os.path.getsize(name) // 2)
    result = history("put", name, "--ref", "x")
    assert result.code == 41
    assert name in result.err


def test_dtypes_that_safetensors_lacks(store: Tsck) -> None:
    torch.save({"a": torch.zeros(3, dtype=torch.complex128)}, "in.pt")
    store("put", "in.pt", "--ref", "x")
    result = store("get", "x", "out.safetensors")
    assert result.code == 24
    assert ".pt" in result.err
    assert not Path("out.safetensors").exists()


def test_without_the_extra(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for args in (("put", "model.safetensors", "--ref", "x"), ("get", "runs/gpt", "out.safetensors")):
        result = history(*args)
        assert result.code == 35
        assert "pip install 'tensorstore_ck[safetensors]'" in result.err


def test_a_view_is_not_copied_into_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One stored float, as 2^28 of them, from a snapshot of a few bytes."""
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 200 << 20)
    view = torch.zeros(1).as_strided((1 << 28,), (0,))
    with pytest.raises(NoSpaceError, match=r"1,073,741,824 bytes\) of memory.*\.pt file"):
        model_files.save_file({"w": view}, str(tmp_path / "out.safetensors"), {}, overwrite=False)
    assert os.listdir(tmp_path) == []


def test_filesystems_that_cannot_do_all(history: Tsck, model: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """No fsync of folders (SMB), no modes (FAT), no size (some of FUSE), no shared maps (FUSE with `direct_io`)."""
    fsync, mapped = os.fsync, mmap.mmap

    def no_folders(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not for folders")
        fsync(fd)

    def no_modes(*_: object) -> None:
        raise OSError(errno.EPERM, "no modes")

    def no_shared_maps(fd: int, size: int, *args: int, **access: int) -> mmap.mmap:
        if mmap.MAP_PRIVATE not in args[:1]:
            raise OSError(errno.ENODEV, "no shared maps")
        return mapped(fd, size, *args, **access)

    monkeypatch.setattr(os, "fsync", no_folders)
    monkeypatch.setattr(os, "chmod", no_modes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    assert history("get", "runs/gpt@1", "out.safetensors").code == 0
    assert load_file("out.safetensors").keys() == model.keys()
    assert history("export", "runs/gpt@1", "--to", "safetensors", "out").code == 0
    monkeypatch.setattr(mmap, "mmap", no_shared_maps)
    assert history("import", "out", "--ref", "runs/again").code == 0

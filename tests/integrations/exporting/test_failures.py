"""Whatever goes wrong: one clear error, and the target is as it was."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

import tensorstore_ck as tsck
from tensorstore_ck.backend.local_io import write_at
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    DamageError,
    InvalidOptionError,
    MismatchError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    SnapshotMarkedBadError,
)
from tensorstore_ck.integrations.exporting import FORMATS, blocks_to_files, byte_routing, export_snapshot, output_file
from tests.gc.stores import AT_ONCE, open_store
from tests.integrations.exporting.states import small_blocks

STATE = {"a": torch.arange(20_000.0), "b": {"turned": torch.arange(600.0).view(20, 30).t(), "c": torch.ones(3)}, "n": 1}
FILES = {"model_files": {"config.json": "{}"}}
"""Without them there is no export to hf."""
FLAT = {"a": STATE["a"], "b.turned": STATE["b"]["turned"], "b.c": STATE["b"]["c"], "common": {"n": 1, **FILES}}  # type: ignore[index]
"""As Megatron has it."""


@pytest.fixture
def backend() -> MemoryBackend:
    return small_blocks()


@pytest.fixture
def store(backend: MemoryBackend, request: pytest.FixtureRequest) -> Iterator[tsck.Store]:
    is_flat = "kind" in request.fixturenames and request.getfixturevalue("kind") == "megatron"
    with open_store(backend) as opened:
        opened.put_snapshot(FLAT if is_flat else {**STATE, **FILES}, ref="run")
        yield opened


EVERY = [each for each in FORMATS if each != "deepspeed-universal"]
"""Without the one that replaces nothing, and needs an engine's state."""


@pytest.fixture
def kind() -> Any:
    """Of the files, which all formats write in one way."""
    return "safetensors"


every_kind = pytest.mark.parametrize("kind", EVERY)


def inodes(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_ino for path in folder.rglob("*")}


@every_kind
def test_a_full_disk(store: tsck.Store, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_snapshot(store, "run", tmp_path / "out", format=kind)
    before = inodes(tmp_path)
    calls = iter(range(1000))

    def write(*args: Any) -> None:
        if next(calls) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(*args)

    monkeypatch.setattr(output_file, "write_at", write)
    for path in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(NoSpaceError, match=f"cannot write {path}: No space left") as caught:
            export_snapshot(store, "run", path, format=kind, overwrite=True)
        assert "\n" not in str(caught.value)
    assert inodes(tmp_path) == before


def test_too_little_space_is_an_error_before_anything_is_written(
    store: tsck.Store, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, (16 << 20) + 80_000))
    monkeypatch.setattr(byte_routing, "_write_ranges", None)
    with pytest.raises(NoSpaceError, match="are free on the disk at"):
        export_snapshot(store, "run", tmp_path / "out", format=kind)
    assert list(tmp_path.iterdir()) == []


@every_kind
def test_a_damaged_block_in_the_middle(store: tsck.Store, backend: MemoryBackend, kind: Any, tmp_path: Path) -> None:
    export_snapshot(store, "run", tmp_path / "out", format=kind)
    before = inodes(tmp_path)
    (pack,) = [info.name for info in backend.list("packs/")]
    data = bytearray(backend.get(pack, max_bytes=1 << 30))
    data[len(data) // 2] ^= 1
    backend.replace(pack, data)
    for path in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(DamageError, match="tensor 'a'"):
            export_snapshot(store, "run", path, format=kind, overwrite=True)
    assert inodes(tmp_path) == before


@every_kind
def test_a_disk_that_keeps_something_else(store: tsck.Store, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def write(fd: int, views: list[memoryview], offset: int) -> None:
        if next(calls) >= 4:  # a piece that is wrong once is written again
            views = [memoryview(bytes(len(views[0]) - 1) + b"\1")]
        write_at(fd, views, offset)

    monkeypatch.setattr(output_file, "write_at", write)
    with pytest.raises(CorruptObjectError, match=f"({tmp_path / 'out'}|a scratch file) does not hold at bytes"):
        export_snapshot(store, "run", tmp_path / "out", format=kind)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_block_of_a_tensor_that_is_not_row_major(backend: MemoryBackend, tmp_path: Path) -> None:
    with open_store(backend) as store:
        base = torch.randn(40, 300)
        store.put_snapshot({"base": base, "turned": base.t()}, ref="run")
        (pack,) = [info.name for info in backend.list("packs/")]
        data = bytearray(backend.get(pack, max_bytes=1 << 30))
        data[len(data) // 2] ^= 1
        backend.replace(pack, data)
        with pytest.raises(DamageError, match="tensor 'base'"):
            export_snapshot(store, "run", tmp_path / "out", format="safetensors", select=["turned"])
    assert list(tmp_path.iterdir()) == []


@every_kind
def test_bytes_that_come_wrong_once_are_written_again(
    store: tsck.Store, backend: MemoryBackend, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into, harmed = backend.read_into, list[str]()

    def read(name: str, offset: int, target: memoryview) -> None:
        read_into(name, offset, target)
        if name.startswith("packs/") and len(target) == blocks_to_files.COPY_BYTES and not harmed:
            harmed.append(name)
            target[5] ^= 1

    export_snapshot(store, "run", tmp_path / "right", format=kind)
    monkeypatch.setattr(backend, "read_into", read)
    export_snapshot(store, "run", tmp_path / "out", format=kind)
    assert harmed
    for path in (tmp_path / "right").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "right")).read_bytes()


def test_what_is_written_again_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, events = bytes(range(200)), list[str]()
    fsync = os.fsync

    def write(fd: int, views: list[memoryview], offset: int) -> None:
        events.append("write")
        write_at(fd, views, offset)

    def sync(fd: int) -> None:
        fsync(fd)
        events.append("fsync")

    monkeypatch.setattr(output_file, "write_at", write)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(output_file, "for_each", lambda tasks, work, _: [*map(work, tasks)])  # the first fsync comes before the comparison
    with output_file.OutputFile(str(tmp_path / "file"), "file") as file:
        file.write_unhashed(0, memoryview(bytes(200)))
        file.expect(output_file.Piece(0, 200, blake3(right).digest(), lambda: memoryview(right)))
        file.finish(200)
    assert (tmp_path / "file").read_bytes() == right
    assert events.count("write") == 2
    assert events[-1] == "fsync"


def test_two_tensors_are_not_written_to_one_place(tmp_path: Path) -> None:
    with output_file.OutputFile(str(tmp_path / "file"), "file") as file:
        file.write(0, b"one")
        file.write(0, b"one")
        with pytest.raises(CorruptObjectError, match="file was written twice at byte 0"):
            file.write(0, b"two")


def test_blocks_that_are_encoded_and_moved_meanwhile(
    backend: MemoryBackend, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressible = {"a": torch.arange(20_000.0) // 1000}
    with open_store(backend) as store, open_store(backend) as other:
        store.put_snapshot(compressible, ref="run", codec="raw")
        read_into, moved = backend.read_into, list[str]()

        def read(name: str, offset: int, target: memoryview) -> None:
            if name.startswith("packs/") and len(target) == blocks_to_files.COPY_BYTES and not moved:
                moved.append(name)
                other.recode("run", codec="small")
                other.gc(AT_ONCE)
            read_into(name, offset, target)

        monkeypatch.setattr(backend, "read_into", read)
        export_snapshot(store, "run", tmp_path / "out", format=kind)
        assert not [info for info in backend.list("packs/") if info.name in moved]
    (path,) = [tmp_path / "out"] if (tmp_path / "out").is_file() else (tmp_path / "out").rglob("*.safetensors")
    assert torch.equal(load_file(path)["a"], compressible["a"])


@pytest.mark.parametrize("lost", ["all", "one"])
def test_bytes_that_never_came(store: tsck.Store, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    write = blocks_to_files.RangesTarget.write

    def lose(self: Any, start: int, data: memoryview) -> None:
        if lost == "one" and start != 4096:
            write(self, start, data)

    monkeypatch.setattr(blocks_to_files, "MIN_BYTES", 1 << 20)  # all blocks are read
    monkeypatch.setattr(blocks_to_files.RangesTarget, "write", lose)
    with pytest.raises(CorruptObjectError, match="was not written"):
        export_snapshot(store, "run", tmp_path / "out", format=kind, exclude=["b.turned"])
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced_unasked(store: tsck.Store, kind: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    before = inodes(tmp_path)
    for name in ("file", "folder", "link"):
        with pytest.raises(AlreadyExistsError, match="already exists: use --force"):
            export_snapshot(store, "run", tmp_path / name, format=kind)
    for name in ("file", "link"):
        with pytest.raises(AlreadyExistsError, match=r"is no folder|is a link"):
            export_snapshot(store, "run", tmp_path / name, format=kind, overwrite=True)
    assert inodes(tmp_path) == before
    assert (tmp_path / "file").read_text() == "precious"


@every_kind
def test_a_folder_is_only_replaced_if_it_is_an_export(store: tsck.Store, kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "out"
    export_snapshot(store, "run", path, format=kind)
    first = next(found for found in path.iterdir() if found.suffix != ".json")
    first.write_text("old")
    (path / "notes.txt").write_text("precious")
    with pytest.raises(AlreadyExistsError, match=r"holds 'notes.txt', which no export writes"):
        export_snapshot(store, "run", path, format=kind, overwrite=True)
    (path / "notes.txt").unlink()
    (path / "__0_7.distcp").mkdir()
    with pytest.raises(AlreadyExistsError, match=r"holds '__0_7.distcp'"):
        export_snapshot(store, "run", path, format=kind, overwrite=True)
    (path / "__0_7.distcp").rmdir()
    export_snapshot(store, "run", path, format=kind, overwrite=True)
    assert first.read_bytes() != b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["out"]


def test_files_are_replaced_when_asked(store: tsck.Store, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("old")
    export_snapshot(store, "run", path, format="safetensors", overwrite=True)
    assert torch.equal(load_file(path)["a"], STATE["a"])  # type: ignore[arg-type]
    (tmp_path / "b.pt").mkdir()
    with pytest.raises(AlreadyExistsError, match="is a folder"):
        export_snapshot(store, "run", tmp_path / "b.pt", format="torch", overwrite=True)
    (tmp_path / "c.pt").symlink_to(path)
    with pytest.raises(AlreadyExistsError, match="is a link"):
        export_snapshot(store, "run", tmp_path / "c.pt", format="torch", overwrite=True)
    assert torch.equal(load_file(path)["a"], STATE["a"])  # type: ignore[arg-type]


def test_another_export_that_was_faster_wins(store: tsck.Store, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = byte_routing.ByteRouter.run

    def slowly(self: byte_routing.ByteRouter, scratch: str) -> None:
        run(self, scratch)
        (tmp_path / "out").mkdir()

    monkeypatch.setattr(byte_routing.ByteRouter, "run", slowly)
    with pytest.raises(AlreadyExistsError):
        export_snapshot(store, "run", tmp_path / "out", format=kind)
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == []


def test_folders_that_cannot_be_written(store: tsck.Store, kind: Any, tmp_path: Path) -> None:
    with pytest.raises(PermissionDeniedError, match="cannot write /sys/out"):
        export_snapshot(store, "run", "/sys/out", format=kind)
    with pytest.raises(NotFoundError, match="there is no folder"):
        export_snapshot(store, "run", tmp_path / "no" / "out", format=kind)


def test_a_marked_snapshot(store: tsck.Store, kind: Any, tmp_path: Path) -> None:
    store.mark("run", reason="diverged")
    with pytest.raises(SnapshotMarkedBadError, match=r"diverged.*--allow-marked"):
        export_snapshot(store, "run", tmp_path / "out", format=kind)
    assert list(tmp_path.iterdir()) == []
    export_snapshot(store, "run", tmp_path / "out", format=kind, allow_marked=True)


def test_bad_options(store: tsck.Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InvalidOptionError, match="one of dcp, deepspeed-universal, hf, megatron, safetensors, torch"):
        export_snapshot(store, "run", out, format="onnx")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="max_file_bytes"):
        export_snapshot(store, "run", out, format="dcp", max_file_bytes=0)
    with pytest.raises(NotFoundError):
        export_snapshot(store, "nope", out, format="dcp")
    for bad in ({"select": ["nope.*"]}, {"exclude": ["nope.*"]}, {"exclude": ["*"]}):
        with pytest.raises(MismatchError):
            export_snapshot(store, "run", out, format="dcp", **bad)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@every_kind
def test_everything_is_durable_before_it_is_there(store: tsck.Store, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, bool] = {}
    fsync = os.fsync

    def spy(fd: int) -> None:
        fsync(fd)
        synced[os.fstat(fd).st_ino] = (tmp_path / "out").exists()

    monkeypatch.setattr(os, "fsync", spy)
    export_snapshot(store, "run", tmp_path / "out", format=kind, max_file_bytes=50_000)
    files = {path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    assert {inode: synced[inode] for inode in files} == dict.fromkeys(files, False)
    assert synced[(tmp_path / "out").stat().st_ino] is False
    assert synced[tmp_path.stat().st_ino] is True

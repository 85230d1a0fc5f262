"""Blocks that the kernel copies from a pack to the file: the files are those that are written through memory, whatever it copied."""

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.integrations.exporting import Format, export_snapshot
from tests.gc.stores import open_store
from tests.integrations.exporting.states import small_blocks

STATE = {"a": torch.arange(20_000.0), "b": torch.ones(30_000, dtype=torch.int16), "c": torch.rand(5, 4000)}
KINDS: tuple[Format, ...] = ("safetensors", "torch", "dcp")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    """In a folder, with blocks of a few kilobytes."""
    made, backend = small_blocks(), LocalBackend(str(tmp_path / "store"))
    for info in made.list(""):
        backend.put(info.name, made.get(info.name, max_bytes=1 << 20))
    with open_store(backend) as opened:
        opened.put_snapshot(STATE, ref="run", codec="raw")
        yield opened


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".metadata"}  # that has a random id


def without_copies(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EXDEV, "another filesystem")

    patch.setattr(os, "copy_file_range", refuse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_kernel_copies(store: tsck.Store, kind: Format, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All, less than asked, nothing, an error in the middle, or something else."""
    chance, real, copied = random.Random(seed), os.copy_file_range, list[int]()

    def copy(source: int, target: int, size: int, *, offset_src: int, offset_dst: int) -> int:
        match chance.randrange(5):
            case 0:
                return 0
            case 1:
                raise OSError(errno.EIO, "in the middle")
            case 2:
                size = chance.randrange(1, size + 1)
            case 3:
                offset_src -= 1
        copied.append(real(source, target, size, offset_src=offset_src, offset_dst=offset_dst))
        return copied[-1]

    with monkeypatch.context() as patch:
        without_copies(patch)
        export_snapshot(store, "run", tmp_path / "slow", format=kind)
    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", copy)
        export_snapshot(store, "run", tmp_path / "out", format=kind)
    assert sum(copied)
    assert contents(tmp_path / "out") == contents(tmp_path / "slow")


def test_what_is_damaged_in_the_pack_is_refused(store: tsck.Store, tmp_path: Path) -> None:
    for path in (tmp_path / "store" / "packs").rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                file.seek(4500)
                file.write(b"wrong")
    with pytest.raises(CorruptObjectError, match="does not match its hash"):
        export_snapshot(store, "run", tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()


def test_a_read_rate_limit_holds(store: tsck.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's copies would pass it by."""
    monkeypatch.setattr(os, "copy_file_range", None)
    with tsck.Store(replace(store.engine, reads=RateLimit(1 << 40))) as limited:
        export_snapshot(limited, "run", tmp_path / "out", format="safetensors")

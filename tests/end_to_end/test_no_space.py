"""A filesystem that is full, or read-only: a clear error, what was there stays, and the next save works."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root, to mount a small tmpfs")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def make_state(step: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.arange(1 << 20, dtype=torch.float32) + step}


def test_no_space(small_disk: Path, tmp_path: Path) -> None:
    with tsck.open(small_disk / "store", create=True, cache_dir=tmp_path / "cache", codec="raw") as store:
        for step in range(1, 5):
            store.put_snapshot(make_state(step), ref="job", step=step)
        last = 4
        with pytest.raises(tsck.NoSpaceError, match=r"packs/.*free space"):
            store.put_snapshot({"large": torch.randn(5 << 20)}, ref="job", step=5)
        assert store.resolve("job").step == last
        for step in (1, last):
            assert torch.equal(store.checkout(f"job@{step}")["weights"], make_state(step)["weights"])
        assert not store.fsck(read_data=True).findings, "the torn pack is gone"
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        store.put_snapshot(make_state(last + 1), ref="job", step=last + 1, expect=f"job@{last}")
        assert store.resolve("job").step == last + 1


def test_read_only(small_disk: Path, tmp_path: Path) -> None:
    with tsck.open(small_disk / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(make_state(1), ref="job", step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(tsck.PermissionDeniedError, match="read-only"):
            store.put_snapshot(make_state(2), ref="job", step=2)
        assert torch.equal(store.checkout("job")["weights"], make_state(1)["weights"])
    with tsck.open(small_disk / "store", cache_dir=tmp_path / "cold") as store:
        assert torch.equal(store.checkout("job")["weights"], make_state(1)["weights"])

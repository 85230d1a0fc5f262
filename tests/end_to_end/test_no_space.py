"""A filesystem that is full, or read-only: a clear error, what was there stays, and the next save works."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests.cli.conftest import run_tsck
from tests.end_to_end.walks.walk import Walk
from tests.small_disk import needs_mount, small_disk

pytestmark = needs_mount


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "24m") as folder:
        yield folder


def make_state(step: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.arange(1 << 20, dtype=torch.float32) + step}


def test_no_space(disk: Path, tmp_path: Path) -> None:
    with tsck.open(disk / "store", create=True, cache_dir=tmp_path / "cache", codec="raw") as store:
        for step in range(1, 5):
            store.put_snapshot(make_state(step), ref="job", step=step)
        last = 4
        with pytest.raises(tsck.NoSpaceError, match=r"packs/.*free space"):
            store.put_snapshot({"large": torch.randn(5 << 20)}, ref="job", step=5)
        assert store.resolve("job").step == last
        for step in (1, last):
            assert torch.equal(store.checkout(f"job@{step}")["weights"], make_state(step)["weights"])
        assert not store.fsck(read_data=True).findings, "the torn pack is gone"
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        store.put_snapshot(make_state(last + 1), ref="job", step=last + 1, expect=f"job@{last}")
        assert store.resolve("job").step == last + 1


def fill_up(disk: Path) -> None:
    """What others write there."""
    with (disk / "others").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.slow
def test_saves_fill_a_disk_and_the_printed_commands_free_it(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Walk(tmp_path, monkeypatch) as walk:
        with tsck.open(disk / "store", create=True, codec="raw") as store:
            step, full = 0, None
            while full is None:
                before = {path for path in (disk / "store").rglob("*/*/*") if path.is_file()}
                try:
                    store.put_snapshot({"weights": torch.randn(1 << 19)}, ref="job", step=(step := step + 1))
                except tsck.NoSpaceError as exc:
                    full = exc
            assert {path for path in (disk / "store").rglob("*/*/*") if path.is_file()} == before, "it deleted what it had written"
            fill_up(disk)
            with pytest.raises(tsck.NoSpaceError):
                store.tag("new", at="job")
            forgot = walk.follow(walk.read(full, "the error"), "forget")
            usage = walk.type(f"tsck usage -s {store.url}")
            walk.follow(usage, "forget -s")
            walk.follow(usage, "gc")
            walk.follow(forgot, "gc")
            walk.follow(forgot, "undo", code=tsck.NotFoundError.exit_code)  # its space is free already
            store.put_snapshot({"weights": torch.randn(1 << 18)}, ref="job", step=step, expect=tsck.ANY)
            assert store.fsck(read_data=True).ok
        with pytest.raises(tsck.NoSpaceError):
            tsck.open(disk / "store", min_free="99%")
        with tsck.open(disk / "store") as store:
            fill_up(disk)
            assert len(list(store.log("job"))) == step - 1


def test_a_full_disk_is_named(disk: Path, tmp_path: Path) -> None:
    """By saves, and by what writes a model file: also if torch hides the error of the write behind one of its own."""
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot({"weights": torch.randn(1 << 23)}, ref="job", step=1)
        for suffix in ("pt", "safetensors"):
            said = run_tsck(tmp_path, "get", "job", f"{disk}/x.{suffix}", store=store.url)
            assert said.code == tsck.NoSpaceError.exit_code
            assert f"the disk at {disk} has" in said.err
        assert not list(disk.iterdir())
    with tsck.open(disk / "store", create=True, min_free=0) as store:
        store.put_snapshot({"weights": torch.ones(3)}, ref="job", step=1)
        fill_up(disk)
        with pytest.raises(tsck.NoSpaceError, match=f"the disk at {disk} has .* of 24.0 MiB free"):
            store.put_snapshot({"weights": torch.ones(4)}, ref="job", step=2)


def test_read_only(disk: Path, tmp_path: Path) -> None:
    with tsck.open(disk / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(make_state(1), ref="job", step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(tsck.PermissionDeniedError, match="read-only"):
            store.put_snapshot(make_state(2), ref="job", step=2)
        assert torch.equal(store.checkout("job")["weights"], make_state(1)["weights"])
    with tsck.open(disk / "store", cache_dir=tmp_path / "cold") as store:
        assert torch.equal(store.checkout("job")["weights"], make_state(1)["weights"])

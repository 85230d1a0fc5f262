"""Whatever copies a pack verifies it first: of a damaged source nothing becomes visible anywhere else (docs/guides/verified-copies.md).

Staged files: tests/session/staging/test_damage.py; copies on other hosts: tests/session/peers/test_exchange.py.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.staging.unsent_file import verify_all
from tensorstore_ck.engine.range_verifier import open_verifier
from tensorstore_ck.errors import DamageError, StoreError
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint

AT_ONCE = tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1.0, compact_below=1.0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def compact(store: tsck.Store, folder: Path) -> None:
    store.forget("half")
    with suppress(StoreError):
        store.gc(AT_ONCE)


def recode(store: tsck.Store, folder: Path) -> None:
    store.recode(codec="small")


def move(store: tsck.Store, folder: Path) -> None:
    store.set_policy("half", move_after=(0.001, str(folder / "cold")))
    store.migrate_tiers()


def copy(store: tsck.Store, folder: Path) -> None:
    with tsck.open(folder / "other", create=True, no_sync=True, cache_dir=folder / "cache-other") as other:
        with suppress(DamageError):
            tsck.copy(folder / "store", folder / "other")
        assert other.fsck(read_data=True).ok


def export(store: tsck.Store, folder: Path) -> None:
    with suppress(DamageError):
        export_snapshot(store, "half", folder / "out.safetensors", format="safetensors")


def nothing(path: Path) -> None:
    """The source is sound."""


def made(folder: Path) -> set[Path]:
    """The packs, and what was exported."""
    return {*folder.rglob("packs/*/*"), *folder.glob("out*")}


def damaged_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        kind = path.parent.parent.name
        if path.is_file() and kind in ("packs", "parts", "snapshots"):
            data = path.read_bytes()

            def read(offset: int, target: memoryview, data: bytes = data) -> None:
                target[:] = data[offset : offset + len(target)]

            try:
                verify_all(open_verifier(f"{kind}/{path.parent.name}/{path.name}", len(data), read), len(data), read)
            except StoreError:
                yield path


@pytest.mark.parametrize("how", [nothing, flip, cut])
@pytest.mark.parametrize("act", [compact, recode, move, copy, export])
def test_a_damaged_pack(tmp_path: Path, act: Callable[[tsck.Store, Path], None], how: Callable[[Path], None]) -> None:
    kept, dropped = torch.zeros(120_000), torch.arange(40_000)
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot({"kept": kept, "dropped": dropped}, ref="half", codec="raw")
        (pack,) = made(tmp_path)
        if act is compact:
            store.put_snapshot({"kept": kept}, ref="run", codec="raw")
        how(pack)
        before = made(tmp_path)
        act(store, tmp_path)
        assert set(damaged_files(tmp_path)) == (set() if how is nothing else {pack})
        errors = (finding.object for finding in store.fsck(read_data=True).findings if finding.severity == "error")
        assert {name.rpartition("/")[2] for name in errors} <= {pack.name}
        if how is nothing:
            assert made(tmp_path) - before, "there is something to copy"
        elif act is export:
            assert made(tmp_path) == before or how is cut, "no snapshot needs the table of a pack"


@pytest.mark.parametrize("how", [flip, cut])
def test_a_damaged_file_that_is_imported(tmp_path: Path, how: Callable[[Path], None]) -> None:
    torch.save({"w": torch.arange(40_000)}, tmp_path / "model.pt")
    how(tmp_path / "model.pt")
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=tmp_path / "cache") as store:
        with pytest.raises(StoreError):
            import_checkpoint(store, tmp_path / "model.pt", ref="imported")
        assert not store.branches()

"""Where a host keeps its cache, and where it refuses to."""

import os
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from tensorstore_ck.common.filesystem_kind import filesystem_of
from tensorstore_ck.log.cache import CacheWarning, MemoryTable, open_cache, open_table
from tensorstore_ck.log.cache.lmdb_table import LmdbHandle


@pytest.fixture(autouse=True)
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def pretend(monkeypatch: pytest.MonkeyPatch, kinds: dict[Path, str]) -> None:
    def kind_of(folder: Path) -> str:
        return next((kind for base, kind in kinds.items() if folder.is_relative_to(base)), "ext4")

    monkeypatch.setattr(open_cache, "filesystem_of", kind_of)


def only_folder(base: Path) -> str:
    (folder,) = base.iterdir()
    return folder.name


def test_it_lies_in_the_users_cache_directory_and_is_private(tmp_path: Path) -> None:
    table = open_table(None, "store-1")
    assert isinstance(table, LmdbHandle)
    base = tmp_path / "home" / "cache" / "tensorstore_ck"
    assert only_folder(base).startswith(f"store-1-{os.getuid()}-")
    for folder in (base, base / only_folder(base)):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert (base / only_folder(base) / "data.mdb").stat().st_mode & 0o077 == 0
    table.close()


def test_a_folder_of_the_callers_choice(tmp_path: Path) -> None:
    table = open_table(tmp_path / "deep" / "chosen", "store-1")
    assert isinstance(table, LmdbHandle)
    assert only_folder(tmp_path / "deep" / "chosen").startswith("store-1-")
    assert not (tmp_path / "home").exists()
    table.close()


def test_two_containers_and_two_boots_never_share(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {open_cache.host_key("store")}
    real = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]" if path == "/proc/self/ns/pid" else real(path))
    names.add(open_cache.host_key("store"))
    monkeypatch.setattr(open_cache, "_boot_id", lambda: "another")
    names.add(open_cache.host_key("store"))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    names.add(open_cache.host_key("store"))
    names.add(open_cache.host_key("other"))
    assert len(names) == 5
    assert not any("/" in name for name in names)


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "fuse", "fuse.sshfs", "fuse.glusterfs", "9p", "virtiofs", "gpfs", "beegfs"]
)
def test_never_on_a_network_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pretend(monkeypatch, {tmp_path / "home": kind})
    table = open_table(None, "store")
    assert isinstance(table, LmdbHandle)
    assert only_folder(tmp_path / "tmp" / f"tensorstore_ck-{os.getuid()}").startswith("store-")
    table.close()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "apfs", ""])
def test_local_filesystems_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pretend(monkeypatch, {tmp_path: kind})
    table = open_table(None, "store")
    assert isinstance(table, LmdbHandle)
    table.close()
    assert not list((tmp_path / "tmp").iterdir())


def test_memory_with_one_warning_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {tmp_path: "nfs4"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = open_table(None, "store")
    assert isinstance(table, MemoryTable)
    (warning,) = caught
    assert warning.category is CacheWarning
    assert "nfs4" in str(warning.message)
    assert "cache_dir" in str(warning.message)


def hostile_link(base: Path) -> None:
    (base.parent / "elsewhere").mkdir()
    base.symlink_to(base.parent / "elsewhere")


def hostile_mode(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)


@pytest.mark.parametrize("attack", [hostile_link, hostile_mode, Path.touch])
@pytest.mark.parametrize("inner", [False, True])
def test_files_of_others_are_not_used(tmp_path: Path, attack: object, inner: bool) -> None:
    base = tmp_path / "tmp" / f"tensorstore_ck-{os.getuid()}"
    if inner:
        base.mkdir(mode=0o700)
        base = base / open_cache.host_key("store")
    assert callable(attack)
    attack(base)
    (tmp_path / "file").touch()
    with pytest.warns(CacheWarning):
        table = open_table(tmp_path / "file" / "impossible", "store")
    assert isinstance(table, MemoryTable)
    assert not (tmp_path / "tmp" / "elsewhere").exists() or not list((tmp_path / "tmp" / "elsewhere").iterdir())


def test_a_folder_in_whose_place_others_can_put_another_is_not_used(tmp_path: Path) -> None:
    """LMDB opens it by its path, after it was checked."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(0o777)
    open_table(scratch / "cache", "store").close()
    assert not list(scratch.iterdir())
    scratch.chmod(0o1777)
    open_table(scratch / "cache", "store").close()
    assert list(scratch.iterdir())


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.warns(CacheWarning, match="not owned by user 12345"):
        open_table(tmp_path / "cache", "store")


def test_caches_that_were_not_used_for_long_are_removed(tmp_path: Path) -> None:
    uid = os.getuid()
    old = time.time() - 40 * 24 * 3600
    for name in (f"store-{uid}-oldboot-1", f"store-{uid}-newboot-1", f"other-{uid}-oldboot-1", f"store-{uid + 1}-oldboot-1"):
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True)
        (folder / "data.mdb").touch()
        if "oldboot" in name:
            os.utime(folder / "data.mdb", (old, old))
    (tmp_path / "cache").chmod(0o700)
    table = open_table(tmp_path / "cache", "store")
    kept = {folder.name for folder in (tmp_path / "cache").iterdir()}
    assert kept == {open_cache.host_key("store"), f"store-{uid}-newboot-1", f"other-{uid}-oldboot-1", f"store-{uid + 1}-oldboot-1"}
    table.close()


def test_the_filesystem_of_a_folder_is_that_of_its_mount() -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(Path("/dev/shm")) == "tmpfs"
    assert filesystem_of(Path("/")) != ""

"""The local backend: what it asks of the kernel, in which order, and which files it takes for its own."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend import durable_folders, local
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_writer import WINDOW_BYTES, DirectWriter
from tensorstore_ck.common import threads
from tensorstore_ck.errors import (
    BackendUnavailableError,
    CorruptObjectError,
    InvalidOptionError,
    InvalidUrlError,
    StoreError,
)
from tests.effort import PATIENCE_SECONDS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "some" / "store"


@pytest.fixture
def backend(root: Path) -> LocalBackend:
    return LocalBackend(str(root))


def names(backend: LocalBackend) -> set[str]:
    return {found.name for found in backend.list("")}


# --- durability -----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """What the backend asks of the kernel, temporaries shown as TMP."""
    seen: list[str] = []
    paths: dict[int, str] = {}

    def show(path: str) -> str:
        shown = os.path.relpath(path, root)
        folder, slash, name = shown.rpartition("/")
        return f"{folder}{slash}TMP" if name.startswith(".tmp-") else shown

    def open_(path: str, *args: Any, real: Callable[..., int] = os.open, **kwargs: Any) -> int:
        fd = real(path, *args, **kwargs)
        paths[fd] = path
        return fd

    def dup(fd: int, real: Callable[[int], int] = os.dup) -> int:
        copy = real(fd)
        paths[copy] = paths[fd]
        return copy

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        seen.append(f"fsync {show(paths[fd])}")
        real(fd)

    def two(verb: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(source: str, target: str, **kwargs: Any) -> None:
            real(source, target, **kwargs)
            seen.append(f"{verb} {show(source)} {show(target)}")

        return call

    def one(verb: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: str, *args: Any, **kwargs: Any) -> None:
            real(path, *args, **kwargs)
            at = kwargs.get("dir_fd")
            seen.append(f"{verb} {show(path if at is None else f'{paths[at]}/{path}')}")

        return call

    def pwritev(fd: int, *args: Any, real: Callable[..., int] = os.pwritev) -> int:
        seen.append(f"write {show(paths[fd])}")
        return real(fd, *args)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "dup", dup)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "link", two("link", os.link))
    monkeypatch.setattr(os, "replace", two("rename", os.replace))
    monkeypatch.setattr(os, "mkdir", one("mkdir", os.mkdir))
    monkeypatch.setattr(os, "unlink", one("unlink", os.unlink))
    monkeypatch.setattr(durable_folders, "for_each", lambda tasks, work, _: [*map(work, tasks)])  # in the order in which they are begun
    return seen


MADE_FOLDERS = ["mkdir ..", "fsync ../..", "mkdir .", "mkdir log", "mkdir log/0"]
SYNCED_FOLDERS = ["fsync log/0", "fsync log", "fsync .", "fsync .."]


def test_create_syncs_file_then_links_then_syncs_folders(backend: LocalBackend, calls: list[str]) -> None:
    backend.create("log/0/1", b"x")
    assert calls == [*MADE_FOLDERS, "write log/0/TMP", "fsync log/0/TMP", "link log/0/TMP log/0/1", *SYNCED_FOLDERS, "unlink log/0/TMP"]
    calls.clear()
    backend.create("log/0/2", b"x")  # the folders above are known to be durable now
    assert calls == ["write log/0/TMP", "fsync log/0/TMP", "link log/0/TMP log/0/2", "fsync log/0", "unlink log/0/TMP"]


def test_put_syncs_file_then_folders(backend: LocalBackend, calls: list[str]) -> None:
    backend.put("log/0/1", b"x")
    assert calls == [*MADE_FOLDERS, "write log/0/1", "fsync log/0/1", *SYNCED_FOLDERS]


@pytest.mark.parametrize("direct", [False, True])
def test_writer_syncs_when_it_closes(backend: LocalBackend, calls: list[str], monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(local, "use_direct", lambda fd: False)
    writer = backend.open_writer("log/0/1")
    writer.append([bytes(WINDOW_BYTES + 1)])
    assert calls == [*MADE_FOLDERS, "write log/0/1"]
    calls.clear()
    writer.close()
    last_window = ["write log/0/1"] if isinstance(writer, DirectWriter) else []
    assert calls == [*last_window, "fsync log/0/1", *SYNCED_FOLDERS]


def test_a_large_write_asks_for_memory_in_huge_pages(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[set[str]] = []

    def pwritev(fd: int, views: list[memoryview], offset: int, real: Callable[..., int] = os.pwritev) -> int:
        flags.append(_mapping_flags(np.frombuffer(views[0], np.uint8).__array_interface__["data"][0]))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    writer = backend.open_writer("a/b")
    if not isinstance(writer, DirectWriter) or not _flags_of_mappings():
        pytest.skip("the folder is not on a disk, or the system does not say how memory is mapped")
    writer.append([bytes(WINDOW_BYTES)])
    writer.close()
    assert all({"hg", "wf"} <= of_one for of_one in flags)
    assert flags


def _flags_of_mappings() -> dict[tuple[int, int], set[str]]:
    """The addresses and the flags of this process's mappings."""
    flags, addresses = dict[tuple[int, int], set[str]](), (0, 0)
    smaps = Path("/proc/self/smaps")
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        first, *rest = line.split()
        if first == "VmFlags:":
            flags[addresses] = set(rest)
        elif "-" in first and not first.endswith(":"):
            begin, _, end = first.partition("-")
            addresses = int(begin, 16), int(end, 16)
    return flags


def _mapping_flags(address: int) -> set[str]:
    return next(flags for (begin, end), flags in _flags_of_mappings().items() if begin <= address < end)


def test_replace_syncs_before_it_renames(backend: LocalBackend, calls: list[str]) -> None:
    backend.replace("log/0/1", b"x")
    assert calls == [*MADE_FOLDERS, "write log/0/TMP", "fsync log/0/TMP", "rename log/0/TMP log/0/1", *SYNCED_FOLDERS]


@pytest.mark.parametrize("write", ["put", "writer"])
def test_all_syncs_of_an_object_on_a_disk_run_at_once(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    monkeypatch.setattr(durable_folders, "is_disk_of_this_host", lambda _: True)
    backend.put("log/1", b"x")
    syncs = threading.Barrier(2)  # the file and its folder

    def fsync(_: int) -> None:
        syncs.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(os, "fsync", fsync)
    open_files = os.listdir("/proc/self/fd")
    if write == "put":
        backend.put("log/2", b"x")
    else:
        backend.open_writer("log/2").close()
    assert names(backend) == {"log/1", "log/2"}
    assert os.listdir("/proc/self/fd") == open_files


def test_syncs_run_one_after_another_while_another_object_is_synced(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_folders, "is_disk_of_this_host", lambda _: True)
    at_once: list[str] = []
    is_syncing, goes_on = threading.Event(), threading.Event()

    def for_each(*args: Any, real: Callable[..., None] = threads.for_each) -> None:
        at_once.append(threading.current_thread().name)
        real(*args)

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/slow"):
            is_syncing.set()
            assert goes_on.wait(PATIENCE_SECONDS)
        real(fd)

    monkeypatch.setattr(durable_folders, "for_each", for_each)
    monkeypatch.setattr(os, "fsync", fsync)
    with ThreadPoolExecutor(1, "other") as executor:
        put = executor.submit(backend.put, "packs/slow", b"x")
        assert is_syncing.wait(PATIENCE_SECONDS)
        backend.put("log/1", b"x")
        goes_on.set()
        put.result(PATIENCE_SECONDS)
    assert at_once == ["other_0"]
    backend.put("log/2", b"x")
    assert at_once == ["other_0", threading.current_thread().name]


def test_a_sync_that_goes_on_after_ctrl_c_syncs_no_other_file(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C does not wait for the threads."""
    synced, goes_on, helpers = list[int](), threading.Event(), list[threading.Thread]()

    def for_each(tasks: list[Callable[[], None]], work: Callable[[Any], None], _: int) -> None:
        def sync() -> None:
            assert goes_on.wait(PATIENCE_SECONDS)
            for task in tasks:
                work(task)

        helpers.append(threading.Thread(target=sync))
        helpers[0].start()
        raise KeyboardInterrupt

    monkeypatch.setattr(durable_folders, "is_disk_of_this_host", lambda _: True)
    monkeypatch.setattr(durable_folders, "for_each", for_each)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    writer = backend.open_writer("log/1")
    inode = os.stat(f"{backend.url}/log/1").st_ino
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    with (tmp_path / "other").open("wb") as other:  # with the number that was closed
        goes_on.set()
        helpers[0].join()
        assert inode in synced
        assert os.fstat(other.fileno()).st_ino not in synced


def test_a_folder_that_does_not_answer_holds_up_no_other_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a store asks which filesystem it is on."""
    hung, other = LocalBackend(str(tmp_path / "hung")), LocalBackend(str(tmp_path / "other"))
    is_asked, answers = threading.Event(), threading.Event()

    def is_disk(status: os.stat_result) -> bool:
        if os.path.samestat(status, os.stat(hung.url)):
            is_asked.set()
            assert answers.wait(PATIENCE_SECONDS)
        return False

    monkeypatch.setattr(durable_folders, "is_disk_of_this_host", is_disk)
    with ThreadPoolExecutor(2) as executor:
        put = executor.submit(hung.put, "x", b"x")
        assert is_asked.wait(PATIENCE_SECONDS)
        try:
            executor.submit(other.put, "x", b"x").result(PATIENCE_SECONDS / 2)
        finally:
            answers.set()
        put.result()


def test_folders_that_another_process_made_are_synced_too(backend: LocalBackend, calls: list[str], root: Path) -> None:
    os.makedirs(root / "log/0")
    calls.clear()
    backend.put("log/0/1", b"x")
    assert calls == ["write log/0/1", "fsync log/0/1", *SYNCED_FOLDERS]


def test_sync_folders_syncs_all_of_them(backend: LocalBackend, calls: list[str]) -> None:
    backend.create("log/0/1", b"x")
    calls.clear()
    backend.sync_folders("log/0/1")
    assert calls == SYNCED_FOLDERS


def test_without_sync_nothing_is_synced(root: Path, calls: list[str]) -> None:
    backend = LocalBackend(str(root), sync=False)
    backend.put("a/b", b"x")
    backend.create("a/c", b"x")
    backend.replace("a/d", b"x")
    backend.open_writer("a/e").close()
    backend.sync_folders("a/c")
    assert [call for call in calls if call.startswith("fsync")] == []
    assert names(backend) == {"a/b", "a/c", "a/d", "a/e"}


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_the_umask_is_honoured(backend: LocalBackend, root: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        backend.put("a/put", b"x")
        backend.create("a/create", b"x")
        backend.replace("a/replace", b"x")
        backend.open_writer("a/writer").close()
    finally:
        os.umask(before)
    for name in names(backend):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o777 & ~mask


def test_links_and_odd_files_are_not_followed(backend: LocalBackend, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    backend.put("a/b", b"x")
    (root / "a/link").symlink_to(secret)
    (root / "a/folder").symlink_to(tmp_path)
    os.mkfifo(root / "a/pipe")
    target = memoryview(bytearray(6))
    for name in ("a/link", "a/pipe", "a/folder"):
        with pytest.raises(StoreError):
            backend.get(name, max_bytes=10)
        with pytest.raises(StoreError):
            backend.read_into(name, 0, target)
        with pytest.raises(StoreError):
            backend.size(name)
    assert bytes(target) == bytes(6)
    assert names(backend) == {"a/b"}
    with pytest.raises(BackendUnavailableError):
        backend.put("a/link", b"overwritten")
    backend.delete(["a/link"])
    assert secret.read_bytes() == b"secret"


def test_left_behind_temporaries_are_listed_apart_and_freed(backend: LocalBackend, root: Path) -> None:
    backend.create("log/0/1", b"x")
    (root / "log/0/.tmp-LEFT").write_bytes(b"torn")
    (root / ".tmp-TOP").write_bytes(b"torn")
    assert names(backend) == {"log/0/1"}
    assert {found.name for found in backend.list_uploads()} == {"log/0/.tmp-LEFT", ".tmp-TOP"}
    assert {found.name for found in backend.list_uploads(["packs"])} == {".tmp-TOP"}
    for found in list(backend.list_uploads()):
        backend.abort_upload(found.name)
        backend.abort_upload(found.name)
    assert list(backend.list_uploads()) == []


@pytest.mark.parametrize("name", ["log/0/1", "../.tmp-X", "/.tmp-X", "log/.tmp-../../x", ".tmp-a/b", ""])
def test_only_temporaries_are_freed_as_such(backend: LocalBackend, name: str) -> None:
    backend.create("log/0/1", b"x")
    with pytest.raises(CorruptObjectError):
        backend.abort_upload(name)
    assert names(backend) == {"log/0/1"}


def test_space_of_a_folder_that_is_not_there_yet(backend: LocalBackend, tmp_path: Path) -> None:
    space = backend.space()
    assert space is not None
    assert 0 < space.free_bytes <= space.total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


@pytest.mark.parametrize("answer", ["zeros", "not supported"])
def test_a_filesystem_that_does_not_say_how_large_it_is_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """As FUSE filesystems without `statfs`."""

    def statvfs(_: object) -> os.statvfs_result:
        if answer == "zeros":
            return os.statvfs_result([4096, 4096, *[0] * 6, 0, 255])
        raise OSError(errno.ENOSYS, "not supported")

    monkeypatch.setattr(os, "statvfs", statvfs)
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot({"step": 1}, ref="run")
        assert store.checkout("run") == {"step": 1}
    with pytest.raises(InvalidOptionError, match="give capacity= in bytes"):
        tsck.open(tmp_path / "store", staging=str(tmp_path / "disk"))


def test_the_root_folder_is_no_store() -> None:
    with pytest.raises(InvalidUrlError):
        LocalBackend("/")


def test_no_descriptor_stays_open(backend: LocalBackend) -> None:
    backend.put("a/b", b"x")
    backend.create("a/c", b"x")
    backend.create("a/c", b"x")
    backend.get("a/b", max_bytes=1)
    backend.open_writer("a/d").close()
    backend.open_writer("a/e").abort()
    backend.sync_folders("a/b")
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(str(backend.url))] == []


def test_a_location_that_takes_no_folders_is_an_error() -> None:
    with pytest.raises(StoreError, match="/proc/store"):
        LocalBackend("/proc/store").put("a", b"x")

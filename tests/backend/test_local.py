"""The local backend: what it asks of the kernel, in which order, and what it makes of the answers."""

import errno
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.backend import Created
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import (
    BackendUnavailableError,
    CorruptObjectError,
    InvalidUrlError,
    MissingObjectError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
    UnsafeBackendError,
)

RACERS = 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "some" / "store"


@pytest.fixture
def backend(root: Path) -> LocalBackend:
    return LocalBackend(str(root))


def names(backend: LocalBackend) -> set[str]:
    return {found.name for found in backend.list("")}


def fails(number: int) -> Callable[..., Any]:
    """A system call that fails."""

    def call(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


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

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        seen.append(f"fsync {show(paths[fd])}")
        real(fd)

    def two(verb: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(source: str, target: str, **kwargs: Any) -> None:
            real(source, target, **kwargs)
            seen.append(f"{verb} {show(source)} {show(target)}")

        return call

    def one(verb: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: str, *args: Any) -> None:
            real(path, *args)
            seen.append(f"{verb} {show(path)}")

        return call

    def pwritev(fd: int, *args: Any, real: Callable[..., int] = os.pwritev) -> int:
        seen.append(f"write {show(paths[fd])}")
        return real(fd, *args)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "link", two("link", os.link))
    monkeypatch.setattr(os, "replace", two("rename", os.replace))
    monkeypatch.setattr(os, "mkdir", one("mkdir", os.mkdir))
    monkeypatch.setattr(os, "unlink", one("unlink", os.unlink))
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


def test_writer_syncs_when_it_closes(backend: LocalBackend, calls: list[str]) -> None:
    writer = backend.open_writer("log/0/1")
    writer.append([b"x"])
    assert calls == [*MADE_FOLDERS, "write log/0/1"]
    calls.clear()
    writer.close()
    assert calls == ["fsync log/0/1", *SYNCED_FOLDERS]


def test_replace_syncs_before_it_renames(backend: LocalBackend, calls: list[str]) -> None:
    backend.replace("log/0/1", b"x")
    assert calls == [*MADE_FOLDERS, "write log/0/TMP", "fsync log/0/TMP", "rename log/0/TMP log/0/1", *SYNCED_FOLDERS]


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


# --- failures -------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[LocalBackend], object]] = {
    "put": lambda backend: backend.put("a/b", b"data"),
    "create": lambda backend: backend.create("a/b", b"data"),
    "replace": lambda backend: backend.replace("a/b", b"data"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_failed_fsync_is_final_for_the_file(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, write: Callable[..., object]) -> None:
    synced: list[int] = []

    def fsync(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            synced.append(fd)
            raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BackendUnavailableError):
        write(backend)
    assert len(synced) == 1
    assert names(backend) == set()
    assert list(backend.list_uploads()) == []


def test_a_failed_fsync_of_a_folder_is_never_forgotten(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.create("log/0", b"x")
    with monkeypatch.context() as patch:

        def fsync(fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(errno.EIO, "I/O error")

        patch.setattr(os, "fsync", fsync)
        assert backend.create("log/1", b"x") is Created.UNKNOWN
    assert backend.get("log/1", max_bytes=10) == b"x"
    with pytest.raises(BackendUnavailableError):  # the kernel would report success now
        backend.sync_folders("log/1")
    with pytest.raises(BackendUnavailableError):
        backend.put("log/2", b"x")


def test_a_filesystem_without_fsync_for_folders_is_accepted(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not for folders")

    monkeypatch.setattr(os, "fsync", fsync)
    assert backend.create("log/1", b"x") is Created.CREATED


ERRORS = {
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: NoSpaceError,
    errno.EFBIG: NoSpaceError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: PermissionDeniedError,
    errno.ELOOP: PermissionDeniedError,
    errno.ENOENT: MissingObjectError,
    errno.ENOTDIR: MissingObjectError,
    errno.EMFILE: BackendUnavailableError,
    errno.ENFILE: BackendUnavailableError,
    errno.ENOMEM: BackendUnavailableError,
    errno.EIO: BackendUnavailableError,
    errno.ESTALE: BackendUnavailableError,
    errno.ETIMEDOUT: BackendUnavailableError,
    errno.EBADF: BackendUnavailableError,
}


@pytest.mark.parametrize(("number", "expected"), ERRORS.items(), ids=[errno.errorcode[number] for number in ERRORS])
def test_errors_are_ours_and_name_the_object(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[StoreError]
) -> None:
    backend.put("a/b", b"x")
    monkeypatch.setattr(os, "preadv", fails(number))
    with pytest.raises(expected, match="a/b") as caught:
        backend.get("a/b", max_bytes=10)
    assert caught.value.object_id == "a/b"
    with pytest.raises(expected):
        backend.read_into("a/b", 0, memoryview(bytearray(1)))


def test_short_writes_and_reads_are_continued(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        return os.pwrite(fd, views[0][:3], offset)

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        data = os.pread(fd, min(3, len(views[0])), offset)
        views[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "preadv", preadv)
    backend.put("a/b", b"0123456789")
    writer = backend.open_writer("a/c")
    writer.append([b"0123", b"", b"456", b"7", b"89"])
    writer.close()
    for name in ("a/b", "a/c"):
        assert backend.get(name, max_bytes=10) == b"0123456789"
        target = bytearray(8)
        backend.read_into(name, 1, memoryview(target))
        assert target == b"12345678"


def test_more_buffers_than_one_call_takes(backend: LocalBackend) -> None:
    writer = backend.open_writer("a/b")
    writer.append([bytes([number % 256]) for number in range(3000)])
    writer.close()
    assert backend.get("a/b", max_bytes=3000) == bytes(number % 256 for number in range(3000))


def test_a_writer_with_a_hole_never_closes(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = backend.open_writer("a/b")
    writer.append([b"good"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails(errno.ENOSPC))
        with pytest.raises(NoSpaceError):
            writer.append([b"lost"])
    writer.append([b"good"])
    with pytest.raises(BackendUnavailableError):
        writer.close()
    assert names(backend) == set()
    with pytest.raises(BackendUnavailableError):
        writer.append([b"late"])


def test_a_name_that_was_used_is_not_written_over(backend: LocalBackend) -> None:
    backend.put("a/b", b"first")
    with pytest.raises(BackendUnavailableError):
        backend.put("a/b", b"second")
    with pytest.raises(BackendUnavailableError):
        backend.open_writer("a/b")
    assert backend.get("a/b", max_bytes=10) == b"first"


CALLS = ("open", "pwritev", "fsync", "close", "mkdir", "link", "replace", "unlink")


class FailingCalls:
    """Makes the k-th system call fail, and the later ones too if `persistent`."""

    def __init__(self, patch: pytest.MonkeyPatch, k: int, persistent: bool, number: int) -> None:
        self.count = 0
        for name in CALLS:
            patch.setattr(os, name, self._failing(name, getattr(os, name), k, persistent, number))

    def _failing(self, name: str, real: Callable[..., Any], k: int, persistent: bool, number: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == k or (persistent and self.count > k):
                if name == "close":
                    real(*args)  # Linux closes, whatever it reports
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", WRITES)
def test_every_system_call_may_fail(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, persistent: bool, number: int) -> None:
    """For each k: what is told agrees with what is there."""
    for k in range(1, 100):
        backend = LocalBackend(str(root / str(k)))
        error, outcome = None, None
        with monkeypatch.context() as patch:
            failing = FailingCalls(patch, k, persistent, number)
            try:
                outcome = WRITES[kind](backend)
            except StoreError as exc:
                error = exc
        there = backend.get("a/b", max_bytes=10) if names(backend) else None
        if error is None and outcome in (None, Created.CREATED):
            assert there == b"data"
        elif kind == "create":
            assert there == (b"data" if outcome is Created.UNKNOWN else None)
        elif kind == "replace":
            assert there in (None, b"data")
        if failing.count < k:
            assert error is None
            return
    pytest.fail("never ran to its end")


# --- create ---------------------------------------------------------------------------------------------------------


def _create_many(root: str, number: int, barrier: Any, results: Any) -> None:
    backend = LocalBackend(root)
    for name in range(20):
        barrier.wait()
        results.put((name, number, backend.create(f"log/{name}", b"%d" % number).value))


def test_of_racing_processes_one_wins(backend: LocalBackend, root: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    barrier, results = spawn.Barrier(RACERS), spawn.Queue()
    racers = [spawn.Process(target=_create_many, args=(str(root), number, barrier, results)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    outcomes = [results.get() for _ in range(RACERS * 20)]
    for racer in racers:
        racer.join()
    for name in range(20):
        winners = [number for at, number, outcome in outcomes if at == name and outcome == "created"]
        assert len(winners) == 1
        assert backend.get(f"log/{name}", max_bytes=10) == b"%d" % winners[0]
    assert list(backend.list_uploads()) == []


def link_then_fail(number: int) -> Callable[..., None]:
    def call(source: str, target: str, real: Callable[..., None] = os.link, **kwargs: Any) -> None:
        real(source, target, **kwargs)
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("number", "outcome"), [(errno.EEXIST, Created.EXISTS), (errno.EIO, Created.UNKNOWN), (errno.ETIMEDOUT, Created.UNKNOWN)]
)
def test_a_link_whose_reply_was_lost_is_no_failure(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Created
) -> None:
    monkeypatch.setattr(os, "link", link_then_fail(number))
    assert backend.create("log/1", b"mine") is outcome
    assert backend.get("log/1", max_bytes=10) == b"mine"
    assert list(backend.list_uploads()) == []


def test_a_deleted_temporary_is_written_again(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    left = 3

    def link(source: str, target: str, real: Callable[..., None] = os.link, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            os.unlink(source)
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "link", link)
    assert backend.create("log/1", b"mine") is Created.CREATED
    left = 1000
    with pytest.raises(BackendUnavailableError):
        backend.create("log/2", b"mine")
    assert names(backend) == {"log/1"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_filesystem_without_hard_links_is_refused(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "link", fails(number))
    with pytest.raises(UnsafeBackendError, match="hard links"):
        backend.create("log/1", b"x")
    assert list(backend.list_uploads()) == []


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


def test_free_bytes_of_a_folder_that_is_not_there_yet(backend: LocalBackend, tmp_path: Path) -> None:
    free = backend.free_bytes()
    assert free is not None
    assert 0 < free <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_the_root_folder_is_no_store() -> None:
    with pytest.raises(InvalidUrlError):
        LocalBackend("/")


def test_no_descriptor_stays_open(backend: LocalBackend) -> None:
    before = len(os.listdir("/proc/self/fd"))
    backend.put("a/b", b"x")
    backend.create("a/c", b"x")
    backend.create("a/c", b"x")
    backend.get("a/b", max_bytes=1)
    backend.open_writer("a/d").close()
    backend.open_writer("a/e").abort()
    backend.sync_folders("a/b")
    assert len(os.listdir("/proc/self/fd")) == before

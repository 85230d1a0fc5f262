"""The local backend when system calls fail, fall short or answer twice."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.backend import Created, local_io
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_io import copy_range
from tensorstore_ck.backend.local_writer import WINDOW_BYTES
from tensorstore_ck.errors import (
    BackendUnavailableError,
    CorruptObjectError,
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


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_io, "PAUSES_SECONDS", (0.0, 0.0, 0.0))


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


# --- failures -------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[LocalBackend], object]] = {
    "put": lambda backend: backend.put("a/b", b"data"),
    "create": lambda backend: backend.create("a/b", b"data"),
    "replace": lambda backend: backend.replace("a/b", b"data"),
}


def write_in_pieces(backend: LocalBackend) -> None:
    writer = backend.open_writer("a/b")
    try:
        writer.append([b"data"])
        writer.close()
    except BaseException:
        writer.abort()
        raise


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


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_filesystem_without_fsync_for_folders_is_accepted(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, "not for folders")

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
    for call in ("pread", "preadv"):
        monkeypatch.setattr(os, call, fails(number))
    with pytest.raises(expected, match="a/b") as caught:
        backend.get("a/b", max_bytes=10)
    assert caught.value.object_id == "a/b"
    with pytest.raises(expected):
        backend.read_into("a/b", 0, memoryview(bytearray(1)))
    with contextlib.nullcontext() if expected is MissingObjectError else pytest.raises(expected, match="a/b"):
        assert backend.get_if_there("a/b", max_bytes=10) is None


READS: dict[str, tuple[tuple[str, ...], Callable[[LocalBackend], object]]] = {
    "get": (("open", "pread"), lambda backend: backend.get("a/b", max_bytes=10)),
    "get if there": (("open", "pread"), lambda backend: backend.get_if_there("a/b", max_bytes=10)),
    "range": (("open", "preadv"), lambda backend: backend.read_into("a/b", 1, memoryview(bytearray(3)))),
    "size": (("stat",), lambda backend: backend.size("a/b")),
    "list": (("scandir",), lambda backend: list(backend.list(""))),
}


@pytest.mark.parametrize(
    "fault", [("nfs4", errno.ESTALE, True), ("nfs4", errno.EIO, True), ("nfs4", errno.EACCES, False), ("ext4", errno.EIO, False)]
)
@pytest.mark.parametrize("kind", READS)
def test_a_read_is_tried_again_where_a_network_folder_lost_its_handle(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, kind: str, fault: tuple[str, int, bool]
) -> None:
    filesystem, number, passes = fault
    calls, read = READS[kind]
    monkeypatch.setattr(local_io, "filesystem_of", lambda _: filesystem)
    backend.put("a/b", b"data")
    for call in calls:
        left, works = [number] * 2, getattr(os, call)

        def fails_twice(*args: Any, left: list[int] = left, works: Callable[..., Any] = works, **options: Any) -> Any:
            if left:
                raise OSError(left.pop(), "injected")
            return works(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, fails_twice)
            with nullcontext() if passes else pytest.raises(StoreError):
                read(backend)
            assert len(left) == (0 if passes else 1)


@pytest.mark.parametrize(("filesystem", "passes"), [("fuse.glusterfs", True), ("ext4", False)])
def test_a_network_folder_that_knows_an_old_size(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, filesystem: str, passes: bool
) -> None:
    """This host listed the file while another one wrote it."""
    backend.put("a/b", b"data")
    old, read = [2, 3], os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        end = old[-1] if old else 4
        if offset >= end:
            old.pop()
            return 0
        return read(fd, [buffers[0][: end - offset]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(local_io, "filesystem_of", lambda _: filesystem)
    target = bytearray(4)
    with nullcontext() if passes else pytest.raises(CorruptObjectError, match="ends at"):
        backend.read_into("a/b", 0, memoryview(target))
    assert (bytes(target) == b"data") is passes


def test_short_writes_and_reads_are_continued(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        return os.pwrite(fd, views[0][:3], offset)

    read = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        return read(fd, min(3, size), offset)

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        data = pread(fd, len(views[0]), offset)
        views[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "pread", pread)
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


def test_short_copies_of_a_range_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda source, target, size, **offsets: copy(source, target, min(size, 7), **offsets))
    (tmp_path / "from").write_bytes(bytes(range(200)))
    with (tmp_path / "to").open("wb") as file:
        assert copy_range(str(tmp_path / "from"), 50, file.fileno(), 3, size=100) == 100
        assert copy_range(str(tmp_path / "from"), 190, file.fileno(), 103, size=100) == 10  # its end
        assert copy_range(str(tmp_path / "missing"), 0, file.fileno(), 0, size=100) == 0
    assert (tmp_path / "to").read_bytes() == bytes([0, 0, 0, *range(50, 150), *range(190, 200)])


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
            writer.append([bytes(WINDOW_BYTES)])
    writer.append([b"good"])
    with pytest.raises(BackendUnavailableError):
        writer.close()
    assert names(backend) == set()
    with pytest.raises(BackendUnavailableError):
        writer.append([b"late"])


def test_a_device_with_wishes_of_its_own_is_written_through_the_page_cache(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(fd: int, views: list[memoryview], offset: int, real: Callable[..., int] = os.pwritev) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "unaligned")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    data = os.urandom(2 * WINDOW_BYTES + 5)
    writer = backend.open_writer("a/b")
    writer.append([data])
    writer.close()
    assert backend.get("a/b", max_bytes=len(data)) == data


def test_a_new_file_whose_disk_does_not_answer(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.backend.local.use_direct", fails(errno.EIO))
    with pytest.raises(BackendUnavailableError, match="a/b"):
        backend.open_writer("a/b")
    assert names(backend) == set()


def test_a_name_that_was_used_is_not_written_over(backend: LocalBackend) -> None:
    backend.put("a/b", b"first")
    with pytest.raises(BackendUnavailableError):
        backend.put("a/b", b"second")
    with pytest.raises(BackendUnavailableError):
        backend.open_writer("a/b")
    assert backend.get("a/b", max_bytes=10) == b"first"


CALLS = ("open", "fstat", "pwritev", "fsync", "close", "mkdir", "link", "replace", "unlink")


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


@pytest.mark.race
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [*WRITES, "writer"])
def test_every_system_call_may_fail(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, persistent: bool, number: int) -> None:
    """For each k: what the call reports agrees with what is stored."""
    for k in range(1, 100):
        backend = LocalBackend(str(root / str(k)))
        error, outcome = None, None
        with monkeypatch.context() as patch:
            failing = FailingCalls(patch, k, persistent, number)
            try:
                outcome = {**WRITES, "writer": write_in_pieces}[kind](backend)
            except StoreError as exc:
                error = exc
        there = backend.get("a/b", max_bytes=10) if names(backend) else None
        if error is None and outcome in (None, Created.CREATED):
            assert there == b"data"
        elif kind == "create":
            assert there is None or outcome is Created.UNKNOWN
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


@pytest.mark.race
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


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EMLINK, 524])
def test_a_filesystem_without_hard_links_is_refused(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "link", fails(number))
    with pytest.raises(UnsafeBackendError, match="hard links"):
        backend.create("log/1", b"x")
    assert list(backend.list_uploads()) == []


def test_a_whole_object_whose_file_cannot_be_closed_has_no_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where `close` reports that the server is full."""
    backend = LocalBackend(str(root))
    writer = backend.open_whole_writer("packs/x")
    writer.append([b"bytes"])
    close = os.close

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        with pytest.raises(NoSpaceError):
            writer.close()
    writer.abort()
    assert [*backend.list(""), *backend.list_uploads()] == []

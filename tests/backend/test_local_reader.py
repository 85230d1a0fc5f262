"""Which reads of local files pass the page cache, and what they leave in it."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_reader import DIRECT_FROM_BYTES, PAGE_BYTES, WINDOW_BYTES, pages_in_cache
from tensorstore_ck.errors import CorruptObjectError

SIZE_BYTES = WINDOW_BYTES + 3 * DIRECT_FROM_BYTES + 123
MIDDLE = (PAGE_BYTES + 17, 2 * DIRECT_FROM_BYTES)
"""A range that neither begins nor ends with a page."""


class ColdFile:
    """A file of a store, of which nothing is in the page cache."""

    def __init__(self, folder: Path) -> None:
        self.data = np.random.default_rng(1).bytes(SIZE_BYTES)
        self.root = str(folder / "store")
        LocalBackend(self.root).put("pack", self.data)
        self._fd = os.open(f"{self.root}/pack", os.O_RDONLY)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.major(os.fstat(self._fd).st_dev) == 0 or self.cached() != 0:
            os.close(self._fd)
            pytest.skip(f"{folder} is not on a disk, or this system does not say what the page cache has: set TMPDIR")

    def cached(self) -> int:
        """Pages of it in the page cache."""
        return pages_in_cache(self._fd, 0, SIZE_BYTES)

    def read(self, backend: LocalBackend, offset: int, size: int) -> None:
        """Reads a range and compares it."""
        target = bytearray(size)
        backend.read_into("pack", offset, memoryview(target))
        assert target == self.data[offset : offset + size]

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    file = ColdFile(tmp_path)
    yield file
    file.close()


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def before_direct_reads(monkeypatch: pytest.MonkeyPatch, do: Callable[[int, int, int], object]) -> None:
    """Calls `do` with descriptor, offset and size before each read past the page cache."""

    def preadv(fd: int, views: list[memoryview], offset: int, real: Callable[..., int] = os.preadv) -> int:
        if is_direct(fd):
            do(fd, offset, len(views[0]))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE_BYTES), MIDDLE, (SIZE_BYTES - DIRECT_FROM_BYTES - 1, DIRECT_FROM_BYTES + 1)])
def test_the_first_reader_of_a_range_leaves_one_page_of_it_and_the_second_all(file: ColdFile, offset: int, size: int) -> None:
    file.read(LocalBackend(file.root), offset, size)
    assert file.cached() == 1
    file.read(LocalBackend(file.root), offset, size)
    assert file.cached() >= size // PAGE_BYTES


def test_a_small_read_goes_through_the_page_cache(file: ColdFile, monkeypatch: pytest.MonkeyPatch) -> None:
    before_direct_reads(monkeypatch, lambda *_: pytest.fail("a direct read"))
    file.read(LocalBackend(file.root), 0, DIRECT_FROM_BYTES - 1)


def test_who_reads_at_the_same_time_as_others_reads_through_the_page_cache_from_then_on(
    file: ColdFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: list[int] = []

    def other_reads(fd: int, offset: int, size: int) -> None:
        direct.append(offset)
        with open(f"/proc/self/fd/{fd}", "rb") as other:
            os.pread(other.fileno(), size, offset)

    before_direct_reads(monkeypatch, other_reads)
    backend = LocalBackend(file.root)
    file.read(backend, 0, DIRECT_FROM_BYTES)
    file.read(backend, WINDOW_BYTES + 2 * DIRECT_FROM_BYTES, DIRECT_FROM_BYTES)
    assert direct == [0]


def test_a_disk_that_refuses_direct_reads_is_read_through_the_page_cache(file: ColdFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "another alignment")

    before_direct_reads(monkeypatch, refuse)
    file.read(LocalBackend(file.root), *MIDDLE)
    assert file.cached() > 1


def test_a_file_that_ends_too_early_is_reported(file: ColdFile) -> None:
    with pytest.raises(CorruptObjectError, match=f"pack ends at {SIZE_BYTES}, before byte {SIZE_BYTES + 1}"):
        LocalBackend(file.root).read_into("pack", PAGE_BYTES, memoryview(bytearray(SIZE_BYTES + 1 - PAGE_BYTES)))

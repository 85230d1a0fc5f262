"""A file that is written in any order, by several threads, and then read back.

Records the hash of every write. `read_back` reads the file from the file system and compares; `finish` also checks that every byte was
written exactly once. Knows no formats, tensors or stores.
"""

import mmap
import os
import threading
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from blake3 import blake3

from tensorstore_ck.backend.local_io import read_at, start_write_back, write_at
from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.errors import CorruptObjectError

PIECE_BYTES: Final = 8 << 20
"""The largest piece of one write or read."""


class _Piece(NamedTuple):
    offset: int
    size: int
    digest: bytes


class OutputFile:
    """A new file. A context manager; `write` is thread-safe."""

    def __init__(self, path: str, shown: str) -> None:
        """`shown`: its name in messages, since `path` is temporary."""
        self.path = path
        self._shown = shown
        self._folder = os.path.dirname(path) or "."
        with os_errors("write", shown, self._folder):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._pieces: list[_Piece] = []
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Writes `data` at `offset`, where nothing may have been written before."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            digest = blake3(piece).digest()
            # The kernel lets one thread at a time write to a file; the others would spin, for a third of the system time.
            with self._writing, os_errors("write", self._shown, self._folder):
                self._pieces.append(_Piece(offset + start, len(piece), digest))
                write_at(self._fd, [piece], offset + start)
            start_write_back(self._fd, offset + start, len(piece))

    def unlink(self) -> None:
        """Removes its name; the file is deleted when it is closed."""
        with os_errors("write", self._shown, self._folder):
            os.unlink(self.path)

    def mapped(self) -> mmap.mmap:
        """Maps the file; changes stay private."""
        with os_errors("read back", self._shown):
            return mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)

    def read_back(self, regions: Sequence[range]) -> list[int]:
        """Compares these regions of whole writes with the hashes of the writes; returns their CRC-32s.

        Raises:
            CorruptObjectError: the file differs, or a region was not completely written.
        """
        self._pieces.sort()
        checksums = [0] * len(regions)

        def check(number: int) -> None:
            checksums[number] = self._compare(regions[number], checksum=True)

        for_each(range(len(regions)), check, min(cpu_threads(), len(regions)))
        return checksums

    def finish(self, size: int, checked: Sequence[range] = ()) -> None:
        """Makes the file durable, and meanwhile reads back everything outside of the regions `checked`.

        Raises:
            CorruptObjectError: see `read_back`; or the file does not have `size` bytes.
        """
        self._pieces.sort()
        bounds = sorted((region.start, region.stop) for region in checked if region)
        gaps, at = [], 0
        for start, stop in [*bounds, (size, size)]:
            gaps.append(range(at, start))
            at = stop
        tasks = [piece for gap in gaps for piece in _cut(gap, self._pieces)]

        def work(region: range | None) -> None:
            if region is None:
                with os_errors("write", self._shown, self._folder):
                    os.fsync(self._fd)
            else:
                self._compare(region)

        for_each([None, *tasks], work, min(cpu_threads() + 1, len(tasks) + 1))
        if os.fstat(self._fd).st_size != size:
            self._refuse(f"has {os.fstat(self._fd).st_size} bytes instead of {size}")

    def _compare(self, region: range, *, checksum: bool = False) -> int:
        """Compares a region; returns its CRC-32 if requested."""
        buffer = bytearray(min(PIECE_BYTES, len(region)))
        crc, at = 0, region.start
        for number in range(bisect_left(self._pieces, (region.start,)), len(self._pieces)):
            piece = self._pieces[number]
            if piece.offset >= region.stop:
                break
            view = memoryview(buffer)[: piece.size]
            if piece.offset != at or len(view) != piece.size:
                self._refuse(f"was not written correctly at byte {at}")
            with os_errors("read back", self._shown):
                count = read_at(self._fd, view, at)
            if count != piece.size or blake3(view).digest() != piece.digest:
                self._refuse(f"does not hold at bytes {at} to {at + piece.size} what was written there")
            if checksum:
                crc = zlib.crc32(view, crc)
            at += piece.size
        if at < region.stop:
            self._refuse(f"was not written from byte {at} on")
        return crc

    def _refuse(self, what: str) -> None:
        raise CorruptObjectError(
            f"{self._shown} {what}: the export was aborted; check the disk and the system's log, then try again", object_id=self._shown
        )


def _cut(gap: range, pieces: Sequence[_Piece]) -> list[range]:
    """Regions of about `PIECE_BYTES`, cut between writes."""
    cuts, start = [], gap.start
    for number in range(bisect_left(pieces, (gap.start,)), bisect_left(pieces, (gap.stop,))):
        stop = pieces[number].offset + pieces[number].size
        if stop - start >= PIECE_BYTES:
            cuts.append(range(start, stop))
            start = stop
    return [*cuts, range(start, gap.stop)] if start < gap.stop else cuts


def write_file(path: str, shown: str, data: bytes) -> None:
    """Writes a small file at once, and reads it back."""
    with OutputFile(path, shown) as file:
        file.write(0, data)
        file.finish(len(data))

"""A file that is written in any order, by several threads, and then read back.

Records the hash of every write, or compares what the page cache holds with what the writer expects, at once. `read_back` reads the rest of
the file from the file system and compares; `finish` also checks that every byte was written. Knows no formats, tensors or stores.
"""

import mmap
import os
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Self

from blake3 import blake3

from tensorstore_ck.backend.local_io import copy_range, read_ahead, read_at, start_write_back, write_at
from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.integrations.crc32 import combined

PIECE_BYTES: Final = 1 << 20
"""The largest piece of one write or read: it stays in a core's cache while it is hashed and summed."""
REGION_BYTES: Final = 8 << 20
"""What a thread compares at a time."""


class Piece(NamedTuple):
    """Bytes of the file, and what they must be."""

    offset: int
    size: int
    digest: bytes
    """Their BLAKE3 hash."""
    read_again: Callable[[], memoryview] | None = None
    """Returns the verified bytes, or raises an error if their source is damaged; None: they were hashed before they were written."""


class OutputFile:
    """A new file. A context manager; `write` is thread-safe. What reads back raises `CorruptObjectError` if the file differs."""

    def __init__(self, path: str, shown: str, *, is_summed: bool = False) -> None:
        """`shown`: its name in messages, since `path` is temporary. `is_summed`: `read_back` returns CRC-32s; otherwise zeros."""
        self.path = path
        self._is_summed = is_summed
        self._shown = shown
        self._folder = os.path.dirname(path) or "."
        with os_errors("write", shown, self._folder):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._pieces: dict[int, Piece] = {}
        self._compared: dict[int, int] = {}
        """The offset of a piece that was read back -> its CRC-32."""
        self._is_rewritten = False
        """Whether something was written that a fsync at the same time may have missed."""
        self._writing = threading.Lock()
        self._buffers = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Writes `data` at `offset`, where nothing may have been written before."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            data = view[start : start + PIECE_BYTES]
            piece = Piece(offset + start, len(data), blake3(data).digest())
            self.write_unhashed(piece.offset, data)
            self.expect(piece)

    def write_unhashed(self, offset: int, data: memoryview) -> None:
        """Writes a part of what `compare` will be called with."""
        # The kernel lets one thread at a time write to a file; the others would spin, for a third of the system time.
        with self._writing, os_errors("write", self._shown, self._folder):
            write_at(self._fd, [data], offset)

    def copy_unhashed(self, path: str, start: int, offset: int, size: int) -> int:
        """Copies bytes of the file `path` from `start` on, as `write_unhashed` writes; returns how many: see `copy_range`."""
        read_ahead(path, start, size=size)  # of several threads at once: a disk or a network answers many requests as fast as one
        with self._writing:
            return copy_range(path, start, self._fd, offset, size=size)

    def expect(self, piece: Piece) -> None:
        """Says what a piece that was written must be; the same piece may be written again."""
        if self._pieces.setdefault(piece.offset, piece)[:3] != piece[:3]:
            self._refuse(f"was written twice at byte {piece.offset}")
        start_write_back(self._fd, piece.offset, piece.size)

    def compare(self, piece: Piece) -> None:
        """As `expect`, and reads the piece back while most of it is in the core's cache."""
        self.expect(piece)
        self._compared[piece.offset] = self._check(piece, is_summed=self._is_summed)

    def unlink(self) -> None:
        """Removes its name; the file is deleted when it is closed."""
        with os_errors("write", self._shown, self._folder):
            os.unlink(self.path)

    def mapped(self) -> mmap.mmap:
        """Maps the file; changes stay private."""
        with os_errors("read back", self._shown):
            return mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)

    def read_back(self, regions: Sequence[range]) -> list[int]:
        """Compares what was not compared yet of these regions of whole writes with the hashes of the writes; returns their CRC-32s."""
        pieces = self._sorted_pieces()
        checksums = [0] * len(regions)

        def check(number: int) -> None:
            checksums[number] = self._compare(regions[number], pieces, is_summed=self._is_summed)

        for_each(range(len(regions)), check, min(cpu_threads(), len(regions)))
        return checksums

    def finish(self, size: int, checked: Sequence[range] = ()) -> None:
        """Makes the file, of `size` bytes, durable, and meanwhile reads back everything outside of the regions `checked`."""
        pieces = self._sorted_pieces()
        bounds = sorted((region.start, region.stop) for region in checked if region)
        gaps, at = [], 0
        for start, stop in [*bounds, (size, size)]:
            gaps.append(range(at, start))
            at = stop
        tasks = [piece for gap in gaps for piece in _cut(gap, pieces)]

        def work(region: range | None) -> None:
            if region is None:
                with os_errors("write", self._shown, self._folder):
                    os.fsync(self._fd)
            else:
                self._compare(region, pieces)

        for_each([None, *tasks], work, min(cpu_threads() + 1, len(tasks) + 1))
        if self._is_rewritten:
            work(None)
        if os.fstat(self._fd).st_size != size:
            self._refuse(f"has {os.fstat(self._fd).st_size} bytes instead of {size}")

    def _sorted_pieces(self) -> list[Piece]:
        return [self._pieces[offset] for offset in sorted(self._pieces)]

    def _compare(self, region: range, pieces: Sequence[Piece], *, is_summed: bool = False) -> int:
        """Compares a region; returns its CRC-32 if requested."""
        crc, at = 0, region.start
        for number in range(bisect_left(pieces, region.start, key=attrgetter("offset")), len(pieces)):
            piece = pieces[number]
            if piece.offset >= region.stop:
                break
            if piece.offset != at or at + piece.size > region.stop:
                self._refuse(f"was not written correctly at byte {at}")
            summed = self._compared.get(piece.offset)
            if summed is None:
                summed = self._check(piece, is_summed=is_summed)
            crc = combined(crc, summed, piece.size) if is_summed else 0
            at += piece.size
        if at < region.stop:
            self._refuse(f"was not written from byte {at} on")
        return crc

    def _check(self, piece: Piece, *, is_summed: bool) -> int:
        """Compares a piece; returns its CRC-32 if requested."""
        digest, crc = self._read(piece, is_summed=is_summed)
        if digest != piece.digest and piece.read_again is not None:  # perhaps bytes came wrong although the stored ones are right
            self.write_unhashed(piece.offset, piece.read_again())
            self._is_rewritten = True
            digest, crc = self._read(piece, is_summed=is_summed)
        if digest != piece.digest:
            self._refuse(f"does not hold at bytes {piece.offset} to {piece.offset + piece.size} what was written there")
        return crc

    def _read(self, piece: Piece, *, is_summed: bool) -> tuple[bytes, int]:
        """The hash of what the file holds, and its CRC-32 if requested."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = memoryview(bytearray(PIECE_BYTES))
        hasher, crc = blake3(), 0
        for at in range(0, piece.size, PIECE_BYTES):
            view = self._buffers.memory[: min(PIECE_BYTES, piece.size - at)]
            with os_errors("read back", self._shown):
                count = read_at(self._fd, view, piece.offset + at)
            hasher.update(view[:count])
            if is_summed:
                crc = zlib.crc32(view[:count], crc)
        return hasher.digest(), crc

    def _refuse(self, what: str) -> None:
        raise CorruptObjectError(
            f"{self._shown} {what}: the export was aborted; check the disk and the system's log, then try again", object_id=self._shown
        )


def _cut(gap: range, pieces: Sequence[Piece]) -> list[range]:
    """Regions of about `REGION_BYTES`, cut between pieces."""
    cuts, start = [], gap.start
    for number in range(bisect_left(pieces, gap.start, key=attrgetter("offset")), bisect_left(pieces, gap.stop, key=attrgetter("offset"))):
        stop = pieces[number].offset + pieces[number].size
        if stop - start >= REGION_BYTES:
            cuts.append(range(start, stop))
            start = stop
    return [*cuts, range(start, gap.stop)] if start < gap.stop else cuts


def write_file(path: str, shown: str, data: bytes) -> None:
    """Writes a small file at once, and reads it back."""
    with OutputFile(path, shown) as file:
        file.write(0, data)
        file.finish(len(data))

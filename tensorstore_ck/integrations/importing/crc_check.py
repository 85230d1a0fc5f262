"""Checks CRC-32s of mapped files while a save reads them, so nothing is read twice.

A save reads each region of a tensor once, in blocks, in any order, from several threads; the sums of the blocks are combined. Bytes that
are not exactly one region (a storage that is only partly a tensor) are read beforehand. A wrong sum fails the read, and so the save.
"""

import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, ListedSources
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.integrations.crc32 import combined
from tensorstore_ck.state.byte_sources import address_of, memory_at

_PIECE_BYTES: Final = 4 << 20


class ExpectedCrc(NamedTuple):
    """Bytes in memory, and their expected sum."""

    address: int
    size: int
    checksum: int
    path: str
    start: int

    def compare(self, checksum: int) -> None:
        """Raises CorruptObjectError if the sum differs."""
        if checksum != self.checksum:
            raise CorruptObjectError(
                f"{self.path} is damaged: the {self.size} bytes from byte {self.start} do not match their checksum; get or save it again",
                object_id=self.path,
            )


def with_crc_check(captured: CapturedState, expected: Sequence[ExpectedCrc]) -> CapturedState:
    """`captured`, with sources that check sums as they read, or raise `CorruptObjectError`; checks now what no save will read in whole."""
    regions = set(_regions(captured))
    for_each((span for span in expected if (span.address, span.size) not in regions), _read, cpu_threads())
    sums = _Sums([span for span in expected if (span.address, span.size) in regions])
    return captured._replace(sources=ListedSources(_CheckedSource(source, sums) for source in captured.sources))


def _regions(captured: CapturedState) -> Iterator[tuple[int, int]]:
    """Address and size of each region that a save will read."""
    boxes_of = {regions.tensor: regions.boxes for regions in captured.explicit}
    for number, (spec, source) in enumerate(zip(captured.layout.tensors, captured.sources, strict=True)):
        sizes = [prod(box.sizes) * spec.item_bytes for box in boxes_of[number]] if number in boxes_of else [spec.size_bytes]
        start = 0
        for size in sizes:
            if size:
                yield _address(source.read(start, start + 1)), size
            start += size


def _read(expected: ExpectedCrc) -> None:
    checksum = 0
    for at in range(0, expected.size, _PIECE_BYTES):
        checksum = zlib.crc32(memory_at(expected.address + at, min(_PIECE_BYTES, expected.size - at)), checksum)
    expected.compare(checksum)


class _CheckedSource:
    """`ByteSource` that sums what it reads."""

    def __init__(self, source: ByteSource, sums: "_Sums") -> None:
        self._source, self._sums = source, sums
        self.size_bytes = source.size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        view = self._source.read(start, stop)
        self._sums.add(view)
        return view


class _Sums:
    def __init__(self, expected: Sequence[ExpectedCrc]) -> None:
        self._expected = sorted(set(expected))
        self._starts = [span.address for span in self._expected]
        self._lock = threading.Lock()
        self._found: list[dict[int, tuple[int, int]]] = [{} for _ in self._expected]
        """Address -> size and sum of the bytes that were read."""
        self._left = [span.size for span in self._expected]

    def add(self, view: memoryview) -> None:
        """Takes bytes that were read; ignores those without an expected sum."""
        address = _address(view) if len(view) else 0
        number = bisect_right(self._starts, address) - 1
        if number < 0 or address + len(view) > self._starts[number] + self._expected[number].size or not self._left[number]:
            return
        checksum = zlib.crc32(view)
        with self._lock:
            if address in self._found[number]:
                return  # read again by a retried save
            self._found[number][address] = len(view), checksum
            self._left[number] -= len(view)
            is_whole = not self._left[number]
        if is_whole:
            total = 0
            for _, (size, checksum) in sorted(self._found[number].items()):
                total = combined(total, checksum, size)
            self._expected[number].compare(total)


def _address(view: memoryview) -> int:
    return address_of(np.frombuffer(view, np.uint8))

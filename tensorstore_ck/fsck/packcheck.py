"""Packs for fsck and salvage: which there are, what their footers say, and whether every block in them is what it was.

Every byte of a pack is under some hash, so that reading header, footer and blocks finds any damage. Footers are kept up to a bound and read
again after that; block data is read in runs, so memory is bounded whatever the packs' sizes are.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.codec import Codec, decode
from tensorstore_ck.errors import CorruptObjectError, StoreError
from tensorstore_ck.fsck.findings import require_reachable
from tensorstore_ck.ids import Ulid, block_id
from tensorstore_ck.pack import HEADER, TRAILER, Footer, decode_footer, footer_bytes, pack_name, stored_check
from tensorstore_ck.parallel import cpu_threads, for_each

FOOTER_CACHE_BYTES: Final = 64 << 20
RUN_BYTES: Final = 4 << 20
DATA_MEMORY_BYTES: Final = 64 << 20
REMOTE_THREADS: Final = 8

Rows = npt.NDArray[Any]


class Listed(NamedTuple):
    """One pack, as listed."""

    size_bytes: int
    modified_ns: int


class PackProblem(NamedTuple):
    """Why a pack's footer cannot be used."""

    kind: str
    message: str


@dataclass(slots=True)
class BadBlocks:
    """Blocks of one pack that are not what they were."""

    entries: set[int] = field(default_factory=set)
    message: str = ""


class _Run(NamedTuple):
    """Neighbouring blocks of a pack, read together."""

    pack: Ulid
    first: int
    entries: Rows


class Packs:
    """The packs of a store. Thread-safe."""

    def __init__(self, backend: Backend, listed: dict[Ulid, Listed]) -> None:
        self._backend = backend
        self.listed = listed
        self.problems: dict[Ulid, PackProblem] = {}
        """Packs whose header or footer is damaged, as far as they were looked at."""
        self.bad: dict[Ulid, BadBlocks] = {}
        """What `check_data` found."""
        self.blocks = 0
        """In the footers that `footers` went through."""
        self.data_bytes = 0
        self._footers: OrderedDict[Ulid, Footer] = OrderedDict()
        self._cached_bytes = 0
        self._single: dict[tuple[Ulid, int, bytes], bool] = {}
        self._lock = threading.Lock()

    def footer(self, pack: Ulid) -> Footer | PackProblem:
        """The checked footer of a pack, or why there is none."""
        with self._lock:
            known = self._footers.get(pack) or self.problems.get(pack)
        if known is not None:
            return known
        name = pack_name(pack)
        try:
            footer = self._read_footer(pack, name)
        except StoreError as exc:
            require_reachable(self._backend, exc)
            problem = PackProblem(exc.kind, str(exc))
            with self._lock:
                return self.problems.setdefault(pack, problem)
        with self._lock:
            self._footers[pack] = footer
            self._cached_bytes += footer.entries.nbytes
            while self._cached_bytes > FOOTER_CACHE_BYTES and len(self._footers) > 1:
                self._cached_bytes -= self._footers.popitem(last=False)[1].entries.nbytes
        return footer

    def footers(self) -> Iterator[tuple[Ulid, Footer]]:
        """Every listed pack whose footer is sound, in order; the others' problems are noted."""
        for pack in sorted(self.listed):
            footer = self.footer(pack)
            if isinstance(footer, Footer):
                self.blocks += len(footer.entries)
                yield pack, footer

    def check_footers(self) -> None:
        """Looks at every listed pack's header and footer."""
        if self._backend.is_local:
            for _ in self.footers():
                pass
            return
        for_each(sorted(self.listed), lambda pack: self._count(self.footer(pack)), REMOTE_THREADS)

    def check_data(self, block_bytes: int, advance: Callable[[int], None]) -> None:
        """Reads every block of every listed pack once, and notes the bad ones; `advance` is told the bytes read."""
        threads = cpu_threads() if self._backend.is_local else REMOTE_THREADS
        threads = max(1, min(threads, DATA_MEMORY_BYTES // (2 * max(RUN_BYTES, block_bytes))))
        buffers = threading.local()

        def check(run: _Run) -> None:
            size = int(run.entries["stored"].sum(dtype=np.int64))
            buffer = getattr(buffers, "buffer", None)
            if buffer is None or len(buffer) < size:
                buffer = buffers.buffer = bytearray(max(size, RUN_BYTES))
            self._check_run(run, memoryview(buffer)[:size])
            advance(size)
            with self._lock:
                self.data_bytes += size

        for_each(self._runs(), check, threads)

    def is_intact(self, pack: Ulid, row: tuple[Any, ...], block: bytes) -> bool:
        """Whether one block that an extent names can be read: for packs whose footer cannot be used."""
        _, _, offset, stored, raw, _, codec, _ = row
        key = (pack, offset, block)
        if key not in self._single:
            name, data = pack_name(pack), bytearray(stored)
            try:
                self._backend.read_into(name, offset, memoryview(data))
                self._single[key] = block_id(decode(codec, memoryview(data), raw, name)) == block
            except StoreError as exc:
                require_reachable(self._backend, exc)
                self._single[key] = False
        return self._single[key]

    def _count(self, footer: Footer | PackProblem) -> None:
        if isinstance(footer, Footer):
            with self._lock:
                self.blocks += len(footer.entries)

    def _read_footer(self, pack: Ulid, name: str) -> Footer:
        found = self.listed.get(pack)
        size = found.size_bytes if found is not None else self._backend.size(name)
        if size < HEADER.size + TRAILER.size:
            raise CorruptObjectError(f"{name} is cut short: {size} bytes are not a pack", object_id=name)
        header, trailer = bytearray(HEADER.size), bytearray(TRAILER.size)
        self._backend.read_into(name, 0, memoryview(header))
        self._backend.read_into(name, size - TRAILER.size, memoryview(trailer))
        footer = bytearray(footer_bytes(memoryview(trailer), size, name))
        self._backend.read_into(name, size - len(footer), memoryview(footer))
        return decode_footer(memoryview(header), memoryview(footer), size, name)

    def _runs(self) -> Iterator[_Run]:
        for pack, footer in self.footers():
            ends = np.cumsum(footer.entries["stored"], dtype=np.int64)
            first = 0
            while first < len(ends):
                start = int(ends[first - 1]) if first else 0
                stop = max(first + 1, int(np.searchsorted(ends, start + RUN_BYTES, "right")))
                yield _Run(pack, first, footer.entries[first:stop])
                first = stop

    def _check_run(self, run: _Run, buffer: memoryview) -> None:
        name = pack_name(run.pack)
        first_offset = int(run.entries["offset"][0])
        try:
            self._backend.read_into(name, first_offset, buffer)
        except StoreError as exc:
            require_reachable(self._backend, exc)
            for number in range(len(run.entries)):
                self._note(run.pack, run.first + number, str(exc))
            return
        for number, (block, offset, check, stored, raw, codec, _, _) in enumerate(run.entries.tolist()):
            data = buffer[offset - first_offset : offset - first_offset + stored]
            problem = None
            try:
                if codec != Codec.RAW and stored_check(data) != check:
                    problem = "does not match its check"
                elif block_id(decode(codec, data, raw, name)) != block:
                    problem = "does not match its hash"
            except StoreError as exc:
                problem = f"cannot be decoded ({exc})"
            if problem is not None:
                self._note(run.pack, run.first + number, f"{name}: the block at offset {offset} {problem}: the pack was damaged")

    def _note(self, pack: Ulid, entry: int, message: str) -> None:
        with self._lock:
            bad = self.bad.setdefault(pack, BadBlocks())
            bad.entries.add(entry)
            bad.message = bad.message or message

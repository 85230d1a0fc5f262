"""Reads blocks and compares them with their hashes, in pieces of packs, which workers check in any order.

A worker runs `check_piece`: it writes nothing, and its argument and result are small and picklable. The executor chooses where, by
default threads of this process. `DataCheck` chooses the packs, watches the time and collects the results.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.executor import Executor, LocalThreads
from tensorstore_ck.common.ids import ULID_BYTES, Ulid, block_id
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, decode
from tensorstore_ck.format.pack import Footer, pack_name, stored_check
from tensorstore_ck.gc.block_runs import cut_runs
from tensorstore_ck.log.cache import Table, write_rows
from tensorstore_ck.maintenance.fsck.check_packs import Packs
from tensorstore_ck.maintenance.fsck.findings import FsckOptions, kind_of, require_reachable

_KEY: Final = b"f/"
_FLUSH_PACKS: Final = 256
_FLUSH_BYTES: Final = 4 << 30


class LastVerified:
    """Pack -> when it was verified, for the listed packs. Not thread-safe."""

    def __init__(self, table: Table, packs: Collection[Ulid]) -> None:
        self._table = table
        self._times = dict.fromkeys(packs, 0)
        self._damaged: set[Ulid] = set()
        self._pending: dict[Ulid, int | None] = {}
        self._pending_bytes = 0
        for key, value in table.scan(_KEY):
            pack = Ulid(key[len(_KEY) :])
            if pack in self._times and len(pack) == ULID_BYTES:
                self._times[pack] = int.from_bytes(value, "big")
                if not self._times[pack]:
                    self._damaged.add(pack)
            else:
                self._pending[pack] = None

    def order(self) -> list[Ulid]:
        """All packs: first those with damage, then those never verified, then those verified longest ago."""
        return sorted(self._times, key=lambda pack: (pack not in self._damaged, self._times[pack], pack))

    def damaged(self) -> list[Ulid]:
        """The packs that were damaged when they were last read."""
        return sorted(self._damaged)

    def note(self, pack: Ulid, size_bytes: int, time_ns: int | None) -> None:
        """Notes that a pack is sound; without a time, that it is damaged: every later check reads it."""
        self._times[pack] = time_ns or 0
        self._pending[pack] = time_ns or 0
        self._pending_bytes += size_bytes
        if len(self._pending) >= _FLUSH_PACKS or self._pending_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the notes."""
        write_rows(self._table, {_KEY + pack: None if ns is None else ns.to_bytes(8, "big") for pack, ns in self._pending.items()})
        self._pending.clear()
        self._pending_bytes = 0

    def never(self) -> int:
        """Number of packs that were never verified."""
        return sum(not time_ns for time_ns in self._times.values())

    def oldest_ns(self) -> int | None:
        """The earliest of the packs' last verifications; None if there is none."""
        return min((time_ns for time_ns in self._times.values() if time_ns), default=None)


PIECE_BYTES: Final = 32 << 20
RUN_BYTES: Final = 4 << 20
"""Size of one read."""
DISK_QUEUE: Final = 1
"""Threads that read while all cores hash."""

Rows = npt.NDArray[Any]


class PackPiece(NamedTuple):
    """Neighbouring blocks of one pack, from entry `first` on."""

    pack: Ulid
    first: int
    entries: Rows
    """Rows of the footer."""


class PieceResult(NamedTuple):
    """The outcome for a piece."""

    piece: PackPiece
    read_bytes: int
    bad: Sequence[tuple[int, str, str]]
    """(entry, kind of finding, description of the damage)."""


def check_piece(backend: Backend, piece: PackPiece) -> PieceResult:
    """Reads every block of a piece and compares it with its hash."""
    bad: list[tuple[int, str, str]] = []
    runs = list(_cut(piece.entries, RUN_BYTES))
    buffer = memoryview(bytearray(max(map(_stored_bytes, runs), default=0)))
    number = piece.first
    for run in runs:
        bad += _check_run(backend, pack=piece.pack, first=number, entries=run, buffer=buffer[: _stored_bytes(run)])
        number += len(run)
    return PieceResult(piece, _stored_bytes(piece.entries), bad)


class DataCheck:
    """Checks the data of packs: first those that were never verified, then those verified longest ago."""

    def __init__(
        self,
        engine: Engine,
        packs: Packs,
        options: FsckOptions,
        *,
        started_ns: int = 0,
        chosen: list[Ulid] | None = None,
        suspects: Collection[Ulid] = (),
    ) -> None:
        """Reads the `chosen` packs, else those that `options` select; always the `suspects`, and packs in which damage was found earlier.

        `started_ns`: the start of `options.max_seconds`, by the engine's clock.
        """
        self._engine = engine
        self._packs = packs
        self._deadline_ns = None if options.max_seconds is None else started_ns + int(options.max_seconds * 1e9)
        self.verified = LastVerified(engine.table, packs.listed)
        self._left: dict[Ulid, int] = {}
        self.chosen = self._choose(options, suspects) if chosen is None else chosen
        """Packs to read, in order."""
        self.read: set[Ulid] = set()
        """Packs whose blocks were all read."""
        self.read_bytes = 0
        """Bytes of blocks that were read."""
        self.packs = 0
        """Packs that were read completely."""
        self.is_out_of_time = False

    def run(self, advance: Callable[[int], None], executor: Executor | None = None) -> None:
        """Checks the chosen packs until the deadline; notes damaged blocks in `packs`."""
        backend = self._engine.backend
        executor = executor or LocalThreads(cpu_threads() + DISK_QUEUE if backend.is_local else REMOTE_THREADS)
        work = partial(check_piece, backend) if executor.is_remote else self._check_in_time
        try:
            for result in executor.run(work, self._pieces()):
                if result is not None:
                    self._take(result)
                    advance(result.read_bytes)
        finally:
            self.verified.flush()

    def read_also(self, packs: list[Ulid]) -> None:
        """Reads these packs now, also after the deadline."""
        was_late = self.is_out_of_time
        self.chosen, self._deadline_ns, self.is_out_of_time = packs, None, False
        self.run(lambda count: None)
        self.is_out_of_time = was_late

    def _check_in_time(self, piece: PackPiece) -> PieceResult | None:
        """None after the deadline: a piece may be queued for some time."""
        return None if self._is_late() else check_piece(self._engine.backend, piece)

    def _is_late(self) -> bool:
        if self._deadline_ns is not None and self._engine.clock() >= self._deadline_ns:
            self.is_out_of_time = True
        return self.is_out_of_time

    def _choose(self, options: FsckOptions, suspects: Collection[Ulid]) -> list[Ulid]:
        listed = self._packs.listed
        chosen = sorted(listed.keys() & {*self.verified.damaged(), *suspects})
        if not options.reads_data:
            return chosen
        first = frozenset(chosen)
        wanted_bytes = (options.sample_fraction or 1) * sum(pack.size_bytes for pack in listed.values())
        wanted_bytes -= sum(listed[pack].size_bytes for pack in chosen)
        for pack in self.verified.order():
            if pack in first:
                continue
            if wanted_bytes <= 0 and options.sample_fraction is not None:
                break
            chosen.append(pack)
            wanted_bytes -= listed[pack].size_bytes
        return chosen

    def _pieces(self) -> Iterator[PackPiece]:
        for pack in self.chosen:
            footer = self._packs.footer(pack)
            if not isinstance(footer, Footer) or not len(footer.entries):
                self._finish(pack, is_sound=isinstance(footer, Footer))
                continue
            self._left[pack] = len(footer.entries)
            first = 0
            for entries in _cut(footer.entries, PIECE_BYTES):
                if self._is_late():
                    return
                yield PackPiece(pack, first, entries)
                first += len(entries)

    def _take(self, result: PieceResult) -> None:
        pack = result.piece.pack
        for entry, kind, message in result.bad:
            self._packs.note_bad(pack, entry, kind, message)
        self.read_bytes += result.read_bytes
        self._left[pack] -= len(result.piece.entries)
        if not self._left[pack]:
            self._finish(pack, is_sound=pack not in self._packs.bad)

    def _finish(self, pack: Ulid, *, is_sound: bool) -> None:
        self.packs += 1
        if pack not in self._packs.problems:
            self.read.add(pack)
        self.verified.note(pack, self._packs.listed[pack].size_bytes, self._engine.clock() if is_sound else None)


def _cut(entries: Rows, size_bytes: int) -> Iterator[Rows]:
    """Neighbouring entries in runs of up to `size_bytes`, or of one entry."""
    return (entries[run] for run in cut_runs(entries, size_bytes))


def _stored_bytes(entries: Rows) -> int:
    return int(entries["stored"].sum(dtype=np.int64))


def _check_run(backend: Backend, pack: Ulid, first: int, entries: Rows, buffer: memoryview) -> Iterator[tuple[int, str, str]]:
    name, start = pack_name(pack), int(entries["offset"][0])
    try:
        backend.read_into(name, start, buffer)
    except StoreError as exc:
        require_reachable(backend, exc)
        yield from ((first + number, kind_of(exc), str(exc)) for number in range(len(entries)))
        return
    for number, (block, offset, check, stored, raw, codec, _, _) in enumerate(entries.tolist()):
        data = buffer[offset - start : offset - start + stored]
        problem = None
        try:
            if codec != Codec.RAW and stored_check(data) != check:
                problem = "does not match its checksum"
            elif codec not in CODECS_WITH_BASES and block_id(decode(codec, data, raw, name)) != block:
                problem = "does not match its hash"
        except StoreError as exc:
            problem = f"cannot be decoded ({exc})"
        if problem is not None:
            yield first + number, "corrupt_object", f"{name}: the block at offset {offset} {problem}: the pack was damaged"

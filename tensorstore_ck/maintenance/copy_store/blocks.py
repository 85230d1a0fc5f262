"""Copies encoded blocks from the packs of one store into new packs of another; any worker may run it.

`copy_piece` depends only on its arguments, and may run more than once: gc frees what it wrote if its result is not used. It decodes
each block and compares it with its id, and then writes the encoded bytes that it read.
"""

import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.protocol import Backend, finishing
from tensorstore_ck.common.ids import Digest, IdSource, Ulid, block_id
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.engine.write.pack_writer import EncodedBlock, PackWriter
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import Codec, decode
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.gc.block_runs import cut_runs, span_bytes
from tensorstore_ck.log.block_index import Location

BLOCK_DTYPE: Final = np.dtype([("id", "V32"), ("pack", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("codec", "<u2")])
PIECE_BYTES: Final = 256 << 20
"""A copy that is killed within a large snapshot resumes after the last complete piece."""
RUN_BYTES: Final = 4 << 20
"""Neighbouring blocks are read together up to this size."""
MAX_GAP_BYTES: Final = 1 << 16
MAX_OPEN_PACKS: Final = 4

Blocks = npt.NDArray[Any]
"""Rows of `BLOCK_DTYPE`, by pack and offset; ``pack`` counts in a table of packs."""


class CopyPiece(NamedTuple):
    """Blocks that are copied together."""

    packs: Sequence[Ulid]
    blocks: Blocks


class Copied(NamedTuple):
    """The result for a piece."""

    locations: dict[Digest, Location]
    """The durable locations of its blocks in the target."""
    read_bytes: int
    written_bytes: int


class Pace(NamedTuple):
    """Rate limits of this process for reading the source and writing the target."""

    reads: RateLimit
    writes: RateLimit
    wait: Callable[[Flag, float], object] = Flag.wait

    @property
    def run_bytes(self) -> int:
        """Bytes to read at a time, so that waits stay short."""
        return min(RUN_BYTES, self.reads.burst_bytes, self.writes.burst_bytes)

    def take(self, read_bytes: int, written_bytes: int, failed: Flag) -> bool:
        """Waits until both limits permit these bytes. False if `failed` was set meanwhile."""
        self.wait(failed, max(self.reads.take(read_bytes), self.writes.take(written_bytes)))
        return not failed.is_set()

    @classmethod
    def limited(cls, rate: float | str | None) -> "Pace | None":
        """A pace with this rate for reads and for writes; None: no limit."""
        return None if rate is None else cls(RateLimit(rate), RateLimit(rate))


def cut_pieces(packs: Sequence[Ulid], blocks: Blocks) -> Iterator[CopyPiece]:
    """The blocks in pieces of about `PIECE_BYTES`, in the order of the source's packs."""
    ordered = blocks[np.lexsort((blocks["offset"], blocks["pack"]))]
    numbers = np.cumsum(ordered["stored"], dtype=np.int64) // PIECE_BYTES
    for piece in np.split(ordered, np.flatnonzero(np.diff(numbers)) + 1):
        if len(piece):
            yield CopyPiece(packs, piece)


def copy_piece(
    source: Backend,
    target: Backend,
    new_id: IdSource,
    pace: Pace | None,
    piece: CopyPiece,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> Copied:
    """Reads, verifies and writes the blocks of a piece; all of them are durable when it returns.

    Raises:
        DamageError: a block of the source is missing, or not what its id says; the message names it.
    """
    is_local = source.is_local and target.is_local
    writer = PackWriter(target, new_id, lambda _: {}, open_packs=min(cpu_threads(), MAX_OPEN_PACKS) if target.is_local else 1)
    buffers = threading.local()
    lock = threading.Lock()
    failed = Flag()
    read_bytes = 0

    def copy(run: Blocks) -> None:
        nonlocal read_bytes
        size = span_bytes(run)
        if pace is not None and not pace.take(size, int(run["stored"].sum()), failed):
            return
        buffer = getattr(buffers, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = buffers.buffer = bytearray(max(size, RUN_BYTES))
        fetched = memoryview(buffer)[:size]
        name = pack_name(piece.packs[int(run["pack"][0])])
        source.read_into(name, int(run["offset"][0]), fetched)
        encoded = list(_verified(source.url, name, run, fetched))
        writer.add_encoded(encoded)
        with lock:
            read_bytes += size
        advance(sum(block.raw_bytes for block in encoded))

    with finishing(writer):
        runs = _runs(piece.blocks, RUN_BYTES if pace is None else pace.run_bytes)
        for_each(runs, copy, cpu_threads() + 1 if is_local else REMOTE_THREADS, failed=failed)
    return Copied(writer.added, read_bytes, writer.new_bytes)


def _runs(blocks: Blocks, run_bytes: int) -> Iterator[Blocks]:
    for of_pack in np.split(blocks, np.flatnonzero(np.diff(blocks["pack"])) + 1):
        for run in cut_runs(of_pack, run_bytes, MAX_GAP_BYTES):
            yield of_pack[run]


def _verified(url: str, name: str, run: Blocks, fetched: memoryview) -> Iterator[EncodedBlock]:
    start = int(run["offset"][0])
    for expected, _, offset, stored, raw_bytes, codec in run.tolist():
        encoded = fetched[offset - start : offset - start + stored]
        if block_id(decode(codec, encoded, raw_bytes, name)) != expected:
            raise CorruptObjectError(
                f"{name}: the block {expected.hex()[:16]} at offset {offset} does not match its hash: the pack was damaged; "
                f"`tsck fsck --read-data -s {shlex.quote(url)}` says what is affected",
                object_id=name,
            )
        yield EncodedBlock(Digest(expected), Codec(codec), (encoded,), raw_bytes)

"""The block index: where a block with a given id lies, as far as this host knows. A cache over `Table`.

It only makes saves smaller: a lost or empty index costs dedup against other jobs, never correctness. It is kept in the same
table as the ref table, at the same log entry, so that an entry can never outlive the fold that vouches for it. Only blocks
without a delta base are kept.
"""

import contextlib
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from tensorstore_ck.ids import Digest, Ulid
from tensorstore_ck.table import Table, TableDamagedError

_KEY: Final = b"b/"
_VALUE: Final = struct.Struct("<16sIQIIH")


class Location(NamedTuple):
    """Where an encoded block lies."""

    pack: Ulid
    entry: int
    offset: int
    stored: int
    raw: int
    codec: int


class BlockIndex:
    """Block id -> location."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def get(self, block: Digest) -> Location | None:
        """Where the block lies, or None."""
        try:
            value = self._table.get(_KEY + block)
        except TableDamagedError:
            return None
        return None if value is None or len(value) != _VALUE.size else Location(*_VALUE.unpack(value))

    def add(self, blocks: Iterable[tuple[Digest, Location]]) -> None:
        """Notes blocks of a published snapshot."""
        with contextlib.suppress(TableDamagedError), self._table.batch() as batch:
            for block, location in blocks:
                batch.put(_KEY + block, _VALUE.pack(*location))

"""When this host last read a whole pack and found it sound. A cache: losing it affects only the order in which packs are read.

It is in the host's table, so each host goes through the store by itself, and starts with any pack after its cache was cleared. Keys
``f/<pack>``, values nanoseconds since 1970; 0 if damage was found, until the pack is read again and found sound.
"""

from collections.abc import Collection
from typing import Final

from tensorstore_ck.common.ids import ULID_BYTES, Ulid
from tensorstore_ck.log.cache import Table, write_rows

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

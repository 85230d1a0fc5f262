"""Number of entries per pack, cached in the host's table, so that gc need not read the footers of fully needed packs again.

Packs never change. A lost or wrong count affects only which packs gc looks at. Keys ``e/<pack>``.
"""

from collections.abc import Collection
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log.cache import Table, write_rows

_KEY: Final = b"e/"
_COUNT_BYTES: Final = 4


class PackCounts:
    """Pack -> number of entries, for the listed packs. `note` and `get` are thread-safe."""

    def __init__(self, table: Table, packs: Collection[Ulid]) -> None:
        self._table = table
        self._counts: dict[Ulid, int] = {}
        self._new: dict[Ulid, int] = {}
        self._gone: list[Ulid] = []
        for key, value in table.scan(_KEY):
            pack = Ulid(key[len(_KEY) :])
            if pack in packs:
                self._counts[pack] = int.from_bytes(value, "big")
            else:
                self._gone.append(pack)

    def get(self, pack: Ulid) -> int | None:
        """Number of entries, if this host has read the pack's footer."""
        return self._counts.get(pack)

    def note(self, pack: Ulid, entries: int) -> None:
        """Keeps a count; `flush` writes it to the table."""
        self._counts[pack] = self._new[pack] = entries

    def flush(self) -> None:
        """Writes new counts, and drops those of packs that are gone."""
        if self._new or self._gone:
            new = {_KEY + pack: count.to_bytes(_COUNT_BYTES, "big") for pack, count in self._new.items()}
            write_rows(self._table, {**new, **{_KEY + pack: None for pack in self._gone}})
        self._new, self._gone = {}, []

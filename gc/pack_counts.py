"""How many entries each pack has, kept in the host's table: so that of packs that are needed whole no footer is read a second time.

A pack never changes, and a count that is lost, or wrong, bears only on which packs are looked at. Keys ``e/<pack>``.
"""

import contextlib
from collections.abc import Collection
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log.cache import Table, TableError

_KEY: Final = b"e/"
_COUNT_BYTES: Final = 4


class PackCounts:
    """Pack -> its entries, for the packs that are there. `note` and `get` may be called from several threads."""

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
        """How many entries a pack has, if this host has seen its footer."""
        return self._counts.get(pack)

    def note(self, pack: Ulid, entries: int) -> None:
        """Keeps what a footer said; in the table after `flush`."""
        self._counts[pack] = self._new[pack] = entries

    def flush(self) -> None:
        """Writes what was noted, and drops what is gone."""
        if self._new or self._gone:
            with contextlib.suppress(TableError), self._table.batch() as batch:
                for pack, count in self._new.items():
                    batch.put(_KEY + pack, count.to_bytes(_COUNT_BYTES, "big"))
                for pack in self._gone:
                    batch.delete(_KEY + pack)
        self._new, self._gone = {}, []

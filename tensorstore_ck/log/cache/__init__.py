"""The host's cache: an ordered table of keys and values, in LMDB or in memory.

Knows nothing of stores. What lies in a table can always be made again from the store, so losing one loses nothing. Users
share a table by the first two bytes of their keys: ``r/`` is the ref table (see `tensorstore_ck.log`), ``l/`` the log's
own bookkeeping, ``b/`` the block index.
"""

from tensorstore_ck.log.cache.failover_table import FailoverTable
from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.open_cache import open_table
from tensorstore_ck.log.cache.protocol import (
    MAX_KEY_BYTES,
    Batch,
    CacheWarning,
    Reader,
    Table,
    TableBusyError,
    TableDamagedError,
    TableError,
)

__all__ = [
    "MAX_KEY_BYTES",
    "Batch",
    "CacheWarning",
    "FailoverTable",
    "MemoryTable",
    "Reader",
    "Table",
    "TableBusyError",
    "TableDamagedError",
    "TableError",
    "open_table",
]

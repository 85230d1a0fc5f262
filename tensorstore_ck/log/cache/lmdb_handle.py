"""A handle on an LMDB environment, which several handles of one process share.

The registry below is global, since LMDB environments are per process and path. A forked child inherits it but must not use its
environments: in the child, an inherited table raises `TableDamagedError`.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

import lmdb

from tensorstore_ck.log.cache.lmdb_environment import INITIAL_MAP_BYTES, Environment
from tensorstore_ck.log.cache.lmdb_rows import LmdbView, get_row, get_rows, read_page
from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.protocol import Batch, Item, Table, TableBusyError, TableDamagedError

DEFAULT_PATIENCE_SECONDS: Final = 1.0


class _Registry:
    def __init__(self, inherited: "_Registry | None" = None) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.environments: dict[Path, Environment] = {}
        # Only kept alive: dropping a parent's environment would close it.
        self.inherited = inherited

    def has_inherited(self, folder: Path) -> bool:
        return self.inherited is not None and (folder in self.inherited.environments or self.inherited.has_inherited(folder))


_registry = _Registry()


def _own_registry() -> _Registry:
    global _registry  # noqa: PLW0603 - see the module docstring
    if _registry.pid != os.getpid():
        _registry = _Registry(inherited=_registry)  # a thread that does not exist here may hold the old one's lock
    return _registry


def open_lmdb_table(folder: Path, *, map_bytes: int = INITIAL_MAP_BYTES, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> Table:
    """The table in `folder`, which exists and is ours; in memory in a child whose parent has it open.

    `map_bytes` is the map's first size. It waits `patience_seconds` for another process's batch that makes no progress. Raises `lmdb.Error`
    or `OSError` if the folder cannot be used.
    """
    folder = folder.resolve()
    registry = _own_registry()
    with registry.lock:
        if registry.has_inherited(folder):
            return MemoryTable()
    table = LmdbHandle(folder, map_bytes, patience_seconds)
    with suppress(TableBusyError):  # opened later, when the lock is free
        table.open(wait=True)
    return table


class LmdbHandle(Table):
    """A `Table` on local disk, shared with the other processes of this host."""

    def __init__(self, folder: Path, map_bytes: int, patience_seconds: float) -> None:
        self._folder = folder
        self._map_bytes = map_bytes
        self._patience_seconds = patience_seconds
        self._environment: Environment | None = None
        self._closed = False
        self._pid = os.getpid()

    def open(self, *, wait: bool) -> Environment:
        """The environment; the first call that gets the lock opens it.

        Raises:
            TableBusyError: another process holds it.
            lmdb.Error, OSError: the folder cannot be used.
        """
        if self._environment is None:
            registry = _own_registry()
            with registry.lock:
                if self._pid != os.getpid() or registry.has_inherited(self._folder):
                    raise TableDamagedError(f"{self._folder} belongs to the parent process", object_id=str(self._folder))
                environment = registry.environments.get(self._folder)
                if environment is None:
                    environment = Environment(self._folder, self._map_bytes, self._patience_seconds, wait=wait)
                    registry.environments[self._folder] = environment
                environment.users += 1
                self._environment = environment
        return self._environment

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        return (self._environment or self._opened(wait=False)).read(get_row, key)

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        """See `Reader.page`."""
        return (self._environment or self._opened(wait=False)).read(read_page, low, high, reverse)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Table.get_many`."""
        return (self._environment or self._opened(wait=False)).read(get_rows, keys)

    def view(self, prefix: bytes) -> LmdbView:
        """See `Table.view`."""
        return (self._environment or self._opened(wait=False)).view(prefix)

    def batch(self, *, wait: bool = True) -> AbstractContextManager[Batch]:
        """See `Table.batch`."""
        return (self._environment or self._opened(wait=wait)).batch(wait=wait)

    def close(self) -> None:
        """See `Table.close`."""
        registry, environment = _own_registry(), self._environment
        with registry.lock:
            if environment is None or self._closed or registry.environments.get(environment.folder) is not environment:
                return
            self._closed = True
            environment.users -= 1
            if not environment.users:
                del registry.environments[environment.folder]
                environment.close()

    def _opened(self, *, wait: bool) -> Environment:
        try:
            return self.open(wait=wait)
        except (OSError, lmdb.Error) as exc:
            raise TableDamagedError(f"{self._folder}: {exc}", object_id=str(self._folder)) from exc

"""A user's handle on an environment; several in one process share it.

The registry below is the package's one piece of global state. It must be: LMDB environments are per process and path by
nature. A forked child inherits it but never what it holds: there every table is in memory.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tensorstore_ck.table.environment import INITIAL_MAP_BYTES, Environment
from tensorstore_ck.table.memory import MemoryTable
from tensorstore_ck.table.protocol import Batch, Item, Table, scan_pages


class _Registry:
    def __init__(self, inherited: "_Registry | None" = None) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.environments: dict[Path, Environment] = {}
        # Kept alive, and never looked at: dropping a parent's environment would close it.
        self.inherited = inherited

    def has_inherited(self, folder: Path) -> bool:
        return self.inherited is not None and (folder in self.inherited.environments or self.inherited.has_inherited(folder))


_registry = _Registry()


def _own_registry() -> _Registry:
    global _registry  # noqa: PLW0603 - see the module docstring
    if _registry.pid != os.getpid():
        _registry = _Registry(inherited=_registry)  # the old one's lock may be held by a thread that does not exist here
    return _registry


def open_lmdb_table(folder: Path, *, map_bytes: int = INITIAL_MAP_BYTES) -> Table:
    """The table in `folder`, which exists and is ours; in memory in a child whose parent has it open.

    Raises:
        lmdb.Error, OSError: the folder cannot be used.
    """
    folder = folder.resolve()
    registry = _own_registry()
    with registry.lock:
        if registry.has_inherited(folder):
            return MemoryTable()
        environment = registry.environments.get(folder)
        if environment is None:
            environment = registry.environments[folder] = Environment(folder, map_bytes)
        environment.users += 1
        return LmdbTable(environment)


class LmdbTable:
    """A `Table` on local disk, shared with the other processes of this host."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._closed = False

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        memory = self._environment.memory()
        return self._environment.get(key) if memory is None else memory.get(key)

    def scan(self, prefix: bytes, *, start: bytes | None = None, reverse: bool = False) -> Iterator[Item]:
        """See `Reader.scan`."""
        memory = self._environment.memory()
        if memory is None:
            return scan_pages(self._environment.page, prefix, start, reverse)
        return memory.scan(prefix, start=start, reverse=reverse)

    def batch(self) -> AbstractContextManager[Batch]:
        """See `Table.batch`."""
        memory = self._environment.memory()
        return self._environment.batch() if memory is None else memory.batch()

    def close(self) -> None:
        """See `Table.close`."""
        registry = _own_registry()
        with registry.lock:
            if self._closed or registry.environments.get(self._environment.folder) is not self._environment:
                return
            self._closed = True
            self._environment.users -= 1
            if not self._environment.users:
                del registry.environments[self._environment.folder]
                self._environment.close()

"""Repairs log entries, from a copy of this store, and checkpoints and this host's cache, from the log.

A lost entry is written again only if the rest of the log, or this host's memory of it, names its hash.
"""

import contextlib
from collections.abc import Collection

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.threads import shielded
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import DamageError
from tensorstore_ck.log import Entry, Head
from tensorstore_ck.log.cache import TableError
from tensorstore_ck.log.entry import MAX_ENTRY_BYTES
from tensorstore_ck.maintenance.fsck.check_log import CACHE_NAME, LogCheck, cache_problem


def repair_entries(engine: Engine, copy: Engine, log: LogCheck, seen: Collection[Head]) -> list[str]:
    """Copies lost log entries from a copy of this store, newest first, as far as their hashes are known; returns their names."""
    if (copy.config.uuid, copy.config.log) != (engine.config.uuid, engine.config.log):
        return []
    repaired: list[str] = []
    known = {**log.vouched, **{head.n: head.hash for head in seen}}
    expected: Digest | None = None
    for n in range(max([log.last, *known]), 0, -1):
        entry, expected = _read(engine, n), expected or known.get(n)
        if entry is None or (expected is not None and entry.hash != expected):
            entry = _read(copy, n) if expected is not None else None
            if entry is not None and entry.hash == expected:
                _write(engine, copy, n)
                repaired.append(engine.log.chain.name(n))
            else:
                entry = None
        expected = entry.prev if entry is not None else None
    return repaired


def repair_checkpoints(engine: Engine, log: LogCheck) -> list[str]:
    """Writes damaged checkpoints again; returns their names."""
    for name, data in log.checkpoints.items():
        engine.backend.replace(name, data)
    return list(log.checkpoints)


def repair_cache(engine: Engine, log: LogCheck) -> list[str]:
    """Syncs the log; clears and refills this host's cache if it differs; returns its name if it was repaired.

    Raises:
        BrokenLogError: the log is damaged.
    """
    engine.log.sync()
    log.follow(engine.log.chain)
    if cache_problem(log, engine.log) is None:
        return []

    def clear() -> None:
        with contextlib.suppress(TableError), engine.table.batch() as batch:
            batch.clear(b"")

    shielded(clear, finish=True)
    engine.log.sync()
    return [CACHE_NAME]


def _read(engine: Engine, n: int) -> Entry | None:
    try:
        return engine.log.chain.read(n)
    except DamageError:
        return None


def _write(engine: Engine, copy: Engine, n: int) -> None:
    name = engine.log.chain.name(n)
    engine.backend.replace(name, copy.backend.get(copy.log.chain.name(n), max_bytes=MAX_ENTRY_BYTES + 1))
    engine.backend.sync_folders(name)

"""Deletes what a save has written that failed for space: else it would fill the disk until gc judges it by its age.

Only names that this save drew itself, and only if its log entry was never sent: see gc/PROTOCOL.md, "Who deletes objects".
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import NoSpaceError, StoreError
from tensorstore_ck.format.folders import FOLDERS
from tensorstore_ck.log import ObjectKey


@contextmanager
def deleted_if_full(engine: Engine) -> Iterator[Engine]:
    """The same open store, for one save whose objects are deleted if the block raises `NoSpaceError`.

    That error says that no entry was sent (`Log.append`): a save whose entry may be there raises `UndecidedError`.
    """
    names: list[Ulid] = []
    try:
        yield replace(engine, unpublished=names)
    except NoSpaceError:
        with suppress(StoreError):  # gc frees what is left
            engine.backend.delete([ObjectKey(kind, name).name for name in names for kind in FOLDERS if kind != "moved"])
        raise

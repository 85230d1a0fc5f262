"""Creates the object of a log entry. On a full disk, an entry that frees space uses the reserve, which other entries leave alone."""

import shlex
from collections.abc import Sequence
from functools import partial
from typing import Final

from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.backend.reserve import within_reserve
from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.log.operations import Op

FREEING: Final = frozenset(
    {"expire", "untag", "unpin", "purge", "policy", "reset", "abort", "condemn", "sweep", "relocate", "place", "rescue", "settle"}
)
"""Operations of which an entry can consist that lets gc free something, or ends a save that failed for space."""


def create_entry(backend: Backend, name: str, sealed: bytes, ops: Sequence[Op]) -> Created:
    """See `Backend.create`. Raises `NoSpaceError` if the disk is full."""
    create = partial(backend.create, name, sealed)
    try:
        return within_reserve(backend, create) if all(op.name in FREEING for op in ops) else create()
    except NoSpaceError as exc:
        if not backend.is_local:
            raise
        command = shlex.join(["tsck", "usage", "-s", backend.url])
        raise NoSpaceError(f"{exc}. `{command}` shows what gc can free, and how", object_id=exc.object_id) from exc

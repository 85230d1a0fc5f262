"""A log that is broken or lost. Signs that a log which looks empty was lost: no store begins again over its snapshots, which gc would free.

A first save that was killed, or that runs now, leaves a record too (FORMAT.md, "Commits"), but one without a parent.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid, parse_ulid
from tensorstore_ck.common.printed_commands import naming_store
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import BrokenLogError, DamageError, FormatVersionError
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.sealed import FOLDERS, MAX_OBJECT_BYTES
from tensorstore_ck.log.checkpoint import checkpoint_folder
from tensorstore_ck.log.entry import EntryReader
from tensorstore_ck.log.operations import Op
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.log.store_folders import logs_in
from tensorstore_ck.log.watermark import Watermark


class BrokenLogWarning(UserWarning):
    """A log entry cannot be read: snapshots are read as of the entries before it, and nothing can be written."""


def warn_of_broken_log(url: str, n: int, trouble: BrokenLogError) -> None:
    """Warns that readers go on with what the log says up to entry `n`."""
    message = f"{url}: snapshots are read as of log entry {n}, since a later one is unreadable, and nothing can be written: {trouble}"
    warnings.warn(BrokenLogWarning(naming_store(message, url)), stacklevel=user_stacklevel())


class ChildRecord(NamedTuple):
    """A record that names a parent."""

    name: str
    root: Digest
    parent: Digest


def child_records(backend: Backend, ulids: Collection[Ulid]) -> Iterator[ChildRecord]:
    """Those of the records that can be read and name a parent."""
    for ulid in ulids:
        name = record_name(ulid)
        with suppress(DamageError, FormatVersionError):
            record = decode_record(backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
            if record.parent is not None:
                yield ChildRecord(name, record.root(), record.parent)


def sign_of_lost_log(backend: Backend, prefix: str, watermark: Watermark | None = None, ops: Sequence[Op] = ()) -> str | None:
    """The evidence that the empty log under `prefix` had entries; None without such a sign.

    Lists the records once. `watermark`: what this user has seen; `ops`: of the first entry, whose snapshots are no sign.
    """
    if watermark is not None and watermark.is_changed and (seen := watermark.last_seen()) is not None:
        return f"this user has seen its entry {seen.n} (`tsck accept-log` accepts that it is gone)"
    own = {op.fields["snapshot"] for op in ops if op.name in {"put", "staged"}}
    checkpoint = next(backend.list(checkpoint_folder(prefix)), None)
    if checkpoint is not None:
        return f"{checkpoint.name} was made from it"
    names = {ulid: info.name for info in backend.list(f"{FOLDERS['snapshot']}/") if (ulid := parse_ulid(info.name[-26:])) is not None}
    others = [ulid for ulid, name in sorted(names.items()) if ulid not in own and name == record_name(ulid)]
    child = next(child_records(backend, others), None)
    return None if child is None else f"{child.name} has the parent {child.parent.hex()[:16]}, which an entry must have named"


def without_named_parent(backend: Backend, view: RefTable, ulids: Collection[Ulid]) -> list[ChildRecord]:
    """Those of the records whose parent no entry of any log names: the log that named it was lost, and began again.

    Reads all entries only if there are records with parents that `view` does not have.
    """
    unknown = [child for child in child_records(backend, ulids) if not (view.by_root(child.root) or view.by_root(child.parent))]
    named = set(_named_roots(backend)) if unknown else ()
    return [child for child in unknown if child.parent not in named]


def _named_roots(backend: Backend) -> Iterator[bytes]:
    for prefix in logs_in(backend):
        with suppress(DamageError, FormatVersionError):
            for entries in EntryReader(backend, uuid=bytes(16), prefix=prefix).entries(0, None):
                for op in (op for entry in entries for op in entry.ops):
                    yield from (root for field in ("root", "parent") if type(root := op.fields.get(field)) is bytes)


def lost_log(name: str, url: str, sign: str) -> BrokenLogError:
    """The error for the empty log of the store at `url`; `name`: of its first entry."""
    return BrokenLogError(
        f"the log of {url} is empty, though {sign}: it was lost. Restore it from a copy; or make a new log of the snapshots that are left "
        f"with `tsck salvage -s {url}`",
        object_id=name,
    )

"""The interface of an open store, beyond its public methods, for `catalog`, `training`, `ui` and `integrations`.

They reach the engine and the session of a store through these functions alone (tests/store/test_architecture.py). Not for users: any
release may change them.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.save_progress import Stage
from tensorstore_ck.engine.interfaces import CapturedState, SnapshotContent
from tensorstore_ck.engine.opening import read_config
from tensorstore_ck.engine.read.block_reader import ReadBlocks, read_blocks
from tensorstore_ck.engine.read.snapshot_reader import open_snapshot
from tensorstore_ck.engine.write.request import LAST_SEEN, AnyHead, LastSeen
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.store_config import StoreConfig
from tensorstore_ck.log import Log, RefTable, SnapshotRow
from tensorstore_ck.log.address import Resolved
from tensorstore_ck.log.snapshot import GroupCost, Snapshot, SnapshotDetails
from tensorstore_ck.session.group.process_groups import ProcessGroups
from tensorstore_ck.session.save import SaveQueue
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.store.read_only_store import ReadOnlyStore
from tensorstore_ck.store.store import Store

if TYPE_CHECKING:
    from tensorstore_ck.maintenance.describe import SnapshotDiff


def require_opened(store: object) -> None:
    """Raises `InvalidOptionError` for the path or URL of a store, where an open one is needed."""
    if isinstance(store, str | os.PathLike):
        raise InvalidOptionError(f"{store!r} is the location of a store: pass the store itself, as tsck.open returns it", object_id="store")


# --- the log and the configuration -------------------------------------------------------------------------------------


def log_of(store: ReadOnlyStore) -> Log:
    """The commit log, to read it."""
    return store.engine.log


def config_of(store: ReadOnlyStore) -> StoreConfig:
    """The configuration of the store as it was opened."""
    return store.engine.config


def is_replaced(store: ReadOnlyStore) -> bool:
    """Whether another store, or none, is at the URL now, or a salvaged one with a new log.

    Raises:
        CorruptObjectError: the configuration there is damaged or missing.
    """
    current = read_config(store.engine.backend)
    return current is None or (current.uuid, current.log) != (store.engine.config.uuid, store.engine.config.log)


def require_location(store: ReadOnlyStore, url: str) -> None:
    """Reads the marker of a location where packs of this store lie.

    Raises:
        StoreError: the location cannot be used.
    """
    store.engine.placed.marker(url)


# --- one snapshot by its row in the log --------------------------------------------------------------------------------


def open_content(
    store: ReadOnlyStore, info: SnapshotRow, ranks: tuple[int, int] | None = None, read: ReadBlocks = read_blocks
) -> SnapshotContent:
    """The tables of a snapshot, and its blocks on demand.

    `ranks`: this rank, and how many read the snapshot: they share the rate of reads, and each begins with another part of it.
    `read`: reads the blocks.
    """
    if ranks is None:
        return open_snapshot(store.engine, info, read)
    store.engine.reads.share(ranks[1])
    return open_snapshot(store.engine, info, read, position=(ranks[0] + 0.5) / ranks[1])


def resolve(store: ReadOnlyStore, address: str, view: RefTable | None = None) -> Resolved:
    """See `Engine.resolve`."""
    return store.engine.resolve(address, view)


def read_record(store: ReadOnlyStore, info: SnapshotRow) -> Record:
    """See `Engine.read_record`."""
    return store.engine.read_record(info)


def describe_with_costs(store: ReadOnlyStore, info: SnapshotRow) -> tuple[SnapshotDetails, Mapping[str, GroupCost]]:
    """See `describe_with_costs` of `maintenance.describe`."""
    from tensorstore_ck.maintenance import describe  # noqa: PLC0415

    return describe.describe_with_costs(store.engine, info)


def diff_snapshots(store: ReadOnlyStore, old: SnapshotRow, new: SnapshotRow) -> "SnapshotDiff":
    """As `Store.diff`."""
    from tensorstore_ck.maintenance import describe  # noqa: PLC0415

    return describe.diff_snapshots(store.engine, old, new)


# --- what this handle has seen of refs ---------------------------------------------------------------------------------


def knows_ref(store: ReadOnlyStore, ref: str) -> bool:
    """Whether this handle has saved to the ref, or restored from it."""
    return store.session.fence.current(ref) is not None


def note_restored(store: ReadOnlyStore, resolved: Resolved) -> None:
    """The state in memory is this snapshot: saves to its ref continue from it."""
    store.session.fence.note_restored(resolved)


def continue_ref(store: ReadOnlyStore, ref: str, root: Digest) -> None:
    """The state in memory continues the snapshot `root`, the head of the ref."""
    store.session.fence.note(ref, root, root)


# --- ranks and saves ---------------------------------------------------------------------------------------------------


def groups_of(store: ReadOnlyStore) -> ProcessGroups:
    """The process groups of this handle, for small messages between ranks."""
    return store.session.groups


def save_context(store: ReadOnlyStore) -> SaveContext:
    """For a save whose phases another program calls: what a handle gives to its saves. `save_queue` orders it among them."""
    return store.session.context


def save_queue(store: ReadOnlyStore) -> SaveQueue:
    """The saves of this handle."""
    return store.session.queue


def write_limit_of(store: Store) -> tuple[RateLimit, Stage]:
    """The limit of this handle's writes to the store, and the stage of a save whose bytes it limits."""
    return store.engine.writes, "write" if store.engine.tier is None else "upload"


def put_captured(
    store: Store,
    captured: CapturedState,
    *,
    ref: str,
    step: int | None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, object] | None = None,
    expect: str | Snapshot | AnyHead | LastSeen | None = LAST_SEEN,
    parent: str | Snapshot | LastSeen | None = LAST_SEEN,
    made_ns: int | None = None,
) -> Snapshot:
    """`Store.put_snapshot` of an imported state, whose content and step come from the checkpoint and are not checked.

    `made_ns`: when the checkpoint was made.
    """
    return store.session.put(
        captured,
        ref,
        step=step,
        metrics=metrics,
        metadata=metadata,
        expect=expect,
        parent=parent,
        made_ns=made_ns,
        any_step=True,
        unchanged="ok",
        verify_capture=0.0,
    )

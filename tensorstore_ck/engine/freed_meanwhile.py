"""Objects that gc of any host freed while this process read them. The log is read before any object is reported as damaged."""

from collections.abc import Callable
from typing import TypeVar

from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import DamageError, MissingObjectError, SnapshotExpiredError
from tensorstore_ck.log import FOLDERS, Log, ObjectKey, RefTable, SnapshotRow

T = TypeVar("T")


def at_newest(log: Log, look: Callable[[int, RefTable], T]) -> T:
    """Calls `look` with the newest entry's number and a view of it, and again whenever gc has freed what it reads.

    Raises:
        DamageError: `look` raised it, and gc did not free that object since the view was taken.
    """
    while True:
        view = log.newest_view()
        head = view.head()
        anchor = head.n if head is not None else 0
        try:
            return look(anchor, view)
        except DamageError as exc:
            if not _is_freed(log.newest_view(), anchor, exc):
                raise


def raise_if_expired(log: Log, info: SnapshotRow, trouble: Exception) -> RefTable:
    """The newest view, if the snapshot is still held: then missing objects were relocated, or are damaged.

    Raises:
        SnapshotExpiredError: nothing holds the snapshot any more.
    """
    view = log.readable_view()
    if view.staged(info.ulid) is not None:
        if not isinstance(trouble, MissingObjectError):
            return view
        raise MissingObjectError(
            f"snapshot {info.root.hex()[:16]} (step {info.step}) is staged, and not completely on this host: {trouble}. Restore on "
            "the hosts that staged it, with group= and all their ranks, or wait until it is published",
            object_id=info.root.hex(),
        ) from trouble
    if not view.is_live(info.ulid):
        raise SnapshotExpiredError(
            f"snapshot {info.root.hex()[:16]} (step {info.step}) was forgotten, "
            "and gc freed some of it while it was read: use another snapshot",
            object_id=info.root.hex(),
        ) from trouble
    return view


def _is_freed(newest: RefTable, anchor: int, trouble: BaseException) -> bool:
    """Whether gc has freed the object of an error since entry `anchor`, or a snapshot that it belongs to has expired."""
    head = newest.head()
    if head is None or head.n <= anchor:
        return False
    if newest.horizon() > anchor:
        return True  # its tombstone may be forgotten
    cause: BaseException | None = trouble
    while cause is not None:
        state = newest.object_state(key) if (key := _key_of(cause)) is not None else None
        if isinstance(cause, SnapshotExpiredError) or (state is not None and state.swept):
            return True
        cause = cause.__cause__
    return False


def _key_of(trouble: BaseException) -> ObjectKey | None:
    name = trouble.object_id if isinstance(trouble, DamageError) else ""
    ulid = parse_ulid(name[-26:])
    keys = (ObjectKey(kind, ulid) for kind, folder in FOLDERS.items() if ulid is not None and name.startswith(f"{folder}/"))
    return next(keys, None)

"""Calls a function again after errors that may pass. If a save may have happened, reads the log first."""

import time
from collections.abc import Callable
from typing import Final, TypeVar, cast

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.retry import next_delay
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, SnapshotAbortedError, StoreError, UndecidedError
from tensorstore_ck.log import Op
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.context import SaveContext

T = TypeVar("T")

LONGEST_PAUSE_SECONDS: Final = 60.0


def retrying(context: SaveContext, call: Callable[[], T], *, attempts: int, pause_seconds: float) -> T:
    """See `Store.retrying`."""
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidOptionError(f"attempts must be a whole number from 1 on, not {attempts!r}", object_id="attempts")
    pauses = [next_delay(number, pause_seconds, LONGEST_PAUSE_SECONDS, least=1.0) for number in range(attempts - 1)]
    for pause in (*pauses, None):
        try:
            return call()
        except UndecidedError as exc:
            snapshot = _decided(context, exc, pauses)
            if snapshot is not None:
                return cast(T, snapshot)  # a save that raises UndecidedError returns a Snapshot
            if pause is None:
                gone = "a save was given up since it was not known whether it happened"
                raise SnapshotAbortedError(f"{gone}: {exc}", object_id=exc.object_id) from exc
        except StoreError as exc:
            if exc.retry != "same" or pause is None:
                raise
        time.sleep(pause)
    raise AssertionError("unreachable")


def _decided(context: SaveContext, error: UndecidedError, pauses: list[float]) -> Snapshot | None:
    """The snapshot that a save has published; None: the log says now that it never will.

    Raises:
        UndecidedError: it is still not known.
    """
    engine, txn = context.engine, Ulid(error.txn)
    if not txn or engine.single_writer or engine.tier is not None:
        raise error  # not a save; or a late write could overwrite later entries; or a staged save, which is given up in another way
    for pause in (*pauses, None):
        try:
            engine.log.append(lambda view: [] if view.outcome(txn) is not None else [Op.abort(txn)])
            info = engine.log.view().snapshot(txn)
        except (BackendUnavailableError, UndecidedError):
            if pause is None:
                raise error from None
            time.sleep(pause)
        else:
            if info is None:
                return None
            engine.note_published()
            context.fence.note(info.ref, info.root, info.root)
            return Snapshot.from_info(info)
    raise AssertionError("unreachable")

"""Watches a branch: yields each new snapshot, pinned while the caller works on it."""

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import takewhile
from typing import Final

from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.common.units import parse_seconds
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import rescue_if_expired
from tensorstore_ck.errors import BackendUnavailableError, NotFoundError, SnapshotExpiredError
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.log.snapshot import pinned_with_root

POLL_SECONDS: Final = 2.0
PIN_SECONDS: Final = 86_400.0
"""Expiry of a pin: a watcher that dies must not hold a snapshot permanently."""


def watch(
    engine: Engine,
    ref: str,
    *,
    since_step: int | None = None,
    newest_only: bool = False,
    owner: str | None = None,
    pin_for: float | str | None = PIN_SECONDS,
    poll_seconds: float = POLL_SECONDS,
    sleep: Callable[[float], object] = time.sleep,
    until: Callable[[], bool] = lambda: False,
) -> Generator[SnapshotRow]:
    """See `Store.watch`. `sleep` is for tests."""
    validate_ref_name(ref)  # the branch need not exist yet: without this, an invalid name would be waited for
    if pin_for is not None:
        engine.require_writable("watch() with pins (pin_for=None has none)")
    owner = owner or f"watch {ulid_text(engine.new_id())}"
    seconds = None if pin_for is None else parse_seconds(pin_for, "pin_for")
    seen_n = engine.log.sync().n
    new = [] if since_step is None else _put_after(engine.log.view(), ref, 0)
    new = [info for info in new if info.step is not None and since_step is not None and info.step >= since_step]
    while not until():
        with suppress(BackendUnavailableError):
            view = engine.log.newest_view()
            head = view.head()
            new += _put_after(view, ref, seen_n)
            seen_n = head.n if head is not None else seen_n
        for info in new[-1:] if newest_only else new:
            if seconds is None:
                yield info
                continue
            if not _pin(engine, info, owner, engine.clock() + int(seconds * 1e9)):
                continue
            try:
                yield info
            finally:
                _unpin(engine, info, owner)
        if not new:
            sleep(poll_seconds)
        new = []


def _put_after(view: RefTable, ref: str, n: int) -> list[SnapshotRow]:
    """Snapshots put to a branch after entry `n`, oldest first; earlier history is not read."""
    moves = takewhile(lambda move: move.n > n, view.moves(ref))
    published = [info for move in moves if move.op == "put" and (info := view.snapshot(move.ulid)) is not None]
    return published[::-1]


def _pin(engine: Engine, info: SnapshotRow, owner: str, expires_ns: int) -> bool:
    def build(view: RefTable) -> list[Op]:
        if not view.is_live(info.ulid):
            raise SnapshotExpiredError(f"snapshot {info.root.hex()[:16]} has expired", object_id=info.root.hex())
        return [Op.pin(info.root, owner, "watched", expires_ns), *rescue_if_expired(engine, view, info)]

    try:
        engine.log.append(build)
    except SnapshotExpiredError:
        return False
    return True


def _unpin(engine: Engine, info: SnapshotRow, owner: str) -> None:
    with suppress(NotFoundError):  # the pin has expired
        engine.log.append(lambda view: [Op.unpin(ulid, owner, view) for ulid in pinned_with_root(view, info, owner)])

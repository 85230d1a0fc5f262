"""The second step of a staged save of one process: uploads and publishes it, waiting while the store does not answer.

It is given up only if it can never be published. After any other error it stays on the disk for the next process.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.errors import (
    ConflictError,
    CorruptObjectError,
    MissingObjectError,
    RetryableError,
    SnapshotAbortedError,
    SnapshotDroppedError,
    SnapshotExpiredError,
    StoreError,
)
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.publish_order import PublishedInOrder
from tensorstore_ck.session.save.put_status import PutStatus
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.publish import give_up, publish_staged
from tensorstore_ck.session.staging.stage import announce

_FINAL: Final = (ConflictError, SnapshotAbortedError, SnapshotExpiredError, CorruptObjectError, MissingObjectError)
"""After these it can never be published."""


class PublishStaged(PublishedInOrder):
    """One staged save, by the process that staged it or by one that found it."""

    def __init__(self, context: SaveContext, tier: StagingTier, manifests: Sequence[Manifest]) -> None:
        """`manifests`: of all ranks, that of rank 0 first."""
        first, lead = manifests[0], manifests[0].lead
        assert lead is not None
        super().__init__(context, first.txn, first.ref, first.step)
        self._tier = tier
        self._manifests = manifests
        self._lead = lead

    def announce_soon(self) -> None:
        """Appends to the log that it is staged. If that fails, `publish` does it."""
        with suppress(StoreError):
            announce(self._context.engine, self._lead, self._txn, self._ref)

    def is_given_up_alone(self, status: PutStatus) -> bool:
        """See `PublishedInOrder`."""
        return bool(status.dropped)

    def publish_one(self, status: PutStatus) -> SnapshotInfo:
        """See `PublishedInOrder`."""
        engine, txn, retry_until_dropped = self._context.engine, self._txn, self._context.retry_until_dropped
        try:
            status.check()
            staged_n = retry_until_dropped(status, "the log entry of what was staged", lambda: announce(engine, self._lead, txn, self._ref))
            for manifest in self._manifests if staged_n is not None else ():
                self._context.upload(status, self._tier, manifest, status.check)
            attempt = engine.new_id()
            with status.meter.timed("commit"):
                info = retry_until_dropped(status, "publishing", lambda: publish_staged(engine, self._lead, txn, attempt, self._ref))
        except SnapshotDroppedError:
            if status.dropped != "abandoned":
                self._give_up(status)
            raise
        except _FINAL:
            self._give_up(status)
            raise
        except StoreError as exc:
            exc.add_note(
                "(it stays on the staging disk; the next save to this ref, or process that opens the store with that disk, publishes it)"
            )
            raise
        self._context.published(self._ref, txn, info.root)
        self.ended()
        self._context.clean_up(self._tier, self._manifests, status, published=True)
        return info

    def _give_up(self, status: PutStatus) -> None:
        """Notes in the log, if it answers, that it will never be published, and frees the disk."""
        try:
            give_up(self._context.engine, self._txn)
        except RetryableError as exc:  # the log still lists it as staged: see `tsck staging`
            self._context.retried(status, "giving up what was staged", exc, 0.0)
        self.ended()
        self._context.clean_up(self._tier, self._manifests, status, published=False)

"""The staged saves of one ref are published in the order in which they were staged.

A save whose publication failed for now (no space for its journal, expired credentials, a missing rank) stays on the staging disk. The next
save of the ref publishes it first, and fails if that fails again: once a later save is published, the earlier one no longer fits the ref.
"""

import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.errors import StoreError
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.put_status import PutStatus

_logger: Final = logging.getLogger("tensorstore_ck")


class PublishedInOrder(ABC):
    """A staged save that is neither published nor given up."""

    def __init__(self, context: SaveContext, txn: Ulid, ref: str, step: int | None) -> None:
        """From now on, later saves of this handle to the ref wait for it."""
        self._context = context
        self._txn = txn
        self._ref = ref
        self._step = step
        self._unpublished = context.unpublished.setdefault(ref, [])
        self._unpublished.append(self)

    def publish(self, status: PutStatus) -> SnapshotInfo:
        """Publishes the saves that were staged on the ref before it, and then uploads and publishes this one.

        Raises:
            SnapshotDroppedError: it was cancelled; or it was abandoned, and stays on the disk for the next process.
            ConflictError: the ref is elsewhere: it is given up.
            StoreError: it is given up; or it, or an earlier one, cannot be published now, and stays on the disk: see the error's notes.
        """
        waiting = list(self._unpublished)
        for earlier in waiting[: waiting.index(self) if self in waiting else 0]:
            if self.is_given_up_alone(status):
                break
            try:
                earlier.publish_before(status)
            except StoreError:
                if not self.is_given_up_alone(status):
                    raise
        return self.publish_one(status)

    @abstractmethod
    def publish_one(self, status: PutStatus) -> SnapshotInfo:
        """Uploads and publishes this one; raises as `publish`."""

    @abstractmethod
    def is_given_up_alone(self, status: PutStatus) -> bool:
        """Whether it was asked to give up, and can do so without other saves or ranks."""

    def publish_before(self, later: PutStatus) -> None:
        """Publishes it, or gives it up if it can never be published, so that the `later` save can go on.

        Raises:
            StoreError: it still cannot be published.
        """
        own = PutStatus(self._ref, self._step, later.rank)

        def abandon() -> None:
            """If the later save is cancelled, this one stays on the disk."""
            if self.is_given_up_alone(later):
                own.drop("abandoned")

        later.on_drop(abandon)
        abandon()
        try:
            self.publish_one(own)
        except StoreError as exc:
            if self in self._unpublished:
                exc.add_note(f"({own} was staged before {later}, and is published first)")
                raise
            _logger.error("%s was staged, and will not be published: %s", own, exc)
        else:
            _logger.info("published %s, which was staged before %s", own, later)

    def ended(self) -> None:
        """Removes it from the order: it is published or given up."""
        self._context.chain(self._ref).remove(self._txn)
        with suppress(ValueError):
            self._unpublished.remove(self)

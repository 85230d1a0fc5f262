"""A save that is staged. One phase is left, to publish it, which waits while the store does not answer.

The staged saves of one ref are published in the order in which they were staged. One is given up only if it can never be published
(`outcome.can_never_be_published`). If its publication failed for now (no space for its journal, expired credentials, a missing rank), it
stays on the staging disk. The next save of the ref publishes it first, and fails if that fails again: once a later save is published, the
earlier one no longer fits the ref. Another process may do the same at the same time: the log has one of their entries, and both learn it.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from tensorstore_ck.backend.staging.unsent_file import StagedDamageError
from tensorstore_ck.common.retry import next_delay
from tensorstore_ck.errors import BackendUnavailableError, SnapshotDroppedError, SnapshotExpiredError, StoreError, UndecidedError
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.save.context import LONGEST_PAUSE_SECONDS, SaveContext
from tensorstore_ck.session.save.publish_rounds import PublishRounds
from tensorstore_ck.session.save.save_status import SaveStatus
from tensorstore_ck.session.save.staged_upload import StagedUpload
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.outcome import can_never_be_published
from tensorstore_ck.session.staging.staged_entries import clean_up, give_up

if TYPE_CHECKING:
    from tensorstore_ck.session.peers import Replicator
    from tensorstore_ck.session.save.save import Save

_logger: Final = logging.getLogger("tensorstore_ck")
_STAYS: Final = "(it stays on the staging disk; the next save to this ref, or process that opens the store with that disk, publishes it)"


class StagedSave:
    """One staged save, in the process that staged it or in one that found it on the disk."""

    key = b""

    def __init__(
        self,
        context: SaveContext,
        upload: StagedUpload,
        publisher: "Publisher",
        step: int | None,
        *,
        source: "Save | None" = None,
        replicator: "Replicator | None" = None,
        copies: Sequence[Manifest] = (),
    ) -> None:
        """Makes later saves of this handle to the ref wait for it.

        `source` stages the state again if the disk damaged it, and is None if the state is gone. `replicator` keeps copies of its files on
        other hosts. `copies`: of the files of other ranks, on this disk; they are deleted in the end.
        """
        self.ref, self.step, self.rank = upload.ref, step, publisher.rank
        self.is_alone = publisher.is_alone
        self._context = context
        self._upload = upload
        self._publisher = publisher
        self._source = source
        self._replicator = replicator
        self._copies = copies
        self._chain = context.fence.chain(self.ref)
        self._chain.line_up(self)

    def announce_soon(self) -> None:
        """Appends to the log that it is staged. If that fails, `publish` does it."""
        with suppress(StoreError):
            self._context.contact.ask(self._upload.announce)

    def replicate(self, status: SaveStatus) -> None:
        """Copies the staged files to other hosts, if that is wanted; never fails."""
        if self._replicator is None:
            return

        def warn(text: str) -> None:
            _logger.warning("rank %d: a copy of the staged files of %s is missing: %s", self.rank, status, text)

        (manifest,) = self._upload.manifests
        try:
            self._replicator.exchange(manifest.txn, manifest.encode(), manifest.names, warn=warn)
        except StoreError as exc:
            warn(str(exc))

    def publish(self, status: SaveStatus) -> SnapshotRow:
        """Publishes the saves that were staged on the ref before it, and then uploads and publishes this one.

        Raises:
            SnapshotDroppedError: it was cancelled; or it was abandoned, and stays on the disk for the next process.
            ConflictError: the ref is elsewhere: it is given up.
            StoreError: it is given up; or it, or an earlier one, cannot be published now, and stays on the disk: see the error's notes.
        """
        try:
            return self._publish_in_order(status)
        except StoreError as exc:
            raise self._context.explained(exc)  # noqa: B904 - it has its cause

    def _publish_in_order(self, status: SaveStatus) -> SnapshotRow:
        source, self._source = self._source, None  # if it stays on the disk, it must not keep the state in memory
        for earlier in self._chain.unpublished(before=self):
            if self._publisher.gives_up_alone(status):
                break
            try:
                earlier.publish_before(status)
            except StoreError:
                if not self._publisher.gives_up_alone(status):
                    raise
        try:
            return self._publish_one(status)
        except StagedDamageError:
            if source is None:
                raise
        outcome = source.run(status)
        assert isinstance(outcome, StagedSave)
        outcome._source = None  # once
        return outcome.publish(status)

    def publish_before(self, later: SaveStatus) -> None:
        """Publishes it, or gives it up if it can never be published, so that the `later` save can go on.

        Raises:
            StoreError: it still cannot be published.
        """
        own = SaveStatus(self.ref, self.step, later.rank)

        def abandon() -> None:
            """If the later save is cancelled, this one stays on the disk."""
            if self._publisher.gives_up_alone(later):
                own.drop("abandoned")

        later.on_drop = abandon
        abandon()
        try:
            self._publish_one(own)
        except StoreError as exc:
            if self in self._chain.unpublished():
                exc.add_note(f"({own} was staged before {later}, and is published first)")
                raise
            _logger.error("%s was staged, and will not be published: %s", own, exc)
        else:
            _logger.info("published %s, which was staged before %s", own, later)

    def _publish_one(self, status: SaveStatus) -> SnapshotRow:
        self._context.contact.upload_moved()
        outcome = self._publisher.publish(status)
        published = outcome if isinstance(outcome, SnapshotRow) else None
        self._end(status, published)
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def _end(self, status: SaveStatus, published: SnapshotRow | None) -> None:
        """Removes an ended save from the order, and frees the disk. Errors of the disk do not change how the save ended."""
        upload = self._upload
        if published is not None:
            self._context.fence.note_published(self.ref, published.root)
        self._chain.remove(upload.txn)
        self._chain.leave(self)
        try:
            for manifest in upload.manifests:
                clean_up(upload.tier, manifest, published=published is not None, needed=self._chain.needed(upload.txn))
        except StoreError as exc:
            how = "published" if published is not None else "given up"
            _logger.warning("%s is %s; the next process that opens the store with this staging disk frees its files: %s", status, how, exc)
        for manifest in self._copies:  # as copies for a lost host, or because both ranks share the disk
            clean_up(upload.tier, manifest, published=False)
        if self._replicator is not None:
            with suppress(StoreError):  # the next process that opens the store with this disk deletes them
                self._replicator.forget(upload.txn)


class PublishAlone:
    """A process that publishes a staged save without others."""

    is_alone, rank = True, 0

    def __init__(self, context: SaveContext, upload: StagedUpload) -> None:
        self._context = context
        self._upload = upload

    def gives_up_alone(self, status: SaveStatus) -> bool:
        """Whether it was asked to give up, and can do so without other saves or ranks."""
        return bool(status.dropped)

    def publish(self, status: SaveStatus) -> SnapshotRow | StoreError:
        """Uploads and publishes it; returns the snapshot, or the error for which it was given up.

        Raises:
            StoreError: it stays on the disk.
        """
        retry_until_dropped = self._context.retry_until_dropped
        try:
            status.check()
            is_staged = retry_until_dropped(status, "the log entry of what was staged", self._upload.announce) is not None
            return self._upload_and_append(status, is_staged=is_staged)
        except StoreError as exc:
            is_cancelled = isinstance(exc, SnapshotDroppedError) and status.dropped != "abandoned"
            names = {name for manifest in self._upload.manifests for name in manifest.names}
            if is_cancelled or can_never_be_published(exc, names):
                is_damage = isinstance(exc, StagedDamageError)
                error = StagedDamageError(f"the save of {status} is lost: {exc}", object_id=exc.object_id) if is_damage else exc
                return self._give_up(status, error, is_cancelled=is_cancelled)
            if not isinstance(exc, SnapshotDroppedError):
                exc.add_note(_STAYS)
            raise

    def _upload_and_append(self, status: SaveStatus, *, is_staged: bool) -> SnapshotRow:
        """Uploads and publishes it. Repeats that under new names whenever gc frees something of it before it is published.

        Raises:
            SnapshotExpiredError: gc freed blocks that are not on this disk.
        """
        context, upload = self._context, self._upload
        for attempt in count():
            try:
                if is_staged:
                    upload.upload(status, status.check)
                txn = context.engine.new_id()
                with status.meter.timed("commit"):
                    return context.retry_until_dropped(status, "publishing", lambda txn=txn: upload.append(txn))  # type: ignore[misc]
            except SnapshotExpiredError as exc:
                if upload.is_lost:
                    raise
                delay = next_delay(attempt, 0.5, LONGEST_PAUSE_SECONDS)
                context.retried(status, "publishing", exc, delay)
                status.pause(delay)
        raise AssertionError("unreachable")

    def _give_up(self, status: SaveStatus, error: StoreError, *, is_cancelled: bool) -> SnapshotRow | StoreError:
        """Notes in the log that it will never be published; returns the snapshot if another process published it, else `error`."""
        try:
            return give_up(self._context.engine, self._upload.txn) or error
        except (BackendUnavailableError, UndecidedError) as exc:  # the log still lists it as staged: see `tsck staging`
            self._context.retried(status, "giving up what was staged", exc, 0.0)
            if is_cancelled:
                return error
            error.add_note(_STAYS)
            raise error from exc


Publisher = PublishAlone | PublishRounds
"""How a staged save is published. `PublishAlone` documents the methods of both."""

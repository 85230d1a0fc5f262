"""The second step of a staged save: uploads and publishes it, waiting while the store does not answer.

The staged saves of one ref are published in the order in which they were staged. One is given up only if it can never be published
(`outcome.can_never_be_published`). If its publication failed for now (no space for its journal, expired credentials, a missing rank), it
stays on the staging disk. The next save of the ref publishes it first, and fails if that fails again: once a later save is published, the
earlier one no longer fits the ref. Another process may do the same at the same time: the log has one of their entries, and both learn it.
"""

import logging
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final

from tensorstore_ck.backend.staging.unsent_file import StagedDamageError
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.retry import next_delay
from tensorstore_ck.errors import RetryableError, SnapshotDroppedError, SnapshotExpiredError, StoreError
from tensorstore_ck.format.record import record_name
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.save.context import LONGEST_PAUSE_SECONDS, SaveContext
from tensorstore_ck.session.save.put_status import PutStatus
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.outcome import can_never_be_published
from tensorstore_ck.session.staging.publish import clean_up, give_up, publish_staged
from tensorstore_ck.session.staging.renew import RenewedParts, anchor_of, draw_names, is_lost, write_parts
from tensorstore_ck.session.staging.stage import announce

_logger: Final = logging.getLogger("tensorstore_ck")
_STAYS: Final = "(it stays on the staging disk; the next save to this ref, or process that opens the store with that disk, publishes it)"


class PublishStaged:
    """One staged save, by the process that staged it or by one that found it: see `StagedPut`.

    `PublishStagedGroup` overrides what the ranks of a group must agree on.
    """

    number = rank = 0
    is_alone = True
    """Whether this process can publish it without others."""

    def __init__(
        self,
        context: SaveContext,
        txn: Ulid,
        ref: str,
        step: int | None,
        manifests: Sequence[Manifest],
        *,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """From now on, later saves of this handle to the ref wait for it.

        `manifests`: what this process uploads. `on_end` is called when the snapshot is published or given up.
        """
        assert context.engine.tier is not None
        self.ref, self.step = ref, step
        self._context = context
        self._txn = txn
        self._tier = context.engine.tier
        self._manifests = manifests
        self._lead = next((each.lead for each in manifests if each.lead is not None), None)
        self._anchors: dict[int, int] = {}
        """Rank -> the log entry under which its objects have the names that they have now."""
        self._renewed: dict[int, RenewedParts] = {}
        """Rank -> its parts, if they have new names."""
        self._on_end = on_end
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
            if self._is_given_up_alone(status):
                break
            try:
                earlier.publish_before(status)
            except StoreError:
                if not self._is_given_up_alone(status):
                    raise
        return self._publish_one(status)

    def publish_before(self, later: PutStatus) -> None:
        """Publishes it, or gives it up if it can never be published, so that the `later` save can go on.

        Raises:
            StoreError: it still cannot be published.
        """
        own = PutStatus(self.ref, self.step, later.rank)

        def abandon() -> None:
            """If the later save is cancelled, this one stays on the disk."""
            if self._is_given_up_alone(later):
                own.drop("abandoned")

        later.on_drop(abandon)
        abandon()
        try:
            self._publish_one(own)
        except StoreError as exc:
            if self in self._unpublished:
                exc.add_note(f"({own} was staged before {later}, and is published first)")
                raise
            _logger.error("%s was staged, and will not be published: %s", own, exc)
        else:
            _logger.info("published %s, which was staged before %s", own, later)

    def announce_soon(self) -> None:
        """Appends to the log that it is staged. If that fails, `publish` does it."""
        with suppress(StoreError):
            self._announce()

    # --- what ranks do differently ------------------------------------------------------------------------------------

    def _is_given_up_alone(self, status: PutStatus) -> bool:
        """Whether it was asked to give up, and can do so without other saves or ranks."""
        return bool(status.dropped)

    def _publish_one(self, status: PutStatus) -> SnapshotInfo:
        """Uploads and publishes this one; raises as `publish`."""
        retry_until_dropped = self._context.retry_until_dropped
        try:
            status.check()
            is_staged = retry_until_dropped(status, "the log entry of what was staged", self._announce) is not None
            info = self._upload_and_append(status, is_staged=is_staged)
        except StoreError as exc:
            is_cancelled = isinstance(exc, SnapshotDroppedError) and status.dropped != "abandoned"
            names = {name for manifest in self._manifests for name in manifest.names}
            if is_cancelled or can_never_be_published(exc, names):
                is_damage = isinstance(exc, StagedDamageError)
                error = StagedDamageError(f"the save of {status} is lost: {exc}", object_id=exc.object_id) if is_damage else exc
                return self._give_up(status, error, is_cancelled=is_cancelled)
            if not isinstance(exc, SnapshotDroppedError):
                exc.add_note(_STAYS)
            raise
        self._end(status, info)
        return info

    def _upload_and_append(self, status: PutStatus, *, is_staged: bool) -> SnapshotInfo:
        """Uploads and publishes it, again under new names whenever gc frees something of it before it is published.

        Raises:
            SnapshotExpiredError: gc freed blocks that are not on this disk.
        """
        context = self._context
        for attempt in count():
            try:
                if is_staged:
                    self._upload(status, status.check)
                append = partial(self._append, context.engine.new_id())
                with status.meter.timed("commit"):
                    return context.retry_until_dropped(status, "publishing", append)
            except SnapshotExpiredError as exc:
                if is_lost(context.engine, self._tier.folder, self._manifests, self._lead):
                    raise
                delay = next_delay(attempt, 0.5, LONGEST_PAUSE_SECONDS)
                context.retried(status, "publishing", exc, delay)
                status.pause(delay)
        raise AssertionError("unreachable")

    def _give_up(self, status: PutStatus, error: StoreError, *, is_cancelled: bool) -> SnapshotInfo:
        """Notes in the log that it will never be published, and frees the disk; returns the snapshot if another process published it.

        Raises:
            StoreError: `error`, if it is not published.
        """
        try:
            published = give_up(self._context.engine, self._txn)
        except RetryableError as exc:  # the log still lists it as staged: see `tsck staging`
            self._context.retried(status, "giving up what was staged", exc, 0.0)
            if not is_cancelled:
                error.add_note(_STAYS)
                raise error from exc
            published = None
        self._end(status, published)
        if published is None:
            raise error
        return published

    # --- shared with ranks --------------------------------------------------------------------------------------------

    def _announce(self) -> int | None:
        assert self._lead is not None
        return announce(self._context.engine, self._lead, self._txn, self.ref)

    def _upload(self, status: PutStatus, stop: Callable[[], None]) -> None:
        """Uploads what the manifests name, under names that can be published; objects that the store has are not sent again."""
        window, spread = self._tier.options.stagger_seconds, zlib.crc32(self.ref.encode()) / (1 << 32)
        for manifest in self._manifests:
            status.meter.expect("upload", manifest.size_bytes)
            status.pause(window * (manifest.rank / manifest.ranks + spread) % window if window else 0.0)
            taken = self._upload_of(manifest, (), status, stop)
            while taken:
                taken = self._upload_of(manifest, taken, status, stop)

    def _upload_of(self, manifest: Manifest, taken: Collection[str], status: PutStatus, stop: Callable[[], None]) -> list[str]:
        """Uploads what one rank staged; returns the objects that need another name, as `taken` of the try before."""
        engine, folder, meter, rank = self._context.engine, self._tier.folder, status.meter, manifest.rank
        if rank not in self._anchors:
            self._anchors[rank] = anchor_of(engine, manifest)
        is_renewed = draw_names(engine, folder, manifest, taken=taken, anchor=self._anchors[rank])
        is_renewed |= rank in self._renewed
        if is_renewed:
            head = engine.log.view().head()
            self._anchors[rank] = head.n if head is not None else 0
        upload = partial(
            self._tier.uploader.upload,
            [name for name in manifest.names if not is_renewed or name.startswith("packs/")],
            stop=stop,
            on_bytes=lambda size: meter.count("upload", size),
            on_retry=lambda exc, seconds: self._context.retried(status, "an upload", exc, seconds),
        )
        with meter.timed("upload"):
            try:
                taken = upload()
            except StagedDamageError as exc:
                if self._lead is None or exc.object_id != record_name(self._txn):
                    raise
                self._tier.uploader.replace(exc.object_id, self._lead.record)  # the manifest has it, too
                taken = upload()
        if is_renewed and not taken:
            self._renewed[rank] = self._context.retry_until_dropped(
                status, "writing what was staged under a new name", lambda: write_parts(engine, folder, [manifest])
            )
        return taken

    def _append(self, attempt: Ulid) -> SnapshotInfo:
        """Appends the log entry that publishes it."""
        assert self._lead is not None
        parts = [self._renewed[rank].applied(each) if rank in self._renewed else each for rank, each in enumerate(self._lead.parts)]
        renewed = parts if self._renewed else None
        return publish_staged(self._context.engine, self._lead, self._txn, attempt, self.ref, renewed=renewed)

    def _end(self, status: PutStatus, published: SnapshotInfo | None) -> None:
        """It is published or given up: removes it from the order, and frees the disk, whose errors do not change how the save ended."""
        fence, chain = self._context.fence, self._context.chain(self.ref)
        if published is not None:
            fence.note_published(self.ref, published.root)
        chain.remove(self._txn)
        with suppress(ValueError):
            self._unpublished.remove(self)
        try:
            for manifest in self._manifests:
                clean_up(self._tier, manifest, published=published is not None, needed=chain.needed(self._txn))
        except StoreError as exc:
            how = "published" if published is not None else "given up"
            _logger.warning("%s is %s; the next process that opens the store with this staging disk frees its files: %s", status, how, exc)
        self._on_end()

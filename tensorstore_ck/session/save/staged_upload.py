"""What one process uploads of a staged save, under names that can be published, and the log entries that say so."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from tensorstore_ck.backend.staging.unsent_file import StagedDamageError
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.stagger import stagger_delay
from tensorstore_ck.engine.write.publish import RankParts
from tensorstore_ck.format.record import record_name
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.save_status import SaveStatus
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.renew import RenewedParts, anchor_of, draw_names, is_lost, write_parts
from tensorstore_ck.session.staging.staged_entries import announce, publish_staged


class StagedUpload:
    """The files of one staged save that lie on this disk, by their manifests."""

    def __init__(self, context: SaveContext, txn: Ulid, ref: str, manifests: Sequence[Manifest]) -> None:
        assert context.engine.tier is not None
        self.txn, self.ref = txn, ref
        self.tier = context.engine.tier
        self.manifests = manifests
        self.lead = next((manifest.lead for manifest in manifests if manifest.lead is not None), None)
        self.renewed: dict[int, RenewedParts] = {}
        """Rank -> its parts, if they have new names."""
        self._context = context
        self._anchors: dict[int, int] = {}
        """Rank -> the log entry under which its objects have the names that they have now."""

    @property
    def is_lost(self) -> bool:
        """Whether blocks that the save needs are neither on this disk nor kept by the store."""
        return is_lost(self._context.engine, self.tier.folder, self.manifests, self.lead)

    def announce(self) -> int | None:
        """Appends to the log that it is staged: see `staged_entries.announce`."""
        assert self.lead is not None
        return announce(self._context.engine, self.lead, self.txn, self.ref)

    def upload(self, status: SaveStatus, stop: Callable[[], None]) -> None:
        """Uploads what the manifests name, under names that can be published; objects that the store has are not sent again."""
        engine = self._context.engine
        engine.limit_writes(engine.log.view(), self.ref)
        for manifest in self.manifests:
            status.meter.expect("upload", manifest.size_bytes)
            status.pause(stagger_delay(self.tier.options.stagger_seconds, self.ref, manifest.rank, manifest.ranks))
            taken = self._upload_of(manifest, (), status, stop)
            while taken:
                taken = self._upload_of(manifest, taken, status, stop)

    def _upload_of(self, manifest: Manifest, taken: Collection[str], status: SaveStatus, stop: Callable[[], None]) -> list[str]:
        """Uploads what one rank staged; returns the objects that need another name, as `taken` of the try before."""
        engine, folder, meter, rank = self._context.engine, self.tier.folder, status.meter, manifest.rank
        if rank not in self._anchors:
            self._anchors[rank] = anchor_of(engine, manifest)
        is_renewed = draw_names(engine, folder, manifest, taken=taken, anchor=self._anchors[rank])
        is_renewed |= rank in self.renewed
        if is_renewed:
            head = engine.log.view().head()
            self._anchors[rank] = head.n if head is not None else 0

        def count(size: int) -> None:
            meter.count("upload", size)
            if size > 0:
                self._context.contact.upload_moved()

        upload = partial(
            self.tier.uploader.upload,
            [name for name in manifest.names if not is_renewed or name.startswith("packs/")],
            stop=stop,
            on_bytes=count,
            on_retry=lambda exc, seconds: self._context.retried(status, "an upload", exc, seconds),
        )
        with meter.timed("upload"):
            try:
                taken = upload()
            except StagedDamageError as exc:
                if self.lead is None or exc.object_id != record_name(self.txn):
                    raise
                self.tier.uploader.replace(exc.object_id, self.lead.record)  # the manifest has it, too
                taken = upload()
        if is_renewed and not taken:
            self.renewed[rank] = self._context.retry_until_dropped(
                status, "writing what was staged under a new name", lambda: write_parts(engine, folder, [manifest])
            )
        return taken

    def parts(self) -> list[RankParts]:
        """The parts of all ranks, by their newest names."""
        assert self.lead is not None
        return [self.renewed[rank].applied(part) if rank in self.renewed else part for rank, part in enumerate(self.lead.parts)]

    def append(self, attempt: Ulid) -> SnapshotRow:
        """Appends the log entry that publishes it."""
        assert self.lead is not None
        renewed = self.parts() if self.renewed else None
        return publish_staged(self._context.engine, lead=self.lead, txn=self.txn, attempt=attempt, ref=self.ref, renewed=renewed)

"""The second step of a put of one process: what was staged is uploaded and published, however long the store does not answer."""

from contextlib import suppress

from tensorstore_ck.errors import RetryableError, SnapshotDroppedError, StoreError
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.saving.course import Course
from tensorstore_ck.saving.handle import Handle
from tensorstore_ck.staging.manifest import Manifest
from tensorstore_ck.staging.publish import clean_up, give_up, publish
from tensorstore_ck.staging.stage import announce
from tensorstore_ck.tiers import Tier


class StagedPut:
    """One staged put, by the process that staged it or by one that found it."""

    def __init__(self, handle: Handle, tier: Tier, manifest: Manifest) -> None:
        """`manifest` is that of the only rank."""
        assert manifest.lead is not None
        self._handle = handle
        self._tier = tier
        self._manifest = manifest
        self._lead = manifest.lead

    def announce_soon(self) -> None:
        """Has the log say that it is staged; if the store does not answer, `publish` will."""
        with suppress(RetryableError):
            announce(self._handle.engine, self._lead, self._manifest.txn, self._manifest.ref)

    def publish(self, course: Course) -> SnapshotInfo:
        """Uploads and publishes it.

        Raises:
            SnapshotDroppedError: it was cancelled; or abandoned, and stays on the disk for the next process.
            ConflictError: the ref is elsewhere: it is given up.
        """
        engine, manifest, txn = self._handle.engine, self._manifest, self._manifest.txn
        try:
            self._handle.patiently(course, "the log entry of what was staged", lambda: announce(engine, self._lead, txn, manifest.ref))
            self._handle.upload(course, self._tier, manifest, course.check)
            attempt = engine.new_id()
            with course.meter.timed("commit"):
                self._handle.patiently(course, "publishing", lambda: publish(engine, self._lead, txn, attempt, manifest.ref))
        except SnapshotDroppedError:
            if course.dropped != "abandoned":
                self._give_up(course)
            raise
        except StoreError:
            self._give_up(course)
            raise
        info = engine.log.view().snapshot(txn)
        assert info is not None
        self._handle.published(manifest.ref, txn, info.root)
        clean_up(self._tier, manifest, published=True)
        return info

    def _give_up(self, course: Course) -> None:
        """It will never be published: the log says so, if it answers, and the disk is freed."""
        manifest, chain = self._manifest, self._handle.chain(self._manifest.ref)
        try:
            give_up(self._handle.engine, self._lead, manifest.txn)
        except RetryableError as exc:
            self._handle.retried(
                course, "giving up what was staged", exc, 0.0
            )  # whoever looks through the log finds it: see `tsck staging`
        chain.remove(manifest.txn)
        clean_up(self._tier, manifest, published=False, needed=chain.needed(manifest.txn))

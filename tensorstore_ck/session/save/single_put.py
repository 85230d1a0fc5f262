"""A put of one process. Knows torch, loaded by whoever has tensors to put."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from tensorstore_ck.common.threads import cpu_threads
from tensorstore_ck.engine.write.publish import check_expected
from tensorstore_ck.engine.write.put import put
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.errors import BackendUnavailableError, NoSpaceError, StoreError
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.ref_fence import PutOptions
from tensorstore_ck.session.save.context import SaveContext, frozen_bytes
from tensorstore_ck.session.save.out_of_space import freeable_said
from tensorstore_ck.session.save.publish_staged import PublishStaged
from tensorstore_ck.session.save.put_protocol import Admission
from tensorstore_ck.session.save.put_status import PutStatus
from tensorstore_ck.session.staging.stage import stage_alone
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.capture_copy import Slot, copied_bytes, copy_captured


class SinglePut:
    """See `Job`."""

    rank = 0
    patience_seconds = None

    def __init__(self, handle: SaveContext, number: int, asked: PutOptions, state: object, frozen: Sequence[str]) -> None:
        """Takes the state apart.

        Raises:
            UnsupportedValueError: something in it cannot be stored.
        """
        self.number = number
        self.ref, self.step = asked.ref, asked.step
        self._handle = handle
        self._asked = asked
        self._captured = handle.frozen.mark(capture(state), frozen)
        self.needed_bytes = copied_bytes(self._captured, self._captured.frozen)
        self.frozen_bytes = frozen_bytes(self._captured)
        self._staged: PublishStaged | None = None

    def prepare(self) -> None:
        """The state was taken apart already."""

    def check_known(self) -> None:
        """Refuses what cannot be published by what this host knows of the log, if nothing is under way on this handle.

        Raises:
            ConflictError: the ref is not where it must be.
            InvalidOptionError: see `RefFence.check_step`.
        """
        view = self._handle.engine.log.view()
        self._handle.seen.check_step(self._handle.engine, view, self._asked)
        check_expected(self._handle.engine, view, self.ref, self._handle.seen.expected(view, self.ref, self._asked.expect))

    def agree(self, decide: Callable[[], Admission]) -> Admission:
        """Nobody else is asked."""
        return decide()

    def leave(self) -> None:
        """Nobody else is told."""

    def refuse(self, error: BaseException) -> None:
        """Nobody else is told."""

    def hold(self, slot: Slot) -> None:
        """Copies the state."""
        sampling, self._asked = self._asked.sampling_of_copies(self.number)
        self._captured = copy_captured(self._captured, slot, skip=self._captured.frozen, threads=cpu_threads(), sampling=sampling)

    def run(self, course: PutStatus) -> SnapshotInfo | None:
        """Stores it, on the staging disk where there is one."""
        with freeable_said(self._handle.engine):
            return self._run(course)

    def _run(self, course: PutStatus) -> SnapshotInfo | None:
        course.check()
        engine, seen, tier = self._handle.engine, self._handle.seen, self._handle.engine.tier
        course.meter.expect("hash", self._captured.logical_bytes)
        self._make_room(course)
        if tier is not None:
            staged = stage_alone(engine, tier, self._captured, self._request, chain=self._handle.chain(self.ref), meter=course.meter)
            seen.note_staged(self.ref, staged.info.root)
            self._staged = PublishStaged(self._handle, tier, [staged.manifest])
            self._staged.announce_soon()
            return None
        request = seen.as_of_now(engine, self._asked)
        check_expected(engine, engine.log.view(), request.ref, request.expect)
        info = put(engine, self._captured, request, course.meter)
        self._handle.note_speed(course)
        seen.note(self.ref, info.root, info.root)
        return info

    def replicate(self, course: PutStatus) -> None:
        """There are no others."""

    def publish(self, course: PutStatus) -> SnapshotInfo:
        """Uploads what was staged, and publishes it."""
        assert self._staged is not None
        return self._staged.publish(course)

    def _make_room(self, course: PutStatus) -> None:
        """See `SaveContext.make_room`. What could not be published before takes room until it is."""
        while True:
            try:
                self._handle.make_room(self.ref, self._captured.logical_bytes)
            except NoSpaceError:
                if not self._publish_left(course):
                    raise
            else:
                return

    def _publish_left(self, course: PutStatus) -> bool:
        """Publishes a put whose publication failed before; whether one is published or given up now."""
        for staged in [puts[0] for puts in self._handle.unpublished.values() if puts and isinstance(puts[0], PublishStaged)]:
            with suppress(StoreError):  # it stays; its error was raised before
                staged.publish_before(course)
                return True
        return False

    def _request(self) -> tuple[PutRequest, bool]:
        """What is put, and whether the store does not answer: then it is staged all the same, by what is known of the log."""
        engine, seen = self._handle.engine, self._handle.seen
        try:
            return seen.as_of_now(engine, self._asked), False
        except BackendUnavailableError:
            return seen.as_of_now(engine, self._asked, sync=False), True

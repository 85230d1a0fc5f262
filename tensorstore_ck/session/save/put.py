"""One save of this process: taken apart, captured, stored, published. Knows torch; loaded when there are tensors to save.

A save in the background takes its state apart and copies it where it is called; one that is waited for reads the caller's memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.backend.staging.unsent_file import StagedDamageError
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.threads import cpu_threads
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.publish import check_expected
from tensorstore_ck.engine.write.put import put
from tensorstore_ck.engine.write.quota_check import check_quotas
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.errors import BackendUnavailableError, ConflictError, NoSpaceError, StoreError
from tensorstore_ck.gc.plan import plan_gc
from tensorstore_ck.log import RefTable, SnapshotInfo
from tensorstore_ck.session.group.rank_put import RankStates
from tensorstore_ck.session.ref_fence import PutOptions
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.publish_staged import PublishStaged
from tensorstore_ck.session.save.put_status import PutStatus
from tensorstore_ck.session.save.queued_put import Admission
from tensorstore_ck.session.staging.stage import stage
from tensorstore_ck.state.capture_copy import Slot, copy_captured, slot_bytes


class SinglePut:
    """See `Put`. A process without a group; `GroupPut` overrides what ranks do differently."""

    rank = 0
    patience_seconds: float | None = None

    def __init__(
        self,
        context: SaveContext,
        number: int,
        check_options: Callable[[], PutOptions],
        take_apart: Callable[[], RankStates],
        *,
        ref: str,
        step: int | None,
    ) -> None:
        """`check_options` checks the arguments, and `take_apart` turns the state into bytes; each is called once."""
        self.number = number
        self.ref, self.step = ref, step
        self._context = context
        self._check_options = check_options
        self._capture: Callable[[], RankStates] | None = take_apart
        self._options: PutOptions | None = None
        self._states: RankStates | None = None
        self._staged: PublishStaged | None = None
        self._is_copied = False
        """Whether the state is in memory that is reused once it is staged."""

    def prepare(self) -> None:
        """Takes the state apart.

        Raises:
            StoreError: it cannot be saved.
        """
        self._take_apart()

    @cached_property
    def needed_bytes(self) -> int:
        """See `Put`; asked for only if the state is copied."""
        return sum(slot_bytes(each, each.frozen) for each in self._captured())

    @cached_property
    def frozen_bytes(self) -> int:
        """See `Put`."""
        return sum(each.sources[tensor].size_bytes for each in self._captured() for tensor in each.frozen)

    def check_known(self) -> None:
        """Raises if the save cannot be published, as far as this host knows the log. Only called if no other save is in progress.

        Raises:
            ConflictError: the ref is not where it must be.
            InvalidOptionError: see `RefFence.check_step`.
            QuotaExceededError: the quota of the ref is used up.
        """
        assert self._options is not None
        engine, fence, options = self._context.engine, self._context.fence, self._options

        def check(view: RefTable) -> None:
            fence.settle(engine, view, self.ref)
            fence.check_step(engine, view, options)
            check_expected(engine, view, self.ref, fence.expected(view, self.ref, options.expect))
            check_quotas(view, self.ref)

        engine.log.look(check)

    def decide(self, admit: Callable[[], Admission]) -> Admission:
        """This process decides."""
        return admit()

    def skip(self) -> None:
        """No other process waits."""

    def fail(self, error: BaseException) -> None:
        """No other process waits."""

    def capture_into(self, slot: Slot) -> None:
        """Copies the state."""
        assert self._options is not None
        copies, start = [], 0
        sampling, self._options = self._options.sampling_of_copies(self.number)
        for each in self._captured():
            copies.append(copy_captured(each, slot, skip=each.frozen, threads=cpu_threads(), start_bytes=start, sampling=sampling))
            start += slot_bytes(each, each.frozen)
        self._is_copied = True
        self._states = RankStates(copies[0], copies[1] if len(copies) > 1 else None)

    def run(self, status: PutStatus) -> SnapshotInfo | None:
        """Stores the state, on the staging disk if there is one."""
        tier, fence = self._context.engine.tier, self._context.fence
        if tier is not None:
            root, self._staged = self._stage(tier, status)
            fence.note_staged(self.ref, root)
            return None
        info = self._store(status)
        self._context.note_speed(status)
        fence.note(self.ref, info.root, info.root)
        return info

    def replicate(self, status: PutStatus) -> None:
        """There are no other hosts."""

    def publish(self, status: PutStatus) -> SnapshotInfo:
        """Uploads the staged objects and publishes the snapshot; stages a state that is still there again if the disk damaged them."""
        tier = self._context.engine.tier
        assert tier is not None
        assert self._staged is not None
        try:
            return self._staged.publish(status)
        except StagedDamageError:
            if self._is_copied:
                raise
            _, self._staged = self._stage(tier, status)
            return self._staged.publish(status)

    # --- what ranks do differently -----------------------------------------------------------------------------------

    def _store(self, status: PutStatus) -> SnapshotInfo:
        engine = self._context.engine
        with freeable_said(engine):
            options, captured = self._begin(status)
            return self._at_head(options, lambda request: put(engine, captured, request, status.meter))

    def _at_head(self, options: PutOptions, store: Callable[[PutRequest], SnapshotInfo]) -> SnapshotInfo:
        """Stores at the newest head; again if an earlier save of this handle, whose answer was lost, is published meanwhile."""
        engine, fence = self._context.engine, self._context.fence
        while True:
            request = fence.at_head(engine, options)
            try:
                check_expected(engine, engine.log.view(), request.ref, request.expect)
                return store(request)
            except ConflictError:
                if not fence.settle(engine, engine.log.newest_view(), self.ref):
                    raise

    def _stage(self, tier: StagingTier, status: PutStatus) -> tuple[Digest, PublishStaged]:
        """Stages the state; returns the root, and the object that publishes it."""
        engine, fence = self._context.engine, self._context.fence

        def request() -> tuple[PutRequest, bool]:
            """The request, and whether the store does not answer: then it goes by what this host knows of the log."""
            try:
                return fence.at_head(engine, options), False
            except BackendUnavailableError:
                return fence.at_head(engine, options, sync=False), True

        with freeable_said(engine):
            options, captured = self._begin(status)
            staged = stage(engine, tier, captured, request, chain=self._context.chain(self.ref), meter=status.meter)
        manifest = staged.manifest
        publisher = PublishStaged(self._context, manifest.txn, manifest.ref, manifest.step, [manifest])
        publisher.announce_soon()
        return staged.info.root, publisher

    def _begin(self, status: PutStatus) -> tuple[PutOptions, CapturedState]:
        status.check()
        options, states = self._take_apart()
        needed_bytes = states.shared.logical_bytes
        status.meter.expect("hash", needed_bytes)
        self._require_space(needed_bytes, status)
        return options, states.shared

    def _require_space(self, needed_bytes: int, status: PutStatus) -> None:
        """See `SaveContext.reserve_space`. A staged save that could not be published uses space until it is."""
        while True:
            try:
                self._context.reserve_space(self.ref, needed_bytes)
            except NoSpaceError:
                if not self._publish_left(status):
                    raise
            else:
                return

    def _publish_left(self, status: PutStatus) -> bool:
        """Publishes a save whose publication failed before; returns whether one was published or given up."""
        for staged in [puts[0] for puts in self._context.unpublished.values() if puts and puts[0].is_alone]:
            with suppress(StoreError):  # it stays on the disk; its error was raised before
                staged.publish_before(status)
                return True
        return False

    # --- shared with ranks --------------------------------------------------------------------------------------------

    def _take_apart(self) -> tuple[PutOptions, RankStates]:
        if self._options is None:
            self._options = self._check_options()
        if self._states is None:
            assert self._capture is not None
            self._states, self._capture = self._capture(), None  # drop the reference to the caller's state
        return self._options, self._states

    def _captured(self) -> list[CapturedState]:
        assert self._states is not None
        return [each for each in self._states if each is not None]


@contextmanager
def freeable_said(engine: Engine) -> Iterator[None]:
    """Adds to a `NoSpaceError` what gc would free, in gc's words. Only for a store in a folder: others are expensive to list."""
    try:
        yield
    except NoSpaceError as exc:
        if engine.tier is not None or not engine.backend.is_local:
            raise
        said: list[str] = []
        with suppress(StoreError, OSError):  # the cache may be full, too
            said = plan_gc(engine.of_store()).freeable.describe()
        if not said:
            raise
        raise NoSpaceError(". ".join([str(exc), *said]), object_id=exc.object_id) from exc

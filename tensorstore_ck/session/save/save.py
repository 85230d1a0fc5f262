"""`Save`: one save of this process, in four phases. Knows torch; loaded when there are tensors to save.

    check     the arguments; of an asynchronous save also the branch, if no other save is in progress
    capture   the state is taken apart; for a save in the background, `copy_into` ends it, and the state may be changed afterwards
    write     the space and the branch are checked; blocks, packs and the part become durable
    commit    the record, then one log entry: "put"; or with a staging disk "staged", and `StagedSave` publishes later

`put_snapshot` runs all of them on its thread and reads the caller's memory. `put_snapshot_async` checks and captures, and the worker writes
and commits. Its `Coordination` says which processes save together: this one `Alone`, or the ranks of a group in one
`RankRound`. A `Destination` says where the bytes go.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Unpack

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.free_space import require_free_space
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.stagger import stagger_delay
from tensorstore_ck.common.threads import cpu_threads
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.dedup import held_blocks
from tensorstore_ck.engine.write.publish import check_branch
from tensorstore_ck.engine.write.request import SaveArguments, SaveOptions, SaveRequest, check_options
from tensorstore_ck.engine.write.sampled_checks import Sampling, turn_of
from tensorstore_ck.engine.write.write_and_commit import Destination, StoreDestination, write_and_commit
from tensorstore_ck.errors import BackendUnavailableError, ConflictError, NoSpaceError, StoreError
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.session.ref_fence import RefFence
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.queued_save import Admission
from tensorstore_ck.session.save.rank_round import Prepare, RankRound, UnpreparedState
from tensorstore_ck.session.save.save_status import SaveStatus
from tensorstore_ck.session.save.staged_save import PublishAlone, Publisher, StagedSave
from tensorstore_ck.session.save.staged_upload import StagedUpload
from tensorstore_ck.session.staging.staging_destination import StagingDestination
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.capture_copy import Slot, bytes_of, copy_captured, slot_bytes
from tensorstore_ck.state.device.capture_proofs import Overlap
from tensorstore_ck.state.tensor_table import RecentLayouts

if TYPE_CHECKING:
    import torch

    from tensorstore_ck.session.peers import Replicator
    from tensorstore_ck.state.sharded_tensors import SpreadDescriber


class StateArguments(SaveArguments, total=False):
    """`SaveArguments`, the step, the state of this rank alone, frozen tensors, and the optimizers that change the state."""

    step: int | None
    rank_state: object
    frozen: Sequence[str]
    changed_by: "Sequence[torch.optim.Optimizer]"


class Alone:
    """One process."""

    is_alone = True
    rank, ranks = 0, 1
    patience_seconds: float | None = None
    """How long the save may wait for memory; None: without limit."""
    scope = b""
    """Names the group: what is known of frozen tensors holds for one group."""
    describer: "SpreadDescriber | None" = None
    """Describes tensors that are spread over ranks."""
    replicator: "Replicator | None" = None
    """Copies staged files to other hosts, if the store was opened so."""

    def __init__(self, context: SaveContext, number: int) -> None:
        self.key, self.number = context.engine.new_id(), number
        self._context = context

    def transaction(self) -> Ulid:
        """The ULID of a snapshot that is staged."""
        return self._context.engine.new_id()

    def publisher(self, upload: StagedUpload) -> Publisher:
        """Publishes what was staged."""
        return PublishAlone(self._context, upload)

    def decide(self, admit: Callable[[], Admission]) -> Admission:
        """The decision of this process."""
        return admit()

    def skip(self) -> None:
        """Does nothing: no other process waits."""

    def fail(self, error: BaseException) -> None:
        """Does nothing: no other process waits."""

    def prepare_and_save(self, prepare: Prepare, destination: Destination, status: SaveStatus) -> SnapshotRow:
        """Prepares (space, anchor, request), writes and commits.

        Repeats that after a conflict with a save of this handle that was published although its reply was lost.
        """
        engine, fence = self._context.engine, self._context.fence
        destination.wait_turn()
        while True:
            request, captured, view = prepare(destination, status)
            try:
                return write_and_commit(destination, captured=captured, request=request, meter=status.meter, view=view)
            except ConflictError:
                if destination.is_staging or not fence.catch_up(engine, engine.log.newest_view(), request.ref):
                    raise


Coordination = Alone | RankRound


class Save:
    """One save. The phases are called in their order; see `SaveQueue` for the threads."""

    def __init__(
        self,
        context: SaveContext,
        coordination: Coordination,
        state: object,
        *,
        ref: str,
        step: int | None = None,
        rank_state: object = None,
        frozen: Sequence[str] = (),
        changed_by: Sequence["torch.optim.Optimizer"] = (),
        **given: Unpack[SaveArguments],
    ) -> None:
        """`state`: what the user saves, or a `CapturedState`, or an `UnpreparedState`."""
        self.ref, self.step = ref, step
        self.key, self.scope, self.rank = coordination.key, coordination.scope, coordination.rank
        self.patience_seconds = coordination.patience_seconds
        self.decide, self.skip, self.fail = coordination.decide, coordination.skip, coordination.fail
        self._context, self._engine, self._coordination = context, context.engine, coordination
        self._state: tuple[object, object, Sequence[str]] | None = (state, rank_state, frozen)
        self._given = given
        self._options: SaveOptions | None = None
        self._captured: CapturedState | None = None
        self._changed_by = changed_by
        self.frozen_bytes = 0
        """The bytes of frozen tensors, which `copy_into` did not copy."""
        self._is_copied = False
        """Whether the state was copied into memory that a later save reuses: of each save in the background."""

    # --- check --------------------------------------------------------------------------------------------------------

    def check(self) -> SaveOptions:
        """Checks the arguments, once.

        Raises:
            InvalidOptionError, InvalidNameError: an argument is not what it must be.
        """
        if self._options is None:
            self._options = check_options(self._engine, self.ref, step=self.step, **self._given)
        return self._options

    def check_branch(self) -> None:
        """Raises if the save cannot be published, as far as this host knows the log. Only called if no other save is in progress.

        Raises:
            ConflictError: the ref is not where it must be.
            InvalidOptionError: see `RefFence.expected`.
            QuotaExceededError: the quota of the ref is used up.
        """
        engine, fence, options = self._engine, self._context.fence, self.check()

        def check(view: RefTable) -> None:
            fence.catch_up(engine, view, self.ref)
            check_branch(engine, view, self.ref, fence.expected(engine, view, options))

        if engine.tier is None:
            engine.log.look(check)
            return
        with suppress(BackendUnavailableError):  # what is staged is checked again, at the latest when it is published
            self._context.contact.ask(partial(engine.log.look, check))

    # --- capture ------------------------------------------------------------------------------------------------------

    def capture(self) -> CapturedState:
        """Takes the state apart, once; its tensors stay in the caller's memory.

        Raises:
            UnsupportedValueError: it cannot be saved.
        """
        if self._captured is None:
            assert self._state is not None
            state, rank_state, frozen = self._state
            if isinstance(state, UnpreparedState):
                raise state.error
            if isinstance(state, CapturedState):
                captured = state
            else:
                captured = capture(state, self._coordination.describer)
                if frozen and self._context.frozen is None:
                    self._context.make_frozen()
                if self._context.frozen is not None:
                    captured = self._context.frozen.mark(captured, frozen, self._coordination.scope)
            self._captured = captured if rank_state is None else captured._replace(own=capture(rank_state))
            self._state = None  # the caller's containers may be freed
        return self._captured

    def check_and_capture(self) -> None:
        """Runs the phases that come before any message to other ranks.

        Raises:
            StoreError: it cannot be saved; the other ranks are informed.
        """
        try:
            self.check()
            self.capture()
        except BaseException as exc:
            self.fail(exc)
            raise

    @cached_property
    def needed_bytes(self) -> int:
        """The memory that `copy_into` needs; computed only if the state is copied."""
        return sum(slot_bytes(state, state.frozen) for state in self._states())

    def copy_into(self, slot: Slot) -> None:
        """Copies the state, which may be changed afterwards."""
        captured = self.capture()
        self.frozen_bytes = sum(bytes_of(state, state.frozen) for state in self._states())
        options = self.check()
        sampling = Sampling(turn_of(None, self._coordination.number), options.checks.verify_capture)
        self._options = options._replace(checks=options.checks._replace(verify_capture=0.0))  # the state is not read a second time
        overlap = self._overlap(captured) if sampling.verify_share and captured.device_blocks is not None else None
        copy = partial(copy_captured, slot=slot, threads=cpu_threads(), sampling=sampling)
        copied, own = copy(captured, skip=captured.frozen, overlap=overlap), captured.own
        if own is not None:
            own = copy(own, skip=own.frozen, start_bytes=slot_bytes(captured, captured.frozen))
        self._is_copied = True
        self._captured = copied._replace(own=own)

    def _overlap(self, captured: CapturedState) -> Overlap:
        """What copies from devices need so that they can go on while training continues."""
        blocks_of = partial(held_blocks, captured, rank=self.rank, block_bytes=self._engine.config.block_bytes)
        # Not for a group, whose ranks read what they hold to compare it; nor with a staging disk, which may not have the stored bytes.
        may_stay = self._coordination.is_alone and self._engine.tier is None
        stored = self._context.stored_tensors() if may_stay else None
        return Overlap(blocks_of, self._context.gates_of(self._changed_by), stored)

    def _states(self) -> list[CapturedState]:
        captured = self.capture()
        return [captured] if captured.own is None else [captured, captured.own]

    # --- write and commit ---------------------------------------------------------------------------------------------

    def run(self, status: SaveStatus) -> SnapshotRow | StagedSave:
        """Writes and commits: returns the published snapshot, or with a staging disk the staged save."""
        context, tier = self._context, self._engine.tier
        try:
            if tier is not None:
                return self._stage(tier, status)
            wait_turn, window_seconds = None, self._engine.stagger_seconds
            if self._is_copied and window_seconds:  # else training waits for it
                wait_turn = partial(status.wait_turn, stagger_delay(window_seconds, self.ref, self.rank, self._coordination.ranks))
            with StoreDestination(self._engine, self.rank, is_alone=self._coordination.is_alone, wait_turn=wait_turn) as destination:
                info = self._coordination.prepare_and_save(self._prepare_write, destination, status)
        except StoreError as exc:
            raise context.explained(exc)  # noqa: B904 - it has its cause
        if not self._engine.backend.is_local:  # there, reads come from the page cache, however slow the writes are
            context.note_speed(status)
        context.fence.note(self.ref, info.root, info.root)
        return info

    def _stage(self, tier: StagingTier, status: SaveStatus) -> StagedSave:
        context, coordination, chain = self._context, self._coordination, self._context.fence.chain(self.ref)
        txn, stop = coordination.transaction(), None if coordination.is_alone else status.check
        with StagingDestination(
            self._engine, tier, chain, txn, rank=self.rank, ranks=coordination.ranks, stop=stop, contact=context.contact
        ) as destination:
            info = coordination.prepare_and_save(self._prepare_write, destination, status)
        assert destination.manifest is not None
        upload = StagedUpload(context, txn, self.ref, [destination.manifest])
        source = None if self._is_copied else self
        staged = StagedSave(context, upload, coordination.publisher(upload), self.step, source=source, replicator=coordination.replicator)
        if coordination.is_alone:
            staged.announce_soon()
        context.fence.note_staged(self.ref, info.root)
        return staged

    def _prepare_write(self, destination: Destination, status: SaveStatus) -> tuple[SaveRequest, CapturedState, RefTable]:
        """The request, the state, and a view of the log at its newest entry. Takes the state apart if `capture` was not called before."""
        status.check()
        context, fence, options = self._context, self._context.fence, self.check()
        if context.recent_layouts is None:
            context.recent_layouts = RecentLayouts()
        captured = context.recent_layouts.reuse(self.capture())
        size_bytes = captured.logical_bytes if self._coordination.is_alone else captured.held_bytes
        status.meter.expect("hash", size_bytes)
        if self._engine.tier is None:
            needed_bytes = size_bytes if fence.current(self.ref) is None else 0  # later saves to a ref mostly share blocks
            require_free_space(self._engine.backend, self._engine.min_free, needed_bytes, f"the save to {self.ref!r}")
        else:
            self._reserve_on(self._engine.tier, size_bytes, status)
        try:
            # A call that hangs may outlive the save, so it does not get the state.
            request, view = destination.ask(partial(_at_head, self._engine, fence, options))
        except BackendUnavailableError:
            if not destination.go_offline():
                raise
            view = self._engine.log.view()
            request = fence.request_at(self._engine, view, options, is_offline=True)
        self._engine.limit_writes(view, self.ref)
        return request, captured, view

    def _reserve_on(self, tier: StagingTier, needed_bytes: int, status: SaveStatus) -> None:
        """See `SaveContext.reserve_on`. A staged save that could not be published uses space until it is."""
        while True:
            try:
                self._context.reserve_on(tier, needed_bytes)
            except NoSpaceError:
                if not (self._coordination.is_alone and self._publish_earlier(status)):
                    raise
            else:
                return

    def _publish_earlier(self, status: SaveStatus) -> bool:
        """Publishes a save whose publication failed before; returns whether one was published or given up."""
        for chain in self._context.fence.chains():
            for staged in chain.unpublished()[:1]:
                if staged.is_alone:
                    with suppress(StoreError):  # it stays on the disk; its error was raised before
                        staged.publish_before(status)
                        return True
        return False


def _at_head(engine: Engine, fence: RefFence, options: SaveOptions) -> tuple[SaveRequest, RefTable]:
    view = engine.log.newest_view()
    return fence.request_at(engine, view, options), view

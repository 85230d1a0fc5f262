"""One rank's side of a put of many. Knows torch, loaded by whoever has tensors to put.

A put beside the training takes its state apart and copies it where it is called; one that is waited for does so when its attempt runs.
What can fail on one rank alone is told to all: else they would wait for a rank that is never with them again.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.threads import cpu_threads
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import StoreError, UndecidedError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.group.rank_put import PreparedPut, RankStates, begin_put, run_put
from tensorstore_ck.session.ref_fence import PutOptions
from tensorstore_ck.session.save.context import SaveContext, frozen_bytes
from tensorstore_ck.session.save.publish_staged_group import PublishStagedGroup
from tensorstore_ck.session.save.put_protocol import Admission
from tensorstore_ck.session.save.put_status import PutStatus
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.stage import StagedRankPut, StagedResult
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.capture_copy import Slot, copied_bytes, copy_captured
from tensorstore_ck.state.rank_shares import describer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_logger: Final = logging.getLogger("tensorstore_ck")


@dataclass(frozen=True)
class UnpreparedState:
    """In the place of a state that could not be made on this rank: its put is refused on all."""

    error: Exception


class GroupPut:
    """See `Job`."""

    def __init__(
        self,
        handle: SaveContext,
        group: "ProcessGroup",
        ask: Callable[[], PutOptions],
        state: object,
        rank_state: object,
        *,
        ref: str,
        step: int | None,
        frozen: Sequence[str],
        timeout_seconds: float,
    ) -> None:
        """Begins the attempt, as the other ranks do.

        Raises:
            SnapshotAbortedError: rank 0 did not begin it.
        """
        self.ref, self.step = ref, step
        self._handle = handle
        self._group = group
        self._ask = ask
        self._state = state
        self._rank_state = rank_state
        self._globs = frozen
        self._timeout_seconds = self.patience_seconds = timeout_seconds
        self._own, self._memory = handle.groups.of(group)
        self.rank = self._own.rank
        self._attempt = begin_put(self._own, ref, timeout_seconds)
        self.number = self._attempt.n
        self.needed_bytes = self.frozen_bytes = 0
        self._asked: PutOptions | None = None
        self._states: RankStates | None = None
        self._staged: PublishStagedGroup | None = None
        self._manifest: Manifest | None = None
        self._replicator = handle.replicators.get(group)

    def prepare(self) -> None:
        """Takes the state apart, before the other ranks are asked for anything.

        Raises:
            StoreError: it cannot be put, as they are told.
        """
        try:
            self._take_apart()
            self.needed_bytes = sum(copied_bytes(each, each.frozen) for each in self._captured())
            self.frozen_bytes = sum(map(frozen_bytes, self._captured()))
        except BaseException as exc:
            self.refuse(exc)
            raise

    def agree(self, decide: Callable[[], Admission]) -> Admission:
        """What rank 0 decides."""

        def told() -> Body:
            try:
                turn = decide()
            except BaseException as exc:
                self.refuse(exc)
                raise
            return {"goes": turn.goes, "drops": list(turn.drops), "failed": turn.failed}

        said = self._attempt.agree(told)
        return Admission(take(said, "goes", bool), tuple(map(int, take(said, "drops", list))), take(said, "failed", int))

    def leave(self) -> None:
        """All ranks know that it does not take place."""
        self._attempt.leave()

    def refuse(self, error: BaseException) -> None:
        """Has the attempt fail on all ranks.

        Raises:
            SnapshotAbortedError: as on the others; `error` is its cause.
        """

        def fail() -> PreparedPut:
            raise error

        run_put(self._handle.engine, self._own, self._attempt, fail, memory=self._memory)

    def hold(self, slot: Slot) -> None:
        """Copies this rank's side."""
        assert self._asked is not None
        copies, start = [], 0
        sampling, self._asked = self._asked.sampling_of_copies(self.number)
        for each in self._captured():
            copies.append(copy_captured(each, slot, skip=each.frozen, threads=cpu_threads(), start_bytes=start, sampling=sampling))
            start += copied_bytes(each, each.frozen)
        self._states = RankStates(copies[0], copies[1] if len(copies) > 1 else None)

    def run(self, course: PutStatus) -> SnapshotInfo | None:
        """Stores this rank's side, on the staging disk where there is one."""
        engine, seen = self._handle.engine, self._handle.seen

        def prepare() -> PreparedPut:
            course.check()
            asked, states = self._take_apart()
            course.meter.expect("hash", self._local_bytes())
            self._handle.make_room(self.ref, self._local_bytes())
            return PreparedPut(seen.as_of_now(engine, asked), states)

        if engine.tier is None:
            info = run_put(engine, self._own, self._attempt, prepare, memory=self._memory, meter=course.meter)
            self._handle.note_speed(course)
            seen.note(self.ref, info.root, info.root)
            return info
        staged = self._stage(engine.tier, prepare, course)
        seen.note_staged(self.ref, staged.info.root)
        group, manifest = self._handle.groups.publishing(self._group), staged.manifest
        self._manifest = manifest
        self._staged = PublishStagedGroup(
            self._handle,
            group,
            manifest.txn,
            manifest.ref,
            [manifest],
            step=manifest.step,
            timeout_seconds=self._timeout_seconds,
            on_end=self._forget_copies,
        )
        return None

    def replicate(self, course: PutStatus) -> None:
        """Has what was staged kept on other hosts as well, where that is wanted; never fails."""
        if self._replicator is None or self._manifest is None:
            return
        manifest = self._manifest

        def warn(text: str) -> None:
            _logger.warning("rank %d: a copy of what was staged for %s is missing: %s", self.rank, course, text)

        try:
            self._replicator.exchange(manifest.txn, manifest.encode(), manifest.names, warn=warn)
        except StoreError as exc:
            warn(str(exc))

    def publish(self, course: PutStatus) -> SnapshotInfo:
        """Uploads what was staged, and publishes it with the others."""
        assert self._staged is not None
        return self._staged.publish(course)

    def _stage(self, tier: StagingTier, prepare: Callable[[], PreparedPut], course: PutStatus) -> StagedResult:
        put = StagedRankPut(
            self._handle.engine,
            self._own,
            prepare,
            attempt=self._attempt,
            memory=self._memory,
            meter=course.meter,
            tier=tier,
            chain=self._handle.chain(self.ref),
            stop=course.check,
        )
        try:
            return put.finish(self._attempt.run(put.duties()))
        except UndecidedError:
            raise  # the log may say "staged": the files stay for whoever opens the store with this disk next
        except BaseException:
            put.give_up()
            raise

    def _take_apart(self) -> tuple[PutOptions, RankStates]:
        if self._asked is None or self._states is None:
            self._asked = self._ask()
            if isinstance(self._state, UnpreparedState):
                raise self._state.error
            shared = self._handle.frozen.mark(capture(self._state, describer_of(self._group)), self._globs, self._own.nonce)
            self._states = RankStates(shared, None if self._rank_state is None else capture(self._rank_state))
            self._state = self._rank_state = None
        return self._asked, self._states

    def _captured(self) -> list[CapturedState]:
        assert self._states is not None
        return [each for each in self._states if each is not None]

    def _forget_copies(self) -> None:
        """What this rank keeps for others of this put is not needed any more."""
        if self._replicator is not None and self._manifest is not None:
            with suppress(StoreError):  # found, and let go, by whoever opens the store with this disk next
                self._replicator.forget(self._manifest.txn)

    def _local_bytes(self) -> int:
        """Of the tensors that this rank has."""
        return sum(source.size_bytes for captured in self._captured() for source in captured.sources)

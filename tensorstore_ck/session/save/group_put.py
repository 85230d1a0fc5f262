"""One rank's side of a save of many. Knows torch; loaded when there are tensors to save.

A save that is waited for takes its state apart when its round runs. What can fail on one rank alone is reported to all: else they would
wait for a rank that is never with them again.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.errors import StoreError, UndecidedError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.group.rank_put import PreparedPut, RankStates, begin_put, run_put
from tensorstore_ck.session.ref_fence import PutOptions
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.publish_order import PublishedInOrder
from tensorstore_ck.session.save.publish_staged_group import PublishStagedGroup
from tensorstore_ck.session.save.put import SinglePut
from tensorstore_ck.session.save.put_protocol import Admission
from tensorstore_ck.session.save.put_status import PutStatus
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.stage import StagingDestination

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_logger: Final = logging.getLogger("tensorstore_ck")


@dataclass(frozen=True)
class UnpreparedState:
    """In the place of a state that could not be made on this rank: its save is refused on all."""

    error: Exception


class GroupPut(SinglePut):
    """See `Put`. What a rank does as a process alone is `SinglePut`'s."""

    def __init__(
        self,
        handle: SaveContext,
        group: "ProcessGroup",
        ask: Callable[[], PutOptions],
        take_apart: Callable[[], RankStates],
        *,
        ref: str,
        step: int | None,
        timeout_seconds: float,
    ) -> None:
        """Begins the round, as the other ranks do.

        Raises:
            SnapshotAbortedError: rank 0 did not begin it.
        """
        self._own, self._memory = handle.groups.of(group)
        self._attempt = begin_put(self._own, ref, timeout_seconds)
        super().__init__(handle, self._attempt.n, ask, take_apart, ref=ref, step=step)
        self._group = group
        self.rank = self._own.rank
        self._timeout_seconds = self.patience_seconds = timeout_seconds
        self._manifest: Manifest | None = None
        self._replicator = handle.replicators.get(group)

    def prepare(self) -> None:
        """Takes the state apart, before the other ranks are asked for anything.

        Raises:
            StoreError: it cannot be saved, as they are told.
        """
        try:
            super().prepare()
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

    def _store(self, course: PutStatus) -> SnapshotInfo:
        engine, prepare = self._handle.engine, self._prepared(course)
        return run_put(engine, self._own, self._attempt, prepare, memory=self._memory, meter=course.meter)

    def _stage(self, tier: StagingTier, course: PutStatus) -> tuple[Digest, PublishedInOrder]:
        handle, own, attempt, chain = self._handle, self._own, self._attempt, self._handle.chain(self.ref)
        links, prepare = chain.borrow(), self._prepared(course)
        there = StagingDestination(handle.engine, tier, chain, links, attempt.txn, rank=own.rank, ranks=own.ranks, stop=course.check)
        try:
            info = run_put(handle.engine, own, attempt, prepare, memory=self._memory, meter=course.meter, destination=there)
        except UndecidedError:
            raise  # the log may say "staged": the files stay for the next process that opens the store with this disk
        except BaseException:
            there.give_up()
            raise
        finally:
            chain.give_back(links)
        manifest = self._manifest = there.manifest
        assert manifest is not None
        group, timeout, forget = handle.groups.publishing(self._group), self._timeout_seconds, self._forget_copies
        return info.root, PublishStagedGroup(
            handle, group, manifest.txn, manifest.ref, [manifest], step=manifest.step, timeout_seconds=timeout, on_end=forget
        )

    def _prepared(self, course: PutStatus) -> Callable[[], PreparedPut]:
        """What this rank saves; called in the round, so that all learn at once where it cannot."""

        def prepare() -> PreparedPut:
            course.check()
            asked, states = self._take_apart()
            size = sum(source.size_bytes for captured in self._captured() for source in captured.sources)
            course.meter.expect("hash", size)
            self._handle.make_room(self.ref, size)
            return PreparedPut(self._handle.seen.as_of_now(self._handle.engine, asked), states)

        return prepare

    def _forget_copies(self) -> None:
        """What this rank keeps for others of this put is not needed any more."""
        if self._replicator is not None and self._manifest is not None:
            with suppress(StoreError):  # found, and let go, by whoever opens the store with this disk next
                self._replicator.forget(self._manifest.txn)

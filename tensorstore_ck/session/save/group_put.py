"""One rank's side of a save of many. Knows torch; loaded when there are tensors to save.

A save that is waited for takes its state apart when its round runs. An error of one rank is reported to
all: otherwise they would wait for it, and count rounds differently from then on.
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
from tensorstore_ck.session.save.publish_staged import PublishStaged
from tensorstore_ck.session.save.publish_staged_group import PublishStagedGroup
from tensorstore_ck.session.save.put import SinglePut
from tensorstore_ck.session.save.put_status import PutStatus
from tensorstore_ck.session.save.queued_put import Admission
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.stage import StagingDestination

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_logger: Final = logging.getLogger("tensorstore_ck")


@dataclass(frozen=True)
class UnpreparedState:
    """Takes the place of a state that could not be prepared on this rank: the save fails on all ranks."""

    error: Exception


class GroupPut(SinglePut):
    """See `Put`. What a rank does like a single process is in `SinglePut`."""

    def __init__(
        self,
        context: SaveContext,
        group: "ProcessGroup",
        check_options: Callable[[], PutOptions],
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
        self._own, self._memory = context.groups.of(group)
        self._attempt = begin_put(self._own, ref, timeout_seconds)
        context.fence.note_attempt(ref, self._attempt.txn)
        super().__init__(context, self._attempt.n, check_options, take_apart, ref=ref, step=step)
        self._group = group
        self.rank = self._own.rank
        self._timeout_seconds = self.patience_seconds = timeout_seconds
        self._manifest: Manifest | None = None
        self._replicator = context.replicators.get(group)

    def prepare(self) -> None:
        """Takes the state apart, before any message to the other ranks.

        Raises:
            StoreError: it cannot be saved; the other ranks are informed.
        """
        try:
            super().prepare()
        except BaseException as exc:
            self.fail(exc)
            raise

    def decide(self, admit: Callable[[], Admission]) -> Admission:
        """The decision of rank 0."""

        def admit_here() -> Body:
            try:
                admission = admit()
            except BaseException as exc:
                self.fail(exc)
                raise
            return {"admitted": admission.admitted, "dropped": list(admission.dropped), "failed": admission.failed}

        said = self._attempt.decide(admit_here)
        return Admission(take(said, "admitted", bool), tuple(map(int, take(said, "dropped", list))), take(said, "failed", int))

    def skip(self) -> None:
        """The save does not take place; all ranks know it."""
        self._attempt.skip()

    def fail(self, error: BaseException) -> None:
        """Lets the round fail on all ranks.

        Raises:
            SnapshotAbortedError: as on the others; `error` is its cause.
        """

        def fail() -> PreparedPut:
            raise error

        run_put(self._context.engine, self._own, self._attempt, fail, memory=self._memory)

    def replicate(self, status: PutStatus) -> None:
        """Copies the staged files to other hosts, if that is wanted; never fails."""
        if self._replicator is None or self._manifest is None:
            return
        manifest = self._manifest

        def warn(text: str) -> None:
            _logger.warning("rank %d: a copy of the staged files of %s is missing: %s", self.rank, status, text)

        try:
            self._replicator.exchange(manifest.txn, manifest.encode(), manifest.names, warn=warn)
        except StoreError as exc:
            warn(str(exc))

    def _store(self, status: PutStatus) -> SnapshotInfo:
        engine, prepare = self._context.engine, self._prepared(status)
        return run_put(engine, self._own, self._attempt, prepare, memory=self._memory, meter=status.meter)

    def _stage(self, tier: StagingTier, status: PutStatus) -> tuple[Digest, PublishStaged]:
        context, own, attempt, chain = self._context, self._own, self._attempt, self._context.chain(self.ref)
        links, prepare = chain.borrow(), self._prepared(status)
        there = StagingDestination(context.engine, tier, chain, links, attempt.txn, rank=own.rank, ranks=own.ranks, stop=status.check)
        try:
            info = run_put(context.engine, own, attempt, prepare, memory=self._memory, meter=status.meter, destination=there)
        except UndecidedError:
            raise  # the log may say "staged": the files stay for the next process that opens the store with this staging disk
        except BaseException:
            there.give_up()
            raise
        finally:
            chain.give_back(links)
        manifest = self._manifest = there.manifest
        assert manifest is not None
        publisher = PublishStagedGroup(
            context,
            manifest.txn,
            manifest.ref,
            manifest.step,
            [manifest],
            group=context.groups.publishing(self._group),
            timeout_seconds=self._timeout_seconds,
            on_end=self._forget_copies,
        )
        return info.root, publisher

    def _prepared(self, status: PutStatus) -> Callable[[], PreparedPut]:
        """What this rank saves. Called in the round, so that an error reaches all ranks at once."""

        def prepare() -> PreparedPut:
            status.check()
            options, states = self._take_apart()
            size = sum(source.size_bytes for captured in self._captured() for source in captured.sources)
            status.meter.expect("hash", size)
            self._context.reserve_space(self.ref, size)
            return PreparedPut(self._context.fence.at_head(self._context.engine, options), states)

        return prepare

    def _forget_copies(self) -> None:
        """Deletes the copies of this save that this rank keeps for others."""
        if self._replicator is not None and self._manifest is not None:
            with suppress(StoreError):  # the next process that opens the store with this disk deletes them
                self._replicator.forget(self._manifest.txn)

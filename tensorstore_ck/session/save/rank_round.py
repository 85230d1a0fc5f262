"""One rank's side of a save of many ranks.

An error of one rank is reported to all: otherwise they would wait for it, and count rounds differently from then on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.write_and_commit import Destination
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.session.group import Participant
from tensorstore_ck.session.group.rank_save import RankSave
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.publish_rounds import PublishRounds
from tensorstore_ck.session.save.queued_save import Admission
from tensorstore_ck.session.save.save_status import SaveStatus
from tensorstore_ck.session.save.staged_save import Publisher
from tensorstore_ck.session.save.staged_upload import StagedUpload
from tensorstore_ck.state.sharded_tensors import describer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.state.sharded_tensors import SpreadDescriber

Prepare = Callable[[Destination, SaveStatus], tuple[SaveRequest, CapturedState, RefTable]]
"""Returns what this process saves, as of a view of the log; called again if an earlier save of this handle moved the branch."""


@dataclass(frozen=True)
class UnpreparedState:
    """Takes the place of a state that could not be prepared on this rank: the save fails on all ranks."""

    error: Exception


class RankRound:
    """One rank of a group, in the round in which all of them save. `Alone` in `save.py` documents the methods of both."""

    is_alone = False

    def __init__(self, context: SaveContext, group: "ProcessGroup", ref: str, timeout_seconds: float) -> None:
        """Begins the round, as the other ranks do.

        Raises:
            SnapshotAbortedError: rank 0 did not begin it.
        """
        self._own, self._memory = context.groups.of(group)
        self._round = self._own.begin(f"the save to {ref!r}", object_id=ref, timeout=timeout_seconds)
        context.fence.note_attempt(ref, self._round.txn)
        self._context, self._engine, self._group = context, context.engine, group
        self.key, self.number, self.rank, self.ranks = self._round.txn, self._round.n, self._own.rank, self._own.ranks
        self.patience_seconds = timeout_seconds
        self.scope = self._own.nonce
        self.replicator = context.replicators.get(group)

    @property
    def describer(self) -> "SpreadDescriber | None":
        """See `Alone`."""
        return describer_of(self._group)

    def transaction(self) -> Ulid:
        """See `Alone`: that of the round."""
        return self._round.txn

    def publisher(self, upload: StagedUpload) -> Publisher:
        """See `Alone`."""
        group = self._context.groups.publishing(self._group)
        return PublishRounds(self._context, upload, group, timeout_seconds=self.patience_seconds)

    def decide(self, admit: Callable[[], Admission]) -> Admission:
        """The decision of rank 0, on all ranks."""

        def admit_here() -> Body:
            try:
                admission = admit()
            except BaseException as exc:
                self.fail(exc)
                raise
            return {"admitted": admission.admitted, "dropped": list(admission.dropped), "failed": admission.failed}

        decided = self._round.decide(admit_here)
        return Admission(take(decided, "admitted", bool), tuple(take(decided, "dropped", list)), take(decided, "failed", bytes))

    def skip(self) -> None:
        """Gives the save up before it begins, on all ranks."""
        self._round.skip()

    def fail(self, error: BaseException) -> None:
        """Makes the round fail on all ranks.

        Raises:
            SnapshotAbortedError: as on the others; `error` is its cause.
        """
        side = RankSave(self._engine, self._own, self._round, memory=self._memory)
        self._round.run(Participant.failed(error, side.resolve))

    def prepare_and_save(self, prepare: Prepare, destination: Destination, status: SaveStatus) -> SnapshotRow:
        """Lets all ranks prepare and write, and rank 0 commit; once only.

        `prepare` is called in the round, so that its error reaches all at once.

        Raises:
            StoreError: the same on all ranks, with the ranks named: a rank's state cannot be saved, or does not fit those of the others (an
                `InputError`); stored data is damaged; the ref is elsewhere. Nothing is visible, and nothing needs to be cleaned up.
            SnapshotAbortedError: a rank failed in another way, or is gone. Nothing is visible.
            UndecidedError: on this rank alone: the log could not be read for the outcome.
        """
        side = RankSave(self._engine, self._own, self._round, memory=self._memory, meter=status.meter, destination=destination)

        def propose() -> Body:
            request, captured, _ = prepare(destination, status)
            return side.propose(request, captured)

        outcome = self._round.run(
            Participant(propose=propose, execute=side.write, resolve=side.resolve, compare=side.compare, commit=side.commit)
        )
        info = side.published(outcome)
        side.keep(info, outcome)
        return info

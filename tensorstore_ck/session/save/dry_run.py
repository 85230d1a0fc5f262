"""Finds out what a save of many ranks would refuse: all ranks take their states apart and compare them, as the first save does."""

from typing import TYPE_CHECKING

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.request import ANY, SaveRequest
from tensorstore_ck.errors import InvalidOptionError, MismatchError, UnsupportedValueError
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.session.group import Participant
from tensorstore_ck.session.group.process_groups import ProcessGroups
from tensorstore_ck.session.group.rank_messages import in_the_job
from tensorstore_ck.session.group.rank_save import RankSave
from tensorstore_ck.session.group.replica_check import ReplicaDigests, differences
from tensorstore_ck.state.check import StateCheck, StateProblem, build_check, inspect_state
from tensorstore_ck.state.sharded_tensors import describer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_ranks(
    engine: Engine, groups: ProcessGroups, group: "ProcessGroup", state: object, rank_state: object, *, timeout_seconds: float
) -> StateCheck:
    """See `Store.check`. All ranks agree whether there are problems."""
    own, _ = groups.of(group)
    attempt = own.begin("the check of a state", object_id="state", timeout=timeout_seconds)
    problems: list[StateProblem] = []
    looked_at: list[CapturedState] = []

    side = RankDryRun(engine, own, attempt, memory={})

    def propose() -> Body:
        for part_of_state, describer in ((state, describer_of(group)), (rank_state, None)):
            refused, captured = inspect_state(part_of_state, describer)
            problems.extend(refused)
            looked_at.append(captured)
        if problems:
            others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UnsupportedValueError(f"{problems[0].message}{others}", object_id=problems[0].path)
        captured = looked_at[0] if rank_state is None else looked_at[0]._replace(own=looked_at[1])
        return side.propose(SaveRequest(ref="", step=None, parent=None, expect=ANY, metadata=encode_metadata({}), metrics={}), captured)

    tensor_bytes = None
    try:
        outcome = attempt.run(Participant(propose=propose, execute=side.write, resolve=None, compare=side.compare, commit=side.commit))
        tensor_bytes = take_count(outcome, "bytes")
    except (UnsupportedValueError, InvalidOptionError, MismatchError) as exc:
        if not looked_at:
            raise  # this rank does not belong to the group
        problems = problems or [StateProblem(exc.object_id, str(exc))]
    if tensor_bytes is None:
        tensor_bytes = sum(source.size_bytes for source in looked_at[0].sources)
    return build_check(problems, looked_at[0], engine.backend, tensor_bytes, writers=own.ranks)


class RankDryRun(RankSave):
    """One rank's side. Compares everything that is known before parts are written."""

    def write(self, go: Body) -> Body:
        """Plans the save, and hashes what this rank has in common with others."""
        if go["explain"]:
            return super().write(go)
        self._captured = self._planning.follow(go, self._captured)
        author = self.take_author()
        return {"replicas": self._digests(author).record(), "reported_bytes": self._reported_bytes(author)}

    def commit(self, records: list[Body]) -> Body:
        """Compares the hashes; returns the size of the snapshot in bytes."""
        self.require_same_options(records)
        digests = [ReplicaDigests.of_record(take(record, "replicas", dict)) for record in records]
        problem = differences(digests, [None if self._planning.layout_of else self._captured.layout] * len(digests))
        if problem:
            raise MismatchError(problem + in_the_job(self._group.in_job), object_id="state")
        return {"bytes": self._captured.logical_bytes + sum(take_count(record, "reported_bytes") for record in records)}

"""What the first put of some states would refuse, found as that finds it, and before anything is written."""

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.session.group.participant import Participant
from tensorstore_ck.session.group.rank_messages import in_the_job
from tensorstore_ck.session.group.rank_put import RankPut
from tensorstore_ck.session.group.replica_check import ReplicaDigests, differences


class RankDryRun(RankPut):
    """One rank's side. All is compared but what only the written parts tell of states that cannot be united."""

    def participant(self) -> Participant:
        """For an attempt, which leaves nothing in the log."""
        return Participant(self.propose, self.execute, None, self.compare, self.commit)

    def execute(self, go: Body) -> Body:
        """Plans the put, and hashes what this rank holds with others."""
        if go["explain"]:
            return super().execute(go)
        self._states = self._states._replace(shared=self._planning.follow(go, self._states.shared))
        slot = self.take_slot()
        return {"replicas": self._digests(slot).record(), "reported_bytes": self._reported_bytes(slot)}

    def commit(self, records: list[Body]) -> Body:
        """Compares that: the size of the snapshot in bytes."""
        self.require_same_options(records)
        digests = [ReplicaDigests.of_record(take(record, "replicas", dict)) for record in records]
        problem = differences(digests, [None if self._planning.layout_of else self._states.shared.layout] * len(digests))
        if problem:
            raise MismatchError(problem + in_the_job(self._group.in_job), object_id="state")
        return {"bytes": self._states.shared.logical_bytes + sum(take_count(record, "reported_bytes") for record in records)}

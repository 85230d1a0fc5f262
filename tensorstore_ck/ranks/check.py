"""What the first put of some states would refuse, found as that finds it, and before anything is written."""

from tensorstore_ck.envelope import Body, take
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.ranks.attempt import Duties
from tensorstore_ck.ranks.coverage import uncovered
from tensorstore_ck.ranks.put import RankPut
from tensorstore_ck.ranks.replicas import Digests, differences, digests_of
from tensorstore_ck.split import decode_regions


class RankCheck(RankPut):
    """One rank's side. What ranks of different layouts have in common is compared as far as that needs nothing written."""

    def duties(self) -> Duties:
        """For an attempt, which leaves nothing in the log."""
        return Duties(self.hello, self.work, None, self.compare, self.commit)

    def work(self, go: Body) -> Body:
        """Hashes what this rank holds with others."""
        if go["tellers"]:
            return super().work(go)
        seat = self.take_seat(take(go, "layout_of", bytes))
        replicas = digests_of(self._states.shared, seat, self._engine.config.block_bytes)
        return {"replicas": replicas.record(), "told_bytes": self._told_bytes(seat)}

    def commit(self, records: list[Body]) -> Body:
        """Compares it: the size of the snapshot in bytes."""
        self.require_told_alike(records)
        layout = self._states.shared.layout
        problem = ""
        if not self._layout_of:
            problem = uncovered(layout, {rank: decode_regions(layout, told, f"rank {rank}") for rank, told in enumerate(self._regions)})
        digests = [Digests.of_record(take(record, "replicas", dict)) for record in records]
        problem = problem or differences(digests, [None if self._layout_of else layout] * len(digests))
        if problem:
            raise UnsupportedValueError(problem, object_id="state")
        return {"bytes": self._states.shared.logical_bytes + sum(take(record, "told_bytes", int) for record in records)}

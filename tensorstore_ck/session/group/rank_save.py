"""One rank's side of a save of many ranks. Each writes and checks its part, and rank 0 commits for all, with a small record of each rank.

Knows no torch: its states were taken apart before.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Ulid, derived_hash
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.compare_parent import ParentComparison
from tensorstore_ck.engine.write.part_writer import WrittenPart, write_part
from tensorstore_ck.engine.write.publish import RankParts, checked_parts, retry_expired
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.suspicious_save import SaveFindings
from tensorstore_ck.engine.write.write_and_commit import Destination, StoreDestination, commit
from tensorstore_ck.engine.write.write_plan import PartAuthor
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.block_assignment import first_ranks, ranks_with_layout
from tensorstore_ck.format.layout import Layout
from tensorstore_ck.format.random_streams import RULE
from tensorstore_ck.format.sealed import Body, pack_body, take, take_count, take_digest, unpack_body
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.session.group import replica_drift
from tensorstore_ck.session.group.common_store import require_common_store
from tensorstore_ck.session.group.group import Group
from tensorstore_ck.session.group.matching_arguments import Differing, describe_options, require_same
from tensorstore_ck.session.group.pipeline_stages import PipelineStage, contradiction
from tensorstore_ck.session.group.planning_round import Planning
from tensorstore_ck.session.group.rank_messages import Verbatim, in_the_job, mismatches
from tensorstore_ck.session.group.replica_check import ReplicaDigests, differences, digests_of
from tensorstore_ck.session.group.round import Round
from tensorstore_ck.session.group.save_plan import Memory

COMPARED: Final = ("ref", "step", "parent", "expect", "rank_state")
HASHED: Final = ("metadata", "metrics")

REPORTED: Final = ("snapshot", "root", "record", "logical_bytes", "new_bytes")


class RankResult(NamedTuple):
    """A rank's report on its work."""

    parts: RankParts
    reported_bytes: int
    """The logical bytes that rank 0 does not know."""
    replicas: ReplicaDigests | None
    replica_hashes: replica_drift.ReplicaHashes | None
    findings: SaveFindings

    def record(self) -> Body:
        """The record that is sent to rank 0."""
        return {
            "parts": self.parts.record(),
            "reported_bytes": self.reported_bytes,
            "replicas": self.replicas and self.replicas.record(),
            "replica_hashes": self.replica_hashes and self.replica_hashes.record(),
            "findings": self.findings.record(),
        }

    @classmethod
    def of_record(cls, record: Body) -> "RankResult":
        """The result that `record` encoded."""
        replicas, hashes = record.get("replicas"), record.get("replica_hashes")
        return cls(
            parts=RankParts.of_record(take(record, "parts", dict)),
            reported_bytes=take_count(record, "reported_bytes"),
            replicas=None if replicas is None else ReplicaDigests.of_record(take(record, "replicas", dict)),
            replica_hashes=None if hashes is None else replica_drift.ReplicaHashes.of_record(take(record, "replica_hashes", dict)),
            findings=SaveFindings.of_record(take(record, "findings", dict)),
        )


class RankSave:
    """One rank's side of one save: what it proposes, writes and compares in the round, and what rank 0 commits.

    `memory` keeps the plans of this group, and how often each was used. The first save with a plan checks that all replicas are equal;
    later ones check one more replica of each block, in rotation.
    """

    def __init__(
        self,
        engine: Engine,
        group: Group,
        attempt: Round,
        *,
        memory: Memory,
        meter: SaveMeter | None = None,
        destination: Destination | None = None,
    ) -> None:
        self._engine = engine
        self._destination = destination or StoreDestination(engine, group.rank)
        self._meter = meter or SaveMeter()
        self._group = group
        self._request: SaveRequest
        self._captured: CapturedState
        self._txn = attempt.txn
        self._planning = Planning(attempt=attempt, memory=memory, rank=group.rank, ranks=group.ranks, in_job=group.in_job)
        self._differing_copies = ""
        """The ranks that no longer hold the same data, where `replica_drift` does not compare; on rank 0."""
        self._author: PartAuthor
        self._written: list[WrittenPart] = []

    # --- every rank -------------------------------------------------------------------------------------------------------

    def propose(self, request: SaveRequest, captured: CapturedState) -> Body:
        """This rank's proposal: what it is about to save."""
        self._engine.require_writable()
        self._request, self._captured = request, captured
        self._destination.admit(request, self._engine.log.view())
        expect = None if self._destination.is_staging else request.expect  # rank 0 decides where the ref may be then
        return {
            "ref": request.ref,
            "step": request.step,
            "parent": request.parent,
            "expect": expect if expect is None or isinstance(expect, bytes) else repr(expect),
            "metadata": derived_hash("metadata of a put", request.metadata),
            "metrics": derived_hash("metrics of a put", pack_body(sorted(request.metrics.items()))),
            "rank_state": captured.own is not None,
        } | self._planning.propose(captured)

    def write(self, go: Body) -> Body:
        """Writes this rank's part; or reports its options if they differ."""
        if go["explain"]:
            if self._group.rank not in go["explain"]:
                return {}
            return describe_options(
                {"metadata": unpack_body(memoryview(self._request.metadata), "metadata"), "metrics": self._request.metrics}
            )
        self.follow(go)
        self._captured = self._planning.follow(go, self._captured)
        self._destination.wait_turn()
        result = retry_expired(self._write_parts).record()
        self._destination.wrote(self._request, self._written)
        return result

    def follow(self, go: Body) -> None:
        """Looks for blocks in the same snapshot as rank 0: only rank 0 pins that snapshot while a save is staged."""
        self._request = self._request._replace(nearest=None if go["nearest"] is None else take_digest(go, "nearest"))

    def resolve(self) -> Body | None:
        """Appends "abort" to the log, unless the log has an outcome already, which counts."""

        def abort(view: RefTable) -> list[Op]:
            return [] if view.outcome(self._txn) or view.staged(self._txn) else [Op.abort(self._txn)]

        self._engine.log.append(abort)
        view = self._engine.log.view()
        outcome, staged = view.outcome(self._txn), view.staged(self._txn)
        if staged is not None:
            return self._outcome(staged.n)
        return self._outcome(outcome.n) if outcome is not None and outcome.put else None

    def published(self, outcome: Body) -> SnapshotRow:
        """The snapshot, without reading the log: once it is published, nothing may fail on this rank."""
        request = self._request
        return SnapshotRow(
            ulid=Ulid(take(outcome, "snapshot", bytes)),
            root=take_digest(outcome, "root"),
            record=take_digest(outcome, "record"),
            parent=request.parent,
            ref=request.ref,
            step=request.step,
            n=take_count(outcome, "n"),
            time_ns=take_count(outcome, "time_ns"),
            metrics=request.metrics,
            logical_bytes=take_count(outcome, "logical_bytes"),
            new_bytes=take_count(outcome, "new_bytes"),
            arrived_ns=take_count(outcome, "arrived_ns"),
            triggers=list(request.origin.triggers),
            epoch=request.origin.epoch,
            attributes=outcome.get("attributes"),
            duration_ns=outcome.get("duration_ns"),
        )

    def keep(self, info: SnapshotRow, outcome: Body) -> None:
        """Remembers what the next save is likely to need, and keeps copies of replicas that drifted."""
        self._destination.keep(info)
        self.keep_drifted(self._engine, info, outcome)

    def keep_drifted(self, engine: Engine, info: SnapshotRow, outcome: Body) -> None:
        """Keeps this rank's values if they differ from those that were written; rank 0 warns of all ranks that differ."""
        pairs = [(int(rank), int(owner)) for rank, owner in outcome.get("drift", ())]
        for rank, owner in pairs:
            if rank == self._group.rank:
                replica_drift.keep_copy(engine, captured=self._captured, author=self._author, info=info, owner=owner)
        if self._group.rank == 0 and any(rank for rank, _ in pairs):
            replica_drift.warn_of_drift(pairs, info)
        if self._differing_copies:
            warnings.warn(f"the snapshot of step {info.step} is marked as drift: {self._differing_copies}", stacklevel=user_stacklevel())

    def _write_parts(self) -> "RankResult":
        engine, rank, ranks, own = self._destination.engine, self._group.rank, self._group.ranks, self._captured.own
        turn, author = self._planning.turn, self.take_author()
        anchor, view = engine.log.sync().n, engine.log.view()
        known = self._destination.known(self._request, view, rank, ranks)
        write = partial(write_part, engine, anchor=anchor, coding=self._request.coding, meter=self._meter, sampling=self._request.sampling)
        self._written = [write(self._captured, known, author=author, apart=self._destination.is_staging)]
        if own is not None:
            alone = PartAuthor(ranks + rank, ranks, (ranks + rank,), None)
            known = self._destination.known(self._request, view, ranks + rank, ranks)
            self._written.append(write(own, known, author=alone))
        block_bytes = engine.config.block_bytes
        replicas = self._digests(author, only_copies=bool(turn))
        hashes: replica_drift.ReplicaHashes | None = None
        if turn:
            part = self._written[0].part
            hashes = replica_drift.hash_replicas(self._captured, author=author, part=part, block_bytes=block_bytes, turn=turn)
        written, request = self._written[0], self._request
        findings = ParentComparison(engine=engine, view=view, written=written, captured=self._captured, request=request).examine()
        parts = checked_parts(engine, self._written, anchor, engine.log.newest_view())
        return RankResult(parts, self._reported_bytes(author), replicas, hashes, findings=findings)

    def take_author(self) -> PartAuthor:
        """Sets and returns what this rank is among the authors of parts."""
        rank, ranks, layout_of = self._group.rank, self._group.ranks, self._planning.layout_of
        self._author = PartAuthor(rank, ranks, ranks_with_layout(layout_of, rank, ranks), layout_of)
        return self._author

    def _digests(self, author: PartAuthor, *, only_copies: bool = False) -> ReplicaDigests:
        """Digests of the data that this rank shares with others; with `only_copies`, of a part that `replica_drift` does not compare."""
        reported, sums = self._planning.reported_digests(), self._planning.sums()
        block_bytes = self._engine.config.block_bytes
        return digests_of(self._captured, author, block_bytes, reported, only_reported=only_copies)._replace(sums=sums)

    def _reported_bytes(self, author: PartAuthor) -> int:
        """The logical bytes that rank 0 does not know: of this rank's own state, and of a layout whose first rank it is."""
        own, is_first = self._captured.own, author.rank == author.layout_ranks[0] > 0
        return (own.logical_bytes if own is not None else 0) + (self._captured.logical_bytes if is_first else 0)

    # --- rank 0 -----------------------------------------------------------------------------------------------------------

    def compare(self, proposals: list[Body]) -> Body | str:
        """Checks that all ranks save one snapshot; returns the plan."""
        if mismatches(proposals, COMPARED):
            require_same([self._in_words(proposal) for proposal in proposals], COMPARED, self._group.in_job)
        self._differing = Differing(proposals, HASHED)
        plan = self._planning.compare(proposals, self._captured)
        return plan | {"nearest": self._request.nearest, "explain": self._differing.reporters}

    def _in_words(self, proposal: Body) -> Body:
        """The proposal with readable names of snapshots, as far as this rank knows them."""
        view = self._engine.log.view()
        known = {key: view.by_root(proposal[key]) for key in ("parent", "expect") if isinstance(proposal.get(key), bytes)}
        at = {key: "" if info is None or info.step is None else f"@{info.step}" for key, info in known.items()}
        return proposal | {
            key: Verbatim(f"{info.root.hex()[:16]} ({info.ref}{at[key]})") for key, info in known.items() if info is not None
        }

    def commit(self, records: list[Body]) -> Body:
        """Appends the log entry for all."""
        self.require_same_options(records)
        results = [RankResult.of_record(record) for record in records]
        problem = self._difference(results)
        if problem and not self._planning.turn:
            raise MismatchError(problem + in_the_job(self._group.in_job), object_id=self._request.ref)
        self._differing_copies = problem
        self._planning.count()
        if not self._destination.is_staging and not self._group.has_common_store:
            require_common_store(self._engine, [result.parts.ulids[0] for result in results], self._group.in_job)
            self._group.has_common_store = True
        drifted = replica_drift.drifted([result.replica_hashes for result in results])
        info = commit(
            self._destination,
            self._request,
            [result.parts for result in results],
            [result.findings for result in results],
            logical_bytes=self._captured.logical_bytes + sum(result.reported_bytes for result in results),
            meter=self._meter,
            view=self._engine.log.view(),
            txn=self._txn,
            streams="" if self._captured.own is None else RULE,
            mark=self._mark(drifted),
        )
        return self._outcome(info.n) | {"drift": [[*pair] for pair in drifted]}

    def require_same_options(self, records: Sequence[Body]) -> None:
        """Raises if `compare` found options that differ, with the values that a few ranks reported.

        Raises:
            InvalidOptionError: the options differ.
        """
        if self._differing.reporters:
            raise self._differing.error({rank: records[rank] for rank in self._differing.reporters}, self._group.in_job)

    def _mark(self, drifted: Sequence[tuple[int, int]]) -> tuple[str, str] | None:
        if drifted:
            return replica_drift.MARK, replica_drift.reason(drifted, self._request.ref)
        return (replica_drift.MARK, self._differing_copies) if self._differing_copies else None

    def _outcome(self, n: int) -> Body:
        entry = next(self._engine.log.entries(n))
        op = next(op for op in entry.ops if op.name in ("put", "staged") and op.fields["txn"] == self._txn)
        info = SnapshotRow.of_op(op.fields, n, entry.time_ns)
        noted = {"attributes": info.attributes, "duration_ns": info.duration_ns}
        return {key: op.fields[key] for key in REPORTED} | {"n": n, "time_ns": info.time_ns, "arrived_ns": info.arrived_ns, **noted}

    def _difference(self, results: Sequence[RankResult]) -> str:
        """The ranks that differ though they should hold the same data, in words; empty if none do."""
        layouts: dict[int, Layout] = {}
        stages: list[PipelineStage] = []
        layout_of = self._planning.layout_of
        for first in first_ranks(layout_of) if layout_of and not self._planning.turn else ():
            own = ranks_with_layout(layout_of, first, len(results))
            stages.append(PipelineStage(self._engine, own, [results[rank].parts.ulids[0] for rank in own]))
            layouts |= dict.fromkeys(own, stages[-1].layout)
        digests = [result.replicas or ReplicaDigests({}, b"") for result in results]
        problem = differences(digests, [layouts.get(rank, self._captured.layout) for rank in range(len(results))])
        return problem or (contradiction(stages) if stages else "")

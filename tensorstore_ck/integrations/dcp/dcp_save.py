"""`DcpSave`: one rank's side of one save. DCP calls its phases: each rank writes its part, and the coordinator commits those of all.

Nothing needs to be undone when a rank fails: DCP informs all ranks, and the written objects become garbage.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tensorstore_ck.common.free_space import require_free_space
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.compare_parent import ParentComparison
from tensorstore_ck.engine.write.pack_writer import PackWriter
from tensorstore_ck.engine.write.part_writer import TensorBlocks, WrittenPart, open_packs, store_part, write_blobs, write_tensors
from tensorstore_ck.engine.write.publish import RankParts, check_branch, checked_parts, retry_expired
from tensorstore_ck.engine.write.request import SaveChecks, SaveRequest, check_options
from tensorstore_ck.engine.write.sampled_checks import Sampling, turn_of
from tensorstore_ck.engine.write.suspicious_save import SaveFindings
from tensorstore_ck.engine.write.write_and_commit import StoreDestination, commit
from tensorstore_ck.engine.write.write_plan import plan_of
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.layout import layout_id
from tensorstore_ck.integrations.dcp.plans import Role
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.group.common_store import require_common_store
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.save_status import SaveStatus


class WriterReport(NamedTuple):
    """A rank's report on its part, for the coordinator."""

    part: int
    ref: str
    step: int | None
    layout: Digest
    parts: dict[str, Any]
    findings: dict[str, Any]


class Begun(NamedTuple):
    """A part whose tensors are durable."""

    role: Role
    captured: CapturedState
    """Without values."""
    packs: PackWriter
    tensors: TensorBlocks
    block_bytes: int
    anchor: int


def coordinators_request(
    context: SaveContext,
    ref: str,
    *,
    step: int | None,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, object] | None,
    checks: SaveChecks,
    adopts_head: bool,
) -> SaveRequest:
    """The request of the rank that publishes. `adopts_head`: the first save of this handle to the ref continues from its head.

    Raises:
        InvalidOptionError, InvalidNameError: an argument is invalid.
        ConflictError: the ref is not where it must be.
        QuotaExceededError: the quota of the ref is used up.
    """
    engine, fence = context.engine, context.fence
    options = check_options(engine, ref, step=step, metrics=metrics, metadata=metadata, **checks._asdict())
    view = engine.log.newest_view()
    if adopts_head:
        fence.adopt(view, ref)
    request = fence.request_at(engine, view, options)
    check_branch(engine, view, ref, request.expect)
    return request


def ranks_request(context: SaveContext, ref: str, step: int | None, checks: SaveChecks) -> SaveRequest:
    """The request of a rank that publishes nothing: it takes the branch's head for the parent."""
    engine = context.engine
    engine.require_writable()
    branch = engine.log.newest_view().branch(ref)
    parent = None if branch is None else branch.root
    coding, sampling = engine.codecs.coding(ref), Sampling(verify_share=checks.verify_capture)
    return SaveRequest(ref, step, parent, expect=None, metadata=b"", metrics={}, coding=coding, nearest=parent, sampling=sampling)


class DcpSave:
    """See `Runnable`: the save queue has it between the calls of DCP. `run` is the coordinator's commit."""

    key = b""

    def __init__(self, context: SaveContext, request: SaveRequest, rank: int) -> None:
        self.ref, self.step, self.rank = request.ref, request.step, rank
        self.begun: Begun | None = None
        """This rank's part, until its values are known."""
        self.gathered: tuple[CapturedState, Sequence[WriterReport]] | None = None
        """On the coordinator, before `run`: its own state, with the values of all ranks; the others' reports, by the number of the part."""
        self._request = request
        self._context, self._engine = context, context.engine
        self._destination = StoreDestination(context.engine)
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """`run` raises it; DCP informs the other ranks."""
        self._error = error

    # --- every rank ---------------------------------------------------------------------------------------------------

    def write_tensors(self, role: Role, captured: CapturedState, meter: SaveMeter) -> Begun:
        """The coordinator's call: the values of all ranks are not known yet. Raises `NoSpaceError` if its tensors need more space."""
        self._prepare(role, captured, meter)
        self.begun = self._begin(role, captured, meter)
        return self.begun

    def write_part(self, role: Role, captured: CapturedState, meter: SaveMeter) -> tuple[Begun, WriterReport]:
        """The call of the other ranks. Raises `NoSpaceError` if there is not enough space for this rank's tensors."""
        self._prepare(role, captured, meter)

        def attempt() -> tuple[Begun, WrittenPart, RankParts, SaveFindings]:
            begun = self._begin(role, captured, meter)
            return begun, *self._complete(begun, captured, meter)

        begun, written, parts, findings = retry_expired(attempt)
        self._engine.keep_part(written.ulid, written.part)
        self._engine.index.add(written.added.items(), published_at=parts.checked)  # this rank does not learn the outcome
        return begun, WriterReport(role.part, self.ref, self.step, layout_id(role.layout), parts.record(), findings.record())

    def _prepare(self, role: Role, captured: CapturedState, meter: SaveMeter) -> None:
        """Prepares a save before its first write: takes its share of the job's write rate, and checks the space for a ref's first save."""
        engine, size = self._engine, sum(source.size_bytes for source in captured.sources)
        meter.expect("hash", size)
        engine.writes.share(role.parts)
        view = engine.log.view()
        engine.limit_writes(view, self.ref)
        is_first = view.branch(self.ref) is None
        try:
            require_free_space(engine.backend, engine.min_free, size if is_first else 0, f"the save to {self.ref!r}")
        except StoreError as exc:
            raise self._context.explained(exc)  # noqa: B904 - it has its cause

    def _begin(self, role: Role, captured: CapturedState, meter: SaveMeter) -> Begun:
        anchor, view, block_bytes = self._engine.log.sync().n, self._engine.log.view(), self._engine.config.block_bytes
        sampling = self._request.sampling._replace(turn=turn_of(None, self.step))  # ranks may see different parents
        known, coding = self._destination.known(self._request, view, role.part, role.parts), self._request.coding
        with open_packs(self._engine, known, meter) as packs:
            tensors = write_tensors(captured, plan_of(captured, role.author, block_bytes), packs, coding=coding, sampling=sampling)
        tensors.sample.verify(tensors.plan.inlined, tensors.inline)
        return Begun(role=role, captured=captured, packs=packs, tensors=tensors, block_bytes=block_bytes, anchor=anchor)

    def _complete(self, begun: Begun, captured: CapturedState, meter: SaveMeter) -> tuple[WrittenPart, RankParts, SaveFindings]:
        """Writes the part, with the values in `captured`, if any."""
        engine, author, view = self._engine, begun.role.author, self._engine.log.view()
        plan = plan_of(captured, author, begun.block_bytes)
        with open_packs(engine, self._destination.known(self._request, view, author.rank, author.world_size), meter) as packs:
            blobs = write_blobs(captured, plan, packs, author=author, coding=self._request.coding)
        tensors = begun.tensors._replace(inline=bytes(captured.sources.gather(plan.inlined.ranges)), plan=plan)
        written = store_part(
            engine, captured=captured, blobs=blobs, tensors=tensors, packs=[begun.packs, packs], anchor=begun.anchor, author=author
        )
        return (
            written,
            checked_parts(engine, [written], begun.anchor, engine.log.newest_view()),
            ParentComparison(engine=engine, view=view, written=written, captured=captured, request=self._request).examine(),
        )

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def run(self, status: SaveStatus) -> SnapshotRow:
        """Writes the coordinator's part, and commits what all ranks have written."""
        if self._error is not None:
            raise self._error
        try:
            info = self._commit(status.meter)
        except StoreError as exc:
            raise self._context.explained(exc)  # noqa: B904 - it has its cause
        if not self._engine.backend.is_local:
            self._context.note_speed(status)
        self._context.fence.note(self.ref, info.root, info.root)
        return info

    def _commit(self, meter: SaveMeter) -> SnapshotRow:
        assert self.gathered is not None
        captured, others = self.gathered
        reports = [RankParts.of_record(report.parts) for report in others]
        findings = [SaveFindings.of_record(report.findings) for report in others]

        def attempt() -> SnapshotRow:
            assert self.begun is not None
            written, own, own_findings = self._complete(self.begun, captured, meter)
            self._destination.wrote(self._request, [written])
            if len(reports) > self._context.common_ranks:  # a handle may save for several groups, one after the other
                require_common_store(self._engine, [report.ulids[0] for report in [own, *reports]])
                self._context.common_ranks = len(reports)
            info = commit(
                self._destination,
                self._request,
                [own, *reports],
                [own_findings, *findings],
                logical_bytes=captured.logical_bytes,
                meter=meter,
                view=self._engine.log.view(),
            )
            self._destination.keep(info)
            return info

        def begin_again() -> None:
            assert self.begun is not None
            self.begun = self._begin(self.begun.role, captured, meter)

        return retry_expired(attempt, begin_again)

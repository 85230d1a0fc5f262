"""Copies refs with their histories from one store to another: missing snapshots, oldest first, each published when it is complete.

To resume a killed copy, run it again. The target's histories are never rewritten: a diverged ref is not changed. Metrics and marks
that were added later are copied, too; pins and forgotten snapshots are not.
"""

import shlex
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from tensorstore_ck.common.executor import Executor, require_no_rate
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import rescue_if_expired
from tensorstore_ck.engine.write.branch_conflict import moved_by
from tensorstore_ck.errors import (
    ConflictError,
    DamageError,
    FormatVersionError,
    InvalidOptionError,
    LogChangedError,
    NotFoundError,
    SnapshotExpiredError,
    StoreError,
    UntrustedError,
)
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.maintenance.copy_store.blocks import Pace
from tensorstore_ck.maintenance.copy_store.branch_plan import BranchPlan, plan_branch
from tensorstore_ck.maintenance.copy_store.copy_snapshot import CopyMeter, SnapshotCopier
from tensorstore_ck.maintenance.copy_store.report import CopiedRef, CopyReport, Progress

NOTES_AN_ENTRY: Final = 64
MAX_NAMES_SHOWN: Final = 8
DAMAGED: Final = "damaged"


class _RefPlan(NamedTuple):
    """A ref of the source, and what the target lacks of it."""

    name: str
    kind: str
    held: list[Ulid]
    """Its snapshots in the source, oldest first."""
    branch: BranchPlan | None
    missing: list[SnapshotRow]
    """Snapshots that the target's branch must still move to, or that a tag must still name."""
    error: StoreError | None


def copy_refs(
    source: Engine,
    target: Engine,
    *,
    refs: Sequence[str] = (),
    pace: Pace | None = None,
    progress: Progress = lambda done, total: None,
    executor: Executor | None = None,
) -> CopyReport:
    """See `copy`. The report has the error of a ref that cannot be copied; the others are copied.

    `executor` copies pieces of up to `PIECE_BYTES`; without one they are copied here, one after another.

    Raises:
        NotFoundError: a glob matches no ref.
        InvalidOptionError: both are the same store, or cut blocks differently.
        RetryableError: a backend did not answer; copied data stays, and the next copy resumes there.
    """
    _require_compatible(source, target)
    require_no_rate(pace, executor)
    target.require_writable()
    source.log.sync()
    target.log.sync()
    return _Copy(source, target=target, pace=pace, progress=progress, executor=executor).run(refs)


def _require_compatible(source: Engine, target: Engine) -> None:
    one, other = source.backend.url, target.backend.url
    if source.config.uuid == target.config.uuid:
        raise InvalidOptionError(
            f"{one} and {other} are the same store, or one is a file copy of the other: copy to a separate store, as `tsck init URL` "
            f"makes; or give the copy an identity of its own: `tsck adopt -s {shlex.quote(other)}`",
            object_id=other,
        )
    if source.config.block_bytes != target.config.block_bytes:
        raise InvalidOptionError(
            f"{one} cuts blocks at {source.config.block_bytes} bytes, and {other} at {target.config.block_bytes}: their snapshots differ; "
            "copy to a store that was made with the same block size",
            object_id=other,
        )


class _Copy:
    """A running copy."""

    def __init__(self, source: Engine, target: Engine, pace: Pace | None, progress: Progress, executor: Executor | None) -> None:
        self._source = source
        self._target = target
        self._pace = pace
        self._progress = progress
        self._executor = executor
        self._warnings: list[str] = []

    @property
    def _from(self) -> RefTable:
        """The refs of the source as of now: others may change them while snapshots are copied."""
        return self._source.log.view()

    @property
    def _to(self) -> RefTable:
        return self._target.log.view()

    def run(self, globs: Sequence[str]) -> CopyReport:
        view = self._from
        plans = [self._plan(view, name, kind) for name, kind in _chosen(view, globs)]
        there = {info.root for plan in plans for info in _infos(view, plan.held) if self._to.by_root(info.root) is not None}
        needed = {info.root: info.logical_bytes for plan in plans for info in plan.missing if info.root not in there}
        self._meter = CopyMeter(self._progress, sum(needed.values()))
        self._copier = SnapshotCopier(source=self._source, target=self._target, pace=self._pace, meter=self._meter, executor=self._executor)
        copied = self._copy_all({plan.name: plan for plan in plans})
        meter = self._meter
        return CopyReport(
            refs=tuple(copied[plan.name] for plan in plans),
            snapshots=meter.snapshots,
            snapshots_there=len(there),
            blocks=meter.blocks,
            blocks_there=meter.blocks_there,
            read_bytes=meter.read_bytes,
            written_bytes=meter.written_bytes,
            warnings=tuple(dict.fromkeys(self._warnings)),
        )

    def _plan(self, view: RefTable, name: str, kind: str) -> _RefPlan:
        tag = view.tag_row(name)
        held = [move.ulid for move in view.moves(name, newest_first=False)] if kind == "branch" else [] if tag is None else [tag.ulid]
        try:
            if self._source.trust is not None:
                self._source.resolve(name, view)
            if kind == "branch":
                branch = plan_branch(self._source, self._target, name, view)
                missing = self._admitted(view, name, [move.ulid for move in branch.moves])
                return _RefPlan(name, kind=kind, held=held, branch=branch, missing=missing, error=None)
            missing = [] if self._is_tag_there(view, name) else _infos(view, held)
            return _RefPlan(name, kind=kind, held=held, branch=None, missing=missing, error=None)
        except (ConflictError, DamageError, UntrustedError, LogChangedError) as exc:
            return _RefPlan(name, kind=kind, held=held, branch=None, missing=[], error=exc)

    def _admitted(self, view: RefTable, name: str, ulids: list[Ulid]) -> list[SnapshotRow]:
        """The snapshots of a branch that the source's trust file admits at `name@STEP`: a target with a key signs what it moves to."""
        infos, trust = _infos(view, ulids), self._source.trust
        signed = None if trust is None else trust.signed(self._source.log, view, name)
        admitted = infos if signed is None else [info for info in infos if (info.root.hex(), info.step) in signed]
        if len(admitted) < len(infos):
            self._warnings.append(f"snapshots of {name!r} without a valid signature were left out: {len(infos) - len(admitted):,}")
        return admitted

    def _is_tag_there(self, view: RefTable, name: str) -> bool:
        source, there = view.tag(name), self._to.tag(name)
        if there is not None and there == source:
            return True
        _require_free(self._to, name, self._target.backend.url)
        return False

    def _copy_all(self, plans: dict[str, _RefPlan]) -> dict[str, CopiedRef]:
        """Copies a snapshot with the branch that it was saved to, before refs that moved to it: the target's entry names one branch."""
        copied: dict[str, CopiedRef] = {}
        begun: set[str] = set()
        stack = [*reversed(plans)]
        while stack:
            name = stack.pop()
            if name in begun and name not in copied:
                copied[name] = self._copy(plans[name])
            elif name not in begun:
                begun.add(name)
                saved_to = dict.fromkeys(info.ref for info in plans[name].missing)
                stack += [name, *(ref for ref in saved_to if ref in plans and ref not in begun)]
        return copied

    def _copy(self, plan: _RefPlan) -> CopiedRef:
        copied_before, error = self._meter.snapshots, plan.error
        outcome = "ahead" if plan.branch and plan.branch.is_ahead else "copied" if plan.missing else "there"
        if error is None:
            try:
                if not self._bring_all(plan):
                    outcome, error = "behind", self._why_behind(plan)
                self._copy_notes(plan)
            except (ConflictError, DamageError, FormatVersionError) as exc:
                error = exc
        copied = self._meter.snapshots - copied_before
        if error is not None and outcome != "behind":
            outcome = "failed"
        branch = self._to.branch(plan.name)
        root = branch.root if branch is not None else self._to.tag(plan.name)
        return CopiedRef(
            name=plan.name, kind=plan.kind, outcome=outcome, root=root.hex() if root is not None else None, snapshots=copied, error=error
        )

    def _bring_all(self, plan: _RefPlan) -> bool:
        """Moves the target's ref through all missing snapshots; whether it reached the last one."""
        head = plan.branch.head if plan.branch is not None else None
        last_brought: Ulid | None = None
        for planned in plan.missing:
            info = self._from.snapshot(planned.ulid)
            if info is None or (info.root, info.step) != (planned.root, planned.step):  # or somebody forged the log
                self._warnings.append(f"a snapshot of {plan.name!r} was left out: it was forgotten in the source while it was copied")
                continue
            what = f"snapshot {info.root.hex()[:16]} (step {info.step}) of {plan.name!r}"
            if info.mark == DAMAGED:
                self._warnings.append(f"{what} was left out: it is marked damaged in the source")
                continue
            arrange = self._to_branch(plan.name, head, info) if plan.kind == "branch" else self._to_tag(plan.name, info)
            try:
                if not self._bring(info, plan.name, arrange):
                    self._warnings.append(f"{what} was left out: it was forgotten in the source while it was copied")
                    continue
            except DamageError as exc:
                raise type(exc)(f"{what} cannot be copied: {exc}", object_id=exc.object_id) from exc
            head, last_brought = info.root, info.ulid
        return not plan.missing or last_brought == plan.missing[-1].ulid

    def _why_behind(self, plan: _RefPlan) -> DamageError | None:
        """None: it was forgotten while it was copied, and the next copy plans again."""
        info = self._from.snapshot(plan.missing[-1].ulid)
        if info is None or info.mark != DAMAGED:
            return None
        name = plan.name
        where = shlex.quote(self._source.backend.url)
        is_branch = plan.kind == "branch"
        advice = f"`tsck reset {name} {name}~1 -s {where}`, or train on from there" if is_branch else f"`tsck untag {name} -s {where}`"
        return DamageError(
            f"{plan.kind} {name!r} is at snapshot {info.root.hex()[:16]} (step {info.step}) in the source, which is marked damaged and was "
            f"left out. Move the {plan.kind} in the source ({advice}), and copy again",
            object_id=info.root.hex(),
        )

    def _bring(self, info: SnapshotRow, ref: str, arrange: "_Arrange") -> bool:
        """Moves the ref to a snapshot, copied if the target lacks it; whether the source still has it."""

        def build(view: RefTable) -> list[Op]:
            there = view.by_root(info.root)
            if there is None:
                raise SnapshotExpiredError(f"snapshot {info.root.hex()} was freed", object_id=info.root.hex())
            return [*arrange(view, None), *rescue_if_expired(self._target, view, there)]

        if self._to.by_root(info.root) is not None:
            try:
                self._target.log.append(build)
            except SnapshotExpiredError:
                pass  # copied again
            else:
                return True
        return self._copier.copy(info, ref, arrange) is not None

    def _to_branch(self, name: str, head: Digest | None, info: SnapshotRow) -> "_Arrange":
        def arrange(view: RefTable, put: Op | None) -> list[Op]:
            branch = view.branch(name)
            if (branch.root if branch is not None else None) != head or view.tag(name) is not None:
                how = "" if branch is None else f" ({moved_by(self._target, branch)})"
                raise ConflictError(
                    f"{name!r} was moved in {self._target.backend.url} by another process while it was copied{how}: run the copy again",
                    object_id=name,
                )
            move = put or (Op.branch(name, info.root) if branch is None else Op.reset(name, info.root))
            return [move, *_notes(info, view, put)]

        return arrange

    def _to_tag(self, name: str, info: SnapshotRow) -> "_Arrange":
        def arrange(view: RefTable, put: Op | None) -> list[Op]:
            _require_free(view, name, self._target.backend.url)
            tag = [Op.tag(name, info.root), *_notes(info, view, put)]
            if put is None:
                return tag
            # A put moves a branch: this entry makes one of that name, and forgets it permanently, which leaves only the tag.
            head = view.head()
            return [put, Op.expire(name, None), Op.purge(head.n + 1 if head else 1, name), *tag]

        return arrange

    def _copy_notes(self, plan: _RefPlan) -> None:
        """Copies metrics and marks that were added after the snapshots were copied."""
        infos = [info for info in _infos(self._from, list(dict.fromkeys(plan.held))) if _notes(info, self._to, None)]
        for at in range(0, len(infos), NOTES_AN_ENTRY):
            some = infos[at : at + NOTES_AN_ENTRY]
            self._target.log.append(lambda view, some=some: [op for info in some for op in _notes(info, view, None)])  # type: ignore[misc]


_Arrange = Callable[[RefTable, Op | None], list[Op]]
"""An `Arrange` that also moves the ref to an existing snapshot: then without a put."""


def _infos(view: RefTable, ulids: Sequence[Ulid]) -> list[SnapshotRow]:
    return [info for ulid in ulids if (info := view.snapshot(ulid)) is not None]


def _chosen(view: RefTable, globs: Sequence[str]) -> list[tuple[str, str]]:
    """The branches, then the tags, whose names match."""
    every = [(name, "branch") for name in view.branches()] + [(name, "tag") for name in view.tags()]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name, _ in every):
            names = [name for name, _ in every]
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
            known = f"refs: {shown}" if names else "it has no refs yet"
            raise NotFoundError(f"no branch or tag of the source matches {glob!r} ({known})", object_id=glob)
    return [(name, kind) for name, kind in every if not globs or any(fnmatchcase(name, glob) for glob in globs)]


def _require_free(view: RefTable, name: str, url: str) -> None:
    kind = "branch" if view.branch(name) is not None else "tag" if view.tag(name) is not None else None
    if kind is not None:
        what = "another snapshot has that tag" if kind == "tag" else "a branch has that name"
        where = shlex.quote(url)
        renamed = f"`tsck branch NAME {name} -s {where}` and `tsck forget {name} -s {where}`"
        advice = f"`tsck untag {name} -s {where}`" if kind == "tag" else f"keep the branch under another name with {renamed}"
        raise ConflictError(
            f"tag {name!r} was not copied: in {url} {what}; tags never move. To take the source's: {advice}, and copy again", object_id=name
        )


def _notes(info: SnapshotRow, view: RefTable, put: Op | None) -> list[Op]:
    """Metrics and marks that were added to a snapshot after its put, and that the target lacks."""
    there = view.by_root(info.root)
    if there is None and put is None:
        return []
    known = dict(put.fields["metrics"]) if put is not None else dict(there.metrics) if there is not None else {}
    fresh = {name: value for name, value in info.metrics.items() if repr(known.get(name)) != repr(value)}  # NaN is NaN
    mark, reason = (there.mark, there.reason) if there is not None else ("", "")
    ops = [Op.annotate(info.root, fresh)] if fresh else []
    if info.mark not in ("", DAMAGED) and mark != DAMAGED and (mark, reason) != (info.mark, info.reason):
        ops.append(Op.mark(info.root, info.mark, info.reason))
    return ops

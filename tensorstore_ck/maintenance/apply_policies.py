"""Sets, shows and applies retention policies of branches, and reports what that frees."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.gc.exclusive_bytes import ExclusiveBytes
from tensorstore_ck.gc.roots import UNDO, roots
from tensorstore_ck.log import Op, RefTable
from tensorstore_ck.log.field_checks import is_ref_glob
from tensorstore_ck.log.retention import (
    Policy,
    UnmatchedRuleWarning,
    Verdict,
    candidates,
    expire,
    policies_of,
    tags_and_pins,
    unmatched_rules,
    verdicts,
)
from tensorstore_ck.log.snapshot import COLUMNS, Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotVerdict:
    """The verdict on one snapshot of a branch."""

    snapshot: Snapshot
    stays: bool
    why: tuple[str, ...]
    """Everything that keeps it; or why it is removed."""
    frees_bytes: int | None
    """Bytes that gc frees with it after the undo window; each block counts for one snapshot. None if it stays, and without a dry run, as
    it requires reading the parts of all snapshots that stay."""


@dataclass(frozen=True, slots=True)
class BranchVerdicts:
    """The verdicts on a branch's history."""

    ref: str
    policies: tuple[str, ...]
    """Globs of the policies that apply to it."""
    snapshots: tuple[SnapshotVerdict, ...]
    """Oldest first."""


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """The snapshots that were removed from histories; in a dry run, those that would be."""

    dry_run: bool
    branches: tuple[BranchVerdicts, ...]
    """Branches with a policy."""

    def __repr__(self) -> str:
        stays = sum(len(branch.snapshots) for branch in self.branches) - self.going
        going = f"{self.going:,} {'would go' if self.dry_run else 'went'}"
        frees = "" if self.frees_bytes is None else f", which frees {human_bytes(self.frees_bytes)}"
        return f"RetentionReport({len(self.branches):,} branches: {stays:,} snapshots stay, {going}{frees})"

    def _repr_html_(self) -> str:
        rows = (
            [
                *snapshot.snapshot.cells(),
                "stays" if snapshot.stays else "goes",
                ", ".join(snapshot.why),
                "" if snapshot.frees_bytes is None else human_bytes(snapshot.frees_bytes),
            ]
            for branch in self.branches
            for snapshot in reversed(branch.snapshots)
        )
        return html_table(repr(self), (*COLUMNS, "", "why", "frees"), rows)

    @property
    def going(self) -> int:
        """Number of snapshots removed from histories."""
        return sum(not verdict.stays for branch in self.branches for verdict in branch.snapshots)

    @property
    def frees_bytes(self) -> int | None:
        """Bytes that gc frees after the undo windows; None without a dry run."""
        return sum(verdict.frees_bytes or 0 for branch in self.branches for verdict in branch.snapshots) if self.dry_run else None


def set_policy(engine: Engine, glob: str, policy: Policy | None) -> None:
    """Sets the policy for branches that match `glob`, in one log entry; None removes it.

    Raises:
        InvalidOptionError: no ref can match the glob, or packs cannot be moved to a location of the policy.
        InvalidUrlError, MissingExtraError: a location of the policy cannot be opened.
        NotFoundError: there is no policy to remove.
    """
    engine.require_writable()
    if not is_ref_glob(glob):
        raise InvalidOptionError(f"{glob!r} matches no ref: write a name, with * for any characters, such as runs/*", object_id=str(glob))

    for stage in policy.move_after if policy is not None else ():
        engine.placed.check(stage.url)

    def build(view: RefTable) -> list[Op]:
        if policy is None and glob not in view.policies():
            raise NotFoundError(f"there is no policy for {glob!r}: see `tsck policy show`", object_id=glob)
        return [Op.policy(glob, None if policy is None else policy.encode())]

    engine.log.append(build)
    if policy is not None:
        view = engine.log.view()
        matched = (ref for ref in view.branches() if fnmatchcase(ref, glob))
        _warn_of(unmatched_rules(engine.backend.url, ((ref, {glob: policy}, [*view.history(ref)]) for ref in matched)))


def _warn_of(problems: Iterable[str]) -> None:
    for problem in problems:
        warnings.warn(problem, UnmatchedRuleWarning, stacklevel=user_stacklevel())


def set_rules(engine: Engine, glob: str, rules: Mapping[str, object]) -> Policy:
    """See `Store.set_policy`."""
    policy = Policy.of_rules(rules)
    set_policy(engine, glob, policy)
    return policy


def policies(engine: Engine) -> dict[str, Policy]:
    """Glob -> policy. Raises `InvalidOptionError`: a newer build made one of them."""
    policies = {}
    for glob, row in engine.log.newest_view().policies().items():
        try:
            policies[glob] = Policy.of(**row.rules)
        except InvalidOptionError as exc:
            raise InvalidOptionError(f"the policy for {glob!r} cannot be used: {exc}", object_id=glob) from exc
    return policies


def kept_by(engine: Engine, ref: str) -> dict[str, tuple[str, ...]]:
    """Id of each snapshot of a branch -> tags, pins and rules that keep it, or "goes" and why the next save removes it.

    Warns of rules that match nothing in the branch's history.
    Byte limits are ignored here, and so are all policies if a newer build made one of them.
    """
    view = engine.log.newest_view()
    if view.branch(ref) is None:
        return {}
    own: dict[str, Policy] = {}
    with suppress(InvalidOptionError):
        own = policies_of(view, ref)
    holders = tags_and_pins(view)
    if not own:
        return {ulid_text(candidate.info.ulid): candidate.held_by for candidate in candidates(view, ref, holders) if candidate.held_by}
    judged = verdicts(view, ref, own.values(), engine.clock(), holders=holders)
    _warn_of(unmatched_rules(engine.backend.url, [(ref, own, [verdict.info for verdict in judged])]))
    return {ulid_text(verdict.info.ulid): verdict.why if verdict.stays else ("goes", *verdict.why) for verdict in judged}


def retain(
    engine: Engine, refs: Sequence[str] = (), *, dry_run: bool = False, rules: Mapping[str, object] | None = None, glob: str | None = None
) -> RetentionReport:
    """Removes from histories what the policies do not keep, in one log entry for all branches: see `Store.apply_policies`.

    With `glob`, `rules` are tried as if they were set for this glob; other policies stay. `refs` are then the branches that it matches.

    Raises:
        NotFoundError: there is no such branch, or none matches `glob`.
        InvalidOptionError: a newer build made one of the policies; or `rules` without `dry_run`.
        DamageError: a snapshot whose size is needed cannot be read.
    """
    if rules is not None and not dry_run:
        raise InvalidOptionError("rules that are not set as a policy can only be tried: pass dry_run=True", object_id="rules")
    instead = None if rules is None else Policy.of_rules(rules)
    planned: dict[str, set[Ulid]] = {}
    problems: list[str] = []

    def plan(_: int, view: RefTable) -> RetentionReport:
        of_branch = _policies_of(view, refs, instead, glob)
        now_ns, holders = engine.clock(), tags_and_pins(view)
        judged = {
            ref: verdicts(view, ref, own.values(), now_ns, holders=holders, count_bytes=lambda: ExclusiveBytes(engine, view))
            for ref, own in of_branch.items()
            if own
        }
        histories = ((ref, of_branch[ref], [verdict.info for verdict in of_ref]) for ref, of_ref in judged.items())
        problems[:] = unmatched_rules(engine.backend.url, histories)
        planned.clear()
        planned.update({ref: {verdict.info.ulid for verdict in of_ref if not verdict.stays} for ref, of_ref in judged.items()})
        return _report(engine, view, of_branch, judged, dry_run=dry_run)

    report = at_newest(engine.log, plan)
    _warn_of(problems)
    if not dry_run:
        engine.require_writable()
        engine.log.append(lambda head: _expire_all(head, planned))
    return report


def _expire_all(head: RefTable, planned: Mapping[str, Collection[Ulid]]) -> list[Op]:
    holders = tags_and_pins(head)
    return [op for ref, going in planned.items() for op in expire(head, ref, going, holders)]


def _policies_of(view: RefTable, refs: Sequence[str], instead: Policy | None, glob: str | None) -> dict[str, Mapping[str, Policy]]:
    """Branch -> the policies to apply; the parameters are those of `retain`."""
    if glob is not None:
        refs = [ref for ref in view.branches() if fnmatchcase(ref, glob)]
        if not refs:
            raise NotFoundError(f"no branch matches {glob!r}", object_id=glob)
    for ref in refs:
        if view.branch(ref) is None:
            raise NotFoundError(f"there is no branch {ref!r}", object_id=ref)

    def policies_for(ref: str) -> dict[str, Policy]:
        if instead is None:
            return policies_of(view, ref)
        return {"(given)": instead} if glob is None else {**policies_of(view, ref), glob: instead}

    return {ref: policies_for(ref) for ref in refs or view.branches()}


def _report(
    engine: Engine, view: RefTable, of_branch: Mapping[str, Mapping[str, Policy]], judged: Mapping[str, list[Verdict]], *, dry_run: bool
) -> RetentionReport:
    going = {(ref, verdict.info.ulid) for ref, of_ref in judged.items() for verdict in of_ref if not verdict.stays}
    frees = _freed(engine, view, going) if going and dry_run else {}
    counted: set[Ulid] = set()

    def freed(verdict: Verdict) -> int | None:
        if verdict.stays or not dry_run:
            return None
        if verdict.info.ulid in counted:
            return 0
        counted.add(verdict.info.ulid)
        return frees.get(verdict.info.ulid, 0)

    def row(verdict: Verdict) -> SnapshotVerdict:
        return SnapshotVerdict(Snapshot.from_info(verdict.info), verdict.stays, verdict.why, freed(verdict))

    branches = (BranchVerdicts(ref, tuple(of_branch[ref]), tuple(map(row, of_ref))) for ref, of_ref in judged.items())
    return RetentionReport(dry_run, tuple(branches))


def _freed(engine: Engine, view: RefTable, going: set[tuple[str, Ulid]]) -> dict[Ulid, int]:
    """Bytes that each removed snapshot adds to the remaining ones, and to those removed before it."""
    added = ExclusiveBytes(engine, view)
    gone: list[Ulid] = []
    for ulid, labels in sorted(roots(view).items()):
        left = [label for label in labels if label != UNDO and (label, ulid) not in going]
        info = view.snapshot(ulid)
        if info is None:
            continue
        if left:
            added(info)
        elif labels != [UNDO]:
            gone.append(ulid)
    return {ulid: added(info) for ulid in gone if (info := view.snapshot(ulid)) is not None}

"""Addresses: how a user names a snapshot.

runs/gpt          branch or tag          runs/gpt@1000     newest of step 1000 in the branch's history
9f86d081...       root, or a unique prefix of one: of 8 digits or more, or of 4 or more where no ref has that name
runs/gpt~2        two before it, by parents
runs/gpt^staged   the newest snapshot staged for it and not published yet; without one, the branch itself
runs/gpt^best:val_loss       the one in the branch's history with the lowest value of a metric; runs/gpt^best:acc:max: the highest
"""

import math
import re
import shlex
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.similar_names import similar_names
from tensorstore_ck.errors import AmbiguousAddressError, InvalidNameError, NotFoundError
from tensorstore_ck.log import RefTable, SnapshotRow, validate_ref_name

STAGED: Final = "^staged"
BEST: Final = "^best:"
_SUFFIX: Final = re.compile(r"(?P<base>[^@~^]+)(?:@(?P<step>[0-9]{1,19}))?(?:~(?P<back>[0-9]{1,9}))?")
_ROOT: Final = re.compile(r"[0-9a-f]{8,64}")
_SHORT_ROOT: Final = re.compile(r"[0-9a-f]{4,7}")


def is_staged_address(address: str) -> bool:
    """Whether the address names a staged snapshot."""
    return address.endswith(STAGED)


class Resolved(NamedTuple):
    """The target of an address."""

    info: SnapshotRow
    branch: str | None
    """The branch that the address goes through, if any."""
    branch_root: Digest | None
    """The root of that branch's head."""
    tag: str | None = None
    """The tag that the address goes through, if any."""
    is_staged: bool = False
    """The snapshot is staged for the branch, and not published yet."""


def resolve(view: RefTable, address: str) -> Resolved:
    """The snapshot at `address`.

    Raises:
        InvalidNameError: malformed.
        NotFoundError: nothing has this address; the message lists what exists.
        AmbiguousAddressError: a root prefix of several snapshots.
    """
    if isinstance(address, str) and is_staged_address(address):
        return _staged(view, address.removesuffix(STAGED))
    if isinstance(address, str) and BEST in address:
        return _best(view, address)
    match = _SUFFIX.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise InvalidNameError(
            f"{address!r} is not an address: use a ref, ref@step, ref~n, ref^best:metric, ref^staged, or a root (4 or more hex digits, "
            "such as `snapshot.root`)",
            object_id=str(address),
        )
    base, step, back, tag = match["base"], match["step"], int(match["back"] or 0), None
    branch = None if _ROOT.fullmatch(base) else view.branch(base)
    if branch is not None:
        ulid = branch.ulid if step is None else view.newest_with_step(base, int(step))
        if ulid is None:
            raise NotFoundError(f"{base!r} has no snapshot of step {step}: see `tsck log {base}`", object_id=address)
        info = view.snapshot(ulid)
    else:
        info, tag = _tag_or_root(view, base)
        if info is not None and step is not None and info.step != int(step):
            raise NotFoundError(f"{base!r} is a snapshot of step {info.step}, not {step}", object_id=address)
    if info is None:
        raise NotFoundError(_nothing_at(view, base), object_id=address)
    for before in range(back):
        parent = view.by_root(info.parent) if info.parent else None
        if parent is None:
            known = ("no snapshot", "one snapshot", f"{before:,} snapshots")[min(before, 2)]
            raise NotFoundError(f"{address!r}: {base!r} has {known} before it; see `tsck log {shlex.quote(base)}`", object_id=address)
        info = parent
    return Resolved(info, base if branch else None, branch.root if branch else None, tag)


def _staged(view: RefTable, name: str) -> Resolved:
    validate_ref_name(name)
    branch = view.branch(name)
    newest, line = None, {branch.root if branch is not None else None}
    for info in sorted((info for _, info in view.all_staged() if info.ref == name), key=lambda info: info.n):
        if info.parent in line:  # otherwise the branch has moved on without this snapshot
            newest = info
            line.add(info.root)
    if newest is None:
        return resolve(view, name)
    return Resolved(newest, name, branch.root if branch is not None else None, is_staged=True)


def _best(view: RefTable, address: str) -> Resolved:
    """The best snapshot in a branch's history without a mark: of equal ones the newer, as `keep_best` keeps it."""
    name, _, metric = address.partition(BEST)
    highest = metric.endswith(":max")
    metric = metric.removesuffix(":max") if highest else metric.removesuffix(":min")
    validate_ref_name(name)
    branch = view.branch(name)
    if branch is None:
        raise NotFoundError(f"{address!r} needs a branch: {_nothing_at(view, name)}", object_id=address)
    infos = [info for info in view.history(name) if not info.mark]
    measured = [info for info in infos if not math.isnan(info.metrics.get(metric, math.nan))]
    if not measured:
        known = sorted({name for info in infos for name in info.metrics})
        listed = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        raise NotFoundError(f"no unmarked snapshot of {name!r} has a metric {metric!r} (metrics: {listed or 'none'})", object_id=address)
    best = min(measured, key=lambda info: (-1 if highest else 1) * info.metrics[metric])  # the first of equal ones, so the newest
    return Resolved(best, name, branch.root)


def _tag_or_root(view: RefTable, base: str) -> tuple[SnapshotRow | None, str | None]:
    """The snapshot, and the name of the tag, if it is one."""
    if not _ROOT.fullmatch(base):
        validate_ref_name(base)
        tag = view.tag_row(base)
        if tag is not None or not _SHORT_ROOT.fullmatch(base):
            return (view.snapshot(tag.ulid), base) if tag else (None, None)
    roots = view.roots_with_prefix(base)
    if len(roots) > 1:
        raise AmbiguousAddressError(f"{base!r} matches {len(roots)} snapshots or more: give more digits of the root", object_id=base)
    if roots:
        return view.by_root(roots[0]), None
    return next((info for _, info in view.all_staged() if info.root.hex().startswith(base)), None), None


def _nothing_at(view: RefTable, base: str) -> str:
    if view.was_forgotten(base):
        return f"there is no ref {base!r} any more: it was forgotten; `tsck undo {base}` brings it back"
    names = [*view.branches(), *view.tags()]
    similar = similar_names(base, names)
    listed = [*similar, *sorted({*names} - {*similar})]
    known = ", ".join(listed[:8]) + (", ..." if len(names) > 8 else "") if names else "the store has no refs yet"
    return f"there is no ref or snapshot {base!r} (refs: {known})"

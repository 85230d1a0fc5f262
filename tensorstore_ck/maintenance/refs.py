"""Lists refs and the history of branches, and changes refs and snapshots.

Functions of the engine: they know no session.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

from tensorstore_ck.common.ids import Digest, Ulid, ulid_text
from tensorstore_ck.common.units import parse_seconds
from tensorstore_ck.engine.engine import Engine, current_user
from tensorstore_ck.engine.reachability import rescue_if_expired
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.record import check_metrics
from tensorstore_ck.log import BranchMove, Op, RefTable, SnapshotInfo, validate_ref_name
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.ref_signer import MOVES
from tensorstore_ck.log.snapshot import Snapshot, pinned_with_root
from tensorstore_ck.log.snapshot_log import SnapshotLog, SnapshotsByName
from tensorstore_ck.log.training_line import training_line


def history(engine: Engine, ref: str | None, limit: int | None) -> SnapshotLog:
    """See `Store.log`."""
    view = engine.log.readable_view()
    if ref is not None and view.branch(ref) is None:
        return SnapshotLog([Snapshot.from_info(resolve(view, ref).info)])
    since, lines = dict[Ulid, int](), set[Ulid]()
    visits, found = list[SnapshotInfo](), cache(view.snapshot)
    newest, last_saved = list[SnapshotInfo](), 0

    def newest_first(infos: list[SnapshotInfo]) -> list[SnapshotInfo]:
        return sorted({info.ulid: info for info in infos}.values(), key=lambda info: -max(info.n, since[info.ulid]))

    by_age = sorted(((head.name, head.n) for head in view.heads()), key=lambda head: -head[1]) if ref is None else [(ref, 0)]
    for name, n in by_age:
        if ref is None and n < last_saved:
            break  # the other branches moved last before any of the newest was saved
        moves = _newest_moves(view, name, limit) if ref is None else list(view.moves(name, limit=limit))
        infos = [info for move in moves if (info := found(move.ulid)) is not None]
        for move in moves:
            since[move.ulid] = max(move.n if move.op == "reset" else 0, since.get(move.ulid, 0))
        visits += infos
        lines |= {info.ulid for info in training_line(reversed(infos))}
        newest += infos
        if limit and len(newest) >= 2 * limit:  # not for each branch: that takes the square of their number
            newest = newest_first(newest)[:limit]
            last_saved = min(info.n for info in newest) if len(newest) == limit else 0
    if ref is None:
        visits = newest_first(visits)
    abandoned = {info.ulid for info in visits} - lines
    shown = visits[:limit]
    heads, own = {info.ulid: list[str]() for info in shown}, None if ref is None or limit is None else view.branch(ref)
    if own is not None and any(view.holds(ulid) > count for ulid, count in Counter(info.ulid for info in shown).items()):
        own = None  # a tag, a pin or another branch may be there, too
    for head in view.heads() if own is None else (own,):
        if head.ulid in heads:
            heads[head.ulid].append(head.name)
    named = {ulid_text(ulid): names for ulid, names in heads.items() if names}
    return SnapshotLog(map(Snapshot.from_info, shown), heads=named, abandoned=map(ulid_text, abandoned))


def _newest_moves(view: RefTable, branch: str, limit: int | None) -> list[BranchMove]:
    """The newest moves of a branch, until they lead to `limit` snapshots."""
    moves, seen = list[BranchMove](), set[Ulid]()
    for move in view.moves(branch):
        if move.ulid not in seen and len(seen) == limit:
            break
        seen.add(move.ulid)
        moves.append(move)
    return moves


def branches(engine: Engine) -> SnapshotsByName:
    """Every branch, and where it is."""
    view = engine.log.readable_view()
    rows = ((name, view.branch(name)) for name in view.branches())
    return _by_name(view, {name: row.ulid for name, row in rows if row is not None})


def tags(engine: Engine) -> SnapshotsByName:
    """Every tag, and where it is."""
    view = engine.log.readable_view()
    rows = ((name, view.tag_row(name)) for name in view.tags())
    return _by_name(view, {name: row.ulid for name, row in rows if row is not None})


def _by_name(view: RefTable, ulids: Mapping[str, Ulid]) -> SnapshotsByName:
    """The snapshots, one object for all names of each: anybody can make thousands of branches at one with a thousand metrics."""
    made = {ulid: Snapshot.from_info(info) for ulid in {*ulids.values()} if (info := view.snapshot(ulid)) is not None}
    return SnapshotsByName({name: made[ulid] for name, ulid in ulids.items() if ulid in made})


def branch(engine: Engine, name: str, at: str) -> Snapshot:
    """See `Store.branch`."""
    validate_ref_name(name)
    return _append(engine, at, lambda root: Op.branch(name, root))


def reset(engine: Engine, name: str, to: str) -> Snapshot:
    """See `Store.reset`."""
    validate_ref_name(name)
    return _append(engine, to, lambda root: Op.reset(name, root))


def tag(engine: Engine, name: str, at: str) -> Snapshot:
    """See `Store.tag`."""
    validate_ref_name(name)
    return _append(engine, at, lambda root: Op.tag(name, root))


def untag(engine: Engine, name: str) -> None:
    """See `Store.untag`."""
    engine.require_writable()
    engine.log.append(lambda view: [Op.untag(name, view)])


def annotate(engine: Engine, address: str, metrics: Mapping[str, float]) -> Snapshot:
    """See `Store.annotate`."""
    checked = check_metrics(metrics)
    return _append(engine, address, lambda root: Op.annotate(root, checked))


def mark(engine: Engine, address: str, mark: str, reason: str) -> Snapshot:
    """See `Store.mark`."""
    if mark not in ("bad", ""):
        raise InvalidOptionError(f"mark must be 'bad' or '', not {mark!r}", object_id="mark")
    return _append(engine, address, lambda root: Op.mark(root, mark, reason))


def finish(engine: Engine, ref: str) -> Snapshot:
    """See `Store.finish`."""
    validate_ref_name(ref)
    return _append(engine, ref, lambda root: Op.finished(ref, root))


def sign(engine: Engine, ref: str, expect: str) -> Snapshot:
    """See `Store.sign`."""
    engine.require_writable()
    validate_ref_name(ref)
    signer = engine.signer
    if signer is None:
        raise InvalidOptionError(f"signing {ref!r} needs a key: open the store with sign=, or give --sign FILE", object_id="sign")
    engine.log.append(lambda view: [signer.head(view, ref, expect)])
    return Snapshot.from_info(resolve(engine.log.view(), ref).info)


def pin(engine: Engine, address: str, *, reason: str, owner: str | None, expires: "str | float | None") -> Snapshot:
    """See `Store.pin`."""
    seconds = None if expires is None else parse_seconds(expires, "expires")
    expires_ns = None if seconds is None else engine.clock() + int(seconds * 1e9)
    return _append(engine, address, lambda root: Op.pin(root, owner or current_user(), reason, expires_ns))


def unpin(engine: Engine, address: str, owner: str | None) -> None:
    """See `Store.unpin`."""
    engine.require_writable()
    who = owner or current_user()
    engine.log.append(lambda view: [Op.unpin(ulid, who, view) for ulid in pinned_with_root(view, resolve(view, address).info, who)])


def _append(engine: Engine, address: str, make: Callable[[Digest], Op]) -> Snapshot:
    """Appends one operation on the snapshot at `address`; returns the snapshot as it is then.

    Raises:
        UntrustedError: it would move a ref to a snapshot that the user's trust file does not admit at this address.
    """
    engine.require_writable()
    infos: list[SnapshotInfo] = []

    def build(view: RefTable) -> list[Op]:
        resolved = resolve(view, address)
        infos[:] = [resolved.info]
        operation = make(resolved.info.root)
        operation.check(view)
        if operation.name in MOVES and engine.trust is not None:  # a signature of the new place would vouch for an untrusted one
            engine.trust.check(engine.log, view, resolved)
        return [operation, *rescue_if_expired(engine, view, infos[0])]

    engine.log.append(build)
    return Snapshot.from_info(engine.log.view().snapshot(infos[0].ulid) or infos[0])

"""Lists refs and the history of branches. Functions of the engine: they know no session."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

from tensorstore_ck.common.ids import Digest, Ulid, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import BranchMove, RefTable, SnapshotRow
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.log.snapshot_log import SnapshotLog, SnapshotsByName


def training_line(visits: Iterable[SnapshotRow]) -> list[SnapshotRow]:
    """The snapshots of a branch that led to its last one: without those from which training was taken back to an earlier one.

    It was taken back if the next snapshot is an earlier one again, or continues from one; or, if the one that it continues from is not
    kept, if its step is not higher.
    """
    line, numbers = list[SnapshotRow](), dict[Digest, int]()
    for info in visits:
        if (at := numbers.get(info.root)) is not None:
            keep = at
        elif info.parent is not None and (at := numbers.get(info.parent)) is not None:
            keep = at + 1
        else:
            keep = len(line)
            while keep and info.step is not None and (step := line[keep - 1].step) is not None and step >= info.step:
                keep -= 1
        for gone in line[keep:]:
            del numbers[gone.root]
        line[keep:] = [info]
        numbers[info.root] = keep
    return line


def history(engine: Engine, ref: str | None, limit: int | None) -> SnapshotLog:
    """See `Store.log`."""
    if limit is not None and (not hasattr(limit, "__index__") or limit < 0):
        raise InvalidOptionError(f"limit must be a number of snapshots, not {limit}", object_id="limit")
    view = engine.log.readable_view()
    if ref is not None and view.branch(ref) is None:
        return SnapshotLog([Snapshot.from_info(resolve(view, ref).info)])
    since, lines = dict[Ulid, int](), set[Ulid]()
    visits, found = list[SnapshotRow](), cache(view.snapshot)
    newest, last_saved = list[SnapshotRow](), 0

    def newest_first(infos: list[SnapshotRow]) -> list[SnapshotRow]:
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
    return _by_name(view, {head.name: head.ulid for head in view.heads()})


def tags(engine: Engine) -> SnapshotsByName:
    """Every tag, and where it is."""
    view = engine.log.readable_view()
    return _by_name(view, {name: row.ulid for name, row in view.tag_rows()})


def _by_name(view: RefTable, ulids: Mapping[str, Ulid]) -> SnapshotsByName:
    """The snapshots, one object for all names of each: anybody can make thousands of branches at one with a thousand metrics."""
    made = {ulid: Snapshot.from_info(info) for ulid in {*ulids.values()} if (info := view.snapshot(ulid)) is not None}
    return SnapshotsByName({name: made[ulid] for name, ulid in ulids.items() if ulid in made})

"""The saves of a branch as a graph: which lead to its head, which it left behind, what it follows, and which branches begin on it.
Rows from the newest to the oldest.

A run of saves without labels is one edge, so that a long history has few rows.

The line of a branch is its head and the head's ancestors, with descending steps; ancestors may be on other branches. A save whose
parent the catalog does not know follows the save before it in the log. All other saves of the branch are abandoned.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, select

from tensorstore_ck.catalog.schema import events, jobs, refs, snapshots

MAX_SAVES: Final = 50_000
"""The most saves of a branch that are read: the newest."""
MAX_BRANCHES: Final = 32
"""Branches that a line is followed through."""


class Save(NamedTuple):
    """A snapshot, when it was put."""

    id: int
    ulid: str
    root: str
    parent: str | None
    ref: str
    step: int | None
    n: int
    time_ns: int
    actor: str
    mark: str
    reason: str
    """Of the mark."""
    state: str


class Move(NamedTuple):
    """A branch was made, or moved by hand."""

    n: int
    op: str
    """``branch`` or ``reset``."""
    root: str
    time_ns: int
    actor: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """The saves of a branch."""

    ref: str
    line: tuple[Save, ...]
    """The saves that lead to the head, also on other branches, oldest first. Their steps ascend."""
    abandoned: tuple[tuple[Save, ...], ...]
    """The other saves of the branch: runs that follow each other in the log with rising steps, oldest first."""
    own: tuple[Save, ...]
    """All saves of the branch in the order of the log, abandoned ones too."""
    moves: tuple[Move, ...]
    parents: Mapping[int, Save]
    """Id of each save -> the save that it followed, where that is in this lineage."""
    is_cut: bool
    """Older saves than `MAX_SAVES` are left out."""


def read_lineage(connection: Connection, store_id: int, ref: str) -> Lineage:
    """The saves of a branch; none if nothing was ever put there and it does not exist."""
    own = _saves(connection, store_id, ref)
    is_cut = len(own) == MAX_SAVES
    at = select(refs.c.ulid).where(refs.c.store_id == store_id, refs.c.name == ref)
    head_ulid = connection.execute(at).scalar_one_or_none()
    head = next((save for save in reversed(own) if save.ulid == head_ulid), None)
    if head is None and head_ulid is not None:
        head = _save(connection, snapshots.c.store_id == store_id, snapshots.c.ulid == head_ulid)
    if head is None and own:  # the branch was removed
        head = own[-1]
    line = tuple(reversed(list(_line(connection, store_id, head, own)))) if head is not None else ()
    on_line = {save.id for save in line}
    abandoned = tuple(map(tuple, _runs(save for save in own if save.id not in on_line)))
    saves = {save.id: save for save in (*line, *own)}
    by_root = _grouped(saves.values())
    parents = {save.id: parent for save in saves.values() if (parent := _parent_of(save, by_root)) is not None}
    return Lineage(
        ref=ref, line=line, abandoned=abandoned, own=tuple(own), moves=_moves(connection, store_id, ref), parents=parents, is_cut=is_cut
    )


def newest_save(connection: Connection, store_id: int, ref: str) -> Save | None:
    """The newest save of a branch."""
    return _save(connection, snapshots.c.ref == ref, snapshots.c.store_id == store_id)


def _line(connection: Connection, store_id: int, head: Save, own: list[Save]) -> Iterator[Save]:
    """The head and what it follows, newest first."""
    loaded = {own[0].ref} if own else set()
    by_root, in_order = _grouped(own), {own[0].ref: own} if own else {}
    save: Save | None = head
    step: int | None = None
    while save is not None:
        if save.step is None or step is None or save.step < step:
            step = save.step if save.step is not None else step
            yield save
        following = _parent_of(save, by_root)
        if following is None and save.parent is not None and len(loaded) < MAX_BRANCHES:
            known = (snapshots.c.store_id == store_id, snapshots.c.root == save.parent, snapshots.c.id < save.id)
            parent = _save(connection, *known)
            if parent is not None and parent.ref not in loaded:
                loaded.add(parent.ref)
                in_order[parent.ref] = _saves(connection, store_id, parent.ref, parent.id)
                for root, saves in _grouped(in_order[parent.ref]).items():
                    by_root[root] = sorted((*by_root.get(root, ()), *saves), key=_id_of)
                following = _parent_of(save, by_root)
        if following is None:
            following = _before(save, in_order.get(save.ref, []))
        save = following


def _parent_of(save: Save, by_root: dict[str, list[Save]]) -> Save | None:
    """The newest earlier snapshot with the parent's root."""
    return _before(save, by_root.get(save.parent or "", []))


def _before(save: Save, in_order: list[Save]) -> Save | None:
    at = bisect_left(in_order, save.id, key=_id_of)
    return in_order[at - 1] if at else None


def _runs(saves: Iterable[Save]) -> list[list[Save]]:
    """Splits saves where a step does not ascend, and where a save's parent is not the save before it."""
    runs: list[list[Save]] = []
    for save in saves:
        last = runs[-1][-1] if runs else None
        rises = last is not None and (save.step is None or last.step is None or save.step > last.step)
        if last is not None and rises and save.parent in (last.root, None):
            runs[-1].append(save)
        else:
            runs.append([save])
    return runs


_COLUMNS: Final = tuple(snapshots.c[name] for name in Save._fields)


def _saves(connection: Connection, store_id: int, ref: str, up_to: int | None = None) -> list[Save]:
    """The newest saves of a branch, oldest first."""
    query = select(*_COLUMNS).where(snapshots.c.ref == ref, snapshots.c.store_id == store_id)
    if up_to is not None:
        query = query.where(snapshots.c.id <= up_to)
    rows = connection.execute(query.order_by(snapshots.c.id.desc()).limit(MAX_SAVES)).all()
    return [Save(*row) for row in reversed(rows)]


def _save(connection: Connection, *conditions: Any) -> Save | None:
    row = connection.execute(select(*_COLUMNS).where(*conditions).order_by(snapshots.c.id.desc()).limit(1)).first()
    return None if row is None else Save(*row)


def _moves(connection: Connection, store_id: int, ref: str) -> tuple[Move, ...]:
    columns = (events.c.n, events.c.op, events.c.root, events.c.time_ns, events.c.actor)
    query = select(*columns).where(events.c.ref == ref, events.c.op.in_(("branch", "reset")), events.c.store_id == store_id)
    return tuple(Move(*row) for row in connection.execute(query.order_by(events.c.n, events.c.position)))


def _grouped(saves: Iterable[Save]) -> dict[str, list[Save]]:
    """By root, in the order of their ids."""
    by_root: dict[str, list[Save]] = {}
    for save in sorted(saves, key=_id_of):
        by_root.setdefault(save.root, []).append(save)
    return by_root


def _id_of(save: Save) -> int:
    return save.id


MAX_ROWS: Final = 40
MAX_TRACKS: Final = 10
"""The most lines next to each other: the newest are shown."""
TRACK: Final = 18
"""Pixels between two tracks."""
ROW: Final = 36
"""Pixels of a row."""


class Label(NamedTuple):
    """A branch, tag, pin or mark at a snapshot."""

    kind: str
    """``branch``, ``tag``, ``pin``, ``mark``."""
    text: str


class Line(NamedTuple):
    """A piece of a line, on one row."""

    path: str
    """A path of SVG, in a box that is `ROW` high."""
    is_abandoned: bool


@dataclass(frozen=True, slots=True)
class GraphRow:
    """A snapshot, and the lines that pass it."""

    save: Save
    track: int
    labels: tuple[Label, ...]
    is_abandoned: bool
    below: int
    """Saves between this and the next row of its line, which are not shown."""
    lines: tuple[Line, ...] = ()

    @property
    def x(self) -> int:
        """The x coordinate of its point."""
        return _x(self.track)


@dataclass(frozen=True, slots=True)
class Graph:
    """The rows, and how wide their lines are."""

    rows: tuple[GraphRow, ...]
    width: int
    left_out: int
    """Lines that are not shown."""


@dataclass(slots=True)
class _Track:
    """A line of the graph: saves, oldest first, and what the first of them follows."""

    saves: list[Save]
    start: Save | None
    is_abandoned: bool
    hidden: int = 0
    """Saves of it that were not read."""
    shown: list[Save] = field(default_factory=list)
    at: int = 0

    def below(self, save: Save) -> int:
        """Saves between one that is shown and the next."""
        older = [other for other in self.shown if other.id < save.id]
        since = older[-1].id if older else save.id
        return self.hidden if not older else sum(since < other.id < save.id for other in self.saves)


def read_graph(connection: Connection, store_id: int, lineage: Lineage, labels: Mapping[str, list[Label]]) -> Graph:
    """The graph of a branch. `labels`: ULID -> tags, pins and marks of a snapshot."""
    heads = {ulid: name for name, ulid in connection.execute(select(refs.c.name, refs.c.ulid).where(refs.c.store_id == store_id))}
    tracks = [_Track(list(lineage.line), None, is_abandoned=False)]
    tracks += [_Track(list(run), lineage.parents.get(run[0].id), is_abandoned=True) for run in lineage.abandoned]
    tracks += [_Track([head], start, False, puts - 1) for start, head, puts in _children(connection, store_id, lineage)]
    others = sorted(tracks[1:], key=lambda track: track.saves[-1].id)
    kept = [tracks[0], *others[max(0, len(others) - MAX_TRACKS + 1) :]] if lineage.line else []
    at_ulid = {ulid: list(own) for ulid, own in labels.items()}
    for ulid, name in heads.items():
        at_ulid.setdefault(ulid, []).insert(0, Label("branch", name))
    _choose(kept, at_ulid)
    rows = _rows(kept, at_ulid)
    return Graph(tuple(rows), (1 + max((row.track for row in rows), default=0)) * TRACK + 4, len(tracks) - len(kept) if kept else 0)


def _children(connection: Connection, store_id: int, lineage: Lineage) -> list[tuple[Save, Save, int]]:
    """(start, newest save, number of saves) of each other branch that begins at a save of this one."""
    by_root = {save.root: save for save in lineage.own}
    first = select(snapshots.c.parent).where(snapshots.c.ref == jobs.c.ref, snapshots.c.store_id == jobs.c.store_id)
    begins = select(jobs.c.ref, jobs.c.puts, first.order_by(snapshots.c.id).limit(1).scalar_subquery())
    children = []
    for ref, puts, root in connection.execute(begins.where(jobs.c.store_id == store_id, jobs.c.ref != lineage.ref)):
        start = by_root.get(root)
        newest = newest_save(connection, store_id, ref) if start is not None else None
        if start is not None and newest is not None and newest.id > start.id:
            children.append((start, newest, puts))
    return children


def _choose(tracks: list[_Track], labels: Mapping[str, list[Label]]) -> None:
    """Chooses the saves of each track that have a row: ends and starts of lines, then labelled saves, newest first."""
    begins = {track.start.id for track in tracks if track.start is not None}
    left = MAX_ROWS
    for track in tracks:
        must = {track.saves[0].id, track.saves[-1].id} | (begins & {save.id for save in track.saves})
        track.shown = [save for save in track.saves if save.id in must]
        left -= len(track.shown)
    more = [(save, track) for track in tracks for save in track.saves if save.ulid in labels and save not in track.shown]
    for save, track in sorted(more, key=lambda item: -item[0].id)[: max(0, left)]:
        track.shown.append(save)
    for track in tracks:
        track.shown.sort(key=lambda save: save.id)


def _rows(tracks: list[_Track], labels: Mapping[str, list[Label]]) -> list[GraphRow]:
    shown: list[tuple[Save, _Track]] = sorted(((save, track) for track in tracks for save in track.shown), key=lambda item: -item[0].id)
    number = {save.id: row for row, (save, _) in enumerate(shown)}
    ends = [_end(track, number) for track in tracks]
    _assign_columns(tracks, number, ends)
    return [
        GraphRow(
            save=save,
            track=track.at,
            labels=tuple(labels.get(save.ulid, ())),
            is_abandoned=track.is_abandoned,
            below=track.below(save),
            lines=tuple(_lines(at, tracks, number, ends)),
        )
        for at, (save, track) in enumerate(shown)
    ]


def _end(track: _Track, number: Mapping[int, int]) -> int:
    """The lowest row that a track's line reaches."""
    begin = number.get(track.start.id) if track.start is not None else None
    return begin if begin is not None else number[track.shown[0].id]


def _assign_columns(tracks: Iterable[_Track], number: Mapping[int, int], ends: list[int]) -> None:
    """Gives each track the first column where it ends above the one before; the branch itself, the first track, has a column alone.

    Tracks are in the order of their newest saves, so each begins above all before it.
    """
    tops = [-1]
    for index, track in enumerate(tracks):
        if index == 0:
            continue
        track.at = next((column for column, top in enumerate(tops) if ends[index] < top), len(tops))
        tops[track.at : track.at + 1] = [number[track.shown[-1].id]]


def _lines(row: int, tracks: list[_Track], number: Mapping[int, int], ends: list[int]) -> list[Line]:
    """The lines of each track on a row: from its newest snapshot down to the one where it begins."""
    lines = []
    middle = ROW // 2
    for track, end in zip(tracks, ends, strict=True):
        top, x = number[track.shown[-1].id], _x(track.at)
        if not top <= row <= end:
            continue
        begin = next((other for other in tracks if track.start is not None and track.start in other.shown), None)
        start, stop = (middle if row == top else 0), (middle if row == end else ROW)
        if row == end and begin is not None and row != top:
            to = _x(begin.at)
            lines.append(Line(f"M{x} 0C{x} {middle} {to} {middle - 8} {to} {middle}", track.is_abandoned))
        elif start < stop:
            lines.append(Line(f"M{x} {start}V{stop}", track.is_abandoned))
    return lines


def _x(track: int) -> int:
    return TRACK // 2 + 2 + track * TRACK

"""The graph of a branch: what it follows, what it left behind, which branches begin on it. Rows from the newest to the oldest.

A run of saves without labels is one edge, so that a long history has few rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sqlalchemy import Connection, select

from tensorstore_ck.catalog.schema import jobs, refs, snapshots
from tensorstore_ck.ui.lineage import Lineage, Save, newest_save

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

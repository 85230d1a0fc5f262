"""The saves of a branch, and which of them lead to its head: a branch that went back has saves that it left behind.

The line of a branch is its head and the head's ancestors, with descending steps; ancestors may be on other branches. A save whose
parent the catalog does not know follows the save before it in the log. All other saves of the branch are abandoned.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, select

from tensorstore_ck.catalog.schema import events, refs, snapshots

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

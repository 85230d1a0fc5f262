"""The roots: the snapshots that are held, and what holds them."""

from shlex import quote
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log import RefTable, SnapshotRow

UNDO: Final = "undo window"
"""Label of an undo window; no ref can have this name."""
ROOT_DIGITS: Final = 16
"""Digits of a root in a command."""


def roots(view: RefTable) -> dict[Ulid, list[str]]:
    """Held snapshots -> what holds them: names of branches and tags, ``pin:owner``, and `UNDO`."""
    held: dict[Ulid, list[str]] = {}

    def add(ulid: Ulid, label: str) -> None:
        labels = held.setdefault(ulid, [])
        if label not in labels[-1:]:  # all calls for one label follow each other
            labels.append(label)

    for branch in view.branches():
        for move in view.moves(branch):
            add(move.ulid, branch)
    for tag, row in view.tag_rows():
        add(row.ulid, tag)
    for pin in view.pins():
        add(pin.ulid, f"pin:{pin.owner}")
    for window in view.windows():
        for move in window.moves:
            add(move.ulid, UNDO)
    return held


def how_to_release(view: RefTable, info: SnapshotRow) -> str:
    """The commands that release a snapshot, in order, and what to wait for then."""
    root = info.root.hex()[:ROOT_DIGITS]
    commands = [f"unpin {root} --owner {quote(pin.owner)}" for pin in view.pins() if pin.ulid == info.ulid]
    going = [tag for tag, row in view.tag_rows() if row.ulid == info.ulid]
    is_behind = False
    for branch in view.branches():
        moves = [move.ulid for move in view.moves(branch)]
        if info.ulid not in moves:
            continue
        if set(moves) == {info.ulid}:
            going.append(branch)
            continue
        is_behind = True
        if moves[0] == info.ulid:
            back = next(number for number, ulid in enumerate(moves) if ulid != info.ulid)
            commands.append(f"reset {branch} {branch}~{back}")
    going += [root] if is_behind else []
    commands += [f"forget {' '.join(going)}"] if going else []
    is_undoable = bool(going) or any(move.ulid == info.ulid for window in view.windows() for move in window.moves)
    released = [f"release it with {' and '.join(f'`tsck {command}`' for command in commands)}"] if commands else []
    return " and ".join([*released, *(["wait until its undo window has ended"] if is_undoable else [])])

"""Forget and undo: what leaves a history, and comes back within the undo window. Each is one log entry.

Forgetting frees nothing by itself: gc lets go of what was forgotten longer ago than the undo window, and frees what nothing else
holds then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.address import resolve
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import ConflictError, NotFoundError
from tensorstore_ck.gc.roots import UNDO, roots
from tensorstore_ck.ids import Ulid, ulid_text
from tensorstore_ck.log import Move, Op, RefTable, UndoWindow
from tensorstore_ck.snapshot import Snapshot

MIN_ROOT_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What one log entry took from one ref."""

    entry: int
    ref: str
    kind: str
    """``branch``: all of it; ``snapshots`` of one; ``tag``."""
    time_ns: int
    snapshots: tuple[Snapshot, ...]
    held_by: Mapping[str, tuple[str, ...]]
    """Id of a snapshot -> what else holds it: branches, tags and ``pin:owner``. The others go when the undo window ends."""


def forget(engine: Engine, addresses: Sequence[str]) -> tuple[Forgotten, ...]:
    """Takes snapshots out of the histories of branches, or whole branches and tags; all in one entry.

    Args:
        engine: The store.
        addresses: ``ref@step`` and ``ref~n``: that snapshot, from that branch's history. A root: from the history of every branch.
            A branch or a tag: the branch with its history, or the tag.

    Raises:
        NotFoundError: nothing there, or no branch holds it.
        ConflictError: a snapshot is where its branch is.
    """
    engine.require_writable()

    def build(view: RefTable) -> list[Op]:
        whole: set[str] = set()
        taken: dict[str, set[Ulid]] = {}
        for address in addresses:
            if view.branch(address) is not None or view.tag(address) is not None:
                whole.add(address)
            else:
                for branch, ulid in _in_histories(view, address):
                    taken.setdefault(branch, set()).add(ulid)
        ops = [Op.untag(name, view) if view.tag(name) is not None else Op.expire(name, None) for name in sorted(whole)]
        return ops + [Op.expire(branch, ulids) for branch, ulids in sorted(taken.items()) if branch not in whole]

    appended = engine.log.append(build)
    view = engine.log.view()
    return _told(view, [window for window in view.windows() if window.n == appended.n])


def undo(engine: Engine, address: str | None = None) -> tuple[Forgotten, ...]:
    """Brings back what was forgotten last; with an address, what was last forgotten of that ref, or that snapshot of it.

    Raises:
        NotFoundError: nothing that can be undone: never forgotten, or the undo window has ended.
    """
    engine.require_writable()
    found: list[tuple[UndoWindow, set[Ulid]]] = []

    def build(view: RefTable) -> list[Op]:
        found[:] = _to_undo(view, address)
        for window, _ in found:
            _refuse_taken_name(view, window)
        return [Op.undo(window.n, window.name, ulids) for window, ulids in found]

    engine.log.append(build)
    view = engine.log.view()
    return _told(view, [window._replace(moves=[move for move in window.moves if move.ulid in ulids]) for window, ulids in found])


def forgotten(engine: Engine) -> tuple[Forgotten, ...]:
    """What can be undone, newest first."""
    view = engine.log.view()
    return _told(view, list(view.windows())[::-1])


def _in_histories(view: RefTable, address: str) -> list[tuple[str, Ulid]]:
    found = resolve(view, address)
    branches = [found.branch] if found.branch is not None else view.branches()
    held = [(name, found.info.ulid) for name in branches if any(move.ulid == found.info.ulid for move in view.moves(name))]
    if not held:
        raise NotFoundError(f"no branch has {address!r} in its history: there is nothing to forget", object_id=address)
    for name, ulid in held:
        branch = view.branch(name)
        if branch is not None and branch.ulid == ulid:
            raise ConflictError(
                f"{address!r} is where branch {name!r} is: move that first (`tsck reset {name} {name}~1`), "
                f"or forget all of it (`tsck forget {name}`)",
                object_id=address,
            )
    return held


def _to_undo(view: RefTable, address: str | None) -> list[tuple[UndoWindow, set[Ulid]]]:
    windows = list(view.windows())
    if address is None:
        if not windows:
            raise NotFoundError("nothing can be undone: nothing was forgotten, or the undo window has ended and gc let it go")
        return [(window, {move.ulid for move in window.moves}) for window in windows if window.n == windows[-1].n]
    name, _, step = address.partition("@")
    for window in reversed(windows):
        chosen = {move.ulid for move in window.moves if _is_meant(move, window.name == name, name, step)}
        if chosen:
            return [(window, chosen)]
    raise NotFoundError(
        f"{address!r} cannot be undone: it was not forgotten, or the undo window has ended and gc let it go", object_id=address
    )


def _is_meant(move: Move, is_ref: bool, name: str, step: str) -> bool:
    is_root = len(name) >= MIN_ROOT_DIGITS and move.root.hex().startswith(name)
    return (is_ref or is_root) and (not step or str(move.step) == step)


def _refuse_taken_name(view: RefTable, window: UndoWindow) -> None:
    kind = "tag" if view.tag(window.name) else "branch" if window.kind == "tag" and view.branch(window.name) else None
    if kind is not None:
        raise ConflictError(
            f"{window.name!r} is a {kind} now: remove or rename it before what had that name can come back", object_id=window.name
        )


def _told(view: RefTable, windows: Sequence[UndoWindow]) -> tuple[Forgotten, ...]:
    held = roots(view)
    found = []
    for window in windows:
        infos = [info for ulid in dict.fromkeys(move.ulid for move in window.moves) if (info := view.snapshot(ulid)) is not None]
        held_by = {ulid_text(info.ulid): tuple(label for label in held.get(info.ulid, ()) if label != UNDO) for info in infos}
        found.append(Forgotten(window.n, window.name, window.kind, window.time_ns, tuple(map(Snapshot.from_info, infos)), held_by))
    return tuple(found)

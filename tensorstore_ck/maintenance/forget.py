"""Forget and undo: removes snapshots from histories, and brings them back within the undo window. Each is one log entry.

Forgetting frees nothing by itself: gc ends undo windows that are older than its option (gc/collect.py), and then frees what nothing
else holds.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.ids import Digest, Ulid, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import ConflictError, NotFoundError
from tensorstore_ck.gc.roots import UNDO, roots
from tensorstore_ck.log import BranchMove, Op, RefTable, UndoWindow
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.redaction import one_line

MIN_ROOT_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The snapshots that one log entry removed from one ref."""

    entry: int
    ref: str
    kind: str
    """``branch``: a whole branch; ``snapshots`` of a branch; ``tag``."""
    time_ns: int
    snapshots: tuple[Snapshot, ...]
    held_by: Mapping[str, tuple[str, ...]]
    """Id of a snapshot -> what else holds it: branches, tags and ``pin:owner``. The others expire with the undo window."""

    def __repr__(self) -> str:
        return f"Forgotten({self.kind} {one_line(self.ref)}, {len(self.snapshots):,} snapshots, log entry {self.entry})"


def forget(engine: Engine, addresses: Sequence[str]) -> tuple[Forgotten, ...]:
    """Removes snapshots from histories, or whole branches and tags; all in one entry.

    Args:
        engine: The store.
        addresses: ``ref@step`` and ``ref~n``: all snapshots with that root, from that branch's history. A root: from the history of
            every branch. A branch or a tag: the branch with its history, or the tag.

    Raises:
        NotFoundError: no such snapshot, or no branch has it.
        ConflictError: a snapshot is the head of its branch.
    """
    engine.require_writable()

    def build(view: RefTable) -> list[Op]:
        whole: set[str] = set()
        taken: dict[str, set[Ulid]] = {}
        histories = _Histories(view)
        for address in addresses:
            if view.branch(address) is not None or view.tag(address) is not None:
                whole.add(address)
            else:
                for branch, ulids in histories.held(address):
                    taken.setdefault(branch, set()).update(ulids)
        ops = [Op.untag(name, view) if view.tag(name) is not None else Op.expire(name, None) for name in sorted(whole)]
        return ops + [Op.expire(branch, ulids) for branch, ulids in sorted(taken.items()) if branch not in whole]

    appended = engine.log.append(build)
    view = engine.log.view()
    windows = list(view.windows(appended.n))
    return _forgotten(view, windows, _other_holders(view, windows))


def undo(engine: Engine, address: str | None = None, *, entry: int | None = None) -> tuple[Forgotten, ...]:
    """Restores what was forgotten last; with an address (ref, ``ref@step``, ``ref~n``, root), what was forgotten last there.

    Raises:
        NotFoundError: nothing can be undone: never forgotten, or the undo window has ended.
        ConflictError: what was forgotten last is not what log entry `entry` removed.
    """
    engine.require_writable()
    undone: list[tuple[UndoWindow, set[Ulid]]] = []

    def build(view: RefTable) -> list[Op]:
        undone[:] = _to_undo(view, address)
        for window, _ in undone:
            if entry not in (None, window.n):
                raise ConflictError(f"{window.name!r} changed meanwhile: the last removal there is log entry {window.n}, not {entry}")
            _raise_if_name_taken(view, window)
        return [Op.undo(window.n, window.name, ulids) for window, ulids in undone]

    engine.log.append(build)
    view = engine.log.view()
    windows = [window._replace(moves=[move for move in window.moves if move.ulid in ulids]) for window, ulids in undone]
    return _forgotten(view, windows, roots(view))


def forgotten(engine: Engine) -> tuple[Forgotten, ...]:
    """The removals that can be undone, newest first."""
    view = engine.log.newest_view()
    windows = list(view.windows(newest_first=True))
    return _forgotten(view, windows, _other_holders(view, windows))


class _Histories:
    """Snapshots by root in the histories of branches, each read once."""

    def __init__(self, view: RefTable) -> None:
        self._view = view
        self._by_branch: dict[str, dict[Digest, set[Ulid]]] = {}

    def held(self, address: str) -> list[tuple[str, set[Ulid]]]:
        """(branch, snapshots) with the root at `address`, which must not be the head of a branch."""
        view = self._view
        resolved = resolve(view, address)
        branches = [resolved.branch] if resolved.branch is not None else view.branches()
        held = [(name, ulids) for name in branches if (ulids := self._of(name).get(resolved.info.root))]
        if not held:
            raise NotFoundError(f"no branch has {address!r} in its history: there is nothing to forget", object_id=address)
        for name, _ in held:
            branch = view.branch(name)
            if branch is not None and branch.root == resolved.info.root:
                raise ConflictError(
                    f"{address!r} is the head of branch {name!r}: move the branch first (`tsck reset {name} {name}~1`), "
                    f"or forget the whole branch (`tsck forget {name}`)",
                    object_id=address,
                )
        return held

    def _of(self, branch: str) -> dict[Digest, set[Ulid]]:
        if branch not in self._by_branch:
            by_root = self._by_branch[branch] = {}
            for move in self._view.moves(branch):
                by_root.setdefault(move.root, set()).add(move.ulid)
        return self._by_branch[branch]


def _to_undo(view: RefTable, address: str | None) -> list[tuple[UndoWindow, set[Ulid]]]:
    newest_first = view.windows(newest_first=True)
    if address is None:
        newest = next(newest_first, None)
        if newest is None:
            raise NotFoundError("nothing can be undone: nothing was forgotten, or gc has ended the undo window")
        return [(window, {move.ulid for move in window.moves}) for window in view.windows(newest.n)]
    is_meant = _matcher(view, address)
    for window in newest_first:
        chosen = {move.ulid for move in window.moves if is_meant(window, move)}
        if chosen:
            return [(window, chosen)]
    raise NotFoundError(
        f"{address!r} cannot be undone: it was not forgotten, or gc has ended its undo window; `tsck forget` lists what can be undone",
        object_id=address,
    )


def _matcher(view: RefTable, address: str) -> Callable[[UndoWindow, BranchMove], bool]:
    if not isinstance(address, str) or "~" in address:
        resolved = resolve(view, address)
        return lambda window, move: move.root == resolved.info.root and resolved.branch in (None, window.name)
    name, _, step = address.partition("@")
    wanted_step = step and (step.lstrip("0") or "0")

    def is_meant(window: UndoWindow, move: BranchMove) -> bool:
        is_root = len(name) >= MIN_ROOT_DIGITS and move.root.hex().startswith(name)
        return (window.name == name or is_root) and (not step or str(move.step) == wanted_step)

    return is_meant


def _raise_if_name_taken(view: RefTable, window: UndoWindow) -> None:
    kind = "tag" if view.tag(window.name) else "branch" if window.kind == "tag" and view.branch(window.name) else None
    if kind is not None:
        raise ConflictError(f"{window.name!r} is a {kind} now: see `tsck forget`, and use `tsck branch NAME ROOT`", object_id=window.name)


def _other_holders(view: RefTable, windows: Sequence[UndoWindow]) -> Mapping[Ulid, Sequence[str]]:
    """The holders of the snapshots in undo windows; computes the roots only if something else holds one, too."""
    within = Counter(move.ulid for window in windows for move in window.moves)
    return roots(view) if any(view.holds(ulid) > count for ulid, count in within.items()) else {}


def _forgotten(view: RefTable, windows: Sequence[UndoWindow], held: Mapping[Ulid, Sequence[str]]) -> tuple[Forgotten, ...]:
    removed = []
    for window in windows:
        infos = [info for ulid in dict.fromkeys(move.ulid for move in window.moves) if (info := view.snapshot(ulid)) is not None]
        held_by = {ulid_text(info.ulid): tuple(label for label in held.get(info.ulid, ()) if label != UNDO) for info in infos}
        snapshots = tuple(map(Snapshot.from_info, infos))
        removed.append(Forgotten(window.n, window.name, window.kind, window.time_ns, snapshots=snapshots, held_by=held_by))
    return tuple(removed)

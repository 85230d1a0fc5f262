"""The new log: operations that fold to the same state as the old log, without lost snapshots. Pure: it folds in memory.

It replays the effects of the old entries, in their order and with their times: moves of branches (undoable ones followed by their
`expire`), tags and pins; policies, quotas last. Relocations come first; then snapshots whose own put is no longer a move of a branch,
because it was forgotten permanently: one entry puts and releases each, and later entries hold it again. An `expire` of a whole branch
is followed by an `undo` of the moves that had stayed.

Invariant: every kept snapshot is held at the end, even if old entries had removed it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import ZERO_DIGEST, Digest, Ulid, ulid_text
from tensorstore_ck.log import BranchMove, Entry, Op, RefTable, Relocation, SnapshotRow, UndoWindow, fold
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.table_rows import HEAD, NOTES, TagRow

TAG: Final = "tag"
RELOCATIONS_AN_ENTRY: Final = 500
PACKS_AN_ENTRY: Final = 40_000
REFS_AN_ENTRY: Final = 1000

Make = Callable[[RefTable, int], list[Op]]
"""Given the ref table so far and the entry's number: the operations to add to that entry."""


class KeptHistory(NamedTuple):
    """The content of the new log."""

    held: Sequence[SnapshotRow]
    doubtful: Sequence[SnapshotRow]
    """Snapshots that only a lost entry may have held."""
    relocations: Sequence[Relocation]
    locations: Mapping[Ulid, str]
    """Packs at other locations -> URL."""
    are_entries_lost: bool
    """A lost entry may be an undo: so undo windows start again now."""
    left: Sequence[Digest] = ()
    """Roots of records that are not published: the log names them, so that gc does not take it for one that began again."""


class NewLog:
    """A growing log and its fold."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, list[Op]]] = []
        """(time_ns, operations) of each entry."""
        self._table = MemoryTable()

    @property
    def view(self) -> RefTable:
        """The ref table."""
        return RefTable(self._table)

    def add(self, time_ns: int, makes: Sequence[Make]) -> None:
        """Adds an entry, unless it is empty."""
        n, ops = len(self.entries) + 1, list[Op]()
        with self._table.batch() as batch:
            for make in makes:
                made = make(RefTable(batch), n)
                fold(Entry(n, ZERO_DIGEST, bytes(16), time_ns, actor="", ops=tuple(made), hash=ZERO_DIGEST, size_bytes=0), batch)
                ops += made
        if ops:
            self.entries.append((time_ns, ops))

    def is_fold(self, view: RefTable) -> bool:
        """Whether the entries fold to `view`."""
        return list(_rows(view)) == list(_rows(self.view))


def rebuild_log(old: MemoryTable, kept: KeptHistory, make_put: Callable[[Ulid], Op], now_ns: int) -> NewLog:
    """The new log, from a fold of the old one."""
    return _EventReplay(old, kept, make_put, now_ns).run()


class _Event(NamedTuple):
    """An effect of an old entry."""

    n: int
    """Number of the old entry."""
    time_ns: int
    is_put: bool
    make: Make


class _EventReplay:
    def __init__(self, old: MemoryTable, kept: KeptHistory, make_put: Callable[[Ulid], Op], now_ns: int) -> None:
        self._table = old
        self._old = RefTable(old)
        self._kept = kept
        self._held = {info.ulid for info in kept.held}
        self._make_put = make_put
        self._now_ns = now_ns
        self._new = NewLog()

    def run(self) -> NewLog:
        self._relocate()
        events = [*self._moves(), *self._tags_and_pins(), *self._windows()]
        put = {move.ulid for _, move in self._all_moves() if move.op == "put"}
        self._put_unmoved([info for info in self._kept.held if info.ulid not in put])
        events.sort(key=lambda event: (event.n, not event.is_put))  # stable: a branch's moves stay in order
        for (_, time_ns), together in groupby(events, key=lambda event: (event.n, event.time_ns)):
            self._new.add(time_ns, [event.make for event in together])
        self._hold_the_rest()
        self._annotate()
        for glob, policy in self._old.policies().items():
            self._new.add(policy.time_ns, [_fixed(Op.policy(glob, policy.rules))])
        for glob, quota in self._old.quotas().items():
            self._new.add(quota.time_ns, [_fixed(Op.quota(glob, quota.warn_bytes, quota.refuse_bytes))])
        return self._new

    def _relocate(self) -> None:
        """Relocations in their old order, one new entry per old one: of several for a pack, readers use the newest first."""
        for url in sorted(set(self._kept.locations.values())):
            there = sorted(pack for pack, location in self._kept.locations.items() if location == url)
            for at in range(0, len(there), PACKS_AN_ENTRY):
                self._new.add(self._now_ns, [_fixed(Op.set_location(there[at : at + PACKS_AN_ENTRY], url))])
        ordered = sorted(self._kept.relocations, key=lambda relocation: (relocation.n, relocation.moved))
        for _, together in groupby(ordered, key=lambda relocation: relocation.n):
            ops = [Op.relocate(relocation.pack, relocation.moved, relocation.hash, relocation.targets) for relocation in together]
            for at in range(0, len(ops), RELOCATIONS_AN_ENTRY):
                self._new.add(self._now_ns, [_fixed(*ops[at : at + RELOCATIONS_AN_ENTRY])])

    def _put_unmoved(self, apart: Sequence[SnapshotRow]) -> None:
        """Puts snapshots without a put among the branch moves; and doubtful ones, into an undo window of their branch."""
        for info in sorted(apart, key=lambda info: info.n):

            def put_and_release(_: RefTable, n: int, info: SnapshotRow = info) -> list[Op]:
                return [self._make_put(info.ulid), Op.expire(info.ref, None), Op.purge(n, info.ref)]

            self._new.add(info.arrived_ns, [put_and_release])
        for info in sorted(self._kept.doubtful, key=lambda info: info.n):
            self._new.add(info.arrived_ns, [_fixed(self._make_put(info.ulid))])
        refs = sorted({info.ref for info in self._kept.doubtful})
        for at in range(0, len(refs), REFS_AN_ENTRY):
            self._new.add(self._now_ns, [_fixed(*(Op.expire(ref, None) for ref in refs[at : at + REFS_AN_ENTRY]))])

    def _all_moves(self) -> Iterator[tuple[str, BranchMove]]:
        """Moves of branches, including undoable ones."""
        for branch in self._old.branches():
            for move in self._old.moves(branch, newest_first=False):
                if move.ulid in self._held:
                    yield branch, move
        for window in self._old.windows():
            if window.kind != TAG:
                yield from ((window.name, move) for move in window.moves if move.ulid in self._held)

    def _moves(self) -> Iterator[_Event]:
        for name, move in self._all_moves():
            is_put = move.op == "put"
            yield _Event(move.n, move.time_ns, is_put, partial(self._put, move.ulid) if is_put else partial(_move_branch, name, move.root))

    def _put(self, ulid: Ulid, _view: RefTable, _n: int) -> list[Op]:
        return [self._make_put(ulid)]

    def _tags_and_pins(self) -> Iterator[_Event]:
        for name, tag in self._old.tag_rows():
            if tag.ulid in self._held:
                yield _tag_event(name, tag)
        for pin in self._old.pins():
            info = self._old.snapshot(pin.ulid)
            if info is not None and pin.ulid in self._held:
                yield _Event(pin.n, pin.time_ns, False, _fixed(Op.pin(info.root, pin.owner, pin.reason, pin.expires_ns)))

    def _windows(self) -> Iterator[_Event]:
        for window in self._old.windows():
            moves = [move for move in window.moves if move.ulid in self._held]
            if window.kind == TAG:
                yield from (_tag_event(window.name, TagRow(move.ulid, move.root, move.n, move.time_ns)) for move in moves)
            if moves:
                time_ns = self._now_ns if self._kept.are_entries_lost else window.time_ns
                make = _untag if window.kind == TAG else _forget
                yield _Event(window.n, time_ns, False, partial(make, window._replace(moves=moves)))

    def _hold_the_rest(self) -> None:
        """Holds kept snapshots that are unheld: after lost entries the rest may be contradictory, such as a tag that was made twice."""
        for info in self._kept.held:
            there = self._new.view.by_root(info.root)
            if there is None or not self._new.view.is_live(there.ulid):
                self._new.add(self._now_ns, [partial(_move_branch, f"salvaged/{ulid_text(info.ulid)}", info.root)])

    def _annotate(self) -> None:
        for root in dict.fromkeys(info.root for info in (*self._kept.held, *self._kept.doubtful)):
            note = RefTable(self._table).read(NOTES, root)
            if note is not None:
                self._new.add(self._now_ns, [_fixed(Op.annotate(root, note.metrics), Op.mark(root, note.mark, note.reason))])
        for at in range(0, len(self._kept.left), REFS_AN_ENTRY):
            self._new.add(self._now_ns, [_fixed(*(Op.annotate(root, {}) for root in self._kept.left[at : at + REFS_AN_ENTRY]))])


def _fixed(*ops: Op) -> Make:
    return lambda _view, _n: list(ops)


def _move_branch(name: str, root: Digest, view: RefTable, _n: int) -> list[Op]:
    return [Op.reset(name, root) if view.branch(name) is not None else Op.branch(name, root)]


def _tag_event(name: str, tag: TagRow) -> _Event:
    return _Event(tag.n, tag.time_ns, False, _fixed(Op.tag(name, tag.root)))


def _untag(window: UndoWindow, view: RefTable, _n: int) -> list[Op]:
    return [Op.untag(window.name, view)] if view.tag(window.name) is not None else []


def _forget(window: UndoWindow, view: RefTable, n: int) -> list[Op]:
    """Makes an undo window with exactly `window.moves`. A branch's head can be forgotten only with the whole branch."""
    branch, gone = view.branch(window.name), {move.ulid for move in window.moves}
    if branch is None:
        return []
    if window.kind == "snapshots" and branch.ulid not in gone:
        return [Op.expire(window.name, gone)]
    stays: Collection[Ulid] = {move.ulid for move in view.moves(window.name)} - gone
    return [Op.expire(window.name, None), *([Op.undo(n, window.name, stays)] if stays else [])]


def _rows(view: RefTable) -> Iterator[tuple[bytes, bytes]]:
    return (item for item in view.items() if item[0] != HEAD.prefix)

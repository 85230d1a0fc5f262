"""Chooses the snapshot from which a run resumes: the newest that is not marked and whose run had no drifted replicas.

A save compares only a share of the replicas, in rotation: after one differed, later snapshots may contain the difference without a mark,
until a restore makes the ranks equal again. Runs on one rank, which informs the others.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import NOTE
from tensorstore_ck.store import ReadOnlyStore

OnDrift = Literal["accept", "skip"]
DRIFT: Final = "drift"
MAX_NAMED: Final = 8
_REF: Final = re.compile(r"(?![0-9a-f]{8,64}$)[^@~]+")
"""A branch or tag without a step or ancestor: at the first start of a job it does not exist yet."""


class ResumeCandidate(NamedTuple):
    """The snapshot to resume from."""

    address: str = ""
    """Empty: no snapshot is usable. The head is named ``ref~0``, so that a restore takes the head at that time."""
    name: str = ""
    """Its address for messages, with the step."""
    is_new: bool = False
    """Whether there is no such branch or tag."""
    is_named: bool = False
    """Whether the given address means this snapshot and no other one."""
    drift: str = ""
    """Why the user must confirm the resume."""
    skipped: Sequence[tuple[str, str]] = ()
    """Newer snapshots that are marked: name and reason."""
    root: str = ""
    """The root of a branch's snapshot; empty for other addresses."""


def find_named(store: ReadOnlyStore, address: str) -> ResumeCandidate:
    """The snapshot at an address. Raises `NotFoundError` if the step, ancestor or root does not exist."""
    try:
        store.resolve(address)
    except NotFoundError:
        if _REF.fullmatch(address):
            return ResumeCandidate(is_new=True)
        raise
    return ResumeCandidate(address, address, is_named=True)


def choose(
    store: ReadOnlyStore, address: str, skipped: Collection[str], *, drift: OnDrift | None = None, allow_marked: bool = False
) -> ResumeCandidate:
    """The next snapshot to try: the newest usable one of a branch, or the one that any other address names.

    `skipped`: names of snapshots that cannot be restored. `drift`: see `Checkpointer.resume`. With `allow_marked`, marked ones are usable.
    """
    if not _REF.fullmatch(address) or address not in store.branches():
        return find_named(store, address)
    ref, history, marked = address, store.log(address), list[tuple[str, str]]()
    newest_of_step: dict[int | None, str] = {}
    for snapshot in history:
        newest_of_step.setdefault(snapshot.step, snapshot.root)
    for number, back in _line(history):
        snapshot = history[number]
        has_step = snapshot.step is not None and newest_of_step[snapshot.step] == snapshot.root
        name = f"{ref}@{snapshot.step}" if has_step else "" if back is None else f"{ref}~{back}"
        if not name or name in skipped:
            continue  # without a name, no address of it goes through the branch, so the run could not continue the branch
        if not allow_marked and snapshot.mark not in ("", DRIFT):
            marked.append((name, f"it is marked {snapshot.mark}"))
            continue
        address = f"{ref}~0" if number == 0 else name
        drifted = None if allow_marked or drift == "accept" else _drifted(store, history[number:])
        if drifted is None:
            return ResumeCandidate(address, name, skipped=marked, root=snapshot.root)
        reason = _describe(store, name, snapshot, drifted)
        if drift is None:
            return ResumeCandidate(address, name, drift=reason, skipped=marked)
        marked.append((name, reason))
    return ResumeCandidate(skipped=marked)


def _line(history: Sequence[Snapshot]) -> Iterator[tuple[int, int | None]]:
    """The positions of a branch's head and of the snapshots that it comes from, and how many parents back each is, if all in between exist.

    Leaves out snapshots that a run left behind when it went back to an earlier one.
    """
    number, back = 0, 0 if history else None
    while number < len(history):
        yield number, back
        parent = history[number].parent
        parent_at = next((at for at in range(number + 1, len(history)) if history[at].root == parent), None)
        back = None if back is None or parent_at is None else back + 1
        number = number + 1 if parent_at is None else parent_at


def _drifted(store: ReadOnlyStore, history: Sequence[Snapshot]) -> Snapshot | None:
    """The first snapshot of a history if it is marked drift, else an earlier marked one of the same run."""
    newest, *before = history
    if newest.mark == DRIFT:
        return newest
    marked = [snapshot for snapshot in before if snapshot.mark == DRIFT]
    run = _run(store, newest) if marked else None
    return next((snapshot for snapshot in marked if run is not None and _run(store, snapshot) == run), None)


def _run(store: ReadOnlyStore, snapshot: Snapshot) -> tuple[object, object] | None:
    """Identifies the run, between two restores, that saved it; None if no `Checkpointer` saved it."""
    note = store.metadata(snapshot.root).get(NOTE)
    return (note.get("began_ns"), note.get("resumes")) if isinstance(note, dict) else None


def _describe(store: ReadOnlyStore, address: str, snapshot: Snapshot, drifted: Snapshot) -> str:
    """Which tensors differ, on which ranks, and where both copies are."""
    what = f"{address} (step {snapshot.step}, {snapshot.root[:16]})"
    if drifted is snapshot:
        text = f"{what} is marked drift: {drifted.reason}"
    else:
        text = f"{what} comes from a run whose step {drifted.step} ({drifted.root[:16]}) is marked drift: {drifted.reason}"
    copies = _copies(store, drifted)
    return "; ".join([text, *copies[:MAX_NAMED], *([f"and {len(copies) - MAX_NAMED} more copies"] if len(copies) > MAX_NAMED else [])])


def _copies(store: ReadOnlyStore, drifted: Snapshot) -> list[str]:
    """The copies that differing ranks have kept, in words."""
    lines = []
    prefix = f"{DRIFT}/{drifted.ref}/rank-"
    for branch in sorted((name for name in store.branches() if name.startswith(prefix)), key=lambda name: (len(name), name)):
        for copy in store.log(branch):
            note = store.metadata(copy.root).get(DRIFT) if copy.step == drifted.step else None
            if not isinstance(note, dict) or note.get("snapshot") != drifted.root:
                continue
            with store.open_snapshot(copy.root) as stored:
                names = stored.names()
            lines.append(
                f"{listed([*map(repr, names)], MAX_NAMED)}: the snapshot {drifted.root[:16]} has the copy of rank "
                f"{note.get('written_by_rank')}, and rank {note.get('rank')}'s copy is at {branch} ({copy.root[:16]})"
            )
    return lines

"""Chooses the snapshot from which a run resumes: the newest that is not marked and whose run had no drifted replicas.

A save compares only a share of the replicas, in rotation: after one differed, later snapshots may contain the difference without a mark,
until a restore makes the ranks equal again. Runs on one rank, which informs the others.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import NOTE
from tensorstore_ck.store import Store

OnDrift = Literal["accept", "skip"]
DRIFT: Final = "drift"
MAX_NAMED: Final = 8


class ResumeCandidate(NamedTuple):
    """The snapshot to resume from."""

    address: str = ""
    """Empty: no snapshot is usable."""
    is_new: bool = False
    """There are no snapshots."""
    drift: str = ""
    """Why the user must confirm the resume."""


def choose(store: Store, ref: str, skipped: Collection[str], drift: OnDrift | None) -> ResumeCandidate:
    """The next snapshot to try; warns of marked ones that it skips."""
    try:
        history = store.log(ref)
    except NotFoundError:
        return ResumeCandidate(is_new=True)
    steps: set[int] = set()
    for number, snapshot in enumerate(history):
        address = ref if number == 0 else f"{ref}@{snapshot.step}"
        if number and (snapshot.step is None or snapshot.step in steps):
            continue  # of several with one step, `ref@step` means the newest
        steps |= {snapshot.step} if snapshot.step is not None else set()
        if address in skipped:
            continue
        if snapshot.mark not in ("", DRIFT):
            warnings.warn(f"{address} was skipped: it is marked {snapshot.mark}", stacklevel=6)
            continue
        drifted = None if drift == "accept" else _drifted(store, history[number:])
        if drifted is None:
            return ResumeCandidate(address)
        reason = _describe(store, ref, address, snapshot, drifted)
        if drift is None:
            return ResumeCandidate(address, drift=reason)
        warnings.warn(f"{address} was skipped: {reason}", stacklevel=6)
    return ResumeCandidate()


def _drifted(store: Store, history: Sequence[Snapshot]) -> Snapshot | None:
    """The first snapshot of a history if it is marked drift, else an earlier marked one of the same run."""
    newest, *before = history
    if newest.mark == DRIFT:
        return newest
    marked = [each for each in before if each.mark == DRIFT]
    run = _run(store, newest) if marked else None
    return next((each for each in marked if run is not None and _run(store, each) == run), None)


def _run(store: Store, snapshot: Snapshot) -> tuple[object, object] | None:
    """Identifies the run, between two restores, that saved it; None if no `Checkpointer` saved it."""
    note = store.metadata(snapshot.root).get(NOTE)
    return (note.get("began_ns"), note.get("resumes")) if isinstance(note, dict) else None


def _describe(store: Store, ref: str, address: str, snapshot: Snapshot, drifted: Snapshot) -> str:
    """Which tensors differ, on which ranks, and where both copies are."""
    what = f"{address} (step {snapshot.step}, {snapshot.root[:16]})"
    if drifted is snapshot:
        text = f"{what} is marked drift: {drifted.reason}"
    else:
        text = f"{what} comes from a run whose step {drifted.step} ({drifted.root[:16]}) is marked drift: {drifted.reason}"
    copies = _copies(store, drifted)
    return "; ".join([text, *copies[:MAX_NAMED], *([f"and {len(copies) - MAX_NAMED} more copies"] if len(copies) > MAX_NAMED else [])])


def _copies(store: Store, drifted: Snapshot) -> list[str]:
    """The copies that differing ranks have kept, in words."""
    found = []
    prefix = f"{DRIFT}/{drifted.ref}/rank-"
    for branch in sorted((each for each in store.branches() if each.startswith(prefix)), key=lambda each: (len(each), each)):
        for copy in store.log(branch):
            note = store.metadata(copy.root).get(DRIFT) if copy.step == drifted.step else None
            if not isinstance(note, dict) or note.get("snapshot") != drifted.root:
                continue
            with store.open_snapshot(copy.root) as stored:
                names = stored.names()
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            found.append(
                f"{', '.join(map(repr, names[:MAX_NAMED]))}{more}: the snapshot {drifted.root[:16]} has the copy of rank "
                f"{note.get('written_by_rank')}, and rank {note.get('rank')}'s copy is at {branch} ({copy.root[:16]})"
            )
    return found

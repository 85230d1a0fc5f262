"""Which snapshot of a ref a run goes on from: the newest that is neither marked, nor of a run whose replicas had drifted apart.

A put looks at a share of the replicas only, in rotation: once one was found to differ, those after it may hold it, too, without a mark,
until a restore makes the ranks equal again. For one rank, which tells the others.
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
    """Where to resume from."""

    address: str = ""
    """Empty: from nothing that there is."""
    is_new: bool = False
    """There is no snapshot at all."""
    drift: str = ""
    """Why it is not to be resumed from unless somebody says so."""


def choose(store: Store, ref: str, passed: Collection[str], drift: OnDrift | None) -> ResumeCandidate:
    """The next snapshot to try; warns of what is marked."""
    try:
        history = store.log(ref)
    except NotFoundError:
        return ResumeCandidate(is_new=True)
    steps: set[int] = set()
    for number, snapshot in enumerate(history):
        address = ref if number == 0 else f"{ref}@{snapshot.step}"
        if number and (snapshot.step is None or snapshot.step in steps):
            continue  # of one step the newest is meant
        steps |= {snapshot.step} if snapshot.step is not None else set()
        if address in passed:
            continue
        if snapshot.mark not in ("", DRIFT):
            warnings.warn(f"{address} was passed over: it is marked {snapshot.mark}", stacklevel=6)
            continue
        drifted = None if drift == "accept" else _drifted(store, history[number:])
        if drifted is None:
            return ResumeCandidate(address)
        said = _described(store, ref, address, snapshot, drifted)
        if drift is None:
            return ResumeCandidate(address, drift=said)
        warnings.warn(f"{address} was passed over: {said}", stacklevel=6)
    return ResumeCandidate()


def _drifted(store: Store, history: Sequence[Snapshot]) -> Snapshot | None:
    """The first of a history, or one of the same run before it, that is marked so."""
    newest, *before = history
    if newest.mark == DRIFT:
        return newest
    marked = [each for each in before if each.mark == DRIFT]
    run = _run(store, newest) if marked else None
    return next((each for each in marked if run is not None and _run(store, each) == run), None)


def _run(store: Store, snapshot: Snapshot) -> tuple[object, object] | None:
    """What put it, from one restore to the next; None where no `Checkpointer` did."""
    note = store.show(snapshot.root).metadata.get(NOTE)
    return (note.get("began_ns"), note.get("resumes")) if isinstance(note, dict) else None


def _described(store: Store, ref: str, address: str, snapshot: Snapshot, drifted: Snapshot) -> str:
    """What differs, on which ranks, and where both copies are."""
    what = f"{address} (step {snapshot.step}, {snapshot.root[:16]})"
    if drifted is snapshot:
        said = f"{what} is marked drift: {drifted.reason}"
    else:
        said = f"{what} is of a run whose step {drifted.step} ({drifted.root[:16]}) is marked drift: {drifted.reason}"
    copies = _copies(store, drifted)
    return "; ".join([said, *copies[:MAX_NAMED], *([f"and {len(copies) - MAX_NAMED} more copies"] if len(copies) > MAX_NAMED else [])])


def _copies(store: Store, drifted: Snapshot) -> list[str]:
    """What each rank that differs has kept, in words."""
    found = []
    prefix = f"{DRIFT}/{drifted.ref}/rank-"
    for branch in sorted((each for each in store.branches() if each.startswith(prefix)), key=lambda each: (len(each), each)):
        for copy in store.log(branch):
            told = store.show(copy.root).metadata.get(DRIFT) if copy.step == drifted.step else None
            if not isinstance(told, dict) or told.get("snapshot") != drifted.root:
                continue
            with store.open_snapshot(copy.root) as stored:
                names = stored.names()
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            found.append(
                f"{', '.join(map(repr, names[:MAX_NAMED]))}{more}: the snapshot {drifted.root[:16]} has what rank "
                f"{told.get('written_by_rank')} had, and rank {told.get('rank')}'s own are at {branch} ({copy.root[:16]})"
            )
    return found

"""What a `Checkpointer` notes in a snapshot about the run that saved it."""

from typing import TYPE_CHECKING, Any

from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import NOTE

if TYPE_CHECKING:
    from tensorstore_ck.store import ReadOnlyStore


def note_of(store: "ReadOnlyStore", snapshot: Snapshot) -> dict[str, Any]:
    """The note; empty without one, or if the snapshot is gone."""
    try:
        note = store.metadata(snapshot.root).get(NOTE)
    except NotFoundError:
        return {}
    return note if isinstance(note, dict) else {}


def run_name(began_ns: object, resumes: object) -> str:
    """See `Checkpointer.run`."""
    return f"{began_ns}-{resumes}"


def saved_by(store: "ReadOnlyStore", snapshot: Snapshot) -> str:
    """The `Checkpointer.run` that saved a snapshot."""
    note = note_of(store, snapshot)
    return run_name(note.get("began_ns"), note.get("resumes"))

"""Which run of a `Checkpointer` saved a snapshot, by the note that it saves with each."""

from typing import TYPE_CHECKING, Any

from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import NOTE

if TYPE_CHECKING:
    from tensorstore_ck.store import ReadOnlyStore


def run_name(began_ns: object, resumes: object) -> str:
    """The name of the process that saves: see `Checkpointer.run`."""
    return f"{began_ns}-{resumes}"


def note_of(store: "ReadOnlyStore", snapshot: Snapshot) -> dict[str, Any]:
    """The note that a `Checkpointer` saved with a snapshot; empty if none did, or if the snapshot is gone."""
    try:
        note = store.metadata(snapshot.root).get(NOTE)
    except NotFoundError:
        return {}
    return note if isinstance(note, dict) else {}


def saved_by(store: "ReadOnlyStore", snapshot: Snapshot) -> str:
    """The `Checkpointer.run` that saved a snapshot."""
    note = note_of(store, snapshot)
    return run_name(note.get("began_ns"), note.get("resumes"))

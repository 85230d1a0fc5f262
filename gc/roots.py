"""The roots: which snapshots are kept, and by what."""

from typing import Final

from tensorstore_ck.ids import Ulid
from tensorstore_ck.log import RefTable

UNDO: Final = "undo window"
"""Label of what is held by one; no ref can be called so."""


def roots(view: RefTable) -> dict[Ulid, list[str]]:
    """Snapshots that are held -> what holds them: branches and tags by name, ``pin:owner``, and `UNDO`."""
    held: dict[Ulid, list[str]] = {}

    def add(ulid: Ulid, label: str) -> None:
        labels = held.setdefault(ulid, [])
        if label not in labels:
            labels.append(label)

    for branch in view.branches():
        for move in view.moves(branch):
            add(move.ulid, branch)
    for tag in view.tags():
        row = view.tag_row(tag)
        if row is not None:
            add(row.ulid, tag)
    for pin in view.pins():
        add(pin.ulid, f"pin:{pin.owner}")
    for window in view.windows():
        for move in window.moves:
            add(move.ulid, UNDO)
    return held

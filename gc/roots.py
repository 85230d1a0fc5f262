"""The roots: which snapshots are kept, and by what."""

from collections.abc import Sequence
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


def how_to_let_go(labels: Sequence[str]) -> str:
    """The commands that take from a snapshot all that holds it."""
    pins = sum(label.startswith("pin:") for label in labels)
    commands = ["`tsck unpin`"] if pins else []
    commands += ["`tsck forget`"] if len(labels) > pins + (UNDO in labels) else []
    commands += ["`tsck gc --undo-window 0s`, which ends all undo windows"] if len(labels) > pins else []
    return " and ".join(commands)

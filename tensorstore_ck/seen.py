"""What one store handle has seen of refs: the fencing that keeps a job given up for dead from overwriting its successor's work."""

from typing import Final, NamedTuple

from tensorstore_ck.address import resolve
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.ids import Digest
from tensorstore_ck.log import RefTable
from tensorstore_ck.snapshot import Snapshot
from tensorstore_ck.writer import Anything, Expected


class LastSeen:
    """The type of `LAST_SEEN`."""

    def __repr__(self) -> str:
        return "tsck.LAST_SEEN"


LAST_SEEN: Final = LastSeen()
"""As ``expect=``, the default: move the ref from where this handle last put or restored it."""


class _Ref(NamedTuple):
    """Where a ref was, and which of its snapshots the training state comes from."""

    head: Digest
    current: Digest


class Seen:
    """What this handle put and restored."""

    def __init__(self) -> None:
        self._refs: dict[str, _Ref] = {}
        self._restored: Digest | None = None

    def note(self, ref: str, head: Digest, current: Digest) -> None:
        """The ref is at `head`, and the state in memory is `current`."""
        self._refs[ref] = _Ref(head, current)

    def drop(self, ref: str) -> None:
        """This handle forgot the ref: its next put there begins it anew."""
        self._refs.pop(ref, None)

    def note_restored(self, root: Digest) -> None:
        """The state in memory is `root`."""
        self._restored = root

    def expected(self, view: RefTable, ref: str, expect: object) -> Expected:
        """Where a put to `ref` must find it."""
        if isinstance(expect, LastSeen):
            seen = self._refs.get(ref)
            return seen.head if seen else None
        if expect is None or isinstance(expect, Anything):
            return expect
        if isinstance(expect, Snapshot):
            return Digest(bytes.fromhex(expect.root))
        if isinstance(expect, str):
            return resolve(view, expect).info.root
        raise InvalidOptionError(f"expect must be a root, tsck.ANY or None, not {type(expect).__name__}", object_id="expect")

    def parent(self, view: RefTable, ref: str) -> Digest | None:
        """What a new snapshot continues: what this handle last put or restored on the ref; for others, the ref's head."""
        if ref in self._refs:
            return self._refs[ref].current
        branch = view.branch(ref)
        return branch.root if branch else self._restored

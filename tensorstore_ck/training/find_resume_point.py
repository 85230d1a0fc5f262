"""Which snapshot a job resumes from: all ranks find the same one, or all find none. Knows no states."""

import re
from typing import TYPE_CHECKING, Final

from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group import Participant
from tensorstore_ck.session.group.matching_arguments import require_same
from tensorstore_ck.store import ReadOnlyStore

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REF: Final = re.compile(r"(?![0-9a-f]{8,64}$)[^@~]+")
"""An address that names a branch or tag, and nothing in its past: a job that begins has none yet."""


def find(store: ReadOnlyStore, address: str, group: "ProcessGroup | None", timeout_seconds: float) -> Snapshot | None:
    """The snapshot at `address`: what the first rank of `group` finds. None where there is no such ref yet.

    Raises:
        NotFoundError: a step, an ancestor or a root that is not there.
    """
    if group is None:
        return _at(store, address)
    own = store.session.groups.of(group)[0]
    title = f"the search for {address!r}"
    attempt = own.begin(title, object_id=address, timeout=timeout_seconds)

    def compare(proposals: list[Body]) -> Body:
        require_same(proposals, ("address",), own.in_job)
        found = _at(store, address)
        return {"root": found.root if found is not None else ""}

    told: list[Snapshot | None] = []

    def execute(go: Body) -> Body:
        root = take(go, "root", str)
        told.append(store.resolve(root) if root else None)
        return {}

    attempt.run(Participant(lambda: {"address": address}, execute, None, compare, lambda _: {}))
    return told[0]


def _at(store: ReadOnlyStore, address: str) -> Snapshot | None:
    try:
        return store.resolve(address)
    except NotFoundError:
        if _REF.fullmatch(address):
            return None
        raise

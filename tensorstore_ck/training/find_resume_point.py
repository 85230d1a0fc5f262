"""The snapshot that a job resumes from: all ranks find the same one, or none. Knows no states."""

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
"""A branch or tag without a step or ancestor: at the first start of a job it does not exist yet."""


def find_resume_point(store: ReadOnlyStore, address: str, group: "ProcessGroup | None", timeout_seconds: float) -> Snapshot | None:
    """The snapshot that the first rank of `group` finds at `address`; None if there is no such ref yet.

    Raises:
        NotFoundError: the step, ancestor or root does not exist.
    """
    if group is None:
        return _at(store, address)
    own = store.session.groups.of(group)[0]
    title = f"the search for {address!r}"
    attempt = own.begin(title, object_id=address, timeout=timeout_seconds)

    def compare(proposals: list[Body]) -> Body:
        require_same(proposals, ("address",), own.in_job)
        snapshot = _at(store, address)
        return {"root": snapshot.root if snapshot is not None else ""}

    found: list[Snapshot | None] = []

    def execute(go: Body) -> Body:
        root = take(go, "root", str)
        found.append(store.resolve(root) if root else None)
        return {}

    attempt.run(Participant(lambda: {"address": address}, execute, None, compare, lambda _: {}))
    return found[0]


def _at(store: ReadOnlyStore, address: str) -> Snapshot | None:
    try:
        return store.resolve(address)
    except NotFoundError:
        if _REF.fullmatch(address):
            return None
        raise

"""How ranks replace a staged object that one rank's disk damaged: a rank of another host that keeps a copy uploads it.

Knows the records of a round, and no rounds: each rank reports, rank 0 plans, and the planned rank heals.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.backend.staging.unsent_file import StagedDamageError
from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.errors import MissingObjectError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.peers.copy_holders import host_of_folder
from tensorstore_ck.session.staging.manifest import Manifest


class Healing(NamedTuple):
    """Rank 0's plan for a damaged object."""

    name: str
    """The object; empty if none is damaged."""
    healer: int
    """The rank that uploads its copy; -1 if no rank has one."""
    reason: str
    """Why the save is lost if it is not healed."""


NOT_DAMAGED = Healing("", -1, "")


def report(tier: StagingTier, txn: Ulid, manifests: Sequence[Manifest], damage: StagedDamageError | None) -> Body:
    """The object that this rank cannot send, if any, and the ranks whose files lie on its host."""
    prefix = f"{ulid_text(txn)}-"
    holds = [int(key.removeprefix(prefix)) for key in tier.folder.list_manifests() if key.startswith(prefix)]
    name = "" if damage is None else damage.object_id
    owner = next((manifest.rank for manifest in manifests if name in manifest.names), -1)
    return {"host": host_of_folder(tier.folder.path), "holds": holds, "name": name, "owner": owner, "reason": str(damage or "")}


def plan(reports: Sequence[Body], healed: Collection[str]) -> Healing:
    """The rank that replaces the first damaged object; none if it was `healed` before."""
    for broken in reports:
        name, owner = take(broken, "name", str), take(broken, "owner", int)
        if name:
            others = (
                rank for rank, report in enumerate(reports) if report["host"] != broken["host"] and owner in take(report, "holds", list)
            )
            return Healing(name, -1 if name in healed else next(others, -1), take(broken, "reason", str))
    return NOT_DAMAGED


def heal(tier: StagingTier, planned: Healing, rank: int, stop: Callable[[], object]) -> str:
    """Uploads this rank's copy if that is planned. If the object, and so the save, is lost, returns why."""
    if planned.name and planned.healer < 0:
        return planned.reason
    if planned.healer == rank:
        try:
            tier.uploader.upload([planned.name], stop=stop)
        except (StagedDamageError, MissingObjectError):
            return planned.reason
    return ""

"""The ranks of one model: they stage the version that rank 0 finds, or none does, and swap it together.

A poll is two rounds: in the first one each rank plans what it reads, in the second one it reads. Ranks that read the same bytes share them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tensorstore_ck.common.ids import Ulid, new_ulid
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.feed.shared_ranges import SharedRanges
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log import SnapshotRow


class Rounds(Protocol):
    """This rank's place in a group of ranks: `session.group.Group`."""

    rank: int

    def meet(
        self,
        title: str,
        propose: Callable[[], Body],
        compare: Callable[[list[Body]], Body | str],
        execute: Callable[[Body], Body | None],
        *,
        timeout: float,
        conclude: Callable[[list[Body]], Body] = ...,
    ) -> Body:
        """A round of all ranks: see `session.group.Group.meet`."""


class Look(NamedTuple):
    """What a rank asks for in a poll."""

    address: str
    verify: bool
    root: str
    """Of the version that the rank's tensors are; '' before the first."""
    is_closed: bool
    is_last: bool
    """Whether the rank gives up if there is no new version."""


class FeedRanks:
    """One rank's side."""

    def __init__(self, polls: Rounds, swaps: Rounds, store: Any, ref: str, *, timeout_seconds: float) -> None:
        """`polls`, `swaps`: of the same ranks, for rounds that may run in two threads; `store`: their key-value store."""
        self._polls, self._swaps, self._store, self._ref = polls, swaps, store, ref
        self._timeout_seconds = timeout_seconds

    def poll(
        self,
        look: Look,
        find: Callable[[str], SnapshotRow | None],
        plan: Callable[[Ulid], bytes],
        read: Callable[[SharedRanges | None], None],
    ) -> tuple[bool, bool]:
        """All ranks stage a version, or none does.

        Args:
            look: The address and `verify` must be the same on all ranks.
            find: Called on rank 0, with the root that all ranks are at, or ''. Returns the version; None: all ranks are at it.
            plan: Plans what this rank reads for a snapshot; returns what is equal on ranks that read the same, b"" if that is nothing.
            read: Reads and stages what was planned, perhaps with other ranks.

        Returns:
            Whether there is a version that not all ranks are at; and whether no rank looks again.
        """
        title = f"the poll of {self._ref!r}"

        def compare(proposals: list[Body]) -> Body:
            for key in ("address", "verify"):
                if len({proposal[key] for proposal in proposals}) > 1:
                    raise InvalidOptionError(f"the ranks poll with different {key}: pass the same on all ranks", object_id=key)
            if any(take(proposal, "is_closed", bool) for proposal in proposals):
                return {"snapshot": b"", "ends": True}
            roots = {take(proposal, "root", str) for proposal in proposals}
            found = find(roots.pop() if len(roots) == 1 else "")
            ends = found is None and any(take(proposal, "is_last", bool) for proposal in proposals)
            return {"snapshot": b"" if found is None else found.ulid, "ends": ends}

        answer: Body = {}

        def execute(go: Body) -> Body:
            answer.update(go)
            return {"reads": plan(Ulid(go["snapshot"])) if take(go, "snapshot", bytes) else b""}

        def conclude(results: list[Body]) -> Body:
            return {"reads": [take(result, "reads", bytes) for result in results], "name": new_ulid().hex()}

        outcome = self._polls.meet(title, look._asdict, compare, execute, timeout=self._timeout_seconds, conclude=conclude)
        if not answer["snapshot"]:
            return False, take(answer, "ends", bool)
        reads = take(outcome, "reads", list)
        own = reads[self._polls.rank]
        members = [rank for rank, others in enumerate(reads) if others == own]

        def read_as_member(_: Body) -> None:
            if not own or len(members) == 1:
                read(None)
                return
            name = f"{take(outcome, 'name', str)}/{members[0]}"
            with SharedRanges(self._store, name, self._polls.rank, members, timeout_seconds=self._timeout_seconds) as shared:
                read(shared)

        self._polls.meet(f"the read of {self._ref!r}", dict, lambda _: {}, read_as_member, timeout=self._timeout_seconds)
        return True, False

    def swap(self, root: str, apply: Callable[[], None], *, is_staged: bool) -> bool:
        """All ranks call `apply`, or none does: that is if the version that they have staged, or are at already, is not the same.

        If it raises an error, `apply` may have run.

        Args:
            root: Of the version that this rank has staged or is at; '': none, or not yet.
            apply: Makes the tensors that version.
            is_staged: Whether it is staged here, instead of swapped already.

        Returns:
            Whether the ranks swapped.
        """
        swapped = []

        def compare(proposals: list[Body]) -> Body:
            roots = {take(proposal, "root", str) for proposal in proposals}
            return {"swaps": len(roots) == 1 and "" not in roots and any(take(proposal, "is_staged", bool) for proposal in proposals)}

        def execute(go: Body) -> None:
            if take(go, "swaps", bool):
                swapped.append(True)
                apply()

        propose = lambda: {"root": root, "is_staged": is_staged}  # noqa: E731
        self._swaps.meet(f"the swap of {self._ref!r}", propose, compare, execute, timeout=self._timeout_seconds)
        return bool(swapped)

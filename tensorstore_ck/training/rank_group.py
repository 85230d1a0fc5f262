"""This process's rank, the number of ranks, their group, what the first of them answers, and what they agree on.

Before their first common save, ranks exchange facts; later saves reuse the result. All ranks still meet before each save to confirm that
they have it: a rank that lost the connection may lack it, and if it alone asked, the ranks would stay out of step.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import torch.distributed as dist

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.store.internals import groups_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.store import ReadOnlyStore, Store


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def require_group(group: "ProcessGroup | DeviceMesh | None") -> "ProcessGroup | None":
    """Resolves ``group=``. Raises if it is missing with several ranks: the others' generators and positions would be lost."""
    rank, ranks = rank_and_world_size()
    if group is None and ranks > 1:
        raise InvalidOptionError(
            f"this is rank {rank} of {ranks}, and each rank has its own generators: call it on all ranks with group=dist.group.WORLD",
            object_id="group",
        )
    return process_group(group)


def ask_first_rank(
    store: "ReadOnlyStore",
    group: "ProcessGroup | None",
    title: str,
    answer: Callable[[], bytes],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> bytes:
    """The first rank's answer, on all ranks; its error, if it has one. All ranks of `group` call this; `title` is for messages."""
    if group is None:
        return answer()
    return groups_of(store).broadcast(group, title, answer, timeout_seconds=timeout_seconds)


_TITLE: Final = "the comparison of what the ranks of a TrainingState hold"


class RankReport(NamedTuple):
    """The report of one rank."""

    buffers: Mapping[str, bytes]
    """Name -> digest of its bytes; empty for a buffer that is always a rank's own if several ranks hold it."""
    groups: list[list[list[str]]]
    """The names of parameters in each group of each optimizer."""


class Agreement(NamedTuple):
    """The common result, for one rank."""

    leads: frozenset[str]
    """Buffers that differ by rank; this rank's copy is the shared one."""
    follows: frozenset[str]
    """Buffers that differ by rank and that another rank leads."""
    same_groups: bool
    """Whether the optimizers' groups have the same parameters on all ranks."""


SINGLE: Final = Agreement(frozenset(), frozenset(), same_groups=True)


class Agreements:
    """The agreements of the groups that save one state."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[ProcessGroup, Agreement] = weakref.WeakKeyDictionary()
        self._answers: weakref.WeakKeyDictionary[ProcessGroup, Body] = weakref.WeakKeyDictionary()
        """The answer of rank 0, which it has before the others do; only on rank 0."""

    def ask(self, store: "Store", group: "ProcessGroup", own: Callable[[], RankReport], timeout_seconds: float) -> Agreement:
        """The agreement of a group. All its ranks call this before each save; calls `own` only if this rank lacks the agreement.

        Raises:
            SnapshotAbortedError: a rank did not come, or failed.
        """
        if group.size() == 1:
            return SINGLE
        own_group = groups_of(store).of(group)[0]
        names: dict[bytes, str] = {}

        def propose() -> Body:
            if group in self._found:
                return {"known": True}
            report = own()
            names.update((_key(name), name) for name in report.buffers)
            groups = derived_hash("groups of parameters", repr(report.groups).encode())
            return {"known": False, "buffers": [[_key(name), digest] for name, digest in report.buffers.items()], "groups": groups}

        def compare(proposals: list[Body]) -> Body | str:
            knows = [take(proposal, "known", bool) for proposal in proposals]
            if all(knows):
                return {"answer": None}
            if group not in self._answers:
                if any(knows):
                    return "rank 0 created a new TrainingState and other ranks did not: create it on all ranks, or on none"
                self._answers[group] = _compare(proposals)
            return {"answer": self._answers[group]}

        def execute(go: Body) -> None:
            if group not in self._found:
                self._found[group] = _agreement_of_rank(take(go, "answer", dict), names, own_group.rank)

        own_group.meet(_TITLE, propose, compare, execute, timeout=timeout_seconds)
        return self._found[group]


def _agreement_of_rank(answer: Body, names: Mapping[bytes, str], rank: int) -> Agreement:
    leader = {bytes(key): int(leading) for leading, led in take(answer, "leaders", list) for key in led}
    leads = frozenset(name for key, name in names.items() if leader.get(key) == rank)
    follows = frozenset(name for key, name in names.items() if key in leader) - leads
    return Agreement(leads, follows, take(answer, "same_groups", bool))


def _key(name: str) -> bytes:
    """A short hash instead of the name: ranks exchange small records."""
    return derived_hash("name of a buffer", name.encode())[:8]


def _compare(proposals: list[Body]) -> Body:
    """On rank 0: who leads which buffer, and whether the groups are the same."""
    reports: dict[bytes, list[tuple[int, bytes]]] = {}
    for rank, proposal in enumerate(proposals):
        for key, digest in take(proposal, "buffers", list):
            reports.setdefault(key, []).append((rank, digest))
    leaders: dict[int, list[bytes]] = {}
    for key, holders in reports.items():
        if len(holders) > 1 and (not holders[0][1] or len({digest for _, digest in holders}) > 1):
            leaders.setdefault(holders[0][0], []).append(key)
    return {
        "leaders": [[rank, keys] for rank, keys in leaders.items()],
        "same_groups": len({take(proposal, "groups", bytes) for proposal in proposals}) == 1,
    }

"""What the ranks of a group find out about each other before they put together for the first time. Knows no models and no tensors.

Later puts go by what was found then. All ranks meet before each put nevertheless, to say that they know it: a rank that lost the connection
may not, and one that asks when the others do not would never be with them again.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group import Participant

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.store import Store

_TITLE: Final = "what ranks hold that differs by nature"


class RankReport(NamedTuple):
    """What one rank tells."""

    buffers: Mapping[str, bytes]
    """Name -> digest of its bytes; empty for one that is a rank's own wherever several ranks hold it."""
    groups: list[list[list[str]]]
    """The names of parameters in each group of each optimizer."""


class Agreement(NamedTuple):
    """What all found, as one rank needs it."""

    leads: frozenset[str]
    """Buffers that each rank keeps as its own, and of which this rank's are those that all share."""
    follows: frozenset[str]
    """Those that another rank leads."""
    same_groups: bool
    """Whether the optimizers' groups have the same parameters on all ranks."""


ALONE: Final = Agreement(frozenset(), frozenset(), same_groups=True)


class Agreements:
    """What the groups that put one state have found."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[ProcessGroup, Agreement] = weakref.WeakKeyDictionary()
        self._answers: weakref.WeakKeyDictionary[ProcessGroup, Body] = weakref.WeakKeyDictionary()
        """On rank 0, what it tells. It knows it before anybody else does."""

    def ask(self, store: "Store", group: "ProcessGroup", own: Callable[[], RankReport], timeout_seconds: float) -> Agreement:
        """Asks all ranks of a group, each of which calls this before each put; `own` only where this rank does not know it yet.

        Raises:
            SnapshotAbortedError: a rank did not come, or could not say it.
        """
        if group.size() == 1:
            return ALONE
        place = store.session.groups.of(group)[0]
        attempt = place.begin(_TITLE, object_id=_TITLE, timeout=timeout_seconds)
        names: dict[bytes, str] = {}

        def propose() -> Body:
            if group in self._found:
                return {"known": True}
            found = own()
            names.update((_key(name), name) for name in found.buffers)
            groups = derived_hash("groups of parameters", repr(found.groups).encode())
            return {"known": False, "buffers": [[_key(name), digest] for name, digest in found.buffers.items()], "groups": groups}

        def compare(proposals: list[Body]) -> Body | str:
            knows = [take(each, "known", bool) for each in proposals]
            if all(knows):
                return {"answer": None}
            if group not in self._answers:
                if any(knows):
                    return "rank 0 has made its TrainingState anew, and others have not: make it on all ranks, or on none"
                self._answers[group] = _compare(proposals)
            return {"answer": self._answers[group]}

        def execute(go: Body) -> Body:
            if group not in self._found:
                self._found[group] = _own_side(take(go, "answer", dict), names, place.rank)
            return {}

        attempt.run(Participant(propose, execute, None, compare, lambda _: {}))
        return self._found[group]


def _own_side(answer: Body, names: Mapping[bytes, str], rank: int) -> Agreement:
    """What one rank needs of what rank 0 tells."""
    leader = {bytes(key): int(leading) for leading, led in take(answer, "leaders", list) for key in led}
    leads = frozenset(name for key, name in names.items() if leader.get(key) == rank)
    follows = frozenset(name for key, name in names.items() if key in leader) - leads
    return Agreement(leads, follows, take(answer, "same_groups", bool))


def _key(name: str) -> bytes:
    """In the place of a name: ranks exchange small records."""
    return derived_hash("name of a buffer", name.encode())[:8]


def _compare(proposals: list[Body]) -> Body:
    """On rank 0: who leads which buffer, and whether the groups are the same."""
    said: dict[bytes, list[tuple[int, bytes]]] = {}
    for rank, proposal in enumerate(proposals):
        for key, digest in take(proposal, "buffers", list):
            said.setdefault(key, []).append((rank, digest))
    leaders: dict[int, list[bytes]] = {}
    for key, holders in said.items():
        if len(holders) > 1 and (not holders[0][1] or len({digest for _, digest in holders}) > 1):
            leaders.setdefault(holders[0][0], []).append(key)
    return {
        "leaders": [[rank, keys] for rank, keys in leaders.items()],
        "same_groups": len({take(each, "groups", bytes) for each in proposals}) == 1,
    }

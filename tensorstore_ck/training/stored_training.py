"""Reads a snapshot of a `TrainingState` as plain dicts, for a trainer that loads its state itself."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.restoring import Restoring
from tensorstore_ck.training.per_rank_state import VALUES, own_states
from tensorstore_ck.training.state_sides import OWN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.store import ReadOnlyStore

State = dict[str, Any]
PLAIN: Final = ("ranks", "mid_step", OWN)


class StoredTraining(NamedTuple):
    """What a `TrainingState` saved."""

    snapshot: Snapshot
    ranks: int
    """The number of ranks that saved it."""
    shared: State
    """``model`` by parameter name, ``optimizer`` and so on."""
    rank_values: State
    """The values of this rank; of the first rank if another number of ranks saved them."""
    buffers: Mapping[str, Any]
    """The model's buffers that differed by rank, of this rank; empty if another number of ranks saved them."""


def read_training(
    store: "ReadOnlyStore", address: str, *, group: "ProcessGroup | None" = None, parts: tuple[str, ...] = ("model", "optimizer")
) -> StoredTraining:
    """Reads the snapshot at `address`, on all ranks of `group` or on none. Every rank gets all of `parts`.

    Raises:
        NotFoundError: there is no such snapshot.
        MismatchError: no `TrainingState` saved it.
        DamageError: it is damaged.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())

    def read(restoring: Restoring) -> tuple[int, State, State]:
        stored = restoring.lazy()
        put_by = stored.state_values.get("ranks")
        if type(put_by) is not int:
            raise MismatchError(f"{address!r} was not saved by a trainer or a TrainingState", object_id=address)
        there = {name.partition(".")[0] for name in (*stored.names(), *stored.state_values)}
        shared = restoring.checkout(select=[name for name in (*PLAIN, *parts) if name in there])
        held, whose = shared.pop(OWN, None), rank if put_by == ranks else 0
        own = own_states(held, put_by)[whose] if held else restoring.rank_state(whose)
        return put_by, shared, own

    (put_by, shared, own), snapshot = store.restoring(address, read, group=group)
    buffers = own.get("buffers", {}) if put_by == ranks else {}
    return StoredTraining(snapshot=snapshot, ranks=put_by, shared=shared, rank_values=own.get(VALUES, {}), buffers=buffers)

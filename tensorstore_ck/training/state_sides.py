"""`StateSides`: the shared side of a `TrainingState` and this rank's own, captured together and loaded together.

`read_training` reads a snapshot of both as plain dicts, for a trainer that loads its state itself.
"""

import copy
import warnings
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from torch.distributed.tensor import DTensor

from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import InvalidOptionError, MismatchError, StoreError
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group import DIFFERENT_CALLS
from tensorstore_ck.session.restoring import Restoring
from tensorstore_ck.session.save.rank_round import UnpreparedState
from tensorstore_ck.training import environment, optimizers
from tensorstore_ck.training.per_rank_state import GENERATORS, LOADER_GENERATORS, VALUES, PerRankState, own_states
from tensorstore_ck.training.rank_group import SINGLE, Agreement, Agreements, RankReport
from tensorstore_ck.training.shared_state import GetOptimizer, SharedState
from tensorstore_ck.training.stateful_parts import StatefulPart

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.store import ReadOnlyStore, Store

OWN: Final = "rank"
PARTS: Final = ("model", "optimizer", "scheduler", "scaler", "dataloader", "extra", VALUES, GENERATORS, "gradients")
"""The parts that `TrainingState.restore` can restore alone."""
OWN_PARTS: Final = {"buffers": "model", "extra_buffers": "extra", LOADER_GENERATORS: "dataloader"}
"""Key of a rank's own state -> the part that it belongs to, where the names differ."""
State = dict[str, Any]


class StateSides:
    """The shared state, and this rank's own."""

    def __init__(self, shared: SharedState, own: PerRankState, loaders: StatefulPart) -> None:
        """`loaders`: data loaders that have a position for each rank."""
        self.shared, self.own = shared, own
        self.parts: Collection[str] = PARTS
        self._loaders = loaders
        self._agreements = Agreements()

    def capture(
        self, ranks: int, *, with_gradients: bool = False, get_optimizer: GetOptimizer = optimizers.get_state, agreement: Agreement = SINGLE
    ) -> tuple[State, State]:
        """The shared side, and this rank's own. Tensors are not copied."""
        get_optimizer = get_optimizer if agreement.same_groups else partial(optimizers.get_state, by_name=True)
        shared = {**self.shared.capture(get_optimizer), "ranks": ranks, "mid_step": with_gradients}
        self.own.lead(shared, agreement)
        own = {"environment": environment.describe(ranks, self.shared.meshes()), **self.own.capture(agreement)}
        if with_gradients:
            shared["gradients"], own["gradients"] = self.shared.capture_gradients()
        return shared, own

    def for_save(
        self, store: "Store", group: "ProcessGroup | None", timeout: float, *, with_gradients: bool
    ) -> tuple[State | UnpreparedState, State | None]:
        """The shared side and this rank's own. A failure here is raised by the save, which all ranks must begin together."""
        if group is None:
            shared, own = self.capture(1, with_gradients=with_gradients)
            return {**shared, OWN: own}, None
        try:
            describe = lambda: RankReport(self.own.digests(), self.shared.optimizer_members())  # noqa: E731
            agreement = self._agreements.ask(store, group, describe, timeout)
            return self.capture(group.size(), with_gradients=with_gradients, agreement=agreement)
        except Exception as exc:
            if isinstance(exc, StoreError) and exc.object_id == DIFFERENT_CALLS:
                raise
            return UnpreparedState(exc), None

    def leaving_out(self, names: Collection[str]) -> Self:
        """A copy with the same objects, whose snapshots omit these tensors of the only model."""
        limited = copy.copy(self)
        limited.shared = self.shared.leaving_out(names)
        return limited

    def only(self, parts: Collection[str]) -> Self:
        """A copy with the same objects, whose restore fills only `parts`."""
        unknown = [parts] if isinstance(parts, str) else [part for part in parts if part not in PARTS]
        if unknown:
            raise InvalidOptionError(f"parts= takes any of {', '.join(PARTS)}, not {unknown[0]!r}", object_id="parts")
        limited = copy.copy(self)
        limited.parts = frozenset(parts)
        limited.shared, limited.own, limited._loaders = self.shared.only(parts), self.own.only(parts), self._loaders.only(parts)
        return limited

    def restore(self, address: str, ranks: int, broadcast: bool, restoring: Restoring) -> State:
        """Restores a snapshot, which can fail on one rank alone. Returns the stored own state of this rank, or of the first."""
        stored = restoring.lazy()
        values, names = stored.state_values, [*stored.names(), *stored.state_values]
        put_by = values.get("ranks")
        if type(put_by) is not int:
            raise MismatchError(
                f"{address.removesuffix('~0')!r} was not saved by TrainingState.put: restore it with store.checkout and load_state_dict, "
                "then save with TrainingState.put",
                object_id=address,
            )
        self.require_fitting(put_by, ranks, mid_step=bool(values.get("mid_step")))
        rank = 0 if restoring.group is None else restoring.group.rank()
        whose = [rank] if put_by == ranks else range(put_by if self.own.merge is not None else 1)
        held = own_states(restoring.selected(OWN)[OWN], put_by) if any(name.startswith(f"{OWN}.") for name in names) else None
        olds = [restoring.rank_state(old_rank) if held is None else held[old_rank] for old_rank in whose]
        kept = {*self.parts, "environment"}
        olds = [{key: value for key, value in old.items() if OWN_PARTS.get(key, key) in kept} for old in olds]
        own = olds[0]
        if put_by == ranks:
            self.own.check(own)
        taken = None if put_by == ranks else self.own.taken(olds)
        shared = {*self.parts, "ranks", "mid_step"}
        try:
            state = restoring.checkout(
                into={"ranks": None, "mid_step": None, **self.shared.target(stored)},
                rename=lambda name: self.shared.name_of(name) if name.partition(".")[0] in shared else None,
                broadcast=broadcast,
            )
        except MismatchError as exc:
            what = f"{address.removesuffix('~0')!r} holds another model or optimizer than this training has"
            raise MismatchError(f"{what}: if it is another run, give this one a ref of its own ({exc})", object_id=exc.object_id) from None
        if taken is None:
            self.load(state, own)
        else:
            self.load(state, taken, restoring.streams())
        return {**own, "environment": {**own["environment"], "ranks": put_by}}

    def load(self, state: Mapping[str, Any], own: State, streams: Streams | None = None) -> None:
        """Loads both sides, generators last, since loading may draw from them. `streams`: only if another number of ranks saved `own`."""
        self.shared.load(state, own.get("gradients", {}))
        if streams is None:
            self.own.load(own, next(iter(self.shared.meshes()), None))
        else:
            self.own.load_taken(own, streams, seeds_process=GENERATORS in self.parts)

    def require_fitting(self, put_by: int, ranks: int, *, mid_step: bool) -> None:
        """Raises if the state cannot be restored on another number of ranks."""
        if put_by == ranks:
            return
        if self._loaders.objects:
            path = self._loaders.path(next(iter(self._loaders.objects)))
            raise MismatchError(
                f"{path} has a position for each of {put_by} ranks, and there are {ranks} now. Use a tsck.SampleCursor, which fits any "
                "number; or restore with a TrainingState without dataloader=, and restart the epoch",
                object_id=path,
            )
        if mid_step and any(not isinstance(parameter, DTensor) for parameter in self.shared.names().parameters.values()):
            raise MismatchError(
                f"the snapshot was saved in the middle of a step, with gradients of each of {put_by} ranks, and there are {ranks} now: "
                "restore one that was saved between steps",
                object_id="gradients",
            )

    def warn_of_differences(self, what: str, old: State, ranks: int) -> None:
        """Warns if the environment differs from the saved one. `old`: the stored own state of this rank, or of the first."""
        changes = environment.differences(old["environment"], environment.describe(ranks, self.shared.meshes()))
        if changes:
            seeded = f"; {self.own.describe_taken(old)}" if old["environment"]["ranks"] != ranks else ""
            message = f"{what} was saved in another environment, so the job may not resume bit for bit: {'; '.join(changes)}{seeded}"
            warnings.warn(message, environment.EnvironmentChangedWarning, stacklevel=user_stacklevel())


PLAIN: Final = ("ranks", "mid_step", OWN)


class StoredTraining(NamedTuple):
    """The snapshot of a `TrainingState`, as plain dicts."""

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

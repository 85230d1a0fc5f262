"""`TrainingState`: the parts of a training job, passed once; each call then saves or restores all of them.

The state has two sides. The shared one (model, optimizer, schedule ...) fits any number of ranks; each rank's own (generators, loader
positions) fits the number of ranks that saved it. One process stores its own side with the rest, under `OWN`.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from blake3 import blake3
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.write.request import Unchanged
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.format.codec import CodecName, DeltaOption
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save import OnFull, PendingSnapshot
from tensorstore_ck.store import LAST_SEEN, Store
from tensorstore_ck.store.internals import require_opened
from tensorstore_ck.training import optimizers
from tensorstore_ck.training.noted_attributes import with_noted
from tensorstore_ck.training.parameter_names import require_supported
from tensorstore_ck.training.per_rank_state import GENERATORS, Merge, PerRankState, warn_of_lost_order
from tensorstore_ck.training.rank_group import rank_and_world_size, require_group
from tensorstore_ck.training.resume_search import ResumeSearch
from tensorstore_ck.training.sample_cursor import SampleCursor, require_one_position
from tensorstore_ck.training.shared_state import SharedState
from tensorstore_ck.training.state_sides import OWN, StateSides
from tensorstore_ck.training.stateful_parts import StatefulPart, is_stateful
from tensorstore_ck.training.step_watch import StepWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.engine.write.request import AnyHead, LastSeen
    from tensorstore_ck.store import ReadOnlyStore

TIMEOUT_SECONDS: Final = 600.0
State = dict[str, Any]


@short_errors
class TrainingState:
    """Everything that the next step of a job depends on. Create it once, after model, optimizer and the rest.

    ::

        training = tsck.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=cursor, extra={"seen": 0})
        resumed = training.restore(store, "runs/gpt", group=group)
        for step in range(resumed.step if resumed else 0, steps):
            ...
            training.put(store, ref="runs/gpt", step=step + 1, group=group)

    Generators of random numbers are always part of it: Python's, NumPy's, torch's of the CPU and of every CUDA device, DTensor's.
    """

    def __init__(
        self,
        *,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        dataloader: object = None,
        scaler: object = None,
        extra: dict[str, Any] | None = None,
        rank_values: dict[str, Any] | None = None,
        rank_merge: Merge | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        """Each argument is one object, or several in a dict or list.

        Args:
            model: Modules: plain, compiled, under DDP, FSDP2 (`fully_shard`) or tensor parallelism; wrappers are not part of names.
            optimizer: Optimizers of their parameters; their states are kept by parameter name.
            scheduler: Learning-rate schedules.
            dataloader: Objects with a position. A `SampleCursor` is equal on all ranks; others (StatefulDataLoader) are a rank's own.
            scaler: Gradient scalers.
            extra: Anything else by name, equal on all ranks: objects with ``state_dict`` and ``load_state_dict``, and plain values such as
                counters, which a restore writes into this dict. Generators (torch's, NumPy's, `random.Random`) are a rank's own.
            rank_values: Each rank's own values by name, tensors included; all ranks use the same names.
            rank_merge: For a restore on another number of ranks: merges `rank_values`, and buffers that differ by rank. Called with the
                path (``rank_values.seen``, ``model.bn.running_mean``) and the values of all ranks that saved one, in rank order; all
                ranks take its result. Without it they take the first rank's value.
            frozen: See `Store.put_snapshot`. It is read at each save, so that a list may change between saves.

        Raises:
            InvalidOptionError: an object has no state that can be stored.
            UnsupportedValueError: a model or an optimizer has a state that has no names.
        """
        for name, given in (("extra", extra), ("rank_values", rank_values)):
            if given is not None and type(given) is not dict:
                raise InvalidOptionError(f"{name}= must be a dict, which a restore changes, not a {type(given).__name__}", object_id=name)
        stateful = "something with state_dict and load_state_dict"
        loader = f"{stateful}, such as a tsck.SampleCursor or torchdata's StatefulDataLoader"
        models = StatefulPart.of("model", model).require(lambda candidate: isinstance(candidate, nn.Module), "a torch.nn.Module")
        trained_by = StatefulPart.of("optimizer", optimizer).require(
            lambda candidate: isinstance(candidate, torch.optim.Optimizer), "a torch optimizer"
        )
        others = [
            StatefulPart.of(name, objects).require(is_stateful, stateful)
            for name, objects in (("scheduler", scheduler), ("scaler", scaler))
        ]
        loaders = StatefulPart.of("dataloader", dataloader).require(is_stateful, loader)
        others.append(loaders.matching(lambda loader: isinstance(loader, SampleCursor)))
        own_loaders = loaders.matching(lambda part: not isinstance(part, SampleCursor))
        require_one_position(own_loaders)
        warn_of_lost_order(own_loaders)
        extra, rank_values = {} if extra is None else extra, {} if rank_values is None else rank_values
        own = PerRankState(model=models, loaders=own_loaders, extra=extra, values=rank_values, merge=rank_merge)
        self._sides = StateSides(SharedState(models, trained_by, others, extra), own, own_loaders)
        self._frozen = frozen
        require_supported(models.objects)
        self._sides.shared.capture()  # raises now what a save would raise

    @classmethod
    def over(cls, shared: SharedState, own: PerRankState) -> Self:
        """For an adapter whose trainer keeps its state in another way than modules and torch optimizers."""
        state = cls.__new__(cls)
        state._sides, state._frozen = StateSides(shared, own, StatefulPart.of("dataloader", None)), ()
        return state

    def leaving_out(self, names: Collection[str]) -> Self:
        """For an adapter: the same objects, whose snapshots lack these tensors of the only model, since the script loads them itself."""
        limited = copy.copy(self)
        limited._sides = self._sides.leaving_out(names)
        return limited

    # --- save and restore ---------------------------------------------------------------------------------------------

    def put(
        self,
        store: Store,
        *,
        ref: str,
        step: int | None = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
        gradients: bool = False,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
        triggers: Sequence[str] = (),
        epoch: float | None = None,
        attributes: Mapping[str, float | str] | None = None,
        expect: "str | Snapshot | AnyHead | LastSeen | None" = LAST_SEEN,
        parent: "str | Snapshot | LastSeen | None" = LAST_SEEN,
        unchanged: Unchanged = "warn",
        verify_capture: float = SAMPLE_SHARE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Snapshot:
        """Stores everything as the next snapshot on `ref`; tensors are not copied. Otherwise like `Store.put_snapshot`, with its arguments.

        `put_async` saves in the background. `gradients`: also store gradients, for a save between two micro-batches of one step. Keep the
        number of the micro-batch in ``extra=``. Without this, gradients are None after a restore, as after ``zero_grad``.

        `attributes`: without being asked, a save notes learning rates (``lr``), the scheduler's position (``scheduler_step``), ``epoch``
        and ``samples_seen`` of a `SampleCursor`, plain values of `extra` (as ``extra.tokens_seen``) and the commit that git has checked out
        (``code_version``).
        """
        require_opened(store)
        group = require_group(group)
        state, rank_state = self._sides.for_save(store, group, timeout_seconds, with_gradients=gradients)
        return store.put_snapshot(
            state,
            ref=ref,
            step=step,
            metrics=metrics,
            metadata=metadata,
            triggers=triggers,
            epoch=epoch,
            attributes=with_noted(attributes or {}, self._sides.shared.attributes()),
            expect=expect,
            parent=parent,
            unchanged=unchanged,
            verify_capture=verify_capture,
            frozen=tuple(self._frozen),
            group=group,
            rank_state=rank_state,
            timeout_seconds=timeout_seconds,
        )

    def put_async(
        self,
        store: Store,
        *,
        ref: str,
        step: int | None = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
        gradients: bool = False,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
        triggers: Sequence[str] = (),
        epoch: float | None = None,
        attributes: Mapping[str, float | str] | None = None,
        expect: "str | Snapshot | AnyHead | LastSeen | None" = LAST_SEEN,
        parent: "str | Snapshot | LastSeen | None" = LAST_SEEN,
        frozen: Sequence[str] | None = None,
        codec: CodecName | None = None,
        delta: DeltaOption = None,
        unchanged: Unchanged = "warn",
        verify_capture: float = SAMPLE_SHARE,
        on_full: OnFull = "block",
        changed_by: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> PendingSnapshot:
        """Like `put`, but in the background: the next step may begin when it returns. For the arguments see `Store.put_snapshot_async`.

        `frozen`: instead of what this object was made with. `changed_by`: by default the optimizers, so that what they update on CUDA
        devices is copied while the next forward and backward passes run.
        """
        require_opened(store)
        group = require_group(group)
        state, rank_state = self._sides.for_save(store, group, timeout_seconds, with_gradients=gradients)
        return store.put_snapshot_async(
            state,
            ref=ref,
            step=step,
            metrics=metrics,
            metadata=metadata,
            triggers=triggers,
            epoch=epoch,
            attributes=with_noted(attributes or {}, self._sides.shared.attributes()),
            expect=expect,
            parent=parent,
            group=group,
            rank_state=rank_state,
            frozen=tuple(self._frozen if frozen is None else frozen),
            codec=codec,
            delta=delta,
            unchanged=unchanged,
            verify_capture=verify_capture,
            on_full=on_full,
            changed_by=self._sides.shared.optimizers_with_hooks() if changed_by is None else changed_by,
            timeout_seconds=timeout_seconds,
        )

    def prepare(self, store: Store, *, group: "ProcessGroup | DeviceMesh | None" = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Makes ready what the first `put_async` needs: see `Store.prepare`. A `Checkpointer` calls it."""
        if torch.cuda.is_available():
            changed_by = self._sides.shared.optimizers_with_hooks()
            store.prepare(self.captured(), group=group, frozen=tuple(self._frozen), changed_by=changed_by, timeout_seconds=timeout_seconds)

    @renamed_argument(allow_bad="allow_marked")
    def restore(
        self,
        store: "ReadOnlyStore",
        address: str,
        *,
        group: "ProcessGroup | DeviceMesh | None" = None,
        parts: Collection[str] | None = None,
        allow_marked: bool = False,
        broadcast: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Snapshot | None:
        """Restores everything from the snapshot at `address`, filling the tensors of model and optimizer in place.

        On another number of ranks it restores the shared side, and each rank seeds its generators from the snapshot (`Store.streams`).
        One `EnvironmentChangedWarning` lists environment changes that can alter results. The script must set `requires_grad` and train or
        eval mode itself.

        Args:
            store: The store.
            address: A branch: its newest snapshot that is neither marked nor damaged; a warning names each one that is skipped. Any other
                address (``ref@step``, ``ref~n``, a tag, a root): this snapshot and no other one.
            group: All its ranks restore together.
            parts: Restores, and reads, only these: any of ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``dataloader``, ``extra``,
                ``rank_values``, ``generators``, ``gradients``. For a loop that needs its counters before it makes the model, or that draws
                random numbers before the first step: the generators come last. No snapshot is skipped then, since all parts of a state
                must be of the same one.
            allow_marked: See `Store.checkout`.
            broadcast: See `Store.checkout`.
            timeout_seconds: With `group`: how long to wait for the other ranks.

        Returns:
            The snapshot, whose `step` tells where to continue; None, on all ranks, if there is no such ref yet.

        Raises:
            NotFoundError: the ref has no such step or ancestor, or the root does not exist.
            MismatchError: it does not fit: another model, other parts, or loader positions of another number of ranks.
            DamageError: it is damaged; of a branch: none of its snapshots can be restored.
            SnapshotMarkedBadError: it is marked; of a branch: replicas had drifted apart, so the error says what to compare.
            RetryableError: it cannot be read now.
            InvalidOptionError: there is no such part.
        """
        require_opened(store)
        group = require_group(group)
        sides = self._sides if parts is None else self._sides.only(parts)
        ranks = 1 if group is None else group.size()
        options: dict[str, Any] = {"group": group, "broadcast": broadcast, "allow_marked": allow_marked, "timeout_seconds": timeout_seconds}
        search = ResumeSearch(
            store,
            address,
            group,
            advice="pass an earlier step, or {} to accept it",
            allow_marked=allow_marked,
            only_newest=parts is not None,
            timeout_seconds=timeout_seconds,
        )
        restored = search.restore(lambda named: store.restoring(named, partial(sides.restore, named, ranks, broadcast), **options))
        if restored is None:
            return None
        old, snapshot = restored
        if GENERATORS in sides.parts:
            sides.warn_of_differences(f"{address!r} (step {snapshot.step})", old, ranks)
        return snapshot

    # --- for torch.distributed.checkpoint ---------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything, for ``dcp.save({"app": training})``.

        Names of a rank's own state contain the rank. To load on more ranks than saved, pass a planner that allows a partial load.
        """
        rank, ranks = rank_and_world_size()
        shared, own = self._sides.capture(ranks, get_optimizer=optimizers.get_full_state)
        root = blake3(own["generators"]["torch"].numpy().tobytes()).hexdigest()
        plain = {"ranks": shared.pop("ranks"), "mid_step": shared.pop("mid_step"), "streams": root}
        return {**plain, **{name: seal(value) for name, value in shared.items()}, OWN: {str(rank): seal(own)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, on any number of ranks: see `restore`."""
        rank, ranks = rank_and_world_size()
        put_by, root = state.get("ranks"), state.get("streams")
        if type(put_by) is not int or type(root) is not str:
            raise MismatchError("this is no state of a TrainingState", object_id="state_dict")
        self._sides.require_fitting(put_by, ranks, mid_step=False)
        state = unseal(state)
        own = state.get(OWN, {}).get(str(rank)) if put_by == ranks else None
        if put_by == ranks:
            if own is None:
                raise MismatchError(f"the state lacks rank {rank}'s own state", object_id=OWN)
            self._sides.own.check(own)
            self._sides.load(state, own)
        else:
            self._sides.load(state, self._sides.own.taken([{}]), Streams(root, rank, ranks))
        own = own or {}
        self._sides.warn_of_differences("the state", {**own, "environment": {**own.get("environment", {}), "ranks": put_by}}, ranks)

    def captured(self) -> State:
        """Everything as it is now, in the form of one process: the rank's own side is under ``rank``. Tensors are not copied."""
        shared, own = self._sides.capture(rank_and_world_size()[1])
        return {**shared, OWN: own}

    def step_watch(self) -> StepWatch:
        """For a save of the last completed step after an exception."""
        return StepWatch(self._sides.shared, self._sides.own, self.captured, OWN)


_SEAL: Final = "sealed"


def seal(state: Any) -> Any:
    """The state, with everything that has no tensors in tuples."""
    if not _has_tensors(state):
        return (_SEAL, state)
    return {key: seal(value) for key, value in state.items()} if isinstance(state, dict) else state


def unseal(state: Any) -> Any:
    """The inverse of `seal`."""
    if type(state) is tuple and len(state) == 2 and type(state[0]) is str and state[0] == _SEAL:
        return state[1]
    return {key: unseal(value) for key, value in state.items()} if isinstance(state, dict) else state


def _has_tensors(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_has_tensors, state.values()))
    return isinstance(state, torch.Tensor) or (isinstance(state, list | tuple) and any(map(_has_tensors, state)))

"""Fabric over a store: ``tensorstore_ck.lightning.attach(fabric, store="./ckpt", ref="runs/x")``.

`fabric.save(path, state)` saves into the store then, by all ranks and with their generators, and `path` names the snapshot;
`fabric.load(path, state)` restores it. Modules and optimizers are stored by parameter name, everything else is each rank's own.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.integrations.lightning.compatibility import is_sharded, require_supported_fabric
from tensorstore_ck.integrations.lightning.lightning_state import numbered, require_whole
from tensorstore_ck.integrations.lightning.pointer_files import read_pointer, write_pointer
from tensorstore_ck.integrations.trainer.attach import all_ranks, opened
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer
from tensorstore_ck.integrations.trainer.saves import Always, require_own_ref
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState, model_state
from tensorstore_ck.training.checkpointing import Checkpointer
from tensorstore_ck.training.resume_search import ResumeSearch
from tensorstore_ck.training.state_sides import StoredTraining, read_training
from tensorstore_ck.training.stateful_parts import is_stateful

State = dict[str, Any]
STEPS: Final = ("global_step", "step", "iteration", "iter", "iter_num", "step_count")
"""Keys of a state under which scripts keep their step."""
OBJECTS: Final = ("model", "optimizer")


@short_errors
def attach(
    fabric: Any, *, store: Store | str | os.PathLike[str], ref: str, step: str | None = None, keep: Mapping[str, object] | None = None
) -> None:
    """Makes `fabric.save` and `fabric.load` use a store. Call it after `fabric.launch`, on all ranks.

    Args:
        fabric: The Fabric.
        store: The store; or its URL or path, where it is created if there is none.
        ref: The branch.
        step: The key of the step in the state that is saved; by default ``global_step``, ``step``, ``iteration``, ``iter``, ``iter_num`` or
            ``step_count``; without any, saves are counted.
        keep: The retention policy of the ref, as in `Store.set_policy`.

    Raises:
        InvalidOptionError: the strategy is not supported, or this Fabric has a store already.
        InvalidNameError: `ref` is no valid name.
        MissingExtraError: Lightning has another version than those that are supported.
    """
    validate_ref_name(ref)
    require_supported_fabric(fabric)
    strategy = fabric.strategy
    if isinstance(getattr(strategy.save_checkpoint, "__self__", None), FabricSnapshots):
        raise InvalidOptionError("this Fabric saves into a store already", object_id="fabric")
    snapshots = FabricSnapshots(strategy=strategy, store=opened(store), ref=ref, step=step, keep=keep)
    strategy.save_checkpoint, strategy.load_checkpoint = snapshots.save_checkpoint, snapshots.load_checkpoint


@short_errors
class FabricSnapshots:
    """The methods that a Strategy of Fabric calls in place of its own."""

    def __init__(self, strategy: Any, store: Store, ref: str, step: str | None, keep: Mapping[str, object] | None) -> None:
        self._strategy, self._store, self._ref, self._step, self._keep = strategy, store, ref, step, keep
        self._load_natively: Callable[..., State] = strategy.load_checkpoint
        self._checkpointer: Checkpointer | None = None
        self._saved: dict[str, dict[str, Any]] = {}
        self._values: State = {}
        self._count = 0

    # --- save ---------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: State,
        storage_options: object = None,
        filter: object = None,  # noqa: A002
    ) -> None:
        """See Fabric.

        Raises:
            InvalidOptionError: it has options that a store cannot honour, or the state is no dict.
            ConflictError: the ref has snapshots of another run, none of which was loaded.
            UnsupportedValueError: an optimizer of the state cannot be saved.
            StoreError: the save failed permanently; see `Checkpointer`.
        """
        if filter is not None or storage_options is not None:
            raise InvalidOptionError("fabric.save(filter=..., storage_options=...) is not possible with a store", object_id="filter")
        _require_dict(state, "save")
        objects = _objects(state)
        if self._checkpointer is None or any(objects[kind].items() != self._saved[kind].items() for kind in OBJECTS):
            require_own_ref(self._store, self._ref, "the newest checkpoint to fabric.load")
            require_whole(objects["optimizer"].values())
            training = TrainingState(model=objects["model"] or None, optimizer=objects["optimizer"] or None, rank_values=self._values)
            self._checkpointer = Checkpointer(
                self._store, training, ref=self._ref, when=Always(), keep=self._keep, asynchronous=False, group=all_ranks()
            )
            self._saved = objects
        self._values.clear()
        self._values.update({name: held.state_dict() if is_stateful(held) else held for name, held in _others(state).items()})
        self._count += 1
        saved = self._checkpointer.step(self._step_of(state))
        if isinstance(saved, Snapshot) and self._strategy.is_global_zero:
            write_pointer(str(path), SnapshotPointer(self._store.url, saved.root))

    def _step_of(self, state: State) -> int:
        key = self._step if self._step is not None else next((key for key in STEPS if type(state.get(key)) is int), None)
        if key is not None and type(state.get(key)) is not int:
            raise InvalidOptionError(f"the state has no whole number {key!r}, which attach(step=) names", object_id=str(key))
        return self._count if key is None else int(state[key])

    # --- load ---------------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> State:
        """See Fabric; also restores the generators. `path` may be an address in the store, such as ``runs/x@10``; a branch means its newest
        intact snapshot.

        Raises:
            NotFoundError: there is neither a file nor a snapshot.
            MismatchError: it does not fit the state.
            InvalidOptionError: the state is no dict.
        """
        pointer = read_pointer(path)
        if pointer is None and (os.path.exists(path) or "://" in str(path)):
            return self._load_natively(path=path, state=state, strict=strict, weights_only=weights_only)
        if state is not None:
            _require_dict(state, "load")
        address = str(path) if pointer is None else pointer.address_in(self._store, str(path))
        missing = f"{address!r} is no file, and no snapshot of {self._store.url}"
        advice = "load an earlier step, or {} to accept it"
        search = ResumeSearch(self._store, address, all_ranks(), advice=advice, missing=missing)
        return search.restore(lambda named: self._load_from(named, state, strict=strict)) or {}

    def _load_from(self, address: str, state: Any, *, strict: bool) -> State:
        sharded = is_sharded(self._strategy)
        stored = read_training(self._store, address, group=all_ranks(), parts=() if sharded and state else OBJECTS)
        self._checkpointer, self._count = None, stored.snapshot.step or 0  # the next save may go back to an earlier step
        if not state:
            return _checkpoint(stored)
        filled = self._fill_sharded(state, stored, strict=strict) if sharded else _fill(state, _checkpoint(stored), strict=strict)
        TrainingState().restore(self._store, stored.snapshot.root, group=all_ranks(), parts=("generators",))
        return filled

    def _fill_sharded(self, state: State, stored: StoredTraining, *, strict: bool) -> State:
        objects = _objects(state)
        training = TrainingState(model=objects["model"] or None, optimizer=objects["optimizer"] or None)
        training.restore(self._store, stored.snapshot.root, group=all_ranks(), parts=OBJECTS)
        return _fill({name: state[name] for name in _others(state)}, dict(stored.rank_values), strict=strict, into=state)


def _require_dict(state: object, method: str) -> None:
    if not isinstance(state, dict):
        raise InvalidOptionError(f"pass fabric.{method} a dict of objects by name, not a {type(state).__name__}", object_id="state")


def _fill(state: State, checkpoint: State, *, strict: bool, into: State | None = None) -> State:
    missing = [name for name in state if name not in checkpoint]
    if missing and strict:
        raise MismatchError(f"the snapshot has no {', '.join(map(repr, missing))}: it has {', '.join(checkpoint)}", object_id=missing[0])
    for name, held in list(state.items()):
        if name not in checkpoint:
            continue
        stored = checkpoint.pop(name)
        if isinstance(held, nn.Module):
            _module(held).load_state_dict(model_state.state_dict_of(_module(held), stored), strict=strict)
        elif is_stateful(held):
            held.load_state_dict(stored)
        else:
            (state if into is None else into)[name] = stored
    return checkpoint


def _checkpoint(stored: StoredTraining) -> State:
    """The dict that Fabric would have read from a file."""
    optimizers = {name: numbered(states) for name, states in stored.shared.get("optimizer", {}).items()}
    modules = {name: {**weights, **stored.buffers.get(name, {})} for name, weights in stored.shared.get("model", {}).items()}
    return {**modules, **optimizers, **stored.rank_values}


def _objects(state: State) -> dict[str, dict[str, Any]]:
    return {
        "model": {name: _module(held) for name, held in state.items() if isinstance(held, nn.Module)},
        "optimizer": {name: held for name, held in state.items() if isinstance(held, torch.optim.Optimizer)},
    }


def _others(state: State) -> State:
    return {name: held for name, held in state.items() if not isinstance(held, nn.Module | torch.optim.Optimizer)}


def _module(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module

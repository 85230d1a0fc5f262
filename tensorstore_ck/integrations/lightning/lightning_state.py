"""The state of a Trainer in a snapshot, and the checkpoint dict that Lightning loads from it.

Weights and optimizers are stored by parameter name, as by every adapter, so that another strategy can restore them. The rest of Lightning's
dump is each rank's own, and so is the state that Lightning loses: positions of loaders and logged values. Generators are part of every
`TrainingState`. `load_from_checkpoint` makes a LightningModule from a snapshot, as Lightning does from a file.
"""

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.integrations.lightning import logged_values
from tensorstore_ck.integrations.lightning.compatibility import is_sharded
from tensorstore_ck.integrations.lightning.pointer_files import read_pointer
from tensorstore_ck.integrations.lightning.train_loaders import TrainLoaders
from tensorstore_ck.state.check import inspect_state
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store import open as open_store
from tensorstore_ck.training import TrainingState, model_state
from tensorstore_ck.training.optimizers import is_partitioned
from tensorstore_ck.training.state_sides import StoredTraining, read_training

State = dict[str, Any]
OWN: Final = "lightning"
"""Key of a rank's own values."""
WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"


class TrainerValues:
    """All but weights, optimizers and generators. A save captures it; Lightning loads it itself."""

    def __init__(self, trainer: Any, *, weights_only: bool) -> None:
        self._trainer, self._weights_only = trainer, weights_only

    def state_dict(self) -> State:
        """As Lightning dumps it, with the positions of loaders and the logged values."""
        trainer = self._trainer
        with _without_optimizers(trainer.strategy):
            dumped = trainer._checkpoint_connector.dump_checkpoint(self._weights_only)
        dumped.pop(OPTIMIZERS, None)
        if is_sharded(trainer.strategy) or _is_same(dumped.get(WEIGHTS), trainer.strategy.lightning_module_state_dict()):
            dumped.pop(WEIGHTS, None)
        loaders = TrainLoaders.of(trainer)
        return {
            "checkpoint": dumped,
            "weights_only": self._weights_only,
            "loaders": loaders.state(),
            "loader_generators": loaders.generators(),
            "logged": logged_values.capture(trainer),
        }

    def load_state_dict(self, _: State) -> None:
        """Lightning loads it."""


def require_storable(values: State) -> None:
    """Checks values before the training begins. Raises `UnsupportedValueError` if one cannot be stored."""
    problems, _ = inspect_state(values)
    if problems:
        raise UnsupportedValueError(
            f"{problems[0].message}. For a hyperparameter: self.save_hyperparameters(ignore=[...])", object_id=problems[0].path
        )


def training_state(trainer: Any, *, weights_only: bool) -> TrainingState:
    """The state of a Trainer, for saves."""
    values = {OWN: TrainerValues(trainer, weights_only=weights_only)}
    return TrainingState(model=trainer.lightning_module, optimizer=None if weights_only else _optimizers(trainer), rank_values=values)


def restore_sharded(trainer: Any, store: Any, root: str, group: "torch.distributed.ProcessGroup | None", *, with_optimizers: bool) -> None:
    """Restores the shards of weights and optimizers in place."""
    parts = ("model", "optimizer") if with_optimizers else ("model",)
    training = TrainingState(model=trainer.lightning_module, optimizer=_optimizers(trainer) if with_optimizers else None)
    training.restore(store, root, group=group, parts=parts)


def checkpoint_of(stored: StoredTraining, module: nn.Module | None) -> State:
    """The dict that Lightning would have read from its file."""
    values: State = stored.rank_values[OWN]
    checkpoint: State = dict(values["checkpoint"])
    if module is not None and WEIGHTS not in checkpoint:
        weights = {**stored.shared.get("model", {}), **stored.buffers}
        checkpoint[WEIGHTS] = model_state.state_dict_of(module, weights)
    if not values["weights_only"]:
        states = stored.shared.get("optimizer", {})
        checkpoint[OPTIMIZERS] = [numbered(states[key]) for key in sorted(states, key=int)]
    return checkpoint


def _optimizers(trainer: Any) -> list[Any] | None:
    require_whole(trainer.strategy.optimizers)
    return list(trainer.strategy.optimizers) or None


def require_whole(optimizers: Iterable[Optimizer]) -> None:
    """Raises `UnsupportedValueError` if each rank has some of the states of an optimizer: Lightning loads all of them from one dict."""
    if any(map(is_partitioned, optimizers)):
        raise UnsupportedValueError(
            "Lightning cannot resume a ZeroRedundancyOptimizer from a snapshot: use another optimizer, or FSDPStrategy or "
            "ModelParallelStrategy, which shard the states of any",
            object_id="optimizer",
        )


def numbered(state: State) -> State:
    """An optimizer's state by numbers, as torch's optimizers take it."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    return {
        **state,
        "state": {numbers.get(name, name): moments for name, moments in state.get("state", {}).items()},
        "param_groups": groups,
    }


def _is_same(dumped: Any, own: Mapping[str, Any]) -> bool:
    """Whether hooks left the dumped weights as they were."""
    if not isinstance(dumped, Mapping) or dumped.keys() != own.keys():
        return False
    return all(
        tensor.shape == own[name].shape and tensor.dtype == own[name].dtype and tensor.data_ptr() == own[name].data_ptr()
        if isinstance(tensor, Tensor) and isinstance(own[name], Tensor)
        else tensor is own[name]
        for name, tensor in dumped.items()
    )


@contextmanager
def _without_optimizers(strategy: Any) -> Iterator[None]:
    """The optimizers are stored by name: to gather or copy their states for a dump would be for nothing."""
    strategy.optimizer_state = lambda _: {}
    try:
        yield
    finally:
        del strategy.optimizer_state


Module = TypeVar("Module")


@short_errors
def load_from_checkpoint(
    kind: type[Module], path: str | os.PathLike[str], *, store: ReadOnlyStore | str | os.PathLike[str] | None = None, **options: Any
) -> Module:
    """A new module with the weights and hyperparameters of a snapshot.

    Args:
        kind: The class of the module.
        path: A file that names a snapshot, or an address in `store`.
        store: The store, or its path or URL; by default the one that the file names.
        options: For `kind.load_from_checkpoint`.

    Raises:
        InvalidOptionError: `path` is an address, and no store is given; or it is not of a Trainer of Lightning over a store.
        NotFoundError: there is no such snapshot.
    """
    pointer = read_pointer(path)
    if pointer is None and os.path.isfile(path):
        native = f"{kind.__name__}.load_from_checkpoint"
        raise InvalidOptionError(f"{path} names no snapshot: if Lightning wrote it, use {native}", object_id=str(path))
    if pointer is None and store is None:
        raise InvalidOptionError(f"{path} names no snapshot: for an address pass store=", object_id=str(path))
    if store is None or isinstance(store, str | os.PathLike):
        url = pointer.store if store is None and pointer is not None else store
        with open_store(url or "", read_only=True) as opened:
            return load_from_checkpoint(kind, path, store=opened, **options)
    address = str(path) if pointer is None else pointer.address_in(store, str(path))
    stored = read_training(store, address, parts=("model",))
    if OWN not in stored.rank_values:
        raise InvalidOptionError(f"{path} is not of a Trainer of Lightning", object_id=str(path))
    checkpoint = dict(stored.rank_values[OWN]["checkpoint"])
    checkpoint.setdefault(WEIGHTS, stored.shared.get("model", {}))
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    loaded: Module = kind.load_from_checkpoint(file, **{"weights_only": False, **options})  # type: ignore[attr-defined]
    return loaded

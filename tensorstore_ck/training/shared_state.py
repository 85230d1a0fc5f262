"""The state that the ranks of a job share: models, optimizers, schedules, scalers, sample cursors, and what the user adds.

It fits any number of ranks. Knows no ranks and no store.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tensorstore_ck.training import extras, gradients, model_state, optimizers, random_generators
from tensorstore_ck.training.noted_attributes import noted_attributes
from tensorstore_ck.training.parameter_names import MODEL, ParameterNames, without_wrappers
from tensorstore_ck.training.stateful_parts import StatefulPart, load

if TYPE_CHECKING:
    from tensorstore_ck.state import LazySnapshot

State = dict[str, Any]
GetOptimizer = Callable[[str, torch.optim.Optimizer, ParameterNames], State]


class SharedState:
    """The part of a `TrainingState` that is the same on all ranks, or sharded over them."""

    def __init__(self, models: StatefulPart, optimizers: StatefulPart, others: list[StatefulPart], extra: dict[str, Any]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._others = others
        self._extra = extra
        self._left_out: Collection[str] = ()
        self._named = models.objects
        """The models whose parameters the optimizers update."""
        self._restores_gradients = True

    def only(self, parts: Collection[str]) -> "SharedState":
        """A copy with the same objects, whose restore fills only `parts`."""
        limited = copy.copy(self)
        limited._models, limited._optimizers = self._models.only(parts), self._optimizers.only(parts)
        limited._others = [part.only(parts) for part in self._others]
        limited._extra = self._extra if "extra" in parts else {}
        limited._restores_gradients = "gradients" in parts
        return limited

    def leaving_out(self, names: Collection[str]) -> "SharedState":
        """A copy with the same objects, whose snapshots omit these tensors of the only model."""
        limited = copy.copy(self)
        limited._left_out = names
        return limited

    def objects(self, part: str) -> Mapping[str, Any]:
        """The objects of one part, by name."""
        return next(
            (candidate.objects for candidate in (*self._others, self._models, self._optimizers) if candidate.name == part), self._extra
        )

    def optimizers_with_hooks(self) -> list[torch.optim.Optimizer]:
        """The optimizers that call hooks when they begin a step."""
        given = self._optimizers.objects.values()
        return [one for one in given if isinstance(one, torch.optim.Optimizer) and hasattr(one, "_optimizer_step_pre_hooks")]

    def attributes(self) -> dict[str, float | str]:
        """The attributes that each save notes: see `noted_attributes`."""
        parts = {"optimizers": "optimizer", "schedulers": "scheduler", "loaders": "dataloader", "extra": "extra"}
        return noted_attributes(**{argument: self.objects(part) for argument, part in parts.items()})

    def names(self) -> ParameterNames:
        """The names of the models' parameters."""
        return ParameterNames(self._named)

    def meshes(self) -> dict[DeviceMesh, None]:
        """The meshes of the models' parameters."""
        return {parameter.device_mesh: None for parameter in self.names().parameters.values() if isinstance(parameter, DTensor)}

    def optimizer_members(self) -> list[list[list[str]]]:
        """The names of parameters in each group of each optimizer."""
        names = self.names()
        return [optimizers.get_members(self._optimizers.path(key), optimizer, names) for key, optimizer in self._optimizers.objects.items()]

    # --- captured ---------------------------------------------------------------------------------------------------------

    def capture(self, get_optimizer: GetOptimizer = optimizers.get_state) -> State:
        """The shared state as it is now, without gradients; not copied."""
        names = self.names()
        state = self._models.states(self._get_model)
        state |= self._optimizers.states(lambda path, optimizer: get_optimizer(path, optimizer, names))
        for part in self._others:
            state |= part.states(lambda _, stateful: stateful.state_dict())
        return state | self._plain_extra().states(extras.get_state)

    def capture_values(self) -> State:
        """The values that a step may change before it changes weights: all but models, optimizers, scalers and modules. Not copied."""
        state: State = {}
        for part in self._others:
            state |= {} if part.name == "scaler" else part.states(lambda _, stateful: stateful.state_dict())
        return state | self._plain_extra().matching(lambda value: not isinstance(value, nn.Module)).states(extras.get_state)

    def capture_gradients(self) -> tuple[gradients.Gradients, gradients.Gradients]:
        """The shared gradients, and this rank's own."""
        return gradients.get_gradients(self.names(), self._models.objects.values())

    # --- restored ---------------------------------------------------------------------------------------------------------

    def target(self, snapshot: "LazySnapshot") -> State:
        """The target of a restore: the state that a snapshot fills."""
        stored = [*snapshot.names(), *snapshot.state_values]
        names = self.names()
        target = self._models.states(self._get_model)
        target |= self._optimizers.states(lambda path, optimizer: optimizers.get_target(path, optimizer, names, stored))
        for part in self._others:
            target |= part.states(lambda _, __: None)
        target |= self._plain_extra().states(extras.get_target)
        in_flight = names.below("gradients.", stored) if self._restores_gradients else []
        return {**target, "gradients": gradients.get_target(names, in_flight)} if in_flight else target

    def wants(self, name: str) -> bool:
        """Whether the stored value of this name is read; it belongs to a part that is restored."""
        return True

    def name_of(self, stored: str) -> str | None:
        """The name in this state of a stored name, in a part that is restored; None: it is not read."""
        if not self.wants(stored):
            return None
        return without_wrappers(stored) if stored.startswith(MODEL) else stored

    def load(self, state: Mapping[str, Any], own_gradients: gradients.Gradients) -> None:
        """Restores the shared state. `own_gradients`: the gradients that this rank stored as its own."""
        names = self.names()
        for path, model, stored in self._models.with_states(state):
            load(path, partial(model_state.set_state, model), stored)
        for path, optimizer, stored in self._optimizers.with_states(state):
            optimizers.set_state(path, optimizer, names, stored)
        for part in self._others:
            for path, stateful, stored in part.with_states(state):
                load(path, stateful.load_state_dict, stored)
        extras.put_back(self._extra, self._plain_extra(), state)
        gradients.set_gradients(names, {**state.get("gradients", {}), **own_gradients})

    def _get_model(self, _: str, model: nn.Module) -> State:
        return {name: value for name, value in model_state.get_state(model).items() if name not in self._left_out}

    def _plain_extra(self) -> StatefulPart:
        """The user's additions without generators, which are a rank's own."""
        return StatefulPart.of("extra", self._extra).matching(lambda value: not random_generators.is_generator(value))

"""The state of a DeepSpeed engine that all ranks share: weights, masters and moments by parameter name, counters, schedule, loss scale.

Weights are under ``model``, and moments under ``optimizer.state``, as `TrainingState` names them without DeepSpeed; the master weights are
one more state of the optimizer, ``master``. So a snapshot fits every stage, and a script without DeepSpeed.
"""

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.integrations.deepspeed.fragments import Fragment, base_optimizer, fragments_of, is_copy, with_global_names
from tensorstore_ck.integrations.deepspeed_names import COUNTERS, MASTER, MICRO_OFFSET, SCALE
from tensorstore_ck.state import LazySnapshot
from tensorstore_ck.training import TrainingState, optimizers
from tensorstore_ck.training.buffers import plain_buffers
from tensorstore_ck.training.gradients import Gradients
from tensorstore_ck.training.noted_attributes import noted_attributes
from tensorstore_ck.training.parameter_names import MODEL, ParameterNames, walk
from tensorstore_ck.training.per_rank_state import PerRankState
from tensorstore_ck.training.shared_state import GetOptimizer, SharedState
from tensorstore_ck.training.stateful_parts import StatefulPart

State = dict[str, Any]
PARTS: Final = ("model", "optimizer", "scheduler", "scaler", "extra")


class EngineState(SharedState):
    """Captures and restores an engine; see the module."""

    def __init__(
        self, engine: Any, parts: Collection[str] = PARTS, *, schedulers: object = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        scheduler = StatefulPart.of("scheduler", engine.lr_scheduler if schedulers is None else schedulers).only(parts)
        others = {**(extra or {}), "deepspeed": _Counters(engine)} if "extra" in parts else {}
        super().__init__(StatefulPart.of("model", None), StatefulPart.of("optimizer", None), [scheduler], others)
        self._engine, self._parts, self._schedulers, self._given_extra = engine, frozenset(parts), schedulers, extra
        self.module = with_global_names(engine.module)
        """The model, under the names that are stored."""
        self.saves_frozen = True
        self.strict = True
        """Whether the stored weights must be exactly those of the model."""

    def only(self, parts: Collection[str]) -> "EngineState":
        """The same engine; a restore fills only `parts`."""
        limited = EngineState(self._engine, self._parts & frozenset(parts), schedulers=self._schedulers, extra=self._given_extra)
        limited.saves_frozen, limited.strict = self.saves_frozen, self.strict
        return limited

    def names(self) -> ParameterNames:
        """The names of the model's parameters, without those of DeepSpeed's wrappers."""
        return ParameterNames({"": self.module})

    def attributes(self) -> dict[str, float | str]:
        """What each save notes, with the learning rates of the engine's optimizer."""
        rates = noted_attributes(optimizers={"": self._engine.optimizer}, schedulers={}, loaders={}, extra={})
        return {**super().attributes(), **rates}

    def optimizer_members(self) -> list[list[list[str]]]:
        """The names of parameters in each group."""
        return [] if self._engine.optimizer is None else [_members(self._engine, self._fragments())]

    def _fragments(self) -> list[Fragment]:
        return fragments_of(self._engine.optimizer, self.names())

    # --- captured ---------------------------------------------------------------------------------------------------------

    def capture(self, get_optimizer: GetOptimizer = optimizers.get_state) -> State:
        """All of it as it is now, not copied."""
        fragments, parameters = self._fragments(), self.names().parameters
        saved = [fragment for fragment in fragments if not is_copy(parameters[fragment.name])]
        captured = {**super().capture(get_optimizer), "model": self._weights(saved, self.saves_frozen)}
        if self._engine.optimizer is not None and "optimizer" in self._parts:
            captured["optimizer"] = {"state": dict(self._states(saved)), "param_groups": self._groups(fragments)}
            scaler = _scaler_of(self._engine.optimizer)
            captured["scaler"] = {name: getattr(scaler, name) for name in SCALE if hasattr(scaler, name)}
        return captured

    def capture_gradients(self) -> tuple[Gradients, Gradients]:
        """None: an engine has them in buckets of its own, and is saved between steps."""
        return {}, {}

    def _weights(self, fragments: list[Fragment], with_frozen: bool = True) -> State:
        kept = {fragment.name: fragment.piece(fragment.weights) for fragment in fragments if with_frozen or fragment.flat is not None}
        return {**kept, **self._tied(kept), **plain_buffers(self.module, of_model=True)}

    def _tied(self, kept: Mapping[str, Any]) -> State:
        """The other names of tied parameters."""
        names = self.names()
        tied = {}
        for prefix, module in walk(self.module, ""):
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                first = names.of(parameter) or ""
                if first in kept and prefix + name not in kept:
                    tied[prefix + name] = kept[first]
        return tied

    def _states(self, fragments: list[Fragment]) -> Iterator[tuple[str, State]]:
        state = base_optimizer(self._engine.optimizer).state
        counters = _counters(
            (tuple(fragment.flat.shape), state.get(fragment.flat, {})) for fragment in fragments if fragment.flat is not None
        )
        for fragment in fragments:
            if fragment.flat is None:
                continue
            has_master = fragment.flat.dtype != fragment.weights.dtype  # the optimizer updates a copy
            kept: State = {MASTER: fragment.piece(fragment.flat)} if has_master else {}
            for key, value in state.get(fragment.flat, {}).items():
                if key in counters and isinstance(value, torch.Tensor) and value.dim() > 0 and not _is_whole_number(value):
                    raise UnsupportedValueError(
                        f"the optimizer's {key!r} of {fragment.name} has shape {tuple(value.shape)}, where DeepSpeed's flat tensor has "
                        f"{tuple(fragment.flat.shape)}: use an optimizer that keeps counters and one number for each element, such as "
                        "AdamW",
                        object_id=f"optimizer.state.{fragment.name}.{key}",
                    )
                kept[key] = copy.deepcopy(value) if key in counters else fragment.piece(value)
            yield fragment.name, kept

    def _groups(self, fragments: list[Fragment]) -> list[State] | State:
        groups = base_optimizer(self._engine.optimizer).param_groups
        own = [
            {**{key: value for key, value in group.items() if key not in _own_options(group)}, "params": names}
            for group, names in zip(groups, _members(self._engine, fragments), strict=True)
        ]
        return optimizers.named_groups(own) if self._engine.has_moe_layers or self._engine.pipeline_parallelism else own

    # --- restored ---------------------------------------------------------------------------------------------------------

    def target(self, stored: LazySnapshot) -> State:
        """The state to restore a snapshot into: the engine's own memory, and new tensors for moments that it does not have yet."""
        fragments = self._fragments()
        target = super().target(stored)
        if "model" in self._parts:
            weights = self._weights(fragments)
            frozen = {fragment.name: fragment for fragment in fragments if fragment.flat is None}
            frozen |= self._tied(frozen)
            left = [name for name in weights if MODEL + name not in stored and (not self.strict or name in frozen)]
            if left:
                warnings.warn(
                    f"the snapshot lacks {', '.join(left[:5])}{' and more' if len(left) > 5 else ''}: kept as they are", stacklevel=2
                )
            target["model"] = {name: weight for name, weight in weights.items() if name not in left}
        if "optimizer" in self._parts and self._engine.optimizer is not None:
            target["optimizer"] = {"state": dict(self._state_targets(fragments, stored)), "param_groups": None}
            if any(path.startswith("scaler.") for path in stored.state_values):
                target["scaler"] = None
        return target

    def wants(self, name: str) -> bool:
        """Weights that the model does not have are left out if `strict` is off."""
        own = name.removeprefix(MODEL)
        return self.strict or own == name or own in self._weights(self._fragments())

    def _state_targets(self, fragments: list[Fragment], stored: LazySnapshot) -> Iterator[tuple[str, State]]:
        """Moments are views of tensors like `Fragment.flat`, which become the optimizer's states when they are filled."""
        own = base_optimizer(self._engine.optimizer).state
        states: dict[str, State] = {fragment.name: {} for fragment in fragments if fragment.flat is not None}
        for path in (*stored, *stored.state_values):
            name, _, key = path.removeprefix("optimizer.state.").rpartition(".")
            if path.startswith("optimizer.state.") and name in states:
                states[name][key] = stored.get(path)
        counters = _counters((fragment.shape, states.get(fragment.name, {})) for fragment in fragments)
        for fragment in fragments:
            if fragment.flat is None:
                continue
            target: State = {}
            for key, tensor in states[fragment.name].items():
                if key == MASTER:
                    target[key] = fragment.piece(fragment.flat)
                elif key in counters or tensor is None:
                    target[key] = None
                else:
                    state = own[fragment.flat]
                    if not fragment.is_elementwise(state.get(key)):
                        dtype = tensor.dtype if isinstance(tensor.dtype, torch.dtype) else None
                        state[key] = torch.zeros_like(fragment.flat, dtype=dtype, requires_grad=False)
                    target[key] = fragment.piece(state[key])
            yield fragment.name, target

    def load(self, state: Mapping[str, Any], own_gradients: Gradients) -> None:
        """Restores what does not lie in the engine's memory yet, and lets the optimizer's copies of the weights follow."""
        super().load({key: value for key, value in state.items() if key not in {"model", "optimizer", "scaler"}}, own_gradients)
        optimizer = self._engine.optimizer
        if optimizer is None:
            return
        has_masters = False
        if "optimizer" in self._parts:
            fragments = self._fragments()
            members = _members(self._engine, fragments)
            matched = optimizers.match_groups("optimizer", state["optimizer"]["param_groups"], members, self.names().parameters)
            for group, options in zip(base_optimizer(optimizer).param_groups, matched, strict=True):
                group.update({key: value for key, value in options.items() if key not in _own_options(group)})
            has_masters = self._load_states(state["optimizer"]["state"], fragments)
            _set_scale(optimizer, state.get("scaler") or {})
        _spread(optimizer, from_masters=has_masters)

    def _load_states(self, stored: Mapping[str, State], fragments: list[Fragment]) -> bool:
        """Returns whether there were masters. Each flat tensor gets counters of its own, though several are stored from one."""
        own = base_optimizer(self._engine.optimizer).state
        counters = _counters((fragment.shape, stored.get(fragment.name, {})) for fragment in fragments if fragment.flat is not None)
        taken: dict[torch.Tensor, State] = {}
        masters = []
        for fragment in fragments:
            if fragment.flat is None:
                continue
            masters.append(MASTER in stored.get(fragment.name, {}))
            scalars = {key: value for key, value in stored.get(fragment.name, {}).items() if key in counters}
            if not optimizers.is_same(taken.setdefault(fragment.flat, scalars), scalars):
                raise MismatchError(
                    f"{fragment.name} has other counters in the snapshot than the parameters before it, and ZeRO keeps one for all of a "
                    f"group: {scalars} and {taken[fragment.flat]}",
                    object_id=f"optimizer.state.{fragment.name}",
                )
        for flat, scalars in taken.items():
            own[flat].update(copy.deepcopy(scalars))
        return bool(masters) and all(masters)


class _Counters:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> State:
        return {name: getattr(owner, name) for owner, name in self._counters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for owner, name in self._counters():
            setattr(owner, name, state[name])

    def _counters(self) -> list[tuple[Any, str]]:
        """Objects, and their attributes. A pipeline with `seed_layers` seeds them by the number of micro-batches so far."""
        engine = self._engine
        return [(engine, name) for name in COUNTERS] + ([(engine.module, MICRO_OFFSET)] if engine.pipeline_parallelism else [])


def _counters(states: Iterable[tuple[tuple[int, ...], Mapping[str, Any]]]) -> set[str]:
    """The keys of values that an optimizer does not keep for each element: the value of some parameter has another shape than its elements.

    `states`: the shape of a parameter's elements, and its values. One parameter is not enough: it may have the shape of a counter.
    """
    return {key for shape, state in states for key, value in state.items() if tuple(getattr(value, "shape", ())) != shape}


def _is_whole_number(value: torch.Tensor) -> bool:
    """Whether it may be a counter, which is the same on all ranks. A norm, which differs between ranks of ZeRO, hardly is one."""
    return value.numel() == 1 and float(value).is_integer()


def _own_options(group: State) -> Collection[str]:
    """The options that belong to the layout of ranks: the name of a group of experts is that of their process group."""
    return {"params", "name"} if group.get("moe") else {"params"}


def _members(engine: Any, fragments: list[Fragment]) -> list[list[str]]:
    members: list[list[str]] = [[] for _ in base_optimizer(engine.optimizer).param_groups]
    for fragment in fragments:
        if fragment.flat is not None:
            members[fragment.group].append(fragment.name)
    return members


def _scaler_of(optimizer: Any) -> object:
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _set_scale(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """A scale of another kind of optimizer fits as far as it has the same attributes."""
    scaler = _scaler_of(optimizer)
    for name, value in stored.items():
        if value is not None and hasattr(scaler, name):
            setattr(scaler, name, value)


def _spread(optimizer: Any, *, from_masters: bool) -> None:
    """Makes masters and weights equal, on all ranks, as DeepSpeed does after a step."""
    if not from_masters and hasattr(optimizer, "refresh_fp32_params"):
        optimizer.refresh_fp32_params()
    if hasattr(optimizer, "fp16_partitioned_groups_flat"):
        for weights, masters in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True):
            if weights.data_ptr() != masters.data_ptr():
                weights.data.copy_(masters.data)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


def training_of(
    engine: Any, values: dict[str, Any], *, schedulers: object = None, extra: dict[str, Any] | None = None, parts: Collection[str] = PARTS
) -> tuple[TrainingState, EngineState]:
    """The state of an engine that `require_supported` has accepted, and its shared side. Save and restore it within `partitioned`.

    `values`, `schedulers` and `extra` are as for `TrainingState`; without `schedulers`, the engine's own. `parts`: what of the shared side
    there is.
    """
    extra = {} if extra is None else extra
    shared = EngineState(engine, parts, schedulers=schedulers, extra=extra)
    model, none = StatefulPart.of("model", shared.module), StatefulPart.of("dataloader", None)
    return TrainingState.over(shared, PerRankState(model=model, loaders=none, extra=extra, values=values, merge=None)), shared


@contextmanager
def partitioned(engine: Any) -> Iterator[None]:
    """ZeRO 3 may hold whole parameters between steps: they are cut meanwhile."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()

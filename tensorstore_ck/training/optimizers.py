"""Optimizer states by parameter name, in the form of torch.distributed.checkpoint.state_dict.

Does not call that module: it makes an optimizer that has not stepped take a step, even during a save, which changes the training. Here
such an optimizer has no state. Tensors are the optimizer's own, never copies. Knows no store.

Each rank of a ZeroRedundancyOptimizer steps an ordinary optimizer of some of the parameters, and then all ranks exchange parameters. Its
`state_dict` needs a collective first, and returns all states on one rank. So each rank's own states are saved, as for the stages of a
pipeline.
"""

import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch.distributed.tensor import DTensor

from tensorstore_ck.errors import InvalidOptionError, MismatchError, UnsupportedValueError
from tensorstore_ck.state.match_target import NamesByPrefix
from tensorstore_ck.state.memory_order import in_order_of
from tensorstore_ck.state.plain_memory import PLAIN
from tensorstore_ck.training.parameter_names import ParameterNames
from tensorstore_ck.training.stateful_parts import load

State = dict[str, Any]
_KEYS: Final = ("state", "param_groups")
_OPTIONAL: Final = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


def get_state(path: str, optimizer: torch.optim.Optimizer, names: ParameterNames, *, by_name: bool = False) -> State:
    """``{"state": {name: ...}, "param_groups": [...]}``, and the other entries of the optimizer's state dict, unchanged.

    `by_name`: for ranks whose groups have different parameters, such as pipeline stages. The groups are then a dict, keyed by the first
    parameter's name, and a group's parameters are dict keys, so that merging all ranks gives the state of one process.

    Raises:
        UnsupportedValueError: its state is in another form than that of torch's optimizers.
        InvalidOptionError: it trains parameters of no model.
    """
    require_supported(path, optimizer)
    known = _names_in(path, optimizer, names)
    whole = _state_dict(path, own_optimizer(optimizer), len(known))
    state = {known[key] if type(key) is int else key: value for key, value in whole["state"].items()}
    groups = [{**group, "params": [known[number] for number in group["params"]]} for group in whole["param_groups"]]
    return {**whole, "state": state, "param_groups": named_groups(groups) if by_name else groups}


def _state_dict(path: str, optimizer: torch.optim.Optimizer, parameters: int) -> State:
    """The optimizer's state, if it numbers its `parameters` as torch's optimizers do."""
    kind = type(optimizer).__qualname__
    try:
        whole = dict(optimizer.state_dict())
    except Exception as exc:
        raise UnsupportedValueError(
            f"{path} is a {kind} whose state_dict() fails on this rank: {type(exc).__name__}: {exc}. Use another optimizer, or pass "
            "what has to be restored of it in extra= or rank_values=",
            object_id=path,
        ) from exc
    state, groups = whole.get("state"), whole.get("param_groups")
    if (
        isinstance(state, Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    ):
        numbers = [*(key for key in state if type(key) is not str), *(number for group in groups for number in group["params"])]
        if all(type(number) is int and 0 <= number < parameters for number in numbers):
            return whole
    raise UnsupportedValueError(
        f"{path} is a {kind} whose state_dict() is not of the form of torch's optimizers ('state' and 'param_groups' by the numbers of "
        'parameters), so its states cannot be kept by the names of parameters. Pass it as extra={"optimizer": optimizer} and not as '
        "optimizer=: its state is then stored as it is, for the same model",
        object_id=path,
    )


def named_groups(groups: list[State]) -> State:
    """Groups by the first parameter's name, whose parameters are dict keys: those of several ranks can be merged."""
    keys = [group["params"][0] if group["params"] else f"#{number}" for number, group in enumerate(groups)]
    return {key: {**group, "params": dict.fromkeys(group["params"])} for key, group in zip(keys, groups, strict=True)}


def get_members(path: str, optimizer: torch.optim.Optimizer, names: ParameterNames) -> list[list[str]]:
    """The names of the parameters of each group."""
    known = iter(_names_in(path, optimizer, names))
    return [[next(known) for _ in group["params"]] for group in own_optimizer(optimizer).param_groups]


def get_full_state(path: str, optimizer: torch.optim.Optimizer, names: ParameterNames) -> State:
    """`get_state`, but an optimizer that has not stepped gets its future tensors, for a reader that fills existing tensors.

    Raises:
        InvalidOptionError: the future tensors are unknown.
    """
    state, optimizer = get_state(path, optimizer, names), own_optimizer(optimizer)
    if inspect.signature(optimizer.step).parameters.get("closure", _OPTIONAL).default is inspect.Parameter.empty:
        kind = type(optimizer).__qualname__
        raise InvalidOptionError(
            f"DCP fills existing tensors, and those of {kind} are unknown before its first step: use TrainingState.put and restore",
            object_id=path,
        )
    stepped = bool(optimizer.state)
    return {**(state if stepped else {**state, "state": _future_state(optimizer, names)}), "stepped": stepped}


def get_target(path: str, optimizer: torch.optim.Optimizer, names: ParameterNames, stored: Iterable[str]) -> State:
    """The target of a restore from a snapshot with `stored` paths: existing tensors, and None for the others.

    Sharded states need existing tensors; unsharded ones are created from the snapshot where the optimizer has none, or has another number:
    LBFGS has more with each step.
    """
    stored = list(stored)
    own = get_state(path, optimizer, names)["state"]
    held = {name for members in get_members(path, optimizer, names) for name in members}
    wanted = [name for name in names.below(f"{path}.state.", stored) if name in held or name not in names.parameters]
    if any(isinstance(names.parameters.get(name), DTensor) and name not in own for name in wanted):
        own = {**_future_state(own_optimizer(optimizer), names), **own}
    there = NamesByPrefix(stored)
    for name in [name for name in own if not isinstance(names.parameters.get(name), DTensor)]:
        prefix = f"{path}.state.{name}."
        if _has_grown(own[name], [one.removeprefix(prefix) for one in there.names(prefix)]):
            del own[name]
    others = {name.removeprefix(f"{path}.").partition(".")[0] for name in stored if name.startswith(f"{path}.")}
    return {**dict.fromkeys(others), "state": {name: own.get(name) for name in wanted}, "param_groups": None}


def _has_grown(state: Any, stored: list[str]) -> bool:
    """Whether a parameter's state and the `stored` names below it differ only in the items of lists and dicts, as those of LBFGS do.

    An empty one has no name. Where other names differ, they are of another optimizer.
    """
    own = _leaf_names(state) if isinstance(state, Mapping) else []
    mine, theirs = ({name.partition(".")[0] for name in names if "." in name} for names in (own, stored))
    is_alike = {name for name in own if "." not in name} == {name for name in stored if "." not in name}
    return set(own) != set(stored) and is_alike and (mine <= theirs or mine >= theirs)


def _leaf_names(state: Any) -> list[str]:
    items = state.items() if isinstance(state, Mapping) else enumerate(state)
    return [
        f"{key}.{below}" if below else f"{key}"
        for key, value in items
        for below in (_leaf_names(value) if isinstance(value, Mapping | list | tuple) else [""])
    ]


def set_state(path: str, optimizer: torch.optim.Optimizer, names: ParameterNames, state: State) -> None:
    """Restores what `get_state` or `get_full_state` returned. Raises `MismatchError` if its groups have other parameters."""
    own, outer, optimizer = get_members(path, optimizer, names), optimizer, own_optimizer(optimizer)
    numbers = {name: number for number, name in enumerate(name for members in own for name in members)}
    stored = match_groups(path, state["param_groups"], own, () if is_partitioned(outer) else names.parameters)
    groups = [there or _options(here) for there, here in zip(stored, optimizer.param_groups, strict=True)]
    given = state["state"] if state.get("stepped", True) else {}
    packed = {numbers.get(name, name): value for name, value in given.items()}
    numbered = [{**group, "params": [numbers[name] for name in members]} for group, members in zip(groups, own, strict=True)]
    others = {key: value for key, value in state.items() if key not in (*_KEYS, "stepped")}
    load(path, optimizer.load_state_dict, {**others, "state": packed, "param_groups": numbered})
    take_options(outer)
    for name, value in given.items():
        if name in numbers:
            parameter = names.parameters[name]
            _keep_form(optimizer.state[parameter], value, parameter)


def match_groups(path: str, stored: Any, own: list[list[str]], held: Collection[str] = ()) -> list[State]:
    """The stored options of each of this optimizer's groups, whose parameters are `own`; empty for an empty group without stored options.

    A pipeline stage has some of the stored parameters; a single process may have parameters that several stages saved as separate groups.
    Each name in `held` that is stored must be in a group.

    Raises:
        MismatchError: the groups have different parameters.
    """
    is_united = isinstance(stored, Mapping)
    groups = list(stored.items() if is_united else enumerate(stored))
    of = {name: at for at, members in enumerate(own) for name in members}
    options_of_group: list[list[State]] = [[] for _ in own]
    order: list[int] = []
    known = {name for _, group in groups for name in group["params"]}
    fits = of.keys() <= known and of.keys() >= known.intersection(held)
    for key, group in groups:
        mine = {of[name] for name in group["params"] if name in of}
        fits &= len(mine) <= 1
        order += mine
        for at in mine:
            options_of_group[at].append(_options(group))
        at = int(str(key).removeprefix("#")) if not (is_united and group["params"]) else len(own)
        if at < len(own) and not own[at]:  # an empty group is known by its position only
            options_of_group[at].append(_options(group))
    fits &= is_united or order == sorted(set(order))
    fits &= all(is_same(options, options_there[0]) for options_there in options_of_group for options in options_there)
    if not fits:
        raise MismatchError(
            f"the parameter groups of {path} hold other parameters than in the snapshot: create it with the same groups", object_id=path
        )
    return [options_there[0] if options_there else {} for options_there in options_of_group]


def _options(group: Mapping[str, Any]) -> State:
    """The options of a group, without the parameters and names of the run that saved: torch keeps this optimizer's own names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def is_same(one: Any, two: Any) -> bool:
    """Whether two options or states are equal, tensors included."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(is_same(value, two[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


def _keep_form(own: Any, given: Any, parameter: torch.Tensor) -> Any:
    """Keeps stored dtypes: torch converts states to the parameter's dtype, and bfloat16 would lose bits of float32 moments.

    Tensors of the parameter's shape get its strides: torch's fused steps require it, on the CPU without a check.
    """
    if isinstance(given, torch.Tensor) and isinstance(own, torch.Tensor):
        kept = own if own.dtype == given.dtype else given.to(own.device)
        return in_order_of(parameter, kept) if type(kept) in PLAIN and kept.shape == parameter.shape else kept
    if isinstance(given, dict) and isinstance(own, dict):
        own.update({key: _keep_form(own[key], value, parameter) for key, value in given.items() if key in own})
    elif isinstance(given, list | tuple) and isinstance(own, list | tuple) and len(own) == len(given):
        return type(own)(_keep_form(mine, value, parameter) for mine, value in zip(own, given, strict=True))
    return own


def _names_in(path: str, optimizer: torch.optim.Optimizer, names: ParameterNames) -> list[str]:
    """Parameter names, in the order of the optimizer's own numbers."""
    known = [names.of(parameter) for group in own_optimizer(optimizer).param_groups for parameter in group["params"]]
    if None in known:
        raise InvalidOptionError(
            f"{path} has parameters of no given model ({known.count(None)} of {len(known)}): pass all models that it trains in model=. "
            "Tensors that are no module's parameters have no names: keep them in a torch.nn.ParameterDict, pass that as one of the models, "
            "and create the optimizer from its parameters",
            object_id=path,
        )
    return cast(list[str], known)


def _state_after_trial(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], rates: list[Any], names: ParameterNames) -> State:
    """A function of its own, so that `finally` undoes the step after Ctrl-C: see common/waiting.py."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    optimizer.step()
    return {name: dict(state) for parameter, state in optimizer.state.items() if (name := names.of(parameter)) is not None}


def _future_state(optimizer: torch.optim.Optimizer, names: ParameterNames) -> State:
    """The state after the optimizer's first step, from a trial step with zero gradients at learning rate 0 that is then undone."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    own = dict(optimizer.state)
    optimizer.state.clear()
    try:
        return _state_after_trial(optimizer, parameters, rates, names)
    except TypeError:  # it needs a closure, like LBFGS: its state is created from the snapshot
        return {}
    except Exception as exc:
        kind = type(optimizer).__qualname__
        raise InvalidOptionError(
            f"{kind} fails at a step with zero gradients, which is needed to create the state to restore into: {exc}", object_id=kind
        ) from exc
    finally:
        optimizer.state.clear()
        optimizer.state.update(own)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


_MODULE: Final = "torch.distributed.optim.zero_redundancy_optimizer"


def is_partitioned(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each rank has the states of some of its parameters."""
    module = sys.modules.get(_MODULE)  # importing it takes long, and without it there is no such optimizer
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def require_supported(path: str, optimizer: torch.optim.Optimizer) -> None:
    """Rejects a ZeroRedundancyOptimizer whose states may move between ranks.

    Raises:
        UnsupportedValueError: it overlaps its steps with DistributedDataParallel.
    """
    partitioned: Any = optimizer
    if is_partitioned(optimizer) and partitioned._overlap_with_ddp:
        raise UnsupportedValueError(
            f"{path} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, which makes its optimizer after some steps, and steps it "
            "within the backward pass: create it with overlap_with_ddp=False",
            object_id=path,
        )


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of this rank's states, with the options that schedules have set."""
    partitioned: Any = optimizer
    if not is_partitioned(optimizer):
        return optimizer
    _copy_options(partitioned, partitioned.optim)  # as it does itself, before each step
    own: torch.optim.Optimizer = partitioned.optim
    return own


def take_options(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the options of its `own_optimizer`, after that has loaded them."""
    partitioned: Any = optimizer
    if is_partitioned(optimizer):
        _copy_options(partitioned.optim, partitioned)


def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for given, group in zip(source.param_groups, target.param_groups, strict=True):
        group.update(_options(given))

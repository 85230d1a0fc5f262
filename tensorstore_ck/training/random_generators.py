"""Random number generators: the process's own, and objects that the user holds. Knows no ranks and no store."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from tensorstore_ck.errors import MismatchError

_TRACKER_MODULE: Final = "torch.distributed.tensor._random"
_NUMPY_SEEDS: Final = 1 << 32


class _Kind(NamedTuple):
    get: Callable[[Any], object]
    set: Callable[[Any, Any], object]
    seed: Callable[[Any, int], object]


def _seed_numpy(generator: np.random.Generator, seed: int) -> None:
    bits = generator.bit_generator
    bits.state = type(bits)(seed).state


_KINDS: Final[dict[type[Any], _Kind]] = {
    torch.Generator: _Kind(torch.Generator.get_state, torch.Generator.set_state, torch.Generator.manual_seed),
    np.random.Generator: _Kind(
        lambda generator: _plain(generator.bit_generator.state),
        lambda generator, state: setattr(generator.bit_generator, "state", state),
        _seed_numpy,
    ),
    np.random.RandomState: _Kind(
        lambda generator: _plain(generator.get_state(legacy=False)),
        lambda generator, state: generator.set_state(state),
        lambda generator, n: generator.seed(n % _NUMPY_SEEDS),
    ),
    random.Random: _Kind(random.Random.getstate, random.Random.setstate, random.Random.seed),
}


def is_generator(candidate: object) -> bool:
    """Whether it is a random number generator."""
    return isinstance(candidate, tuple(_KINDS))


def get_state(generator: object) -> object:
    """The state of a generator object: a tensor or plain values."""
    return _kind(generator).get(generator)


def set_state(generator: object, state: object) -> None:
    """Restores the state that `get_state` returned."""
    _kind(generator).set(generator, state)


def seed(generator: object, number: int) -> None:
    """Seeds a generator object."""
    _kind(generator).seed(generator, number)


# --- the generators of the process ---------------------------------------------------------------------------------------------


def has_cuda() -> bool:
    """Whether this process uses CUDA."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def get_process_states() -> dict[str, Any]:
    """The states of all generators of this process: Python's, NumPy's, torch's on the CPU and on each CUDA device, DTensor's."""
    states = _get_host_states()
    if has_cuda():  # else nothing has drawn from them, and asking would initialize CUDA
        states["cuda"] = torch.cuda.get_rng_state_all()
    tracker = getattr(sys.modules.get(_TRACKER_MODULE), "_rng_tracker", None)
    if tracker is not None:
        states["dtensor"] = {
            "distribute_region": bool(tracker.distribute_region_enabled),
            "states": dict(getattr(tracker, "rng_states", {})),
        }
    return states


def set_process_states(states: Mapping[str, Any], mesh: DeviceMesh | None) -> None:
    """Restores the states of all generators of this process. Skips CUDA devices that do not exist here; the comparison of environments
    reports these.

    `mesh`: the mesh of the model's parameters, if any.
    """
    missing = {"python", "numpy", "torch"} - states.keys()
    if missing:
        raise MismatchError(f"the snapshot has no states of the generators {sorted(missing)}", object_id="generators")
    if "dtensor" in states:
        _set_tracker(states["dtensor"], mesh)  # before CUDA's, from which it draws
    _set_host_states(states)
    if torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def preserved() -> Iterator[None]:
    """Gives all of them their states back."""
    states = get_process_states()
    try:
        yield
    finally:
        set_process_states(states, None)


@contextmanager
def preserved_on_host() -> Iterator[None]:
    """Gives Python's, NumPy's and torch's CPU generator their states back. Waits for no device."""
    states = _get_host_states()
    try:
        yield
    finally:
        _set_host_states(states)


def seed_host(number: int) -> None:
    """Seeds Python's, NumPy's and torch's CPU generator; `number` has up to 64 bits."""
    random.seed(number)
    np.random.seed(number % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(number)


def _get_host_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": _plain(np.random.get_state(legacy=False)), "torch": torch.get_rng_state()}


def _set_host_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def seed_process(number: Callable[[str], int]) -> None:
    """Seeds all generators of this process; `number` returns the seed for a name. DTensor's generator draws from torch's."""
    random.seed(number("python"))
    np.random.seed(number("numpy") % _NUMPY_SEEDS)
    torch.manual_seed(number("torch"))


def _set_tracker(state: Mapping[str, Any], mesh: DeviceMesh | None) -> None:
    """Creates the tracker if needed, without its usual first sync, which would give all ranks the generator state of rank 0."""
    module: Any = sys.modules.get(_TRACKER_MODULE)
    if module is None:
        return
    if module._rng_tracker is None and mesh is not None and mesh.device_type == "cuda" and torch.cuda.is_available():
        module._rng_tracker = module.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    if module._rng_tracker is not None:
        module._rng_tracker.distribute_region_enabled = state["distribute_region"]
        getattr(module._rng_tracker, "rng_states", {}).update(state["states"])


def _kind(generator: object) -> _Kind:
    return next(kind for cls, kind in _KINDS.items() if isinstance(generator, cls))


def _plain(state: Any) -> Any:
    """A bit generator's state as plain values: tuples of ints instead of arrays."""
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    return tuple(state.tolist()) if isinstance(state, np.ndarray) else state

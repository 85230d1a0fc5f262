"""What recipes are made of: each builds a model and an optimizer on some layout of ranks, steps, and gives the state that a user saves.

A recipe is a function that runs on every rank of a layout::

    @recipe(at(4, dp=2, tp=2), [at(4, dp=4, tp=1), at(2, dp=1, tp=2)])
    def norm_outside_tp(dp: int, tp: int) -> Job:
        mesh = mesh_of(dp=dp, tp=tp)
        model = ...
        return stepped(model, torch.optim.AdamW(model.parameters()))

`run` saves it on the first layout, restores it on the same and on the other layouts and by one process, and compares everything, bit by
bit, with what torch gathered before. What differs by rank belongs into `Job.own`.
"""

import functools
import importlib
import logging
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import tensorstore_ck as tsck
from tests.session.group.pool import TIMEOUT_SECONDS, Pool


class Layout(NamedTuple):
    """So many ranks, and what the recipe is called with there."""

    ranks: int
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {', '.join(f'{name}={value}' for name, value in self.options.items())}".removesuffix(", ")


def at(ranks: int, /, **options: Any) -> Layout:
    return Layout(ranks, options)


@dataclass(frozen=True)
class Job:
    """What one rank has after its step."""

    state: dict[str, Any]
    own: Any = None
    """What is this rank's alone: for `rank_state=`."""
    ranks: tuple[int, ...] | None = None
    """Those that save, where not all do."""


@dataclass(frozen=True, repr=False)
class Recipe:
    make: Callable[..., Job]
    saved: Layout
    restored: list[Layout]
    imports: tuple[str, ...]
    """The module that defines the classes of its tensors, which a restoring process imports."""

    @property
    def name(self) -> str:
        return self.make.__name__

    def __repr__(self) -> str:
        return self.name

    def job(self, layout: Layout, steps: int) -> Job:
        """Of other numbers for each recipe and number of steps."""
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # how `gathered` could be faster
        global _steps  # noqa: PLW0603 - a process is one rank
        _steps = steps
        torch.manual_seed(zlib.crc32(self.name.encode()) % 1000 + steps)
        return self.make(**layout.options)


RECIPES: Final[dict[str, Recipe]] = {}


def recipe(saved: Layout, restored: list[Layout], *, imports: tuple[str, ...] = ()) -> Callable[[Callable[..., Job]], Callable[..., Job]]:
    """Registers a recipe under its function's name; `restored`: the other layouts."""

    def register(make: Callable[..., Job]) -> Callable[..., Job]:
        RECIPES[make.__name__] = Recipe(make, saved, [saved, *restored], imports)
        return make

    return register


# --- what recipes use ---------------------------------------------------------------------------------------------------


@functools.cache
def _mesh(sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes))


def mesh_of(**sizes: int) -> DeviceMesh:
    """One mesh of all ranks; each is made once, as making one costs as much as a recipe."""
    return _mesh(tuple(sizes.items()))


FLAT: Final = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer, **extra: Any) -> dict[str, Any]:
    """As users of `torch.distributed.checkpoint.state_dict` save it."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizers, options=FLAT), **extra}


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, batch: torch.Tensor | None = None) -> None:
    """Forward, backward, step: with the same batch on all ranks by default."""
    model(torch.randn(4, 8) if batch is None else batch).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def stepped(model: nn.Module, *optimizers: torch.optim.Optimizer, batch: torch.Tensor | None = None, **extra: Any) -> Job:
    for _ in range(_steps):
        step(model, *optimizers, batch=batch)
    return Job(state_of(model, *optimizers, **extra))


_steps = 1
"""In a rank's process: how many steps what is being made takes. What is restored into took more."""


# --- leaves -------------------------------------------------------------------------------------------------------------


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths, and tensors and plain values, in the order of the paths: alike on ranks whose dicts were filled in different orders."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value, key=str):
            yield from leaves_of(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value):
            yield from leaves_of(item, f"{path}/{number}")
    else:
        yield path, value


def gathered(state: Any) -> dict[str, Any]:
    """Path -> the bits of the whole tensor or the value there. A collective over each tensor's own mesh."""
    found: dict[str, Any] = {}
    for path, leaf in leaves_of(state):
        with torch.no_grad():
            found |= _bits(path, leaf)
    return found


def _bits(path: str, leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, torch.Tensor):
        return {path: leaf}
    if isinstance(leaf, DTensor):
        leaf = leaf.full_tensor()
    if isinstance(leaf, AsyncCollectiveTensor):
        leaf = leaf.wait()
    if hasattr(leaf, "__tensor_flatten__"):
        inner, meta = leaf.__tensor_flatten__()
        found = {f"{path}#": (type(leaf).__name__, repr(meta), tuple(leaf.shape))}
        for name in inner:
            found |= _bits(f"{path}#{name}", getattr(leaf, name))
        return found
    flat = leaf.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
    return {path: (str(leaf.dtype), tuple(leaf.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")}


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Which are not the same; empty when all that was found is what was expected."""
    wrong = [path for path in found if path not in expected or found[path] != expected[path]]
    return f"{len(wrong)} of {len(found)} differ: " + "; ".join(_told(path, found, expected) for path in wrong[:4]) if wrong else ""


def _told(path: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    one, two = (repr(each.get(path, "nothing"))[:60] for each in (found, expected))
    return f"{path}: {one} instead of {two}"


# --- on a rank ----------------------------------------------------------------------------------------------------------

"""In a rank's process: what it saves last, which two calls save."""
_stores: dict[str, tsck.Store] = {}
"""They stay open, see `tests.session.group.pool`."""


def opened(folder: str) -> tsck.Store:
    if folder not in _stores:
        _stores[folder] = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_world_size()}-{dist.get_rank()}")
    return _stores[folder]


def members_of(job: Job) -> Any:
    if job.ranks is None:
        return dist.group.WORLD
    return _group(job.ranks)


@functools.cache
def _group(ranks: tuple[int, ...]) -> Any:
    return dist.new_group(list(ranks))


def _tried(action: Callable[[], object]) -> str:
    """What went wrong, with where it did."""
    try:
        action()
    except Exception as exc:  # noqa: BLE001 - the test reports it
        where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in traceback.extract_tb(exc.__traceback__)[-1:])
        return f"{type(exc).__name__}: {exc}{where}"
    return ""


class Saved(NamedTuple):
    problem: str
    """What went wrong; empty: nothing."""
    leaves: dict[str, Any]
    """What this rank knows of what was saved."""
    own: Any


def save(folder: str, this: Recipe) -> Saved:
    job = this.job(this.saved, 1)
    group = members_of(job)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return Saved("", {}, None)
    leaves, own = gathered(job.state), None if job.own is None else gathered(job.own)
    options: dict[str, Any] = {"ref": this.name, "step": 1, "rank_state": job.own, "timeout_seconds": TIMEOUT_SECONDS}
    return Saved(_tried(lambda: opened(folder).put_snapshot(job.state, group=group, **options)), leaves, own)


class Restored(NamedTuple):
    problem: str
    leaves: dict[str, Any]
    own: Any


def restore(folder: str, this: Recipe, layout: Layout) -> Restored:
    job = this.job(layout, 2)
    group = members_of(job)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return Restored("", {}, None)
    store, own = opened(folder), None
    problem = _tried(lambda: store.checkout(this.name, into=job.state, group=group, timeout_seconds=TIMEOUT_SECONDS))
    if not problem and job.own is not None:
        is_same = layout.ranks == this.saved.ranks  # else each rank takes some rank's
        options: dict[str, Any] = {} if is_same else {"rank_state_map": lambda rank, ranks: rank % ranks}
        own = gathered(store.rank_state(this.name, group=group, timeout_seconds=TIMEOUT_SECONDS, **options))
    return Restored(problem, {} if problem else gathered(job.state), own)


# --- the test's side ----------------------------------------------------------------------------------------------------


class Worlds:
    """Ranks for each size of a world, started when first asked for; a context manager."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.__exit__()

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What it returned on each rank. Ranks that raised, hang or are gone are ended: the next call begins with new ones.

        Raises:
            AssertionError: it did not return on a rank.
        """
        if ranks not in self._pools:
            self._pools[ranks] = Pool(ranks).__enter__()
        try:
            answers = self._pools[ranks].ask(function, *args, ranks=ranks)
        except (AssertionError, EOFError, OSError) as exc:
            self.end(ranks)
            raise AssertionError(f"a rank of {ranks} crashed or hangs in {function.__name__}{args[1:]}: {exc!r}") from None
        raised = [f"rank {rank}: {''.join(answer.__notes__)}" for rank, answer in enumerate(answers) if isinstance(answer, BaseException)]
        if raised:
            self.end(ranks)
            raise AssertionError(f"{function.__name__}{args[1:]} raised on {len(raised)} of {ranks} ranks; {raised[0]}")
        return answers

    def end(self, ranks: int) -> None:
        """With SIGKILL."""
        self._pools.pop(ranks).kill()


def run(worlds: Worlds, folder: Path, this: Recipe) -> None:
    """Saves and restores a recipe.

    Raises:
        AssertionError: something differs, or was refused.
    """
    saved: list[Saved] = worlds.run(this.saved.ranks, save, str(folder), this)
    problems = _distinct(each.problem for each in saved)
    assert not problems, f"the put was refused: {'; '.join(problems)}"
    expected = united([each.leaves for each in saved])
    for layout in this.restored:
        found = worlds.run(layout.ranks, restore, str(folder), this, layout)
        problems += _judged(found, expected, layout)
        owns = [(one.own, saved[rank % len(saved)].own) for rank, one in enumerate(found) if not one.problem]
        problems += [f"restored on {layout}: the own state of rank {rank} differs" for rank, (one, two) in enumerate(owns) if one != two]
    problems += _by_one_process(folder, this, expected)
    assert not problems, "\n".join(problems)


def united(sides: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have together: a recipe whose ranks contradict each other is wrong."""
    whole: dict[str, Any] = {}
    for side in sides:
        problem = difference({path: leaf for path, leaf in side.items() if path in whole}, whole)
        assert not problem, f"the recipe's ranks contradict each other: {problem}"
        whole |= side
    return whole


def _judged(found: list[Restored], expected: dict[str, Any], layout: Layout) -> list[str]:
    problems = _distinct(each.problem or difference(each.leaves, expected) for each in found)
    missing = set(expected) - {path for each in found for path in each.leaves}
    if missing and not problems:
        problems = [f"{len(missing)} of {len(expected)} are on no rank: {sorted(missing)[:4]}"]
    return [f"restored on {layout}: {problem}" for problem in problems]


def _by_one_process(folder: Path, this: Recipe, expected: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they warn of while they are imported is not our matter
        for name in this.imports:
            importlib.import_module(name)
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        found: dict[str, Any] = {}
        problem = _tried(lambda: found.update(gathered(store.checkout(this.name))))
    problem = problem or difference(found, expected) or ("" if set(found) == set(expected) else f"missing {set(expected) - set(found)}")
    return [f"restored by one process: {problem}"] if problem else []


def _distinct(problems: Any) -> list[str]:
    return list(dict.fromkeys(problem for problem in problems if problem))

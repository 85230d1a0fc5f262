"""The state that belongs to one rank: generators, loader positions, buffers that differ by rank, and values that the user names.

With an equal number of ranks each rank gets its own state back, bit by bit. With another number, generators are seeded again, and all
ranks take the rest from the first rank, or from the user's merge function. Knows no store.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.training import buffers, extras, random_generators
from tensorstore_ck.training.postponed_pass import begin_pass
from tensorstore_ck.training.rank_group import Agreement
from tensorstore_ck.training.stateful_parts import StatefulPart, is_stateful, load

State = dict[str, Any]
Merge = Callable[[str, list[Any]], Any]
VALUES: Final = "rank_values"
GENERATORS: Final = "generators"
LOADER_GENERATORS: Final = "loader_generators"
_DRAWS_UNSEEN: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of torch. The RandomSampler of torchdata, which shuffle=True makes, saves its generator."""
_SIDES: Final = {"model": "buffers", "extra": "extra_buffers"}


class _Module(NamedTuple):
    """A module and its plain buffers."""

    part: str
    key: str
    """Its name in the part; '' for the only one."""
    buffers: dict[str, torch.Tensor]

    @property
    def path(self) -> str:
        """Its path in the shared state."""
        return f"{self.part}.{self.key}" if self.key else self.part

    @property
    def side(self) -> str:
        """The key of its buffers in a rank's own state."""
        return _SIDES[self.part]


class PerRankState:
    """The part of a `TrainingState` that belongs to each rank alone."""

    def __init__(
        self, model: StatefulPart, loaders: StatefulPart, extra: dict[str, Any], values: dict[str, Any], merge: Merge | None
    ) -> None:
        self._model = model
        self.loaders, self._loaders = loaders.objects, loaders
        self._extra = extra
        self.values = self._values = values
        self.merge = merge

    def digests(self) -> dict[str, bytes]:
        """Path of each buffer that ranks may hold differently -> its digest for a `RankReport`."""
        return {f"{module.path}.{name}": buffers.digest(buffer) for module in self._modules() for name, buffer in module.buffers.items()}

    def only(self, parts: Collection[str]) -> "PerRankState":
        """A copy with the same objects, whose restore fills only `parts`."""
        extra, values = (self._extra if "extra" in parts else {}), (self._values if VALUES in parts else {})
        return PerRankState(model=self._model.only(parts), loaders=self._loaders.only(parts), extra=extra, values=values, merge=self.merge)

    # --- captured ---------------------------------------------------------------------------------------------------------

    def capture(self, agreement: Agreement) -> State:
        """The rank's own state as it is now, not copied."""
        own = self.capture_values()
        for module in self._modules():
            kept = buffers.rank_buffers(module.path, module.buffers, agreement)
            if kept:
                own[module.side] = {**own.get(module.side, {}), module.key: kept} if module.key else kept
        return own

    def capture_values(self) -> State:
        """The rank's own state without buffers, not copied."""
        loaders = self._loaders.states(lambda _, loader: loader.state_dict())  # first: a StatefulDataLoader may begin a pass, and draw
        return {
            GENERATORS: random_generators.get_process_states(),
            **loaders,
            **self._loader_generators(),
            **self._generators("extra").states(lambda _, generator: random_generators.get_state(generator)),
            **self._part(VALUES).states(_get_value),
        }

    def lead(self, shared: State, agreement: Agreement) -> None:
        """Changes the shared state so that one rank saves each buffer that differs by rank."""
        for module in self._modules():
            states, key = (shared[module.part], module.key) if module.key else (shared, module.part)
            states[key] = buffers.shared_state(module.path, states[key], module.buffers, agreement)

    # --- restored on as many ranks ----------------------------------------------------------------------------------------

    def check(self, own: State) -> None:
        """Checks that the rank's stored state fits, before anything is changed. Raises `MismatchError` if it does not fit."""
        self._loaders.with_states(own)
        self._generators("extra").with_states(own)
        self._part(VALUES).with_states(own)

    def load(self, own: State, mesh: DeviceMesh | None) -> None:
        """Restores this rank's stored state. Generators come last, since loading the others may draw from them."""
        for path, loader, stored in self._loaders.with_states(own):
            load(path, loader.load_state_dict, stored)
            if isinstance(loader, DataLoader):
                begin_pass(path, loader)
                if path in own.get(LOADER_GENERATORS, {}) and loader.generator is not None:
                    load(path, loader.generator.set_state, own[LOADER_GENERATORS][path])
        self._load_values(own)
        for name in ("extra", VALUES):
            for key, generator in self._generators(name).objects.items():
                load(f"{name}.{key}", partial(random_generators.set_state, generator), own[name][key])
        if GENERATORS in own:
            load(GENERATORS, lambda state: random_generators.set_process_states(state, mesh), own[GENERATORS])

    # --- restored on another number of ranks ------------------------------------------------------------------------------

    def taken(self, olds: Sequence[State]) -> State:
        """Makes this rank's state from the stored states of the old ranks, in their order: the state of the first one, or the result of
        `merge` over all.

        Raises:
            MismatchError: they have other values.
        """
        values = [old.get(VALUES, {}) for old in olds]
        seeded = self._generators(VALUES).objects
        keys = dict.fromkeys(key for rank_values in values for key in rank_values)
        taken: State = {VALUES: {key: None if key in seeded else self._merged(f"{VALUES}.{key}", key, values) for key in keys}}
        self._part(VALUES).with_states(taken if keys else {})
        for module in self._modules() if self.merge is not None else ():
            kept = [_of(old, module) for old in olds]
            merged = {
                name: self._merged(f"{module.path}.{name}", name, kept)
                for name in module.buffers
                if any(name in rank_buffers for rank_buffers in kept)
            }
            taken[module.side] = {**taken.get(module.side, {}), module.key: merged} if module.key else merged
        return taken

    def load_taken(self, taken: State, streams: Streams, *, seeds_process: bool = True) -> None:
        """Restores it, and seeds the generators again; those of the process only with `seeds_process`."""
        self._load_values(taken)
        for name in ("extra", VALUES):
            for key, generator in self._generators(name).objects.items():
                random_generators.seed(generator, streams.seed(f"{name}.{key}"))
        if seeds_process:
            random_generators.seed_process(streams.seed)

    def describe_taken(self, old: State) -> str:
        """Words for a warning; `old`: the first rank's stored state."""
        kept = [name for name, sides in (("buffers", _SIDES.values()), (VALUES, (VALUES,))) if any(old.get(side) for side in sides)]
        whose = "the first rank's" if self.merge is None else "those that rank_merge= made from all ranks"
        rest = f", and {' and '.join(kept)} are {whose}" if kept else ""
        return f"each rank's random number generators were seeded again{rest}"

    def _merged(self, path: str, name: str, had: Sequence[Mapping[str, Any]]) -> Any:
        values = [values_of_rank[name] for values_of_rank in had if name in values_of_rank]
        return values[0] if self.merge is None else self.merge(path, values)

    # --- both -------------------------------------------------------------------------------------------------------------

    def _load_values(self, own: State) -> None:
        """Buffers without a stored own value keep the shared one."""
        for module in self._modules():
            load(module.path, partial(buffers.restore, module.buffers), _of(own, module))
        plain = self._part(VALUES).matching(lambda value: not random_generators.is_generator(value))
        if plain.objects:
            extras.put_back(self._values, plain, {VALUES: {key: own[VALUES][key] for key in plain.objects}})

    def _loader_generators(self) -> State:
        """A StatefulDataLoader has its own generator's state as it was when a pass began."""
        loaders = self._loaders.matching(lambda loader: isinstance(loader, DataLoader) and loader.generator is not None)
        states = {loaders.path(key): loader.generator.get_state() for key, loader in loaders.objects.items()}
        return {LOADER_GENERATORS: states} if states else {}

    def _part(self, name: str) -> StatefulPart:
        return StatefulPart.of(name, self._extra if name == "extra" else self._values)

    def _generators(self, name: str) -> StatefulPart:
        return self._part(name).matching(random_generators.is_generator)

    def _modules(self) -> Iterator[_Module]:
        for key, model in self._model.objects.items():
            yield _Module("model", key, buffers.plain_buffers(model, of_model=True))
        for key, module in self._part("extra").matching(lambda value: isinstance(value, nn.Module)).objects.items():
            yield _Module("extra", key, buffers.plain_buffers(module, of_model=False))


def own_states(held: State, ranks: int) -> list[State]:
    """The own states of the ranks that saved a snapshot, from what its tree holds next to the shared state.

    That is the state of one process; or, in an import of what several ranks saved, each rank's under its number.

    Raises:
        MismatchError: the own state of a rank is missing.
    """
    if ranks == 1:
        return [held]
    missing = next((rank for rank in range(ranks) if not isinstance(held.get(str(rank)), dict)), None)
    if missing is not None:
        raise MismatchError(f"the snapshot of {ranks} ranks lacks rank {missing}'s own state", object_id=f"rank.{missing}")
    return [held[str(rank)] for rank in range(ranks)]


def warn_of_lost_order(loaders: StatefulPart) -> None:
    """Warns of loaders of torchdata whose state lacks the generator that their order is drawn from."""
    for key, loader in loaders.objects.items():
        for sampler in _samplers(loader):
            if not isinstance(sampler, _DRAWS_UNSEEN) or is_stateful(sampler):
                continue
            has_option = isinstance(sampler, RandomSampler) and isinstance(loader, DataLoader)
            advice = "shuffle=True instead" if has_option else "a sampler with state_dict and load_state_dict"
            warnings.warn(
                f"{loaders.path(key)} has a {type(sampler).__qualname__}, whose generator a {type(loader).__qualname__} does not save: "
                "after a resume within a pass, the rest of it comes in another order, which repeats samples and skips others; "
                f"pass {advice}",
                stacklevel=user_stacklevel(),
            )


def _samplers(loader: Any) -> Iterator[Any]:
    """The sampler of a data loader, or those of the nodes of a ``torchdata.nodes.Loader``."""
    yield getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    if any(cls.__module__.startswith("torchdata.nodes") for cls in type(loader).__mro__):
        for inner in (getattr(loader, "root", None), getattr(loader, "source", None), *getattr(loader, "source_nodes", {}).values()):
            yield from _samplers(inner)


def _of(own: State, module: _Module) -> dict[str, Any]:
    stored: dict[str, Any] = own.get(module.side, {})
    return stored.get(module.key, {}) if module.key else stored


def _get_value(path: str, value: Any) -> Any:
    return random_generators.get_state(value) if random_generators.is_generator(value) else extras.get_state(path, value)

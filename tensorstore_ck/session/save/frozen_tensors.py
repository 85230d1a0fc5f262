"""Tensors that the user declared frozen: they are captured without a copy, and not read at each save.

Knowledge of a tensor is valid for the same memory only, which is kept alive so that nothing else can be allocated there. Another state with
the same names, or another shard of a tensor, is read.

While the tensors of one state are known, a save whose frozen tensors are the same, in the same memory, compares columns: an object for
each of 20,000 tensors took as long as their copy. While those of several states are known, as of two branches in turns, each save goes
through the names. The objects are made when a save writes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tensorstore_ck.common.threads import ProcessLock
from tensorstore_ck.engine.interfaces import CapturedState, FrozenTensor, Numbers
from tensorstore_ck.errors import InvalidOptionError

if TYPE_CHECKING:
    from tensorstore_ck.state.tensor_table import ByteSources, TensorSpecs

VERIFY_EVERY: Final = 10
"""Every N-th save reads a frozen tensor anyway."""


class LazyFrozen(Mapping[int, FrozenTensor]):
    """Number of a tensor -> what is known of it. The objects are made on first use, once, though several threads may write with them."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = dict.fromkeys(numbers.tolist())
        self._known: dict[int, FrozenTensor] = {}

    def put(self, number: int, known: FrozenTensor) -> None:
        """Sets what is known of a tensor."""
        self._known[number] = known

    def __getitem__(self, number: int) -> FrozenTensor:
        if (found := self._known.get(number)) is not None:
            return found
        if number not in self._numbers:
            raise KeyError(number)
        return self._known.setdefault(number, FrozenTensor(VERIFY_EVERY))

    def __contains__(self, number: object) -> bool:
        return number in self._numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Known(NamedTuple):
    """What is known of a tensor, and the place for which it holds."""

    place: tuple[object, ...]
    frozen: FrozenTensor


class _FrozenState:
    """The frozen tensors of one state, and what identifies their memory and what it holds; as columns."""

    def __init__(self, scope: bytes, specs: "TensorSpecs", sources: "ByteSources", numbers: Numbers) -> None:
        """`numbers`: those of the frozen tensors."""
        from tensorstore_ck.state.capture_copy import memory_key  # noqa: PLC0415 - loads torch

        self.scope, self.names, self.numbers = scope, specs.names, numbers
        # Not the kinds: one tensor has other strides and is_complex in them by how the capture described it.
        self._kinds = [(kind.dtype, kind.item_bytes, kind.shape, kind.order, kind.size_bytes) for kind in specs.kinds]
        self._kind_numbers, self._addresses = specs.kind_numbers[numbers], sources.addresses[numbers]
        elsewhere = np.flatnonzero((self._addresses == 0) & (sources.sizes[numbers] > 0)).tolist()
        self._keys = {position: memory_key(sources[int(numbers[position])]) for position in elsewhere}
        """Position among the frozen tensors -> memory, of those that are not contiguous host memory."""
        self.owners: list[object] = []
        """Keep the memory alive."""
        self._has_all = True
        """Whether none of them was taken."""

    @cached_property
    def frozen(self) -> LazyFrozen:
        return LazyFrozen(self.numbers)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {self.names[number]: position for position, number in enumerate(self.numbers.tolist())}

    def is_same(self, other: "_FrozenState") -> bool:
        """Whether `other` has the same tensors in the same memory, and none was taken from this one."""
        has_names = self._has_all and self.scope == other.scope and self.names == other.names
        are_alike = has_names and np.array_equal(self.numbers, other.numbers) and self._kinds == other._kinds
        is_there = are_alike and np.array_equal(self._kind_numbers, other._kind_numbers)
        return is_there and np.array_equal(self._addresses, other._addresses) and self._keys == other._keys

    def take(self, name: str) -> _Known | None:
        """What is known of a tensor, which is forgotten here; None if it is not one of these."""
        position = self._positions.pop(name, None)
        if position is None:
            return None
        self._has_all, self.owners[position] = False, None
        return _Known(self._place_at(position), self.frozen[int(self.numbers[position])])

    def learn(self, name: str, known: _Known) -> None:
        """Takes over what was known of a tensor, if it is one of these and in the same place."""
        position = self._positions.get(name)
        if position is not None and self._place_at(position) == known.place:
            self.frozen.put(int(self.numbers[position]), known.frozen)

    def _place_at(self, position: int) -> tuple[object, ...]:
        return self.scope, self._kinds[self._kind_numbers[position]], int(self._addresses[position]), self._keys.get(position)

    def __len__(self) -> int:
        return len(self.numbers) if self._has_all else len(self._positions)


class FrozenTensors:
    """The frozen tensors of one store handle."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        """For what follows and the states themselves: threads may save and restore at the same time."""
        self._states: Sequence[_FrozenState] = ()
        """What is known. A name is in one of them at most. Replaced as a whole."""
        self._selected: tuple[Sequence[str], Sequence[str], Numbers] | None = None
        """The last globs and names, and the numbers of the names that the globs match."""

    def forget(self) -> None:
        """Forgets all: the next save reads its tensors."""
        with self._lock.here:
            self._states = ()

    def mark(self, captured: CapturedState, globs: Sequence[str], scope: bytes = b"") -> CapturedState:
        """The state with the tensors marked as frozen whose names match. `scope`: the group that saves it.

        Forgets its other tensors: a tensor that is frozen, then trained, then frozen again is read.

        Raises:
            InvalidOptionError: `globs` are invalid.
        """
        with self._lock.here:
            if not isinstance(globs, Iterable):
                raise InvalidOptionError(f"frozen must be globs such as 'embedding.*', not {globs!r}", object_id="frozen")
            if not globs and not self._states:
                return captured
            return captured._replace(frozen=self._mark(captured, globs, scope))

    def _mark(self, captured: CapturedState, globs: Sequence[str], scope: bytes) -> LazyFrozen:
        known = self._states
        from tensorstore_ck.state.tensor_table import ByteSources, TensorSpecs  # noqa: PLC0415 - loads torch

        specs, sources = captured.layout.tensors, ByteSources.of(captured.sources)
        assert isinstance(specs, TensorSpecs)
        state = _FrozenState(scope, specs, sources, self._select(globs, specs.names))
        if len(known) == 1 and known[0].is_same(state) and self._states is known:
            return known[0].frozen
        state.owners = sources.owners(state.numbers.tolist())
        earlier = () if len(known) == 1 and not globs and known[0].names == specs.names else known  # (): all are forgotten
        for other in earlier:
            for name in specs.names:
                if (taken := other.take(name)) is not None:
                    state.learn(name, taken)
        if self._states is not known:  # a signal handler of this thread restored or saved meanwhile: nothing from before it counts
            return LazyFrozen(state.numbers)
        self._states = [each for each in (state, *earlier) if len(each)]
        return state.frozen

    def _select(self, globs: Sequence[str], names: Sequence[str]) -> Numbers:
        if not globs:
            return np.empty(0, np.int64)
        from tensorstore_ck.state.select import Selection  # noqa: PLC0415 - loads torch

        selected, given = self._selected, globs if isinstance(globs, str) else (*globs,)  # a list may change between saves
        if selected is None or selected[:2] != (given, names):
            selected = self._selected = given, names, np.array(Selection(given).fitting(names), np.int64)
        return selected[2]

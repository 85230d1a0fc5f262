"""Takes a state apart by comparing it with the structure of the last save: faster than a walk where there are many small tensors.

The names, dtypes and shapes are then those of the last layout. What could differ under equal names is asked of every tensor at each save:
its type, dtype, shape, strides, flags, device, address and allocation. Whatever differs, or is no plain tensor on the host with memory of
its own, leaves the state to `CaptureWalk`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import CapturedState, Numbers
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.tree import ATTRIBUTES
from tensorstore_ck.state.aliasing import touching
from tensorstore_ck.state.boxes import CHECKPOINTABLE_MARK
from tensorstore_ck.state.capture import CaptureWalk
from tensorstore_ck.state.device.device_blocks import device_blocks
from tensorstore_ck.state.plain_memory import PLAIN
from tensorstore_ck.state.tensor_table import ByteSources, TensorSpecs

_CONTAINERS: Final = frozenset({dict, list, tuple, OrderedDict})
GROUP: Final = 256
"""Tensors that are compared together."""


class _Run(NamedTuple):
    """Neighbouring tensors: items [first, stop) of a container."""

    first: int
    stop: int


class _Values(NamedTuple):
    """An item without tensors, which is walked at each save; `node`: its encoded node."""

    at: int
    node: bytes


class _Container(NamedTuple):
    """A container with tensors in it."""

    at: int
    """Its position in the container around it."""
    kind: type
    keys: Sequence[object]
    """The keys of a dict, or positions."""
    key_kinds: Sequence[type]
    steps: "Sequence[_Run | _Values | _Container]"
    """In the order of a walk."""
    attributes: bytes | None
    """The encoded node of the attributes of an OrderedDict."""


class _Columns(NamedTuple):
    """What some tensors must be, each list in their order: so few that they stay in the core's cache."""

    kinds: list[type]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, tuple[int, ...]]]
    """Of tensors with an extent of 1, which are contiguous with other strides, too."""
    requires_grad: list[bool]
    has_complex: bool

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "_Columns":
        return cls(
            kinds=[*map(type, tensors)],
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[tensor.shape for tensor in tensors],
            strides=[(number, tensor.stride()) for number, tensor in enumerate(tensors) if 1 in tensor.shape],
            requires_grad=[tensor.requires_grad for tensor in tensors],
            has_complex=any(map(torch.Tensor.is_complex, tensors)),
        )

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors are so, and plain memory of the host."""
        return (
            all(map(is_, map(type, tensors), self.kinds))
            and all(map(torch.Tensor.is_contiguous, tensors))
            and not any(map(torch.Tensor.is_neg, tensors))
            and not any(map(hasattr, tensors, repeat(CHECKPOINTABLE_MARK)))
            and all(map(is_, map(attrgetter("dtype"), tensors), self.dtypes))
            and all(map(eq, map(attrgetter("shape"), tensors), self.shapes))
            and all(map(attrgetter("is_cpu"), tensors))
            and [tensor.requires_grad for tensor in tensors] == self.requires_grad
            and all(tensors[number].stride() == strides for number, strides in self.strides)
            and not (self.has_complex and any(map(torch.Tensor.is_conj, tensors)))
        )


class _ValueWalk(CaptureWalk):
    """Walks the items without tensors."""

    def node_of(self, value: object, path: str) -> bytes | None:
        """The encoded node of a value; None if it has a tensor or array in it."""
        nodes: list[Any] = [None]
        self._visit(value, path=path, nodes=nodes, position=0, depth=0)
        return pack_body(nodes[0]) if not self._table.objects else None

    def captured(self, kept: CapturedState, sources: ByteSources) -> CapturedState:
        """The state, with the layout of `kept`."""
        return CapturedState(kept.layout, self._values, self._blobs, sources, explicit=[], device_blocks=device_blocks())


class RecentStructure:
    """The structure of a handle's last save. Threads that save at the same time may use it."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._kept: _Structure | None = None

    def capture(self, state: object) -> CapturedState:
        """As `capture` of one process.

        Raises:
            UnsupportedValueError: a value cannot be stored; the message has its path and advice.
        """
        kept = self._kept
        captured = None if kept is None else kept.capture(state)
        if captured is None:
            walk = CaptureWalk()
            walk.visit(state)
            captured = walk.finish()
            names = captured.layout.tensors.names if isinstance(captured.layout.tensors, TensorSpecs) else ()
            # Only of what was saved before: a state that never has the same structure is only walked.
            self._kept = _Structure.of(state, captured) if kept is None and names == self._names else None
            self._names = names
        return captured


class _Structure:
    def __init__(self, root: _Container, tensors: Sequence[torch.Tensor], captured: CapturedState, sizes: Numbers) -> None:
        self._root = root
        groups = [tensors[first : first + GROUP] for first in range(0, len(tensors), GROUP)]
        self._columns = [*map(_Columns.of, groups)]
        self._captured = captured._replace(values=(), blobs=(), sources=())
        self._sizes = sizes
        specs = captured.layout.tensors
        assert isinstance(specs, TensorSpecs)
        self._item_bytes = np.array([form.item_bytes for form in specs.forms], np.int64)

    @classmethod
    def of(cls, state: object, captured: CapturedState) -> "_Structure | None":
        """The structure of a state that was captured; None if it is not as simple as this file needs it."""
        sources, tensors = ByteSources.of(captured.sources), list[torch.Tensor]()
        if captured.layout.storages or captured.layout.spreads or not np.all((sources.addresses != 0) | (sources.sizes == 0)):
            return None
        root = _container_of(state, 0, tensors, {})
        return None if root is None or len(tensors) != len(sources) else cls(root, tensors, captured, sources.sizes)

    def capture(self, state: object) -> CapturedState | None:
        """The state taken apart; None if it has another structure."""
        tensors, walk = list[torch.Tensor](), _ValueWalk()
        try:
            sources = self._sources(tensors) if _collect(self._root, state, walk, tensors) else None
        except (RuntimeError, NotImplementedError, UnsupportedValueError):
            return None  # the walk says what is wrong
        return None if sources is None else walk.captured(self._captured, sources)

    def _sources(self, tensors: list[torch.Tensor]) -> ByteSources | None:
        """The bytes of tensors that are what they were; None if they are not, or not alone in their memory."""
        if len(set(map(id, tensors))) != len(tensors):
            return None
        storages = list[torch.UntypedStorage]()
        starts, stops, offsets = np.zeros((3, len(tensors)), np.int64)
        for columns in self._columns:
            some = slice(len(storages), len(storages) + len(columns.kinds))
            group = tensors[some]
            if not columns.are_of(group):
                return None
            several = [*map(torch.Tensor.untyped_storage, group)]
            starts[some] = [*map(torch.UntypedStorage.data_ptr, several)]
            stops[some] = [*map(torch.UntypedStorage.nbytes, several)]
            offsets[some] = [*map(torch.Tensor.storage_offset, group)]
            storages += several
        stops += starts
        addresses, sizes = starts + offsets * self._item_bytes, self._sizes
        has_bytes = sizes > 0
        areas = starts.astype(np.uint64), stops.astype(np.uint64)
        if np.any(has_bytes & (addresses + sizes > stops)) or touching(np.flatnonzero(has_bytes), *areas):
            return None
        return ByteSources(addresses, sizes, storages, {})


def _container_of(value: Any, at: int, tensors: list[torch.Tensor], known: dict[object, Any]) -> _Container | None:
    """What a walk finds in a container; appends its tensors. None if it has none, or another kind of keys or container.

    `known`: parts of other containers, which thousands of parameters have in common.
    """
    kind = type(value)
    if kind not in _CONTAINERS:
        return None
    items = [*value.values()] if isinstance(value, dict) else value
    keys = list(value) if isinstance(value, dict) else range(len(value))
    if not {str, int}.issuperset(map(type, keys)):
        return None
    steps, first, before = list[_Run | _Values | _Container](), 0, len(tensors)
    while first < len(items):
        stop = next((stop for stop in range(first, len(items)) if type(items[stop]) not in PLAIN), len(items))
        if stop > first:
            tensors += items[first:stop]
            steps.append(_Run(first, stop))
        if stop < len(items):
            inner = _container_of(items[stop], stop, tensors, known)
            node = _ValueWalk().node_of(items[stop], "") if inner is None else None
            if inner is None and node is None:
                return None
            steps.append(inner or _Values(stop, node or b""))
        first = stop + 1
    attributes = _ValueWalk().node_of(vars(value), "") if kind is OrderedDict else None
    if len(tensors) == before:
        return None
    key_kinds = [*map(type, keys)]
    if steps == [_Run(0, len(items))]:
        keys, key_kinds, steps = known.setdefault((kind, *keys, *key_kinds), (keys, key_kinds, steps))
    return _Container(at, kind, keys, key_kinds, steps=steps, attributes=attributes)


def _collect(container: _Container, value: Any, walk: _ValueWalk, tensors: list[torch.Tensor], path: str = "") -> bool:
    """Appends the tensors of a container, and walks its other items; returns whether it has this structure as far as that shows."""
    _, kind, keys, key_kinds, steps, attributes = container
    items: Any = value
    if type(value) is not kind or len(items) != len(keys):
        return False
    if isinstance(value, dict):
        items = [*value.values()]
        if list(value) != keys or [*map(type, value)] != key_kinds:
            return False
    for step in steps:
        if isinstance(step, _Run):
            tensors += items[step.first : step.stop]
        elif isinstance(step, _Values):
            if walk.node_of(items[step.at], f"{path}{keys[step.at]}.") != step.node:
                return False
        elif not _collect(step, items[step.at], walk, tensors, path=f"{path}{keys[step.at]}."):
            return False
    return kind is not OrderedDict or walk.node_of(vars(value), f"{path}{ATTRIBUTES}.") == attributes

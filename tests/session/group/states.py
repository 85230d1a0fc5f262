"""States that are spread over ranks, made by hand: numpy arrays, of which each rank has what its placements say."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.format.block_assignment import regions_of_rank
from tensorstore_ck.format.layout import Layout, Sharding, Spread, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds, Mesh

Array = np.ndarray[Any, Any]


class Spreading(NamedTuple):
    """A global tensor, and how it is spread."""

    whole: Array
    spread: Spread


class BytesSource:
    """`ByteSource` over bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]


def whole(shape: Sequence[int], seed: int = 0) -> Array:
    """Numbers that tell where they belong."""
    return np.random.default_rng(seed).integers(0, 1 << 31, shape, dtype=np.int32)


def captured(
    tensors: Mapping[str, Spreading],
    meshes: Sequence[Mesh],
    rank: int,
    ranks: int,
    values: Sequence[object] = (),
    *,
    named: bool = False,
) -> CapturedState:
    """What a rank saves: a list, or a dict."""
    specs = [TensorSpec(name, "np:<i4", 4, each.whole.shape) for name, each in tensors.items()]
    nodes = [*range(len(specs)), *[None] * len(values)]
    tree = ["d", [*tensors, *(f"value {number}" for number in range(len(values)))], nodes] if named else ["l", nodes]
    layout = Layout(specs, tree, (), meshes, [each.spread for each in tensors.values()])
    held = [b""] * len(specs)
    everything = list(tensors.values())
    for region in regions_of_rank(layout, rank, tuple(range(ranks))):
        held[region.tensor] += cut(everything[region.tensor].whole, BoxBounds(region.offsets, region.sizes))
    return CapturedState(layout, values, (), ListedSources(BytesSource(data) for data in held))


def cut(array: Array, box: BoxBounds) -> bytes:
    """The bytes of a box."""
    return array[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))].tobytes()


def sharded(mesh: int, *placements: Any) -> Sharding:
    """A placement of a tensor."""
    return Sharding(mesh, placements)

"""Copies the bytes of a stored region into a wanted box of the same tensor. Shapes may differ; both are row-major. Pure."""

from collections.abc import Iterator

import numpy as np

from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.format.block_assignment import Region, overlap
from tensorstore_ck.format.layout import TensorSpec
from tensorstore_ck.format.sharding import BoxBounds


class BoxTarget(ByteTarget):
    """`ByteTarget` over the bytes of a region; passes on those that lie in a wanted box."""

    def __init__(self, region: Region, spec: TensorSpec, box: BoxBounds, target: ByteTarget) -> None:
        self.region = region
        self.spec = spec
        self.box = box
        self.target = target

    def memory(self) -> None:
        """None: bytes come through `write`."""

    def window(self, size_bytes: int) -> memoryview | None:
        """The window of the target that receives the bytes."""
        return self.target.window(size_bytes)

    def write(self, start: int, data: memoryview) -> None:
        """Takes whole elements."""
        item_bytes, box = self.spec.item_bytes, self.box
        memory = self.target.memory()
        first, last = start // item_bytes, (start + len(data)) // item_bytes
        for piece, at in self.region.pieces(self.spec, first, last):
            common = overlap(piece, box)
            if common is None:
                continue
            source = np.ndarray((*piece.sizes, item_bytes), np.uint8, data, at * item_bytes - start)[index_in(common, piece)]
            if memory is not None:
                np.ndarray((*box.sizes, item_bytes), np.uint8, memory)[index_in(common, box)] = source
                continue
            for within, begin in runs(common, box):
                run = np.ascontiguousarray(source[index_in(within, common)])
                self.target.write(begin * item_bytes, run.reshape(-1).data)


def index_in(inner: BoxBounds, outer: BoxBounds) -> tuple[slice, ...]:
    """Where a box lies in a larger one."""
    starts = (a - b for a, b in zip(inner.offsets, outer.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.sizes, strict=True))


def runs(inner: BoxBounds, outer: BoxBounds) -> Iterator[tuple[BoxBounds, int]]:
    """Cuts a box into boxes that are contiguous in a larger one; with the element at which each begins there."""
    whole = len(inner.sizes)
    while whole > 0 and inner.sizes[whole - 1] == outer.sizes[whole - 1]:
        whole -= 1
    free = max(whole - 1, 0)  # the dims before this one are copied one by one
    for at in np.ndindex(*inner.sizes[:free]):
        offsets = tuple(a + b for a, b in zip(inner.offsets[:free], at, strict=True)) + inner.offsets[free:]
        first = 0
        for offset, start, size in zip(offsets, outer.offsets, outer.sizes, strict=True):
            first = first * size + offset - start
        yield BoxBounds(offsets, (1,) * free + inner.sizes[free:]), first

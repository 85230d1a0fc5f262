"""What flows between memory and the store: a state taken apart, the sources and targets of its bytes, and a stored snapshot, opened."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.format.layout import ExplicitRegions, Layout
from tensorstore_ck.format.sharding import BoxBounds

Numbers = npt.NDArray[np.int64]


class ByteSource(Protocol):
    """The bytes of one tensor, row-major and contiguous, as they are captured."""

    @property
    def size_bytes(self) -> int:
        """The number of its bytes."""

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop): the tensor's own memory where it is contiguous on the CPU, else a copy. Thread-safe."""


class SourceRanges(NamedTuple):
    """Bytes of several tensors, as columns."""

    tensors: Numbers
    starts: Numbers
    """Where each begins in its tensor's source."""
    sizes: Numbers
    """In bytes."""


class Sources(Sequence[ByteSource]):
    """The sources of all tensors. They may be made on use: 20,000 objects would cost as much as their content."""

    @abstractmethod
    def at(self, number: int) -> ByteSource:
        """The source of a number that is in range."""

    def read(self, number: int, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the source of a number that is in range: see `ByteSource.read`."""
        return self.at(number).read(start, stop)

    def gather(self, ranges: SourceRanges) -> bytearray:
        """A copy of these bytes, one range after another."""
        columns = (column.tolist() for column in ranges)
        return bytearray().join([self.read(tensor, start, start + size) for tensor, start, size in zip(*columns, strict=True)])

    @overload
    def __getitem__(self, number: int) -> ByteSource: ...
    @overload
    def __getitem__(self, number: slice) -> list[ByteSource]: ...
    def __getitem__(self, number: int | slice) -> ByteSource | list[ByteSource]:
        there = range(len(self))[number]
        return self.at(there) if isinstance(there, int) else [self.at(at) for at in there]


class ListedSources(Sources):
    """Sources that exist."""

    def __init__(self, sources: Iterable[ByteSource] = ()) -> None:
        self._sources = [*sources]

    def at(self, number: int) -> ByteSource:
        """See `Sources`."""
        return self._sources[number]

    def __len__(self) -> int:
        return len(self._sources)


class ByteTarget(Protocol):
    """Where the bytes of one stored tensor go when it is restored."""

    def memory(self) -> memoryview | None:
        """All of the destination, writable, when bytes can be read straight into it; else None, and `write` is called."""

    def write(self, start: int, data: memoryview) -> None:
        """Takes the verified bytes from `start` on. Thread-safe; called once for every byte, in any order."""

    def window(self, size_bytes: int) -> memoryview | None:
        """Memory from which `write` is fastest; None: any memory is as fast."""
        return None


class TensorBlock(NamedTuple):
    """A block that a rank holds."""

    row: int
    """Among the tensors' blocks."""
    tensor: int
    start: int
    """Where it begins in the tensor's source."""
    stop: int

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.stop - self.start


class DeviceBlocks(Protocol):
    """What devices compute over the tensors in their memory."""

    @property
    def must_agree(self) -> bool:
        """Whether a block that is written must have the id that a device computed, even if the save verifies nothing."""

    def ids(self, sources: Sequence[ByteSource], blocks: Sequence[TensorBlock]) -> Sequence[Digest | None]:
        """The ids of these blocks as they are now; None for those that no device can hash."""

    def is_finite(self, source: ByteSource, pieces: Sequence[tuple[int, int]], mask: int, item_bytes: int) -> bool:
        """Whether no word of `item_bytes` in these pieces, at equal distances, has all bits of `mask` set; False also if unknown."""

    def note_unchanged(self, sources: Sequence[ByteSource]) -> None:
        """All blocks of these tensors were in the store already."""


@dataclass(slots=True)
class FrozenTensor:
    """A tensor that the caller declared frozen. Only every `verify_every`-th save reads its bytes."""

    verify_every: int
    ids: Sequence[Digest] = ()
    """The ids of its blocks on this rank, in order, when it was last read."""
    cut: bytes = b""
    """Identifies the blocks: how the tensor was cut."""
    unread: int = 0
    """The number of saves since then that did not read it."""

    @property
    def is_due(self) -> bool:
        """Whether the next save reads it, to check that it has not changed."""
        return self.unread + 1 >= self.verify_every


class CapturedState(NamedTuple):
    """A state, taken apart: what a save stores."""

    layout: Layout
    values: Sequence[object]
    """msgpack-able; one for each hole of the tree. A large one is ``["b", kind, i]`` with its bytes in ``blobs[i]``."""
    blobs: Sequence[bytes]
    sources: Sources
    """For each tensor of the layout, the bytes that this rank holds, one region after another."""
    explicit: Sequence[ExplicitRegions] = ()
    """The regions that this rank holds of tensors whose layout does not say it."""
    frozen: Mapping[int, FrozenTensor] = MappingProxyType({})
    """The tensors that the user called frozen, by number, and what is known of their blocks."""
    device_blocks: DeviceBlocks | None = None
    """None: no tensor is on a device."""
    own: "CapturedState | None" = None
    """The state that belongs to this rank alone."""
    derived: MutableMapping[object, Any] | None = None
    """What saves of this layout have computed from it, such as write plans, by what else that depends on; None: nothing is kept."""

    @property
    def logical_bytes(self) -> int:
        """The bytes of whole tensors and large values."""
        return self.layout.size_bytes + sum(map(len, self.blobs))

    @property
    def held_bytes(self) -> int:
        """The bytes of this rank's share of the tensors, and of the state that belongs to it alone."""
        own = self.own.held_bytes if self.own is not None else 0
        return sum(source.size_bytes for source in self.sources) + own


class WantedBox(NamedTuple):
    """A box of a tensor that is to be read, and where its bytes go, row-major."""

    tensor: int
    box: BoxBounds
    target: ByteTarget


class SnapshotContent(Protocol):
    """A stored snapshot, opened: what a restore takes."""

    @property
    def layout(self) -> Layout:
        """Its layout."""

    @property
    def values(self) -> Sequence[Any]:
        """The value of each hole, decoded from msgpack but not from our value encoding."""

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""

    def read(self, targets: Mapping[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors, by their numbers in the layout."""

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        """Reads and verifies boxes of tensors."""

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        """Verified bytes [start, stop) of a tensor; reads only the blocks that hold them."""

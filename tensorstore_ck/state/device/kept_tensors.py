"""Tensors on devices that an asynchronous save does not copy: their ids at the call are those of blocks that the store has.

Which tensors may be kept is a guess from the save before: those whose blocks all were in the store. The caller waits for their ids, so that
a tensor that has changed is still copied before the next work. No byte of a kept tensor is trusted: see `KeptSource`. They are kept whole:
a tensor of which one block has changed is copied.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest, block_id
from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, TensorBlock
from tensorstore_ck.errors import CaptureChangedError
from tensorstore_ck.state.device.device_blocks import StartedIds

MIN_KEPT_BYTES: Final = 256 << 20
"""Waiting for ids leaves the device idle for a few ms, in which it would copy this much."""


class _Stored(NamedTuple):
    ids: bytes
    """Of its blocks, in order."""
    is_finite: bool
    """Whether all its numbers are finite. If not, a sample of them is counted at each save, which needs the bytes of the call."""


class StoredTensors:
    """The tensors of one store handle whose blocks all were in the store at the last save, by name."""

    def __init__(self) -> None:
        self._known: dict[str, _Stored] = {}

    def note(self, name: str, ids: bytes, is_finite: Callable[[], bool]) -> None:
        """All blocks of a tensor are in the store. `is_finite` is called if that was not known of the same bytes."""
        known = self._known.get(name)
        if known is None or known.ids != ids:
            self._known[name] = _Stored(ids, is_finite())

    def forget(self, name: str) -> None:
        """A tensor has changed."""
        self._known.pop(name, None)

    def ids_of(self, name: str) -> bytes | None:
        """The ids that a tensor must have to be kept; None: it is copied."""
        known = self._known.get(name)
        return known.ids if known is not None and known.is_finite else None


class KeptSource:
    """`ByteSource` of a tensor that stays on its device. Its owner may change it, so whole blocks are read, and compared with their ids.

    It is read only if the store has lost a block since the last save.
    """

    def __init__(self, source: ByteSource, number: int, name: str, blocks: Sequence[tuple[TensorBlock, Digest]]) -> None:
        """`number`: of the tensor in the captured state. `blocks`: all of them, in order, with the ids that they had at the call."""
        self._source = source
        self._name = name
        self._blocks = blocks
        self.number = number
        self.size_bytes = source.size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Copies of the blocks.

        Raises:
            CaptureChangedError: they have changed.
        """
        needed = [(block, digest) for block, digest in self._blocks if block.start < stop and start < block.stop]
        data = bytearray()
        for block, digest in needed:
            read = self._source.read(block.start, block.stop)
            if block_id(read) != digest:
                raise CaptureChangedError(
                    f"{self._name} was not copied from its device, since it had not changed, but the store has lost blocks of it "
                    "since the last save, and now it has changed: nothing was published; save again",
                    object_id=self._name,
                )
            data += read
        first = needed[0][0].start if needed else start
        return memoryview(data)[start - first : stop - first]


def kept_tensors(captured: CapturedState, copied: Collection[int], started: StartedIds, stored: StoredTensors) -> dict[int, KeptSource]:
    """Those of the `copied` tensors that need no copy. Waits for the devices if they may be large enough.

    Raises:
        RuntimeError: a device failed.
    """
    wanted: dict[int, bytes] = {}
    for number in started.tensors & set(copied):
        if (ids := stored.ids_of(captured.layout.tensors[number].name)) is not None:
            wanted[number] = ids
    if not wanted or sum(captured.sources[number].size_bytes for number in wanted) < MIN_KEPT_BYTES:
        return {}
    kept, found = dict[int, KeptSource](), blocks_by_tensor(started)
    for number, ids in wanted.items():
        if b"".join(digest for _, digest in found[number]) == ids:
            kept[number] = KeptSource(captured.sources[number], number, captured.layout.tensors[number].name, found[number])
        else:
            stored.forget(captured.layout.tensors[number].name)
    return kept


def blocks_by_tensor(started: StartedIds) -> dict[int, list[tuple[TensorBlock, Digest]]]:
    """The blocks of each tensor of which each block is hashed, with their ids. Waits.

    Raises:
        RuntimeError: a device failed.
    """
    found = {}
    for tensor, group in groupby(zip(started.blocks, started.wait(), strict=True), key=lambda pair: pair[0].tensor):
        pairs = list(group)
        blocks = [(block, digest) for block, digest in pairs if digest is not None]
        if len(blocks) == len(pairs):
            found[tensor] = blocks
    return found

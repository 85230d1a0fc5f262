"""Copies of captured tensors from devices, with the ids that the devices compute beside them. Knows a capture; no slot, no store.

Ids are computed at the capture, before the caller's next work. Where a copy may be overtaken by that work (see
`optimizer_step_gates`), they are computed again after the copy, and the copy cannot be read unless both are equal: a save never holds a
mixture of two states.
"""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.interfaces import BlockRange, ByteSource, CapturedState, SampledBytes
from tensorstore_ck.engine.write.sampled_checks import MAX_NAMED
from tensorstore_ck.errors import CaptureChangedError
from tensorstore_ck.state.byte_sources import MemorySource
from tensorstore_ck.state.device.device_blocks import MIN_SOURCE_BYTES, DeviceBlocks, StartedIds
from tensorstore_ck.state.device.optimizer_step_gates import StepGate, open_storages
from tensorstore_ck.state.device.side_streams import DeviceArrival, DeviceCopies, DeviceCopy, StreamOf
from tensorstore_ck.state.device.waited_copies import out_stream_of


class ArrivingSource:
    """`ByteSource` of a copy from a device that may still be under way."""

    def __init__(self, source: MemorySource, arrival: DeviceArrival) -> None:
        self._source = source
        self._arrival = arrival
        self.address = source.address
        self.size_bytes = source.size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Waits for the copy, then returns its bytes."""
        self._arrival.wait()
        return self._source.read(start, stop)


class Overlap(NamedTuple):
    """What lets copies from devices go on beside the caller's next work."""

    blocks_of: Callable[[Sequence[int]], Sequence[BlockRange]]
    """The blocks of some tensors, by their numbers: the devices compute their ids."""
    gates: Sequence[StepGate] = ()
    """Of optimizers whose next step is all that changes what they own."""


class StartedCopies(NamedTuple):
    """Copies under way."""

    arrivals: Mapping[int, DeviceArrival]
    """What the reader of each tensor waits for."""
    blocks: "IdsAtCapture | None"
    """The ids of the tensors as they were; None: none are computed."""


def start_copies(
    captured: CapturedState,
    copies: Mapping[int, Sequence[DeviceCopy]],
    device_copies: DeviceCopies,
    copying: list[DeviceArrival],
    overlap: Overlap | None,
) -> StartedCopies:
    """Copies tensors from devices; work that is queued on the current streams afterwards may overwrite them.

    Args:
        captured: The state.
        copies: Of each tensor on a device: what makes one contiguous copy of it.
        device_copies: Makes them.
        copying: Gets what must have ended before the memory is reused.
        overlap: None: no ids are computed, and that work comes after all copies.
    """
    blocks = captured.device_blocks
    if overlap is None or not isinstance(blocks, DeviceBlocks):
        copying.append(device_copies.start([*chain.from_iterable(copies.values())]))
        copying[-1].hold_streams()
        return StartedCopies(dict.fromkeys(copies, copying[-1]), None)
    ranges = overlap.blocks_of([number for number in copies if captured.sources[number].size_bytes >= MIN_SOURCE_BYTES])
    before = blocks.start(captured.sources, ranges)
    before.hold_streams()
    storages, hashed = open_storages(overlap.gates), before.tensors
    later = {
        number: several
        for number, several in copies.items()
        if number in hashed and all(copy.tensor.untyped_storage().data_ptr() in storages for copy in several)
    }
    first = device_copies.start([copy for number, several in copies.items() if number not in later for copy in several])
    copying.append(first)
    first.hold_streams()
    arrivals = dict.fromkeys(copies, first)
    if later:
        copying.append(device_copies.start([*chain.from_iterable(later.values())]))
        proven = ProvenArrival(
            captured=captured,
            copied=copying[-1],
            before=before,
            ranges=[block for block in ranges if block.tensor in later],
            gates=overlap.gates,
        )
        for gate in overlap.gates:
            gate.hold(proven)
        arrivals |= dict.fromkeys(later, proven)
    addresses = {
        number: several[0].target.data_ptr()
        for number, several in copies.items()
        if sum(copy.target.nbytes for copy in several) == captured.sources[number].size_bytes
    }
    return StartedCopies(arrivals, IdsAtCapture(before, addresses, blocks))


class ProvenArrival:
    """`DeviceArrival` of copies that count only if the ids of what was copied are the same before and after.

    The device hashes again when somebody asks for the copies, or when the next step does. Queued right behind the copies, that kernel would
    wait for them in front of kernels of the next passes, where streams share a queue of the device.
    """

    def __init__(
        self,
        captured: CapturedState,
        copied: DeviceArrival,
        before: StartedIds,
        ranges: Sequence[BlockRange],
        gates: Sequence[StepGate],
    ) -> None:
        assert isinstance(captured.device_blocks, DeviceBlocks)
        self._blocks = captured.device_blocks
        self._captured = captured
        self._copied = copied
        self._before = before
        self._ranges = ranges
        self._gates = gates
        self._lock = threading.Lock()
        self._after: StartedIds | None = None
        self._changed: set[int] | None = None

    def wait(self) -> None:
        """Waits for the copies.

        Raises:
            CaptureChangedError: a tensor changed while it was copied.
        """
        if self._changed is None:
            self._copied.wait()
            before, after = self._before.wait(), self._hashed_again().wait()
            self._changed = {block.tensor for block in self._ranges if before[block] != after.get(block)}
            self._captured = self._captured._replace(sources=())
        if self._changed:
            for gate in self._gates:
                gate.distrust()
            raise _changed_error(self._captured, self._changed)

    def hold_streams(self, stream_of: StreamOf | None = None) -> None:
        """See `DeviceArrival`."""
        self._copied.hold_streams(stream_of)
        self._hashed_again().hold_streams()

    def _hashed_again(self) -> StartedIds:
        with self._lock:
            if self._after is None:
                self._copied.hold_streams(out_stream_of)
                self._after = self._blocks.start(self._captured.sources, self._ranges)
            return self._after


def _changed_error(captured: CapturedState, changed: set[int]) -> CaptureChangedError:
    names = [captured.layout.tensors[number].name for number in sorted(changed)]
    shown = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    return CaptureChangedError(
        f"{shown} changed between the call of the save and the next step of the optimizer, while being copied from the device: nothing was "
        "published. Later saves of this handle copy before they return; pass changed_by=() if something else than the optimizer changes "
        "its tensors",
        object_id=names[0],
    )


class IdsAtCapture:
    """`engine.interfaces.DeviceBlocks` of copies: the ids of blocks as they were at the capture."""

    must_agree: Final = True

    def __init__(self, started: StartedIds, addresses: Mapping[int, int], others: DeviceBlocks) -> None:
        """`addresses`: where the copies of whole tensors begin. `others` knows tensors that were not copied."""
        self._started = started
        self._addresses = addresses
        self._others = others

    def ids(self, sources: Sequence[ByteSource], ranges: Sequence[BlockRange]) -> Sequence[Digest | None]:
        """See `engine.interfaces.DeviceBlocks`. Blocks are known by the addresses of their copies: a group may number tensors otherwise."""
        try:
            started = self._started.wait()
        except RuntimeError as exc:
            warnings.warn(f"blocks on a device are hashed by the host this time: {exc}", stacklevel=user_stacklevel())
            started = {}
        at = {
            (self._addresses[block.tensor] + block.start, block.stop - block.start): digest
            for block, digest in started.items()
            if block.tensor in self._addresses
        }
        found: list[Digest | None] = []
        for block in ranges:
            source = sources[block.tensor]
            found.append(at.get((source.address + block.start, block.stop - block.start)) if isinstance(source, ArrivingSource) else None)
        left = [position for position, digest in enumerate(found) if digest is None]
        for position, digest in zip(left, self._others.ids(sources, [ranges[position] for position in left]), strict=True):
            found[position] = digest
        return found

    def is_finite(self, source: ByteSource, sampled: SampledBytes, mask: int, item_bytes: int) -> bool:
        """See `engine.interfaces.DeviceBlocks`."""
        return self._others.is_finite(source, sampled, mask, item_bytes)

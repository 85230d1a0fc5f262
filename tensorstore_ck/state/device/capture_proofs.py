"""Copies of captured tensors from devices, with the ids that the devices compute beside them. Knows a capture; no slot, no store.

Ids are computed at the capture, before the caller's next work. Where a copy may be overtaken by that work (see
`optimizer_step_gates`), they are computed again after the copy, and the copy cannot be read unless both are equal: a save never holds a
mixture of two states. What has not changed since the last save is not copied at all: see `kept_tensors`.
"""

import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.common.units import listed
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, ListedSources, TensorBlock
from tensorstore_ck.engine.write.sampled_checks import MAX_NAMED, count_non_finite
from tensorstore_ck.errors import CaptureChangedError
from tensorstore_ck.format.layout import TensorSpec
from tensorstore_ck.state.byte_sources import MemorySource
from tensorstore_ck.state.device.device_blocks import MIN_SOURCE_BYTES, DeviceBlocks, StartedIds
from tensorstore_ck.state.device.kept_tensors import KeptSource, StoredTensors, blocks_by_tensor, kept_tensors
from tensorstore_ck.state.device.optimizer_step_gates import StepGate, open_storages
from tensorstore_ck.state.device.side_streams import DeviceArrival, DeviceCopies, DeviceCopy, StreamOf
from tensorstore_ck.state.device.waited_copies import copies_of

FINITE_BYTES: Final = 4 << 20
"""Numbers that a thread checks at a time. A multiple of every item's size."""


class ArrivingSource:
    """`ByteSource` of a copy from a device that may still be under way."""

    def __init__(self, source: MemorySource, arrival: DeviceArrival, number: int) -> None:
        """`number`: of the tensor in the captured state."""
        self._source = source
        self._arrival = arrival
        self.number = number
        self.size_bytes = source.size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Waits for the copy, then returns its bytes."""
        self._arrival.wait()
        return self._source.read(start, stop)


class Overlap(NamedTuple):
    """What lets copies from devices go on beside the caller's next work."""

    blocks_of: Callable[[Sequence[int]], Sequence[TensorBlock]]
    """The blocks of some tensors, by their numbers: the devices compute their ids."""
    gates: Sequence[StepGate] = ()
    """Of optimizers whose next step is all that changes what they own."""
    stored: StoredTensors | None = None
    """The tensors that need no copy if they have not changed; None: all are copied."""


class StartedCopies(NamedTuple):
    """Copies under way."""

    arrivals: Mapping[int, DeviceArrival]
    """What the reader of each tensor waits for."""
    blocks: "IdsAtCapture | None"
    """The ids of the tensors as they were; None: none are computed."""
    kept: Mapping[int, KeptSource] = MappingProxyType({})
    """Tensors that are not copied."""


def start_copies(
    captured: CapturedState,
    copies: Mapping[int, Sequence[DeviceCopy]],
    device_copies: DeviceCopies,
    copying: list[DeviceArrival],
    overlap: Overlap | None,
) -> StartedCopies:
    """Copies tensors from devices; work that is queued on the current streams afterwards may overwrite them.

    `copies`: of each tensor on a device, what makes one contiguous copy of it. `copying` gets what must have ended before the memory is
    reused. Without `overlap` no ids are computed, and that work comes after all copies.
    """
    blocks = captured.device_blocks
    if overlap is None or not isinstance(blocks, DeviceBlocks):
        copying.append(device_copies.start([*chain.from_iterable(copies.values())]))
        copying[-1].hold_streams()
        return StartedCopies(dict.fromkeys(copies, copying[-1]), None)
    hashed_blocks = overlap.blocks_of([number for number in copies if captured.sources[number].size_bytes >= MIN_SOURCE_BYTES])
    before = blocks.start(captured.sources, hashed_blocks)
    before.hold_streams()
    kept = _kept(captured, copies, before, overlap.stored)
    copies = {number: several for number, several in copies.items() if number not in kept}
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
            blocks=[block for block in hashed_blocks if block.tensor in later],
            gates=overlap.gates,
        )
        for gate in overlap.gates:
            gate.hold(proven)
        arrivals |= dict.fromkeys(later, proven)
    return StartedCopies(arrivals, IdsAtCapture(before, captured.layout.tensors, overlap.stored, blocks), kept)


def _kept(captured: CapturedState, copies: Collection[int], before: StartedIds, stored: StoredTensors | None) -> Mapping[int, KeptSource]:
    if stored is None:
        return {}
    try:
        return kept_tensors(captured, copies, before, stored)
    except RuntimeError:  # whoever needs the ids will say so
        return {}


@dataclass(eq=False, repr=False)
class ProvenArrival:
    """`DeviceArrival` of copies that count only if the ids of what was copied are the same before and after.

    The device hashes again when somebody asks for the copies, or when the next step does. Queued right behind the copies, that kernel would
    wait for them in front of kernels of the next passes, where streams share a queue of the device.
    """

    captured: CapturedState
    copied: DeviceArrival
    before: StartedIds
    blocks: Sequence[TensorBlock]
    gates: Sequence[StepGate]

    def __post_init__(self) -> None:
        assert isinstance(self.captured.device_blocks, DeviceBlocks)
        self._device_blocks = self.captured.device_blocks
        self._lock = threading.Lock()
        self._after: StartedIds | None = None
        self._changed: set[int] | None = None

    def wait(self) -> None:
        """Waits for the copies.

        Raises:
            CaptureChangedError: a tensor changed while it was copied.
        """
        if self._changed is None:
            self.copied.wait()
            before = dict(zip(self.before.blocks, self.before.wait(), strict=True))
            after = self._hashed_again().wait()
            self._changed = {block.tensor for block, digest in zip(self.blocks, after, strict=True) if before[block] != digest}
            self.captured = self.captured._replace(sources=ListedSources())
        if self._changed:
            for gate in self.gates:
                gate.distrust()
            raise _changed_error(self.captured, self._changed)

    def hold_streams(self, stream_of: StreamOf | None = None) -> None:
        """See `DeviceArrival`."""
        self.copied.hold_streams(stream_of)
        self._hashed_again().hold_streams()

    def _hashed_again(self) -> StartedIds:
        with self._lock:
            if self._after is None:
                self.copied.hold_streams(lambda device: copies_of(device).out_stream)
                self._after = self._device_blocks.start(self.captured.sources, self.blocks)
            return self._after


def _changed_error(captured: CapturedState, changed: set[int]) -> CaptureChangedError:
    names = [captured.layout.tensors[number].name for number in sorted(changed)]
    return CaptureChangedError(
        f"{listed(names, MAX_NAMED)} changed between the call of the save and the next step of the optimizer, while being copied "
        "from the device: nothing was published. Later saves of this handle copy before they return; pass changed_by=() if something else "
        "than the optimizer changes its tensors",
        object_id=names[0],
    )


class IdsAtCapture:
    """`engine.interfaces.DeviceBlocks` of captured tensors: the ids of blocks as they were at the capture."""

    must_agree: Final = True

    def __init__(self, started: StartedIds, specs: Sequence[TensorSpec], stored: StoredTensors | None, others: DeviceBlocks) -> None:
        """`stored` learns which tensors are in the store. `others` knows tensors that were not captured."""
        self._started = started
        self._specs = specs
        self._stored = stored
        self._others = others

    @cached_property
    def _ids(self) -> dict[tuple[int, int, int], Digest]:
        """By tensor, start and stop."""
        try:
            ids = self._started.wait()
        except RuntimeError as exc:
            warnings.warn(f"blocks on a device are hashed by the host this time: {exc}", stacklevel=user_stacklevel())
            return {}
        found = zip(self._started.blocks, ids, strict=True)
        return {(block.tensor, block.start, block.stop): digest for block, digest in found if digest is not None}

    def ids(self, sources: Sequence[ByteSource], blocks: Sequence[TensorBlock]) -> Sequence[Digest | None]:
        """See `engine.interfaces.DeviceBlocks`. A group may number tensors otherwise, so the sources know the numbers of the capture."""
        found: list[Digest | None] = []
        for block in blocks:
            source = sources[block.tensor]
            key = (source.number, block.start, block.stop) if isinstance(source, ArrivingSource | KeptSource) else None
            found.append(None if key is None else self._ids.get(key))
        left = [position for position, digest in enumerate(found) if digest is None]
        for position, digest in zip(left, self._others.ids(sources, [blocks[position] for position in left]), strict=True):
            found[position] = digest
        return found

    def is_finite(self, source: ByteSource, pieces: Sequence[tuple[int, int]], mask: int, item_bytes: int) -> bool:
        """See `engine.interfaces.DeviceBlocks`. Only what is finite is kept."""
        return isinstance(source, KeptSource) or self._others.is_finite(source, pieces, mask, item_bytes)

    def note_unchanged(self, sources: Sequence[ByteSource]) -> None:
        """See `engine.interfaces.DeviceBlocks`."""
        captured = {source.number: source for source in sources if isinstance(source, ArrivingSource)}
        if self._stored is None or not captured:
            return
        for number, blocks in blocks_by_tensor(self._started).items():
            if number in captured:
                spec, ids = self._specs[number], b"".join(digest for _, digest in blocks)
                self._stored.note(spec.name, ids, partial(_is_finite, captured[number], spec))


def _is_finite(source: ByteSource, spec: TensorSpec) -> bool:
    starts = range(0, source.size_bytes, FINITE_BYTES)
    found = list[int]()

    def count(start: int) -> None:
        data = source.read(start, min(start + FINITE_BYTES, source.size_bytes))
        found.append(count_non_finite(data, spec.dtype, spec.item_bytes).non_finite)

    for_each(starts, count, min(cpu_threads(), len(starts)))
    return not any(found)

"""`DeviceBlocks`: the ids of blocks that lie on devices, and whether sampled numbers are finite, without a copy to the host."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

import numpy as np
import torch

from tensorstore_ck.common.batches import batches
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.interfaces import BlockRange, ByteSource, SampledBytes
from tensorstore_ck.state.byte_sources import CopySource, pieces
from tensorstore_ck.state.device.kernel import BlockHasher, Ids, hasher_of
from tensorstore_ck.state.device.window_copies import copies_of
from tensorstore_ck.state.rank_shares import ChainedSource

MIN_SOURCE_BYTES: Final = 256 << 10
"""Smaller tensors are read: a launch for each would take longer."""
GATHER_BYTES: Final = 64 << 20
"""How much of tensors that are not dense is gathered on the device at a time."""
_ALIGN: Final = 16
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Located(NamedTuple):
    position: int
    """Among the ranges."""
    tensor: torch.Tensor
    start: int
    stop: int


class DeviceBlocks:
    """See `engine.interfaces.DeviceBlocks`. Keeps nothing: ids are computed at each call, so none is of memory that was reused."""

    def __init__(self, hasher: Callable[[torch.device], BlockHasher | None] = hasher_of) -> None:
        self._hasher_of = hasher

    def ids(self, sources: Sequence[ByteSource], ranges: Sequence[BlockRange]) -> list[Digest | None]:
        """See `engine.interfaces.DeviceBlocks`."""
        found: list[Digest | None] = [None] * len(ranges)
        on_devices: dict[torch.device, list[_Located]] = {}
        for position, (number, start, stop) in enumerate(ranges):
            located = _locate(sources[number], start, stop)
            if located is not None and located[0].nbytes >= MIN_SOURCE_BYTES:
                on_devices.setdefault(located[0].device, []).append(_Located(position, *located))
        for device, blocks in on_devices.items():
            hasher = self._hasher_of(device)
            if hasher is None:
                continue
            try:
                with _on_stream_of(device):
                    hashed = list(_hash(hasher, blocks))
            except RuntimeError as exc:
                warnings.warn(f"blocks on {device} are hashed by the host this time: {exc}", stacklevel=2)
                continue
            for run, ids in hashed:
                for each, digest in zip(run, ids, strict=True):
                    found[each.position] = Digest(digest.tobytes())
        return found

    def is_finite(self, source: ByteSource, sampled: SampledBytes, mask: int, item_bytes: int) -> bool:
        """See `engine.interfaces.DeviceBlocks`."""
        located = _locate(source, 0, source.size_bytes)
        if located is None or not _is_dense(located[0]):
            return False
        tensor = located[0]
        with _on_stream_of(tensor.device):
            words = tensor.view(-1).view(_WORDS[item_bytes])
            start, size, step = sampled.start // item_bytes, sampled.size_bytes // item_bytes, sampled.step_bytes // item_bytes
            sample = words.as_strided((sampled.runs, size), (step, 1), words.storage_offset() + start)
            return not bool(((sample & mask) == mask).any())


def device_blocks() -> DeviceBlocks | None:
    """None as long as this process has no device."""
    return DeviceBlocks() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _locate(source: ByteSource, start: int, stop: int) -> tuple[torch.Tensor, int, int] | None:
    """The tensor that has a range of a source, and where."""
    if isinstance(source, ChainedSource):
        for part in source.sources:
            if start < part.size_bytes:
                return _locate(part, start, stop) if stop <= part.size_bytes else None
            start, stop = start - part.size_bytes, stop - part.size_bytes
        return None
    if isinstance(source, CopySource) and isinstance(source.tensor, torch.Tensor):
        return source.tensor, start, stop
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _hash(hasher: BlockHasher, blocks: Sequence[_Located]) -> Iterator[tuple[Sequence[_Located], Ids]]:
    """Blocks of one device, and their ids: of dense tensors all at once, of others a few at a time."""
    dense = [each for each in blocks if _is_dense(each.tensor)]
    if dense:
        addresses = np.array([each.tensor.data_ptr() + each.start for each in dense], np.int64)
        yield dense, hasher.hash(addresses, np.array([each.stop - each.start for each in dense], np.int64))
    strided = [each for each in blocks if not _is_dense(each.tensor)]
    for run in batches(strided, lambda each: each.stop - each.start + _ALIGN, GATHER_BYTES, max(len(strided), 1)):
        yield run, _hash_gathered(hasher, run)


def _hash_gathered(hasher: BlockHasher, blocks: Sequence[_Located]) -> Ids:
    sizes = np.array([each.stop - each.start for each in blocks], np.int64)
    starts = np.concatenate(([0], np.cumsum(-(-sizes // _ALIGN) * _ALIGN)))
    memory = torch.empty(int(starts[-1]), dtype=torch.uint8, device=blocks[0].tensor.device)
    for each, at in zip(blocks, starts.tolist(), strict=False):
        item_bytes, position = each.tensor.itemsize, at
        for index, count in pieces(tuple(each.tensor.shape), each.start // item_bytes, each.stop // item_bytes):
            elements = each.tensor[index].resolve_conj().resolve_neg()
            until = position + count * item_bytes
            memory[position:until].view(elements.dtype).view(elements.shape).copy_(elements)
            position = until
    return hasher.hash(starts[:-1] + memory.data_ptr(), sizes)


def _on_stream_of(device: torch.device) -> AbstractContextManager[object]:
    """The stream that reads tensors, which follows the work that the caller had queued."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[object] = torch.cuda.stream(copies_of(device).out_stream)
    return context

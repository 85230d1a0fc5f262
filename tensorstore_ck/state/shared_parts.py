"""Reads the parts of a snapshot once for all ranks of a group, if a rank needs many of them.

A rank that restores its own share needs few parts. On another layout, such as another ZeRO stage, it needs a piece of each tensor, and the
pieces lie in the parts of nearly all ranks. If one rank needs many parts, each rank reads an equal share of the stored parts, and all ranks
gather them; every rank checks the parts that it uses. The ranks agree first, so that a failing rank leaves none waiting.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from tensorstore_ck.engine.engine import Engine, decode_named_part
from tensorstore_ck.engine.interfaces import WantedBox
from tensorstore_ck.engine.read.block_reader import WantedBlock
from tensorstore_ck.engine.read.snapshot_reader import MergedSnapshot, SnapshotReader
from tensorstore_ck.errors import CorruptObjectError, StoreError
from tensorstore_ck.format.part import Part, part_name
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.state.broadcast_reads import Agree, device_of

FEW_PARTS: Final = 8
"""How many parts a rank may read by itself, beyond twice its share of them."""


class ManyPartsError(Exception):
    """A rank needs more parts than it reads by itself. Never leaves this file."""


class SharedParts:
    """The parts of a snapshot, as one rank of a group reads them."""

    def __init__(self, engine: Engine, info: SnapshotRow, group: "dist.ProcessGroup", agree: Agree) -> None:
        """`agree`: see `broadcast_reads`."""
        self._engine = engine
        self._record = engine.recent_record(info)
        self._group = group
        self._agree = agree
        self._gathered: Sequence[memoryview] = ()
        self._opened: set[int] = set()
        parts, ranks = len(self._record.parts), group.size()
        self._limit = FEW_PARTS + 2 * -(-parts // ranks)
        self._is_limited = False

    def read(self, record: Record, rank: int) -> Part:
        """The part of a rank: see `Engine.read_part`. Raises `ManyPartsError`: within `blocks_of`."""
        if self._gathered and self._gathered[rank]:
            try:
                return decode_named_part(bytes(self._gathered[rank]), record, rank)
            except CorruptObjectError:
                pass  # this rank reads it again, and says what is wrong
        self._opened.add(rank)
        if self._is_limited and len(self._opened) > self._limit:
            raise ManyPartsError
        return self._engine.read_part(record, rank)

    def blocks_of(self, content: SnapshotReader | MergedSnapshot, wanted: Sequence[WantedBox]) -> list[WantedBlock]:
        """The blocks that hold the boxes. All ranks of the group call it, or `take_part`, once."""
        self._is_limited = True
        try:
            blocks = content.blocks_of(wanted)
        except ManyPartsError:
            blocks = None
        finally:
            self._is_limited = False
        self.take_part(is_near=blocks is not None)
        return content.blocks_of(wanted) if blocks is None else blocks

    def take_part(self, *, is_near: bool = True) -> None:
        """Shares the parts if a rank of the group needs many of them. `is_near`: this rank needs few."""
        own: list[bytes] = []
        is_shared = False

        def read_share(near: bytes) -> None:
            nonlocal is_shared
            if not near[0]:
                is_shared = True
                own.extend(map(self._read_stored, self._share(self._group.rank())))

        self._agree(bytes([255 if is_near else 0]), read_share)
        if is_shared:
            shares = gather_bytes(own, [len(self._share(rank)) for rank in range(self._group.size())], self._group)
            self._gathered = [data for share in shares for data in share]

    def _share(self, rank: int) -> range:
        parts, ranks = len(self._record.parts), self._group.size()
        return range(rank * parts // ranks, (rank + 1) * parts // ranks)

    def _read_stored(self, rank: int) -> bytes:
        """The bytes of a part; none if this rank cannot read it. A rank that needs the part then reads it itself, and raises the error."""
        try:
            return self._engine.backend.get(part_name(self._record.parts[rank]), max_bytes=MAX_OBJECT_BYTES)
        except StoreError:
            return b""


class PartSharingContent:
    """`SnapshotContent` over parts that the ranks of a group share."""

    def __init__(self, content: SnapshotReader | MergedSnapshot, parts: SharedParts) -> None:
        self._content = content
        self._parts = parts
        self.layout = content.layout
        self.values: Sequence[Any] = content.values
        self.blob = content.blob
        self.read = content.read
        self.read_range = content.read_range

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        """Reads and verifies boxes of tensors; once, on all ranks of the group."""
        self._content.fetch(self._parts.blocks_of(self._content, list(wanted)))


def gather_bytes(own: Sequence[bytes], counts: Sequence[int], group: "dist.ProcessGroup") -> list[list[memoryview]]:
    """The byte strings of all ranks of a group; `counts`: how many each has."""
    device = device_of(group)
    lengths = torch.zeros(max(counts), dtype=torch.int64)
    lengths[: len(own)] = torch.tensor([len(data) for data in own], dtype=torch.int64)
    all_lengths = _gather(lengths.to(device), group).cpu().tolist()
    data = torch.zeros(max(map(sum, all_lengths)), dtype=torch.uint8)
    joined = bytearray().join(own)
    if joined:
        data[: len(joined)] = torch.frombuffer(joined, dtype=torch.uint8)
    received = _gather(data.to(device), group).cpu().numpy()
    gathered = []
    for rank, count in enumerate(counts):
        rest, strings = memoryview(received[rank].data), []
        for size in all_lengths[rank][:count]:
            strings.append(rest[:size])
            rest = rest[size:]
        gathered.append(strings)
    return gathered


def _gather(tensor: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
    """The tensors of all ranks, of the same shape, in rows."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather(list(gathered.unbind()), tensor, group=group)
    return gathered

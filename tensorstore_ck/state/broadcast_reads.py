"""Reads each tensor that all ranks of a group want whole on one rank only, and distributes it by the group's broadcast.

Before the first broadcast, the ranks agree on these tensors and on the success of the reads: a failing rank leaves no other rank waiting
in a collective.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from tensorstore_ck.engine.interfaces import ByteTarget, SnapshotContent, WantedBox
from tensorstore_ck.engine.read.block_reader import BufferTarget, deliver

PIECE_BYTES: Final = 256 << 20
"""Bytes in one broadcast."""

Agree = Callable[[bytes, Callable[[bytes], None]], None]
"""All ranks call it with a bit per tensor and a function, which it calls with the bits that are set on all ranks."""


class BroadcastContent:
    """`SnapshotContent` that reads each tensor that all ranks want whole only once."""

    def __init__(self, content: SnapshotContent, group: "dist.ProcessGroup", agree: Agree) -> None:
        self._content = content
        self._group = group
        self._agree = agree
        self.layout = content.layout
        self.values: Sequence[Any] = content.values
        self.blob = content.blob
        self.read_range = content.read_range

    def read(self, targets: Mapping[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors, by their numbers in the layout."""
        tensors = self.layout.tensors
        self.read_boxes(WantedBox(tensor, tensors[tensor].whole, target) for tensor, target in targets.items())

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        """Reads and verifies boxes of tensors."""
        every = list(wanted)
        tensors = self.layout.tensors
        whole = np.zeros(len(tensors), bool)
        whole[[box.tensor for box in every if box.box == tensors[box.tensor].whole]] = True
        whole &= np.array([spec.size_bytes > 0 for spec in tensors], bool)
        owners: dict[int, int] = {}
        read: dict[int, bytearray] = {}

        def work(bits: bytes) -> None:
            common = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(tensors)).astype(bool)
            owners.update(_owners([(number, tensors[number].size_bytes) for number in np.flatnonzero(common).tolist()], self._group.size()))
            read.update({number: bytearray(tensors[number].size_bytes) for number, rank in owners.items() if rank == self._group.rank()})
            own = [WantedBox(number, tensors[number].whole, BufferTarget(memoryview(memory))) for number, memory in read.items()]
            self._content.read_boxes([*own, *(box for box in every if box.tensor not in owners)])

        self._agree(np.packbits(whole).tobytes(), work)
        targets: dict[int, list[ByteTarget]] = {}
        for box in every:
            targets.setdefault(box.tensor, []).append(box.target)
        for number, rank in owners.items():
            self._pass_on(number, rank, read.pop(number, None), targets[number])

    def _pass_on(self, tensor: int, owner: int, data: bytearray | None, targets: Sequence[ByteTarget]) -> None:
        """Broadcasts a tensor in pieces of whole elements."""
        spec = self.layout.tensors[tensor]
        device = device_of(self._group)
        step = max(1, PIECE_BYTES // spec.item_bytes) * spec.item_bytes
        for start in range(0, spec.size_bytes, step):
            size = min(step, spec.size_bytes - start)
            if data is None:
                piece = torch.empty(size, dtype=torch.uint8, device=device)
            else:
                piece = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).to(device)
            dist.broadcast(piece, group=self._group, group_src=owner)
            received = memoryview(piece.cpu().numpy().data)
            for target in targets:
                deliver(target, start, received)


def _owners(sizes: Sequence[tuple[int, int]], ranks: int) -> dict[int, int]:
    """Tensor -> the rank that reads it; equal on all ranks, with about the same number of bytes for each."""
    load = [0] * ranks
    owners = {}
    for number, size_bytes in sorted(sizes, key=lambda item: (-item[1], item[0])):
        rank = load.index(min(load))
        load[rank] += size_bytes
        owners[number] = rank
    return owners


def device_of(group: "dist.ProcessGroup") -> torch.device:
    """The device of the group's collectives: this process's GPU with nccl, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")

"""Finds the part of a snapshot that comes from another one, its base. Compares block ids, and reads no data of tensors."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.describe.contents import OpenSnapshot, Tensor
from tensorstore_ck.maintenance.describe.diff import blocks_of

MAX_CANDIDATES: Final = 8
"""The most tensors of the base, for each block, that are compared with a tensor of another name: many may have a block of zeros."""

Share = Literal["equal", "partly", "none"]


@dataclass(frozen=True, slots=True)
class ContainedTensor:
    """How much of one tensor is in the base."""

    name: str
    share: Share
    equal_bytes: int
    """Bytes of the blocks that the tensor `base` has at the same elements."""
    size_bytes: int
    base: str | None
    """The tensor of the base that has them: of the same dtype and shape, and of the same name unless the base has none of that name."""


@dataclass(frozen=True, slots=True)
class Containment:
    """Which part of a snapshot is its base. States of single ranks are left out."""

    snapshot: Snapshot
    base: Snapshot
    tensors: tuple[ContainedTensor, ...]
    equal_bytes: int
    tensor_bytes: int
    """The size of all tensors of the snapshot."""
    base_bytes: int
    """The size of all tensors of the base."""
    signed_by: str | None
    """The key of the newest valid signature of the base; None: there is none for a branch or tag of its address."""
    is_trusted: bool
    """The user's trust file names that key for the branch or tag."""

    def __repr__(self) -> str:
        equal, whole = human_bytes(self.equal_bytes), human_bytes(self.base_bytes)
        return f"Containment({self.snapshot!r} has {equal} of the {whole} of {self.base!r})"


_Key = tuple[object, ...]
"""The form of a tensor, and elements and content of one of its blocks."""


def compare_with_base(engine: Engine, info: SnapshotRow, base_info: SnapshotRow, *, signed_by: str | None, is_trusted: bool) -> Containment:
    """Compares each tensor with the one of its name; where the base has none of that name, with one that has its blocks."""
    tensors, base = OpenSnapshot(engine, info).shared.tensors, OpenSnapshot(engine, base_info).shared.tensors
    found: dict[str, tuple[str | None, int]] = {}
    for name, tensor in tensors.items():
        if name in base:
            found[name] = name, _equal_bytes(tensor, base[name])
    taken, index = {name for name, (_, equal) in found.items() if equal}, dict[_Key, deque[str]]()
    if len(found) < len(tensors):
        for name, tensor in base.items():
            for key in {key for key, _ in _keys(tensor)} if name not in taken else ():
                index.setdefault(key, deque()).append(name)
    for name, tensor in tensors.items():
        if name not in found:
            found[name] = _take_most_alike(tensor, index, taken)
    rows = []
    for name, tensor in tensors.items():
        (base_name, equal), size = found[name], tensor.spec.size_bytes
        is_equal = equal == size and base_name is not None and tensor.spec[1:4] == base[base_name].spec[1:4]
        share: Share = "equal" if is_equal else "partly" if equal else "none"
        rows.append(ContainedTensor(name, share, equal, size, base=base_name if share != "none" else None))
    return Containment(
        snapshot=Snapshot.from_info(info),
        base=Snapshot.from_info(base_info),
        tensors=tuple(rows),
        equal_bytes=sum(row.equal_bytes for row in rows),
        tensor_bytes=sum(row.size_bytes for row in rows),
        base_bytes=sum(tensor.spec.size_bytes for tensor in base.values()),
        signed_by=signed_by,
        is_trusted=is_trusted,
    )


def _keys(tensor: Tensor) -> Iterator[tuple[_Key, int]]:
    """The key and the bytes of each block of a tensor. The key has everything that must be equal, except the name."""
    form = tensor.spec[1:4]
    for block in blocks_of(tensor):
        yield (form, block.boxes, block.content, block.is_inline), block.size_bytes


def _equal_bytes(tensor: Tensor, base: Tensor) -> int:
    known = {key for key, _ in _keys(base)}
    return sum(size for key, size in _keys(tensor) if key in known)


def _take_most_alike(tensor: Tensor, index: dict[_Key, deque[str]], taken: set[str]) -> tuple[str | None, int]:
    """The tensor of the base that has the most bytes of `tensor`, and their number. It is compared with no other tensor after that."""
    equal = Counter[str]()
    for key, size in _keys(tensor):
        for name in _candidates(index.get(key, deque()), taken):
            equal[name] += size
    if not equal:
        return None, 0
    (name, equal_bytes), *_ = equal.most_common(1)
    taken.add(name)
    return name, equal_bytes


def _candidates(names: deque[str], taken: set[str]) -> list[str]:
    """The first names that are not taken. Drops taken names before them, so that no later call meets these again."""
    found: list[str] = []
    while names and len(found) < MAX_CANDIDATES:
        name = names.popleft()
        if name not in taken:
            found.append(name)
    names.extendleft(reversed(found))
    return found
